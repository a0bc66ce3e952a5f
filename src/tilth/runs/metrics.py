"""Declarations of every metric: name, unit, reduction over the parts of a step, description; and their collector.

A name that is not declared here is an error, so no reduction is guessed and every number in ``metrics.jsonl`` is
described in ``metrics_schema.json`` beside it.
"""

import difflib
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from tilth.core.errors import TilthError
from tilth.trace.spans import Total, recorder

if TYPE_CHECKING:  # torch, which readers do without
    from tilth.rl.metrics import Metric

Reduction = Literal["mean", "sum", "max", "min", "last"]
KEYS = ("step", "attempt", "phase", "phase_step", "phase_steps", "seconds")
"""Fields of a record that are not metrics."""
OTHER = "other"


class MetricError(TilthError):
    """A metric that is not declared, or whose parts are reduced otherwise than declared."""


@dataclass(frozen=True)
class MetricSpec:
    """One declared number. A name that ends in ``/*`` declares a family."""

    name: str
    unit: str
    reduction: Reduction
    description: str

    @property
    def about(self) -> str:
        """Description, unit and reduction in one line."""
        return f"{self.description} (unit: {self.unit}, reduction: {self.reduction})"


_TABLE: tuple[tuple[str, str, Reduction, str], ...] = (
    ("reward/mean", "reward", "mean", "reward of a sample; missing rewards are left out"),
    ("reward/std", "reward", "mean", "standard deviation of the rewards of a step's samples"),
    ("reward/missing", "samples", "sum", "rewards that raised, timed out or were not finite; left out of the loss"),
    ("reward/heldout", "reward", "last", "mean outcome of greedy answers to held-out prompts, unshaped"),
    ("reward/heldout/low", "reward", "last", "lower end of its 95 % interval over prompts"),
    ("reward/heldout/high", "reward", "last", "upper end of its 95 % interval over prompts"),
    ("reward/heldout/prompts", "prompts", "last", "held-out prompts whose answer has an outcome"),
    ("reward/heldout/change_low", "reward", "last", "lower end of the 95 % interval of its paired change in the phase"),
    ("reward/heldout/change_high", "reward", "last", "upper end of that interval"),
    ("reward/heldout/missing", "samples", "sum", "held-out answers whose reward is missing; not in the mean"),
    ("reward/heldout/part/*", "reward", "last", "a named part of the reward of held-out answers"),
    ("reward/timeout", "samples", "sum", "missing rewards that timed out"),
    ("reward/part/*", "reward", "mean", "a named part of the reward, if the function returns a dict"),
    ("accuracy/heldout", "share", "last", "right held-out answers; none after an outcome other than 0 and 1"),
    ("loss/heldout", "nats/token", "last", "negative log-likelihood of held-out answers or documents"),
    ("bits_per_byte/heldout", "bits/byte", "last", "loss of held-out documents in bits over bytes of their text"),
    ("accuracy/pairs", "share", "last", "held-out pairs whose chosen answer is ahead; a tie counts half"),
    ("accuracy/pairs/low", "share", "last", "lower end of its 95 % interval over pairs"),
    ("accuracy/pairs/high", "share", "last", "upper end of its 95 % interval over pairs"),
    ("loss/pairs", "1", "last", "preference loss of the held-out pairs"),
    ("rewards/chosen", "reward", "mean", "reward of a chosen answer: a reward model's, or DPO's implicit one"),
    ("rewards/rejected", "reward", "mean", "reward of a rejected answer: a reward model's, or DPO's implicit one"),
    ("rewards/margin", "reward", "mean", "reward of the chosen answer minus that of the rejected one"),
    ("rewards/accuracy", "share", "mean", "pairs whose chosen answer is ahead; a tie counts half"),
    ("logprobs/chosen", "nats", "mean", "log-prob of a chosen answer, summed over its tokens"),
    ("logprobs/rejected", "nats", "mean", "log-prob of a rejected answer, summed over its tokens"),
    ("pairs", "pairs", "sum", "pairs of answers trained on"),
    ("judge/asked", "samples", "sum", "right answers whose steps the judge checked"),
    ("judge/flawed", "share", "mean", "checked answers in which the judge found a wrong step"),
    ("judge/unparsed", "samples", "sum", "checked answers without a usable verdict; they lose no reward"),
    ("judge/version", "step", "last", "training step of the judge's checkpoint"),
    ("judge/precision", "share", "mean", "truly flawed (part flawed of the task), of answers the judge calls flawed"),
    ("judge/recall", "share", "mean", "answers the judge calls flawed, of truly flawed ones (part flawed)"),
    ("length/mean", "tokens", "mean", "length of a completion"),
    ("length/max", "tokens", "max", "longest completion"),
    ("length/cut", "share", "mean", "completions truncated at rollout.max_tokens"),
    ("draft/acceptance", "share", "mean", "drafted tokens that completions said, of those that passes computed"),
    ("draft/passes", "1", "mean", "passes that computed a completion, for each token drawn in them; 1 without drafts"),
    (
        "draft/ahead",
        "tokens",
        "sum",
        "rollout.run_ahead: tokens of answers to prompts of the next step, for drafts alone",
    ),
    ("draft/missed", "passes", "sum", "rollout.draft.apart: decode passes whose drafts did not come in time"),
    ("kv_cache_usage/mean", "share", "mean", "blocks of the KV cache in use, of an engine, after a pass"),
    ("kv_cache_usage/max", "share", "max", "most blocks of the KV cache in use, of any engine"),
    ("draft/lost", "processes", "sum", "rollout.draft.apart: drafters that died or stayed silent"),
    ("groups/flat", "share", "mean", "samples in groups of equal rewards: no gradient under a group baseline"),
    ("groups/gradient", "share", "mean", "groups whose rewards differ; not measured for groups of one"),
    ("samples", "samples", "sum", "completions generated for training"),
    ("mixture/*", "samples", "sum", "samples of a source of data.mixture that the step has drawn"),
    ("samples/rounds", "rounds", "sum", "times that prompts were sampled until the batch was full"),
    ("baseline/mean", "reward", "mean", "reward of the greedy answers that are baselines of samples"),
    ("baseline/missing", "samples", "sum", "greedy baselines whose reward is missing; their samples are left out"),
    ("samples/carried", "samples", "sum", "samples that the next step goes on with, or that wait for their group"),
    ("samples/admitted", "samples", "sum", "rollout.staleness: samples begun in the step"),
    ("samples/begun", "samples", "last", "rollout.staleness: samples begun since the phase was entered or resumed"),
    ("samples/finished", "samples", "sum", "rollout.staleness: samples whose groups have ended"),
    ("samples/consumed", "samples", "sum", "rollout.staleness: samples that the step has learned from"),
    ("samples/dropped", "samples", "sum", "rollout.staleness: samples dropped by name, with a reason in the event log"),
    ("samples/moved", "samples", "sum", "rollout.repack: samples that went on on another replica"),
    ("samples/resumed", "samples", "sum", "samples that went on from their tokens after a failure or a resume"),
    ("length/finished", "tokens", "mean", "rollout.staleness: length of a completion whose group has ended"),
    ("length/consumed", "tokens", "mean", "rollout.staleness: length of a completion that the step has learned from"),
    ("length/dropped", "tokens", "mean", "rollout.staleness: length of a completion that was dropped"),
    ("staleness/mean", "versions", "mean", "versions that the oldest token of a sample is behind the policy"),
    ("staleness/max", "versions", "max", "versions that the oldest token of any sample is behind the policy"),
    ("staleness/tokens/*", "tokens", "sum", "tokens by the versions that they are behind the policy"),
    ("fully_async/count/stale_trajectory_processed", "samples", "sum", "samples of the step that are behind"),
    ("fully_async/count/dropped_stale_samples", "samples", "sum", "samples dropped because no step could take them"),
    ("fully_async/partial/partial_ratio", "share", "mean", "samples whose tokens are of several versions"),
    ("fully_async/partial/max_partial_span", "versions", "max", "changes of version within one sample"),
    ("fully_async/buffer/age_seconds", "s", "mean", "time that a group has waited for its step since it ended"),
    ("fully_async/trainer/idle_ratio", "share", "last", "share of a step's time that the loop waited for samples"),
    ("fully_async/trainer/idle_seconds", "s", "sum", "time that the loop waited for samples"),
    ("fully_async/rollouter/idle_ratio", "share", "last", "share of the replicas' time in which they had no round"),
    ("samples/trained", "samples", "sum", "completions kept for the update, before overlong_filter masks cut ones"),
    ("loss", "1", "mean", "loss that was minimised; a policy loss is near 0, its gradient is not"),
    ("entropy", "nats", "mean", "entropy of the policy at a token"),
    ("nll/right", "nats", "mean", "negative log-likelihood of a token of a right answer, if it is in the loss"),
    ("grad_norm", "1", "mean", "global gradient norm before clipping"),
    ("norm/grad/*", "1", "mean", "gradient norm of a layer (embedding, 0 ..., norm, head) before clipping"),
    ("norm/weight/*", "1", "mean", "norm of a layer's weights before the step"),
    ("noise_scale", "sequences", "mean", "batch size at which half the gradient is noise: noise/trace / noise/signal"),
    ("noise/trace", "1", "mean", "trace of the covariance of one sequence's gradient, averaged over steps"),
    ("noise/signal", "1", "mean", "squared norm of the true gradient, averaged over steps; unbiased, so noisy"),
    ("lr", "1", "mean", "learning rate"),
    ("ratio", "1", "mean", "probability of a token now over that when it was sampled"),
    ("clip_low", "share", "mean", "tokens at the lower clip, or left out because they fell too far"),
    ("clip_high", "share", "mean", "tokens at the upper clip, or left out because they rose too far"),
    ("clip_dual", "share", "mean", "tokens with a negative advantage at the dual clip"),
    ("truncated", "share", "mean", "tokens whose importance weight was at the loss's cap"),
    ("selected", "share", "mean", "tokens chosen by the first pass of clip_cov and kl_cov"),
    ("approx_kl_k1", "nats", "mean", "KL of the update at a token, estimated as -log ratio"),
    ("approx_kl_k3", "nats", "mean", "KL of the update at a token, estimated as ratio - 1 - log ratio"),
    ("kl_coef", "1", "last", "weight of the KL penalty, if it follows algorithm.kl_target"),
    ("entropy_coef", "1", "last", "weight of the entropy bonus, if it follows algorithm.entropy_target"),
    ("kl_ref", "nats", "mean", "KL towards the reference at a token, as in the policy loss"),
    (
        "reference/unaligned",
        "share",
        "mean",
        "tokens that the policy chose and of which a teacher with another tokenizer teaches nothing",
    ),
    ("reference/rows/*", "samples", "sum", "samples that follow a teacher of reference.teachers"),
    ("reference/unaligned/*", "share", "mean", "reference/unaligned of the samples that follow a teacher"),
    ("reference/kl/*", "nats", "mean", "KL towards a teacher at a token of its samples, as the mean of log p - log q"),
    ("value/loss", "reward^2", "mean", "value loss at a token: half the squared distance to its return, clipped"),
    ("value/clipped", "share", "mean", "tokens whose value is at critic.clip"),
    ("value/mean", "reward", "mean", "the critic's value at a token"),
    ("value/return", "reward", "mean", "return at a token: the discounted reward to come"),
    ("value/explained", "share", "mean", "variance of the returns that the values explain; a constant explains 0"),
    ("micro_batches/padded", "1", "sum", "empty micro-batches that ranks ran because another rank had more"),
    ("balance/spread", "1", "mean", "greatest planned cost of a rank in an update less the least, over their mean"),
    ("balance/idle", "share", "mean", "time of passes in which ranks wait for the busiest; measured, not on a GPU"),
    ("padding", "share", "mean", "empty places if in each round all ranks had the tokens of the fullest one"),
    ("loader/stall", "s", "sum", "time in which the step waited for the loader: without data.loaders all of the load"),
    ("value/grad_norm", "1", "mean", "global gradient norm of the critic before clipping"),
    ("value/lr", "1", "mean", "learning rate of the critic"),
    ("value/skipped", "steps", "sum", "optimizer steps of the critic left out, as in steps/skipped"),
    ("mismatch/max", "nats", "max", "largest log-prob difference of a token between trainer and engine"),
    ("mismatch/mean", "nats", "mean", "mean absolute log-prob difference between trainer and engine"),
    ("mismatch/k3", "nats", "mean", "KL between engine and trainer, estimated as k3"),
    ("mismatch/kl", "nats", "mean", "KL between engine and trainer, estimated as the mean of engine - trainer"),
    ("mismatch/training_ppl", "1", "mean", "perplexity of a sample under the trainer"),
    ("mismatch/rollout_ppl", "1", "mean", "perplexity of a sample under the engine"),
    ("mismatch/log_ppl_diff", "nats", "mean", "logarithm of the trainer's perplexity over the engine's"),
    ("mismatch/ppl_ratio", "1", "mean", "a sample's perplexity under the trainer over that under the engine"),
    ("mismatch/chi2_token", "1", "mean", "chi-square of trainer and engine: squared ratio of a token - 1"),
    ("mismatch/chi2_seq", "1", "mean", "chi-square of a sample: squared product of its tokens' ratios - 1"),
    ("mismatch/effective", "share", "mean", "effective sample size if each token were weighted by its ratio"),
    (
        "sync/bytes",
        "bytes",
        "last",
        "what engines take in a weight sync, if adapters are learned; without a base sent once",
    ),
    ("sync/sent_bytes", "bytes", "last", "what the relay of another node gets of a version, if there is one"),
    ("sync/whole_bytes", "bytes", "last", "what it would get of the whole version"),
    ("experts/flips", "share", "mean", "recorded pairs of a token and an expert that the trainer's router leaves out"),
    ("experts/load_max", "1", "mean", "load of the busiest expert of any layer over the mean load, in one update"),
    ("experts/entropy", "share", "mean", "entropy of the loads of a layer's experts over its maximum, mean of layers"),
    ("experts/dropped", "tokens", "mean", "tokens that an expert had no room for: none, as none has a capacity"),
    ("experts/balance_loss", "1", "mean", "train.router_balance times the loss of balance, summed over layers"),
    ("experts/z_loss", "1", "mean", "train.router_z times the mean squared log-sum-exp of router logits, over layers"),
    ("value/experts/*", "1", "mean", "the metric experts/* of the critic's own experts"),
    ("correction/weight", "1", "mean", "importance weight of a token, bounded, before it is normalised"),
    ("correction/effective", "share", "mean", "effective sample size under the correction's weights"),
    ("correction/above", "share", "mean", "tokens whose ratio is above the upper bound of weights"),
    ("correction/below", "share", "mean", "tokens whose ratio is below the lower bound of weights"),
    ("correction/scale", "1", "mean", "mean weight of the batch, by which weights were divided"),
    ("correction/rejected", "share", "mean", "tokens that the correction leaves out of the loss"),
    ("correction/rejected_rows", "share", "mean", "samples with a token that the correction leaves out"),
    ("plugin/*", "1", "mean", "a metric that a policy loss of a plugin returns, over tokens"),
    ("correction/rejected/*", "share", "mean", "tokens outside the bounds of one statistic"),
    ("tokens/generated", "tokens", "sum", "tokens that the policy generated for training"),
    ("tokens/baseline", "tokens", "sum", "tokens of the greedy answers that are baselines of samples"),
    ("tokens/trained", "tokens", "sum", "tokens that went through forward and backward, prompts included"),
    ("tokens_per_second/generate", "tokens/s", "mean", "generated tokens over the time of generation"),
    ("tokens_per_second/train", "tokens/s", "mean", "trained tokens over the time of the update"),
    ("mfu", "share", "mean", "model FLOPs used, of the device's peak"),
    ("memory/rss", "bytes", "last", "resident memory of the controller's process"),
    ("memory/peak", "bytes", "max", "greatest resident memory so far"),
    ("bytes/sent/*", "bytes", "sum", "bytes the controller sent to workers with the calls of one operation"),
    ("bytes/received/*", "bytes", "sum", "bytes of workers' answers; controller.payload: payload it read"),
    ("steps/skipped", "steps", "sum", "optimizer steps left out: not finite, or no token to train on"),
    ("steps/not_finite", "steps", "sum", "optimizer steps left out because loss or gradient was not finite"),
    ("save/seconds", "s", "last", "from a checkpoint's copy in memory until it is complete; the stall is time/save"),
    ("save/failed", "saves", "sum", "checkpoints that failed"),
    ("time/*", "s", "sum", "time of a phase of the step; phases do not overlap (other: time in none)"),
)
METRICS = {row[0]: MetricSpec(*row) for row in _TABLE}
GENERATION: Mapping[str, str] = {
    "fully_async/trainer/idle_ratio": "actor stall",
    "fully_async/rollouter/idle_ratio": "replicas idle",
    "fully_async/buffer/age_seconds": "age in the buffer",
    "samples/admitted": "admitted",
    "samples/finished": "finished",
    "samples/moved": "moved",
    "draft/acceptance": "drafts accepted",
    "kv_cache_usage/mean": "KV in use",
    "kv_cache_usage/max": "KV in use at most",
}
"""Metric -> its label: what ``tilth show``, ``top``, the report and the page have of generation."""
_RATES = {"generate": "tokens_per_second/generate", "update": "tokens_per_second/train"}


