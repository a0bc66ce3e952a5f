"""The pages of the policy-gradient flows, on a run that takes a second."""

import signal

import numpy as np
import pytest
import torch

import tilth.flows.policy_gradient as loop
from tests.errors import raises
from tests.flows import tiny
from tests.roles import small
from tilth.config.load import from_dict
from tilth.core.errors import RecipeError, RewardError
from tilth.data.prompts import PromptSet
from tilth.data.sources import from_records
from tilth.flows.run import Run
from tilth.launch.checks import check_algorithm, replaced, unused
from tilth.rl.algorithm import Algorithm
from tilth.roles.policy import PolicyWorker
from tilth.runs.readers import read_trajectories
from tilth.runs.signals import Interrupted

SHORT = {"supervised": {"steps": 2}, "run": {"eval_every": 0}}


def recipe(folder, flow, algorithm=None, **sections):
    """Of this flow with its own defaults, but for what is named."""
    base = tiny.settings(folder, **{"flow": flow, **SHORT, **sections})
    base["algorithm"] = {"steps": 3, **(algorithm or {})}
    return from_dict(base)


def parity(prompt, completion, info):
    """About every other answer is right; longer ones a little better, which is no skill."""
    return {"reward": len(completion) % 2 + 0.01 * len(completion), "correct": len(completion) % 2}


def test_an_estimator_gets_the_columns_that_it_needs_in_any_flow_without_a_critic(tmp_path):
    same = {"advantage": "remax", "loss": "reinforce", "drop_flat": False, "steps": 1}
    here = tiny.run(recipe(tmp_path / "a", "grpo", same))
    there = tiny.run(recipe(tmp_path / "b", "remax", {"steps": 1}, rollout={"prompts": 6, "group": 4, "max_tokens": 4}))
    assert tiny.weights(here.directory) == tiny.weights(there.directory)


# ---- DAPO ----


OFF = {"refill": 0, "overlong_buffer": 0.0, "clip_high": 0.2, "aggregation": "seq-mean-token-mean"}


def test_with_every_switch_off_dapo_is_grpo_bit_for_bit(tmp_path):
    same = {"advantage": "grpo", "epochs": 2, "steps": 2}
    plain = tiny.run(recipe(tmp_path / "a", "grpo", {**same, "aggregation": "seq-mean-token-mean"}))
    off = tiny.run(recipe(tmp_path / "b", "dapo", {**same, **OFF}))
    assert tiny.weights(plain.directory) == tiny.weights(off.directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "key, value",
    [
        ("refill", 10),
        ("overlong_buffer", 0.5),
        ("clip_high", 0.28),
        ("aggregation", "token-mean"),
        ("overlong_filter", True),
    ],
)
def test_each_switch_changes_what_is_learned(tmp_path, key, value):
    given = {"advantage": "grpo", "epochs": 3}
    off = tiny.run(recipe(tmp_path / "a", "dapo", {**given, **OFF}, optimizer={"lr": 5e-2}), reward=parity)
    on = tiny.run(recipe(tmp_path / "b", "dapo", {**given, **OFF, key: value}, optimizer={"lr": 5e-2}), reward=parity)
    assert tiny.weights(off.directory) != tiny.weights(on.directory)


def sometimes(prompt, completion, info):
    """Most groups are flat: only some prompts can be answered at all."""
    return float(prompt[0] in "0123" and len(completion) % 2)


@pytest.fixture(scope="module")
def refilled(tmp_path_factory):
    """A run of DAPO, what its page got, and the records of its steps."""
    seen, whole = [], loop.overlong
    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "overlong", lambda batch, *a: seen.append(batch) or whole(batch, *a))
    watcher = tiny.Recorder()
    made = recipe(tmp_path_factory.mktemp("dapo"), "dapo", {"refill": 8})
    directory = tiny.run(made, reward=sometimes, callbacks=[watcher]).directory
    patch.undo()
    return directory, seen, [r for r in watcher.records if r["phase"] == "dapo"]


