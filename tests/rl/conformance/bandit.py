"""Bias and variance of the policy gradient of each estimator, exactly: every batch that a small bandit can give.

Two prompts, an easy and a hard one. An answer is a chain of up to four tokens; after each of the first three the policy
decides whether to stop, with a probability of its own, so an answer is its length and longer ones have longer
gradients. All multisets of answers are enumerated with their probabilities, so no figure has an error of sampling.
Equal samples: four answers to each prompt; of ReMax three and the greedy one.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilth import rl

Outcome = tuple[tuple[int, ...], ...]
"""Length of each answer to each prompt."""
SUM, MEAN = "seq-mean-token-sum", "seq-mean-token-mean"


@dataclass(frozen=True)
class Bandit:
    """stops: probability [prompt][token] that the answer ends behind the token; rewards: [prompt][length - 1]."""

    stops: tuple[tuple[float, ...], ...] = ((0.3, 0.5, 0.6), (0.5, 0.4, 0.2))
    rewards: tuple[tuple[float, ...], ...] = ((0.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0))

    def probabilities(self, prompt: int) -> list[float]:
        """Of answers of length 1, 2, ..."""
        left, found = 1.0, []
        for stop in (*self.stops[prompt], 1.0):
            found.append(left * stop)
            left *= 1 - stop
        return found

    def likeliest(self, prompt: int) -> int:
        """Length of the greedy answer: it stops where that is likelier than going on."""
        stops = (*self.stops[prompt], 1.0)
        return next(n for n, stop in enumerate(stops, 1) if stop > 0.5)

    def slope(self, prompt: int, length: int, token: int) -> float:
        """d log pi(token's decision) / d logit of stopping there."""
        stop = self.stops[prompt][token] if token < len(self.stops[prompt]) else 1.0
        return (1.0 if token == length - 1 else 0.0) - stop

    def gradient(self) -> Tensor:
        """Of the mean reward over prompts, by all logits [prompts, tokens]: the truth."""
        found = torch.zeros(len(self.stops), len(self.stops[0]), dtype=torch.float64)
        for prompt in range(len(self.stops)):
            for i, p in enumerate(self.probabilities(prompt)):
                for token in range(min(i + 1, found.shape[1])):
                    found[prompt, token] += p * self.rewards[prompt][i] * self.slope(prompt, i + 1, token)
        return found / len(self.stops)

    def outcomes(self, group: int) -> Iterator[tuple[Outcome, float]]:
        """Every multiset of ``group`` answers to each prompt, and its probability."""
        each = [list(self._multisets(prompt, group)) for prompt in range(len(self.stops))]
        for chosen in itertools.product(*each):
            yield tuple(lengths for lengths, _ in chosen), math.prod(p for _, p in chosen)

    def _multisets(self, prompt: int, group: int) -> Iterator[tuple[tuple[int, ...], float]]:
        p = self.probabilities(prompt)
        for lengths in itertools.combinations_with_replacement(range(1, len(p) + 1), group):
            ways = math.factorial(group)
            for count in Counter(lengths).values():
                ways //= math.factorial(count)
            yield lengths, ways * math.prod(p[n - 1] for n in lengths)


@dataclass(frozen=True)
class Contender:
    """An estimator as it is used: options, aggregation; greedy: one sample of each prompt is its greedy answer."""

    title: str
    name: str
    aggregation: str = SUM
    options: dict[str, Any] = field(default_factory=dict)
    greedy: bool = False


CONTENDERS = (
    Contender("REINFORCE, no baseline", "reinforce_pp", options={"whiten": False}),
    Contender("GRPO", "grpo", MEAN),
    Contender("GRPO, token-mean (DAPO)", "grpo", "token-mean"),
    Contender("GRPO, sum over tokens", "grpo"),
    Contender("Dr.GRPO", "grpo_no_std"),
    Contender("RLOO", "rloo"),
    Contender("REINFORCE++", "reinforce_pp"),
    Contender("REINFORCE++ with baseline", "reinforce_pp_baseline"),
    Contender("ReMax", "remax", greedy=True),
    Contender("OPO", "opo"),
)


def estimated(bandit: Bandit, who: Contender, outcome: Outcome) -> Tensor:
    """The gradient (of the reward) that a contender makes of one batch, [prompts, tokens]."""
    flat = [(prompt, n) for prompt, lengths in enumerate(outcome) for n in lengths]
    lengths = torch.tensor([n for _, n in flat])
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    columns: dict[str, Any] = {"lengths": lengths, "mask": mask, "groups": torch.tensor([p for p, _ in flat])}
    if who.greedy:
        greedy = [bandit.rewards[p][bandit.likeliest(p) - 1] for p in range(len(outcome))]
        columns["baselines"] = torch.tensor([greedy[p] for p, _ in flat])
    rewards = torch.tensor([bandit.rewards[p][n - 1] for p, n in flat], dtype=torch.float64)
    advantages = rl.estimate(who.name, rewards=rewards, **columns, **who.options).advantages
    weights = _token_weights(advantages, lengths, mask, who.aggregation)
    found, at = torch.zeros_like(bandit.gradient()), 0
    for prompt, n in flat:
        for token in range(n):
            if token < found.shape[1]:
                found[prompt, token] += weights[at + token] * bandit.slope(prompt, n, token)
        at += n
    return found


def _token_weights(advantages: Tensor, lengths: Tensor, mask: Tensor, aggregation: str) -> list[float]:
    """-d loss / d log-prob of each token, by the loss itself."""
    leaf = torch.zeros(len(mask), dtype=torch.float64, requires_grad=True)
    given = {"old_logprobs": leaf.detach(), "advantages": advantages.double(), "mask": mask, "lengths": lengths}
    rl.policy_loss("reinforce", logprobs=leaf, aggregation=aggregation, **given).loss.backward()
    return (-leaf.grad).tolist()


def measure(bandit: Bandit | None = None, group: int = 4, who: tuple[Contender, ...] = CONTENDERS) -> list[dict]:
    """A row for each contender.

    scale: length of the mean gradient along the true one, over that one's. turned: degrees between the two. noise: root
    of the variance of the gradient over the length of its mean, so that a scale, which a learning rate undoes, does not
    count. error: root of the mean squared error after the best scale, over the length of the truth.
    """
    bandit = bandit or Bandit()
    truth, found = bandit.gradient(), []
    for contender in who:
        mean, square = torch.zeros_like(truth), 0.0
        for outcome, p in bandit.outcomes(group - contender.greedy):
            one = estimated(bandit, contender, outcome)
            mean += p * one
            square += p * float((one * one).sum())
        along = float((mean * truth).sum() / (truth * truth).sum())
        cosine = along * float(truth.norm() / mean.norm())
        variance = max(square - float((mean * mean).sum()), 0.0)
        share = float((mean * truth).sum()) ** 2 / square / float((truth * truth).sum())
        found.append(
            {
                "estimator": contender.title,
                "scale": along,
                "turned": math.degrees(math.acos(min(cosine, 1.0))),
                "noise": math.sqrt(variance) / float(mean.norm()),
                "error": math.sqrt(max(1 - share, 0.0)),
            }
        )
    return found


def markdown(rows: list[dict]) -> str:
    """The table."""
    lines = ["| estimator | scale | turned by | noise | error at best scale |", "|---|---:|---:|---:|---:|"]
    for r in rows:
        lines.append(
            f"| {r['estimator']} | {r['scale']:.3f} | {r['turned']:.1f}° | {r['noise']:.2f} | {r['error']:.3f} |"
        )
    return "\n".join(lines)
