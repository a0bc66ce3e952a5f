"""An axis is declared in one place: all that is derived from the table sees invented ones, in real processes too."""

import ast
import json
import subprocess
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tilth_studies.run_whatif import what_if_run
from typer.testing import CliRunner

from tests import forked
from tests.analysis.run_jobs import Job
from tests.errors import raises
from tests.parallel.layouts import CONFIG, Case, batch, build, engine_of, loss_of, weights
from tilth.analysis.events import from_table
from tilth.analysis.run_graph import read_steps
from tilth.analysis.run_replay import RunModel
from tilth.checkpoint.planning import Spec, plan_group
from tilth.cli.main import app
from tilth.cluster.protocol import Transfer, deal, evenly
from tilth.config import axes
from tilth.config.axes import AXES, Axis
from tilth.config.code import parse
from tilth.core.batch import Batch, Jagged
from tilth.core.errors import AxisError, TokenDivisionError
from tilth.core.layout import Mesh, Shard
from tilth.parallel import division
from tilth.parallel.context import ContextParallel
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.layout import nested
from tilth.plan.pipeline import stages_of
from tilth.rl import registry
from tilth.rl.aggregation import Aggregation
from tilth.roles.objective import gather_data_ranks, global_denominator, is_first_data_rank

ROOT = Path(__file__).parents[2]
HERE = "tests.config.test_axes:"
INVENTED = (
    Axis("island", ("rows",), "replicas far away"),
    Axis("ring", ("tokens",), "ranks that divide the tokens of each row", mechanism=HERE + "divide_tokens"),
    Axis("pipe", ("layers",), "ranks that divide the layers"),
)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


TRAPS = (Axis("seq", ("tokens",), "ranks that divide tokens"), Axis("hybrid", ("rows", "tokens"), "ranks of any kind"))
TRAPS += (Axis("etp", ("parameters",), "ranks that split experts"), Axis("pipe", ("layers",), "stages"))


def divide_tokens(division):
    group = division.grid.group("ring")
    division.context = ContextParallel(group, "ring")


def invented():
    return patch.dict(AXES, {axis.name: axis for axis in INVENTED})


@pytest.fixture
def table():
    with invented():
        yield


# ---- the mesh ----


def test_a_mesh_knows_its_axes_by_name(table):
    mesh = Mesh.of({"dp": 2, "island": 2, "ring": 3}, tuple(range(10, 22)))
    assert mesh.names == tuple(AXES) and mesh.names[-3:] == ("island", "ring", "pipe")
    assert (mesh.size("island"), mesh.size("dp", "ring"), mesh.size("tp")) == (2, 6, 1)
    assert mesh.over("rows")[-1] == "island" and mesh.over("tokens", "layers")[-2:] == ("ring", "pipe")
    assert (mesh.count("rows"), mesh.count("tokens"), mesh.count("rows", "tokens")) == (4, 3, 12)
    assert mesh.copies == ("dp", "hdp", "cp", "island", "ring") and mesh.shards == ("fsdp", "ep")
    assert mesh.coordinate("island", 15) == 1 == mesh.at(15)["island"] and mesh.index(21, "dp", "island") == 3
    assert mesh.along(14, "island") == (11, 14) and mesh.part(14, "island").ranks == (11, 14)


@given(st.dictionaries(st.sampled_from(list(AXES)), st.integers(1, 3)), st.sets(st.sampled_from(list(AXES))), st.data())
def test_groups_are_those_that_brute_force_finds(sizes, names, data):
    mesh = Mesh.of(sizes)
    rank = data.draw(st.sampled_from(mesh.ranks))
    own = mesh.at(rank)
    alike = tuple(r for r in mesh.ranks if all(mesh.at(r)[n] == at for n, at in own.items() if n not in names))
    assert mesh.along(rank, *names) == alike and alike in mesh.groups(*names)
    assert sorted(r for group in mesh.groups(*names) for r in group) == list(mesh.ranks)
    assert mesh.along(rank, *names)[mesh.index(rank, *names)] == rank


@pytest.mark.parametrize(
    "mistake",
    [
        lambda mesh: Mesh.of({"pd": 2}),
        lambda mesh: mesh.size("pd"),
        lambda mesh: mesh.coordinate("pd", 0),
        lambda mesh: mesh.along(0, "pd"),
        lambda mesh: ParallelDims.of(mesh, 0).group("pd"),
        lambda mesh: axes.known("pd"),
    ],
)
def test_an_unknown_axis_is_refused_with_the_axes_there_are(mistake):
    with raises(AxisError, "pd"):
        mistake(Mesh.of({"dp": 2}))


