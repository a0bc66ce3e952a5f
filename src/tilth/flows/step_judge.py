"""What a judge of steps does to rewards (FAPO, arXiv 2510.22543): flawed-positive answers lose a part of theirs."""

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.core.batch import Batch
from tilth.flows.group_filters import has_spread
from tilth.flows.run import Run
from tilth.rewards.judging import NONE_WRONG, penalty
from tilth.roles.experience import is_right
from tilth.roles.judge import JUDGED_BY, VERDICT

FLAWED = "part/flawed"
"""Where a task knows of a right answer whether a step of it is wrong; the judge is measured by it, no reward is."""


def ask_judge(judge: WorkerGroup, loader: WorkerGroup, batch: Batch) -> Batch:
    """The right answers of a batch, with the judge's verdicts; it is asked about no others. Lazy: a judge with a pool
    of its own reads while other roles work."""
    right = batch.select(is_right(batch))
    return judge.verdicts(loader.texts(right)) if len(right) else right.with_rows(**{VERDICT: np.zeros(0, np.float32)})


def penalised(run: Run, batch: Batch, told: Batch) -> Batch:
    """With the rewards of right answers that are flawed lowered. told: see ``ask_judge``.

    A verdict that is missing lowers nothing, and is counted.
    """
    flawed = ~np.isnan(told[VERDICT]) & (told[VERDICT] != NONE_WRONG)
    _measure(run, told, flawed)
    place = np.isin(batch["id"], told["id"][flawed])
    lowered = penalty(batch["reward"], coefficient=run.recipe.judge.penalty, flawed=place)
    return batch.with_rows(reward=lowered.astype(np.float32))


def drop_flat_groups(run: Run, batch: Batch) -> Batch:
    """Without the groups in which all rewards are equal now, where the recipe leaves such out."""
    if run.recipe.algorithm.refill or not run.algorithm.drops_flat:
        return batch
    kept = batch.select(has_spread(batch))
    run.metrics.add("samples/trained", float(len(kept) - len(batch)))
    return kept


def _measure(run: Run, told: Batch, flawed: np.ndarray) -> None:
    add, asked = run.metrics.add, len(told)
    add("judge/asked", float(asked))
    add("judge/unparsed", float(np.isnan(told[VERDICT]).sum()))
    if asked:
        add("judge/flawed", float(flawed.mean()), asked)
        add("judge/version", float(told[JUDGED_BY][-1]))
    if FLAWED not in told.rows:
        return
    truth = told[FLAWED]
    for name, among in (("judge/precision", flawed), ("judge/recall", truth == 1)):
        known = among & ~np.isnan(truth)
        if known.any():
            add(name, float((flawed & (truth == 1))[known].mean()), int(known.sum()))
