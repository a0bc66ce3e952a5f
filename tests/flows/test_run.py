import dataclasses
import json
import math
import os
import signal
import time

import numpy as np
import pytest

import tilth.rl as rl
from tests.errors import raises
from tests.flows import tiny
from tilth.cluster.protocol import transfer
from tilth.core.errors import (
    DataError,
    LogprobMismatch,
    ModelError,
    NonFiniteError,
    RecipeError,
    RewardError,
    TokenCountError,
    TokenIdentityError,
    WeightMismatch,
)
from tilth.core.trajectory import Trajectory
from tilth.data.prompts import PromptSet
from tilth.engines.engine import Engine
from tilth.flows.generation import Scorers
from tilth.rewards.process_pool import RewardPool
from tilth.roles.policy import PolicyWorker
from tilth.runs.readers import read_state, read_trajectories
from tilth.runs.signals import Interrupted

SHORT = {"supervised": {"steps": 1}, "algorithm": {"steps": 2}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    watcher = tiny.Recorder()
    result = tiny.run(tiny.recipe(tmp_path_factory.mktemp("runs")), callbacks=[watcher])
    return result, watcher


def test_a_run_goes_through_its_phases_and_says_what_it_was(finished):
    result, watcher = finished
    assert [r["phase"] for r in watcher.records] == ["warmup"] * 6 + ["grpo"] * 6
    assert [r["step"] for r in watcher.records] == list(range(1, 13))
    assert result.summary["state"] == "finished" and watcher.ended["steps"] == 12
    assert "predicted memory" in " ".join(watcher.messages)
    assert any("optimizer steps" in m for m in watcher.messages)


def test_every_step_of_experience_is_kept_with_its_tokens(finished):
    result, watcher = finished
    table = read_trajectories(result.directory)
    assert table.num_rows == 6 * 6 * 4
    assert set(table["step"].to_pylist()) == set(range(7, 13))
    row = table.slice(0, 1).to_pylist()[0]
    assert row["prompt_text"].endswith("=") and len(row["tokens"]) == len(row["logprobs"])
    assert watcher.samples[-1]["prompt"].endswith("=")


def test_nothing_is_fetched_to_the_controller(finished):
    _, watcher = finished
    assert not any("bytes/received/controller.payload" in r for r in watcher.records)


def test_trainer_and_engine_agree(finished):
    _, watcher = finished
    worst = [r["mismatch/max"] for r in watcher.records if "mismatch/max" in r]
    assert len(worst) == 6 and max(worst) <= 1e-4


def test_times_of_phases_fit_in_the_step(finished):
    _, watcher = finished
    for r in watcher.records:
        parts = sum(v for k, v in r.items() if k.startswith("time/") and k != "time/step")
        assert parts == pytest.approx(r["time/step"], rel=1e-6)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    seeds = {"first": 3, "again": 3, "other": 4}
    first, again, other = (tiny.run(tiny.recipe(tmp_path, **SHORT, seed=n), name=name) for name, n in seeds.items())
    assert tiny.weights(again.directory) == tiny.weights(first.directory)
    assert tiny.same(tiny.numbers(again.directory), tiny.numbers(first.directory))
    assert tiny.weights(other.directory) != tiny.weights(first.directory)


def test_parity_mode_agrees_bit_for_bit(tmp_path):
    watcher = tiny.Recorder()
    tiny.run(tiny.recipe(tmp_path, **SHORT, train={"threads": 1, "parity": True}), callbacks=[watcher])
    assert [r["mismatch/max"] for r in watcher.records if "mismatch/max" in r] == [0.0] * 2


def test_bf16_runs_within_its_bound(tmp_path):
    watcher = tiny.Recorder()
    tiny.run(tiny.recipe(tmp_path, **SHORT, train={"threads": 1, "precision": "bf16"}), callbacks=[watcher])
    assert 0 <= max(r.get("mismatch/max", 0) for r in watcher.records) < 0.5


@pytest.mark.parametrize(
    "how",
    [
        {"kl_coef": 0.1, "kl": "k2", "entropy_coef": 0.01},
        pytest.param({"minibatches": 2, "epochs": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"advantage": "grpo", "aggregation": "seq-mean-token-mean", "drop_flat": False}, marks=pytest.mark.slow
        ),
        pytest.param({"advantage": "rloo", "dual_clip": 3.0, "clip_high": 0.28}, marks=pytest.mark.slow),
    ],
)
def test_variants_of_the_algorithm_run(tmp_path, how):
    watcher = tiny.Recorder()
    made = tiny.recipe(tmp_path, supervised={"steps": 1}, algorithm={"steps": 1, **how})
    result = tiny.run(made, callbacks=[watcher])
    last = watcher.records[-1]
    assert result.summary["state"] == "finished"
    assert math.isfinite(last["loss"]) and last["grad_norm"] > 0
    assert ("kl_ref" in last) == ("kl_coef" in how)


@pytest.mark.slow
def test_two_updates_a_batch_take_the_ratio_to_the_policy_before_both(tmp_path):
    watcher = tiny.Recorder()
    made = tiny.recipe(tmp_path, supervised={"steps": 1}, algorithm={"steps": 2, "epochs": 2})
    tiny.run(made, callbacks=[watcher])
    assert watcher.records[-1]["approx_kl_k3"] > 0
    assert watcher.records[-1]["mismatch/max"] <= 1e-4


@pytest.mark.slow
def test_flat_groups_are_left_out_and_counted(tmp_path):
    watcher = tiny.Recorder()
    result = tiny.run(tiny.recipe(tmp_path, **SHORT), reward=lambda p, c, i: 1.0, callbacks=[watcher])
    last = watcher.records[-1]
    assert last["groups/flat"] == 1.0 and last["steps/skipped"] == 1.0
    assert result.summary["accuracy_last"] == 1.0


# ---- what breaks an invariant is named within one step ----


def test_a_tensor_that_does_not_arrive_is_named(tmp_path, monkeypatch):
    whole = Engine.update_weights

    def drops_one(self, weights, version, **options):
        some = {n: t for n, t in weights}
        name = "model.layers.0.mlp.up_proj.weight"
        mine = dict(self.named_parameters())
        whole(self, iter({**some, name: mine[name].clone()}.items()), version, **options)

    monkeypatch.setattr(Engine, "update_weights", drops_one)
    with raises(WeightMismatch, "model.layers.0.mlp.up_proj.weight"):
        tiny.run(tiny.recipe(tmp_path))


@pytest.mark.parametrize("damage", [pytest.param("permuted", marks=pytest.mark.slow), "corrupted"])
def test_a_damaged_tensor_is_named(tmp_path, monkeypatch, damage):
    whole = Engine.update_weights

    def damages(self, weights, version, **options):
        whole(self, weights, version, **options)
        if version >= 3:
            weight = dict(self.named_parameters())["model.layers.0.self_attn.k_proj.weight"]
            weight.copy_(weight.flip(0)) if damage == "permuted" else weight[0, 0].add_(1e-6)

    monkeypatch.setattr(Engine, "update_weights", damages)
    watcher = tiny.Recorder()
    with raises(WeightMismatch, "model.layers.0.self_attn.k_proj.weight"):
        tiny.run(tiny.recipe(tmp_path, **SHORT), callbacks=[watcher])
    assert len(watcher.records) == 2  # the publish of the third update is the first bad one


def test_other_logprobs_than_the_trainer_s_stop_the_run(tmp_path, monkeypatch):
    whole = Engine.poll

    def drifts(self):
        found = whole(self)
        for t in found:
            t.logprobs = np.where(t.mask, t.logprobs + np.float32(0.01), 0).astype(np.float32)
        return found

    monkeypatch.setattr(Engine, "poll", drifts)
    with raises(LogprobMismatch, "train.mismatch"):
        tiny.run(tiny.recipe(tmp_path, **SHORT))


def test_tokens_that_are_not_those_generated_stop_the_run(tmp_path, monkeypatch):
    whole = PolicyWorker.update

    @transfer(split="rows", gather="merge")
    def retokenises(self, batch, how):
        for handle in batch.payload["tokens"].handles:
            self.store.get(handle).values[-2] += 1
        return whole(self, batch, how)

    monkeypatch.setattr(PolicyWorker, "update", retokenises)
    with raises(TokenIdentityError, "trajectory.23.tokens"):
        tiny.run(tiny.recipe(tmp_path, **SHORT))


AVERAGES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("aggregation", [AVERAGES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in AVERAGES[1:])])
def test_a_part_of_the_loss_with_a_denominator_of_its_own_stops_the_run(tmp_path, monkeypatch, aggregation):
    whole = rl.aggregate

    def own_denominator(name, values, *, mask, lengths, denominator=None, **options):
        return whole(name, values, mask=mask, lengths=lengths, denominator=None, **options)

    how = {"aggregation": aggregation, "drop_flat": False}
    given = {"supervised": {"steps": 1}, "algorithm": how, "train": {"threads": 1, "micro_tokens": 40}}
    made = tiny.recipe(tmp_path, **given)
    monkeypatch.setattr(rl, "aggregate", own_denominator, raising=False)
    with raises(TokenCountError, "weight"):
        tiny.run(made)


