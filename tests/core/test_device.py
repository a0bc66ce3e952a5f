"""Copies between host and device; those of a GPU are in ``tests/gpu_free``."""

import numpy as np
import torch

from tilth.core.device import to_device, to_host

CPU = torch.device("cpu")


def test_on_a_cpu_nothing_is_copied():
    array = np.arange(6.0).reshape(2, 3)
    (tensor,) = to_device([array], CPU)
    (back,) = to_host([tensor])
    array[1, 2] = 7
    assert tensor[1, 2] == back[1, 2] == 7


def test_arrays_that_are_not_contiguous_are_copied():
    (tensor,) = to_device([np.arange(6)[::-2]], CPU)
    assert tensor.tolist() == [5, 3, 1]
