"""Metrics: declared once, reduced as declared, whatever the split; and the times of a step."""

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from tests.errors import raises
from tilth.runs.metrics import KEYS, METRICS, MetricError, Metrics, declaration, resident, schema
from tilth.trace import Total, recorder, span


@dataclass(frozen=True)
class Part:
    total: float
    count: float
    reduction: str

    def __float__(self) -> float:
        return self.total / self.count if self.reduction == "mean" else self.total


def total(seconds=0.0, tokens=0, phase=True) -> Total:
    return Total(seconds, seconds, 1, tokens, 0, 0.0, seconds if phase else 0.0, tokens if phase else 0)


def test_every_declaration_is_complete_and_is_plain_json():
    for name, how in schema().items():
        assert name not in KEYS and how["unit"] and len(how["description"]) > 5
        assert how["reduction"] in ("mean", "sum", "max", "min", "last")
    assert json.loads(json.dumps(schema())) == schema()
    assert len(schema()) == len(METRICS)


def test_unknown_name_is_an_error_that_names_a_near_one():
    with raises(MetricError, "reward/maen"):
        Metrics().add("reward/maen", 1.0)
    with raises(MetricError, "zzz"):
        Metrics().take({"zzz": 1.0})


def test_families():
    assert declaration("time/generate").unit == "s"
    assert declaration("reward/part/format").reduction == "mean"
    with pytest.raises(MetricError):
        declaration("step")


@pytest.mark.parametrize(
    ("name", "values", "want"),
    [
        ("reward/mean", [1.0, 2.0, 6.0], 3.0),
        ("reward/missing", [1, 2, 3], 6),
        ("length/max", [3, 9, 4], 9),
        ("accuracy/heldout", [0.5, 0.25], 0.25),
    ],
)
def test_reductions(name, values, want):
    metrics = Metrics()
    for value in values:
        metrics.add(name, value)
    assert metrics.values() == {name: want}


def test_a_mean_of_nothing_is_left_out():
    metrics = Metrics()
    metrics.add("reward/mean", 0.0, 0)
    metrics.add_sum("entropy", 0.0, 0)
    assert metrics.values() == {}


def test_take_parts_and_numbers():
    metrics = Metrics()
    for total_, count, worst in ((6.0, 3, 1e-6), (2.0, 1, 4e-6)):
        metrics.take(
            {
                "entropy": Part(total_, count, "mean"),
                "mismatch/mean": Part(worst, 1, "mean"),
                "mismatch/max": Part(worst, count, "max"),
                "tokens/trained": Part(10, 1, "sum"),
                "loss": 0.5,
            }
        )
    want = {"entropy": 2.0, "mismatch/mean": 2.5e-6, "mismatch/max": 4e-6, "tokens/trained": 20, "loss": 0.5}
    assert metrics.values() == pytest.approx(want)


def test_parts_must_be_put_together_as_declared():
    with raises(MetricError, "entropy.reduction"):
        Metrics().take({"entropy": Part(1.0, 1, "max")})
    with raises(MetricError, "tokens/trained.reduction"):
        Metrics().add_sum("tokens/trained", 3.0, 1)


def test_what_losses_report_is_declared():
    torch = pytest.importorskip("torch")
    rl = pytest.importorskip("tilth.rl")
    x = torch.zeros(6)
    found = rl.policy_loss(
        "ppo_clip", logprobs=x, old_logprobs=x, advantages=x + 1, mask=x + 1, lengths=torch.tensor([3, 3]),
        ref_logprobs=x, rollout_logprobs=x + 0.5, dual_clip=3.0,
    )  # fmt: skip
    metrics = Metrics()
    metrics.take(found.metrics)
    values = metrics.values()
    assert values["mismatch/max"] == values["mismatch/mean"] == 0.5 and values["ratio"] == 1.0


def test_times_partition_the_step_and_rates_are_tokens_over_time():
    metrics = Metrics()
    metrics.take_times(
        {
            "step": total(10.0, phase=False),
            "generate": total(4.0, 400),
            "update": total(5.0, 2000),
            "decode": total(3.9, phase=False),
        }
    )
    assert metrics.values() == {
        "time/generate": 4.0, "time/update": 5.0, "time/other": 1.0, "time/step": 10.0,
        "tokens_per_second/generate": 100.0, "tokens_per_second/train": 400.0,
        "loader/stall": 0.0,
    }  # fmt: skip


def test_the_stall_of_a_step_is_the_time_of_its_loads():
    metrics = Metrics()
    metrics.take_times({"step": total(10.0, phase=False), "load": total(0.5, phase=False)})
    assert metrics.values()["loader/stall"] == 0.5


def test_rates_of_several_parts_weigh_by_time():
    metrics = Metrics()
    metrics.take_times({"generate": total(1.0, 100)})
    metrics.take_times({"generate": total(3.0, 900)})
    assert metrics.values()["tokens_per_second/generate"] == 250.0


def test_close_gives_the_record_with_times_and_memory_and_starts_anew():
    recorder.totals()
    metrics = Metrics()
    with span("step"), span("generate", tokens=5):
        metrics.add("reward/mean", 1.0)
    record = metrics.close(step=7, phase="grpo")
    assert (record["step"], record["phase"], record["reward/mean"]) == (7, "grpo", 1.0)
    assert 0 < record["time/generate"] <= record["time/step"]
    assert 1e6 < record["memory/rss"] <= record["memory/peak"] <= resident()[1]
    assert metrics.values() == {}
    after = metrics.close(step=8, phase="grpo", phase_step=2)
    assert "reward/mean" not in after and after["phase_step"] == 2 and "phase_step" not in record


def test_the_peak_is_of_this_process_not_of_the_one_that_started_it():
    code = "from tilth.runs.metrics import resident; print(resident()[1])"
    ballast = np.ones(20_000_000)  # 160 MB here: a child that took our peak over would report it
    peak = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert resident()[1] > ballast.nbytes > peak > 10_000_000
