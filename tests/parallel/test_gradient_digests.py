"""A gradient that changes between its backward pass and the optimizer, by the program or by a flipped bit."""

import pytest
import torch
from torch import nn

from tilth.parallel.checksums import GivenSums, GradientDigests


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(5, 3).to(torch.float32)


def backward(model):
    model(torch.randn(4, 5)).square().sum().backward()


@pytest.mark.parametrize("bit", [0, 11, 23, 30, 31])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_any_flipped_bit_is_seen_also_after_several_backward_passes(model, bit, name):
    digests = GradientDigests(model.named_parameters())
    assert digests.changed() == ""
    backward(model)
    backward(model)
    assert digests.changed() == ""
    backward(model)
    raw = dict(model.named_parameters())[name].grad.data.view(-1).view(torch.int32)
    raw[1] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digests.changed() == name
    assert digests.changed() == ""  # it is told once


@pytest.mark.parametrize("step, looks", [(0, True), (1, False), (4, False), (6, True)])
def test_only_every_third_step_is_looked_at(model, step, looks):
    digests, sums = GradientDigests(model.named_parameters(), every=3), GivenSums(None, every=3)
    digests.begin(step)
    sums.begin(step)
    backward(model)
    model.weight.grad.data[0, 0] += 1
    assert digests.changed() == ("weight" if looks else "")
    assert sums.looks == looks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_have_digests(model, dtype):
    model.to(dtype)
    digests = GradientDigests(model.named_parameters())
    model(torch.randn(4, 5, dtype=dtype)).sum().backward()
    model.weight.grad.data.view(torch.uint8)[0, 0] ^= 1
    assert digests.changed() == "weight"


def test_what_the_program_changes_is_none_of_its_business(model):
    digests = GradientDigests(model.named_parameters())
    backward(model)
    model.weight.grad.add_(1)  # as a sum over ranks
    model.bias.grad = model.bias.grad + 1
    assert digests.changed() == ""
