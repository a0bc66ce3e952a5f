"""Meshes, layouts and groups of tensors for property tests."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import strategies as st

from tilth.checkpoint import manifest, planning
from tilth.checkpoint.planning import DTYPES, Spec
from tilth.core.layout import Layout, Mesh, RaggedShard, Replicate, Shard

NAMES = ("dp", "fsdp", "tp")
SIZES = st.tuples(*[st.integers(1, 3)] * 3)


@contextlib.contextmanager
def least(nbytes):
    """Parts of boxes may be so small; plans made before are forgotten, and these after."""

    def forget():
        planning._plan.cache_clear()
        manifest._planned_table.cache_clear()

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "LEAST", nbytes)
        yield
    forget()


def columns_of(plan):
    """The row of each tensor of a plan; ``file``: index of the rank that writes it."""
    return list(plan.rows(np.arange(len(plan.ranks))).values())


@st.composite
def meshes(draw):
    """Three dimensions, ranks in any order."""
    sizes = draw(SIZES)
    return Mesh(NAMES, sizes, tuple(draw(st.permutations(range(math.prod(sizes))))))


@st.composite
def layouts(draw, mesh, shape):
    """Replicas, shards of any dimension in any order, with copies, and a ragged split at the end."""
    placements = []
    for size in mesh.sizes:
        options = [st.just(Replicate())]
        if shape:
            copies = [c for c in range(1, size + 1) if size % c == 0]
            options.append(st.builds(Shard, st.integers(0, len(shape) - 1), st.sampled_from(copies)))
        placements.append(draw(st.one_of(options)))
    order = tuple(draw(st.permutations(range(3))))
    if math.prod(shape) and draw(st.booleans()):
        last = order[-1]
        units = draw(st.lists(st.integers(0, 3), min_size=mesh.sizes[last], max_size=mesh.sizes[last]))
        placements[last] = RaggedShard(tuple(units))
        before = Layout(mesh, tuple(Replicate() if i == last else p for i, p in enumerate(placements)), shape, order)
        numels = {box.numel for rank in mesh.ranks for box in before.boxes(rank)}
        if not sum(units) or any(n % sum(units) for n in numels):
            placements[last] = RaggedShard((1,) + (0,) * (mesh.sizes[last] - 1))
    return Layout(mesh, tuple(placements), shape, order)


@st.composite
def specs(draw, most=6):
    """A group of tensors of any shapes and dtypes, most over one mesh and some over another."""
    first, found = draw(meshes()), []
    for i in range(draw(st.integers(1, most))):
        mesh = first if draw(st.integers(0, 3)) else draw(meshes())
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        found.append(Spec(f"t{i}", draw(layouts(mesh, shape)), draw(st.sampled_from(list(DTYPES)))))
    return found
