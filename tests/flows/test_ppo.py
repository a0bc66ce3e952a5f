"""PPO as a run: its two phases, what each leaves alone, what is refused, and SIGKILL at any moment."""

import inspect
import itertools
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import forked
from tests.errors import raises
from tests.flows import tiny
from tests.flows.killed import PPO
from tilth.checkpoint import open_checkpoint
from tilth.core.errors import RecipeError
from tilth.flows import actor_critic as loops
from tilth.launch import life as launch
from tilth.launch.checks import check_algorithm
from tilth.roles.critic import CriticWorker
from tilth.roles.policy import PolicyWorker
from tilth.runs.models import load_model
from tilth.runs.readers import read_metrics, read_state, read_trajectories
from tilth.runs.signals import Interrupted

ROOT = Path(__file__).parents[2]


def recipe(folder, **sections):
    """The tiny recipe with a critic; sections are merged into its own."""
    whole = {k: {**v, **sections.pop(k, {})} if isinstance(v, dict) else v for k, v in PPO.items()}
    return tiny.recipe(folder, **whole, **sections)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    return tiny.run(recipe(tmp_path_factory.mktemp("whole"))).directory


def child(folder, point="none", call=0):
    command = [*forked.python(), "-m", "tests.flows.killed", str(folder), point, str(call), "ppo"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, said = process.communicate(timeout=120)
    return process.returncode, said


def checkpoint(directory, group, step=None):
    """A group of a checkpoint: the newest one, or that of a step."""
    folder = directory / "checkpoints"
    opened = open_checkpoint(max(folder.glob("step-*")) if step is None else folder / f"step-{step:06d}")
    return {name: opened.read(group, name) for name in opened.names(group)}


def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


# ---- the two phases ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same run with a checkpoint of each step."""
    made = recipe(tmp_path_factory.mktemp("saved"), run={"save_every": 1, "keep": 100})
    return tiny.run(made).directory


def test_a_run_has_a_warm_up_a_phase_of_the_critic_and_ppo(saved):
    records = read_metrics(saved)
    assert [r["phase"] for r in records] == ["warmup"] * 6 + ["values"] * 3 + ["ppo"] * 4
    assert read_state(saved)["state"] == "finished"
    for r in records[6:]:
        for name in ("loss", "explained", "clipped", "mean", "return", "grad_norm", "lr"):
            assert f"value/{name}" in r, (r["step"], name)
        assert r["value/lr"] == pytest.approx(5e-3) and r["value/skipped"] == 0 and r["samples/trained"] == 24
        assert r["time/values"] > 0 and r["time/critic"] > 0
        assert ("loss" in r) == ("grad_norm" in r) == ("time/update" in r) == (r["phase"] == "ppo")
    assert all(r["value/mean"] != 0 for r in records[6:])  # the first step's mean is over updates too
    assert all("mismatch/max" in r for r in records[9:])
    assert read_trajectories(saved).num_rows == 7 * 24


def test_the_critic_s_phase_leaves_the_policy_as_it_is_and_evaluates_nothing(saved):
    policies = [checkpoint(saved, "model", step) for step in range(6, 14)]
    critics = [checkpoint(saved, "critic", step) for step in range(6, 14)]
    assert all(equal(policies[0], p) for p in policies[:4]) and not equal(policies[3], policies[4])
    assert not any(equal(a, b) for a, b in itertools.pairwise(critics))
    records = read_metrics(saved)
    measured = [r["step"] for r in records if "reward/heldout" in r]
    assert measured == [3, 6, 7, 10, 12, 13]  # 7, 10: known, not measured
    assert not any(r.get("time/evaluate") for r in records[6:10])
    # load_model gives the policy
    assert equal(dict(load_model(saved).tensors), policies[-1])


@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_critic_begins_as_a_copy_of_the_warmed_up_policy_and_goes_on_from_value_pre_training(
    tmp_path, monkeypatch, steps
):
    begun, plain = [], CriticWorker.begin

    def spy(self, lr, total_steps):
        begun.append((lr, total_steps, {n: p.detach().clone() for n, p in self.model.named_parameters()}))
        plain(self, lr, total_steps)

    spy.__tilth_transfer__ = plain.__tilth_transfer__
    monkeypatch.setattr(CriticWorker, "begin", spy)
    short = {"supervised": {"steps": 1}, "critic": {"steps": steps}, "algorithm": {"steps": 1}}
    directory = tiny.run(recipe(tmp_path, **short, run={"save_every": 1, "keep": 100})).directory
    warm = checkpoint(directory, "model", 1)
    first = begun[0][2]
    assert all(torch.equal(first[name], tensor) for name, tensor in warm.items())
    assert not first["score.weight"].any() and not first["score.bias"].any()
    assert [b[:2] for b in begun] == ([(5e-3, 8), (5e-3, 4)] if steps else [(5e-3, 4)])
    if steps:
        assert equal(begun[1][2], checkpoint(directory, "critic", 3)) and begun[1][2]["score.weight"].any()


def test_old_values_are_read_once_a_batch_before_any_update(tmp_path, monkeypatch):
    calls = []
    for owner, name in (
        (CriticWorker, "values"),
        (CriticWorker, "update"),
        (PolicyWorker, "advantages"),
        (PolicyWorker, "logprobs"),
        (PolicyWorker, "update"),
    ):
        plain = getattr(owner, name)

        def spy(self, *arguments, plain=plain, name=f"{owner.__name__[:6]}.{name}", **more):
            calls.append((name, *arguments[1:]))
            return plain(self, *arguments, **more)

        spy.__tilth_transfer__ = plain.__tilth_transfer__
        monkeypatch.setattr(owner, name, spy)
    how = {"steps": 2, "gamma": 0.9}
    made = recipe(tmp_path, supervised={"steps": 0}, critic={"steps": 1}, algorithm=how, policy={"probe_every": 0})
    tiny.run(made)
    names = [c[0] for c in calls]
    alone = ["Critic.values", "Policy.advantages"] + ["Critic.update"] * 4
    both = ["Critic.values", "Policy.logprobs", "Policy.advantages"] + ["Critic.update", "Policy.update"] * 4
    assert names == alone + both + both
    hows = [c[1] for c in calls if c[0] == "Policy.advantages"]
    assert [(h.keys.lam, h.keys.gamma) for h in hows] == [(1.0, 0.9), (0.9, 0.9), (0.9, 0.9)]  # Monte-Carlo first


@pytest.mark.slow
def test_in_parity_nothing_moves_between_reading_values_and_the_first_update(tmp_path):
    one = {"steps": 2, "minibatches": 1, "epochs": 1}
    short = {"supervised": {"steps": 1}, "critic": {"steps": 2, "clip": 1e-30}}
    made = recipe(tmp_path, algorithm=one, **short, train={"parity": True})
    for r in read_metrics(tiny.run(made).directory)[1:]:
        assert r["value/clipped"] == 0 and r.get("mismatch/max", 0) == 0


@pytest.mark.slow
def test_schedules_last_as_long_as_their_phase(tmp_path):
    """Two epochs of two minibatches are four optimizer steps of each step; the rate falls to 0 after the last one."""
    rates = {"optimizer": {"schedule": "linear", "lr": 1e-3}, "critic": {"lr": 1e-2, "steps": 2}}
    made = recipe(tmp_path, supervised={"steps": 0}, algorithm={"steps": 3}, **rates)
    records = read_metrics(tiny.run(made).directory)
    steps = {"values": 2, "ppo": 3}
    for phase, count in steps.items():
        of_phase = [r for r in records if r["phase"] == phase]
        rates = [np.mean([1 - (4 * i + j) / (4 * count) for j in range(4)]) for i in range(count)]
        assert [r["value/lr"] for r in of_phase] == pytest.approx([1e-2 * x for x in rates])
        if phase == "ppo":
            assert [r["lr"] for r in of_phase] == pytest.approx([1e-3 * x for x in rates])


def test_versions_count_what_the_policy_learned(saved):
    at = open_checkpoint(max((saved / "checkpoints").glob("step-*"))).objects["progress"]
    assert at["version"] == at["optimizer_steps"] == 6 + 4 * 4 and at["finished"] == ["warmup", "values", "ppo"]


def test_pages_are_short_and_know_no_ranks():
    for function in (loops.pretrain_critic, loops.actor_critic):
        source = inspect.getsource(function)
        assert len(source.splitlines()) <= 40
        assert not any(word in source for word in ("rank", "device", "retry", "torch"))


# ---- what is left out ----


@pytest.mark.slow
def test_where_every_reward_is_equal_the_critic_learns_and_the_policy_stays(tmp_path):
    still = {"run": {"save_every": 1, "keep": 100}, "optimizer": {"weight_decay": 0.0}}
    short = {"supervised": {"steps": 1}, "critic": {"steps": 1}, "algorithm": {"steps": 2}}
    directory = tiny.run(recipe(tmp_path, **still, **short), reward=lambda prompt, completion, info: 0.5).directory
    policies, critics = ([checkpoint(directory, group, step) for step in range(2, 5)] for group in ("model", "critic"))
    assert all(equal(policies[0], later) for later in policies[1:])
    assert not any(equal(a, b) for a, b in itertools.pairwise(critics))
    assert all(r["groups/gradient"] == 0 for r in read_metrics(directory)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4])
