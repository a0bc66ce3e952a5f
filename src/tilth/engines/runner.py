"""Forward passes over the cache, for decode (one token per row) and prefill chunks; decode may be compiled."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.device import pinned, to_device, unpacked
from tilth.core.errors import DataError
from tilth.core.trajectory import Likeliest
from tilth.engines.branches import Branches
from tilth.engines.cache import CachedContext, KVCache, KVCacheView, Slab
from tilth.engines.pages import PagedContext, PagedRows
from tilth.engines.request import TextScores
from tilth.engines.sampling import Chosen, RuleColumns, Rules, choose_from, group_mass, log_softmax
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.models.kernels import chosen
from tilth.models.moe import ExpertContext
from tilth.models.row_pass import RowPass, is_plain
from tilth.plan.kernels import chunk_rows

Forward = Callable[[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]], tuple[Tensor, Tensor]]
_numbers = itertools.count()
_ARGUMENTS = ("", "ids", "start", "temperature", "keys", "values")
_BUCKETS = (8, 16, 32, 64, 128, 256)
"""Rows of graphs, beside all of a cache."""


class DecodeStep(NamedTuple):
    """Inputs of a pass on the host: B rows, T tokens from which another one is drawn."""

    ids: np.ndarray
    """int64 [B], or [B, C] of several tokens a row."""
    start: np.ndarray
    """int64 [B], position of each row's first token."""
    uniform: np.ndarray
    """float32 [T], random numbers of the tokens that are drawn."""
    rules: RuleColumns
    """Of the T tokens."""
    tables: Sequence[np.ndarray] = ()
    """``Slab.tables`` of the B rows."""

    @property
    def arrays(self) -> list[np.ndarray]:
        """Inputs of the pass that go to a device."""
        return [self.ids, self.start, self.uniform, *self.tables, *self.rules.tensors]

    def named(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor], Rules]:
        """Return ids, positions, random numbers, tables and rules, given ``arrays`` on a device."""
        (ids, start, uniform), count = tensors[:3], 3 + len(self.tables)
        return ids, start, uniform, tensors[3:count], self.rules.on(tensors[count:])


class Decoded(NamedTuple):
    """Log-probs float32 [T, V] of a pass, and what draws from them. mass: their ``group_mass``, if the pass computes
    it; chosen: what the pass itself has drawn, without filters unless it has log-probs after them."""

    logp: Tensor
    mass: Tensor | None
    uniform: Tensor
    rules: Rules
    chosen: Chosen | None = None

    def choose(self, change: Tensor | None) -> Chosen:
        """Draw the next tokens. change: see ``choose_from``."""
        if self.chosen is not None and change is None:
            if not self.rules.filtered:
                return replace(self.chosen, sampling=None)
            if self.chosen.sampling is not None:
                return self.chosen
        return choose_from(self.logp, self.mass, self.uniform, self.rules, change)


class _Captured(NamedTuple):
    """A graph, its inputs as bytes and as ``DecodeStep.arrays``, and its result."""

    graph: torch.cuda.CUDAGraph
    flat: Tensor
    inputs: list[Tensor]
    result: Decoded


