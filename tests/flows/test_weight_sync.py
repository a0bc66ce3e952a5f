import pytest
import torch

from tests.errors import raises
from tilth.config.schema import Recipe, TrainConfig
from tilth.core.errors import LogprobMismatch
from tilth.flows.weight_sync import SyncBounds, check_mismatch
from tilth.rl.metrics import Metric


def worst(value, count=1):
    return {"mismatch/max": Metric(value, count, "max")}


def test_bounds_by_precision_and_parity():
    assert SyncBounds.of(Recipe()) == SyncBounds(torch.float32, 1e-3)
    assert SyncBounds.of(Recipe(train=TrainConfig(precision="bf16"))) == SyncBounds(torch.bfloat16, 0.5)
    assert SyncBounds.of(Recipe(train=TrainConfig(mismatch=0.01))).mismatch == 0.01
    assert SyncBounds.of(Recipe(train=TrainConfig(parity=True))).mismatch == 0.0


def test_agreement_within_the_bound_passes():
    check_mismatch(worst(5e-4), SyncBounds(torch.float32, 1e-3), 0)
    check_mismatch({}, SyncBounds(torch.float32, 0.0), 0)
    check_mismatch(worst(0.0), SyncBounds(torch.float32, 0.0), 0)
    check_mismatch(worst(0.0, count=0), SyncBounds(torch.float32, 0.0), 0)


@pytest.mark.parametrize("value", [2e-3, float("inf"), float("nan")])
def test_disagreement_names_step_value_and_bound(value):
    with raises(LogprobMismatch, "train.mismatch"):
        check_mismatch(worst(value), SyncBounds(torch.float32, 1e-3), 4)


def test_in_parity_mode_the_smallest_difference_is_an_error():
    with pytest.raises(LogprobMismatch):
        check_mismatch(worst(1e-9), SyncBounds(torch.float32, 0.0), 0)
