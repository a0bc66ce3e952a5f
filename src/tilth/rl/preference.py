"""Preference losses: from the scores of a chosen and a rejected answer to a loss, its gradient and metrics.

A score is one number for each answer: the sum of its log-probs (DPO and its variants) or the output of a reward model
(Bradley-Terry). A loss is a function of scores alone, so two passes over the tokens give its exact gradient: one
without a gradient computes the scores of all pairs, ``preference_loss`` the derivative of the loss by each score, and a
second one adds up derivative times gradient of score in any split, over micro-batches and workers alike.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tilth.core.errors import RecipeError
from tilth.rl.metrics import Metric
from tilth.rl.registry import Entry, Scope, build, register

Scores = Literal["logprobs", "rewards"]
"""Kind of scores: summed log-probs of answers, or outputs of a reward model."""


@dataclass(frozen=True)
class Answers:
    """One side of m pairs. scores: float64 [m]; reference: scores of the reference model; counts: tokens, float64."""

    scores: Tensor
    reference: Tensor
    counts: Tensor


@dataclass(frozen=True)
class PreferenceResult:
    """Result of ``preference_loss``, float64, detached.

    loss: weighted sum over pairs; losses [m]: before weights; chosen, rejected [m]: derivatives of the loss by the
    scores.
    """

    loss: Tensor
    losses: Tensor
    chosen: Tensor
    rejected: Tensor
    metrics: dict[str, Metric]


class PreferenceLoss(Entry):
    """A loss of pairs by the difference of two rewards, less a margin."""

    @property
    def scope(self) -> Scope:
        return "rows"

    @property
    def compares(self) -> Scores:
        """Kind of scores that the loss compares."""
        return "logprobs"

    def rewards(self, answers: Answers) -> Tensor:
        """Return the reward of each answer, differentiable in its score: [m]."""
        raise NotImplementedError

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        """Return the loss of each pair from both rewards: [m]. margins: how far chosen should be ahead (data)."""
        raise NotImplementedError


class Implicit(PreferenceLoss):
    """DPO's implicit reward: beta * (log-prob - that of the reference), of the whole answer or a token's mean."""

    beta: float = Field(0.1, gt=0, description="scale of the implicit reward: how far the policy may go for it")
    margin: float = Field(0.0, description="by how much the chosen answer's reward should be ahead")
    average: bool = Field(False, description="log-probs a token instead of summed ones")

    needs: ClassVar[tuple[str, ...]] = ("ref_logprobs",)

    def rewards(self, answers: Answers) -> Tensor:
        apart = answers.scores - answers.reference
        return self.beta * (apart / answers.counts if self.average else apart)


class _Smoothed(PreferenceLoss):
    """Logistic loss of the difference of rewards, smoothed."""

    margin: float = Field(0.0, description="by how much the chosen answer's reward should be ahead")
    smoothing: float = Field(0.0, ge=0, lt=0.5, description="share of the labels that are taken to be wrong")

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        right, wrong = _logistic(chosen - rejected - self.margin - margins)
        return (1 - self.smoothing) * right + self.smoothing * wrong


@register("preferences", "sigmoid")
class Sigmoid(_Smoothed, Implicit):
    """DPO (arXiv 2305.18290, eq. 7): -log sigmoid(x), x the difference of implicit rewards.

    smoothing: the share e of labels taken to be wrong (conservative DPO), (1 - e) L(x) + e L(-x). average: DPO with
    normalised lengths (TRL's sigmoid_norm). margin, or a column of it: DPO with an offset (arXiv 2402.10571, eq. 8).
    """


@register("preferences", "robust")
class Robust(Implicit):
    """Robust DPO (arXiv 2403.00409, eq. 12): ((1 - e) L(x) - e L(-x)) / (1 - 2e), unbiased if a share e is flipped."""

    smoothing: float = Field(0.1, ge=0, lt=0.5, description="share of the labels that are wrong")

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        right, wrong = _logistic(chosen - rejected - self.margin - margins)
        return ((1 - self.smoothing) * right - self.smoothing * wrong) / (1 - 2 * self.smoothing)


@register("preferences", "hinge")
class Hinge(Implicit):
    """max(0, 1 - x) (SLiC-HF, arXiv 2305.10425, by implicit rewards as in arXiv 2309.06657)."""

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        return torch.relu(1 - (chosen - rejected - self.margin - margins))


@register("preferences", "ipo")
class Ipo(PreferenceLoss):
    """IPO (arXiv 2310.12036, eq. 17): (h - 1 / (2 beta))^2, h the difference of log-ratios to the reference.

    As commonly coded, and in the paper's experiments, h is of log-probs a token (the paper writes sums, with which the
    square grows with the length). It has a margin of its own: 1 / (2 beta).
    """

    beta: float = Field(0.1, gt=0, description="the paper's tau: 1 / (2 beta) is the difference that is aimed at")

    needs: ClassVar[tuple[str, ...]] = ("ref_logprobs",)

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * (answers.scores - answers.reference) / answers.counts

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        if (margins != 0).any():
            raise RecipeError(
                "ipo has its own margin, 1 / (2 beta), and takes none from the data; remove the column margin",
                key="margin",
            )
        return ((chosen - rejected) / self.beta - 1 / (2 * self.beta)) ** 2


@register("preferences", "simpo")
class SimPo(_Smoothed):
    """SimPO (arXiv 2405.14734, eq. 6): -log sigmoid(beta * (mean log-prob of chosen - of rejected) - margin).

    No reference. margin: the paper's gamma (0.3 to 1.6 with beta 2 to 2.5); TRL's CPO writes the same.
    """

    beta: float = Field(2.0, gt=0, description="scale of the reward, a token's mean log-prob")
    margin: float = Field(0.0, description="gamma: by how much the chosen answer's reward should be ahead")

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.scores / answers.counts


@register("preferences", "bradley_terry")
class BradleyTerry(PreferenceLoss):
    """A reward model's loss (arXiv 2203.02155, eq. 1): -log sigmoid(r_w - r_l - margin) + centring * (r_w + r_l)^2.

    margin: arXiv 2307.09288, eq. 2, mostly of the data. centring: keeps scores around 0, which the first term leaves
    free (arXiv 2312.09244; 0.01 there and in TRL).
    """

    margin: float = Field(0.0, description="by how much the chosen answer's score should be ahead")
    centring: float = Field(0.0, ge=0, description="weight of the squared sum of both scores")

    compares: ClassVar[Scores] = "rewards"

    def rewards(self, answers: Answers) -> Tensor:
        return answers.scores

    def losses(self, chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
        right, _ = _logistic(chosen - rejected - self.margin - margins)
        return right + self.centring * (chosen + rejected) ** 2


def _logistic(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return L(x) and L(-x), L(x) = -log sigmoid(x)."""
    return -F.logsigmoid(x), -F.logsigmoid(-x)


