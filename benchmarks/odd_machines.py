"""Odd machines of generated jobs: precision, recall, F1 and seconds to alert, beside other detectors on the same jobs.

    python benchmarks/odd_machines.py [--quick] [--json PATH] [--seed N]

Thresholds, their margin and the order of metrics come from jobs of other seeds, and never from the kind of fault that
is scored: five folds, each without two kinds. A score job counts as found if the named machine is the faulty one and
the alert comes after the onset. All methods get the same fitting (healthy peaks times the margin with the best F1 on
the fit jobs); they differ in what is compared:

tilth           the product: median of five, mean of a window, one metric after the other
tilth, 240 s    tilth with the span of Minder, four minutes
tilth, z-score  the embeddings of tilth, z = (D - mean) / std over all machines, with the faulty one
raw distance    windows of 8 samples as they are, filled
no continuity   tilth with an alert at the first window
joint model     tilth's embeddings of all metrics, each divided by its floor, in one distance
Mahalanobis     mean, variance, skewness and kurtosis of each metric's window, main components, one distance
LSTM-VAE        windows of 8 samples rebuilt by a model a metric (hidden 4, latent 8), jobs of up to 32 machines only
"""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows
from odd_jobs import FAULTS, LIMITS, GeneratedJob, make_job
from tilth_studies.odd_machine_fit import in_order, with_floors, with_thresholds

from tilth.guard.odd_machines import (
    MISSING,
    OddMachineRules,
    OddMachineWatch,
    SampleTable,
    distances,
    equals,
    filled,
    leave_one_out,
    levels,
    sustained,
)  # fmt: skip

MARGINS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)
KINDS = tuple(FAULTS)
FOLDS = tuple(KINDS[i : i + 2] for i in range(0, len(KINDS), 2))
SHORT = 8
SMALL = 32
"""Machines of a job that the LSTM-VAE gets; its windows begin every STRIDE seconds."""
STRIDE = 3


@dataclass(frozen=True)
class Course:
    """The largest score held for the span of an alert, at each moment, one row a metric. [metrics, moments]."""

    peak: np.ndarray
    who: np.ndarray
    first: int
    """Second of an alert at moment 0."""
    step: int = 1


Method = Callable[[SampleTable, OddMachineRules], Course]


def course(score: list[np.ndarray], length: int, first: int, step: int = 1) -> Course:
    held = [sustained(of, length) for of in score]
    return Course(
        np.stack([of.max(axis=1, initial=0) for of in held]), np.stack([of.argmax(axis=1) for of in held]),
        first + (length - 1) * step, step,
    )  # fmt: skip


def compared(table: SampleTable, embedding: list[np.ndarray], floor: float, z: bool = False) -> np.ndarray:
    """Scores of an embedding of several coordinates, each [windows, machines], by the sum of their distances."""
    found = np.zeros(embedding[0].shape)
    for columns in equals(table):
        total = np.stack([distances(of[:, columns]) for of in embedding]).sum(axis=0)
        if z:
            found[:, columns] = (total - total.mean(1, keepdims=True)) / (total.std(1, keepdims=True) + 1e-9)
        else:
            found[:, columns] = leave_one_out(total, floor * len(embedding))
    return found


def tilth(table: SampleTable, rules: OddMachineRules, z: bool = False, continuity: float = 0) -> Course:
    rules = replace(rules, continuity=continuity or rules.continuity)
    window, length = rules.windows(1.0)
    score = [compared(table, [levels(table, rule, window)], rule.floor, z) for rule in rules.metrics]
    return course(score, 1 if continuity == 1 else length, window + 1)


def z_score(table: SampleTable, rules: OddMachineRules) -> Course:
    return tilth(table, rules, z=True)


def longer(table: SampleTable, rules: OddMachineRules) -> Course:
    return tilth(table, rules, continuity=240)


