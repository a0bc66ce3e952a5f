"""The benchmark of packing: each method keeps or counts every token, and ours crops none."""

import numpy as np
import pytest

from tests.scripts import script

LENGTHS = np.minimum(np.random.default_rng(0).lognormal(7.5, 1.2, 512), 60_000).astype(np.int64) + 1


def squares(lengths):
    return np.asarray(lengths, np.float64) ** 2


@pytest.fixture(scope="module")
def made():
    """The benchmark with a small buffer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script("packing.py"), "BUFFER", 50)
        yield script("packing.py")


@pytest.fixture(scope="module")
def found(made):
    rows = list(made.compare("drawn", [LENGTHS], squares))
    return made, {row["method"]: row for row in rows}


def test_every_token_is_kept_or_counted(made):
    for name, pack in made.methods(squares).items():
        packed = pack(LENGTHS)
        kept = packed.loads(lambda n: n).sum()
        if name != "nanochat":  # its documents come again
            assert kept + packed.cropped + packed.waiting == pytest.approx(LENGTHS.sum()), name


def test_ours_crops_pads_and_exceeds_nothing_and_is_even(found):
    made, rows = found
    assert LENGTHS.max() > made.CAPACITY
    for name in ("tilth none", "tilth tokens", "tilth cost"):
        assert rows[name]["cropped"] == rows[name]["padding"] == rows[name]["broken"] == rows[name]["above"] == 0
    assert rows["tilth tokens"]["spread_tokens"] < 0.02 and rows["tilth cost"]["spread_squares"] < 0.02
    assert rows["tilth none"]["spread_squares"] > 0.1


def test_others_do_as_they_document(found):
    _, rows = found
    assert rows["trl bfd"]["cropped"] > 0 and rows["trl wrapped"]["broken"] > 0
    assert rows["nanochat"]["cropped"] > 0 == rows["nanochat"]["padding"]
    assert rows["verl workload"]["spread_squares"] < rows["verl tokens"]["spread_squares"]
    assert rows["longest"]["spread_squares"] > 0.1  # one long sequence on one rank
