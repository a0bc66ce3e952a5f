import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.flows import tiny
from tests.flows.stand_ins import Loader
from tilth.core.batch import Batch
from tilth.core.errors import LogprobMismatch
from tilth.flows.roles import Roles
from tilth.flows.step_log import PATIENCE, StepLog
from tilth.flows.weight_sync import SyncBounds
from tilth.rl.algorithm import Algorithm
from tilth.rl.metrics import Metric
from tilth.runs.metrics import Metrics
from tilth.runs.progress import StepProgress
from tilth.runs.state import RunState


class Directory:
    """Remembers lines and warnings."""

    trajectories = None

    def __init__(self, path):
        self.path, self.lines, self.warnings = path, [], []
        self.progress = StepProgress(path)

    def commit_step(self, record):
        self.lines.append(record)
        return record

    def warn(self, step, text):
        self.warnings.append(step)


class Writer:
    def __init__(self):
        self.calls = []

    def open(self, path, spill):
        self.calls.append(path)

    def add(self, batch, step, learned=None):
        self.calls.append((len(batch), step))
        return {"text": "a sample"}


def new_log(folder, writer=None, **sections):
    recipe = tiny.recipe(folder, **sections)
    roles = Roles({"policy": None, "loader": Loader(), **({"writer": writer} if writer else {})})
    bounds = SyncBounds(torch.float32, 1e-3)
    return StepLog(
        recipe, Algorithm.of(recipe), roles, Directory(folder), RunState(), Metrics(), bounds, lambda text: None
    )


def update(skipped=0.0, **more):
    found = {"loss": Metric(2.0, 1, "mean"), "steps/skipped": Metric(skipped, 1, "sum")}
    return found | {name: Metric(*value) for name, value in more.items()}


@pytest.mark.parametrize("staleness", [0, 4])
def test_samples_too_far_behind_are_warned_of_once_for_each_row_of_updates(tmp_path, staleness):
    log = new_log(tmp_path, rollout={"staleness": staleness})
    for chi2 in [2.0] * (PATIENCE - 1) + [0.9] + [2.0] * (PATIENCE + 5):
        log.add_update(update(**{"mismatch/chi2_seq": (chi2, 1, "mean")}))
        log.flush()
    assert len(log.directory.warnings) == (staleness > 0)


def test_only_updates_of_the_policy_count_and_a_skipped_one_leaves_the_version(tmp_path):
    log = new_log(tmp_path)
    log.add_update({"value/loss": Metric(1.0, 1, "mean")}, policy=False)
    log.add_update(update())
    log.add_update(update(skipped=1.0))
    assert log.state.optimizer_steps == 0 and log.metrics.values() == {}  # nothing is waited for yet
    log.flush()
    assert (log.state.optimizer_steps, log.state.version) == (2, 1)
    assert list(log.metrics.values()) == ["value/loss", "loss", "steps/skipped"]
    log.flush()
    assert log.state.optimizer_steps == 2


def test_a_mismatch_of_an_update_is_an_error_once_it_is_read(tmp_path):
    log = new_log(tmp_path)
    log.add_update(update(**{"mismatch/max": (0.1, 1, "max")}))
    with raises(LogprobMismatch, "train.mismatch"):
        log.flush()


def test_a_step_is_one_line_with_its_phase_and_the_next_begins_empty(tmp_path):
    log = new_log(tmp_path)
    log.state.step, log.state.phase, log.state.phase_step = 5, "grpo", 2
    log.add_update(update())
    log.flush()
    line = log.commit(9)
    assert [line[k] for k in ("step", "phase", "phase_step", "phase_steps", "loss")] == [5, "grpo", 2, 9, 2.0]
    assert log.directory.lines == [line] and "loss" not in log.commit(9)


def test_weights_are_adapted_from_the_updates_of_this_step_alone(tmp_path):
    log = new_log(tmp_path, algorithm={"kl_coef": 0.1, "kl_target": 0.01})
    log.start()
    log.add_update(update(kl_ref=(1.0, 1, "mean")))
    log.flush()
    log.adapt_weights()
    grown = log.state.weights["kl_coef"]
    assert grown > 0.1 and log.metrics.values()["kl_coef"] == grown
    log.start()
    log.adapt_weights()
    assert log.state.weights["kl_coef"] == grown


def batch(rewards):
    rewards = np.array(rewards, np.float32)
    rows = {"group": np.arange(len(rewards)) // 4, "reward": rewards, "outcome": rewards}
    return Batch({**rows, "finish": np.full(len(rewards), "stop")})


def test_trajectories_go_to_the_writer_with_the_step_under_way(tmp_path):
    writer = Writer()
    log = new_log(tmp_path, writer)
    log.record(batch([0, 1, 0, 1]))
    assert writer.calls == [str(tmp_path.resolve() / "trajectories"), (4, 1)]
    assert log.directory.trajectories is writer and log.sample == {"text": "a sample"}


@pytest.mark.parametrize("rewards, warned", [([1, 1, 1, 1], [PATIENCE]), ([0, 1, 1, 1], [])])
def test_steps_without_anything_to_learn_are_warned_of_once(tmp_path, rewards, warned):
    log = new_log(tmp_path)
    for step in range(PATIENCE + 3):
        log.state.step = step
        log.record(batch(rewards))
    assert log.directory.warnings == warned
