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


class Part(Protocol):
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
class Metric:
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
    Metric("reward/mean", "reward", "mean", "reward of a sample; missing ones are left out"),
    Metric("reward/std", "reward", "mean", "spread of rewards over the samples of a step"),
    Metric(
        "reward/missing", "samples", "sum", "rewards that raised, timed out or were not finite; left out of the loss"
    ),
    Metric(
        "reward/heldout",
        "reward",
        "last",
        "mean reward, or its part correct where it has one, of greedy answers to the held-out prompts, without what "
        "shapes it; the accuracy, where there is one",
    ),
    Metric("reward/heldout/missing", "samples", "sum", "of those, answers whose reward is missing; not in the mean"),
    Metric("reward/heldout/part/*", "reward", "last", "of those, a named part of the reward"),
    Metric("reward/timeout", "samples", "sum", "those of the missing rewards that ran out of time"),
    Metric("reward/part/*", "reward", "mean", "a named part of the reward, where the function returns a dict"),
    Metric(
        "accuracy/heldout",
        "share",
        "last",
        "greedy answers to the held-out prompts that are right: whose reward, or its part correct where it has one, is "
        "1; none once that of any sample was neither 0 nor 1",
    ),
    Metric("loss/heldout", "nats/token", "last", "negative log-likelihood of held-out answers or documents"),
    Metric("bits_per_byte/heldout", "bits/byte", "last", "the same of documents, in bits over bytes of their text"),
    Metric("accuracy/pairs", "share", "last", "held-out pairs in which the chosen answer is ahead; ties count half"),
    Metric("loss/pairs", "1", "last", "preference loss of the held-out pairs"),
    Metric("rewards/chosen", "reward", "mean", "reward of a chosen answer: a reward model's, or DPO's implicit one"),
    Metric("rewards/rejected", "reward", "mean", "the same of a rejected answer"),
    Metric("rewards/margin", "reward", "mean", "by how much the chosen answer of a pair is ahead"),
    Metric("rewards/accuracy", "share", "mean", "pairs in which the chosen answer is ahead; ties count half"),
    Metric("logprobs/chosen", "nats", "mean", "log-prob of a chosen answer, summed over its tokens"),
    Metric("logprobs/rejected", "nats", "mean", "the same of a rejected answer"),
    Metric("pairs", "pairs", "sum", "pairs of answers that were learned from"),
    Metric("judge/asked", "samples", "sum", "right answers whose steps the judge was asked about"),
    Metric("judge/flawed", "share", "mean", "of these, those in which it says that a step is wrong"),
    Metric("judge/unparsed", "samples", "sum", "of these, those on which it says nothing usable; they lose no reward"),
    Metric("judge/version", "step", "last", "training step of the checkpoint that judges"),
    Metric("judge/precision", "share", "mean", "of what it says is flawed, what the task knows to be (part flawed)"),
    Metric("judge/recall", "share", "mean", "of what the task knows to be flawed, what it says is"),
    Metric("length/mean", "tokens", "mean", "length of a completion"),
    Metric("length/max", "tokens", "max", "longest completion"),
    Metric("length/cut", "share", "mean", "completions that hit rollout.max_tokens before their end"),
    Metric(
        "groups/flat",
        "share",
        "mean",
        "samples in groups whose rewards are all equal: no gradient under a group baseline",
    ),
    Metric(
        "groups/gradient",
        "share",
        "mean",
        "groups whose rewards are not all equal: those that a group baseline learns from; gae learns from every group, "
        "but for a step whose rewards are all equal; not of groups of one",
    ),
    Metric("samples", "samples", "sum", "completions generated for training"),
    Metric("samples/rounds", "rounds", "sum", "times that prompts were sampled until the batch was full"),
    Metric("baseline/mean", "reward", "mean", "reward of the greedy answers that samples are compared with"),
    Metric("baseline/missing", "samples", "sum", "greedy answers whose reward is missing; their samples are left out"),
    Metric(
        "samples/trained",
        "samples",
        "sum",
        "completions kept for the update; of those, overlong_filter masks what was cut",
    ),
    Metric(
        "loss", "1", "mean", "the loss that was minimised; for policy losses its value is near 0, its gradient is not"
    ),
    Metric("entropy", "nats", "mean", "entropy of the policy at a token"),
    Metric(
        "nll/right", "nats", "mean", "negative log-likelihood of a token of a right answer, where it is in the loss"
    ),
    Metric("grad_norm", "1", "mean", "global gradient norm before clipping"),
    Metric("norm/grad/*", "1", "mean", "gradient norm of a layer (embedding, 0 ..., norm, head) before clipping"),
    Metric("norm/weight/*", "1", "mean", "norm of a layer's weights, as they were before the step"),
    Metric(
        "noise_scale",
        "sequences",
        "mean",
        "batch size at which a gradient is half noise: noise/trace over noise/signal",
    ),
    Metric("noise/trace", "1", "mean", "trace of the covariance of one sequence's gradient, averaged over steps"),
    Metric("noise/signal", "1", "mean", "squared norm of the true gradient, averaged over steps; unbiased, so noisy"),
    Metric("lr", "1", "mean", "learning rate"),
    Metric("ratio", "1", "mean", "probability of a token now over that when it was sampled"),
    Metric("clip_low", "share", "mean", "tokens held by the lower clip, or left out for having fallen too far"),
    Metric("clip_high", "share", "mean", "tokens held by the upper clip, or left out for having risen too far"),
    Metric("clip_dual", "share", "mean", "tokens with a negative advantage held by the dual clip"),
    Metric("truncated", "share", "mean", "tokens whose importance weight was held at the loss's cap"),
    Metric("selected", "share", "mean", "tokens chosen by the first pass of clip_cov and kl_cov"),
    Metric("approx_kl_k1", "nats", "mean", "KL of the update at a token, estimated as -log ratio"),
    Metric("approx_kl_k3", "nats", "mean", "the same, estimated as ratio - 1 - log ratio"),
    Metric("kl_coef", "1", "last", "weight of the KL penalty, where it follows algorithm.kl_target"),
    Metric("entropy_coef", "1", "last", "weight of the entropy bonus, where it follows algorithm.entropy_target"),
    Metric("kl_ref", "nats", "mean", "KL towards the reference at a token, as the policy loss saw it"),
    Metric("value/loss", "reward^2", "mean", "value loss at a token: half the squared distance to its return, clipped"),
    Metric("value/clipped", "share", "mean", "tokens whose value is held by critic.clip"),
    Metric("value/mean", "reward", "mean", "the critic's value at a token"),
    Metric("value/return", "reward", "mean", "what it should have been: the reward to come, discounted"),
    Metric(
        "value/explained",
        "share",
        "mean",
        "variance of the returns that the values explain: 1 all, 0 no more than a constant would",
    ),
    Metric("micro_batches/padded", "1", "sum", "empty micro-batches that ranks ran since another one had more"),
    Metric("value/grad_norm", "1", "mean", "global gradient norm of the critic before clipping"),
    Metric("value/lr", "1", "mean", "learning rate of the critic"),
    Metric("value/skipped", "steps", "sum", "optimizer steps of the critic left out, as in steps/skipped"),
    Metric("mismatch/max", "nats", "max", "largest log-prob difference of a token between trainer and rollout engine"),
    Metric("mismatch/mean", "nats", "mean", "mean absolute log-prob difference between trainer and rollout engine"),
    Metric("mismatch/k3", "nats", "mean", "KL between rollout engine and trainer, estimated as k3"),
    Metric("mismatch/kl", "nats", "mean", "the same, estimated as the mean of rollout engine - trainer"),
    Metric("mismatch/training_ppl", "1", "mean", "perplexity of a sample to the trainer"),
    Metric("mismatch/rollout_ppl", "1", "mean", "perplexity of a sample to the rollout engine"),
    Metric("mismatch/log_ppl_diff", "nats", "mean", "logarithm of the trainer's perplexity over the engine's"),
    Metric("mismatch/ppl_ratio", "1", "mean", "a sample's perplexity to the trainer over that to the engine"),
    Metric("mismatch/chi2_token", "1", "mean", "chi-square of trainer and engine: squared ratio of a token - 1"),
    Metric("mismatch/chi2_seq", "1", "mean", "the same of a sample: squared product of its tokens' ratios - 1"),
    Metric("mismatch/effective", "share", "mean", "effective sample size if each token were weighted by its ratio"),
    Metric("correction/weight", "1", "mean", "importance weight of a token, bounded, before it is normalised"),
    Metric("correction/effective", "share", "mean", "effective sample size of these weights"),
    Metric("correction/above", "share", "mean", "tokens whose ratio is above the upper bound of weights"),
    Metric("correction/below", "share", "mean", "tokens whose ratio is below the lower bound of weights"),
    Metric("correction/scale", "1", "mean", "mean weight of the batch, by which weights were divided"),
    Metric("correction/rejected", "share", "mean", "tokens that the correction leaves out of the loss"),
    Metric("correction/rejected_rows", "share", "mean", "samples of which it leaves a token out"),
    Metric("plugin/*", "1", "mean", "what a policy loss of a plugin returns beside the loss, over tokens"),
    Metric("correction/rejected/*", "share", "mean", "tokens outside of the bounds of one statistic"),
    Metric("tokens/generated", "tokens", "sum", "tokens that the policy chose, for training"),
    Metric("tokens/baseline", "tokens", "sum", "tokens of the greedy answers that samples are compared with"),
    Metric("tokens/trained", "tokens", "sum", "tokens that went through forward and backward, prompts included"),
    Metric("tokens_per_second/generate", "tokens/s", "mean", "chosen tokens over the time of generating"),
    Metric("tokens_per_second/train", "tokens/s", "mean", "trained tokens over the time of the update"),
    Metric("mfu", "share", "mean", "model flops used, of the device's peak"),
    Metric("memory/rss", "bytes", "last", "resident memory of the controller's process"),
    Metric("memory/peak", "bytes", "max", "greatest resident memory so far"),
    Metric("bytes/sent/*", "bytes", "sum", "what the controller sent to workers with the calls of one operation"),
    Metric(
        "bytes/received/*", "bytes", "sum", "what it received with their answers; controller.payload: payload it read"
    ),
    Metric("steps/skipped", "steps", "sum", "optimizer steps left out: not finite, or no token to learn from"),
    Metric("save/seconds", "s", "last", "from a checkpoint's copy in memory until it counted; the stall is time/save"),
    Metric("save/failed", "saves", "sum", "checkpoints that could not be made"),
    Metric("time/*", "s", "sum", "time of a phase of the step; phases do not overlap (other: what is in none)"),
)
METRICS = {m.name: m for m in _DECLARED}
_RATES = {"generate": "tokens_per_second/generate", "update": "tokens_per_second/train"}