def test_the_share_of_groups_with_a_gradient_is_told_where_there_are_groups(tmp_path, group):
    def by_length(prompt, completion, info):
        return float(len(completion))

    short = {"supervised": {"steps": 0}, "critic": {"steps": 1}, "algorithm": {"steps": 1}}
    directory = tiny.run(recipe(tmp_path, rollout={"group": group}, **short), reward=by_length).directory
    for step, record in enumerate(read_metrics(directory), 1):
        found = {}
        for row in read_trajectories(directory).to_pylist():
            if row["step"] == step:
                found.setdefault(row["group"], set()).add(row["reward"])
        share = sum(len(rewards) > 1 for rewards in found.values()) / len(found)
        assert record.get("groups/gradient") == (pytest.approx(share) if group > 1 else None)
        assert group == 1 or share > 0


@pytest.mark.slow
def test_missing_rewards_are_left_out_and_flat_groups_are_not(tmp_path):
    """A group in which all rewards are equal still says what its states are worth."""

    def sometimes(prompt, completion, info):
        if len(completion) == 1:
            raise ValueError("no")
        return 1.0

    made = recipe(tmp_path, supervised={"steps": 2}, algorithm={"drop_flat": True, "steps": 2})
    records = [r for r in read_metrics(tiny.run(made, reward=sometimes).directory) if r["phase"] != "warmup"]
    assert any(r["reward/missing"] for r in records)
    for r in records:
        assert r["samples/trained"] == r["samples"] - r["reward/missing"] > 0
        assert tiny.finite([v for v in r.values() if isinstance(v, float)])
        if r["phase"] == "values":
            assert r["value/return"] == pytest.approx(1.0)  # a reward of 0 for what is missing would lower it
            assert "value/explained" not in r  # equal returns: nothing to explain, and no NaN in the metrics


