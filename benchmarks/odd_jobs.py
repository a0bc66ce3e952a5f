"""Generated jobs for the detector of odd machines: 8 to 1,500 machines that share a load, and ten kinds of faults.

All machines follow one pattern of compute and communication, with lags, levels of their own, slow drifts, noise,
spikes, short benign disturbances, pauses of the whole job and missing samples. A fault begins at any time on one
machine, has a severity, and may spread to others later.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tilth.guard.odd_machines import MISSING, MetricRule, SampleTable

LIMITS = (
    MetricRule("pfc", 0, 1e5), MetricRule("cpu", 0, 100), MetricRule("duty", 0, 100), MetricRule("power", 0, 700),
    MetricRule("nvlink", 0, 900), MetricRule("memory", 0, 2048), MetricRule("disk", 0, 100), MetricRule(MISSING, 0, 1),
)  # fmt: skip
METRICS = tuple(rule.name for rule in LIMITS if rule.name != MISSING)
COMPUTE = {"pfc": 300, "cpu": 22, "duty": 96, "power": 560, "nvlink": 180, "memory": 640, "disk": 4}
COMMUNICATE = {"pfc": 1500, "cpu": 28, "duty": 62, "power": 330, "nvlink": 420, "memory": 645, "disk": 4}
OFFSET = {"pfc": 0.002, "cpu": 0.012, "duty": 0.006, "power": 0.015, "nvlink": 0.01, "memory": 0.006, "disk": 0.006}
NOISE = {"pfc": 0.006, "cpu": 0.04, "duty": 0.04, "power": 0.03, "nvlink": 0.04, "memory": 0.001, "disk": 0.02}
"""Standard deviations between machines and between samples, as shares of the limits' range."""
SIZES = {8: 20, 12: 15, 16: 15, 24: 10, 32: 10, 64: 10, 128: 10, 256: 6, 512: 2, 1024: 1, 1500: 1}
"""Machines of a job, and how many of a hundred have them."""
SECONDS = 900


@dataclass(frozen=True)
class GeneratedJob:
    """One job. machine: the faulty one, "" if none; onset: second of the fault."""

    table: SampleTable
    kind: str = ""
    machine: str = ""
    onset: float = 0.0
    severity: float = 0.0


@dataclass
class _Fault:
    """Where a fault acts. values: metric -> [samples, machines], changed in place."""

    rng: np.random.Generator
    values: dict[str, np.ndarray]
    at: slice
    machine: int
    severity: float

    @property
    def length(self) -> int:
        return int(self.at.stop - self.at.start)

    def add(self, metric: str, share: "float | np.ndarray", noise: float = 0.0) -> None:
        """Add a share of the metric's range on the machine; noise: of the added value."""
        rule = LIMITS[METRICS.index(metric)]
        scale = (rule.high - rule.low) * (1 + noise * self.rng.standard_normal(self.length))
        self.values[metric][self.at, self.machine] += np.float32(1) * share * scale

    def scale(self, metric: str, factor: "float | np.ndarray") -> None:
        self.values[metric][self.at, self.machine] *= np.float32(1) * factor

    def all_slower(self, share: float) -> None:
        """Let the whole job wait for the machine, some time later."""
        begin = min(self.at.stop, self.at.start + int(self.rng.integers(20, 90)))
        for metric in ("duty", "power", "nvlink"):
            self.values[metric][begin : self.at.stop] *= np.float32(1 - share)

    def spread(self, metric: str, share: float, part: float) -> None:
        """Let other machines, this part of them, suffer too, one after the other."""
        count = self.values[metric].shape[1]
        high = LIMITS[METRICS.index(metric)].high
        for other in self.rng.permutation(count)[: int(np.ceil(part * count))]:
            begin = self.at.start + int(self.rng.integers(20, 150))
            if other != self.machine:
                self.values[metric][begin : self.at.stop, other] += np.float32(share * high)

    def on_and_off(self, on: tuple[int, int], off: tuple[int, int]) -> np.ndarray:
        """Return [samples] of 0 and 1 in turn, each for a drawn number of seconds."""
        parts = list[np.ndarray]()
        while sum(map(len, parts)) < self.length:
            parts += [np.ones(self.rng.integers(*on)), np.zeros(self.rng.integers(*off))]
        return np.concatenate(parts)[: self.length]