def no_continuity(table: SampleTable, rules: OddMachineRules) -> Course:
    return tilth(table, rules, continuity=1)


def joint(table: SampleTable, rules: OddMachineRules) -> Course:
    window, length = rules.windows(1.0)
    embedding = [levels(table, rule, window) / rule.floor for rule in rules.metrics if rule.name != MISSING]
    return course([compared(table, embedding, 1.0)], length, window + 1)


def samples(table: SampleTable, name: str) -> np.ndarray:
    """Filled samples of a metric by its limits, [samples, machines]."""
    if name == MISSING:
        return np.isnan(table.values).mean(axis=0, dtype=np.float32)
    rule = next(rule for rule in LIMITS if rule.name == name)
    values = (table.values[table.metrics.index(name)] - np.float32(rule.low)) / np.float32(rule.high - rule.low)
    return filled(values)


def raw(table: SampleTable, rules: OddMachineRules) -> Course:
    """Sum of distances of 8 samples; its floor is that of one sample."""
    score = []
    for rule in rules.metrics:
        values, found = samples(table, rule.name), np.zeros((len(table.values[0]) - SHORT + 1, len(table.machines)))
        for columns in equals(table):
            sums = np.cumsum(distances(values[:, columns]), axis=0)
            sums[SHORT:] -= sums[:-SHORT].copy()
            found[:, columns] = leave_one_out(sums[SHORT - 1 :], rule.floor * SHORT)
        score.append(found)
    return course(score, rules.windows(1.0)[1], SHORT)


