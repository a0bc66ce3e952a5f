"""The reshard grid: saved under every layout there is, loaded under every other, all bits the same, optimizer included.

Ranks are symbols here: layouts are those that ``plan.layout`` and ``parallel`` give a real decoder, and every rank's
part is written and read one after another in this process. Real processes are in ``test_processes`` and below.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch

from tests.checkpoint.cases import least
from tests.checkpoint.make import cut, same, save_sharded, tensor
from tests.checkpoint.test_processes import check
from tests.models.tiny import FAMILIES
from tests.parallel.layouts import CONFIG, Case, build
from tilth.checkpoint.planning import LEAST
from tilth.checkpoint.read import Checkpoint, open_checkpoint
from tilth.checkpoint.snapshot import state_layouts
from tilth.core.layout import Layout, Mesh, RaggedShard, Replicate, Shape, Shard
from tilth.plan.layout import layouts
from tilth.plan.shape import parameter_shapes

NAMES = ("dp", "fsdp", "tp")
SHAPE = replace(CONFIG, tie_embeddings=False, qkv_bias=True, num_layers=1)
SHAPES = parameter_shapes(SHAPE)
"""33 rows of the vocabulary divide over no number of ranks, 2 key heads are fewer than the 4 ranks of tp."""


@dataclass(frozen=True)
class Spread:
    """How the ranks of a job hold a model."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    how: str = ""
    """"": as Tilth does; "ragged": fsdp splits the flat storage unequally; "columns": fsdp splits columns;
    "turned": fsdp splits before tp; "elsewhere": on ranks with other numbers, in another order."""

    def __str__(self) -> str:
        sizes = [f"{n}{s}" for n, s in zip(NAMES, (self.dp, self.fsdp, self.tp)) if s > 1]
        return "-".join([*sizes, *([self.how] if self.how else [])]) or "one"

    @property
    def mesh(self) -> Mesh:
        sizes = (self.dp, self.fsdp, self.tp)
        ranks = tuple(range(math.prod(sizes)))
        return Mesh(NAMES, sizes, tuple(r + 3 for r in reversed(ranks)) if self.how == "elsewhere" else ranks)

    def parameters(self) -> dict[str, Layout]:
        found = layouts(SHAPE, self.mesh)
        return {name: self._changed(layout) for name, layout in found.items()}

    def _changed(self, layout: Layout) -> Layout:
        dp, _, tp = layout.placements
        match self.how:
            case "ragged":
                return self._ragged(layout)
            case "columns" if len(layout.shape) == 2:
                return Layout(layout.mesh, (dp, Shard(1), tp), layout.shape, layout.order)
            case "turned":
                return Layout(layout.mesh, layout.placements, layout.shape, (0, 1, 2))
        return layout

    def _ragged(self, layout: Layout) -> Layout:
        """The first of these splits that fits: the number of elements must be a multiple of its sum."""
        splits = {4: ((3, 0, 2, 5), (1, 0, 3, 1), (1, 2, 0, 0)), 2: ((3, 2), (1, 3), (0, 1))}[self.fsdp]
        sizes = {box.numel for r in self.mesh.ranks for box in _without_fsdp(layout).boxes(r)}
        units = next((units for units in splits if not any(n % sum(units) for n in sizes)), None)
        if units is None:
            return layout
        dp, _, tp = layout.placements
        return Layout(layout.mesh, (dp, RaggedShard(units), tp), layout.shape, (0, 2, 1))


def _without_fsdp(layout: Layout) -> Layout:
    dp, _, tp = layout.placements
    return Layout(layout.mesh, (dp, Replicate(), tp), layout.shape, layout.order)


SPREADS = [
    Spread(),
    Spread(dp=2),
    Spread(dp=4),
    Spread(fsdp=2),
    Spread(fsdp=3),
    Spread(fsdp=4),
    Spread(dp=2, fsdp=2),
    Spread(tp=2),
    Spread(tp=4),
    Spread(dp=2, tp=2),
    Spread(fsdp=2, tp=2),
    Spread(fsdp=2, tp=4),
    Spread(dp=2, fsdp=2, tp=2),
    Spread(fsdp=4, how="ragged"),
    Spread(fsdp=2, tp=2, how="ragged"),
    Spread(dp=2, fsdp=2, how="ragged"),
    Spread(fsdp=3, how="columns"),
    Spread(fsdp=2, tp=2, how="turned"),
    Spread(fsdp=2, tp=2, how="elsewhere"),
]