def _pcie(f: _Fault) -> None:
    f.add("pfc", 0.2 * f.severity, 0.4)
    f.scale("duty", 1 - 0.15 * f.severity)
    f.scale("power", 1 - 0.2 * f.severity)
    f.all_slower(0.2 * f.severity)
    f.spread("pfc", 0.05 * f.severity, 0.03)


def _ecc(f: _Fault) -> None:
    stalled = f.on_and_off((2, 4 + int(12 * f.severity)), (5, 20))
    f.scale("duty", 1 - 0.9 * stalled)
    f.scale("power", 1 - 0.7 * stalled)
    f.scale("cpu", 1 - 0.2 * stalled)
    f.all_slower(0.1 * f.severity)


def _cpu(f: _Fault) -> None:
    f.add("cpu", 0.45 * f.severity, 0.3)
    f.scale("duty", 1 - 0.08 * f.severity)
    f.all_slower(0.05 * f.severity)


def _nic(f: _Fault) -> None:
    down = f.on_and_off((2, 5 + int(15 * f.severity)), (8, 40))
    f.add("pfc", 0.25 * f.severity * down, 0.5)
    f.scale("nvlink", 1 - 0.2 * f.severity * down)
    f.add("cpu", 0.05 * f.severity * down)
    f.all_slower(0.15 * f.severity)


def _thermal(f: _Fault) -> None:
    ramp = np.minimum(1, np.arange(f.length) / f.rng.integers(30, 200))
    f.scale("power", 1 - 0.35 * f.severity * ramp)
    f.scale("duty", 1 + 0.03 * f.severity * ramp)
    f.all_slower(0.15 * f.severity)


def _leak(f: _Fault) -> None:
    f.add("memory", f.severity * 0.8 * np.arange(f.length) / 2048)
    f.add("cpu", 0.02 * f.severity)


def _disk(f: _Fault) -> None:
    f.add("disk", 0.6 * f.severity * f.on_and_off((20, 90), (2, 15)), 0.2)
    f.add("cpu", 0.05 * f.severity)


def _nvlink(f: _Fault) -> None:
    f.scale("nvlink", 1 - 0.6 * f.severity)
    f.scale("duty", 1 + 0.04 * f.severity)
    f.scale("power", 1 - 0.1 * f.severity)
    f.all_slower(0.2 * f.severity)


def _storm(f: _Fault) -> None:
    f.add("pfc", 0.6 * f.severity, 0.6)
    f.scale("nvlink", 1 - 0.1 * f.severity)
    f.spread("pfc", 0.3 * f.severity, 0.1)
    f.all_slower(0.25 * f.severity)


def _unreachable(f: _Fault) -> None:
    lost = f.rng.permutation(len(METRICS))[: max(1, round(f.severity * len(METRICS)))]
    for metric in lost:
        gone = f.rng.random(f.length) < 0.5 + 0.5 * f.severity
        f.values[METRICS[metric]][f.at, f.machine][gone] = np.nan


FAULTS: dict[str, Callable[[_Fault], None]] = {
    "PCIe downgrade": _pcie, "ECC stall": _ecc, "CPU contention": _cpu, "NIC flapping": _nic,
    "thermal throttling": _thermal, "memory leak": _leak, "slow disk": _disk, "NVLink loss": _nvlink,
    "PFC storm": _storm, "unreachable metric": _unreachable,
}  # fmt: skip


def _load(rng: np.random.Generator, machines: int) -> np.ndarray:
    """Return how much of each sample is compute: [samples, machines]; machines lag behind each other."""
    period, share = rng.uniform(3, 40), rng.uniform(0.4, 0.8)
    lag = np.abs(rng.standard_t(3, machines)) * rng.uniform(0.1, 0.8)
    steps = np.cumsum(1 + 0.15 * rng.standard_normal(SECONDS)) / period
    phase = (steps[:, None] - lag / period) % 1
    load = np.clip((share - phase) * 0.5 * period, 0, 1) * np.clip(phase * period, 0, 1)
    for _ in range(rng.poisson(1.0)):  # evaluation, a checkpoint: nobody computes
        begin = rng.integers(0, SECONDS)
        load[begin : begin + rng.integers(10, 90)] *= 0.1
    return load.astype(np.float32)