@pytest.mark.parametrize("mistake", [lambda: Axis("x", ("columns",), ""), lambda: Mesh.of({}).over("columns")])
def test_what_no_axis_can_split_is_refused(mistake):
    with raises(AxisError, "columns"):
        mistake()


def test_an_axis_that_divides_the_model_must_say_how_parameters_lie(table):
    mesh = Mesh.of({"pipe": 2})
    with raises(AxisError, "pipe"):
        nested(mesh, (4, 2), {})
    assert [nested(mesh, (4, 2), {"pipe": Shard(0)}).boxes(r)[0].offset for r in (0, 1)] == [(0, 0), (2, 0)]
    assert nested(Mesh.of({}), (4, 2), {}).boxes(0)[0].size == (4, 2)


# ---- mechanisms ----


@pytest.mark.parametrize("axis", TRAPS, ids=str)
def test_an_axis_without_a_mechanism_has_one_rank(axis):
    with patch.dict(AXES, {axis.name: axis}):
        made = shard(lambda: build(Case()), ParallelDims.of(Mesh.of({axis.name: 1}), 0))
        assert made.context is None
        with raises(AxisError, f"layout.{axis.name}"):
            shard(lambda: build(Case()), ParallelDims.of(Mesh.of({axis.name: 2}), 0))


def test_every_axis_that_divides_more_than_rows_has_a_mechanism():
    assert [axis.name for axis in AXES.values() if axis.undivided(2)] == []


@pytest.mark.parametrize("name", ["pp", "ep", "hdp", "cp", "tp"])
def test_a_model_is_divided_by_the_mechanisms_of_the_table(name, monkeypatch):
    """The table is the truth: without its entry an axis divides nothing."""
    called = []
    monkeypatch.setattr(division, "resolve", lambda mechanism: lambda _: called.append(mechanism))
    stages = stages_of(CONFIG, 1, "1f1b")
    grid = ParallelDims.of(Mesh.of({name: 2, "dp": 2}), 0)
    how = {"sp": False, "zero": 3, "cp_style": "ring", "engine": False, "device": "cpu"}
    division.Division(build(Case()), grid, stages, 0, **how).divide()
    assert called == [AXES[name].mechanism]


def divide_nothing(division):
    """The fault: an axis with a mechanism, along which each rank computes all tokens."""


@pytest.mark.dist
def test_tokens_that_ranks_do_not_divide_are_an_error_before_the_step(pool):
    for key, same in pool.run(2, HERE + "undivided"):
        assert key == "tokens.divided" and same


def undivided(rank):
    case = Case(micro_tokens=1000)
    with patch.dict(AXES, {"seq": Axis("seq", ("tokens",), "", mechanism=HERE + "divide_nothing")}):
        sharded = shard(lambda: build(case), ParallelDims.of(Mesh.of({"seq": 2}), rank))
        sharded.load_(weights(case))
        engine, (tokens, mask), keys = engine_of(case, sharded), batch(), []
        before = {name: p.detach().clone() for name, p in sharded.parameters.items()}
        for step in (engine.update, lambda *given: (engine.accumulate(*given), engine.gradients())):
            with pytest.raises(TokenDivisionError) as caught:
                step(tokens, mask, {}, lambda micro: (micro.logprobs.sum(), {}))
            keys.append(caught.value.key)
        same = all(torch.equal(p, before[name]) for name, p in sharded.parameters.items())
    return *set(keys), same


# ---- transfer protocols ----


def test_rows_are_divided_over_an_axis_that_splits_them(table):
    mesh = Mesh.of({"dp": 2, "island": 2, "tp": 2})
    dealt = deal(Transfer("rows", "rows"), mesh, evenly, [Batch({"id": np.arange(8)})], {})
    for rank, (args, _), speaks in zip(mesh.ranks, dealt.arguments, dealt.answers):
        at = mesh.at(rank)
        first = 4 * at["dp"] + 2 * at["island"]
        assert args[0]["id"].tolist() == [first, first + 1] and speaks == (at["tp"] == 0)


def test_ranks_that_divide_tokens_get_the_same_rows_and_one_of_them_answers(table):
    mesh, rows = Mesh.of({"dp": 2, "ring": 2}), [Batch({"id": np.arange(4)})]
    dealt = deal(Transfer("rows", "rows"), mesh, evenly, rows, {})
    assert [a.args[0]["id"].tolist() for a in dealt.arguments] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert dealt.answers == [True, False, True, False]
    assert deal(Transfer("rows", "merge"), mesh, evenly, rows, {}).answers == [True, False, True, False]


# ---- processes: groups, denominators, gradients ----


