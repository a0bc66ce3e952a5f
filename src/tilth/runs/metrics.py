"""Every metric of a run, declared once: its name, unit, how parts of a step become one number, what it means.

A collector refuses a name that is not declared here, so nothing is reduced by a guess and every number in
``metrics.jsonl`` can be looked up in ``metrics_schema.json`` beside it.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, SupportsFloat

import psutil

from tilth.core.errors import TilthError
from tilth.trace.spans import Total, recorder

Reduction = Literal["mean", "sum", "max", "min", "last"]
KEYS = ("step", "attempt", "phase", "phase_step", "phase_steps", "seconds")
"""Fields of a record that are not metrics."""
OTHER = "other"


class MetricPart(Protocol):
    """Part of a metric as a loss computes it: a total over ``count`` items and how parts are put together."""

    @property
    def total(self) -> SupportsFloat: ...

    @property
    def count(self) -> SupportsFloat: ...

    @property
    def reduction(self) -> str: ...

    def __float__(self) -> float: ...


class MetricError(TilthError):
    """A metric that is not declared, or whose parts are put together otherwise than declared."""


@dataclass(frozen=True)
class MetricSpec:
    """One declared number. A name that ends in ``/*`` declares a family."""

    name: str
    unit: str
    reduction: Reduction
    description: str

    @property
    def about(self) -> str:
        """What it means, its unit and its reduction in one line, for tools that show a text beside the curve."""
        return f"{self.description} (unit: {self.unit}, reduction: {self.reduction})"


_DECLARED = (
    MetricSpec("reward/mean", "reward", "mean", "reward of a sample; missing ones are left out"),
    MetricSpec("reward/std", "reward", "mean", "spread of rewards over the samples of a step"),
    MetricSpec(
        "reward/missing", "samples", "sum", "rewards that raised, timed out or were not finite; left out of the loss"
    ),
    MetricSpec(
        "reward/heldout",
        "reward",
        "last",
        "mean reward, or its part correct where it has one, of greedy answers to the held-out prompts, without what "
        "shapes it; the accuracy, where there is one",
    ),
    MetricSpec(
        "reward/heldout/missing", "samples", "sum", "of those, answers whose reward is missing; not in the mean"
    ),
    MetricSpec("reward/heldout/part/*", "reward", "last", "of those, a named part of the reward"),
    MetricSpec("reward/timeout", "samples", "sum", "those of the missing rewards that ran out of time"),
    MetricSpec("reward/part/*", "reward", "mean", "a named part of the reward, where the function returns a dict"),
    MetricSpec(
        "accuracy/heldout",
        "share",
        "last",
        "greedy answers to the held-out prompts that are right: whose reward, or its part correct where it has one, is "
        "1; none once that of any sample was neither 0 nor 1",
    ),
    MetricSpec("loss/heldout", "nats/token", "last", "negative log-likelihood of held-out answers or documents"),
    MetricSpec("bits_per_byte/heldout", "bits/byte", "last", "the same of documents, in bits over bytes of their text"),
    MetricSpec(
        "accuracy/pairs", "share", "last", "held-out pairs in which the chosen answer is ahead; ties count half"
    ),
    MetricSpec("loss/pairs", "1", "last", "preference loss of the held-out pairs"),
    MetricSpec(
        "rewards/chosen", "reward", "mean", "reward of a chosen answer: a reward model's, or DPO's implicit one"
    ),
    MetricSpec("rewards/rejected", "reward", "mean", "the same of a rejected answer"),
    MetricSpec("rewards/margin", "reward", "mean", "by how much the chosen answer of a pair is ahead"),
    MetricSpec("rewards/accuracy", "share", "mean", "pairs in which the chosen answer is ahead; ties count half"),
    MetricSpec("logprobs/chosen", "nats", "mean", "log-prob of a chosen answer, summed over its tokens"),
    MetricSpec("logprobs/rejected", "nats", "mean", "the same of a rejected answer"),
    MetricSpec("pairs", "pairs", "sum", "pairs of answers that were learned from"),
    MetricSpec("judge/asked", "samples", "sum", "right answers whose steps the judge was asked about"),
    MetricSpec("judge/flawed", "share", "mean", "of these, those in which it says that a step is wrong"),
    MetricSpec(
        "judge/unparsed", "samples", "sum", "of these, those on which it says nothing usable; they lose no reward"
    ),
    MetricSpec("judge/version", "step", "last", "training step of the checkpoint that judges"),
    MetricSpec(
        "judge/precision", "share", "mean", "of what it says is flawed, what the task knows to be (part flawed)"
    ),
    MetricSpec("judge/recall", "share", "mean", "of what the task knows to be flawed, what it says is"),
    MetricSpec("length/mean", "tokens", "mean", "length of a completion"),
    MetricSpec("length/max", "tokens", "max", "longest completion"),
    MetricSpec("length/cut", "share", "mean", "completions that hit rollout.max_tokens before their end"),
    MetricSpec(
        "groups/flat",
        "share",
        "mean",
        "samples in groups whose rewards are all equal: no gradient under a group baseline",
    ),
    MetricSpec(
        "groups/gradient",
        "share",
        "mean",
        "groups whose rewards are not all equal: those that a group baseline learns from; gae learns from every group, "
        "but for a step whose rewards are all equal; not of groups of one",
    ),
    MetricSpec("samples", "samples", "sum", "completions generated for training"),
    MetricSpec("samples/rounds", "rounds", "sum", "times that prompts were sampled until the batch was full"),
    MetricSpec("baseline/mean", "reward", "mean", "reward of the greedy answers that samples are compared with"),
    MetricSpec(
        "baseline/missing", "samples", "sum", "greedy answers whose reward is missing; their samples are left out"
    ),
    MetricSpec(
        "samples/trained",
        "samples",
        "sum",
        "completions kept for the update; of those, overlong_filter masks what was cut",
    ),
    MetricSpec(
        "loss", "1", "mean", "the loss that was minimised; for policy losses its value is near 0, its gradient is not"
    ),
    MetricSpec("entropy", "nats", "mean", "entropy of the policy at a token"),
    MetricSpec(
        "nll/right", "nats", "mean", "negative log-likelihood of a token of a right answer, where it is in the loss"
    ),
    MetricSpec("grad_norm", "1", "mean", "global gradient norm before clipping"),
    MetricSpec("norm/grad/*", "1", "mean", "gradient norm of a layer (embedding, 0 ..., norm, head) before clipping"),
    MetricSpec("norm/weight/*", "1", "mean", "norm of a layer's weights, as they were before the step"),
    MetricSpec(
        "noise_scale",
        "sequences",
        "mean",
        "batch size at which a gradient is half noise: noise/trace over noise/signal",
    ),
    MetricSpec("noise/trace", "1", "mean", "trace of the covariance of one sequence's gradient, averaged over steps"),
    MetricSpec(
        "noise/signal", "1", "mean", "squared norm of the true gradient, averaged over steps; unbiased, so noisy"
    ),
    MetricSpec("lr", "1", "mean", "learning rate"),
    MetricSpec("ratio", "1", "mean", "probability of a token now over that when it was sampled"),
    MetricSpec("clip_low", "share", "mean", "tokens held by the lower clip, or left out for having fallen too far"),
    MetricSpec("clip_high", "share", "mean", "tokens held by the upper clip, or left out for having risen too far"),
    MetricSpec("clip_dual", "share", "mean", "tokens with a negative advantage held by the dual clip"),
    MetricSpec("truncated", "share", "mean", "tokens whose importance weight was held at the loss's cap"),
    MetricSpec("selected", "share", "mean", "tokens chosen by the first pass of clip_cov and kl_cov"),
    MetricSpec("approx_kl_k1", "nats", "mean", "KL of the update at a token, estimated as -log ratio"),
    MetricSpec("approx_kl_k3", "nats", "mean", "the same, estimated as ratio - 1 - log ratio"),
    MetricSpec("kl_coef", "1", "last", "weight of the KL penalty, where it follows algorithm.kl_target"),
    MetricSpec("entropy_coef", "1", "last", "weight of the entropy bonus, where it follows algorithm.entropy_target"),
    MetricSpec("kl_ref", "nats", "mean", "KL towards the reference at a token, as the policy loss saw it"),
    MetricSpec(
        "value/loss", "reward^2", "mean", "value loss at a token: half the squared distance to its return, clipped"
    ),
    MetricSpec("value/clipped", "share", "mean", "tokens whose value is held by critic.clip"),
    MetricSpec("value/mean", "reward", "mean", "the critic's value at a token"),
    MetricSpec("value/return", "reward", "mean", "what it should have been: the reward to come, discounted"),
    MetricSpec(
        "value/explained",
        "share",
        "mean",
        "variance of the returns that the values explain: 1 all, 0 no more than a constant would",
    ),
    MetricSpec("micro_batches/padded", "1", "sum", "empty micro-batches that ranks ran since another one had more"),
    MetricSpec("value/grad_norm", "1", "mean", "global gradient norm of the critic before clipping"),
    MetricSpec("value/lr", "1", "mean", "learning rate of the critic"),
    MetricSpec("value/skipped", "steps", "sum", "optimizer steps of the critic left out, as in steps/skipped"),
    MetricSpec(
        "mismatch/max", "nats", "max", "largest log-prob difference of a token between trainer and rollout engine"
    ),
    MetricSpec("mismatch/mean", "nats", "mean", "mean absolute log-prob difference between trainer and rollout engine"),
    MetricSpec("mismatch/k3", "nats", "mean", "KL between rollout engine and trainer, estimated as k3"),
    MetricSpec("mismatch/kl", "nats", "mean", "the same, estimated as the mean of rollout engine - trainer"),
    MetricSpec("mismatch/training_ppl", "1", "mean", "perplexity of a sample to the trainer"),
    MetricSpec("mismatch/rollout_ppl", "1", "mean", "perplexity of a sample to the rollout engine"),
    MetricSpec("mismatch/log_ppl_diff", "nats", "mean", "logarithm of the trainer's perplexity over the engine's"),
    MetricSpec("mismatch/ppl_ratio", "1", "mean", "a sample's perplexity to the trainer over that to the engine"),
    MetricSpec("mismatch/chi2_token", "1", "mean", "chi-square of trainer and engine: squared ratio of a token - 1"),
    MetricSpec("mismatch/chi2_seq", "1", "mean", "the same of a sample: squared product of its tokens' ratios - 1"),
    MetricSpec("mismatch/effective", "share", "mean", "effective sample size if each token were weighted by its ratio"),
    MetricSpec("correction/weight", "1", "mean", "importance weight of a token, bounded, before it is normalised"),
    MetricSpec("correction/effective", "share", "mean", "effective sample size of these weights"),
    MetricSpec("correction/above", "share", "mean", "tokens whose ratio is above the upper bound of weights"),
    MetricSpec("correction/below", "share", "mean", "tokens whose ratio is below the lower bound of weights"),
    MetricSpec("correction/scale", "1", "mean", "mean weight of the batch, by which weights were divided"),
    MetricSpec("correction/rejected", "share", "mean", "tokens that the correction leaves out of the loss"),
    MetricSpec("correction/rejected_rows", "share", "mean", "samples of which it leaves a token out"),
    MetricSpec("plugin/*", "1", "mean", "what a policy loss of a plugin returns beside the loss, over tokens"),
    MetricSpec("correction/rejected/*", "share", "mean", "tokens outside of the bounds of one statistic"),
    MetricSpec("tokens/generated", "tokens", "sum", "tokens that the policy chose, for training"),
    MetricSpec("tokens/baseline", "tokens", "sum", "tokens of the greedy answers that samples are compared with"),
    MetricSpec("tokens/trained", "tokens", "sum", "tokens that went through forward and backward, prompts included"),
    MetricSpec("tokens_per_second/generate", "tokens/s", "mean", "chosen tokens over the time of generating"),
    MetricSpec("tokens_per_second/train", "tokens/s", "mean", "trained tokens over the time of the update"),
    MetricSpec("mfu", "share", "mean", "model flops used, of the device's peak"),
    MetricSpec("memory/rss", "bytes", "last", "resident memory of the controller's process"),
    MetricSpec("memory/peak", "bytes", "max", "greatest resident memory so far"),
    MetricSpec("bytes/sent/*", "bytes", "sum", "what the controller sent to workers with the calls of one operation"),
    MetricSpec(
        "bytes/received/*", "bytes", "sum", "what it received with their answers; controller.payload: payload it read"
    ),
    MetricSpec("steps/skipped", "steps", "sum", "optimizer steps left out: not finite, or no token to learn from"),
    MetricSpec(
        "save/seconds", "s", "last", "from a checkpoint's copy in memory until it counted; the stall is time/save"
    ),
    MetricSpec("save/failed", "saves", "sum", "checkpoints that could not be made"),
    MetricSpec("time/*", "s", "sum", "time of a phase of the step; phases do not overlap (other: what is in none)"),
)
METRICS = {m.name: m for m in _DECLARED}
_RATES = {"generate": "tokens_per_second/generate", "update": "tokens_per_second/train"}


def declaration(name: str) -> MetricSpec:
    """The declaration of a metric or of its family; MetricError with the nearest name if there is none."""
    found = METRICS.get(name) or next((m for f, m in METRICS.items() if f[-1] == "*" and name.startswith(f[:-1])), None)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, 1)
        raise MetricError(
            f"metric {name!r} is not declared in runs/metrics.py" + (f"; near: {near[0]}" if near else ""), key=name
        )
    return found


def schema() -> dict[str, dict[str, str]]:
    """All declarations as JSON: name -> unit, reduction, description."""
    return {m.name: {k: v for k, v in asdict(m).items() if k != "name"} for m in _DECLARED}


class Metrics:
    """What one step measured, reduced as declared. A mean is kept as a sum and a count until the step is closed."""

    def __init__(
        self,
        peak_flops: float = 0.0,
        totals: Callable[[], Mapping[str, Total]] = recorder.totals,
        traffic: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        """peak_flops: of all devices, in FLOP/s, for the utilisation; 0: not known. totals: of the spans since the last
        time it was asked; traffic: bytes by (operation, direction) since then."""
        self.peak_flops = peak_flops
        self._totals = totals
        self._traffic = traffic
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """One value; for a mean ``weight`` is what it stands for (samples, tokens or seconds), else it is not used."""
        self._put(name, value * weight if declaration(name).reduction == "mean" else value, weight)

    def add_sum(self, name: str, total: float, count: float) -> None:
        """A mean whose sum and count are known; a count of 0 adds nothing."""
        if declaration(name).reduction != "mean":
            raise MetricError(
                f"metric {name!r} is declared as {declaration(name).reduction}, not as a mean", key=f"{name}.reduction"
            )
        self._put(name, total, count)

    def _put(self, name: str, value: float, weight: float) -> None:
        before = self._sums.get(name)
        if before is None or declaration(name).reduction == "last":
            self._sums[name] = (value, weight)
        else:
            self._sums[name] = _REDUCE[declaration(name).reduction](before, (value, weight))

    def take(self, parts: Mapping[str, "float | MetricPart"]) -> None:
        """What one optimizer step reports: numbers, or totals with their counts as ``tilth.rl.Metric`` has them."""
        for name, part in parts.items():
            if isinstance(part, (int, float)):
                self.add(name, part)
            else:
                self._take_part(name, part)

    def _take_part(self, name: str, part: "MetricPart") -> None:
        declared = declaration(name).reduction
        if part.reduction != declared:
            raise MetricError(
                f"metric {name!r} came as a {part.reduction}, it is declared as a {declared}", key=f"{name}.reduction"
            )
        if float(part.count):
            self._put(name, float(part.total), float(part.count))

    def take_times(self, totals: Mapping[str, Total]) -> None:
        """Time of each phase, of the step and of what is in no phase; tokens/s where the phase's spans say tokens."""
        phases = {op: t for op, t in totals.items() if t.phase_seconds > 0}
        inside = sum(t.phase_seconds for t in phases.values())
        for op, total in phases.items():
            self.add(f"time/{op}", total.phase_seconds)
            if op in _RATES and total.phase_tokens:
                self.add_sum(_RATES[op], total.phase_tokens, total.phase_seconds)
        update = phases.get("update")
        if update and update.flops and self.peak_flops:
            self.add_sum("mfu", update.flops / self.peak_flops, update.phase_seconds)
        step = totals["step"].seconds if "step" in totals else inside
        self.add(f"time/{OTHER}", max(step - inside, 0.0))
        self.add("time/step", max(step, inside))

    def merge(self, other: "Metrics") -> None:
        """Take in what another worker measured in the same step."""
        for name, (value, weight) in other._sums.items():
            self._put(name, value, weight)

    def values(self) -> dict[str, float]:
        """The numbers as they stand; a mean of nothing is left out."""
        return {
            name: value / weight if declaration(name).reduction == "mean" else value
            for name, (value, weight) in self._sums.items()
            if declaration(name).reduction != "mean" or weight
        }

    def close(
        self, *, step: int, phase: str, phase_step: int | None = None, phase_steps: int | None = None
    ) -> dict[str, Any]:
        """The record of a step, with its times (from the spans since the last one) and memory; starts the next.

        phase_step: which step of its phase it is, so that a view that begins in the middle knows how far it is;
        phase_steps: the most that the phase may have.
        """
        self.take_times(self._totals())
        self.take_memory()
        for (operation, direction), nbytes in self._traffic().items():
            self.add(f"bytes/{direction}/{operation}", nbytes)
        known = {"phase_step": phase_step, "phase_steps": phase_steps}
        where = {"step": step, "phase": phase, **{k: v for k, v in known.items() if v is not None}}
        record = {**where, **self.values()}
        self._sums = {}
        return record

    def take_memory(self) -> None:
        """Resident memory of this process now, and at its peak."""
        now, peak = resident()
        self.add("memory/rss", now)
        self.add("memory/peak", peak)


def resident() -> tuple[int, int]:
    """Resident memory of this process in bytes: (now, peak so far)."""
    now = psutil.Process().memory_info().rss
    return now, max(now, _peak())


def _peak() -> int:
    """Linux hands ``ru_maxrss`` on from the process that started this one; its VmHWM is our own."""
    import resource
    import sys
    from pathlib import Path

    status = Path("/proc/self/status")
    if status.is_file():
        high = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), "")
        if high:
            return int(high.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_REDUCE = {
    "mean": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sum": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "max": lambda a, b: (max(a[0], b[0]), a[1]),
    "min": lambda a, b: (min(a[0], b[0]), a[1]),
}