@cache
def declaration(name: str) -> MetricSpec:
    """Return the declaration of a metric or of its family; MetricError if there is none."""
    found = METRICS.get(name) or next((m for f, m in METRICS.items() if f[-1] == "*" and name.startswith(f[:-1])), None)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise MetricError(f"metric {name!r} is not declared in runs/metrics.py{hint}", key=name)
    return found


def schema() -> dict[str, dict[str, str]]:
    """Return all declarations as JSON: name -> unit, reduction, description."""
    return {name: {k: v for k, v in asdict(m).items() if k != "name"} for name, m in METRICS.items()}


class Metrics:
    """Metrics of one step, reduced as declared. A mean is a sum and a count until the step is closed."""

    def __init__(
        self,
        peak_flops: float = 0.0,
        totals: Callable[[], Mapping[str, Total]] = recorder.totals,
        traffic: Callable[[], Mapping[tuple[str, str], int]] = dict,
        balance: Callable[[], Sequence[tuple[str, float]]] = tuple,
    ) -> None:
        """peak_flops: FLOP/s of all devices together, 0 if unknown. totals, traffic, balance: return totals of spans,
        bytes by (operation, direction), and figures of updates, since their last call."""
        self.peak_flops, self._totals, self._traffic, self._balance = peak_flops, totals, traffic, balance
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one value; weight: number of items (samples, tokens, seconds) that a mean's value is the average of."""
        self._put(name, value * weight if declaration(name).reduction == "mean" else value, weight)

    def add_sum(self, name: str, total: float, count: float) -> None:
        """Add a mean by its sum and count; a count of 0 adds nothing."""
        _check_reduction(name, "mean")
        self._put(name, total, count)

    def _put(self, name: str, value: float, weight: float) -> None:
        reduction, (total, count) = declaration(name).reduction, self._sums.get(name, (value, weight))
        if name not in self._sums or reduction == "last":
            self._sums[name] = (value, weight)
        elif reduction in ("mean", "sum"):
            self._sums[name] = (total + value, count + weight)
        else:
            self._sums[name] = (max(total, value) if reduction == "max" else min(total, value), count)

    def take(self, parts: Mapping[str, "float | Metric"]) -> None:
        """Add the metrics of one optimizer step: numbers, or parts (``tilth.rl.Metric``)."""
        for name, part in parts.items():
            if isinstance(part, (int, float)):
                self.add(name, part)
                continue
            _check_reduction(name, part.reduction)
            if float(part.count):
                self._put(name, float(part.total), float(part.count))

    def take_times(self, totals: Mapping[str, Total]) -> None:
        """Add the time of each phase, of the whole step and of the rest, tokens/s and the utilisation."""
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
        self.add("loader/stall", totals["load"].seconds if "load" in totals else 0.0)

    def values(self) -> dict[str, float]:
        """Return the current numbers; a mean of nothing is left out."""
        return {
            name: value / weight if declaration(name).reduction == "mean" else value
            for name, (value, weight) in self._sums.items()
            if declaration(name).reduction != "mean" or weight
        }

    def close(
        self, *, step: int, phase: str, phase_step: int | None = None, phase_steps: int | None = None
    ) -> dict[str, Any]:
        """Return the record of a step with its times, memory and traffic, and start the next step.

        phase_step: number of the step in its phase; phase_steps: length of the phase.
        """
        self.take_times(self._totals())
        now, peak = resident()
        self.add("memory/rss", now)
        self.add("memory/peak", peak)
        for (operation, direction), nbytes in self._traffic().items():
            self.add(f"bytes/{direction}/{operation}", nbytes)
        for name, value in self._balance():
            self.add(name, value)
        known = {"phase_step": phase_step, "phase_steps": phase_steps}
        where = {"step": step, "phase": phase, **{k: v for k, v in known.items() if v is not None}}
        record = {**where, **self.values()}
        self._sums = {}
        return record


def _check_reduction(name: str, given: str) -> None:
    """Raise MetricError unless parts of the metric are reduced as declared."""
    declared = declaration(name).reduction
    if given != declared:
        message = f"metric {name!r} is declared as a {declared}, but was given as a {given}"
        raise MetricError(message, key=f"{name}.reduction")


def resident() -> tuple[int, int]:
    """Return resident memory of this process in bytes: (now, peak so far)."""
    now = psutil.Process().memory_info().rss
    return now, max(now, _peak())


def _peak() -> int:
    # On Linux a process inherits ru_maxrss from the one that started it; VmHWM is its own.
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"^VmHWM:\s*(\d+)", status.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