def covering(spreads: list[Spread]) -> list[tuple[Spread, Spread]]:
    """Few pairs in which every spread is on both sides, and every way to split meets every other."""

    def met(save: Spread, load: Spread) -> set:
        return {(save.how, load.how), ("save", save), ("load", load)}

    pairs = [(a, b) for a in spreads for b in spreads if a != b]
    left, chosen = set().union(*itertools.starmap(met, pairs)), []
    while left:
        best = max(pairs, key=lambda pair: len(left & met(*pair)))
        chosen.append(best)
        left -= met(*best)
    return chosen


def test_the_layouts_are_what_their_names_say():
    """Else the rows below would prove less than they say."""
    parameters = {spread: spread.parameters() for spread in SPREADS}
    model = build(Case(tied=False, layers=1))
    assert {n: tuple(p.shape) for n, p in model.named_parameters()}.items() <= SHAPES.items()
    embed, key = "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight"
    assert {b.size[0] for r in range(4) for b in parameters[Spread(fsdp=4)][embed].boxes(r)} == {9, 6}
    assert isinstance(parameters[Spread(tp=4)][key].placements[2], Shard)
    assert parameters[Spread(tp=4)][key].placements[2].copies == 2
    ragged = parameters[Spread(fsdp=4, how="ragged")]
    assert sum(isinstance(layout.placements[1], RaggedShard) for layout in ragged.values()) > len(ragged) / 2
    assert any(len(layout.boxes(r)) > 1 for layout in ragged.values() for r in range(4))
    assert any(not layout.boxes(1) for layout in ragged.values())
    both = parameters[Spread(fsdp=2, tp=2, how="ragged")]
    assert any(len(layout.boxes(r)) > 1 for layout in both.values() for r in range(4))
    assert len({tuple(map(str, p.items())) for p in parameters.values()}) == len(SPREADS)


def state(shapes: Mapping[str, Shape] = SHAPES) -> dict[str, dict[str, torch.Tensor]]:
    """A model in fp32, its average in bf16, the state of both optimizers: arbitrary bits, NaNs and denormals too."""
    model = {n: tensor(s, salt=n) for n, s in shapes.items()}
    optimizer = {}
    for name, shape in shapes.items():
        for kind in ("exp_avg", "exp_avg_sq") if "mlp" not in name else ("momentum_buffer",):
            optimizer[f"{kind}.{name}"] = tensor(shape, salt=f"{kind}{name}")
        optimizer[f"step.{name}"] = tensor((), salt=f"step{name}")
    return {"model": model, "ema": {n: t.bfloat16() for n, t in model.items()}, "optimizer": optimizer}


def laid_out(spread: "Spread | Divided", whole: dict) -> dict[str, dict[str, Layout]]:
    parameters = spread.parameters()
    return {"model": parameters, "ema": parameters, "optimizer": state_layouts(parameters, whole["optimizer"])}


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """``grid(save, load)`` checks a cell; each layout is saved once, and once more where shares are cut smaller."""
    whole, root, opened = state(), tmp_path_factory.mktemp("grid"), {}

    def checkpoint(save: Spread, nbytes: int):
        if (save, nbytes) not in opened:
            with least(nbytes):
                path = save_sharded(root / f"{save}-{nbytes}", 1, whole, laid_out(save, whole))
            opened[save, nbytes] = open_checkpoint(path)
            opened[save, nbytes].verify()
        return opened[save, nbytes]

    def check(save: Spread, load: Spread, nbytes: int = LEAST) -> Checkpoint:
        source, wanted = checkpoint(save, nbytes), laid_out(load, whole)
        for group, tensors in whole.items():
            for rank in load.mesh.ranks:
                expected = {n: cut(t, wanted[group][n], rank) for n, t in tensors.items()}
                into = {n: torch.full_like(t, 77) for n, t in expected.items()}
                source.restore(group, into, wanted[group], rank)
                wrong = [n for n, t in expected.items() if not same(into[n], t)]
                assert not wrong, f"saved as {save}, loaded as {load}: rank {rank}, {group}: {wrong}"
        return source

    return check


