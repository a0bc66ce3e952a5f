"""Runs with compressed gradients, of a plugin too: two workers, stopped and resumed."""

import pytest

from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.documents import blocks
from tests.flows import tiny
from tilth.checkpoint import open_checkpoint
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

pytestmark = [pytest.mark.dist, pytest.mark.slow]
(TERNARY,) = (block.text for block in blocks("docs/extending.md") if block.first == "# ternary.py")
SHORT = {"supervised": {"steps": 4}, "algorithm": {"steps": 3, "minibatches": 2}}
LAYOUTS = {"dp": {}, "updates divided": {"zero": 1}, "shards": {"fsdp": 2, "zero": 2}}
COMM = {"dp": {"gradients": "ternary"}, "updates divided": {"gradients": "sdp4bit", "weights": "difference4"}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_stopped_ends_as_if_it_was_not(tmp_path, layout):
    def made(folder):
        comm = {"smallest": 100, **COMM.get(layout, {"gradients": "topk"})}
        return tiny.recipe(
            tmp_path / folder,
            plugins=[str(write(tmp_path, TERNARY))],
            cluster={"backend": "local", "workers": 2},
            policy={"layout": LAYOUTS[layout], "comm": comm},
            **SHORT,
        )

    def stop(record):
        if record["step"] == 5:
            raise Interrupted("now")

    whole = tiny.run(made("whole"))
    with pytest.raises(Interrupted):
        tiny.run(made("torn"), callbacks=[tiny.Recorder(stop)])
    again = tiny.run(made("torn"))
    assert tiny.weights(whole.directory) == tiny.weights(again.directory)
    newest = open_checkpoint(max((again.directory / "checkpoints").glob("step-*")))
    assert ("model_reducer" in newest.groups) == (layout != "dp")
    losses = [record["loss"] for record in read_metrics(again.directory) if "loss" in record]
    assert losses[3] < losses[0]
