"""What runs in each rank for the tests of units: ranks along hdp, each with its part of one plan."""

from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
from torch.distributed import distributed_c10d

from tests.parallel.layouts import Case, batch, engine_of, loss_of, planned, rows_of, spread, weights
from tilth.core.errors import PlanError, TokenDivisionError
from tilth.parallel.context import ContextParallel
from tilth.plan.batch import MicroBatchPlan
from tilth.rl.packing import segment_sum
from tilth.trace.spans import recorder, span
from tilth.training.packed import packed_logprobs, packed_targets


def of_rows(total):
    """A loss that is no sum over tokens: every rank would have to know whole sequences."""

    def loss(micro):
        rows = segment_sum(micro.logprobs * micro.columns["scale"] + 0.3 * micro.entropy, micro.lengths) / micro.lengths
        return (rows.exp() + rows.square()).sum() / total, {}

    return loss


def whole_rows(rank: int, case: Case) -> tuple[float, float, np.ndarray]:
    """Loss and norm of one step of ``of_rows``, with a column of floats that no other rank gets."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    tokens, mask, starts = rows_of(case, sharded)
    plan = planned(case, sharded)[1] if case.hdp > 1 else None
    scale = {"scale": (starts.repeat(tokens.lengths) % 7 + 1.0) / 7}
    found = engine_of(case, sharded).update(tokens, mask, scale, of_rows(10.0), starts=starts, plan=plan)
    return found.loss, found.grad_norm, packed_logprobs(sharded, tokens, mask, max_tokens=case.micro_tokens, plan=plan)


def traced(rank: int, case: Case, folder: str) -> dict:
    """A recorded step and a recorded pass without gradient; how many groups there are before and after."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    engine, (_, plan) = engine_of(case, sharded), planned(case, sharded)
    tokens, mask, starts = rows_of(case, sharded)
    groups, results = list[int](), []
    with recorder.to(folder, rank=rank), span("call", 7, where=("policy", f"at={rank}")):
        for _ in range(2):  # the first one makes the groups of all ranks
            results.append(engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts, plan=plan))
            packed_logprobs(sharded, tokens, mask, max_tokens=case.micro_tokens, plan=plan)
            groups.append(len(distributed_c10d._world.pg_map))
    return {"plan": plan.learn, "groups": groups, "result": results[-1]}


def ring_timed(rank: int, case: Case, folder: str) -> float:
    """The seconds in which a sequence of 11 tokens goes around, recorded if there is a folder."""
    engine = engine_of(case, spread(case, rank))
    with recorder.to(folder, rank=rank) if folder else nullcontext(), span("call", 7, where=("policy", "at")):
        return engine.time_ring(11)


def refused(rank: int, case: Case, change: str) -> list[str]:
    """The keys of the errors where rank 1 follows another plan; then the step runs by the right one."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    plan = planned(case, sharded)[1]
    tokens, mask, starts = rows_of(case, sharded)
    given, engine = BROKEN[change](plan) if rank == 1 else plan, engine_of(case, sharded)
    how, keys = {"max_tokens": case.micro_tokens, "plan": given}, list[str]()
    for run in (
        lambda: packed_logprobs(sharded, tokens, mask, **how),
        lambda: engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts, plan=given),
    ):
        with pytest.raises(PlanError) as told:
            run()
        keys.append(told.value.key)
    assert np.isfinite(engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts, plan=plan).loss)
    return keys


def undivided(rank: int, case: Case) -> str:
    """The key of the error where each rank of a unit computes all of its tokens."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    tokens, mask, starts = rows_of(case, sharded)
    with patch.object(ContextParallel, "share", lambda *_: None), pytest.raises(TokenDivisionError) as told:
        how = {"starts": starts, "plan": planned(case, sharded)[1]}
        engine_of(case, sharded).update(tokens, mask, {}, loss_of(case, batch()[1]), **how)
    return told.value.key


def _changed(plan: MicroBatchPlan, micros) -> MicroBatchPlan:
    return MicroBatchPlan(tuple(micros), tuple(micros))


def _several(plan):
    return [i for i, micro in enumerate(plan.learn) if micro.several]


def _swapped(plan):
    first, second = _several(plan)[:2]
    micros = list(plan.learn)
    micros[first], micros[second] = micros[second], micros[first]
    return _changed(plan, micros)


def _missing(plan):
    gone = next(i for i in _several(plan) if not len(plan.learn[i].rows))  # the other rank has the rows
    return _changed(plan, [micro for i, micro in enumerate(plan.learn) if i != gone])


def _stranger(plan):
    return _changed(plan, [m._replace(ranks=(0, 7)) if m.several and not len(m.rows) else m for m in plan.learn])


BROKEN = {"order": _swapped, "member": _missing, "stranger": _stranger}


def scored(rank: int, case: Case) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Rows, and their scores by conversations of a row, by recorded choices of experts, and of other targets."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    every, _ = batch()
    rng, count = np.random.default_rng(5), len(every.values)
    opens = np.zeros(count, np.uint8)
    opens[every.offsets[:-1][every.lengths > 5] + 3] = 1
    experts = np.argsort(rng.random((count, 1, case.num_experts)))[..., : case.per_token]
    tokens, mask, _ = rows_of(case, sharded)
    rows, plan = planned(case, sharded) if case.hdp > 1 else (np.arange(len(every.lengths)), None)

    def own(column: np.ndarray) -> np.ndarray:
        return np.concatenate([column[:0], *(column[every.offsets[r] : every.offsets[r + 1]] for r in rows)])

    how = {"max_tokens": case.micro_tokens, "plan": plan}
    return rows, {
        "opens": packed_logprobs(sharded, tokens, mask, columns={"opens": own(opens)}, **how),
        "routing": packed_logprobs(sharded, tokens, mask, routing=own(experts), **how),
        "targets": packed_targets(sharded, tokens, mask, own(rng.integers(0, 33, count)), **how),
        "plain": packed_logprobs(sharded, tokens, mask, **how),
    }


def in_step(rank: int, cases: list[Case]) -> list[bool]:
    """Whether each model needs as many micro-batches before a unit on all ranks of it."""
    return [spread(case, rank).in_step for case in cases]
