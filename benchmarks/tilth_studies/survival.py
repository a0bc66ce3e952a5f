"""Effective training time ratio (ETTR) of a job under a trace of faults (ByteRobust, arXiv 2509.16293, section 8).

ETTR is productive time over wall time. Steps that are computed again are not productive, and a job on fewer nodes is
productive in proportion. Time is continuous and all random numbers come from a seed, so a call has one result.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tilth.core.errors import ArgumentError, DataError
from tilth_studies.faults import FaultTrace, Incident, incidents

HOUR = 3600.0
Without = Literal["shrink", "wait"]
"""Where neither a spare nor a new node is to be had: go on with fewer nodes, or wait for a repair."""


@dataclass(frozen=True)
class SurvivalPolicy:
    """Seconds and settings of recoveries. Every node of an incident must be replaced."""

    detect: float = 1.0
    """From a failure that ends a process to its verdict."""
    hangs: float = 0.1
    """Share of incidents that end no process (ByteRobust's census: 9.9 % hangs)."""
    hang_after: float = 120.0
    """Detection of those."""
    restart: float = 10.0
    """From the verdict, with all nodes there, to the first new step."""
    step: float = 10.0
    """Seconds of a step."""
    memory: bool = True
    """Each step leaves a snapshot in the memory of the node and of a peer half the job away."""
    snapshot: float = 0.0
    """Seconds for which a step waits for its snapshot."""
    interval: float = 1800.0
    """Seconds of training between two checkpoints on disk."""
    save: float = 0.0
    """Seconds for which training waits for one."""
    load: float = 60.0
    """Seconds longer that a restart from disk takes."""
    spares: int = 8
    wake: float = 5.0
    """Seconds until a warm spare stands in for a node."""
    cold: float = 600.0
    """Seconds to get and start another node, also to fill up the spares; inf: there is none but repaired nodes."""
    without: Without = "wait"
    again: float = 0.02
    """Probability that a restart fails, each time."""
    restarts: int = 3
    """Failed restarts in a row after which the run ends, and a person begins it again; 0: without end."""
    person: float = 1800.0
    """Seconds until then."""

    def __post_init__(self) -> None:
        for key, least in (("detect", 0), ("restart", 0), ("hang_after", 0), ("wake", 0), ("cold", 0), ("load", 0)):
            _at_least(self, key, least)
        for key in ("snapshot", "save", "spares", "person", "restarts"):
            _at_least(self, key, 0)
        for key in ("step", "interval"):
            _at_least(self, key, 1e-9)
        for key in ("hangs", "again"):
            if not 0 <= getattr(self, key) <= 0.95:
                raise ArgumentError(f"{key}={getattr(self, key)} must be from 0 to 0.95", key=key)


def _at_least(policy: SurvivalPolicy, key: str, least: float) -> None:
    if not getattr(policy, key) >= least:
        raise ArgumentError(f"{key}={getattr(policy, key)} must be at least {least}", key=key)


@dataclass(frozen=True)
class Survived:
    """Life of a job. lost: cause -> seconds, of "detect", "replace", "restart", "recompute", "overhead", "fewer"."""

    ettr: float
    worst_hour: float
    """Least ETTR of any hour."""
    incidents: int
    from_disk: int
    """Recoveries for which no copy in memory was left."""
    stops: int
    """Times at which a person had to begin the run again."""
    lost: Mapping[str, float]


def simulate(trace: FaultTrace, policy: SurvivalPolicy, seed: int = 0) -> Survived:
    """Run a job on all nodes of a trace from its start to its end."""
    job = _Job(trace, policy, np.random.default_rng(seed))
    found = incidents(trace.faults)
    for incident in found:
        job.fail(incident)
    job.run_until(trace.seconds)
    job.end(trace.seconds)
    kept = sum((end - start) * rate for start, end, rate in job.productive)
    worst = worst_window(job.productive, trace.seconds, HOUR)
    return Survived(kept / trace.seconds, worst, len(found), job.from_disk, job.stops, job.lost)


class _Job:
    """State of a job while its incidents are played."""

    def __init__(self, trace: FaultTrace, policy: SurvivalPolicy, rng: np.random.Generator) -> None:
        self.trace, self.policy, self.rng = trace, policy, rng
        self.now = 0.0
        """Until which the life is known: a job that recovers will run from here on."""
        self.since_save = 0.0
        """Seconds of training since the last checkpoint on disk."""
        self.productive: list[tuple[float, float, float]] = []
        """(start, end, productive share) of training that has not been lost."""
        self.returning: list[float] = []
        """Times at which spares that are away come back."""
        self.missing: list[float] = []
        """Times at which nodes without which the job goes on come back."""
        self.spent: list[tuple[str, float, float]] = []
        """(cause, start, end) of what recoveries took."""
        self.from_disk = self.stops = 0
        self.lost = dict.fromkeys(("detect", "replace", "restart", "recompute", "overhead", "fewer"), 0.0)

    def run_until(self, end: float) -> None:
        """Train from now on, unless a recovery lasts longer."""
        p = self.policy
        share = 1 / (1 + (p.snapshot / p.step if p.memory else 0.0) + p.save / p.interval)
        while self.now < end:
            away = sum(back > self.now for back in self.missing)
            until = min([end, *(back for back in self.missing if back > self.now)])
            rate = share * max(0, self.trace.nodes - away) / self.trace.nodes
            self.productive.append((self.now, until, rate))
            self.lost["overhead"] += (until - self.now) * (1 - share)
            self.lost["fewer"] += (until - self.now) * (share - rate)
            self.since_save = (self.since_save + until - self.now) % p.interval
            self.now = until

    def fail(self, incident: Incident) -> None:
        """Train until an incident, lose what no copy holds, and recover. During a recovery: begin it anew."""
        p, at = self.policy, incident.at
        ran = at - self.now
        self.run_until(at)
        self.end(at)
        if ran > 0:
            self._lose(incident, ran)
        hangs = self.rng.random() < p.hangs
        self._spend("detect", p.hang_after if hangs else p.detect)
        self._replace(incident)
        self._restart()

    def end(self, at: float) -> None:
        """End a recovery that lasts beyond this time: the rest of it has not passed."""
        while self.now > at:
            why, began, until = self.spent.pop()
            self.lost[why] -= until - max(began, min(at, until))
            self.now = max(at, began)

    def _lose(self, incident: Incident, ran: float) -> None:
        """Lose the training after the newest copy."""
        p, nodes = self.policy, self.trace.nodes
        down = {node for node, _ in incident.down}
        held = p.memory and not any((node + nodes // 2) % nodes in down for node in down)
        lost = ran % p.step if held else self.since_save
        if not held:
            self.from_disk += 1
            self._spend("restart", p.load)
        self.since_save -= min(lost, self.since_save)
        while lost > 0 and self.productive:
            start, end, rate = self.productive.pop()
            left = max(start, end - lost)
            lost -= end - start  # of earlier segments
            self.lost["recompute"] += (end - left) * rate
            if left > start:
                self.productive.append((start, left, rate))

    def _replace(self, incident: Incident) -> None:
        """Wait for nodes in the places of those that are down."""
        p, began = self.policy, self.now
        self.returning = [back for back in self.returning if back > began]
        self.missing = [back for back in self.missing if back > began]
        ready = began
        for _, end in sorted(incident.down, key=lambda pair: pair[1]):
            back = min(began + p.cold, max(end, began))
            if len(self.returning) < p.spares:
                self.returning.append(back)
                ready = max(ready, began + p.wake)
            elif math.isinf(p.cold) and p.without == "shrink":
                self.missing.append(back)
            else:
                ready = max(ready, back)
        self._spend("replace", min(ready, self.trace.seconds) - began)

    def _restart(self) -> None:
        p, failed = self.policy, 0
        self._spend("restart", p.restart)
        while self.rng.random() < p.again:
            failed += 1
            if p.restarts and failed % p.restarts == 0:
                self.stops += 1
                self._spend("restart", p.person)
            self._spend("restart", p.detect + p.restart)

    def _spend(self, why: str, seconds: float) -> None:
        self.spent.append((why, self.now, self.now + seconds))
        self.lost[why] += seconds
        self.now += seconds


def worst_window(productive: Sequence[tuple[float, float, float]], seconds: float, window: float) -> float:
    """Return the least productive share of any ``window`` seconds; of the whole time, if that is shorter."""
    if seconds <= window:
        return sum((end - start) * rate for start, end, rate in productive) / seconds
    starts, ends, rates = (np.array(column) for column in zip(*productive)) if productive else (np.zeros(0),) * 3
    times = np.stack([starts, ends], axis=1).ravel()  # in order: segments do not overlap
    total = np.stack([np.zeros_like(rates), (ends - starts) * rates], axis=1).ravel().cumsum()
    edges = np.concatenate([times, times + window, [window, seconds]])  # the share is linear in between
    edges = edges[(edges >= window) & (edges <= seconds)]
    times, total = np.append(np.append(0.0, times), seconds), np.append(np.append(0.0, total), total[-1:].sum())
    return float(((np.interp(edges, times, total) - np.interp(edges - window, times, total)) / window).min())


ROUNDING = 1e-11
"""Error of a sum of probabilities, by which it may miss a quantile that it meets exactly."""


def standby(nodes: int, probability: float, quantile: float = 0.99) -> int:
    """Return the least k with P[Binomial(nodes, probability) <= k] >= quantile: spares that are enough for a day with
    this probability, if nodes fail independently with ``probability`` a day."""
    if nodes < 1 or not 0 <= probability < 1 or not 0 < quantile < 1:
        message = f"{nodes=}, {probability=}, {quantile=}: needs a node, and probabilities below 1"
        raise ArgumentError(message, key="probability")
    below = 0.0
    for k in range(nodes + 1):
        log = math.lgamma(nodes + 1) - math.lgamma(k + 1) - math.lgamma(nodes - k + 1)
        if probability:
            log += k * math.log(probability) + (nodes - k) * math.log1p(-probability)
        below += math.exp(log) if probability or not k else 0.0
        if below >= quantile - ROUNDING:
            return k
    return nodes


KILLED, STOPPED = "a rank is killed", "a rank is stopped"
"""Rows of ``benchmarks/faults.py`` with the seconds that ``measured`` takes."""


def measured(path: Path, policy: SurvivalPolicy) -> SurvivalPolicy:
    """Return the policy with seconds that were measured. path: JSON rows of ``benchmarks/faults.py``.

    detect, restart: medians of a rank that is killed. hang_after: longer by what a stopped rank was seen later than its
    limit. Raises DataError for a file without these.
    """
    try:
        rows = {row["fault"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
        killed, stopped = rows[KILLED], rows[STOPPED]
        detect, pause = float(killed["detect_median"]), float(killed["pause_median"])
        late = float(stopped["detect_median"]) - float(stopped["hang_after"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{path} has no measured seconds ({error!r}): it must be the JSON of benchmarks/faults.py --rows 1,3"
        raise DataError(message, key="--measured") from error
    hang_after = policy.hang_after + max(late, 0.0)
    return replace(policy, detect=detect, restart=max(pause - detect, 0.0), hang_after=hang_after)


MECHANISMS: Mapping[str, Mapping[str, float | bool]] = {
    "detection of hangs: collectives time out": {"hang_after": 1800.0},
    "detection of crashes: collectives time out": {"detect": 600.0},
    "snapshots in memory": {"memory": False},
    "warm spares": {"spares": 0},
    "workers that live on: all are started anew": {"restart": 600.0},
    "restarts without a person": {"detect": 1800.0, "hang_after": 1800.0},
}
"""What is switched off -> the settings without it. The seconds are those of the field: PyTorch's limit of 10 minutes
for collectives, ByteRobust's 10 minutes of a failover and its hangs of 30 to 60 minutes."""


def switched_off(policy: SurvivalPolicy, mechanism: str) -> SurvivalPolicy:
    """Return the policy with a mechanism switched off; what is worse already stays."""
    changed = MECHANISMS[mechanism]
    worse = {
        key: max(getattr(policy, key), value) if key not in ("memory", "spares") else value
        for key, value in changed.items()
    }
    return replace(policy, **worse)  # type: ignore[arg-type]
