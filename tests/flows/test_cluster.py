"""A recipe on several workers is the recipe on one: the same pages, and the same numbers up to rounding."""

import os
import signal
import time

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.flows import tiny
from tilth.cluster.backends.local import LocalBackend
from tilth.cluster.controller import balance
from tilth.cluster.controller.cluster import Cluster
from tilth.core.errors import RecipeError, WeightMismatch, WorkerError, WorkerLost
from tilth.launch import balance_costs
from tilth.launch import life as launch
from tilth.runs.costs import read_costs
from tilth.runs.models import load_model
from tilth.runs.readers import read_metrics, read_state, read_trajectories

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("two_layers")]
LOCAL = {"backend": "local", "workers": 2}
SPLIT = {"backend": "local", "pools": {"learn": 1, "speak": 1}}
ELSEWHERE = {"pool": "speak"}
DIVIDED = {"layout": {"tp": 2}}
LAYOUTS = {
    "dp": {"cluster": LOCAL},
    "fsdp": {"cluster": LOCAL, "policy": {"layout": {"fsdp": 2}}},
    "fsdp, gathered once": {"cluster": LOCAL, "policy": {"layout": {"fsdp": 2, "zero": 2}}},
    "dp, updates divided": {
        "cluster": LOCAL,
        "policy": {"layout": {"fsdp": 2, "zero": 1}},
        "reference": {"layout": {"zero": 1}},
    },
    "tp": {"cluster": LOCAL, "policy": {"layout": {"tp": 2}}},
    "tp, sp": {"cluster": LOCAL, "policy": {"layout": {"tp": 2, "sp": True}}},
    "pp": {"cluster": LOCAL, "policy": {"layout": {"pp": 2}}, "reference": {"layout": {"pp": 2}}},
    "pp, zero-bubble": {
        "cluster": LOCAL,
        "policy": {"layout": {"pp": 2, "pp_schedule": "zero-bubble"}},
        "reference": {"layout": {"tp": 2}},
        "rollout": DIVIDED,
    },
    "cp": {"cluster": LOCAL, "policy": {"layout": {"cp": 2}}},
    "hdp": {
        "cluster": LOCAL,
        "policy": {"layout": {"hdp": 2}},
        "reference": {"layout": {"hdp": 2}},
        "train": {"micro_tokens": 4},
    },
    "cp, ulysses": {"cluster": LOCAL, "policy": {"layout": {"cp": 2, "cp_style": "ulysses"}}},
    "split": {"cluster": SPLIT, "rollout": ELSEWHERE, "reward": ELSEWHERE},
    "dp, engine over tp": {"cluster": LOCAL, "rollout": DIVIDED},
    "fsdp, engine over tp": {"cluster": LOCAL, "policy": {"layout": {"fsdp": 2}}, "rollout": DIVIDED},
    "tp, engine over tp": {"cluster": LOCAL, "policy": {"layout": {"tp": 2}}, "rollout": DIVIDED},
}
MOE = {"family": "qwen3_moe", "experts": 4, "experts_per_token": 2, "dense_layers": 1}
NEAR = ("loss", "grad_norm", "entropy", "kl", "value/loss", "loss/heldout")
"""Metrics that differ by rounding; those of rows (rewards, lengths, counts) are equal."""
COUNTED = ("reward/mean", "length/mean", "tokens/generated", "samples/trained", "reward/heldout", "tokens/trained")


@pytest.fixture(scope="module")
def workers():
    """Two worker processes that all runs of this file share, one after the other; new ones after a failure."""
    made = []

    def give():
        if not made or made[-1].dispatch.failed is not None:
            made.append(Cluster(LocalBackend(2, timeout=60.0), 60.0))
        return made[-1]

    yield give
    for cluster in made:
        cluster.close()