def test_refilled_batches_are_full_of_whole_mixed_groups(refilled):
    _, seen, records = refilled
    assert len(seen) == 3
    for batch, record in zip(seen, records):
        groups, counts = np.unique(batch["group"], return_counts=True)
        assert len(groups) == 6 and (counts == 4).all()
        for group in groups:
            assert 0 < batch["reward"][batch["group"] == group].mean() < 1
        assert record["samples/trained"] == 24 < record["samples"]
    assert max(record["samples/rounds"] for record in records) > 1


def test_everything_that_was_sampled_is_kept_on_disk_with_a_number_of_its_own(refilled):
    directory, _, records = refilled
    table = read_trajectories(directory)
    ids = table["id"].to_pylist()
    assert len(ids) == len(set(ids)) == sum(record["samples"] for record in records)


def test_rounds_are_bounded_and_what_is_there_is_learned_from(tmp_path):
    watcher = tiny.Recorder()
    tiny.run(recipe(tmp_path, "dapo", {"refill": 2, "steps": 1}), reward=lambda p, c, i: 1.0, callbacks=[watcher])
    record = watcher.records[-1]
    assert record["samples/rounds"] == 2 and record["samples/trained"] == 0
    assert any("1 step of dapo had no sample left to learn from" in said for said in watcher.messages)


@pytest.mark.slow
def test_a_stopped_run_of_dapo_goes_on_as_if_nothing_had_been(tmp_path, refilled):
    """The streams stand where a step's last round left them."""
    made = recipe(tmp_path, "dapo", {"refill": 8})
    stop = tiny.Recorder(at_step=lambda r: signal.raise_signal(signal.SIGINT) if r["step"] == 3 else None)
    with pytest.raises(Interrupted):
        tiny.run(made, reward=sometimes, callbacks=[stop])
    assert tiny.weights(tiny.run(made, reward=sometimes).directory) == tiny.weights(refilled[0])


# ---- ReMax ----


def test_the_baseline_of_remax_is_the_reward_of_the_greedy_answer(tmp_path, monkeypatch):
    seen, whole = [], Run.baselines

    def baselines(run, batch):
        found = whole(run, batch)
        seen.append((found, run.generate_and_score(tiny_ask(batch["prompt"]), greedy=True, prefix="baseline")))
        return found

    from tilth.roles.rollout import ask

    def tiny_ask(prompts):
        return ask(prompts.tolist(), 1, -7_000_000)

    monkeypatch.setattr(Run, "baselines", baselines)
    tiny.run(recipe(tmp_path, "remax", rollout={"group": 2}))
    for batch, greedy in seen:
        np.testing.assert_array_equal(batch["baselines"], greedy["reward"])
        assert len(np.unique(batch["baselines"] - batch["reward"])) > 1


@pytest.mark.slow
def test_samples_whose_greedy_answer_has_no_reward_are_left_out(tmp_path):
    def fails_at_times(prompt, completion, info):
        return float("nan") if prompt[0] in "02468" else len(completion) / 4

    watcher = tiny.Recorder()
    tiny.run(recipe(tmp_path, "remax", rollout={"group": 2}), reward=fails_at_times, callbacks=[watcher])
    last = watcher.records[-1]
    assert last["baseline/missing"] + last["reward/missing"] > 0 and np.isfinite(last["loss"])


@pytest.mark.parametrize("correction", ["", "decoupled_token_is"])
def test_what_lacks_its_baseline_counts_in_no_denominator(correction):
    worker = small.policy()
    batch = worker.logprobs(small.experience(worker))
    baselines = np.where(np.arange(len(batch)) < 6, np.nan, 0.25).astype(np.float32)
    how = small.algorithm(advantage="remax", loss="reinforce", correction=correction)
    worker.update(worker.advantages(batch.with_rows(baselines=baselines), how), how)
    alone = small.policy()
    rest = (
        alone.logprobs(small.experience(alone))
        .with_rows(baselines=np.full(len(batch), 0.25, np.float32))
        .select(np.arange(6, 12))
    )
    alone.update(alone.advantages(rest, how), how)
    for (name, tensor), (_, same) in zip(worker.weights(), alone.weights()):
        torch.testing.assert_close(tensor, same, rtol=1e-4, atol=1e-6, msg=name)


