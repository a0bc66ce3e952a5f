"""Reference role of distillation from several teachers, or from one with another tokenizer: log-probs over chunks of
equal text.

Of a chunk the policy's log-prob is log p, the sum over its tokens, and the teacher's log q. The gradient of
KL(policy || teacher) over chunks is that of each of the policy's tokens times log p - log q of its chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Column, Jagged, Store
from tilth.data.alignment import AlignedChunk, Translator
from tilth.plan.batch import MicroBatchLimits, MicroBatchPlan, RowTable
from tilth.roles.experience import CHUNK_TOKENS, TEACHER_KL, UNALIGNED, put_like, put_mask
from tilth.roles.reference import ReferenceWorker
from tilth.roles.state import Groups, Stateful, weights_group
from tilth.trace.spans import span

_CHUNKS = "chunks"
"""Payload column of translated rows: four numbers of each ``AlignedChunk`` in turn, int32."""


class TeacherWorker(ReferenceWorker):
    """A teacher that reads the text of the policy's tokens in its own. ``translated``, ``logprobs`` of what that
    returns, and ``aligned`` are one pass."""

    def __init__(self, *args: Any, translator: Translator, **how: Any) -> None:
        super().__init__(*args, **how)
        self.translator = translator

    @transfer(split="rows", gather="rows", reads=True)
    def translated(self, batch: Batch) -> Batch:
        """Return the rows in the teacher's tokens, with a mask of those that are in a chunk. Raises DataError."""
        with span("reference"):
            columns = batch.read(self.store, "tokens", "mask")
            pairs = zip(columns["tokens"].rows(), columns["mask"].rows())
            found = [self.translator.translate(ids, mask) for ids, mask in pairs]
            tokens = _ragged([one.tokens for one in found], np.int64)
            mask = _ragged([one.mask for one in found], np.uint8)
            rows = {name: values for name, values in batch.rows.items() if name in ("id", "group", "prompt", "row")}
            rows |= {"length": tokens.lengths.astype(np.int32), **RowTable.of(tokens, mask.values).columns()}
            chunks = _ragged([np.array(one.chunks, np.int32).ravel() for one in found], np.int32)
            payload = {"tokens": tokens, "mask": mask, _CHUNKS: chunks}
            return Batch(rows, {k: Column.whole(self.store.put(k, v), len(found)) for k, v in payload.items()})

    @transfer(split="rows", gather="rows", reads=True)
    def aligned(self, batch: Batch, theirs: Batch) -> Batch:
        """Add ``ref_logprobs`` and ``chunk_tokens``, take out of the mask what is in no chunk, and count it by row.

        theirs: the translated rows with their log-probs. Of a chunk of one token of the policy ``ref_logprobs`` is what
        the teacher says of it; of several each has an even share of the difference.
        """
        with span("reference"):
            columns = batch.read(self.store, "tokens", "mask", "old_logprobs")
            tokens, mask = columns["tokens"], columns["mask"].values
            logprobs, chunks = theirs.read(self.store, "ref_logprobs", _CHUNKS).values()
            ref, sizes = shares(chunks, columns["old_logprobs"], logprobs)
            kept = ((mask != 0) & (sizes > 0)).astype(np.uint8)
            lost = Jagged(((mask != 0) & (kept == 0)).astype(np.int32), tokens.offsets)
            batch = put_like(batch, self.store, "ref_logprobs", ref, tokens)
            batch = put_like(batch, self.store, CHUNK_TOKENS, sizes, tokens)
            batch = put_mask(batch, self.store, "mask", kept, tokens)
            return batch.with_rows(**{UNALIGNED: np.array([row.sum() for row in lost.rows()], np.int32)})


