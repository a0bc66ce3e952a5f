"""Recipes load, dump and are compared as promised; every mistake is one line that says what would be right."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.config import load, open_sets
from tilth.config.checks import profiled
from tilth.config.errors import PluginError, RecipeError, TilthError
from tilth.config.flows import FLOWS
from tilth.config.keys import entries, keys
from tilth.config.load import (
    _work,
    check_allowed,
    digest,
    dump_toml,
    dump_value,
    from_dict,
    load_recipe,
    parse_overrides,
)
from tilth.config.schema import Recipe

OPTIMIZER_NAMES = "adamw, muon, lans, lamb, lars, adaalter"


def problem(*overrides: str, recipe: str = "addition-grpo") -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_processes_of_a_launcher_are_the_workers_that_layouts_are_checked_against():
    asked = ["cluster.backend=local", "policy.layout.fsdp=4"]
    for also in ([], ["cluster.workers=1"], ["cluster.workers=4"]):
        assert load_recipe("addition-grpo", [*asked, *also], launched=4).cluster.workers == 4
    for launched in (2, 1):
        with raises(RecipeError, "policy.layout.fsdp") as caught:
            load_recipe("addition-grpo", asked, launched=launched)
        assert f"cluster.workers = {launched};" in str(caught.value)


@pytest.mark.parametrize(
    "asked",
    [["cluster.backend=inline"], ["cluster.backend=ray"], ["cluster.backend=local", "cluster.workers=2"],
     ["cluster.backend=local", "cluster.pools={a = 2, b = 2}"]],
)  # fmt: skip
def test_processes_of_a_launcher_change_no_recipe_that_says_otherwise(asked):
    assert load_recipe("addition-grpo", asked, launched=4) == load_recipe("addition-grpo", asked)


def test_shipped_recipe_by_name_and_by_path_are_equal():
    path = load.SHIPPED / "addition-grpo.toml"
    assert load_recipe("addition-grpo") == load_recipe(str(path))
    assert load_recipe("addition-grpo").algorithm.advantage == "grpo_no_std"


@pytest.mark.parametrize("name", load.names())
def test_every_shipped_recipe_loads(name):
    assert isinstance(load_recipe(name), Recipe)


def test_the_mixture_of_its_page_is_a_valid_one():
    page = Path(__file__).parents[2].joinpath("docs/packages/data.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    table = tomllib.loads(block)
    assert table["data"]["mixture"][1].pop("filter") == "short"  # of a plugin
    recipe = from_dict({"flow": "sft", "supervised": {"steps": 1}, **table})
    assert [part.name for part in recipe.data.sources] == ["web", "maths"]


def test_teachers_on_the_page_of_algorithms_are_a_recipe():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    recipe = from_dict({"flow": "distill", **tomllib.loads(block)})
    assert [(one.name, one.aligns) for one in recipe.teachers] == [("mathematician", False), ("coder", False)]


def test_defaults_are_a_valid_recipe():
    assert from_dict({}) == Recipe()


def test_at_most_201_keys_each_explained():
    table = keys()
    assert len(table) <= 201
    assert all(k.field.description and len(k.field.description) < 260 for k in table.values())


# -- where a recipe comes from ---------------------------------------------------------------------------------------


def test_unknown_name_gives_the_nearest():
    assert problem(recipe="adition-grpo") == "no recipe 'adition-grpo'; did you mean addition-grpo?"


def test_unknown_name_with_nothing_near_lists_all():
    assert problem(recipe="zzz") == f"no recipe 'zzz'; there is {', '.join(load.names())}"


def test_missing_file(tmp_path):
    path = str(tmp_path / "none.toml")
    assert problem(recipe=path).startswith(f"no recipe file {path!r}")


def test_broken_toml_says_where(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("flow = 'grpo'\n[model\n")
    message = problem(recipe=str(path))
    assert "broken.toml is not TOML" in message and "line 2" in message


def test_not_text(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert problem(recipe=str(path)).startswith(f"cannot read recipe {path}")


@pytest.mark.parametrize(
    ("given_name", "name"),
    [("addition-grpo", "addition-grpo"), ("a/b/my.v2.toml", "my.v2"), ("runs/first/recipe.toml", "first")],
)
def test_recipe_name(given_name, name):
    assert load.recipe_name(given_name) == name


# -- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=3", 3),
        ("optimizer.lr=1e-4", 1e-4),
        ("optimizer.lr = 2", 2),
        ("model.tied=false", False),
        ("model.tied=True", True),
        ("run.name=first", "first"),
        ('run.name="first one"', "first one"),
        ("run.name=2026", "2026"),
        ("run.name=2026-01-02", "2026-01-02"),
        ("run.name=true", "true"),
        ("run.name=a=b", "a=b"),
        ("run.name=", ""),
        ("reward.function=my/file.py:score", "my/file.py:score"),
        ("optimizer.name=adamw", "adamw"),
        ('rollout.stop=["a", "b\\n"]', ("a", "b\n")),
    ],
)
def test_override_value(override, value):
    name = override.partition("=")[0].strip()
    recipe = load_recipe("addition-grpo", [override])
    found = recipe
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value and isinstance(found, type(value) if name != "optimizer.lr" else float)


def test_overrides_merge_with_the_file_and_the_last_wins():
    recipe = load_recipe("addition-grpo", ["algorithm.steps=5", "algorithm.steps=6"])
    assert recipe.algorithm.steps == 6 and recipe.algorithm.advantage == "grpo_no_std"


def test_an_override_of_a_named_table_has_the_type_of_its_key():
    named = {"reference.path": "", "reference.field": "kind", "reference.teachers.maths.sources": "['a']"}
    overrides = [f"{key}={value}" for key, value in named.items()]
    found = load_recipe("distill", [*overrides, "reference.teachers.maths.path=7"])
    assert [one.path for one in found.reference.teachers.values()] == ["7"]
    dumped = f"reference.teachers={dump_value(found.dump()['reference']['teachers'])}"
    assert load_recipe("distill", [*overrides[:2], dumped]) == found


def test_parse_overrides_nests():
    assert parse_overrides(["seed=1", "model.hidden=64", "model.heads=2"]) == {
        "seed": 1,
        "model": {"hidden": 64, "heads": 2},
    }


@pytest.mark.parametrize("override", ["seed", "=3", ""])
def test_override_without_form(override):
    assert "not of the form key=value" in problem(override)


def test_override_of_a_value_as_a_section():
    assert "needs a section, but seed has a value already" in problem("seed=1", "seed.x=2")


# -- what can be wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.grup=8", "unknown key rollout.grup; did you mean rollout.group?"),
        ("rolout.group=8", "unknown key rolout; did you mean rollout?"),
        ("lr=1", "unknown key lr; did you mean supervised.lr or critic.lr or optimizer.lr?"),
        ("train.hidden=64", "unknown key train.hidden; did you mean model.hidden?"),
        ("sede=1", "unknown key sede; did you mean seed?"),
        ("rollout.group=0", "rollout.group = 0 is not an integer above 0"),
        ("rollout.group=2.5", "rollout.group = 2.5 is not an integer above 0"),
        ("rollout.group=many", "rollout.group = 'many' is not an integer above 0"),
        ("rollout.group=true", "rollout.group = True is not an integer above 0"),
        ("seed=-1", "seed = -1 is not an integer of at least 0 and below 9223372036854775808"),
        ("rollout.top_p=1.5", "rollout.top_p = 1.5 is not a number above 0 and at most 1"),
        ("optimizer.lr=nan", "optimizer.lr = nan is not a number of at least 0"),
        ("optimizer.lr=inf", "optimizer.lr = inf is not a number of at least 0"),
        ("data.digits=10", "data.digits = 10 is not an integer of at least 1 and at most 9"),
        (
            "optimizer.name=adam",
            f"optimizer.name = 'adam' is not one of {OPTIMIZER_NAMES}; did you mean 'adamw'?",
        ),
        (
            "optimizer.name=7",
            f"optimizer.name = '7' is not one of {OPTIMIZER_NAMES}; a plugin declares another with @tilth.optimizer",
        ),
        ("model.tied=1", "model.tied = 1 is not true or false"),
        ("rollout.stop=x", """rollout.stop = 'x' is not a list of texts, written '["a", "b"]'"""),
        ("rollout.stop=[1]", """rollout.stop = 1 is not a list of texts, written '["a", "b"]'"""),
        (
            "run.track=[wandb]",
            "run.track = '[wandb]' is not a list of tensorboard, wandb, mlflow, trackio, "
            """written '["tensorboard"]'; """
            "a plugin declares another with @tilth.tracker",
        ),
        ("model=3", "model = 3 is not a section; its keys are written model.KEY"),
        ("model.hidden.x=3", "model.hidden = {'x': 3} is not an integer above 0"),
    ],
)
def test_message_names_key_value_and_what_is_right(override, message):
    assert problem(override) == message


def test_unknown_key_with_nothing_near_lists_the_section():
    message = problem("reward.zzzzzz=1")
    keys = ("function", "model", "model_weight", "timeout", "workers", "pool")
    assert message == f"unknown key reward.zzzzzz; there is {', '.join(f'reward.{key}' for key in keys)}"


def test_more_than_one_problem_is_counted():
    assert problem("rollout.group=0", "rollout.prompts=0").endswith("(and 1 more)")


def test_recipe_error_is_a_tilth_error_and_core_has_the_same():
    from tilth.core import errors

    assert errors.RecipeError is RecipeError and issubclass(RecipeError, TilthError)


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValueError):
        load_recipe("addition-grpo").model.hidden = 3


# -- cross-checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.hidden=130"], "model.hidden = 130 is not a multiple of model.heads = 4"),
        (["model.hidden=20"], "a head is 5 wide"),
        (["model.head_dim=33"], "a head is 33 wide"),
        (["model.kv_heads=3"], "model.kv_heads = 3 does not divide model.heads = 4"),
        (["rollout.max_tokens=32"], "rollout.max_tokens = 32 leaves no room for a prompt in model.context = 32"),
        (["rollout.kv_tokens=31"], "rollout.kv_tokens = 31"),
        (["train.device=gpu"], "train.device = 'gpu' is not auto, cpu, cuda or cuda:N"),
        (["train.parity=true", "train.compile=true"], "set train.compile = false"),
        (["train.parity=true", "rollout.compile=true"], "set rollout.compile = false"),
        (["train.parity=true", "train.balance=cost"], "train.balance = 'cost': measured costs place rows"),
        (["train.parity=true", "cluster.costs=c.json"], "cluster.costs = 'c.json': measured costs place rows"),
        (["train.balance=none", "cluster.costs=c.json"], "leave one of them out"),
        (["train.parity=true", "train.matmul=medium"], "train.matmul = highest, not medium"),
        (["train.parity=true", "train.device=cuda:1"], "train.device is 'cuda:1'"),
        (["algorithm.steps=0", "supervised.steps=0"], "nothing to train"),
        (["model.dropout=0.1", "supervised.steps=0"], "model.dropout = 0.1 has no use in flow = grpo"),
        (["data.holdout=0"], "supervised.until = 0.5 needs held-out prompts"),
        (["data.holdout=1"], "data.holdout = 1 leaves no prompt"),
        (["algorithm.dual_clip=0.5"], "algorithm.dual_clip = 0.5"),
        (["algorithm.clip_low=1.5"], "algorithm.clip_low = 1.5"),
        (["rollout.temperature=0"], "rollout.temperature = 0"),
        (["rollout.group=1"], "rollout.group = 1"),
        (["algorithm.minibatches=513"], "algorithm.minibatches = 513 is more than rollout.prompts x group = 512"),
        (["run.name=a/b"], "run.name = 'a/b' is a path"),
        (
            ["run.checkpoints=s3:/bucket/x"],
            "run.checkpoints = 's3:/bucket/x' is no URL; write s3://bucket/x, or ./s3:/b",
        ),
        (["run.name=.."], "run.name = '..' is a path"),
        (["run.name=a@best"], "run.name = 'a@best' has an @, as in RUN@best, which names a checkpoint"),
        (["run.dir="], "run.dir = '' is empty"),
        (["rollout.staleness=-1"], "rollout.staleness = -1 is not one of free or an integer of at least 0"),
        (["rollout.staleness=some"], "rollout.staleness = 'some' is not one of free"),
        (["rollout.buffer=3"], "rollout.buffer = 3 has no use with rollout.staleness = 0, but with free"),
        (["rollout.buffer=3", "rollout.staleness=2"], "has no use with rollout.staleness = 2, but with free"),
        (["rollout.buffer=0", "rollout.staleness=free"], "rollout.buffer = 0 is not an integer above 0"),
        (["rollout.order=fresh"], "rollout.order = 'fresh' has no use with rollout.staleness = 0"),
        (["rollout.inflight=finish"], "rollout.inflight = 'finish' has no use with rollout.staleness = 0"),
        (
            ["rollout.staleness=1", "rollout.inflight=finish", "rollout.engine=vllm"],
            "rollout.inflight = 'finish' beside rollout.staleness = 1 needs engines that take weights from a relay",
        ),
        (["rollout.whole_every=3"], "rollout.whole_every = 3 has no use with rollout.staleness = 0"),
        (
            ["rollout.staleness=1", "rollout.partial=4", "algorithm.correction=decoupled_token_is"],
            "rollout.partial = 4 beside",
        ),
        (["rollout.staleness=1", "train.routing=replay"], "train.routing = 'replay' beside rollout.staleness = 1"),
        (["rollout.staleness=1", "cluster.backend=local"], "the policy is on these workers too"),
        (["rollout.repack=true"], "rollout.repack = true has no use with rollout.staleness = 0"),
        (["rollout.repack=true", "rollout.staleness=1"], "rollout.repack = true moves samples between replicas, and"),
    ],
)
def test_contradictions(overrides, part):
    assert part in problem(*overrides)


@pytest.mark.parametrize("flow", [name for name, flow in FLOWS.items() if not flow.samples])
def test_given_data_is_never_behind(flow):
    keys = {"flow": flow, "supervised": {"steps": 1}, "rollout": {"staleness": 1}}
    with raises(RecipeError, "rollout.staleness.flow"):
        from_dict(keys)


def test_samples_that_may_be_behind_are_corrected_unless_somebody_says_otherwise():
    found = {n: from_dict({"rollout": {"staleness": n}}).algorithm.correction for n in (0, 1, "free")}
    assert found == {0: "", 1: "decoupled_token_is", "free": "decoupled_token_is"}
    for own in ("none", "decoupled_seq_is"):
        kept = from_dict({"rollout": {"staleness": 1}, "algorithm": {"correction": own}}).algorithm
        assert kept.correction == own and kept.model_fields_set == {"correction"}
    assert not from_dict({"rollout": {"staleness": 1}}).algorithm.model_fields_set


@pytest.mark.parametrize("flow", [name for name, flow in FLOWS.items() if not flow.samples])
def test_choices_of_experts_are_replayed_only_in_a_flow_that_samples(flow):
    keys = {"flow": flow, "supervised": {"steps": 1}}
    assert from_dict({**keys, "train": {"routing": "own"}}).flow == flow
    with raises(RecipeError, "train.routing.unused"):
        from_dict({**keys, "train": {"routing": "replay"}})
    assert from_dict({"flow": "grpo", "train": {"routing": "replay"}}).train.routing == "replay"


@pytest.mark.parametrize("flow", [n for n, flow in FLOWS.items() if flow.learns == "documents" or flow.value])
def test_what_generates_nothing_takes_no_drafts(flow):
    with raises(RecipeError, "rollout.speculate.unused"):
        from_dict({"flow": flow, "supervised": {"steps": 1}, "rollout": {"speculate": "suffix"}})


def test_drafts_are_not_compiled():
    with raises(RecipeError, "rollout.compile.speculate"):
        from_dict({"rollout": {"compile": True, "speculate": "suffix"}})


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("unused", {"rollout": {"speculate": "off"}}),
        ("staleness", {"cluster": {"backend": "inline"}, "rollout": {"staleness": 1}}),
        ("environment", {"rollout": {"environment": "a:b"}, "reward": {"function": ""}}),
        ("loaders", {"data": {"loaders": 2}}),
    ],
)
def test_run_ahead_is_for_prompts_of_synchronous_steps(key, sections):
    rollout = {"speculate": "suffix", "run_ahead": True, **sections.get("rollout", {})}
    with raises(RecipeError, f"rollout.run_ahead.{key}"):
        from_dict({**sections, "rollout": rollout})
    assert from_dict({"rollout": {"speculate": "suffix", "run_ahead": True}}).rollout.run_ahead


@pytest.mark.parametrize(
    ("key", "rollout"),
    [
        ("rollout.draft.path", {}),
        ("rollout.draft.path.unused", {"speculate": "suffix", "draft": {"path": "x"}}),
        ("rollout.draft.depth.unused", {"draft": {"path": "x", "depth": 4}}),
        ("rollout.run_ahead.model", {"draft": {"path": "x"}, "run_ahead": True}),
    ],
)
def test_keys_of_a_drafting_model_are_for_it_alone(key, rollout):
    with raises(RecipeError, key):
        from_dict({"rollout": {"speculate": "model", **rollout}})
    assert from_dict({"rollout": {"speculate": "model", "draft": {"path": "x"}}}).rollout.draft.path == "x"


def test_keys_of_drafts_are_for_drafts_alone():
    draft = {"draft": {"tokens": 4}}
    with raises(RecipeError, "rollout.draft.unused"):
        from_dict({"rollout": draft})
    assert from_dict({"rollout": {**draft, "speculate": "suffix"}}).rollout.draft.tokens == 4
    with raises(RecipeError, "rollout.draft.unused"):
        from_dict({"rollout": {"draft": {"apart": True}}})


@pytest.mark.parametrize("value", ["nan", "[1.0, nan]", "{a = nan}"])
@pytest.mark.parametrize("table", ["algorithm.options", "data.options", "roles.mine.options"])
def test_a_wrong_value_of_an_option_is_named_by_the_option_alone(table, value):
    with raises(RecipeError, f"{table}.x") as caught:
        load_recipe("addition-grpo", [f"{table}.x={value}"])
    assert "finite number" in str(caught.value) and "more)" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.hidden=130", "model.head_dim=32"],
        ["model.path=some/model"],
        ["model.path=some/model", "model.context=64", "model.dropout=0.1"],
        ["model.hidden=64", "model.path="],
        ["data.holdout=0", "data.heldout=test.jsonl"],
        ["data.holdout=1", "data.heldout=test.jsonl"],
        ["model.kv_heads=2"],
        ["train.device=cuda:0"],
        ["rollout.max_tokens=31"],
        ["rollout.group=1", "algorithm.drop_flat=false"],
        ["rollout.temperature=0", "flow=sft"],
        ["data.holdout=0", "supervised.until=1.0"],
        ["algorithm.dual_clip=3"],
        ["algorithm.steps=0"],
        ["train.parity=true", "train.device=cpu"],
    ],
)
def test_what_is_allowed(overrides):
    load_recipe("addition-grpo", overrides)


def test_an_error_of_a_file_names_it_and_one_of_an_override_does_not(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("[algorithm]\nsteps = -1\n")
    with raises(RecipeError, "algorithm.steps") as caught:
        load_recipe(str(path), ["seed=3"])
    assert str(caught.value).startswith(f"{path}: algorithm.steps = -1")
    with raises(RecipeError, "algorithm.steps") as caught:
        load_recipe(str(path), ["algorithm.steps=-2"])
    assert str(caught.value).startswith("algorithm.steps = -2")
    path.write_text('plugins = ["gone.py"]\n')
    with raises(PluginError, "gone.py") as caught:
        load_recipe(str(path))
    assert str(caught.value).startswith(f"{path}: ")


# -- dump and digest -------------------------------------------------------------------------------------------------


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    texts,
    st.lists(texts, max_size=3),
    st.floats(0, 1e300, allow_nan=False, allow_infinity=False),
    st.integers(0, 2**63 - 1),
    st.booleans(),
)
def test_dump_round_trip(path, stop, rate, seed, tied):
    recipe = from_dict(
        {
            "seed": seed,
            "model": {"path": path} if path else {"tied": tied, "hidden": 128},
            "rollout": {"stop": stop},
            "optimizer": {"lr": rate},
        }
    )
    assert from_dict(tomllib.loads(dump_toml(recipe))) == recipe


def test_dump_states_every_key_and_is_a_recipe_file(tmp_path):
    recipe = load_recipe("addition-grpo", ["seed=7", "run.name=x"])
    path = tmp_path / "recipe.toml"
    path.write_text(dump_toml(recipe))
    assert load_recipe(str(path)) == recipe
    inside = sum(len(entries(key)) for key in keys().values())
    assert path.read_text().count(" = ") == len(keys()) + inside


def test_digest_of_the_native_engine_is_that_of_recipes_from_before_the_key():
    assert "engine" not in _work(load_recipe("addition-grpo"))["rollout"]


def test_digest_ignores_only_where_the_run_is_kept():
    base = load_recipe("addition-grpo")
    kept = ["run.dir=elsewhere", "run.name=x", "run.keep=3", "run.save_every=7", "run.save_minutes=1", "run.grace=9"]
    kept += ["run.checkpoints=elsewhere", "run.collect_every=9"]
    assert digest(base) == digest(load_recipe("addition-grpo", kept))
    others = ["seed=1", "run.eval_every=3", "optimizer.lr=1e-3", "rollout.stop=['a']", "model.tied=false"]
    digests = {digest(load_recipe("addition-grpo", [o])) for o in others}
    assert len(digests | {digest(base)}) == len(others) + 1
    assert len(digest(base)) == 16


def test_documentation_of_keys_is_what_the_schema_says():
    from tests.config.reference import reference

    page = Path(__file__).parents[2] / "docs" / "recipes.md"
    assert page.read_text() == reference(), "run: python -m tests.config.reference > docs/recipes.md"
    assert all(f"`{name}`" in reference() for name in keys())


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.columns.prompt=question", {"prompt": "question"}),
        ('data.columns={prompt = "question", answer = "solution"}', {"prompt": "question", "answer": "solution"}),
    ],
)
def test_columns_by_table_or_one_by_one(override, value):
    recipe = load_recipe("addition-grpo", [override])
    assert recipe.data.columns == value
    assert load.from_dict(load.tomllib.loads(load.dump_toml(recipe))) == recipe


def test_a_reward_is_a_name_or_names_with_weights():
    assert load_recipe("addition-grpo", ["reward.function=gsm8k"]).reward.function == "gsm8k"
    weighted = load_recipe("addition-grpo", ['reward.function={gsm8k = 1.0, "regex:####" = 0.1}'])
    assert weighted.reward.function == {"gsm8k": 1.0, "regex:####": 0.1}
    assert load.from_dict(load.tomllib.loads(load.dump_toml(weighted))) == weighted
    assert "text or a table" in problem("reward.function=[1]")


MINE = """
[data]
source = "x.jsonl"
columns = { prompt = "{question}", answer = "solution" }
[reward]
function = { gsm8k = 1.0, "regex:####" = 0.5 }
"""


@pytest.mark.parametrize(
    ("overrides", "columns", "function"),
    [
        (["reward.function={exact=1.0}"], {"prompt": "{question}", "answer": "solution"}, {"exact": 1.0}),
        (['data.columns={messages="chat"}'], {"messages": "chat"}, None),
        (["data.columns={}"], {}, None),
        (['data={columns={messages="chat"}}'], {"messages": "chat"}, None),
        (["data.columns.prompt=q"], {"prompt": "q", "answer": "solution"}, None),
        (['data.columns={text="t"}', "data.columns.prompt=q"], {"text": "t", "prompt": "q"}, None),
        (["data.columns.prompt=q", 'data.columns={text="t"}'], {"text": "t"}, None),
        (["reward.function.exact=2"], None, {"gsm8k": 1.0, "regex:####": 0.5, "exact": 2.0}),
        (["reward.function=exact"], None, "exact"),
    ],
)
def test_a_table_as_a_value_replaces_and_dotted_keys_merge(tmp_path, overrides, columns, function):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    recipe, plain = load_recipe(str(path), overrides), load_recipe(str(path))
    assert recipe.data.columns == (plain.data.columns if columns is None else columns)
    assert recipe.reward.function == (plain.reward.function if function is None else function)
    assert recipe.data.source == "x.jsonl"


def test_a_section_as_a_value_is_merged():
    recipe = load_recipe("addition-grpo", ["rollout.group=4", "rollout={prompts=8}", "algorithm={steps=5}"])
    assert (recipe.rollout.group, recipe.rollout.prompts, recipe.algorithm.steps) == (4, 8, 5)
    assert recipe.algorithm.advantage == "grpo_no_std"


def test_an_entry_of_a_table_is_named_with_what_would_be_right():
    unknown = "data.columns has no key frage; there are prompt, answer, messages, tools, text, chosen, rejected, margin"
    assert problem("data.columns={frage='question'}") == problem("data.columns.frage=question") == unknown
    assert problem("data.columns={prompt=3}") == "data.columns.prompt = 3 is not text"
    assert problem("data.columns=foo") == "data.columns = 'foo' is not a table"
    weight = "reward.function.gsm8k = {} is not a number"
    assert problem("reward.function={gsm8k='x'}") == weight.format("'x'")
    assert problem("reward.function={gsm8k=inf}") == weight.format("inf")
    assert problem("reward.function={gsm8k='x', exact='y'}") == weight.format("'x'") + " (and 1 more)"
    assert problem("reward.function=[1]") == "reward.function = [1] is not text or a table"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("schedule={0=nan}", "schedule.0 = nan is not a number of at least 0"),
        ("schedule={0=1.0, 5=-1.0}", "schedule.5 = -1.0 is not a number of at least 0"),
        ("schedule={five=1.0}", "schedule has the key 'five', which is no number from 0 on"),
        ("schedule=3", "schedule = 3 is not a table"),
        ("columns={prompt=3}", "columns.prompt = 3 is not text"),
    ],
)
def test_an_entry_of_a_table_of_a_source_is_named_too(entry, message):
    assert problem(f'data.mixture=[{{name="a", source="addition", {entry}}}]') == f"data.mixture.0.{message}"


@pytest.mark.parametrize("flow", ["sft", "pretrain"])
def test_a_supervised_flow_without_steps_or_epochs_trains_nothing(flow):
    assert f"flow = {flow}" in problem(f"flow={flow}", "supervised.steps=0")
    load_recipe("addition-grpo", [f"flow={flow}", "supervised.steps=0", "supervised.epochs=1.0"])


def test_trackers_do_not_make_another_run():
    plain, tracked = load_recipe("addition-grpo"), load_recipe("addition-grpo", ['run.track=["wandb"]'])
    assert load.digest(plain) == load.digest(tracked)


@pytest.mark.parametrize("override", ["run.prometheus=9400", "run.profile=3:5", "run.profile_ranks=[0]"])
def test_what_only_watches_does_not_make_another_run(override):
    assert load.digest(load_recipe("addition-grpo")) == load.digest(load_recipe("addition-grpo", [override]))


@pytest.mark.parametrize(
    ("steps", "want"), [("", range(0)), ("1:2", range(1, 2)), ("10:12", range(10, 12)), ("7:107", range(7, 107))]
)
def test_profiled_steps_begin_at_the_first_and_end_before_the_second(steps, want):
    assert profiled(load_recipe("addition-grpo", [f"run.profile='{steps}'"])) == want


@pytest.mark.parametrize("steps", ["0:2", "3", "3:", ":3", "3:3", "5:3", "-1:3", "1:102", "a:b", "1:2:3", "1 : 2"])
def test_profiled_steps_that_cannot_be_are_named(steps):
    told = problem(f"run.profile='{steps}'")
    assert told.startswith(f"run.profile = '{steps}' is not A:B with 1 <= A < B <= A + 100")


def test_profiled_ranks_must_be_workers():
    local = "cluster.backend=local", "cluster.workers=2", "run.profile=1:3"
    load_recipe("addition-grpo", [*local, "run.profile_ranks=[0, 1]"])
    assert problem(*local, "run.profile_ranks=[1, 2]") == (
        "run.profile_ranks: there is no rank 2; the workers are ranks 0 to 1"
    )
    assert problem("run.profile=1:3", "run.profile_ranks=[-1]").endswith("no rank -1; the one worker is rank 0")
    assert problem("run.profile=1:3", "run.profile_ranks=[]").endswith("no rank is named; the one worker is rank 0")


def test_pretraining_generates_nothing_so_its_context_may_be_short():
    load_recipe("pretrain", ["model.context=16"])
    assert "rollout.max_tokens = 32 leaves no room" in problem("model.context=16", "rollout.max_tokens=32")


def test_what_may_differ_is_named_by_a_key_a_section_or_a_part_of_a_name():
    check_allowed(["algorithm.steps", "policy.layout", "policy.layout.fsdp", "cluster", "data"])
    check_allowed(["reference.teachers.maths.path", "roles.novelty.pool"])
    for names, hint in (
        (["reference.teachers.maths.pat"], "did you mean reference.teachers?"),
        (["seed", "algorithm.step"], "did you mean algorithm.steps?"),
        ([""], "sections are model, data"),
    ):
        with raises(RecipeError, "--allow") as caught:
            check_allowed(names)
        assert hint in str(caught.value)


# ---- defaults fit what is given ----


def test_lengths_that_nobody_set_fit_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    found = load_recipe("sft", [f"model.path={tmp_path}"])
    assert (found.model.context, found.rollout.max_tokens) == (128, 64)
    assert [line.partition(",")[0] for line in found.told] == ["model.context = 128", "rollout.max_tokens = 64"]
    assert load_recipe("addition-grpo", [f"model.path={tmp_path}"]).told == ()
    chosen = load_recipe("sft", [f"model.path={tmp_path}", "model.context=200"])
    assert chosen.model.context == 200 and chosen.rollout.max_tokens == 100
    with raises(RecipeError, "rollout.max_tokens"):
        load_recipe("addition-grpo", ["model.context=16", "rollout.max_tokens=16"])
    (tmp_path / "mine.toml").write_text("[model]\ncontext = 16\n[rollout]\nmax_tokens = 32\n")
    with raises(RecipeError, "rollout.max_tokens"):
        load_recipe(str(tmp_path / "mine.toml"))
    assert from_dict({"model": {"context": 16}}).rollout.max_tokens == 8


def test_a_recipe_whose_name_is_begun():
    with raises(RecipeError, "recipe") as caught:
        load_recipe("addition")
    assert "addition-grpo" in str(caught.value)


# ---- names are checked before torch is imported ----

LATE = """import json, sys
from tilth.api import run_recipe
from tilth.config.load import load_recipe
for keys in json.loads(sys.argv[1]):
    try:
        run_recipe(load_recipe("sft", [*keys, "data.source=d.jsonl"]), name="x")
    except Exception as error:
        print(error.key, "torch" in sys.modules, error)