# ---- weights that follow, KL in the reward ----


def test_an_adapted_weight_is_used_in_the_next_step_and_survives_a_stop(tmp_path, monkeypatch):
    coefs, whole = [], PolicyWorker.update

    def update(worker, batch, how, **more):
        coefs.append(how.keys.kl_coef)
        return whole(worker, batch, how, **more)

    update.__tilth_transfer__ = whole.__tilth_transfer__
    monkeypatch.setattr(PolicyWorker, "update", update)
    given = {"kl": "k3", "kl_coef": 0.2, "kl_target": 1e-9, "kl_horizon": 24, "steps": 4}
    made = recipe(tmp_path, "reinforce_pp", given, optimizer={"lr": 1e-2})
    stop = tiny.Recorder(at_step=lambda r: signal.raise_signal(signal.SIGINT) if r["step"] == 4 else None)
    with pytest.raises(Interrupted):
        tiny.run(made, callbacks=[stop])
    tiny.run(made)
    assert coefs[0] == 0.2 and len(coefs) == 4
    np.testing.assert_allclose(coefs[2:], [coefs[1] * 1.2, coefs[1] * 1.44], rtol=1e-6)


def test_what_the_policy_must_compute_before_an_update(tmp_path):
    def needed(flow, **algorithm):
        return Algorithm.of(recipe(tmp_path, flow, algorithm)).computed

    assert needed("grpo") == set()
    assert needed("grpo", epochs=2) == {"logprobs"}
    assert needed("rloo", kl_coef=0.1) == {"logprobs"}
    assert needed("grpo", kl_coef=0.1) == set()
    assert needed("grpo", advantage="optimal_token_baseline") == {"logprobs", "sum_pi_squared"}
    assert needed("grpo", correction="decoupled_token_is") == {"logprobs"}
    assert needed("grpo", correction="bypass_ppo_clip") == set()


# ---- distillation ----


@pytest.mark.slow
def test_a_student_comes_closer_to_its_teacher(tmp_path):
    once = {"eval_every": 0, "save_every": 40}
    learned = {"steps": 40, "lr": 2e-2, "check_every": 40}
    teacher = tiny.run(recipe(tmp_path / "t", "sft", supervised=learned, run=once)).directory
    watcher = tiny.Recorder()
    made = recipe(
        tmp_path / "s",
        "distill",
        {"steps": 16},
        reference={"path": str(teacher)},
        supervised={"steps": 0},
        optimizer={"lr": 1e-2},
        rollout={"prompts": 16},
        run=once,
    )
    tiny.run(made, callbacks=[watcher])
    gap = [record["kl_ref"] for record in watcher.records]
    assert np.mean(gap[-5:]) < 0.8 * np.mean(gap[:5])


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    prompts = PromptSet(from_records([{"prompt": f"{a}x", "answer": a} for a in "abcdefgh"]))
    teacher = tiny.run(recipe(tmp_path / "t", "sft"), prompts=prompts).directory
    with raises(RecipeError, "reference.path.tokenizer"):
        tiny.run(recipe(tmp_path / "s", "distill", reference={"path": str(teacher)}))


@pytest.mark.slow
def test_a_run_goes_on_with_another_teacher_only_if_that_is_allowed(tmp_path):
    def teacher(steps):
        made = recipe(tmp_path, "sft", supervised={"steps": steps}, run={"name": "teacher"})
        return tiny.run(made, name="teacher", reward=None, allow=["supervised.steps"]).directory

    def student(*allow, stop=0):
        watcher = tiny.Recorder(lambda r: signal.raise_signal(signal.SIGINT) if r["step"] == stop else None)
        made = recipe(tmp_path, "distill", reference={"path": str(teacher_run)}, run={"name": "student"})
        found = tiny.run(made, name="student", callbacks=[watcher], allow=allow)
        return found.summary["state"], watcher.messages

    teacher_run = teacher(2)
    with pytest.raises(Interrupted):
        student(stop=3)
    teacher(3)
    for allow in ((), ("reward", "judge", "data")):
        with raises(RecipeError, "reference.path"):
            student(*allow)
    state, said = student("reference")
    told = f"reference: {teacher_run}@3 (step 3, weights "
    assert state == "finished" and any(line.startswith(told) for line in said)
    assert any("it goes on changed, as allowed" in line and "teacher@3" in line for line in said)