@pytest.mark.dist
def test_groups_and_denominators_of_invented_axes(pool):
    for name in ("island", "ring"):
        first, second = pool.run(2, HERE + "counted", name=name)
        assert first["group"] == second["group"] == [0, 1] and first["island group"] == (name == "island")
        assert (first["whole"], first["denominator"]) == (second["whole"], second["denominator"])
        assert first["denominator"] == 9.0  # tokens of the whole batch
        assert [first["first"], second["first"]] == [True, False]


def counted(rank, name):
    with invented():
        grid = ParallelDims.of(Mesh.of({name: 2}), rank)
        lengths = {"island": [[4], [5]], "ring": [[4, 5], [4, 5]]}[name][rank]
        tokens = Jagged.with_lengths(np.arange(sum(lengths)), np.array(lengths))
        aggregation = registry.build("aggregations", "token-mean", {}, Aggregation)
        found = global_denominator(aggregation, np.ones(sum(lengths), np.uint8), tokens, gather_data_ranks(grid))
        return {
            "group": dist.get_process_group_ranks(grid.group(name)),
            "island group": grid.group("island") is not None,
            "denominator": found.denominator,
            "whole": found.whole,
            "first": is_first_data_rank(grid),
        }


@pytest.mark.dist
@pytest.mark.parametrize(
    "sizes",
    [
        {"island": 2},
        {"ring": 2},
        pytest.param({"island": 2, "fsdp": 2}, marks=pytest.mark.slow),
        {"ring": 2, "fsdp": 2},
    ],
    ids=str,
)
def test_a_step_over_an_invented_axis_is_that_of_one_device(pool, sizes):
    expected = trained(0, {})
    for found in pool.run(2 * sizes.get("fsdp", 1), HERE + "trained", sizes=sizes):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-11)
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], tensor, **EXACT)


def trained(rank, sizes):
    """Two steps: rows are divided over what splits rows, tokens by the mechanism of the axis."""
    case = Case(double=True, micro_tokens=1000)
    with invented():
        sharded = (
            shard(lambda: build(case), ParallelDims.of(Mesh.of(sizes), rank))
            if sizes
            else ShardedModel.alone(build(case))
        )
        sharded.load_(weights(case))
        mesh, engine, (tokens, mask) = sharded.grid.mesh, engine_of(case, sharded), batch()
        rows = np.arange(len(tokens.lengths))[mesh.index(rank, *mesh.over("rows")) :: mesh.count("rows")]
        own, loss = Jagged(mask, tokens.offsets).take(rows).values, loss_of(case, mask)
        for _ in range(2):
            done = engine.update(tokens.take(rows), own, {}, loss, starts=tokens.offsets[rows])
        found = {name: t.clone() for name, t in sharded.assemble(list(sharded.parameters)).items()}
    return {"loss": done.loss, "norm": done.grad_norm, "weights": found}


# ---- checkpoints ----


def test_copies_along_an_invented_axis_share_the_writing_of_a_checkpoint(table):
    mesh, shapes = Mesh.of({"dp": 2, "fsdp": 2, "island": 2, "ring": 2}), {f"t{i}": (64, 8) for i in range(8)}
    layouts = {name: nested(mesh, shape, {}) for name, shape in shapes.items()}
    assert all(sum(layout.boxes(r) == layout.boxes(0) for r in mesh.ranks) == 8 for layout in layouts.values())
    plan = plan_group([Spec(name, layout, "float32") for name, layout in layouts.items()])
    assert sum(plan.nbytes) == 8 * 64 * 8 * 4 and len(set(plan.nbytes)) == 1


# ---- what a recipe makes of it: keys, plans, and what is shown ----


LAYOUT = ["layout", "addition-grpo", "--json", "data.digits=1", "cluster.backend=local", "cluster.workers=2"]
PLANS = {
    "dp": [],
    **{name: [f"policy.layout.{name}=2"] for name in ("island", "ring", "cp")},
    "uneven": ["cluster.workers=3", "policy.layout.island=2"],
    "many": ["policy.layout={dp = 2, island = 2}"],
    "elsewhere": ["rollout.layout.ring=2"],
    "trap": ["policy.layout.seq=2"],
}


