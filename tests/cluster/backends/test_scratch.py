"""Files that travel between the scratch folders of nodes: whole and equal, or not there."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.cluster.backends import ray_actors as scratch
from tilth.cluster.backends.ray_actors import Scratch
from tilth.core.errors import StorageError


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "PIECE", 7)
    made = Scratch(tmp_path / "a"), Scratch(tmp_path / "b")
    for one in made:
        one.folder.mkdir()
    return made


def files(one):
    return {str(p.relative_to(one.folder)): p.read_bytes() for p in one.folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("size", [0, 1, 7, 8, 21, 100])
def test_a_copy_has_all_bytes(two, size):
    ours, theirs = two
    theirs.make("slot-0", {"x": os.urandom(size)}, {})
    assert ours.copy("slot-0/x", theirs.read) == size
    assert files(ours) == files(theirs)


@pytest.mark.parametrize("harm", ["bit", "short", "full"])
def test_what_changes_on_the_way_is_no_copy_and_leaves_the_one_before(two, harm, monkeypatch):
    ours, theirs = two
    theirs.make("slot-0", {"x": bytes(50)}, {})
    ours.make("slot-0", {"x": b"before"}, {})

    def read(name, offset):
        data, checksum, size = theirs.read(name, offset)
        if offset >= 14 and harm == "bit":
            data = np.bitwise_xor(data, 1)
        if offset >= 14 and harm == "short":
            return theirs.read(name, size)
        if offset >= 14 and harm == "full":
            raise OSError(28, "No space left on device")
        return data, checksum, size

    with raises(StorageError, "snapshot"):
        ours.copy("slot-0/x", read)
    assert files(ours) == {"slot-0/x": b"before"}


NAMES = st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=20))


@given(st.lists(NAMES, max_size=4))
def test_a_mirror_is_what_the_other_node_has(tmp_path_factory, states):
    folder = tmp_path_factory.mktemp("nodes")
    ours, theirs = Scratch(folder / "a"), Scratch(folder / "b")
    for state in states:
        theirs.make("rows", state, {})
        expected = files(theirs)
        ours.follow("rows", theirs.listing("rows"), theirs.read)
        assert files(ours) == expected
        assert ours.follow("rows", theirs.listing("rows"), theirs.read) == 0  # nothing is new


def test_links_are_the_files_of_a_slot(two):
    ours, _ = two
    ours.make("slot-1", {"x": b"state"}, {})
    ours.make("restored/step-000001", {"manifest.json": b"{}"}, {"x": "slot-1/x"})
    assert (ours.folder / "restored/step-000001/x").samefile(ours.folder / "slot-1/x")
    ours.remove("restored")
    assert files(ours) == {"slot-1/x": b"state"}
