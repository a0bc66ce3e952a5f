"""Synthetic traces of pipeline schedules: 1F1B, interleaved 1F1B, zero-bubble, with any durations.

Their true timelines are known in closed form, so they test the dependency model; and they are as large as one likes.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from tilth_studies.dependencies import dependencies
from tilth_studies.straggler_format import OPTYPES, Trace

from tilth.analysis.replay import schedule
from tilth.core.errors import DataError

Compute = tuple[str, int, int]
"""Type, micro-batch, model chunk."""
Durations = Callable[[Trace], np.ndarray]
"""For a trace without times, float64 [n, s, d]: seconds; of communication the transfer alone."""
_LAYOUT = ("1f1b", "interleaved", "zero-bubble")


def orders(kind: str, stages: int, micro_batches: int, chunks: int = 1) -> list[list[Compute]]:
    """The computes of each stage in the order of their launch.

    ``1f1b`` (PipeDream-flush, 2006.09503), ``interleaved`` (Megatron-LM, 2104.04473; micro-batches must be a multiple
    of stages), ``zero-bubble`` (ZB-H1, 2401.10241). DataError for another kind, or sizes it cannot have.
    """
    if kind not in _LAYOUT:
        raise DataError(f"no schedule {kind!r}; there are {', '.join(_LAYOUT)}")
    if min(stages, micro_batches, chunks) < 1:
        raise DataError(f"stages, micro-batches and chunks must be positive, not {stages}, {micro_batches}, {chunks}")
    if kind == "interleaved" and micro_batches % stages:
        raise DataError(f"interleaved needs a multiple of {stages} micro-batches, not {micro_batches}")
    if kind != "interleaved" and chunks != 1:
        raise DataError(f"{kind} has 1 chunk a stage, not {chunks}")
    return [_order(kind, p, stages, micro_batches, chunks) for p in range(stages)]


def _order(kind: str, p: int, stages: int, micro_batches: int, chunks: int) -> list[Compute]:
    total = micro_batches * chunks
    ahead = stages - p - 1 if chunks == 1 else 2 * (stages - p - 1) + (chunks - 1) * stages
    warm = min(ahead, total)
    forwards = [("forward-compute", *_virtual(k, stages, chunks)) for k in range(total)]
    backwards = [("backward-compute", m, chunks - 1 - c) for _, m, c in forwards]
    steady = [op for pair in zip(forwards[warm:], backwards) for op in pair]
    order: list[Compute] = [*forwards[:warm], *steady, *backwards[total - warm :]]
    return _with_weights(order, p) if kind == "zero-bubble" else order


def _virtual(k: int, stages: int, chunks: int) -> tuple[int, int]:
    """Micro-batch and chunk of the k-th forward of a stage."""
    if chunks == 1:
        return k, 0
    group, inside = divmod(k, stages * chunks)
    return group * stages + inside % stages, inside // stages


def _with_weights(order: Sequence[Compute], late: int) -> list[Compute]:
    """The weight half of each backward follows it by so many backwards as the stage is far from the first."""
    result: list[Compute] = []
    done = 0
    for op in order:
        result.append(op)
        if op[0] == "backward-compute":
            done += 1
            if done > late:
                result.append(("weight-compute", done - late - 1, 0))
    return result + [("weight-compute", m, 0) for m in range(max(done - late, 0), done)]


def synthetic(
    order: Sequence[Sequence[Compute]], durations: Durations, *, dp: int = 1, steps: int = 1, overlapped: bool = False
) -> Trace:
    """A trace of such steps, as a tracer would have written it: communication is recorded with its waiting.

    order: of ``orders``. overlapped: gradients of a chunk are reduced while other chunks still go backward.
    """
    bare = _bare(order, dp, steps, overlapped)
    plan = schedule(dependencies(bare))
    took = np.broadcast_to(durations(bare), bare.start.shape)
    start, end = np.empty_like(bare.start), np.empty_like(bare.start)
    launched = np.empty_like(start)
    end[plan.order] = plan.run(took[plan.order], launched)
    start[plan.order] = launched
    return Trace(
        bare.optype, bare.stage, bare.seq, bare.chunk, bare.micro_batch, start, end - start, bare.steps, bare.ranks
    )


def _bare(order: Sequence[Sequence[Compute]], dp: int, steps: int, overlapped: bool) -> Trace:
    """Operations without durations; their starts only tell the order of launch."""
    rows: list[tuple[int, int, int, int, int]] = []
    starts: list[float] = []
    for stage, computes in enumerate(order):
        counts: dict[str, int] = {}
        for at, (name, chunk, micro_batch) in enumerate(_operations(computes, stage, len(order), overlapped)):
            seq = counts[name] = counts.get(name, -1) + 1
            rows.append((OPTYPES.index(name), stage, seq, chunk, micro_batch))
            starts.append(at)
    optype, of, seqs, chunks, batches = np.array(rows).T
    start = np.broadcast_to(np.array(starts, float)[:, None, None], (len(rows), steps, dp)).copy()
    ranks = np.arange(len(order) * dp).reshape(len(order), dp)
    return Trace(optype, of, seqs, chunks, batches, start, np.zeros_like(start), np.arange(steps), ranks)


def _operations(computes: Sequence[Compute], stage: int, stages: int, overlapped: bool) -> list[tuple[str, int, int]]:
    """(type, chunk, micro-batch) of all operations of a stage, in order of launch."""
    chunks = max(c for _, _, c in computes) + 1
    result = [("params-all-gather", c, -1) for c in range(chunks)]
    for name, micro_batch, chunk in computes:
        way, virtual = name.split("-")[0], chunk * stages + stage
        first, last = virtual == 0, virtual == chunks * stages - 1
        if way == "backward":
            first, last = last, first
        pipe = way != "weight"
        result += [(f"{way}-recv", -1, -1)] * (pipe and not first)
        result.append((name, chunk, micro_batch))
        result += [(f"{way}-send", -1, -1)] * (pipe and not last)
    scatters = [("grads-reduce-scatter", c, -1) for c in reversed(range(chunks))]
    tail = [("gc", -1, -1), ("layernorm-grads-all-reduce", -1, -1)]
    tail += [("embedding-grads-all-reduce", -1, -1)] * (stages > 1 and stage in (0, stages - 1))
    tail = scatters + tail if overlapped else tail + scatters
    return [*result, *tail, ("optimizer-clip-main-grad", -1, -1), ("optimizer", -1, -1)]


def by_type(**seconds: float) -> Durations:
    """Durations by type, with ``_`` for ``-`` (``forward_compute=1.0``); all others take no time."""
    table = np.zeros(len(OPTYPES))
    for name, value in seconds.items():
        table[OPTYPES.index(name.replace("_", "-"))] = value
    return lambda trace: table[trace.optype][:, None, None]


def to_table(trace: Trace) -> pa.Table:
    """The trace in the study's format, a row an operation."""
    n, steps, dp = trace.start.shape

    def spread(values: np.ndarray, axis: int) -> np.ndarray:
        shape = [1, 1, 1]
        shape[axis] = -1
        return np.broadcast_to(values.reshape(shape), (n, steps, dp)).ravel()

    ranks = np.broadcast_to(trace.ranks[trace.stage][:, None], (n, steps, dp))
    optype = pa.DictionaryArray.from_arrays(spread(trace.optype, 0).astype(np.int8), pa.array(OPTYPES))
    whole = {"seq_id": trace.seq, "mc": trace.chunk, "mb_id": trace.micro_batch, "stage": trace.stage}
    return pa.table({
        "dp_rank": spread(np.arange(dp), 2).astype(np.int32), "rank": ranks.ravel().astype(np.int32),
        "step": spread(trace.steps, 1), "optype": optype, "start_ts": trace.start.ravel(),
        "duration": trace.duration.ravel(), **{k: spread(v, 0).astype(np.int32) for k, v in whole.items()},
    })  # fmt: skip