@pytest.fixture(scope="module")
def planned():
    """What ``tilth layout`` prints for each list of keys, in one process of its own."""
    code = f"""
import json, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "tilth"]:
    del sys.modules[name]  # only torch stays
from tilth.config.axes import AXES, Axis
for given in {[vars(axis) for axis in (*INVENTED, TRAPS[0])]!r}:
    AXES[given["name"]] = Axis(**given)
from typer.testing import CliRunner
from tilth.cli.main import app
command = {LAYOUT!r}
plans = json.loads(sys.argv[1])
print(json.dumps({{name: CliRunner().invoke(app, [*command, *keys]).output for name, keys in plans.items()}}))
"""
    command = [*forked.python(), "-c", code, json.dumps(PLANS)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(ran.stdout)


def test_layout_keys_plans_of_memory_and_traffic_and_what_is_shown(planned):
    dp, island, ring, cp = (json.loads(planned[name]) for name in ("dp", "island", "ring", "cp"))
    assert [island["roles"]["policy"][n] for n in ("dp", "island", "ring", "tokens_per_rank")] == [
        1, 2, 1, dp["roles"]["policy"]["tokens_per_rank"]
    ]  # fmt: skip
    assert ring["roles"]["policy"]["tokens_per_rank"] == island["roles"]["policy"]["tokens_per_rank"]
    assert [rank["memory"] for rank in island["ranks"]] == [rank["memory"] for rank in dp["ranks"]]
    seats = [rank["roles"][0] for rank in ring["ranks"]]
    assert [(s["dp"], s["island"], s["ring"]) for s in seats] == [(0, 0, 0), (0, 0, 1)]
    assert {s["parameters"] for s in seats} == {ring["parameters"]}
    assert [rank["memory"] for rank in ring["ranks"]] == [rank["memory"] for rank in cp["ranks"]]
    divided, whole = (plan["ranks"][0]["memory"]["activations"] for plan in (ring, dp))
    assert whole < divided < 1.5 * whole  # as many tokens, but samples of a prompt do not share its tokens
    talk, other = (next(t for t in plan["traffic"] if t["role"] == "policy") for plan in (island, dp))
    assert talk == {**other, "axis": "island"} and talk["groups"] == [[0, 1]]


def test_mistakes_in_a_recipe_name_the_keys(planned):
    assert "policy.layout.seq = 2" in planned["trap"] and "mechanism" in planned["trap"]
    sizes = {"dp": 2, "island": 2}
    counts = " x ".join(str(sizes.get(name, 1)) for name in AXES)
    product = f"{' x '.join(AXES)} x island x ring x pipe x seq = {counts} x 2 x 1 x 1 x 1 = 4"
    assert "does not divide" in planned["uneven"] and product in planned["many"]
    assert "rollout.layout.ring = 2" in planned["elsewhere"]
    here = CliRunner().invoke(app, [*LAYOUT, *PLANS["island"]])
    assert "unknown key policy.layout.island" in here.output


# ---- the trace ----


def test_coordinates_in_the_trace(table):
    assert Mesh.of({"island": 2, "pipe": 2}).place(3).endswith("tp=0 island=1 ring=0 pipe=1")
    job = Job(4)
    with job:
        job.do("policy.update", {r: [("forward", 1.0 + r % 2), ("all_reduce", 0.1)] for r in range(4)})
    rows = [
        {**r, "place": r["place"] and f"dp=0 island={r['rank'] // 2} pipe={r['rank'] % 2}"}
        for r in job.table().to_pylist()
    ]
    found = what_if_run(RunModel(read_steps(from_table(pa.Table.from_pylist(rows, job.table().schema)))))
    assert list(found.by_axis) == ["island", "pipe"]
    assert found.dp.tolist() == [0, 0, 1, 1] and found.stage.tolist() == [0, 1, 0, 1]


# ---- nothing knows the axes by place ----


def offences(tree):
    """Lines on which sizes of a mesh are taken by position, or several axes are written out."""
    for node in ast.walk(tree):
        sized = isinstance(getattr(node, "value", None), ast.Attribute) and node.value.attr == "sizes"
        unpacked = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        parts = getattr(node, "keys" if isinstance(node, ast.Dict) else "elts", [])
        named = {part.value for part in parts if isinstance(part, ast.Constant)} & set(AXES)
        if (sized and (unpacked or isinstance(node, ast.Subscript))) or len(named) > 1:
            yield node.lineno


OWN = {"config/axes.py", "core/layout.py"}


def test_no_code_knows_the_axes_by_place():
    source = ROOT / "src" / "tilth"
    files = [path for path in source.rglob("*.py") if str(path.relative_to(source)) not in OWN]
    assert len(files) > 200
    texts = {path: path.read_text() for path in files}
    texts = {path: text for path, text in texts.items() if ".sizes" in text or sum(f'"{a}"' in text for a in AXES) > 1}
    assert [f"{path}:{line}" for path, text in texts.items() for line in offences(parse(text))] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "dp, fsdp, _ = mesh.sizes",
        "n = mesh.sizes[0]",
        "x = mesh.sizes[1:]",
        'N = ("dp", "fsdp")',
        'N = {"tp": 1, "dp": 2}',
    ],
)
def test_that_would_be_seen(wrong):
    assert list(offences(parse(wrong))) == [1]
