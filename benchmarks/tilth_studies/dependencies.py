"""Build the dependency graph of a foreign trace: the operations that wait for each other or start together.

It is equal for each data-parallel rank and step, so it is built once, from the order in which the workers of dp rank 0
launched their operations in the first step. Definitions: arXiv 2505.05713, section 3 and the format of its traces.
"""

import itertools

import numpy as np

from tilth.analysis.replay import ACROSS, ALONE, TOGETHER, Graph
from tilth.core.errors import DataError
from tilth_studies.straggler_format import COMPUTE, DATA, OPTYPES, PIPE, Trace

FORWARD, BACKWARD = OPTYPES.index("forward-compute"), OPTYPES.index("backward-compute")


class _Stage:
    """Operations of one stage in launch order, by type, and the edges among them."""

    def __init__(self, trace: Trace, stage: int, edges: list[tuple[int, int]]) -> None:
        mine = np.flatnonzero(trace.stage == stage)
        order = np.lexsort((trace.optype[mine], trace.seq[mine], trace.start[mine, 0, 0]))
        self.trace, self.stage, self.edges = trace, stage, edges
        self.compute: list[int] = [int(i) for i in mine[order] if OPTYPES[trace.optype[i]] in COMPUTE]
        by_seq = mine[np.argsort(trace.seq[mine], kind="stable")]
        self.ops = {name: [int(i) for i in by_seq if OPTYPES[trace.optype[i]] == name] for name in OPTYPES}
        self.pipe: dict[str, dict[tuple[int, int], int]] = {}
        """Kind of pipeline transfer -> (micro-batch, virtual stage) of its compute -> operation."""

    def chain(self, ops: list[int]) -> None:
        self.edges += itertools.pairwise(ops)

    def depend(self) -> None:
        """Add all edges of this stage."""
        self.chain(self.compute)
        for name in PIPE:
            self.chain(self.ops[name])
        for way, kind in (("forward", FORWARD), ("backward", BACKWARD)):
            self._transfers(way, [i for i in self.compute if self.trace.optype[i] == kind])
        self._first_backward()
        self._data_parallel()

    def _transfers(self, way: str, computes: list[int]) -> None:
        """Add recv -> compute -> send; a receive is posted when the compute before its own has ended."""
        previous = dict(zip(computes[1:], computes))
        for end in ("recv", "send"):
            ops = self.ops[f"{way}-{end}"]
            owners = self._owners(way, end, computes, len(ops))
            if end == "send":
                self.edges += zip(owners, ops)
            else:
                self.edges += zip(ops, owners)
                self.edges += [(previous[c], op) for c, op in zip(owners, ops) if c in previous]
            self.pipe[f"{way}-{end}"] = {self._virtual(c): op for c, op in zip(owners, ops)}

    def _virtual(self, compute: int) -> tuple[int, int]:
        at = self.trace
        return int(at.micro_batch[compute]), int(at.chunk[compute] * at.stages + self.stage)

    def _owners(self, way: str, end: str, computes: list[int], count: int) -> list[int]:
        """Computes of these transfers: all but those at the end of the pipeline, which have no peer.

        Some profilers log an empty transfer there; then all of them.
        """
        if count == len(computes):
            return computes
        last = int(self.trace.chunk.max() + 1) * self.trace.stages - 1
        edge = 0 if (way == "forward") == (end == "recv") else last
        inner = [c for c in computes if self._virtual(c)[1] != edge]
        if count != len(inner):
            message = f"stage {self.stage} has {count} {way}-{end} for {len(inner)} {way}-compute that have a neighbour"
            raise DataError(message, key=f"stage.{self.stage}.{way}-{end}")
        return inner

    def _first_backward(self) -> None:
        """Launch the first backward transfers after the last but one forward before them."""
        forwards = list(itertools.takewhile(lambda i: self.trace.optype[i] != BACKWARD, self.compute))
        for name in ("backward-recv", "backward-send") if len(forwards) > 1 else ():
            self.edges += [(forwards[-2], op) for op in self.ops[name][:1]]

    def _data_parallel(self) -> None:
        """Order parameters before their chunk's first forward, gradients after the last compute, then the optimizer."""
        gathers, scatters = self.ops["params-all-gather"], self.ops["grads-reduce-scatter"]
        self.chain(gathers + scatters)
        for gather in gathers:
            self.edges += [(gather, c) for c in self._of_chunk(gather, FORWARD)[:1]]
        norm, embedding = self.ops["layernorm-grads-all-reduce"], self.ops["embedding-grads-all-reduce"]
        rest = self.ops["separate-grads-all-reduce"], self.ops["optimizer-clip-main-grad"] + self.ops["optimizer"]
        before = self.compute[-1:] + self.ops["gc"]
        if not self._overlapped(before, norm):
            self.chain(before + norm + embedding + scatters + rest[0] + rest[1])
            return
        for scatter in scatters:
            chunk = self._of_chunk(scatter, *(OPTYPES.index(n) for n in COMPUTE[1:]))
            self.edges += [(c, scatter) for c in chunk[-1:] or self.compute[-1:]]
        self.chain(before + norm + embedding + rest[0] + rest[1])
        self.edges += [(scatters[-1], op) for op in rest[1][:1]]

    def _overlapped(self, before: list[int], norm: list[int]) -> bool:
        """True if gradients are reduced during the backward pass: launched before the operations after its end."""
        scatters, start = self.ops["grads-reduce-scatter"], self.trace.start[:, 0, 0]
        if not scatters or not before:
            return False
        return bool(start[scatters[0]] < (start[norm[0]] if norm else start[before[0]]))

    def _of_chunk(self, op: int, *kinds: int) -> list[int]:
        chunk = self.trace.chunk
        return [c for c in self.compute if self.trace.optype[c] in kinds and chunk[c] == chunk[op]]


def dependencies(trace: Trace) -> Graph:
    """Build the dependency graph of a trace. Raises DataError if transfers and computes do not match."""
    edges: list[tuple[int, int]] = []
    stages = [_Stage(trace, stage, edges) for stage in range(trace.stages)]
    for stage in stages:
        stage.depend()
    group = np.arange(len(trace.optype))
    kind = np.where(trace.named(*DATA), ACROSS, ALONE)
    for members in (*_pairs(stages), *_ends(stages)):
        group[members] = min(members)
        kind[members] = TOGETHER
    for clips in zip(*(s.ops["optimizer-clip-main-grad"] for s in stages)):
        group[list(clips)] = min(clips)
        kind[list(clips)] = ACROSS
    before, after = np.array(edges, np.int64).reshape(-1, 2).T
    return Graph(before, after, group, kind)


def _pairs(stages: list[_Stage]) -> list[list[int]]:
    """Pair each send with the receive of its micro-batch on the next virtual stage (forward) or the previous one."""
    pairs = []
    for way, move in (("forward", 1), ("backward", -1)):
        receives = {at: op for s in stages for at, op in s.pipe[f"{way}-recv"].items()}
        for s in stages:
            for (micro_batch, virtual), op in s.pipe[f"{way}-send"].items():
                if (peer := receives.get((micro_batch, virtual + move))) is not None:
                    pairs.append([op, peer])
    return pairs


def _ends(stages: list[_Stage]) -> list[list[int]]:
    """Pair the all-reduces of shared embeddings' gradients on the first and the last stage."""
    if len(stages) == 1:
        return []
    name = "embedding-grads-all-reduce"
    return [list(pair) for pair in zip(stages[0].ops[name], stages[-1].ops[name])]