class Lent:
    """A cluster that a run may use and must not close, nor repair."""

    repairable = None

    def __init__(self, cluster):
        self._cluster = cluster

    def watch(self, hang_after, *, keep, waits):
        """The first failure ends it, and the next run gets another."""

    def __getattr__(self, name):
        return getattr(self._cluster, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def close(self):
        """Whoever lent it does."""
        return []

    def trace(self, path, attempt, planned):
        """They write no events: a worker writes to one place in its life."""


@pytest.fixture
def shared(workers, monkeypatch):
    monkeypatch.setattr(launch, "open_cluster", lambda *_, **__: Lent(workers()))


def sections(flow, **more):
    found = {
        "grpo": {"supervised": {"steps": 2}, "algorithm": {"minibatches": 2, "kl_coef": 0.05, "steps": 2}},
        "moe": {"algorithm": {"minibatches": 2, "kl_coef": 0.05}, "model": MOE},
        "ppo": {"flow": "ppo", "supervised": {"steps": 2}, "critic": {"steps": 2},
                "algorithm": {"advantage": "gae", "steps": 2, "lam": 0.9}},
    }[flow]  # fmt: skip
    return {**found, **more}


def assert_near(ours, theirs, **tolerance):
    ours, theirs = read_metrics(ours.directory), read_metrics(theirs.directory)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert {k for k in a if k in COUNTED} == {k for k in b if k in COUNTED}
        for name in (n for n in COUNTED if n in b):
            assert a[name] == pytest.approx(b[name], rel=1e-6), f"step {b['step']}: {name}"
        for name in (n for n in NEAR if n in b):
            assert a[name] == pytest.approx(b[name], **tolerance), f"step {b['step']}: {name}"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Runs of one process, by flow."""
    made = {}

    def run(flow):
        if flow not in made:
            made[flow] = tiny.run(tiny.recipe(tmp_path_factory.mktemp(flow), **sections(flow)))
        return made[flow]

    return run


SELDOM = (
    "fsdp",  # quickly in pre-training
    "hdp",
    "tp, engine over tp",
    "cp",
    "pp, zero-bubble",
    "dp",
    "dp, updates divided",
    "fsdp, gathered once",
    "tp",
    "tp, sp",
    "dp, engine over tp",
    "fsdp, engine over tp",
    "cp, ulysses",
)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in SELDOM)) for n in LAYOUTS])
def test_grpo_learns_in_every_layout_as_on_one_process(tmp_path, shared, one, layout):
    ours = tiny.run(tiny.recipe(tmp_path, **sections("grpo", **LAYOUTS[layout])))
    assert_near(ours, one("grpo"), rel=2e-4, abs=2e-5)
    columns = ["step", "id", "prompt", "text", "reward"]
    theirs = read_trajectories(one("grpo").directory).select(columns)
    assert read_trajectories(ours.directory).select(columns).sort_by("id").equals(theirs.sort_by("id"))
    final, wanted = (load_model(run.directory).tensors for run in (ours, one("grpo")))
    for name, tensor in wanted.items():
        assert torch.allclose(final[name], tensor, atol=2e-4), name


@pytest.mark.parametrize(("engine", "zero"), [(1, 3), (2, 3), (2, 1)])
@pytest.mark.slow
def test_grpo_of_divided_experts_learns_as_on_one_process(tmp_path, shared, one, engine, zero):
    placed = {"policy": {"layout": {"ep": 2, "zero": zero}}, "rollout": {"layout": {"ep": engine}}}
    ours = tiny.run(tiny.recipe(tmp_path, **sections("moe", cluster=LOCAL, **placed)))
    assert_near(ours, one("moe"), rel=2e-4, abs=2e-5)
    final, wanted = (load_model(run.directory).tensors for run in (ours, one("moe")))
    assert any(".experts." in name for name in wanted)
    for name, tensor in wanted.items():
        assert torch.allclose(final[name], tensor, atol=2e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"dp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}, {"fsdp": 4}])
def test_two_engines_over_tp_side_by_side(tmp_path, one, policy):
    cluster = {"backend": "local", "workers": 4}
    placed = {"cluster": cluster, "policy": {"layout": policy}, "rollout": {"layout": {"dp": 2, "tp": 2}}}
    ours = tiny.run(tiny.recipe(tmp_path, **sections("grpo", **placed)))
    assert_near(ours, one("grpo"), rel=2e-4, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"fsdp": 2}, {"tp": 2}, {}])
def test_an_engine_over_tp_in_a_pool_of_its_own(tmp_path, one, policy):
    cluster = {"backend": "local", "pools": {"learn": 2, "speak": 2}}
    placed = {"cluster": cluster, "policy": {"layout": policy}, "rollout": {**ELSEWHERE, **DIVIDED}}
    ours = tiny.run(tiny.recipe(tmp_path, **sections("grpo", **placed)))
    assert_near(ours, one("grpo"), rel=2e-4, abs=2e-5)


KL = {"kl_coef": 0.05}
CHOSEN = {"minibatches": 2, "options": {"cov_share": 0.2}}
SHAPED = {"overlong_buffer": 0.5, "overlong_filter": True, "advantage": "optimal_token_baseline", "epochs": 2}
ALGORITHMS = {
    "rloo": {"flow": "rloo", "algorithm": {**KL, "advantage": "rloo"}},
    "reinforce_pp": {"flow": "reinforce_pp", "algorithm": {**KL, "advantage": "reinforce_pp", "kl_target": 1e-3}},
    "remax": {"flow": "remax", "algorithm": {"advantage": "remax"}, "rollout": {"group": 2}},
    "dapo": {"flow": "dapo", "algorithm": {**SHAPED, "correction": "decoupled_seq_is"}},
    "vapo": {"flow": "vapo", "algorithm": {"advantage": "vapo", "options": {"alpha": 1.0}}, "critic": {"steps": 1}},
    "kl_cov": {"algorithm": {**CHOSEN, "loss": "kl_cov"}},
    "clip_cov": {"algorithm": {**CHOSEN, "loss": "clip_cov"}},
    "gspo": {"algorithm": {"minibatches": 2, "loss": "gspo", "aggregation": "seq-mean-token-mean"}},
    "gdpo": {"algorithm": {"advantage": "gdpo", "options": {"keys": ["right", "length"]}}},
}
"""Parts that look at other workers' rows: baselines in groups, moments, tokens chosen among all, row sums."""


def in_parts(prompt, completion, info):
    right = sum(a == b for a, b in zip(completion, info["answer"]))
    return {"reward": right + 0.1 * len(completion), "right": right, "length": len(completion)}


@pytest.mark.slow  # tests/rl/conformance has each on two workers
@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_on_two_workers_is_what_it_is_on_one(tmp_path, shared, name, layout):
    found = []
    for where in ({}, {"cluster": LOCAL, "policy": {"layout": layout}}):
        given = {**ALGORITHMS[name], **where, "optimizer": {"lr": 1e-3}}
        given["algorithm"] = {"steps": 3, **given["algorithm"]}
        found.append(tiny.run(tiny.recipe(tmp_path / str(len(found)), **given), reward=in_parts))
    assert_near(found[1], found[0], rel=1e-3, abs=1e-4)


CRITICS = {
    "all on both": {"cluster": LOCAL, "policy": {"layout": {"fsdp": 2}}, "critic": {"steps": 2, "layout": {"tp": 2}}},
    "stages": {
        "cluster": LOCAL,
        "policy": {"layout": {"pp": 2}},
        "critic": {"steps": 2, "layout": {"pp": 2, "pp_schedule": "zero-bubble"}},
    },
    "tokens of both": {
        "cluster": LOCAL,
        "policy": {"layout": {"cp": 2}},
        "critic": {"steps": 2, "layout": {"cp": 2, "cp_style": "ulysses"}},
    },
    "critic elsewhere": {"cluster": SPLIT, "critic": {"steps": 2, **ELSEWHERE}, "rollout": ELSEWHERE},
}


@pytest.mark.parametrize("layout", ["all on both", *(pytest.param(n, marks=pytest.mark.slow) for n in [*CRITICS][1:])])
def test_ppo_learns_with_a_critic_in_another_layout_or_place(tmp_path, shared, one, layout):
    ours = tiny.run(tiny.recipe(tmp_path, **sections("ppo", **CRITICS[layout])))
    assert_near(ours, one("ppo"), rel=1e-3, abs=1e-4)


UNITS = {"layout": {"hdp": 2}}
OF_UNITS = {"both": (UNITS, UNITS), "critic": ({}, UNITS), "policy": (UNITS, {})}


@pytest.mark.slow  # tests/parallel/test_units.py has these rows
@pytest.mark.parametrize("which", OF_UNITS)
def test_ppo_with_rows_on_as_many_ranks_as_they_take_is_ppo_on_one(tmp_path, shared, one, monkeypatch, which):
    plan, several = balance.plan_batch, list[bool]()

    def planned(*args, **how):
        found = plan(*args, **how)
        several.extend(micro.several for rank in found.ranks for micro in rank.learn if how["units"] > 1)
        return found

    monkeypatch.setattr(balance, "plan_batch", planned)
    policy, critic = OF_UNITS[which]
    placed = {"policy": policy, "critic": {"steps": 2, **critic}, "train": {"micro_tokens": 7}}
    ours = tiny.run(tiny.recipe(tmp_path, **sections("ppo", cluster=LOCAL, **placed)))
    assert 0.1 < np.mean(several) < 0.9
    assert_near(ours, one("ppo"), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("rollout", [pytest.param({}, marks=pytest.mark.slow), ELSEWHERE])
def test_in_parity_mode_rollouts_are_the_same_token_for_token_wherever_they_are_made(tmp_path, shared, rollout):
    """The weights of each step are those of one process: the first step's samples, before any update differs."""
    short = {"supervised": {"steps": 0}, "algorithm": {"steps": 1}, "train": {"parity": True}}
    alone = tiny.run(tiny.recipe(tmp_path / "one", **short))
    where = {"cluster": SPLIT if rollout else LOCAL, "rollout": rollout}
    several = tiny.run(tiny.recipe(tmp_path / "several", **short, **where))
    a, b = (read_trajectories(run.directory).sort_by("id") for run in (alone, several))
    assert a.select(["id", "tokens", "logprobs"]).equals(b.select(["id", "tokens", "logprobs"]))
    assert [r["mismatch/max"] for r in read_metrics(several.directory)] == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        {"cluster": {"backend": "local", "workers": 4}},
        {"cluster": {"backend": "local", "pools": {"learn": 1, "speak": 4}}, "rollout": ELSEWHERE},
        {"cluster": {"backend": "local", "workers": 4}, "policy": {"layout": {"dp": 2, "fsdp": 2}}},
    ],
    ids=["colocated", "split", "under hsdp"],
)
def test_four_engines_say_what_one_says_token_for_token(tmp_path, where):
    short = {"supervised": {"steps": 0}, "algorithm": {"steps": 1}, "train": {"parity": True, "threads": 1}}
    alone, several = (tiny.run(tiny.recipe(tmp_path / n, **short, **how)) for n, how in (("1", {}), ("4", where)))
    a, b = (read_trajectories(run.directory).sort_by("id") for run in (alone, several))
    assert a.select(["id", "tokens", "logprobs"]).equals(b.select(["id", "tokens", "logprobs"]))