class TeachersWorker(Stateful):
    """Several teachers. A call names the one that its rows follow; the others compute nothing. ``translated``,
    ``logprobs`` of what that returns, and ``aligned`` are one pass."""

    def __init__(self, teachers: Mapping[str, ReferenceWorker]) -> None:
        first = next(iter(teachers.values()))
        super().__init__(first.sharded)
        self.teachers, self.store = teachers, first.store
        self.aligns = any(isinstance(one, TeacherWorker) for one in teachers.values())

    @property
    def limits(self) -> MicroBatchLimits:
        """Limits of micro-batches that each of them can compute."""
        every = [one.limits for one in self.teachers.values()]
        return replace(every[0], share=all(one.share for one in every), in_step=any(one.in_step for one in every))

    def groups(self) -> Groups:
        return {f"reference.{name}": weights_group(one.sharded) for name, one in self.teachers.items()}

    @transfer(split="rows", gather="rows", reads=True)
    def translated(self, batch: Batch, teacher: str) -> Batch:
        """Return the rows in the teacher's tokens, or as they are if those are the policy's. Raises DataError."""
        one = self.teachers[teacher]
        return one.translated(batch) if isinstance(one, TeacherWorker) else batch

    @transfer(split="plan", gather="rows", reads=True)
    def logprobs(self, batch: Batch, teacher: str, *, plan: MicroBatchPlan | None = None) -> Batch:
        """Add ``ref_logprobs`` of one teacher."""
        return self.teachers[teacher].logprobs(batch, plan=plan)

    @transfer(split="rows", gather="rows", reads=True)
    def aligned(self, batch: Batch, theirs: Batch, teacher: str) -> Batch:
        """Add ``ref_logprobs``, and the row ``teacher_kl``: the sum of log p - log q over the policy's tokens.

        With a teacher that has another tokenizer also what ``TeacherWorker.aligned`` adds, to rows of each teacher.
        """
        one = self.teachers[teacher]
        if isinstance(one, TeacherWorker):
            batch = one.aligned(batch, theirs)
        else:
            batch = batch.with_payload(ref_logprobs=theirs.payload["ref_logprobs"])
            if self.aligns:
                batch = _alone(batch, self.store)
        columns = batch.read(self.store, "mask", "old_logprobs", "ref_logprobs")
        mask, ours, said = columns.values()
        gaps = Jagged(np.where(mask.values != 0, ours.values - said.values, 0.0), mask.offsets)
        return batch.with_rows(**{TEACHER_KL: np.array([row.sum() for row in gaps.rows()], np.float64)})


def _alone(batch: Batch, store: Store) -> Batch:
    """Add to rows of a teacher with the policy's tokens that each token is a chunk of its own."""
    mask = batch.read(store, "mask")["mask"]
    batch = put_like(batch, store, CHUNK_TOKENS, (mask.values != 0).astype(np.float32), mask)
    return batch.with_rows(**{UNALIGNED: np.zeros(len(batch), np.int32)})


def shares(chunks: Jagged, own: Jagged, theirs: Jagged) -> tuple[np.ndarray, np.ndarray]:
    """Return the teacher's log-prob of each of the policy's tokens, and the tokens of its chunk: float32 [N] each, 0
    where it is in none.

    chunks: of each row, as in the payload; own: the policy's log-probs [N], theirs: the teacher's of its own tokens.
    """
    ref, sizes = np.zeros(len(own.values), np.float32), np.zeros(len(own.values), np.float32)
    table = chunks.values.reshape(-1, len(AlignedChunk._fields)).astype(np.int64)
    rows = np.repeat(np.arange(len(chunks.lengths)), chunks.lengths // len(AlignedChunk._fields))
    mine, other = table[:, :2] + own.offsets[rows, None], table[:, 2:] + theirs.offsets[rows, None]
    p, q, counts = _sums(own.values, mine), _sums(theirs.values, other), mine[:, 1] - mine[:, 0]
    which = np.repeat(np.arange(len(table)), counts)
    at = mine[which, 0] + np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    alone = counts == 1
    ref[at] = np.where(alone[which], 0.0, own.values[at]) + np.where(alone, q, (q - p) / counts)[which]
    sizes[at] = counts[which]
    return ref, sizes


def _sums(values: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return the sum of the values [start, end) of each row of spans [k, 2], float64; none is empty."""
    found: np.ndarray = np.add.reduceat(np.append(values.astype(np.float64), 0.0), spans.ravel())[::2]
    return found


def _ragged(rows: Sequence[np.ndarray], kind: type) -> Jagged:
    return Jagged.with_lengths(np.concatenate([np.zeros(0, kind), *rows]), [len(row) for row in rows])
