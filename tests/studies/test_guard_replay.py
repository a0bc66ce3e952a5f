"""A step that is replayed tells a faulty worker from faulty data."""

import json
import shutil

import pytest
from tilth_studies.drill import inject
from tilth_studies.guard_replay import _copied, replay, shrunk
from typer.testing import CliRunner

from tests.config.test_plugins import forget
from tests.errors import raises
from tests.flows import tiny
from tilth.api import run_recipe
from tilth.cli.main import app
from tilth.config.load import from_dict
from tilth.core.errors import DataError
from tilth.flows.callbacks import Callback
from tilth.launch.loader_plans import LOADERS
from tilth.runs.costs import COSTS, OFFLOAD
from tilth.training.engine import TrainEngine

POISON = """
from tilth.training.engine import TrainEngine

whole = TrainEngine._passes

def poisoned(self, *args, **given):
    done = whole(self, *args, **given)
    if self.updates == 4:
        for one in done:
            one.value = one.value * float("nan")
    return done

TrainEngine._passes = poisoned
"""


def saved(folder, **sections):
    """A stored run of six steps, checkpoints after 2, 4 and 6."""
    given = {
        "flow": "sft",
        "supervised": {"steps": 6, "check_every": 6, "batch": 8},
        "run": {"save_every": 2, "keep": 8},
    }
    return run_recipe(tiny.recipe(folder, **given, **sections), name="tiny").directory


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """The fifth step of this run is not finite."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / "mine.py").write_text(POISON)
    whole = TrainEngine._passes
    yield saved(folder, plugins=[str(folder / "mine.py")])
    TrainEngine._passes = whole  # of which the plugin has made another one, for all tests of this process
    forget()


def test_a_step_that_is_right_comes_back_and_the_run_stays_as_it_was(poisoned):
    before = sorted(path.name for path in poisoned.rglob("*"))
    found = replay(poisoned, 3)
    assert (found.checkpoint, found.verdict, found.recorded, found.ranks) == (2, None, True, (0,))
    assert [title.split(":")[0] for title in found.outcomes] == ["first", "second", "all"]
    assert len({outcome.bits for outcome in found.outcomes.values()}) == 1
    assert sorted(path.name for path in poisoned.rglob("*")) == before


def test_what_all_workers_compute_alike_and_is_not_finite_is_blamed_on_the_data(poisoned):
    words = ["guard", "replay", str(poisoned), "--step", "5", "--json"]
    found = json.loads(CliRunner().invoke(app, words).output)
    verdict = found["verdict"]
    assert (verdict["kind"], verdict["details"]["cause"], verdict["ranks"]) == ("not-finite", "data", [])
    assert found["checkpoint"] == 4 and "row" in verdict["evidence"]


@pytest.mark.slow
def test_a_record_that_does_not_come_back_is_a_fault_that_has_gone(poisoned, tmp_path):
    other = tmp_path / "tiny-001"
    shutil.copytree(poisoned, other)
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    lines[2]["loss"] += 1e-3
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = replay(other, 3).verdict
    assert (verdict.kind, verdict.ranks, verdict.details["cause"]) == ("corruption", (), "device")


def test_what_cannot_be_replayed_is_refused(poisoned, tmp_path):
    with raises(DataError, "run.json"):
        replay(tmp_path, 3)
    with raises(DataError, "--step"):
        replay(poisoned, 99)
    with pytest.raises(DataError, match="nearest are those of steps 2, 4, 6"):
        replay(poisoned, 2)
    with raises(DataError, "--ranks"):
        replay(poisoned, 3, ranks=[1])
    refused = CliRunner().invoke(app, ["guard", "replay", str(poisoned), "--step", "3", "--ranks", "a"])
    assert refused.exit_code == 2 and "--ranks" in refused.output


def test_a_run_that_follows_clocks_or_draws_without_parity_is_refused(tmp_path):
    few = {"supervised": {"steps": 0}, "algorithm": {"steps": 1}, "run": {"eval_prompts": 1}}
    run = tiny.run(tiny.recipe(tmp_path, rollout={"staleness": 1}, **few)).directory
    with raises(DataError, "rollout.staleness"):
        replay(run, 1)
    recipe = (run / "recipe.toml").read_text()
    synchronous = recipe.replace("staleness = 1", "staleness = 0").replace('speculate = "off"', 'speculate = "suffix"')
    (run / "recipe.toml").write_text(synchronous)
    with raises(DataError, "rollout.speculate"):
        replay(run, 1)


@pytest.mark.parametrize("record", [COSTS, OFFLOAD, LOADERS])
def test_a_copy_has_what_the_run_placed_rows_and_sources_by(poisoned, tmp_path, record):
    shutil.copytree(poisoned, tmp_path / "run")
    (tmp_path / "run" / record).write_text("{}\n")
    assert (_copied(tmp_path / "run", tmp_path / "copy", 2) / record).read_text() == "{}\n"


@pytest.mark.slow
def test_drafts_are_no_fault_and_without_parity_their_run_is_refused(tmp_path):
    few = {"supervised": {"steps": 0}, "algorithm": {"steps": 2}, "run": {"eval_prompts": 1, "save_every": 1}}
    drafts = {"speculate": "suffix", "max_tokens": 8, "temperature": 0.3, "prompts": 2}
    made = tiny.recipe(tmp_path, model={"context": 20}, train={"parity": True}, rollout=drafts, **few)
    run = tiny.run(made, reward=None).directory
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["draft/passes"] = 0.25  # a history that the copy does not have
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert replay(run, 2).verdict is None
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("parity = true", "parity = false"))
    with raises(DataError, "rollout.speculate"):
        replay(run, 2)


def test_a_smaller_layout_keeps_what_holds_a_model_together():
    made = tiny.settings(".", cluster={"backend": "local", "workers": 8})
    made |= {"policy": {"layout": {"fsdp": 4, "tp": 2}}, "rollout": {**made["rollout"], "layout": {"tp": 2}}}
    small = shrunk(from_dict(made), 4)
    assert (small.policy.layout.fsdp, small.policy.layout.tp, small.cluster.workers) == (1, 2, 4)
    assert small.policy.layout.sizes(4)["dp"] == 2 == small.rollout.layout.sizes(4)["dp"]


class Flaky(Callback):
    """A worker that computes a wrong gradient in the first step of each replay."""

    def __init__(self, local):
        self.local = local

    def on_run_start(self, run):
        inject(run.policy._dispatch.backend.folder, "flip-gradient", self.local, at="optimizer")


@pytest.mark.slow
@pytest.mark.dist
def test_a_flaky_worker_is_named_and_no_other(tmp_path):
    run = saved(tmp_path, cluster={"backend": "local", "workers": 3}, policy={"layout": {"fsdp": 3}})
    found = replay(run, 3, watch=lambda group: [Flaky(group.index(1))] if 1 in group else [])
    assert (found.verdict.kind, found.verdict.ranks) == ("corruption", (1,))
    assert found.verdict.details == {"cause": "device", "majority": True, "again": True}