@pytest.mark.parametrize(
    "layout", [{"fsdp": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"cp": 2}, {"pp": 2}))], ids=str
)
@pytest.mark.parametrize("flow", [pytest.param("sft", marks=pytest.mark.slow), "pretrain"])
def test_supervised_flows_on_two_workers(tmp_path, shared, flow, layout):
    alone = tiny.learn(tmp_path / "one", flow)
    spread = tiny.learn(tmp_path / "two", flow, cluster=LOCAL, policy={"layout": layout})
    assert_near(spread, alone, rel=1e-4, abs=1e-5)


# ---- from one layout into another ----


@pytest.mark.slow
def test_a_run_begins_with_a_model_that_was_trained_in_another_layout(tmp_path, shared):
    first = tiny.run(tiny.recipe(tmp_path / "first", **LAYOUTS["fsdp"]))
    again = {"model": {"path": str(first.directory)}, "supervised": {"steps": 0}, "algorithm": {"steps": 2}}
    on_two = tiny.run(tiny.recipe(tmp_path / "two", **LAYOUTS["tp"], **again))
    on_one = tiny.run(tiny.recipe(tmp_path / "one", **again))
    assert_near(on_two, on_one, rel=2e-4, abs=2e-5)


@pytest.mark.slow
def test_a_run_over_stages_continues_one_of_shards_and_the_other_way_round(tmp_path, shared):
    for number, (before, after) in enumerate((("fsdp", "pp"), ("pp", "fsdp"))):
        where = tmp_path / str(number)
        first = tiny.run(tiny.recipe(where / "first", **LAYOUTS[before]))
        again = {"model": {"path": str(first.directory), "optimizer": True}, "supervised": {"steps": 0}}
        again["algorithm"] = {"steps": 2}
        on_two, on_one = (
            tiny.run(tiny.recipe(where / n, **how, **again)) for n, how in (("2", LAYOUTS[after]), ("1", {}))
        )
        assert_near(on_two, on_one, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pp", "tp", "tp, engine over tp"))]
)
@pytest.mark.slow
def test_an_interrupted_run_on_two_workers_goes_on_bit_for_bit(tmp_path, shared, name):
    layout = LAYOUTS[name]
    whole = tiny.run(tiny.recipe(tmp_path / "whole", **layout))
    stop = tiny.Recorder(at_step=lambda r: signal.raise_signal(signal.SIGINT) if r["step"] == 9 else None)
    with pytest.raises(launch.Interrupted):
        tiny.run(tiny.recipe(tmp_path / "part", **layout), callbacks=[stop])
    again = tiny.run(tiny.recipe(tmp_path / "part", **layout))
    ours, theirs = (load_model(run.directory).tensors for run in (again, whole))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert tiny.same(tiny.numbers(again.directory), tiny.numbers(whole.directory))


