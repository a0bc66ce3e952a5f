"""A bit that flips on one worker is found at the end of the step, and the run ends as if it had not."""

import pytest
from tilth_studies.drill import inject

from tests.flows import tiny
from tests.launch.test_survive import FSDP, LOCAL, assert_same_run, recoveries

pytestmark = pytest.mark.dist
FLIPS = """
from pathlib import Path
import torch
from tilth.training.engine import TrainEngine

whole = TrainEngine.update

def flipped(self, *args, **given):
    found = whole(self, *args, **given)
    flag = Path(__file__).with_name("flip")
    if self.grid.rank == 1 and flag.exists():
        flag.unlink()
        weight = self.model.model.norm.weight.data.view(torch.int32)
        weight[3] ^= 1 << 12
    return found

TrainEngine.update = flipped
"""


class Flip(tiny.Recorder):
    """Ask for a flip in the step after this one."""

    def __init__(self, folder, *steps):
        super().__init__()
        self.flag, self.steps = folder / "flip", list(steps)

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if step in self.steps:
            self.steps.remove(step)
            self.flag.touch()


def test_a_flipped_bit_is_found_and_leaves_no_trace(tmp_path):
    (tmp_path / "mine.py").write_text(FLIPS)
    short = {"supervised": {"steps": 2}, "algorithm": {"steps": 2}}
    sections = {"plugins": [str(tmp_path / "mine.py")], "cluster": LOCAL, **short}
    plain = tiny.run(tiny.recipe(tmp_path / "plain", **sections))
    ours = tiny.run(tiny.recipe(tmp_path / "ours", **sections), callbacks=[Flip(tmp_path, 1, 3)])
    assert_same_run(ours, plain)
    found = recoveries(ours.directory)
    assert [(one["kind"], one["ranks"], one["action"]) for one in found] == [
        ("corruption", [0, 1], "retry"),
        ("corruption", [0, 1], "replace"),
    ]
    assert "model.norm.weight" in found[0]["evidence"] and [one["step"] for one in found] == [2, 4]


class Drill(tiny.Recorder):
    """Flip a bit of one worker's weights before an update, and between another one and its snapshot."""

    kind, moments = "flip", {8: "policy.update", 10: "policy.snapshot"}

    def on_step_end(self, run, step, metrics):
        super().on_step_end(run, step, metrics)
        if at := self.moments.pop(step, ""):
            inject(run.policy._dispatch.backend.folder, self.kind, 1, at=at)


@pytest.mark.slow
def test_a_bit_that_flips_at_rest_is_found_without_any_copy_and_names_its_worker(tmp_path):
    plain = tiny.run(tiny.recipe(tmp_path / "plain", **FSDP))
    ours = tiny.run(tiny.recipe(tmp_path / "ours", **FSDP), callbacks=[Drill()])
    assert_same_run(ours, plain)
    found = recoveries(ours.directory)
    assert [(one["kind"], one["ranks"], one["action"], one["step"]) for one in found] == [
        ("corruption", [1], "retry", 8),
        ("corruption", [1], "replace", 10),
    ]
    assert all("other bits" in one["evidence"] for one in found)


@pytest.mark.slow
def test_a_gradient_that_one_rank_finds_wrong_holds_the_others_up_for_a_moment(tmp_path):
    """All others wait for it in a collective, which no limit of a call or a hang has to end."""
    sections = {
        "cluster": {"backend": "local", "workers": 4},
        "policy": {"layout": {"dp": 2, "fsdp": 2}},
        "supervised": {"steps": 0},
        "algorithm": {"steps": 3},
        "guard": {"hang_after": 300.0},
    }
    plain = tiny.run(tiny.recipe(tmp_path / "plain", **sections))
    drill = Drill()
    drill.kind, drill.moments = "flip-gradient", {1: "optimizer"}
    ours = tiny.run(tiny.recipe(tmp_path / "ours", **sections), callbacks=[drill])
    assert_same_run(ours, plain)
    (found,) = recoveries(ours.directory)
    assert (found["kind"], found["ranks"], found["action"], found["step"]) == ("corruption", [1], "retry", 1)
    assert "gradients changed" in found["evidence"] and set(found["replaced"]) <= {0, 2, 3}
    assert found["lost"] < 60.0
