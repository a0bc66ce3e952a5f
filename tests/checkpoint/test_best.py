"""Which checkpoint did best: written whole, read back, and spared when old ones go."""

import json

import pytest

from tests.errors import raises
from tilth.checkpoint import latest, mark_best, prune, read_best, record_best
from tilth.checkpoint.manifest import NAME
from tilth.core.errors import CheckpointError, StorageError

BEST = {"step": 5, "metric": "accuracy/heldout", "value": 0.5}


@pytest.fixture
def root(tmp_path):
    for step in (3, 5, 8, 13):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / NAME).write_text("{}")
    return tmp_path


def steps(root):
    return sorted(int(p.name[5:]) for p in root.glob("step-*"))


def test_what_was_marked_is_read_and_may_be_taken_back(root):
    assert read_best(root) is None and read_best(root / "none") is None
    mark_best(root, BEST)
    assert read_best(root) == BEST == json.loads((root / "best.json").read_text())
    mark_best(root, BEST | {"step": 8})
    assert read_best(root)["step"] == 8
    mark_best(root, None)
    assert read_best(root) is None and not list(root.glob("best*"))


@pytest.mark.parametrize("keep, left", [(1, [5, 13]), (2, [5, 8, 13]), (3, [5, 8, 13]), (9, [3, 5, 8, 13])])
def test_the_best_stays_beside_the_newest(root, keep, left):
    mark_best(root, BEST)
    prune(root, keep)
    assert steps(root) == left and latest(root).name == "step-000013"


def test_without_a_best_only_the_newest_stay(root):
    assert [p.name for p in prune(root, 2)] == ["step-000003", "step-000005"]


def test_a_best_that_is_gone_spares_no_other(root):
    mark_best(root, BEST | {"step": 4})
    prune(root, 1)
    assert steps(root) == [13]


def test_one_that_is_not_there_does_not_take_the_place_of_one_that_is(root):
    assert record_best(root, BEST) == BEST
    assert record_best(root, BEST | {"step": 7}) == BEST == read_best(root)  # the save of step 7 failed
    prune(root, 1)
    assert steps(root) == [5, 13]
    assert record_best(root, BEST | {"step": 13})["step"] == read_best(root)["step"] == 13
    assert record_best(root, None) is None is read_best(root)
    assert record_best(root, BEST | {"step": 7}) is None is read_best(root)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "5"}', "{}"])
def test_a_damaged_mark_is_told(root, text):
    key = "best.json" if text in ("", "{") else "best.json.step"
    (root / "best.json").write_text(text)
    with raises(CheckpointError, key):
        read_best(root)
    with raises(CheckpointError, key):
        prune(root, 1)
    assert steps(root) == [3, 5, 8, 13]  # nothing goes before it is known what must stay


def test_a_mark_that_cannot_be_written_leaves_the_one_before(root, monkeypatch):
    import tilth.checkpoint.directory as directory

    mark_best(root, BEST)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directory.os, "fsync", full)
    with raises(StorageError, "best.json"):
        mark_best(root, BEST | {"step": 8})
    assert read_best(root) == BEST
