"""Tensor parallelism against the model on one device: loss and every gradient, and what is seen if a sum is missing."""

import pytest

HERE = "tests.parallel.divided:"


def worst(results: list[dict[str, float]]) -> tuple[float, str]:
    return max((far, f"{name} on rank {rank}") for rank, found in enumerate(results) for name, far in found.items())


FAMILIES = {
    "qwen3": {},
    "qwen2": {},
    "mistral": {"sliding_window": 3, "window_layers": (0,)},
    "llama": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
}


@pytest.mark.dist
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_one_device(pool, family, sp):
    found = pool.run(2, HERE + "compare", tp=2, sp=sp, family=family, changes=FAMILIES[family])
    assert worst(found) < (1e-11, "")
