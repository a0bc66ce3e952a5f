"""A policy whose every answer can be listed: what a correction does to the gradient, exactly, without sampling.

Three tokens, of which 0 ends an answer, at most four of them; logits depend on the place and the token before. The
engine samples from logits with noise. Rewards are normal random numbers, advantages rewards minus the engine's mean.

``python -m tests.rl.bandit`` prints the table of docs/packages/rl-algorithms.md.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from tilth import rl

VOCABULARY, LONGEST = 3, 4
ROWS = {
    "none": ("none", {}),
    "token, no bound": ("decoupled_token_is", {"max_weight": 0.0}),
    "token TIS": ("decoupled_token_is", {}),
    "token IcePop": ("decoupled_token_icepop", {}),
    "sequence, no bound": ("decoupled_seq_is", {"max_weight": 0.0}),
    "sequence TIS": ("decoupled_seq_is", {}),
    "sequence MIS": ("decoupled_seq_mis", {}),
    "geometric, no bound": ("custom", {"level": "geometric", "max_weight": 0.0}),
}
NOISE = (0.3, 1.0)
PROBLEMS = 20


def answers():
    """Every answer: tokens up to and with the first 0, or four of them."""
    found, open_ones = [], [()]
    while open_ones:
        head = open_ones.pop()
        for token in range(VOCABULARY):
            answer = (*head, token)
            (found if token == 0 or len(answer) == LONGEST else open_ones).append(answer)
    return found


ANSWERS = answers()
LENGTHS = torch.tensor([len(a) for a in ANSWERS])
PLACES = torch.tensor([(t, a[t - 1] if t else 0, a[t]) for a in ANSWERS for t in range(len(a))])
ROW = torch.repeat_interleave(torch.arange(len(ANSWERS)), LENGTHS)
MASK = torch.ones(len(PLACES), dtype=torch.bool)


def logprobs(logits):
    """Of each token of each answer, one answer behind another: [total]."""
    return logits.log_softmax(-1)[PLACES[:, 0], PLACES[:, 1], PLACES[:, 2]]


def of_answers(tokens):
    """Probability of each answer, [n]."""
    return torch.zeros(len(ANSWERS), dtype=torch.float64).index_add(0, ROW, tokens.detach()).exp()


@dataclass
class Problem:
    """The policy's logits, the engine's, and a reward for each answer; all from a seed."""

    seed: int
    noise: float

    def __post_init__(self):
        random = torch.Generator().manual_seed(self.seed)
        shape = (LONGEST, VOCABULARY, VOCABULARY)
        self.logits = torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
        noise = torch.randn(shape, generator=random, dtype=torch.float64)
        self.rewards = torch.randn(len(ANSWERS), generator=random, dtype=torch.float64)
        self.ours, self.theirs = logprobs(self.logits), logprobs(self.logits.detach() + self.noise * noise)
        self.likely = of_answers(self.theirs)
        self.advantages = self.rewards - (self.likely * self.rewards).sum()

    @cached_property
    def truth(self):
        """Gradient of the expected reward by the logits, by differentiating the sum over all answers."""
        per_answer = torch.zeros(len(ANSWERS), dtype=torch.float64).index_add(0, ROW, self.ours).exp()
        return torch.autograd.grad((per_answer * self.rewards).sum(), self.logits, retain_graph=True)[0].flatten()

    @cached_property
    def scores(self):
        """Gradient of the log-prob of each token by the logits: [total, parameters]."""
        eye = torch.eye(len(PLACES), dtype=torch.float64)
        (found,) = torch.autograd.grad(self.ours, self.logits, eye, is_grads_batched=True, retain_graph=True)
        return found.flatten(1)

    def correct(self, name, **options):
        """One call with all answers: what is of a row does not depend on the others."""
        columns = {"old_logprobs": self.ours, "rollout_logprobs": self.theirs, "mask": MASK, "lengths": LENGTHS}
        return rl.correct(name, **columns, advantages=self.advantages[ROW], **options)

    def expected(self, found):
        """Expected gradient of REINFORCE's loss on the engine's answers, by the loss itself: each answer weighs as it
        is likely."""
        result = rl.policy_loss(
            "reinforce",
            logprobs=self.ours,
            old_logprobs=self.ours,
            advantages=(self.likely * self.advantages)[ROW],
            mask=found.mask,
            lengths=LENGTHS,
            weights=found.weights,
            aggregation="seq-mean-token-sum",
            denominator=1.0,
        )
        return -torch.autograd.grad(result.loss, self.logits, retain_graph=True)[0].flatten()

    def moments(self, found):
        """Mean, and trace of the covariance, of the gradient of one answer of the engine."""
        weights = found.mask.double() if found.weights is None else found.weights * found.mask
        tokens = (weights * self.advantages[ROW])[:, None] * self.scores
        gradients = torch.zeros(len(ANSWERS), tokens.shape[1], dtype=torch.float64).index_add(0, ROW, tokens)
        mean = self.likely @ gradients
        return mean, float(self.likely @ (gradients**2).sum(1) - (mean**2).sum())

    def effect(self, name, **options):
        """Bias, as a share of the gradient's length, and variance of one answer, as a share of its square."""
        mean, variance = self.moments(self.correct(name, **options))
        length = float(self.truth.norm())
        return float((mean - self.truth).norm()) / length, variance / length**2


def effects(noise):
    """Name -> means over problems of bias and variance."""
    problems = [Problem(seed, noise) for seed in range(PROBLEMS)]
    found = {}
    for title, (name, options) in ROWS.items():
        each = [p.effect(name, **options) for p in problems]
        found[title] = tuple(sum(values) / PROBLEMS for values in zip(*each))
    return found


def table(found):
    """Lines of Markdown; found: ``effects`` of each noise."""
    heads = [f"{what}, noise {noise}" for noise in NOISE for what in ("bias", "variance")]
    lines = ["| correction | preset | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for title, (name, options) in ROWS.items():
        shown = "".join(f", {k}={v:g}" if isinstance(v, float) else f", {k}={v}" for k, v in options.items())
        numbers = [f"{100 * bias:.0f} % | {variance:.0f}" for bias, variance in (found[n][title] for n in NOISE)]
        lines.append(f"| {title} | `{name}`{shown} | " + " | ".join(numbers) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table({noise: effects(noise) for noise in NOISE})))