def test_a_loss_that_is_not_finite_stops_and_what_was_saved_stays(tmp_path, monkeypatch):
    @transfer(split="rows", gather="merge")
    def explodes(self, batch, how):
        if [*tmp_path.glob("*/checkpoints/step-*")]:  # a slow disk may have none after the first steps
            self.engine.model.model.norm.weight.data.fill_(float("inf"))
            self._at_rest.forget()  # which would see it first
        return whole(self, batch, how)

    whole = PolicyWorker.update
    monkeypatch.setattr(PolicyWorker, "update", explodes)
    with raises(NonFiniteError, "model.norm.weight"):
        tiny.run(tiny.recipe(tmp_path, **{**SHORT, "algorithm": {"steps": 500}}))
    (directory,) = tmp_path.iterdir()
    assert read_state(directory)["state"] == "failed"
    assert tiny.weights(directory)


# ---- rewards that fail are missing ----


def sometimes(prompt, completion, info):
    kind = hash_of(prompt + completion) % 4
    if kind == 0:
        raise ValueError("no")
    if kind == 1:
        return float("nan")
    return float(kind) + 0.1 * len(completion)


def hash_of(text):
    return sum(ord(c) * (i + 1) for i, c in enumerate(text))


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory):
    """A run some of whose rewards are missing, and its records."""
    watcher = tiny.Recorder()
    made = tiny.recipe(tmp_path_factory.mktemp("incomplete"), **SHORT)
    return tiny.run(made, reward=sometimes, callbacks=[watcher]), watcher.records


