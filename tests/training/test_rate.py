"""The rate of matrix products, the base of MFU."""

import pytest
import torch

from tilth.training import rate


@pytest.mark.parametrize(
    ("flops", "sizes"), [(1e9, [192]), (1e11, [192, 384, 768]), (3e10, [192, 384])], ids=["slow", "fast", "between"]
)
def test_products_grow_until_one_takes_long_enough(monkeypatch, flops, sizes):
    seen = []

    def took(work, device):
        seen.append(len(work.args[0]))
        return 2.0 * seen[-1] ** 3 / flops

    monkeypatch.setattr(rate, "_least_seconds", took)
    rate._measured_flops.cache_clear()
    assert rate.measured_flops(torch.device("cpu"), torch.float32) == pytest.approx(flops) and seen == sizes
    rate._measured_flops.cache_clear()
