"""Predicted working sets of divided models against bytes that torch has alive on each rank."""

import pytest

from tests.plan.divided import most_freed
from tests.plan.test_working import recipe_of, shape
from tilth.plan.layout import cut, place
from tilth.plan.working import training

ROWS = 32
WITHIN = 0.15
LAYOUTS = [
    ({"cp": 2}, {}),
    *(
        pytest.param(sizes, modes, marks=pytest.mark.slow)
        for sizes, modes in (
            ({"cp": 2}, {"cp_style": "ulysses"}),
            ({"pp": 2}, {}),
            ({"pp": 2}, {"schedule": "interleaved"}),
            ({"pp": 2}, {"schedule": "zero-bubble"}),
            ({"fsdp": 2}, {}),
            ({"fsdp": 2}, {"zero": 2}),
            ({"fsdp": 2, "pp": 2}, {}),
            ({"pp": 2, "cp": 2}, {}),
        )
    ),
]
KEYS = {"schedule": "pp_schedule"}


@pytest.mark.dist
@pytest.mark.parametrize(("sizes", "modes"), LAYOUTS, ids=str)
def test_a_step_of_each_rank_takes_what_was_predicted(pool, tmp_path, sizes, modes):
    """But for the allocator's slack, which the measure does not see."""
    config = shape(200, hidden_size=64, num_layers=8, tie_embeddings=False)
    ranks = 2 ** len(sizes)
    asked = {**sizes, **{KEYS.get(name, name): str(value).lower() for name, value in modes.items()}}
    keys = [f"policy.layout.{name}={value}" for name, value in asked.items()]
    recipe = recipe_of(ROWS, "train.micro_tokens=256", "cluster.backend=local", f"cluster.workers={ranks}", *keys)
    how = {"folder": tmp_path, "config": config, "sizes": sizes, "modes": modes, "rows": ROWS, "micro": 256}
    alive = pool.run(ranks, "tests.plan.divided:step", **how)
    placed = place(recipe)["policy"]
    for rank, measured in enumerate(alive):
        found = training(recipe, cut(recipe, "policy", placed, config, rank), 64)
        needed = sum(item.bytes for item in found if item.name != "slack of the allocator")
        assert needed == pytest.approx(measured, rel=WITHIN), [(item.name, item.bytes) for item in found]


def test_a_message_that_another_thread_frees_does_not_count_for_ever():
    sent = [(1, 100), (2, 30), (1, 100), (3, 7), (3, -7), (1, -100), (2, -30)]  # the first one of 100 is freed unseen
    assert most_freed(sent) == 137
    assert most_freed([(1, 100), (2, 30), (2, -30)]) == 30