@pytest.mark.slow
def test_a_step_without_any_reward_is_skipped_by_both(tmp_path):
    calls = []

    def dries_up(prompt, completion, info):
        calls.append(1)
        if info["answer"] and len(calls) > 24:
            raise ValueError("no more")
        return float(len(completion))

    made = recipe(tmp_path, supervised={"steps": 0}, critic={"steps": 1}, data={"holdout": 0.0}, algorithm={"steps": 2})
    records = read_metrics(tiny.run(made, reward=dries_up).directory)
    assert [r["reward/missing"] for r in records] == [0, 24, 24]
    assert all(r["value/skipped"] >= 1 and r["steps/skipped"] >= 1 for r in records[1:])


@pytest.mark.slow
def test_a_kl_penalty_has_its_reference(tmp_path):
    short = {"supervised": {"steps": 1}, "critic": {"steps": 1}, "algorithm": {"kl_coef": 0.1, "steps": 2}}
    records = [r for r in read_metrics(tiny.run(recipe(tmp_path, **short)).directory) if r["phase"] == "ppo"]
    assert all(r["time/reference"] > 0 for r in records)
    assert records[0]["kl_ref"] == pytest.approx(0, abs=1e-3) and records[-1]["kl_ref"] > 0


# ---- what is refused ----


