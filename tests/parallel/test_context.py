"""Context parallelism: attention over divided tokens beside brute force, and the training of a model with it."""

import pytest

pytestmark = pytest.mark.dist
ATTEND = "tests.parallel.attending:attend"
EXACT = 1e-11
AWKWARD = [1, 2, 3, 40, 5, 1, 17, 300]
CASES = [
    {"lengths": lengths, "heads": 4, "kv_heads": kv_heads, "window": window}
    for lengths in (AWKWARD, [1], [2, 1], [33])
    for kv_heads in (1, 2, 4)
    for window in (None, 1, 7, 64)
]


@pytest.mark.parametrize("style", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_that_of_one_rank(pool, style, ranks):
    for found in pool.run(ranks, ATTEND, ranks=ranks, style=style, cases=CASES):
        worst = [(max(far.values()), case) for far, case in zip(found, CASES)]
        assert max(worst, key=lambda one: one[0])[0] < EXACT, max(worst, key=lambda one: one[0])