"""
MISTYPED = [
    (["algorithm.advantage=grop"], "algorithm.advantage", "did you mean grpo?"),
    (["algorithm.loss=gpso"], "algorithm.loss", "did you mean gspo?"),
    (["algorithm.aggregation=token-men"], "algorithm.aggregation", "did you mean token-mean?"),
    (["algorithm.correction=decoupled_seq_mi"], "algorithm.correction", "did you mean decoupled_seq_mis?"),
    (["preference.loss=sigmiod"], "preference.loss", "did you mean sigmoid?"),
    (["model.path=mymodell"], "model.path", "did you mean 'mymodel'?"),
    (["model.path=mymodel", "model.adapter=mymodel"], "model.adapter", "init_lora_weights"),
    (["reward.function=mine.py"], "mine.py", "mine.py:score"),
    (["reward.function=mine.py:scor"], "mine.py:scor", "did you mean 'score'?"),
    (["reward.function=mne.py:score"], "mne.py", "did you mean 'mine.py'?"),
    (["reward.function=no_package.x:score"], "no_package.x", "no_package"),
    (["rollout.environment=word_gam"], "rollout.environment", "word_game"),
    (["rollout.environment=mne.py:Game"], "rollout.environment", "FILE.py:Class"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """What one process that has not imported torch says of each."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "mymodel").mkdir()
    (folder / "mymodel" / "adapter_config.json").write_text('{"peft_type": "LORA", "init_lora_weights": "pissa"}')
    (folder / "mine.py").write_text("def score(prompt, completion, info):\n    return 1.0\n")
    (folder / "d.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 9)
    line = [sys.executable, "-c", LATE, json.dumps([keys for keys, _, _ in MISTYPED])]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert done.stdout.count("\n") == len(MISTYPED), done
    return done.stdout.splitlines()


@pytest.mark.parametrize("number", range(len(MISTYPED)), ids=[key for _, key, _ in MISTYPED])
def test_a_mistyped_name_or_an_adapter_of_another_kind_is_refused_without_torch(number, refused):
    _, key, hint = MISTYPED[number]
    assert refused[number].startswith(f"{key} False ") and hint in refused[number]


def test_names_read_from_the_sources_are_those_that_are_registered():
    importlib.import_module("tilth.rl.algorithm")
    for kind in ("advantages", "losses", "aggregations", "preferences", "corrections"):
        read = {name for of, name in open_sets._shipped_algorithms() if of == kind}
        own = {name for name, made in open_sets.ALGORITHMS[kind].items() if made.__module__.startswith("tilth.")}
        assert read == own and own, kind


def test_the_tokenizer_of_a_shipped_recipe_gives_way_to_that_of_a_model(tmp_path):
    """A person's own does not, and is refused when it makes new tokens."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    fitted = load_recipe("pretrain", [f"model.path={tmp_path}"])
    assert (fitted.data.tokenizer, fitted.model.context) == ("", 128)
    assert load_recipe("pretrain", [f"model.path={tmp_path}", "data.tokenizer=bpe:300"]).data.tokenizer == "bpe:300"