# ---- what goes wrong ----


def harmed(context, damage, **given):
    """A rollout worker whose engine harms a tensor from the second publish on; a factory for the workers."""
    from tilth.launch import workers

    made = workers.rollout(context, **given)
    load = made.engine.update_weights

    def damages(weights, version):
        weight = dict(made.engine.named_parameters())["model.layers.1.mlp.up_proj.weight"]
        before = weight.clone()
        load(weights, version=version)
        if version and context.rank == 1:
            weight.copy_({"drop": before, "permute": weight.flip(0), "corrupt": weight + 1e-6}[damage])

    made.engine.update_weights = damages
    return made


def dies(context, **given):
    """A rollout worker that is killed in its second generation."""
    from tilth.launch import workers

    made, calls = workers.rollout(context, **given), []
    submit, poll = made.engine.submit, made.engine.poll

    def polled():
        if len(calls) == 2 and context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return poll()

    made.engine.submit = lambda requests: calls.append(1) or submit(requests)
    made.engine.poll = polled
    return made


def mistaken(context, **given):
    """A rollout worker with an ordinary mistake."""
    from tilth.launch import workers

    made = workers.rollout(context, **given)
    made.engine.submit = lambda requests: requests[0].nothing
    return made


def replace_rollout(monkeypatch, factory, **more):
    whole = Cluster.group

    def group(self, role, where, kwargs, **options):
        if role == "rollout":
            where, kwargs = f"tests.flows.test_cluster:{factory}", {**kwargs, **more}
        return whole(self, role, where, kwargs, **options)

    monkeypatch.setattr(Cluster, "group", group)