def mahalanobis(table: SampleTable, rules: OddMachineRules) -> Course:
    """Distances over the median distance, windows every 10 seconds."""
    window = rules.windows(1.0)[0]
    begins = range(0, table.values.shape[1] - window + 1, 10)
    parted = [samples(table, name) for name in table.metrics]
    score = np.zeros((len(begins), len(table.machines)))
    for row, begin in enumerate(begins):
        parts = np.stack([of[begin : begin + window] for of in parted]).astype(np.float64)
        mean, std = parts.mean(1, keepdims=True), parts.std(1, keepdims=True) + 1e-4
        unit = (parts - mean) / std
        features = np.concatenate([mean[:, 0], std[:, 0] ** 2, (unit**3).mean(1), (unit**4).mean(1)]).T
        for columns in equals(table):
            x = features[columns]
            x = (x - x.mean(0)) / (x.std(0) + 1e-9)
            u = np.linalg.svd(x, full_matrices=False)[0][:, : max(1, min(6, len(columns) // 3))]
            distance = np.sqrt((u**2).sum(1))
            score[row, columns] = distance / (np.median(distance) + 1e-9)
    length = int(np.ceil((rules.windows(1.0)[1]) / 10))
    return course([score], length, window, 10)


@cache
def denoisers(seed: int) -> dict[str, Any]:
    """Train an LSTM-VAE a metric on windows of healthy fit jobs."""
    import torch
    from odd_vae import train_denoiser

    torch.set_num_threads(1)
    tables = [make_job((seed, 3, i), machines=32).table for i in range(12)]
    return {rule.name: train_denoiser([samples(table, rule.name) for table in tables], SHORT) for rule in LIMITS}


def vae(table: SampleTable, rules: OddMachineRules) -> Course:
    score = []
    for rule in rules.metrics:
        windows = np.lib.stride_tricks.sliding_window_view(samples(table, rule.name), SHORT, axis=0)[::STRIDE]
        rebuilt = denoisers(0)[rule.name].rebuild(np.ascontiguousarray(windows))
        score.append(compared(table, [rebuilt[..., i] for i in range(SHORT)], rule.floor))
    return course(score, int(np.ceil(rules.windows(1.0)[1] / STRIDE)), SHORT, STRIDE)


METHODS: dict[str, Method] = {
    "tilth": tilth, "tilth, 240 s": longer, "tilth, z-score": z_score, "raw distance": raw,
    "no continuity": no_continuity, "joint model": joint, "Mahalanobis": mahalanobis, "LSTM-VAE": vae,
}  # fmt: skip


def first_alert(of: Course, order: tuple[int, ...], threshold: np.ndarray) -> tuple[int, int] | None:
    """Machine and second of the alert: the first moment of the first metric in order that exceeds its threshold."""
    for metric in order:
        above = of.peak[metric] > threshold[metric]
        if above.any():
            at = int(above.argmax())
            return int(of.who[metric, at]), of.first + at * of.step
    return None


@dataclass(frozen=True)
class Judged:
    """One job seen by one method."""

    job: GeneratedJob
    number: int
    course: Course

    def outcome(self, order: tuple[int, ...], threshold: np.ndarray) -> tuple[str, float]:
        """Return right, wrong, early, missed, false or quiet, and the seconds from onset to alert."""
        found = first_alert(self.course, order, threshold)
        if not self.job.kind:
            return ("false" if found else "quiet"), 0.0
        if found is None:
            return "missed", 0.0
        after = found[1] - self.job.onset
        named = f"node-{found[0]:04d}" == self.job.machine
        return ("right" if named and after > 0 else "early" if named else "wrong"), after


def figures(outcomes: list[tuple[str, float]]) -> dict[str, float]:
    """Precision, recall, F1 and median seconds to alert."""
    names = [name for name, _ in outcomes]
    right, alerts = names.count("right"), len(names) - names.count("quiet") - names.count("missed")
    faulty = len(names) - names.count("quiet") - names.count("false")
    precision, recall = right / max(1, alerts), right / max(1, faulty)
    after = [seconds for name, seconds in outcomes if name == "right"]
    return {
        "precision": precision, "recall": recall, "f1": 2 * precision * recall / max(1e-9, precision + recall),
        "seconds": float(np.median(after)) if after else float("nan"),
    }  # fmt: skip


def fitted(seen: list[Judged], rules: OddMachineRules) -> tuple[tuple[int, ...], np.ndarray, float]:
    """Order, thresholds and margin with the best F1 on fit jobs; the order is the product's decision list."""
    peak = np.stack([of.course.peak.max(axis=1, initial=0) for of in seen])
    faulty = np.array([bool(of.job.kind) for of in seen])
    plain = replace(rules, metrics=rules.metrics[: peak.shape[1]])
    best = (-1.0, 0.0, tuple[int, ...](), np.zeros(0))
    for margin in MARGINS:
        made = in_order(with_thresholds(plain, peak[~faulty], margin), peak, faulty)
        names = [rule.name for rule in plain.metrics]
        order = tuple(names.index(rule.name) for rule in made.metrics)
        threshold = np.array([next(r.threshold for r in made.metrics if r.name == name) for name in names])
        f1 = figures([of.outcome(order, threshold) for of in seen])["f1"]
        if f1 > best[0]:
            best = (f1, margin, order, threshold)
    return best[2], best[3], best[1]


def study(task: tuple[tuple[int, ...], str, int, OddMachineRules]) -> dict[str, Judged]:
    """Make a job and return method -> what it saw."""
    seed, kind, number, rules = task
    job = make_job(seed, kind)
    small = len(job.table.machines) <= SMALL
    seen = {name: METHODS[name](job.table, rules) for name in METHODS if name != "LSTM-VAE" or small}
    slim = replace(job, table=replace(job.table, values=job.table.values[:, :0]))
    return {name: Judged(slim, number, of) for name, of in seen.items()}


def judge(seen: list[dict[str, Judged]], fit: list[dict[str, Judged]], rules: OddMachineRules) -> list[dict[str, Any]]:
    """Score every method, each fold with what was fitted without its kinds. One row a method and job."""
    rows = list[dict[str, Any]]()
    for name, (number, fold) in product(METHODS, enumerate(FOLDS)):
        known = [of[name] for of in fit if name in of and of[name].job.kind not in fold]
        order, threshold, margin = fitted(known, rules)
        mine = [of[name] for of in seen if name in of]
        mine = [of for of in mine if of.job.kind in fold or (not of.job.kind and of.number % len(FOLDS) == number)]
        for of in mine:
            outcome, seconds = of.outcome(order, threshold)
            rows.append({
                "method": name, "fault": of.job.kind or "healthy", "machines": len(of.job.table.machines),
                "severity": of.job.severity, "outcome": outcome, "seconds": seconds, "margin": margin,
            })  # fmt: skip
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    lines = ["| method | jobs | precision | recall | F1 | s to alert | wrong or early | healthy hours | false |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    small = [{**row, "method": f"{row['method']}, <= {SMALL}"} for row in rows if row["machines"] <= SMALL]
    small = [row for row in small if row["method"].startswith(("tilth,", "raw"))]
    every = rows + [row for row in small if "z-score" not in row["method"] and "240" not in row["method"]]
    for name in dict.fromkeys(row["method"] for row in every):
        mine = [(row["outcome"], row["seconds"]) for row in every if row["method"] == name]
        found, names = figures(mine), [outcome for outcome, _ in mine]
        healthy = names.count("false") + names.count("quiet")
        lines.append(
            f"| {name} | {len(mine)} | {found['precision']:.3f} | {found['recall']:.3f} | {found['f1']:.3f} | "
            f"{found['seconds']:.0f} | {names.count('wrong') + names.count('early')} | {healthy / 4:.1f} | "
            f"{names.count('false')} |"
        )
    for kind in KINDS:
        of_kind = [row for row in rows if row["method"] == "tilth" and row["fault"] == kind]
        right = sum(row["outcome"] == "right" for row in of_kind)
        lines.append(f"{kind}: {right} of {len(of_kind)}, " + ", ".join(sorted({row["outcome"] for row in of_kind})))
    return "\n".join(lines)


def speed(rules: OddMachineRules, healthy: np.ndarray) -> float:
    """Processor seconds of one call for 1,500 machines, 7 metrics and 900 samples, without a fault."""
    job = make_job((9, 9, 9), machines=1500)
    watch = OddMachineWatch(with_thresholds(rules, healthy, 9.0))
    begin = time.process_time()
    assert watch.detect(job.table) is None
    return time.process_time() - begin


def main() -> None:
    parser = benchmark_parser(__doc__, "4 jobs a kind")
    parser.add_argument("--jobs", type=int, default=8, help="score jobs of each kind of fault")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    jobs = 4 if options.quick else options.jobs
    floors = [make_job((0, 0, i), machines=(8, 32, 128)[i % 3]).table for i in range(6)]
    rules = with_floors(OddMachineRules(LIMITS), floors)
    denoisers(0)
    fit = [((0, 1, i), "", i, rules) for i in range(jobs * 5)]
    fit += [((0, 2, i), KINDS[i % len(KINDS)], i, rules) for i in range(jobs * 5)]
    score = [((options.seed, 1, i), "", i, rules) for i in range(jobs * len(KINDS))]
    score += [((options.seed, 2, i), KINDS[i % len(KINDS)], i, rules) for i in range(jobs * len(KINDS))]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        seen = pool.map(study, fit + score, chunksize=4)
    print("healthy machines reach", {
        rule.name: round(float(np.max([of["tilth"].course.peak[i].max(initial=0) for of in seen[: jobs * 5]])), 2)
        for i, rule in enumerate(LIMITS)
    })  # fmt: skip
    rows = judge(seen[len(fit) :], seen[: len(fit)], rules)
    write_rows(options.json, rows)
    print(table_of(rows))
    print(f"one call, 1,500 machines: {speed(rules, np.ones((1, len(LIMITS)))):.2f} s of processor time")


if __name__ == "__main__":
    main()
