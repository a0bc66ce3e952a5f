"""Score samples as soon as they are finished, while others are generated (Seed1.5-Thinking, arXiv 2504.13914)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.core.batch import Batch
from tilth.core.clock import periodically

PAUSE = 0.05
"""Seconds between two looks at what has finished."""

Known = Callable[[Batch], dict[int, Any]]
"""Outcomes that the journal has, by trajectory id."""


@contextmanager
def scored_ahead(
    rollout: WorkerGroup,
    reward: WorkerGroup | None,
    known: Known,
    call: int,
    most: int,
    judge: WorkerGroup | None = None,
) -> Iterator[None]:
    """While the body waits for its generation, pass what has finished to the reward and to the judge.

    call: number of this generation; ``reward.score`` and ``judge.begun`` take it. most: samples that the reward scores
    at once, and the judge. Samples that the journal knows are not passed to the reward.
    """
    failed = list[BaseException]()

    def pass_on() -> None:
        if failed:
            return
        try:
            for finished in rollout.finished():
                if reward is not None and (new := _unknown(finished, known)):
                    reward.begin(items=new, call=call, most=most)
                if judge is not None and finished:
                    judge.begin(items=finished, call=call, most=most)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the run
            failed.append(error)

    with periodically("scored-ahead", PAUSE, pass_on):
        yield
    if failed:
        raise failed[0]


def _unknown(finished: list[list[Any]], known: Known) -> list[list[Any]]:
    """Return the samples (id, prompt, checksum, text) that the journal does not know."""
    if not finished:
        return []
    ids, _, checksums, _ = zip(*finished)
    have = known(Batch({"id": np.array(ids, np.int64), "identity": np.array(checksums, np.uint32)}))
    return [sample for sample in finished if sample[0] not in have]
