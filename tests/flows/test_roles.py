"""Invented roles from one file: where they stand, what is checked, planned, kept and shown of them is derived."""

import signal

import numpy as np
import pytest
import torch

from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tests.flows import tiny
from tilth.checkpoint import open_checkpoint
from tilth.cli.layout import as_object, look
from tilth.config.errors import PluginError, RecipeError
from tilth.config.load import dump_toml, from_dict, load_recipe
from tilth.config.roles import ROLES, resolve
from tilth.config.schema import Recipe
from tilth.flows.roles import Roles
from tilth.launch import life as launch
from tilth.models.family import new_config
from tilth.plan.layout import per_rank, place
from tilth.plan.memory import Need
from tilth.plan.shape import parameters
from tilth.runs.models import load_model
from tilth.runs.readers import read_trajectories

TEACHING = """
import numpy as np
import tilth
import torch
from tilth.core.checksum import checksum
from tilth.cluster.protocol import transfer
from tilth.launch.workers import shard_model, train_engine
from tilth.plan.memory import Need
from tilth.plan.working import FP32, Item, training
from tilth.roles.state import Learner
from tilth.training.engine import negative_log_likelihood


@tilth.role("scorer")
class Scorer:
    def __init__(self, context, prompts, *, bonus: float = 0.0):
        self.prompts, self.bonus, self.seen = prompts, bonus, 0

    @transfer(split="rows", gather="rows")
    def score(self, batch):
        known = np.array([len(self.prompts[int(p)].text) for p in batch["prompt"]], np.float32)
        return batch.with_rows(reward=batch["reward"] + self.bonus * known)


def student_need(recipe, cut, longest):
    own = cut.elements * FP32
    held = Item("student's weights", own), Item("student's optimizer state", 2 * own)
    return Need(held, own, training(recipe, cut, longest))


@tilth.role("student", mesh="layout", memory=student_need, trains=True, receives="phase")
class Student(Learner):
    def __init__(self, context, recipe, config, *, lr: float = 1e-3):
        sharded = shard_model(context, recipe, config)
        sharded.init_(recipe.seed)
        section = recipe.optimizer.model_copy(update={"lr": lr})
        super().__init__(train_engine(recipe, sharded, section), "student", "student_optimizer")
        self.store = context.store

    def receive(self, weights, version):
        for name, tensor in weights:
            self.sharded.load_full(name, tensor)

    tolerance = 0.0

    def fingerprint(self):
        with torch.no_grad():
            return {name: checksum(self.sharded.assemble([name])[name]) for name in self.sharded.layouts}

    @transfer(split="rows", gather="merge")
    def sft_step(self, batch):
        columns = batch.read(self.store, "tokens", "mask")
        mask = columns["mask"].values
        learned = self.grid.sum(torch.tensor([mask.sum()], dtype=torch.float64))
        loss = negative_log_likelihood(float(learned))
        self.engine.update(columns["tokens"], mask, {}, loss, entropy=False, dropout=False)
        return {}


@tilth.flow("taught", roles=["scorer", "student"])
def taught(run):
    for batch in run.experience(group=run.recipe.rollout.group):
        batch = run.roles["scorer"].score(batch)
        batch = run.policy.advantages(run.logprobs(batch), run.algo)
        run.log_update(run.policy.update(batch, run.algo))
        dict(run.roles["student"].sft_step(batch))
        run.sync_weights(run.policy)
"""


@pytest.fixture
def teaching(tmp_path):
    path = str(write(tmp_path, TEACHING))
    short = {"supervised": {"steps": 2}, "algorithm": {"steps": 3}}
    return lambda folder="a", **sections: tiny.recipe(
        tmp_path / folder, **{"flow": "taught", "plugins": [path], "cluster": {}, **short, **sections}
    )


TWO = {"backend": "local", "workers": 2}


def test_every_shipped_role_names_a_worker_and_a_memory_that_are_there():
    for spec in ROLES.values():
        assert callable(resolve(spec.worker)) and callable(resolve(spec.memory or Need)), spec.name
        assert spec.section or spec.name in Recipe.model_fields


def test_invented_roles_are_placed_planned_and_shown(teaching):
    recipe = teaching(cluster=TWO, roles={"student": {"layout": {"fsdp": 2}}})
    placed = place(recipe)
    assert list(placed)[-2:] == ["scorer", "student"]
    assert (placed["scorer"].ranks, placed["student"].ranks) == ((0,), (0, 1))
    assert placed["student"].mesh.size("fsdp") == 2
    shape = new_config(recipe.model, 14)
    for worker in per_rank(recipe, shape, 16):
        student = next(seat for seat in worker.seats if seat.role == "student")
        held = worker.memory.by_name()
        assert held["student's weights"] == 4 * student.elements and held["student's optimizer state"] > 0
    seats = [seat for w in per_rank(recipe, shape, 16) for seat in w.seats if seat.role == "student"]
    assert sum(seat.elements for seat in seats) == parameters(shape)
    shown = as_object(look(recipe))
    assert shown["roles"]["student"]["fsdp"] == 2 and shown["roles"]["scorer"]["ranks"] == [0]
    assert {talk["role"] for talk in shown["traffic"]} >= {"student"}  # its gradients
    assert not {"scorer", "student"} & place(teaching(flow="grpo")).keys()