# ---- said before the run ----


@pytest.mark.parametrize(
    "flow, algorithm, key",
    [
        ("grpo", {"options": {"alpha": 0.1}}, "algorithm.options.alpha"),
        ("grpo", {"options": {"epz": 0.1}}, "algorithm.options.epz"),
        ("grpo", {"options": {"clip_low": 0.1}}, "algorithm.options.clip_low"),
        ("grpo", {"lam": 0.9}, "algorithm.lam"),
        ("ppo", {"advantage": "remax"}, "algorithm.advantage.values"),
        ("grpo", {"advantage": "vapo"}, "flow.critic"),
        ("ppo", {"advantage": "grpo"}, "algorithm.advantage.values"),
        ("grpo", {"advantage": "distill"}, "ref_logprobs"),
        ("grpo", {"correction": "decoupled_token_iss"}, "algorithm.correction"),
        ("grpo", {"loss": "gspoo"}, "algorithm.loss"),
        ("grpo", {"aggregation": "token-men"}, "algorithm.aggregation"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_starts(tmp_path, flow, algorithm, key):
    with raises(RecipeError, key):
        check_algorithm(recipe(tmp_path, flow, algorithm))


@pytest.mark.parametrize(
    "flow, sections, key",
    [
        ("distill", {}, "reference.path"),
        ("grpo", {"reference": {"path": "x"}}, "reference.path.unused"),
    ],
)
def test_keys_that_contradict_each_other(tmp_path, flow, sections, key):
    with raises(RecipeError, key):
        recipe(tmp_path, flow, **sections)


def test_an_adapted_weight_needs_a_beginning(tmp_path):
    with raises(RecipeError, "algorithm.kl_target"):
        recipe(tmp_path, "grpo", {"kl_target": 0.1})
    with raises(RecipeError, "algorithm.entropy_coef"):
        recipe(tmp_path, "grpo", {"entropy_target": 0.2, "entropy_coef": -0.1})
    assert recipe(tmp_path, "grpo", {"entropy_coef": -0.1}).algorithm.entropy_coef == -0.1


def test_a_flow_brings_its_own_defaults_below_what_is_said(tmp_path):
    how = recipe(tmp_path, "dapo").algorithm
    assert (how.clip_high, how.refill) == (0.28, 10)
    assert recipe(tmp_path, "dapo", {"clip_high": 0.2}).algorithm.clip_high == 0.2
    assert recipe(tmp_path, "vapo").critic.steps == 50


# ---- parts of a reward ----


GDPO = {"advantage": "gdpo", "options": {"keys": ["right", "short"], "weights": [1.0, 0.5]}}


def test_an_estimator_that_wants_a_part_that_the_reward_lacks_stops_the_run_at_once(tmp_path):
    def lacks(prompt, completion, info):
        return {"reward": 1.0, "right": 1.0}

    with raises(RewardError, "part/short"):
        tiny.run(recipe(tmp_path, "grpo", GDPO), reward=lacks)


@pytest.mark.slow
def test_a_row_without_a_part_is_left_out_and_the_run_goes_on(tmp_path):
    def at_times(prompt, completion, info):
        parts = {"reward": len(completion), "right": len(completion) % 2}
        return parts if prompt[0] in "02468" else {**parts, "short": -len(completion)}

    watcher = tiny.Recorder()
    tiny.run(recipe(tmp_path, "grpo", GDPO), reward=at_times, callbacks=[watcher])
    assert all(np.isfinite(record["loss"]) for record in watcher.records)


# ---- groups without spread, and what is added to rewards ----


@pytest.mark.parametrize(
    "algorithm, dropped",
    [
        ({}, True),
        ({"drop_flat": False}, False),
        ({"advantage": "rloo"}, True),
        ({"advantage": "optimal_token_baseline"}, False),
        ({"advantage": "reinforce_pp_baseline"}, False),
        ({"advantage": "gdpo", "options": {"keys": ["right"]}}, False),
        ({"kl_coef": 0.1}, False),
        ({"entropy_coef": 0.1}, False),
        ({"nll_coef": 0.1}, False),
    ],
)
def test_flat_groups_are_left_out_only_where_they_have_no_gradient(tmp_path, algorithm, dropped):
    assert Algorithm.of(recipe(tmp_path, "grpo", algorithm)).drops_flat == dropped


@pytest.mark.parametrize(
    "flow, algorithm, key",
    [
        ("grpo", {"kl_coef": 0.1, "kl_in": "reward"}, "algorithm.advantage.relative_to_spread"),
        ("dapo", {"advantage": "gdpo", "options": {"keys": ["right"]}}, "algorithm.overlong_buffer"),
        ("rloo", {"kl_coef": 0.1, "kl_in": "reward"}, ""),
    ],
)
def test_a_penalty_that_would_be_lost_or_blown_up_is_refused(tmp_path, flow, algorithm, key):
    if not key:
        check_algorithm(recipe(tmp_path, flow, algorithm))
        return
    with raises(RecipeError, key):
        check_algorithm(recipe(tmp_path, flow, algorithm))


@pytest.mark.parametrize(
    "flow, given, key",
    [
        ("rloo", {"minibatches": 2}, "algorithm.minibatches.unused"),
        ("grpo", {"refill": 3}, "algorithm.refill.unused"),
        ("ppo", {"drop_flat": False}, "algorithm.drop_flat.unused"),
        ("ppo", {"entropy_target": 0.1, "entropy_coef": -0.1}, "algorithm.entropy_coef"),
    ],
)
def test_a_key_that_its_flow_never_reads_is_refused(tmp_path, flow, given, key):
    with raises(RecipeError, key):
        recipe(tmp_path, flow, given)


@pytest.mark.parametrize("flow", ["grpo", "dapo", "fapo", "rloo"])
def test_a_group_of_one_where_samples_are_compared_is_refused(tmp_path, flow):
    with raises(RecipeError, "rollout.group"):
        recipe(tmp_path, flow, rollout={"group": 1}, judge={"path": "x"} if flow == "fapo" else {})


def test_in_the_reward_the_penalty_is_k1_unless_the_recipe_says_so(tmp_path):
    assert recipe(tmp_path, "rloo").algorithm.kl == "k1"
    assert recipe(tmp_path, "ppo", {"kl_in": "reward"}).algorithm.kl == "k1"
    assert recipe(tmp_path, "rloo", {"kl": "k3"}).algorithm.kl == "k3"
    baseline = recipe(tmp_path, "reinforce_pp", {"advantage": "reinforce_pp_baseline"}).algorithm
    assert (baseline.kl, baseline.kl_in) == ("k2", "loss")


# ---- a flow and what it makes ----


@pytest.mark.parametrize("flow, column", [("remax", "baselines"), ("distill", "ref_logprobs")])
def test_what_a_flow_makes_must_be_looked_at(tmp_path, flow, column):
    given = {"reference": {"path": "x"}} if flow == "distill" else {}
    with raises(RecipeError, f"algorithm.advantage.{column}"):
        check_algorithm(recipe(tmp_path, flow, {"advantage": "grpo"}, **given))


def test_what_stands_in_the_place_of_a_flow_s_own_is_told(tmp_path):
    watcher = tiny.Recorder()
    tiny.run(recipe(tmp_path, "rloo", {"advantage": "opo", "steps": 1}), callbacks=[watcher])
    assert "flow rloo with advantage = opo instead of rloo" in watcher.messages
    assert replaced(recipe(tmp_path, "rloo")) == replaced(recipe(tmp_path, "grpo", {"advantage": "opo"})) == []


@pytest.mark.slow
@pytest.mark.parametrize("flow, minibatches", [("grpo", 1), ("grpo", 2), ("ppo", 2)])
def test_dropout_is_of_the_warm_up_alone(tmp_path, flow, minibatches):
    """A policy that hardly moves has the log-probs it had, whether they were found before or in the update."""
    first = {}
    for dropout in (0.0, 0.4):
        watcher = tiny.Recorder()
        given = {"minibatches": minibatches, "steps": 2}
        small = {"optimizer": {"lr": 1e-9}, "model": {"dropout": dropout}}
        tiny.run(recipe(tmp_path, flow, given, **small), callbacks=[watcher], name=f"drop{dropout}")
        learned = [r for r in watcher.records if r["phase"] == flow]
        assert max(r["mismatch/max"] for r in learned if "mismatch/max" in r) < 1e-4
        assert all(r["ratio"] == pytest.approx(1, abs=1e-5) for r in learned)
        first[dropout] = watcher.records[0]["loss"]
    assert first[0.0] != first[0.4], "the first step of the warm-up"


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean"])
def test_a_loss_of_sequences_that_is_averaged_over_tokens_is_told(tmp_path, loss):
    told = replaced(recipe(tmp_path, "grpo", {"loss": loss, "aggregation": "token-mean"}))
    (line,) = [text for text in told if f"loss {loss}" in text]
    assert "aggregation = token-mean instead of seq-mean-token-mean" in line


def test_clips_of_ppo_that_stay_behind_another_loss_are_told(tmp_path):
    said = replaced(recipe(tmp_path, "grpo", {"loss": "gspo", "clip_low": 0.2}))
    assert any("clip_low = 0.2 instead of 0.0003" in line for line in said)
    assert replaced(recipe(tmp_path, "grpo", {"clip_high": 0.28, "aggregation": "seq-mean-token-mean"})) == []


@pytest.mark.parametrize(
    ("flow", "keys", "named"),
    [
        ("sft", {"algorithm": {"clip_low": 0.1}, "judge": {"penalty": 0.5}}, ["algorithm.clip_low", "judge.penalty"]),
        ("grpo", {"preference": {"beta": 0.2}, "critic": {"steps": 3}}, ["critic.steps", "preference.beta"]),
        ("grpo", {"algorithm": {"kl": "k2"}}, ["algorithm.kl"]),
        ("grpo", {"algorithm": {"kl": "k2", "kl_coef": 0.1}}, []),
        ("vapo", {}, []),
        ("dpo", {"preference": {"beta": 0.2}}, []),
    ],
)
def test_keys_that_a_flow_does_not_read_are_named(flow, keys, named):
    lines = unused(from_dict({"flow": flow, **keys}, complete=False))
    assert lines == ([f"flow {flow} does not use {', '.join(named)}"] if named else [])


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "reinforce", "sapo"])
def test_a_clip_said_with_a_loss_without_one_is_refused_also_at_its_default(loss):
    with raises(RecipeError, "algorithm.clip_low"):
        check_algorithm(from_dict({"algorithm": {"loss": loss, "clip_low": 0.2}}))


@pytest.mark.slow
def test_a_policy_that_moves_is_no_gap_to_the_engine(tmp_path):
    watcher = tiny.Recorder()
    given = {"correction": "bypass_ppo_clip", "epochs": 3, "minibatches": 2}
    tiny.run(recipe(tmp_path, "grpo", given, optimizer={"lr": 3e-2}), callbacks=[watcher])
    assert max(r["mismatch/max"] for r in watcher.records if "mismatch/max" in r) < 1e-4
    assert max(r["approx_kl_k3"] for r in watcher.records if "approx_kl_k3" in r) > 1e-4


def test_a_correction_is_of_the_policy_s_loss_alone(tmp_path):
    """Value pre-training has no log-probs of the trainer, and needs none."""
    watcher = tiny.Recorder()
    given = {"steps": 1, "correction": "decoupled_token_is", "minibatches": 1}
    tiny.run(recipe(tmp_path, "vapo", given, critic={"steps": 1}), callbacks=[watcher])
    assert [r["phase"] for r in watcher.records] == ["warmup", "warmup", "values", "vapo"]
    assert "correction/weight" not in watcher.records[-2] and "correction/weight" in watcher.records[-1]