WRONG = {"supervised": {"steps": 0}, "cluster": {**LOCAL, "timeout": 60.0}}


@pytest.mark.slow  # quickly in tests/launch/test_survive.py
def test_a_worker_that_dies_is_named_and_the_run_can_go_on(tmp_path, shared, monkeypatch):
    with monkeypatch.context() as once:
        replace_rollout(once, "dies")
        with raises(WorkerLost, "rollout.advance") as caught:
            tiny.run(tiny.recipe(tmp_path, **WRONG))
        assert "SIGKILL" in str(caught.value) and "the same command continues in" in str(caught.value)
    (directory,) = [p for p in tmp_path.iterdir() if p.name.startswith("tiny")]
    assert read_state(directory)["state"] != "finished"
    assert tiny.run(tiny.recipe(tmp_path, **WRONG)).directory == directory


@pytest.mark.slow
def test_a_mistake_in_a_worker_comes_with_its_traceback(tmp_path, shared, monkeypatch):
    replace_rollout(monkeypatch, "mistaken")
    with raises(WorkerError, "rollout.submit") as caught:
        tiny.run(tiny.recipe(tmp_path, **WRONG))
    assert "requests[0].nothing" in str(caught.value)


def test_rewards_of_the_script_itself_travel_to_the_worker_that_scores(tmp_path, shared):
    factor = 0.5
    made = tiny.recipe(tmp_path, **LAYOUTS["split"], supervised={"steps": 0}, algorithm={"steps": 1})
    result = tiny.run(made, reward=lambda prompt, completion, info: factor * len(completion))
    rewards = read_trajectories(result.directory).column("reward").to_numpy()
    assert set(np.unique(rewards)) <= {0.0, 0.5, 1.0, 1.5, 2.0}