def test_missing_rewards_are_counted_shown_and_left_out(incomplete):
    result, records = incomplete
    table = read_trajectories(result.directory)
    missing = sum(r is None for r in table["reward"].to_pylist())
    assert 0 < missing < table.num_rows
    assert result.summary["rewards_missing"] == missing
    assert 0.0 not in table["reward"].to_pylist()
    assert all(r["reward/mean"] >= 2 for r in records if "reward/mean" in r)


def test_a_reward_that_never_works_ends_the_run_with_its_reason(tmp_path):
    def broken(prompt, completion, info):
        raise ValueError("the verifier is down")

    with raises(RewardError, "reward.function"):
        tiny.run(tiny.recipe(tmp_path), reward=broken)


def test_a_step_without_any_reward_is_told_and_survived(tmp_path, monkeypatch):
    def breaks_later(self, items, known=None):
        found = whole(self, items, known=known)
        steps[0] += 1
        return (
            [dataclasses.replace(o, value=None, reason="down", status="error") for o in found]
            if steps[0] > 2
            else found
        )

    whole, steps = RewardPool.score, [0]
    monkeypatch.setattr(Scorers, "take", lambda self, ended: None)  # else calls are more than steps
    monkeypatch.setattr(RewardPool, "score", breaks_later)
    watcher = tiny.Recorder()
    result = tiny.run(tiny.recipe(tmp_path, **SHORT), callbacks=[watcher])
    assert result.summary["state"] == "finished"
    assert watcher.records[-1]["steps/skipped"] == 1.0 and watcher.records[-1]["reward/missing"] == 24
    assert [m for m in watcher.messages if "missing" in m] == [
        "24 of 24 rewards are missing and left out; most often: down"
    ]


def test_what_is_missing_is_journaled_with_its_reason(incomplete):
    result, _ = incomplete
    lines = (result.directory / "rewards.jsonl").read_text().splitlines()
    assert len(lines) == result.summary["rewards_missing"] + result.summary["rewards_missing_heldout"] > 0
    assert {json.loads(line)["outcome"]["status"] for line in lines} == {"error", "invalid"}


def slow_for_some(prompt, completion, info):
    if prompt.startswith("3+"):
        time.sleep(30)
    return 0.1 * len(completion)


def test_a_reward_that_hangs_is_missing_and_journaled(tmp_path):
    made = tiny.recipe(
        tmp_path, reward={"timeout": 0.3}, supervised={"steps": 0}, algorithm={"steps": 1}, run={"eval_prompts": 2}
    )
    result = tiny.run(made, reward=slow_for_some)
    table = read_trajectories(result.directory).to_pylist()
    late = [r for r in table if r["prompt_text"].startswith("3+")]
    assert all(r["reward"] is None for r in late)
    assert all(r["reward"] is not None for r in table if r not in late)
    if late:
        assert result.summary["rewards_timed_out"] >= len(late)
        assert (result.directory / "rewards.jsonl").read_text().count("timeout") >= len(late)