@pytest.mark.parametrize(("save", "load"), covering(SPREADS), ids=str)
def test_every_layout_and_every_way_to_split(grid, save, load):
    grid(save, load)


CUT = [(Spread(dp=4), 7), (Spread(dp=2, fsdp=2), 300), (Spread(dp=2, fsdp=2, how="ragged"), 7), (Spread(dp=2, tp=2), 1)]


@pytest.mark.parametrize(("save", "nbytes"), CUT, ids=str)
@pytest.mark.parametrize("load", [Spread(), Spread(fsdp=2, tp=2, how="ragged")], ids=str)
def test_shares_that_replicas_cut_among_them(grid, save, load, nbytes):
    found, uncut = (grid(save, load, n).manifest for n in (nbytes, LEAST))
    count, before = (sum(len(t) for group in m.groups.values() for t in group.values()) for m in (found, uncut))
    assert count > before
    sizes = [file.nbytes - file.header_nbytes for file in found.files.values() if file.group == "model"]
    assert max(sizes) < 1.1 * sum(sizes) / len(sizes) or save.how or save.tp > 1


@pytest.mark.slow
@pytest.mark.parametrize("save", SPREADS, ids=str)
def test_every_layout_into_every_other(grid, save):
    for load in SPREADS:
        grid(save, load)


@dataclass(frozen=True)
class Divided:
    """How the ranks of a job hold a model with experts."""

    sizes: tuple[tuple[str, int], ...]
    schedule: str = "1f1b"

    @classmethod
    def of(cls, schedule: str = "1f1b", **sizes: int) -> "Divided":
        return cls(tuple(sizes.items()), schedule)

    def __str__(self) -> str:
        return "-".join([f"{n}{s}" for n, s in self.sizes] + [self.schedule] * (self.schedule != "1f1b")) or "one"

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(dict(self.sizes))

    def parameters(self) -> dict[str, Layout]:
        return layouts(EXPERTS, self.mesh, schedule=self.schedule)


EXPERTS = replace(FAMILIES["gpt-oss"], num_experts=4, num_layers=4, expert_layers=(0, 1, 2, 3), tie_embeddings=True)
"""Stacked weights and biases; both ends of a pipeline hold the embedding."""
DIVIDED = [
    Divided.of(),
    Divided.of(pp=2),
    Divided.of(pp=2, schedule="interleaved"),
    Divided.of(pp=4, fsdp=2),
    Divided.of(ep=2, fsdp=3),
    Divided.of(ep=4, tp=2),
    Divided.of(pp=2, ep=2, cp=2),
    Divided.of(pp=2, dp=2, fsdp=2, ep=2, tp=2),
]


@pytest.mark.parametrize("save", [pytest.param(divided, marks=pytest.mark.slow) for divided in DIVIDED], ids=str)
def test_stages_and_experts_of_every_layout_into_those_of_every_other(tmp_path, save):
    restores(tmp_path, save, DIVIDED)


def test_stages_and_experts_of_one_layout_into_those_of_others(tmp_path):
    restores(tmp_path, DIVIDED[-2], DIVIDED[1:5])


def restores(root, save: Divided, loads: list[Divided]) -> None:
    whole = state(parameter_shapes(EXPERTS))
    source = open_checkpoint(save_sharded(root, 1, whole, laid_out(save, whole)))
    for load in loads:
        wanted = laid_out(load, whole)
        for (group, tensors), rank in itertools.product(whole.items(), load.mesh.ranks):
            here = {n: t for n, t in tensors.items() if wanted[group][n].mesh.has(rank)}
            expected = {n: cut(t, wanted[group][n], rank) for n, t in here.items()}
            into = {n: torch.full_like(t, 77) for n, t in expected.items()}
            source.restore(group, into, wanted[group], rank)
            assert all(same(into[n], t) for n, t in expected.items()), f"{load}: rank {rank}, {group}"


@pytest.mark.slow
@pytest.mark.dist
def test_what_four_processes_trained_goes_on_in_two_and_in_one(pool, tmp_path):
    """The same with everything real: an engine's weights, moments and averages, saved by fsdp 4, read as tp 2."""
    case = Case(fsdp=4, tied=False)
    check(pool, tmp_path, case, [case.alone, replace(case, fsdp=1, tp=2)])