def declaration(name: str) -> Metric:
    """The declaration of a metric or of its family; MetricError with the nearest name if there is none."""
    found = METRICS.get(name) or next((m for f, m in METRICS.items() if f[-1] == "*" and name.startswith(f[:-1])), None)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, 1)
        raise MetricError(
            f"metric {name!r} is not declared in flows/metrics.py" + (f"; near: {near[0]}" if near else "")
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
            raise MetricError(f"metric {name!r} is declared as {declaration(name).reduction}, not as a mean")
        self._put(name, total, count)

    def _put(self, name: str, value: float, weight: float) -> None:
        before = self._sums.get(name)
        if before is None or declaration(name).reduction == "last":
            self._sums[name] = (value, weight)
        else:
            self._sums[name] = _REDUCE[declaration(name).reduction](before, (value, weight))

    def take(self, parts: Mapping[str, "float | Part"]) -> None:
        """What one optimizer step reports: numbers, or totals with their counts as ``tilth.rl.Metric`` has them."""
        for name, part in parts.items():
            if isinstance(part, (int, float)):
                self.add(name, part)
            else:
                self._take_part(name, part)

    def _take_part(self, name: str, part: "Part") -> None:
        declared = declaration(name).reduction
        if part.reduction != declared:
            raise MetricError(f"metric {name!r} came as a {part.reduction}, it is declared as a {declared}")
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