class Runner:
    """Runs the model's steps. compile: torch.compile of decode on a CPU, CUDA graphs on a GPU. multiple: of rows."""

    def __init__(self, model: Decoder, parity: bool, compile: bool, device: torch.device, multiple: int) -> None:
        self.model, self.device = model, device
        self.compile_seconds = 0.0
        """Seconds in first calls of compiled code so far."""
        self._parity, self._multiple, self._compiled, self._graphs = parity, multiple, None, None
        self._row_pass = RowPass(model) if parity and is_plain(model) else None
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
        slab: Slab,
        given: ModelInput,
        start: Tensor,
        length: int,
        picked: Tensor | None = None,
        branches: Branches | None = None,
        tables: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return hidden [B * C, hidden] of new tokens, ids int64 [B, C], in the first B rows, from positions start [B].

        length: slots of the cache to read. A row with fewer than C tokens is padded at its end. picked: int64 [T], the
        tokens of the B * C that are computed; the result is then [T, hidden]. branches: see ``CachedContext``. tables:
        of the cache, on the device.
        """
        if isinstance(slab, PagedRows):
            pages = PagedContext(slab, tables[0], start, given.ids.shape[1], self._multiple)
            return cast(Tensor, self.model(given._replace(ids=given.ids.flatten()), pages))
        records = bool(slab.routing)
        experts = ExpertContext(parity=self._parity, record=True) if records else None
        sizes = (given.ids.shape[1], length, self._parity)
        more: dict[str, Any] = {"experts": experts, "picked": picked, "branches": branches}
        ctx = CachedContext(slab, start, *sizes, multiple=self._multiple, **more)
        ids = given.ids.flatten()
        hidden: Tensor = self.model(given._replace(ids=ids if picked is None else ids[picked]), ctx)
        if records:
            ctx.keep_routing()
        return hidden

    def prefill(
        self, slab: Slab, given: ModelInput, start: Tensor, length: int, last: Tensor, tables: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return logits float32 [rows, V] after the tokens at flat indices ``last`` of [B * C] (may be empty)."""
        return self.model.logits(self.forward_rows(slab, given, start, length, tables=tables)[last])

    def rows(self, slab: Slab, rows: int) -> int:
        """Return the number of rows that a pass over the first ``rows`` of a cache computes: with graphs some more."""
        return rows if self._graphs is None else self._graphs.rows(slab, rows)

    def decode(self, slab: Slab, step: DecodeStep, length: int, eager: bool = False) -> Decoded:
        """Compute one token of each of the first B rows. eager: rows have adapters, which compiled code leaves out."""
        if self._graphs is not None and not eager:
            return self._graphs.decode(slab, step)
        ids, start, uniform, tables, rules = step.named(to_device(step.arrays, self.device))
        if self._compiled is not None and not eager:
            logp, mass = self._compiled(slab, ids, start, rules.temperature)
            return Decoded(logp, mass, uniform, rules)
        hidden = None
        if self._row_pass is not None and not eager:
            hidden = self._row_pass.hidden(slab.keys, slab.values, ids, start, length)
        if hidden is None:
            hidden = self.forward_rows(slab, ModelInput(ids[:, None]), start, length, tables=tables)
        logits = self.model.logits(hidden)
        return Decoded(log_softmax(logits, None if rules.unit else rules.temperature), None, uniform, rules)

    def verify(
        self, slab: Slab, step: DecodeStep, length: int, picked: np.ndarray, branches: Branches | None = None
    ) -> Decoded:
        """Compute the tokens at flat indices ``picked`` int64 [T] of ids [B, C]. branches: see ``CachedContext``."""
        *inputs, some = to_device([*step.arrays, picked], self.device)
        ids, start, uniform, _, rules = step.named(inputs)
        hidden = self.forward_rows(slab, ModelInput(ids), start, length, some, branches)
        logp = log_softmax(self.model.logits(hidden), None if rules.unit else rules.temperature)
        return Decoded(logp, None, uniform, rules)

    def warm_up(self, slab: Slab) -> None:
        """Compile decode, with the help of an empty cache."""
        if self._compiled is not None and isinstance(slab, KVCache) and not self.compile_seconds:
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

    def __call__(self, slab: Slab, ids: Tensor, start: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
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
    """CUDA graphs of decode, from the newest tokens to those that are drawn, by cache and rows, until its layout
    changes.

    Attention takes lengths from the device, and the pages of rows (or reads all slots of the cache): one graph serves
    all lengths. Inputs and outputs are static buffers of one pool: a result is valid until the next replay of any
    graph.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._graphs: WeakKeyDictionary[Slab, dict[tuple[int, int], _Captured]] = WeakKeyDictionary()

    def rows(self, slab: Slab, rows: int) -> int:
        """Return the rows of the graph that decodes ``rows``: of one that is there, if it has at most twice as many as
        need be."""
        least = min(slab.rows, next(bucket for bucket in (*_BUCKETS, slab.rows) if bucket >= rows))
        known = [n for layout, n in self._graphs.get(slab, {}) if layout == slab.layouts and least <= n <= 2 * least]
        return min(known, default=least)

    def decode(self, slab: Slab, step: DecodeStep) -> Decoded:
        """Replay the graph of these rows; holes among them are computed at position 0."""
        key, known = (slab.layouts, len(step.ids)), self._graphs.setdefault(slab, {})
        if key not in known:
            for old in [k for k in known if k[0] != slab.layouts]:
                del known[old]
            known[key] = self._capture(slab, step)
        graph, flat, inputs, result = known[key]
        flat.copy_(pinned(step.arrays), non_blocking=True)
        graph.replay()
        return result._replace(rules=step.named(inputs)[-1])

    def _capture(self, slab: Slab, step: DecodeStep) -> _Captured:
        begin = time.perf_counter()
        flat = pinned(step.arrays).to(self._runner.device, non_blocking=True)
        inputs = unpacked(flat, step.arrays)
        # Allocates workspaces outside the graph. Writes to the live cache, so with the inputs that the replay has too.
        self._step(slab, inputs, step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The memory of a graph that is there: that of graphs that are gone takes no other one.
        pools = (one.graph.pool() for known in self._graphs.values() for one in known.values())
        # thread_local: the thread that writes the trace queries events meanwhile.
        with torch.cuda.graph(graph, pool=next(pools, None), capture_error_mode="thread_local"):
            result = self._step(slab, inputs, step)
        self._runner.compile_seconds += time.perf_counter() - begin
        return _Captured(graph, flat, inputs, result)

    def _step(self, slab: Slab, inputs: Sequence[Tensor], step: DecodeStep) -> Decoded:
        """Compute and draw a token of each row, by rules that hold for any row: with filters if a kernel has them."""
        ids, start, uniform, tables, rules = step.named(inputs)
        rules = replace(rules, unit=False, any_greedy=True, all_greedy=False)
        hidden = self._runner.forward_rows(slab, ModelInput(ids[:, None]), start, slab.capacity, tables=tables)
        logp = log_softmax(self._runner.model.logits(hidden), rules.temperature)
        rules = replace(rules, filtered=chosen("sampler", logp) is not None)
        return Decoded(logp, None, uniform, rules, choose_from(logp, None, uniform, rules))


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
        return ids, model(ModelInput(to_device([ids], device)[0]), context)


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
    rows, chunk, k = len(ids), chunk_rows(vocabulary, gpu=device.type == "cuda"), min(likeliest, vocabulary)
    chosen = np.zeros(rows, np.float32)
    top = Likeliest(np.zeros((rows, k), np.int64), np.zeros((rows, k), np.float32))
    (following,) = to_device([np.append(ids[1:], 0)], device)
    for start in range(0, rows, chunk):
        some = slice(start, min(start + chunk, rows))
        logp = model.logits(hidden[some]).float().log_softmax(-1)
        chosen[some] = logp.gather(1, following[some, None])[:, 0].cpu().numpy()
        best = logp.topk(k)
        top.ids[some], top.logprobs[some] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    ends = np.cumsum(lengths)
    own = [slice(end - length, end - 1) for end, length in zip(ends.tolist(), lengths)]
    return [TextScores(chosen[one], Likeliest(top.ids[one], top.logprobs[one])) for one in own]