# ---- before anything starts ----


def test_a_run_on_other_workers_is_refused_before_any_starts_and_says_what_differs(tmp_path, monkeypatch):
    short = {"supervised": {"steps": 1}, "algorithm": {"steps": 0}}
    one = tiny.recipe(tmp_path, **short, run={"name": "mine"})
    tiny.run(one)
    monkeypatch.setattr(launch, "open_cluster", None)
    with raises(RecipeError, "cluster.backend"):
        tiny.run(tiny.recipe(tmp_path, **short, run={"name": "mine"}, cluster=LOCAL))
    with raises(RecipeError, "run.json.state"):
        tiny.run(one)


def test_rewards_that_are_slow_together_end_within_the_limit_of_a_call(tmp_path, shared):
    """24 rewards of 30 ms, asked for so many at a time that even the slowest fit."""
    slow = {"reward": {"timeout": 0.5}, "cluster": {**LOCAL, "timeout": 2.0}}
    made = tiny.recipe(tmp_path, supervised={"steps": 0}, algorithm={"steps": 1}, **slow)
    result = tiny.run(made, reward=lambda prompt, completion, info: time.sleep(0.03) or float(len(completion)))
    assert len(read_trajectories(result.directory)) == 24
    assert read_metrics(result.directory)[0]["reward/missing"] == 0


# ---- at the end: the workers do not survive it ----


@pytest.mark.parametrize("damage", [*(pytest.param(d, marks=pytest.mark.slow) for d in ("drop", "permute")), "corrupt"])
def test_a_tensor_that_one_engine_holds_wrongly_stops_the_run_in_that_step(tmp_path, shared, monkeypatch, damage):
    replace_rollout(monkeypatch, "harmed", damage=damage)
    watcher = tiny.Recorder()
    with raises(WeightMismatch, "model.layers.1.mlp.up_proj.weight"):
        tiny.run(tiny.recipe(tmp_path, **WRONG), callbacks=[watcher])
    assert not watcher.records  # the publish at the end of the first step is the first with a version above 0


@pytest.mark.slow
def test_rows_that_costs_place_give_the_same_numbers_and_what_was_followed_is_recorded(
    tmp_path, shared, one, monkeypatch
):
    monkeypatch.setattr(balance_costs, "ENOUGH", 2)
    ours = tiny.run(tiny.recipe(tmp_path, cluster=LOCAL, train={"balance": "cost"}, **sections("grpo")))
    assert_near(ours, one("grpo"), rel=1e-3, abs=1e-5)
    first, fitted = read_costs(ours.directory)
    assert (first.step, first.source) == (1, balance_costs.PROFILE)
    assert (fitted.step, fitted.source) == (3, balance_costs.OWN)
    records = read_metrics(ours.directory)
    assert all(0 <= record["balance/idle"] < 1 and 0 <= record["padding"] < 1 for record in records)
    assert any(record["balance/idle"] > 0 for record in records)