def test_what_is_said_of_an_invented_role_is_kept_with_the_recipe(teaching, tmp_path):
    recipe = teaching(roles={"scorer": {"options": {"bonus": 0.5}}, "student": {"pool": ""}})
    (tmp_path / "kept.toml").write_text(dump_toml(recipe))
    assert load_recipe(str(tmp_path / "kept.toml")) == recipe
    with raises(RecipeError, "roles.nothing"):
        Roles({})["nothing"]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"roles": {"student": {"layout": {"tp": 3}}}, "cluster": TWO}, "roles.student.layout.tp"),
        ({"roles": {"student": {"pool": "train"}}}, "roles.student.pool"),
        ({"roles": {"student": {"pool": 3}}}, "roles.student.pool"),
        ({"roles": {"student": {"layout": {"xp": 3}}}}, "roles.student.layout.xp"),
        ({"roles": {"scorer": {"layout": {"dp": 1}}}}, "roles.scorer.layout.unused"),
        ({"roles": {"scorer": {"path": "runs/x"}}}, "roles.scorer.path.unused"),
        ({"roles": {"scorer": {"options": {"bonsu": 1.0}}}}, "roles.scorer.options.bonsu"),
        ({"roles": {"scorer": {"options": {"bonus": "much"}}}}, "roles.scorer.options.bonus.type"),
        ({"roles": {"scoerer": {}}}, "roles.scoerer.unused"),
        ({"roles": {"scorer": {}}, "flow": "grpo"}, "roles.scorer.unused"),
    ],
)
def test_what_is_wrong_with_an_invented_role_is_found_before_the_run(teaching, sections, key):
    with raises(RecipeError, key):
        teaching(**sections)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('@tilth.role("critic")\nclass Mine: ...', "role.critic.shipped"),
        ('@tilth.role("data")\nclass Mine: ...', "role.data.shipped"),
        ('@tilth.role("wide", mesh="copies")\nclass Mine: ...', "role.wide.memory"),
    ],
)
def test_a_role_that_could_not_be_is_refused_where_it_is_declared(tmp_path, text, key):
    with raises(PluginError, key):
        from_dict({"plugins": [str(write(tmp_path, f"import tilth\n{text}"))]})


def test_a_flow_that_calls_what_nobody_declares_is_refused(tmp_path):
    text = 'import tilth\n@tilth.flow("mine", roles=["ghost"])\ndef mine(run): ...'
    with raises(RecipeError, "flow.roles"):
        from_dict({"plugins": [str(write(tmp_path, text))], "flow": "mine"})


def test_a_worker_that_asks_for_what_there_is_not_is_refused(tmp_path):
    text = TEACHING.replace("context, prompts, *", "context, corpus, *")
    recipe = tiny.recipe(tmp_path / "a", flow="taught", plugins=[str(write(tmp_path, text))], supervised={"steps": 1})
    with raises(RecipeError, "roles.scorer.corpus"):
        tiny.run(recipe)


def student_of(directory):
    return {name: tensor.clone() for name, tensor in load_model(directory, "student").tensors.items()}


def test_an_invented_role_is_called_trained_kept_and_goes_on_bit_for_bit(teaching):
    bonus = {"scorer": {"options": {"bonus": 0.5}}}
    whole = tiny.run(teaching("whole", roles=bonus))
    without = tiny.run(teaching("without"))
    rewards = [read_trajectories(made.directory).column("reward").to_numpy() for made in (whole, without)]
    assert np.array_equal(*rewards)  # what the reward said; the scorer's bonus is the same for a group
    newest = open_checkpoint(launch.latest(str(whole.directory / "checkpoints")))
    assert {"model", "student", "student_optimizer"} <= set(newest.groups)
    policy, student = load_model(whole.directory).tensors, student_of(whole.directory)
    assert policy.keys() == student.keys() and any(not torch.equal(policy[n], t) for n, t in student.items())
    stop = tiny.Recorder(at_step=lambda r: signal.raise_signal(signal.SIGINT) if r["step"] == 4 else None)
    with pytest.raises(launch.Interrupted):
        tiny.run(teaching("part", roles=bonus), callbacks=[stop])
    again = tiny.run(teaching("part", roles=bonus))
    assert tiny.weights(again.directory) == tiny.weights(whole.directory)


@pytest.mark.slow
def test_a_role_whose_options_have_changed_is_another_run(teaching):
    named = {"run": {"name": "mine"}}
    tiny.run(teaching(**named), name="x")
    with raises(RecipeError, "roles.scorer.pool"):
        tiny.run(teaching(roles={"scorer": {"options": {"bonus": 0.5}}}, **named), name="x")


@pytest.mark.slow  # tests/tasks and tests/flows/test_plugins.py have what is invented on workers
@pytest.mark.dist
def test_an_invented_role_is_divided_over_workers(teaching):
    here = tiny.run(teaching("here", algorithm={"steps": 2}))
    there = tiny.run(teaching("there", algorithm={"steps": 2}, cluster=TWO, roles={"student": {"layout": {"fsdp": 2}}}))
    mine, other = student_of(here.directory), student_of(there.directory)
    assert all(torch.allclose(mine[name], tensor, atol=1e-4) for name, tensor in other.items())
