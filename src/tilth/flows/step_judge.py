"""Penalise right answers in which a judge finds a wrong step (FAPO, arXiv 2510.22543)."""

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.core.batch import Batch
from tilth.flows.reward_shaping import has_spread
from tilth.flows.run import Run
from tilth.rewards.judging import NONE_WRONG, penalty
from tilth.roles.experience import is_right
from tilth.roles.judge import JUDGED_BY, VERDICT

FLAWED = "part/flawed"
"""Part that a task may return: 1 if a right answer has a wrong step. It measures the judge and changes no reward."""


def ask_judge(judge: WorkerGroup, loader: WorkerGroup, batch: Batch) -> Batch:
    """Return the right answers of a batch with the judge's verdicts, lazily: a judge with its own pool runs beside
    other roles."""
    right = batch.select(is_right(batch))
    return judge.verdicts(loader.texts(right)) if len(right) else right.with_rows(**{VERDICT: np.zeros(0, np.float32)})


def penalised(run: Run, batch: Batch, verdicts: Batch) -> Batch:
    """Lower the rewards of flawed right answers. verdicts: from ``ask_judge``; a missing one changes nothing."""
    flawed = ~np.isnan(verdicts[VERDICT]) & (verdicts[VERDICT] != NONE_WRONG)
    _measure(run, verdicts, flawed)
    place = np.isin(batch["id"], verdicts["id"][flawed])
    lowered = penalty(batch["reward"], coefficient=run.recipe.judge.penalty, flawed=place)
    return batch.with_rows(reward=lowered.astype(np.float32))


def drop_flat_groups(run: Run, batch: Batch) -> Batch:
    """Drop groups whose rewards are all equal after the penalty, if the recipe drops flat groups."""
    if run.recipe.algorithm.refill or not run.algorithm.drops_flat:
        return batch
    kept = batch.select(has_spread(batch))
    run.metrics.add("samples/trained", float(len(kept) - len(batch)))
    return kept


def _measure(run: Run, verdicts: Batch, flawed: np.ndarray) -> None:
    add, asked = run.metrics.add, len(verdicts)
    add("judge/asked", float(asked))
    add("judge/unparsed", float(np.isnan(verdicts[VERDICT]).sum()))
    if asked:
        add("judge/flawed", float(flawed.mean()), asked)
        add("judge/version", float(verdicts[JUDGED_BY][-1]))
    if FLAWED not in verdicts.rows:
        return
    truth = verdicts[FLAWED]
    for name, among in (("judge/precision", flawed), ("judge/recall", truth == 1)):
        known = among & ~np.isnan(truth)
        if known.any():
            add(name, float((flawed & (truth == 1))[known].mean()), int(known.sum()))