def pair_weights(prompts: Tensor) -> Tensor:
    """Return the weight of each pair, float64 [m], sum 1: every prompt has the same weight, however many pairs it has.

    prompts: any integers [m], equal where the prompt is. (arXiv 2203.02155, section 3.5: all pairs of a prompt are one
    element of the batch, or the model overfits.)
    """
    _, index, counts = torch.unique(prompts, return_inverse=True, return_counts=True)
    return 1.0 / (counts[index].to(torch.float64) * max(len(counts), 1))


def preference_loss(
    name: str,
    *,
    chosen: Tensor,
    rejected: Tensor,
    counts: tuple[Tensor, Tensor] | None = None,
    reference: tuple[Tensor, Tensor] | None = None,
    margins: Tensor | None = None,
    weights: Tensor | None = None,
    sft: float = 0.0,
    **options: Any,
) -> PreferenceResult:
    """Return the loss of m pairs and its derivatives by the scores of their answers.

    Args:
        name: one of ``names()["preferences"]``; options: its fields.
        chosen, rejected: [m], scores: sums of log-probs over the answer's tokens, or outputs of a reward model.
        counts: tokens of chosen and of rejected answers, [m] each; only for losses that average, and for ``sft``.
        reference: sums of the reference's log-probs, [m] each, where the loss needs them.
        margins: [m], further margins of single pairs.
        weights: [m], together 1; none: all the same. See ``pair_weights``.
        sft: weight of the negative log-likelihood of the chosen answer, a token's mean of each (RPO, arXiv 2404.19733,
            eq. 1, over the answer's tokens; TRL's ``sft`` is a mean over the tokens of all answers together).

    Metrics (means over pairs): rewards/chosen, rewards/rejected, rewards/margin, rewards/accuracy (ties count half);
    of log-probs also logprobs/chosen and logprobs/rejected.

    Raises: RecipeError (unknown loss or option, a missing reference, sft of a reward model).
    """
    loss = build("preferences", name, options, PreferenceLoss)
    if loss.needs and reference is None:
        raise RecipeError(f"{name} needs the log-probs of a reference", key="reference")
    if sft and loss.compares == "rewards":
        raise RecipeError(f"sft = {sft}: {name} compares scores of a reward model, which has no likelihood", key="sft")
    won, lost = (_answers(i, s, counts, reference) for i, s in enumerate((chosen, rejected)))
    extra = torch.zeros_like(won.counts) if margins is None else margins.detach().to(torch.float64)
    weights = torch.full_like(extra, 1 / max(len(extra), 1)) if weights is None else weights.to(extra)
    with torch.enable_grad():
        ahead, behind = loss.rewards(won), loss.rewards(lost)
        losses = loss.losses(ahead, behind, extra) - sft * won.scores / won.counts
        total = (weights * losses).sum()
        by = torch.autograd.grad(total, (won.scores, lost.scores))
    rewards = ahead.detach(), behind.detach()
    metrics = _metrics(*rewards, *((won.scores, lost.scores) if loss.compares == "logprobs" else ()))
    return PreferenceResult(total.detach(), losses.detach(), by[0], by[1], metrics)


def _answers(
    side: int, scores: Tensor, counts: tuple[Tensor, Tensor] | None, reference: tuple[Tensor, Tensor] | None
) -> Answers:
    scores = scores.detach().to(torch.float64).requires_grad_()
    tokens = torch.ones_like(scores) if counts is None else counts[side].to(torch.float64).clamp(min=1)
    theirs = torch.zeros_like(scores) if reference is None else reference[side].detach().to(torch.float64)
    return Answers(scores, theirs.detach(), tokens.detach())


def _metrics(ahead: Tensor, behind: Tensor, *logprobs: Tensor) -> dict[str, Metric]:
    apart = ahead - behind
    columns = {
        "rewards/chosen": ahead,
        "rewards/rejected": behind,
        "rewards/margin": apart,
        "rewards/accuracy": 0.5 + 0.5 * torch.sign(apart),
    }
    columns |= dict(zip(("logprobs/chosen", "logprobs/rejected"), logprobs))
    return {name: Metric(column.detach().sum(), len(column), "mean") for name, column in columns.items()}