@pytest.mark.slow
def test_a_reward_beyond_fp32_is_missing_and_told(tmp_path):
    def huge(prompt, completion, info):
        return {"reward": 1e300 if prompt.startswith("1") else len(completion), "part": 1e200}

    watcher = tiny.Recorder()
    result = tiny.run(tiny.recipe(tmp_path, **SHORT), reward=huge, callbacks=[watcher])
    table = read_trajectories(result.directory)
    lost = [text.startswith("1") for text in table["prompt_text"].to_pylist()]
    assert [value is None for value in table["reward"].to_pylist()] == lost
    assert result.summary["rewards_missing"] == sum(lost) > 0
    assert any("1e+300, more than" in text for text in watcher.messages)
    assert all(r["reward/std"] < 9 and "reward/part/part" not in r for r in watcher.records if "reward/mean" in r)


# ---- what can be wrong is said before the first step ----


@pytest.mark.parametrize(
    "wrong, error, key",
    [
        ({"algorithm": {"advantage": "gae"}}, RecipeError, "flow.critic"),
        ({"algorithm": {"advantage": "grpoo"}}, RecipeError, "algorithm.advantage"),
        ({"algorithm": {"loss": "ppoclip"}}, RecipeError, "algorithm.loss"),
        ({"algorithm": {"aggregation": "mean"}}, RecipeError, "algorithm.aggregation"),
        ({"flow": "sft", "supervised": {"steps": 0}}, RecipeError, "supervised.steps"),
        ({"data": {"source": "nowhere.jsonl"}}, DataError, "data.source"),
        ({"model": {"path": "nowhere"}}, ModelError, "model.path"),
        ({"data": {"tokenizer": "nowhere"}}, DataError, "tokenizer.json.missing"),
        ({"train": {"device": "cuda:7"}}, RecipeError, "train.device.cuda"),
        ({"model": {"context": 6}}, DataError, "prompt 0.tokens"),
    ],
)
def test_bad_recipes_are_refused_before_a_directory_is_made(tmp_path, wrong, error, key):
    with raises(error, key):
        tiny.run(tiny.recipe(tmp_path, **wrong))
    assert not list(tmp_path.iterdir())


def test_a_source_without_a_reward_needs_one(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "answer": "b"}\n')
    with raises(RewardError, "reward.function"):
        tiny.run(tiny.recipe(tmp_path / "runs", data={"source": str(data)}), reward=None)


def test_trajectories_are_typed():
    t = Trajectory(0, 0, 0, np.arange(3), np.array([0, 1, 1], np.uint8), np.zeros(3, np.float32))
    assert t.prompt_length == 1 and t.completion_length == 2


def test_without_held_out_prompts_there_is_no_accuracy(tmp_path):
    watcher = tiny.Recorder()
    made = tiny.recipe(tmp_path, data={"holdout": 0.0}, supervised={"steps": 2, "until": 1.0}, algorithm={"steps": 1})
    result = tiny.run(made, callbacks=[watcher])
    assert result.accuracy is None
    assert all("accuracy/heldout" not in r for r in watcher.records)


def records(answers=True):
    numbers = [(a, b) for a in range(10) for b in range(10)]
    return [{"prompt": f"{a}+{b}=", **({"answer": str(a + b)} if answers else {})} for a, b in numbers]


def test_prompts_without_answers_are_refused_before_a_warm_up(tmp_path):
    data = PromptSet.of([*records()[:99], {"prompt": "9+9="}])
    with raises(DataError, "record 100.answer"):
        tiny.run(tiny.recipe(tmp_path), prompts=data)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_interrupted_run_goes_on_only_with_its_own_data_and_reward(tmp_path):
    def interrupt(record):
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    made = tiny.recipe(tmp_path)
    with pytest.raises(Interrupted):
        tiny.run(made, prompts=PromptSet.of(records()), callbacks=[tiny.Recorder(at_step=interrupt)])
    others = [
        {"prompts": PromptSet.of(records()[:-1])},
        {"prompts": PromptSet.of(records()), "reward": lambda p, c, i: -1.0 * len(c)},
    ]
    names = {tiny.run(made, **other).directory.name for other in others}
    assert names == {"tiny-002", "tiny-003"}
    again = tiny.Recorder()
    result = tiny.run(made, prompts=PromptSet.of(records()), callbacks=[again])
    assert result.directory.name == "tiny-001" and again.records[0]["step"] == 3
