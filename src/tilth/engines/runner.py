"""Forward passes over the cache, for decode (one token per row) and prefill chunks; decode may be compiled."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.errors import DataError
from tilth.core.trajectory import Likeliest
from tilth.engines.branches import Branches
from tilth.engines.cache import CachedContext, KVCache, KVCacheView
from tilth.engines.request import TextScores
from tilth.engines.sampling import group_mass, log_softmax
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.models.moe import ExpertContext
from tilth.plan.kernels import chunk_rows

Forward = Callable[[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]
_numbers = itertools.count()
_ARGUMENTS = ("", "ids", "start", "temperature", "keys", "values")
Captured = tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]
"""A graph, its inputs (ids, start) and its logits."""


class Runner:
    """Runs the model's steps. compile: torch.compile of decode on a CPU, CUDA graphs on a GPU. multiple: of rows."""

    def __init__(self, model: Decoder, parity: bool, compile: bool, device: torch.device, multiple: int) -> None:
        self.model = model
        self.compile_seconds = 0.0
        """Seconds in first calls of compiled code so far."""
        self._parity, self._multiple, self._compiled, self._graphs = parity, multiple, None, None
        if compile and device.type == "cuda":
            self._graphs = Graphs(self)
        elif compile:
            self._compiled = CompiledDecode(model, device)

    @property
    def compiled(self) -> bool:
        """True if decode is one compiled graph for many numbers of rows, of which 1 would be another."""
        return self._compiled is not None

    def forward_rows(
        self,
        slab: KVCache | KVCacheView,
        given: ModelInput,
        start: Tensor,
        length: int,
        picked: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Tensor:
        """Return hidden [B * C, hidden] of new tokens, ids int64 [B, C], in the first B rows, from positions start [B].

        length: slots of the cache to read. A row with fewer than C tokens is padded at its end. picked: int64 [T], the
        tokens of the B * C that are computed; the result is then [T, hidden]. branches: see ``CachedContext``.
        """
        records = isinstance(slab, KVCache) and bool(slab.routing)
        experts = ExpertContext(parity=self._parity, record=True) if records else None
        sizes = (given.ids.shape[1], length, self._parity)
        more: dict[str, Any] = {"experts": experts, "picked": picked, "branches": branches}
        ctx = CachedContext(slab, start, *sizes, multiple=self._multiple, **more)
        ids = given.ids.flatten()
        hidden: Tensor = self.model(given._replace(ids=ids if picked is None else ids[picked]), ctx)
        if records:
            ctx.keep_routing()
        return hidden

    def prefill(self, slab: KVCache, given: ModelInput, start: Tensor, length: int, last: Tensor) -> Tensor:
        """Return logits float32 [rows, V] after the tokens at flat indices ``last`` of [B * C] (may be empty)."""
        return self.model.logits(self.forward_rows(slab, given, start, length)[last])

    def decode(
        self,
        slab: KVCache,
        ids: Tensor,
        start: Tensor,
        length: int,
        temperature: Tensor,
        unit: bool,
        eager: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs float32 [B, V] of rows 0 .. B - 1, whose newest token ids [B] is at positions start [B].

        temperature: float32 [B]; unit: all are 1; eager: rows have adapters, which compiled code leaves out. The second
        result is their ``group_mass``, if the pass computes it.
        """
        if self._compiled is not None and not eager:
            return self._compiled(slab, ids, start, temperature)
        if self._graphs is not None and not eager:
            logits = self._graphs.decode(slab, ids, start, length)
        else:
            logits = self.model.logits(self.forward_rows(slab, ModelInput(ids[:, None]), start, length))
        return log_softmax(logits, None if unit else temperature), None

    def verify(
        self,
        slab: KVCache,
        ids: Tensor,
        start: Tensor,
        length: int,
        picked: Tensor,
        temperature: Tensor | None,
        branches: Branches | None = None,
    ) -> Tensor:
        """Return log-probs float32 [T, V] after the tokens at flat indices ``picked`` [T] of ids int64 [B, C], from
        positions start [B]. temperature: float32 [T]; None: all are 1. branches: see ``CachedContext``."""
        hidden = self.forward_rows(slab, ModelInput(ids), start, length, picked, branches)
        return log_softmax(self.model.logits(hidden), temperature)

    def warm_up(self, slab: KVCache) -> None:
        """Compile decode, with the help of an empty cache."""
        if self._compiled is not None and not self.compile_seconds:
            begin = time.perf_counter()
            self._compiled.warm_up(slab)
            self.compile_seconds = time.perf_counter() - begin


class CompiledDecode:
    """One graph for all numbers of rows and slots: from ids to log-probs, attention fused into two loops."""

    def __init__(self, model: Decoder, device: torch.device) -> None:
        self._device = device

        def forward(
            ids: Tensor, start: Tensor, temperature: Tensor, keys: list[Tensor], values: list[Tensor]
        ) -> tuple[Tensor, Tensor]:
            context = CachedContext(KVCacheView(keys, values), start, 1, keys[0].shape[2], fused=True)
            logp = log_softmax(model.logits(model(ModelInput(ids), context)), temperature)
            return logp, group_mass(logp)

        # Compiled code is cached by code object; without guards on the model, each engine needs its own.
        forward.__code__ = forward.__code__.replace(co_name=f"decode_{next(_numbers)}")
        options: dict[str, Any] = {"guard_filter_fn": _argument_guards, "cpp_wrapper": True}
        self._forward: Forward = torch.compile(forward, dynamic=True, fullgraph=True, options=options)

    def __call__(self, slab: KVCache, ids: Tensor, start: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        return self._forward(ids, start, temperature, slab.keys, slab.values)

    def warm_up(self, slab: KVCache) -> None:
        """Compile for distinct sizes, since equal ones would be assumed to be always equal."""
        taken, size = set(slab.keys[0].shape), 24
        sizes: list[int] = []
        while len(sizes) < 3:
            if size not in taken:
                sizes.append(size)
            size += 16
        rows, allocated, slots = sizes
        slab.layout(allocated, slots)
        zeros = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self(slab, zeros, zeros.clone(), torch.ones(rows, device=self._device))
        slab.layout(0, 0)


def _argument_guards(guards: Sequence[Any]) -> list[bool]:
    """Guard arguments and global state, not the model's parts, which the engine never changes."""
    return [g.name.split("[")[0].split(".")[0] in _ARGUMENTS for g in guards]


class Graphs:
    """CUDA graphs of decode by cache, slots and a bucket of rows, until the layout changes.

    Inputs and outputs are static buffers.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._graphs: WeakKeyDictionary[KVCache, dict[tuple[int, int, int], Captured]] = WeakKeyDictionary()
        self._pool: Any = None

    def decode(self, slab: KVCache, ids: Tensor, start: Tensor, length: int) -> Tensor:
        """Replay the smallest graph that holds the rows; unused rows are holes, computed at position 0."""
        rows = ids.shape[0]
        bucket = min(slab.rows, next(b for b in (8, 16, 32, 64, 128, 256, slab.rows) if b >= rows))
        key, known = (slab.layouts, bucket, length), self._graphs.setdefault(slab, {})
        if key not in known:
            for old in [k for k in known if k[0] != slab.layouts]:
                del known[old]
            static_ids, static_start = (_filled(given.new_empty(bucket), given) for given in (ids, start))
            known[key] = self._capture(slab, static_ids, static_start, length)
        graph, static_ids, static_start, logits = known[key]
        _filled(static_ids, ids)
        _filled(static_start, start)
        graph.replay()
        return logits[:rows].clone()

    def _capture(self, slab: KVCache, ids: Tensor, start: Tensor, length: int) -> Captured:
        begin = time.perf_counter()
        # Allocates workspaces outside the graph. Writes to the live cache, so with the inputs that the replay has too.
        logits = self._step(slab, ids, start, length)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that writes the trace queries events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(slab, ids, start, length)
        self._pool = self._pool or graph.pool()
        self._runner.compile_seconds += time.perf_counter() - begin
        return graph, ids, start, logits

    def _step(self, slab: KVCache, ids: Tensor, start: Tensor, length: int) -> Tensor:
        return self._runner.model.logits(self._runner.forward_rows(slab, ModelInput(ids[:, None]), start, length))


def _filled(buffer: Tensor, given: Tensor) -> Tensor:
    """Write the given rows to a static buffer, and 0 to the holes behind them."""
    buffer[: len(given)].copy_(given)
    buffer[len(given) :].zero_()
    return buffer


Serving = Callable[[int], AbstractContextManager[object]]
"""Changes the rows of a pass, so many, by an adapter."""


# ---- log-probs and embeddings of texts that are there: one pass over packed sequences, as the trainer's ----


def _passed(model: Decoder, texts: Sequence[np.ndarray], parity: bool, serving: Serving) -> tuple[np.ndarray, Tensor]:
    """Return all tokens int64 [T] and their hidden states after the final norm [T, hidden]. Raises DataError."""
    ids, vocabulary = np.concatenate([np.zeros(0, np.int64), *texts]), model.head_weight.shape[0]
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise DataError(f"a token id is outside the vocabulary of {vocabulary}", key="request.prompt.vocab_size")
    device = model.head_weight.device
    context = PackedContext([len(text) for text in texts], device, parity)
    with serving(len(context.positions)):
        return ids, model(ModelInput(torch.from_numpy(ids).to(device)), context)


@torch.inference_mode()
def embedded(
    model: Decoder, texts: Sequence[np.ndarray], pooling: str, parity: bool, serving: Serving
) -> list[np.ndarray]:
    """Return ``GenerationEngine.embed``. Raises DataError."""
    _, hidden = _passed(model, texts, parity, serving)
    rows = hidden.float().split([len(text) for text in texts])
    return [F.normalize(row.mean(0) if pooling == "mean" else row[-1], dim=0).cpu().numpy() for row in rows]


@torch.inference_mode()
def scored(
    model: Decoder, texts: Sequence[np.ndarray], likeliest: int, parity: bool, serving: Serving
) -> list[TextScores]:
    """Return ``GenerationEngine.score``; the texts are packed into one pass. Raises DataError."""
    ids, hidden = _passed(model, texts, parity, serving)
    lengths, device, vocabulary = [len(text) for text in texts], hidden.device, model.head_weight.shape[0]
    rows, chunk, k = len(ids), chunk_rows(vocabulary, None), min(likeliest, vocabulary)
    chosen = np.zeros(rows, np.float32)
    top = Likeliest(np.zeros((rows, k), np.int64), np.zeros((rows, k), np.float32))
    following = torch.from_numpy(np.append(ids[1:], 0)).to(device)
    for start in range(0, rows, chunk):
        some = slice(start, min(start + chunk, rows))
        logp = model.logits(hidden[some]).float().log_softmax(-1)
        chosen[some] = logp.gather(1, following[some, None])[:, 0].cpu().numpy()
        best = logp.topk(k)
        top.ids[some], top.logprobs[some] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    ends = np.cumsum(lengths)
    own = [slice(end - length, end - 1) for end, length in zip(ends.tolist(), lengths)]
    return [TextScores(chosen[one], Likeliest(top.ids[one], top.logprobs[one])) for one in own]