def test_gae_needs_the_flow_ppo(tmp_path):
    with raises(RecipeError, "flow.critic"):
        tiny.run(tiny.recipe(tmp_path, algorithm={"advantage": "gae"}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["grpo", "grpo_no_std", "rloo"])
def test_a_critic_that_nobody_asks_is_refused(tmp_path, name):
    with raises(RecipeError, "algorithm.advantage.values"):
        check_algorithm(recipe(tmp_path, algorithm={"advantage": name}))


def test_the_right_ones_pass(tmp_path):
    check_algorithm(recipe(tmp_path))
    check_algorithm(tiny.recipe(tmp_path))
    check_algorithm(tiny.recipe(tmp_path, flow="sft", algorithm={"advantage": "gae"}))
    with raises(RecipeError, "algorithm.advantage"):
        check_algorithm(recipe(tmp_path, algorithm={"advantage": "gea"}))


def test_a_page_that_wants_a_critic_where_there_is_none(tmp_path, monkeypatch):
    """PPO's page over a run of another flow: said in one line, not an attribute of None."""
    monkeypatch.setattr(launch, "training_loop", lambda recipe: loops.actor_critic)
    with raises(RecipeError, "flow.critic"):
        tiny.run(tiny.recipe(tmp_path, supervised={"steps": 0}))


# ---- SIGKILL, and the same run bit for bit ----


def assert_same_run(folder, whole):
    (directory,) = [p for p in folder.iterdir() if p.is_dir()]
    assert read_state(directory)["state"] == "finished"
    ours, theirs = tiny.weights(directory), tiny.weights(whole)
    assert ours == theirs and {"critic", "critic_optimizer"} <= {n.split("-")[0].split(".")[0] for n in ours}
    assert tiny.same(tiny.numbers(directory), tiny.numbers(whole))
    assert read_trajectories(directory).equals(read_trajectories(whole))


@pytest.mark.parametrize(
    ("point", "call"),
    [
        pytest.param("critic", 5, marks=pytest.mark.slow),  # half way through the second step of value pre-training
        pytest.param("critic", 19, marks=pytest.mark.slow),  # between the critic's and the policy's update, PPO's 2nd
        pytest.param("training", 33, marks=pytest.mark.slow),  # in an optimizer step of PPO's second step
        pytest.param("writing", 5, marks=pytest.mark.slow),
    ],
)
def test_killed_at_a_point_and_resumed(tmp_path, whole, point, call):
    code, said = finish(child(tmp_path, point, call))
    assert code == -signal.SIGKILL, f"{point} {call} was never reached: {said}"
    code, said = finish(child(tmp_path))
    assert code == 0, said
    assert_same_run(tmp_path, whole)


FALLING = {"optimizer": {"schedule": "linear"}, "supervised": {"steps": 1}, "critic": {"steps": 1, "lr": 5e-3},
           "algorithm": {"steps": 3}}  # fmt: skip
"""A short run with rates that the position decides."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped in the phase ppo, to go on, and the weights of its critic had it not been."""
    folder = tmp_path_factory.mktemp("stopped")
    stop = tiny.Recorder(at_step=lambda r: signal.raise_signal(signal.SIGINT) if r["step"] == 3 else None)
    with pytest.raises(Interrupted):
        tiny.run(recipe(folder / "part", **FALLING), callbacks=[stop])
    shutil.copytree(folder / "part", folder / "whole")
    return folder / "part", checkpoint(tiny.run(recipe(folder / "whole", **FALLING)).directory, "critic")


@pytest.mark.parametrize(
    "forgotten",
    ["nothing", *(pytest.param(n, marks=pytest.mark.slow) for n in ("critic", "critic_optimizer", "position"))],
)
def test_what_a_resume_could_forget_would_be_seen(tmp_path, stopped, monkeypatch, forgotten):
    """The comparisons above can fail: resume without a part of the critic, and its weights differ."""
    part, whole = stopped
    plain = launch._load

    def forgets(opened, roles, directory):
        plain(opened, roles, directory)
        engine = tiny.worker(roles.critic).engine
        tensors = {
            "critic": dict(engine.model.score.named_parameters()),
            "critic_optimizer": engine.optimizers.state_tensors(),
        }
        for tensor in tensors.get(forgotten, {}).values():
            tensor.detach().zero_()
        tiny.worker(roles.critic)._at_rest.forget()  # which would see it before the weights differ
        if forgotten == "position":
            engine.steps = 0

    monkeypatch.setattr(launch, "_load", forgets)
    shutil.copytree(part, tmp_path / "runs")
    directory = tiny.run(recipe(tmp_path / "runs", **FALLING)).directory
    assert equal(checkpoint(directory, "critic"), whole) == (forgotten == "nothing")


@pytest.mark.slow
def test_the_critic_alone_learns_from_rewards_with_the_penalty_in_them(tmp_path, monkeypatch):
    """Before the policy moves, too: its targets have the penalty, which here is of the policy against itself."""
    seen = []
    plain = PolicyWorker.advantages

    def watched(self, batch, how):
        seen.append({"old_logprobs", "ref_logprobs"} <= set(batch.payload))
        return plain(self, batch, how)

    watched.__tilth_transfer__ = plain.__tilth_transfer__
    monkeypatch.setattr(PolicyWorker, "advantages", watched)
    how = {"steps": 1, "kl_coef": 0.1, "kl_in": "reward", "kl": "k1"}
    made = tiny.run(recipe(tmp_path, algorithm=how, critic={"steps": 1}, supervised={"steps": 0}))
    assert len(read_metrics(made.directory)) == 2 and len(seen) == 2 and all(seen)
