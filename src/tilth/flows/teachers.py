"""Samples and their teachers: the rows of a batch go to the teacher of their prompt alone."""

from collections.abc import Sequence

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.lazy import resolved
from tilth.config.schema import Teacher
from tilth.core.batch import Batch, concat
from tilth.flows.step_log import StepLog
from tilth.roles.experience import TEACHER_KL, UNALIGNED


def each_by_its_own(
    batch: Batch, group: WorkerGroup, teachers: Sequence[Teacher], followed: np.ndarray, log: StepLog
) -> Batch:
    """Add what the teacher of each row says of it, as ``roles.teacher.TeachersWorker`` does, and measure it by teacher.

    followed: the number of the teacher of each prompt, int16.
    """
    metrics, aligns = log.metrics, any(teacher.aligns for teacher in teachers)
    mine, parts, places = followed[batch["prompt"]], list[Batch](), list[np.ndarray]()
    for number, teacher in enumerate(teachers):
        rows = np.flatnonzero(mine == number)
        metrics.add(f"reference/rows/{teacher.name}", float(len(rows)))
        if not len(rows) and (number or len(batch)):  # a batch without rows gets the columns of the first
            continue
        part = batch.select(rows)
        theirs = group.logprobs(group.translated(part, teacher.name), teacher.name)
        parts.append(resolved(group.aligned(part, theirs, teacher.name)))
        places.append(rows)
        tokens = int(part["completion"].sum())
        lost = int(parts[-1][UNALIGNED].sum()) if teacher.aligns else 0
        metrics.add_sum(f"reference/unaligned/{teacher.name}", lost, tokens)
        if aligns:
            log.add_unaligned(lost, tokens, teacher.name)
        metrics.add_sum(f"reference/kl/{teacher.name}", float(parts[-1][TEACHER_KL].sum()), tokens - lost)
    return concat(parts).select(np.argsort(np.concatenate(places)))