def _metric(rng: np.random.Generator, rule: MetricRule, load: np.ndarray, stage: np.ndarray) -> np.ndarray:
    """Return one metric of all machines, [samples, machines], without a fault."""
    name, span, machines = rule.name, rule.high - rule.low, load.shape[1]
    level = rng.uniform(0.8, 1.15 if name not in ("duty",) else 1.02)
    values = COMMUNICATE[name] + (COMPUTE[name] - COMMUNICATE[name]) * load
    values *= np.float32(level)
    if name in ("memory", "nvlink"):
        values *= (1 + 0.08 * stage).astype(np.float32)
    offset = OFFSET[name] * np.clip(rng.standard_t(5, machines), -5, 5)
    ticks = np.arange(SECONDS)[:, None]
    drift = OFFSET[name] * 0.5 * np.clip(rng.standard_t(5, machines), -5, 5)
    wave = np.sin(ticks * (2 * np.pi / rng.uniform(60, 900, machines)) + rng.uniform(0, 6.3, machines))
    noise = rng.standard_normal(load.shape, np.float32) * np.float32(NOISE[name])
    if name in ("pfc", "disk"):  # bursts upwards only
        noise = np.abs(noise) * np.float32(1.5)
    values += np.float32(span) * (noise + (offset + drift * wave).astype(np.float32))
    return np.maximum(values, np.float32(0)).astype(np.float32)


def _disturb(rng: np.random.Generator, values: dict[str, np.ndarray]) -> None:
    """Add what healthy machines have: spikes, and a few disturbances below a minute and a half."""
    ticks, machines = values["cpu"].shape
    for rule in LIMITS[:-1]:
        into = values[rule.name]
        at, who = (
            rng.integers(0, ticks, count := rng.poisson(ticks * machines * 5e-4)),
            rng.integers(0, machines, count),
        )
        into[at, who] += (rng.uniform(-0.5, 1, count) * into[at, who] + 0.1 * rule.high).astype(np.float32)
    for _ in range(rng.poisson(min(40, 0.4 * machines**0.5))):
        rule = LIMITS[rng.integers(0, len(METRICS))]
        begin, length = rng.integers(0, ticks), int(10 ** rng.uniform(0.7, 1.95))
        values[rule.name][begin : begin + length, rng.integers(0, machines)] += rng.uniform(0.05, 0.3) * rule.high


def _lose(rng: np.random.Generator, values: dict[str, np.ndarray]) -> None:
    """Remove samples: some everywhere, gaps of a machine, now and then of the whole collector."""
    ticks, machines = values["cpu"].shape
    share = rng.uniform(0.0, 0.02)
    for of in values.values():
        of[rng.random(of.shape, np.float32) < share] = np.nan
    for _ in range(rng.poisson(min(30, 0.05 * machines))):
        begin = rng.integers(0, ticks)
        gap, machine = slice(begin, begin + rng.integers(5, 40)), rng.integers(0, machines)
        for of in values.values():
            of[gap, machine] = np.nan
    if rng.random() < 0.2:
        begin = rng.integers(0, ticks)
        for of in values.values():
            of[begin : begin + 20] = np.nan


def make_job(seed: tuple[int, ...], kind: str = "", machines: int = 0, severity: float = 0.0) -> GeneratedJob:
    """Draw a job. kind: of the fault, "" for none; machines, severity: 0 draws them."""
    rng = np.random.default_rng(seed)
    machines = machines or int(rng.choice(list(SIZES), p=np.array(list(SIZES.values())) / 100))
    stages = int(rng.choice((1, 1, 2, 4))) if machines >= 16 else 1
    stage = np.arange(machines) * stages // machines
    load = _load(rng, machines)
    values = {rule.name: _metric(rng, rule, load, stage) for rule in LIMITS[:-1]}
    _disturb(rng, values)
    at, machine = 0, int(rng.integers(machines))
    severity = severity or float(rng.uniform(0.1, 1))
    at = int(rng.integers(30, SECONDS - 330))
    length = SECONDS if rng.random() < 0.6 else int(rng.integers(240, 600))
    if kind and kind != "unreachable metric":
        FAULTS[kind](_Fault(rng, values, slice(at, min(SECONDS, at + length)), machine, severity))
    _lose(rng, values)
    if kind == "unreachable metric":
        FAULTS[kind](_Fault(rng, values, slice(at, min(SECONDS, at + length)), machine, severity))
    names = tuple(f"node-{i:04d}" for i in range(machines))
    table = SampleTable(METRICS, names, np.stack([values[name] for name in METRICS]), groups=tuple(map(int, stage)))
    return GeneratedJob(table, kind, names[machine], at, severity) if kind else GeneratedJob(table)
