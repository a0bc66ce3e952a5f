"""``tilth layout``: what it prints is what the plan says, and nothing is started or trained for it."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.models import tiny
from tilth.cli.layout import look, spans
from tilth.cli.main import app
from tilth.config.load import load_recipe
from tilth.core.memory import Room
from tilth.data.prompts import load_source
from tilth.data.tokenizer import Tokenizer
from tilth.launch.rewards import generating
from tilth.models.family import new_config
from tilth.models.hf import save_pretrained
from tilth.plan.layout import place
from tilth.plan.shape import parameters

FOUR = ["cluster.backend=local", "cluster.workers=4", "optimizer.name=adamw"]
GRPO = ["flow=grpo", "reference.path=", "rollout.group=2"]
BOTH = ["policy.layout.fsdp=2", "policy.layout.tp=2"]
SMALL = ["data.digits=1"]


def call(*arguments):
    found = CliRunner().invoke(app, ["layout", *arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def printed(*arguments):
    found = call(*arguments)
    assert found.exit_code == 0, found.output
    return found.output


def as_json(*arguments):
    return json.loads(printed(*arguments, "--json"))


def refused(*arguments):
    found = call(*arguments)
    assert found.exit_code == 2 and found.output.count("\n") == 1
    return found.output


def test_one_worker_talks_to_nobody():
    text = printed("addition-grpo", *SMALL)
    assert "1 worker, backend inline" in text and "no rank talks with another" in text
    for word in (
        "policy",
        "rollout",
        "reward",
        "loader",
        "writer",
        "KV",
        "optimizer",
        "parameters",
        "most memory: rank 0",
    ):
        assert word in text


@pytest.mark.parametrize("overrides", [[], BOTH, ["flow=ppo", "algorithm.kl_coef=0.1", "critic.layout.fsdp=4"]])
def test_it_fits_a_hundred_columns(overrides):
    text = printed("addition-grpo", *SMALL, *FOUR, *overrides)
    assert max(map(len, text.splitlines())) <= 100


def test_the_plan_is_that_of_the_device_that_a_run_takes(monkeypatch):
    asked, wanted = ["addition-grpo", *SMALL, "train.device=auto"], ["addition-grpo", *SMALL, "train.device=cuda"]
    assert "auto is a CPU here" in printed(*asked) and as_json(*asked)["device"] == "cpu"
    gpu = as_json(*wanted)["ranks"]
    assert gpu != as_json(*asked)["ranks"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("tilth.launch.build._gpus", lambda recipe: [])
    assert as_json(*asked)["ranks"] == gpu and "a CPU here" not in printed(*asked)


def test_ranks_with_their_coordinates_and_groups():
    text = printed("addition-grpo", *SMALL, *FOUR, *BOTH)
    assert "0, 2 | 1, 3" in text and "0-1 | 2-3" in text and "publish" in text
    mesh = place(load_recipe("addition-grpo", [*SMALL, *FOUR, *BOTH]))["policy"].mesh
    used = [axis for axis in mesh.names if mesh.size(axis) > 1]
    assert ",".join(used) in text
    for rank in range(4):
        at = dict(zip(mesh.names, mesh.coordinates(rank)))
        assert ",".join(str(at[axis]) for axis in used) in text


def test_numbers_are_those_of_the_plan():
    plan = as_json("addition-grpo", *SMALL, *FOUR, *BOTH)
    recipe = load_recipe("addition-grpo", [*SMALL, *FOUR, *BOTH])
    vocabulary = Tokenizer.characters(load_source(recipe.data).alphabet()).vocab_size
    assert plan["vocabulary"] == vocabulary
    assert plan["parameters"] == parameters(new_config(recipe.model, vocabulary))
    placed = place(recipe)
    assert {role: tuple(r["ranks"]) for role, r in plan["roles"].items()} == {r: p.ranks for r, p in placed.items()}
    policy = [next(s for s in rank["roles"] if s["role"] == "policy") for rank in plan["ranks"]]
    assert [(s["dp"], s["fsdp"], s["tp"]) for s in policy] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert all(s["gradients"] == 4 * s["parameters"] == s["held"]["parameters"] for s in policy)
    assert plan["roles"]["policy"]["tokens_per_rank"] == 256 * plan["longest"]
    assert plan["roles"]["rollout"]["tokens_per_rank"] == 128 * plan["longest"]
    for rank in plan["ranks"]:
        assert rank["peak"] == sum(rank["memory"].values())


def test_what_does_not_fit_is_marked(monkeypatch):
    """Also what cannot run here at all: a plan may be for another machine."""
    assert "GB: fits" in printed("addition-grpo", *SMALL) and as_json("addition-grpo", *SMALL)["told"] == []
    least = Room(10**9, 10**8, "the cgroup's memory.max")
    monkeypatch.setattr("tilth.cli.layout.rooms", lambda recipe: (least, []))
    assert "does NOT fit" in printed("addition-grpo", *SMALL)
    (place,) = as_json("addition-grpo", *SMALL)["machine"]
    assert (place["fits"], place["room"]["total"], place["what"]) == (False, 10**9, "memory")
    assert place["needed"] > 10**8 > place["certain"]
    (told,) = as_json("addition-grpo", *SMALL, "model.hidden=4096", "model.layers=40")["told"]
    assert told.startswith("it cannot run here: weights")


def test_pools_split_roles():
    plan = as_json(
        "addition-grpo", *SMALL, FOUR[0], "cluster.pools={train=2,speak=2}", "rollout.pool=speak", "reward.pool=speak"
    )
    assert plan["roles"]["policy"]["ranks"] == [0, 1] and plan["roles"]["rollout"]["ranks"] == [2, 3]
    assert plan["roles"]["policy"]["pool"] == "train" and plan["roles"]["reward"]["ranks"] == [2]
    weights = [t for t in plan["traffic"] if t["axis"] == "to rollout"]
    assert [t["groups"] for t in weights] == [[[0, 2], [1, 3]]] and weights[0]["bytes"] == 4 * plan["parameters"]


def test_a_model_by_path_brings_its_shape_from_config_json_alone(tmp_path):
    model = tiny.decoder(tiny.shape("qwen2", vocab_size=60))
    tokenizer = Tokenizer.characters("0123456789+=")
    save_pretrained(tmp_path, model.config, dict(model.named_parameters()), tokenizer=tokenizer)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    plan = as_json("addition-grpo", *SMALL, f"model.path={tmp_path}", "model.context=32")
    assert plan["parameters"] == sum(p.numel() for p in model.parameters()) and plan["vocabulary"] == 60
    eight = [*SMALL, FOUR[0], FOUR[2], "cluster.workers=8", f"model.path={tmp_path}", "model.context=32"]
    message = refused("addition-grpo", *eight, "policy.layout.tp=8")
    assert "policy.layout.tp = 8 does not divide model.heads = 4; on 8 workers tp may be 1, 2, 4" in message


def test_what_does_not_divide_says_what_would():
    assert "policy.layout.tp = 8 does not divide model.heads = 4; on 8 workers tp may be 1, 2, 4" in refused(
        "addition-grpo", *SMALL, FOUR[0], FOUR[2], "cluster.workers=8", "policy.layout.tp=8"
    )
    assert "fsdp may be 1, 2 or 4" in refused("addition-grpo", *FOUR, "policy.layout.fsdp=3")
    assert "unknown key policy.layot" in refused("addition-grpo", "policy.layot.tp=2")
    assert "no recipe 'adition-grpo'" in refused("adition-grpo")


def test_pre_training_has_neither_engine_nor_reward_and_no_tokenizer_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("once upon a time")
    monkeypatch.setattr(Tokenizer, "train", None)
    plan = as_json("pretrain", "data.source=t.txt", "data.tokenizer=bpe:300", *FOUR, "policy.layout.fsdp=4")
    assert set(plan["roles"]) == {"policy", "loader"} and plan["vocabulary"] == 300
    assert [t["axis"] for t in plan["traffic"]] == ["fsdp"]
    assert plan["longest"] == load_recipe("pretrain").model.context
    assert list(tmp_path.iterdir()) == [tmp_path / "t.txt"]  # nothing is written


def test_pre_training_on_characters_counts_those_of_the_documents(tmp_path):
    (tmp_path / "t.txt").write_text("abcabc")
    recipe = load_recipe("pretrain", [f"data.source={tmp_path / 't.txt'}", "data.tokenizer=", "data.holdout=0.0"])
    assert look(recipe).shape.vocab_size == Tokenizer.characters("abc").vocab_size


@pytest.mark.parametrize(
    ("overrides", "scored"),
    [
        ([], False),
        (["reward.function=exact"], True),
        ([*GRPO, "rollout.environment=word-game"], False),  # which gives the reward
        ([*GRPO, "judge.path=RUN", 'judge.rubric="{completion}"'], False),
    ],
    ids=str,
)
def test_only_a_reward_function_has_a_role_reward(tmp_path, overrides, scored):
    model, there = tiny.decoder(tiny.shape("qwen2")), str(tmp_path / "teacher")
    save_pretrained(there, model.config, dict(model.named_parameters()), tokenizer=Tokenizer.characters("abc"))
    (tmp_path / "t.jsonl").write_text('{"prompt": "ab", "answer": "c"}\n' * 4)
    named = [f"data.source={tmp_path / 't.jsonl'}", f"reference.path={there}", "data.tokenizer="]
    plan = as_json("distill", *named, "model.context=32", *(text.replace("RUN", there) for text in overrides))
    assert ("reward" in plan["roles"]) is scored
    assert {seat["role"] for rank in plan["ranks"] for seat in rank["roles"]} == set(plan["roles"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["flow=grpo"], True),
        (["flow=ppo"], True),
        (["flow=pretrain"], False),
        (["flow=sft"], True),
        (["flow=sft", "data.source=x.jsonl"], False),
        (["flow=sft", "data.source=x.jsonl", "reward.function=exact"], True),
    ],
)
def test_what_generates(overrides, expected):
    assert generating(load_recipe("addition-grpo", overrides)) is expected


@pytest.mark.slow
def test_more_workers_than_a_screen():
    text = printed("addition-grpo", *SMALL, FOUR[0], FOUR[2], "cluster.workers=64", "policy.layout.fsdp=8")
    assert "and 32 more; --json has all" in text and "... 8 groups" in text and "0-7 | 8-15" in text


@pytest.mark.parametrize(
    ("ranks", "text"), [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 4), "0, 2, 4"), ((1, 2, 5), "1-2, 5"), ((), "")]
)
def test_spans(ranks, text):
    assert spans(ranks) == text


def test_the_search_prints_the_mapping_the_runner_up_and_the_keys_that_give_it():
    asked = ["addition-grpo", *SMALL, "--search", "--devices", "4", "--device-type", "a100-80g"]
    found = as_json(*asked)
    assert found["device_type"] == "a100-80g" and found["best"]["seconds"] <= found["second"]["seconds"]
    assert found["best"]["seconds"] == pytest.approx(sum(found["best"]["stages"].values()))
    assert {role for pool in found["best"]["pools"] for role in pool["roles"]} == {"policy", "rollout"}
    text = printed(*asked)
    for word in ("best: ", "runner-up: ", "together", "it loses", "keys:", found["keys"][-1]):
        assert word in text
    again = as_json("addition-grpo", *SMALL, *found["keys"])
    assert again["workers"] == sum(pool["devices"] for pool in found["best"]["pools"])


@pytest.mark.slow
def test_the_search_on_this_machine_measures_its_rates():
    found = as_json("addition-grpo", *SMALL, "--search", "--devices", "2", "--device-type", "here")
    assert found["device_type"] == "here" and "measured" in found["source"] and found["best"]["seconds"] > 0


@pytest.mark.parametrize("option", [("--devices", "4"), ("--device-type", "h100")])
def test_an_option_of_the_search_alone_is_refused(option):
    assert " ".join(option) in refused("addition-grpo", *SMALL, *option)


def test_what_the_search_cannot_do_is_named():
    assert "no device type 'h1000'" in refused("addition-grpo", *SMALL, "--search", "--device-type", "h1000")
    big = ["model.hidden=8192", "model.layers=80", "model.heads=64"]
    text = refused("addition-grpo", *SMALL, *big, "--search", "--devices", "2", "--device-type", "h100")
    assert "does not fit on 2 devices of type h100" in text


def test_predictions_are_checked_against_published_step_times():
    """Rich output has the rows that the plain data have."""
    found = as_json("sft", "--check-against", "published")
    text = printed("sft", "--check-against", "published")
    assert f"median error: {found['median_error']:.1%} of {len(found['rows'])} rows" in text and "3.74%" in text
    assert all(f"{100 * row['error']:+.0f} %" in text for row in found["rows"])
    assert "use published" in refused("sft", "--check-against", "mine")


REFUSED = """import sys
from tilth.cli.main import app
for words in ("layout sft", "layout sft --check-against nodir", "data show sft", "data tokenize sft"):
    try:
        app([*words.split(), "data.source=nodir"])
    except SystemExit:
        print("torch" in sys.modules)
"""


def test_data_that_are_nowhere_and_a_wrong_comparison_are_refused_before_torch_is_imported(tmp_path):
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["False"] * 4, done.stderr
