"""Snapshots in shared memory are whole checkpoints, or refused."""

import os

import pytest
import torch

from tests.errors import raises
from tilth.checkpoint import Group, copies, open_checkpoint
from tilth.checkpoint.copies import AtRest, Copies, _word_sum
from tilth.checkpoint.saver import MemorySaver, publish
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Layout, Mesh
from tilth.plan.layout import nested


def group(values):
    return Group(dict(values), {name: Layout.single(tuple(t.shape)) for name, t in values.items()})


@pytest.fixture
def state():
    return {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(5, dtype=torch.int64)}


def test_a_snapshot_holds_the_values_at_its_time(tmp_path, state):
    saver = MemorySaver()
    reports = saver.take(tmp_path, 0, {"policy": group(state)}, 0)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    state["a"].zero_()
    later = saver.take(tmp_path, 1, {"policy": group(state)}, 0)

    for slot, found, values in ((0, reports, expected), (1, later, state)):
        root = tmp_path / f"restored-{slot}"
        root.mkdir()
        path = publish(root, 7, [tmp_path / f"slot-{slot}"], found, {"progress": {"step": 7}}, Mesh.of({}))
        made = open_checkpoint(path)
        assert made.step == 7 and made.objects["progress"] == {"step": 7}
        for name, tensor in values.items():
            assert torch.equal(made.read("policy", name), tensor)


def test_a_slot_is_used_again_without_new_files(tmp_path, state):
    saver = MemorySaver()
    saver.take(tmp_path, 0, {"policy": group(state)}, 0)
    before = os.stat(tmp_path / "slot-0" / "policy.safetensors").st_ino
    saver.take(tmp_path, 0, {"policy": group(state)}, 0)
    assert os.stat(tmp_path / "slot-0" / "policy.safetensors").st_ino == before
    more = {**state, "c": torch.ones(2)}
    saver.take(tmp_path, 0, {"policy": group(more)}, 0)
    assert os.stat(tmp_path / "slot-0" / "policy.safetensors").st_ino != before


def test_a_flipped_bit_is_seen_when_it_is_read(tmp_path, state):
    reports = MemorySaver().take(tmp_path, 0, {"policy": group(state)}, 0)
    path = tmp_path / "slot-0" / "policy.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    root = tmp_path / "restored"
    root.mkdir()
    made = open_checkpoint(publish(root, 1, [tmp_path / "slot-0"], reports, {}, Mesh.of({})))
    with raises(CheckpointError, "policy/a.checksum"):
        made.verify()


def test_a_lost_file_is_no_checkpoint(tmp_path, state):
    reports = MemorySaver().take(tmp_path, 0, {"policy": group(state)}, 0)
    (tmp_path / "slot-0" / "policy.safetensors").unlink()
    root = tmp_path / "restored"
    root.mkdir()
    with raises(CheckpointError, "policy.safetensors.missing"):
        publish(root, 1, [tmp_path / "slot-0"], reports, {}, Mesh.of({}))
    assert not list(root.glob("step-*"))


def test_without_room_it_is_a_storage_error(tmp_path, state, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raises(StorageError, "snapshot"):
        MemorySaver().take(tmp_path, 0, {"policy": group(state)}, 0)


@pytest.mark.parametrize("name, byte, bit", [("a", 0, 0), ("a", 47, 7), ("b", 3, 5)])
def test_any_bit_that_changes_at_rest_is_found(state, name, byte, bit):
    state["a"] = torch.arange(24.0).view(4, 6)[:, ::2] if bit == 5 else state["a"]  # not contiguous
    groups, rest = {"policy": group(state)}, AtRest(Copies(0))
    assert rest.changed() == []
    rest.remember(groups)
    assert rest.changed() == []
    state[name].view(-1).view(torch.uint8)[byte] ^= 1 << bit
    assert rest.changed() == [f"policy/{name}"]
    with rest.changing(lambda: groups):
        state["a"] += 1
    assert rest.changed() == []
    state["a"] += 1
    assert rest.changed() == ["policy/a"]
    rest.forget()
    assert rest.changed() == []


def test_of_more_than_an_update_pays_for_some_tensors_are_looked_at_in_turn(monkeypatch):
    monkeypatch.setattr(copies, "LEAST", 64)
    state = {f"{i}": torch.zeros(16) for i in range(5)}
    groups, rest, found = {"policy": group(state)}, AtRest(Copies(0)), []
    for _ in range(5):
        rest.remember(groups, 0.0)
        for tensor in state.values():
            tensor += 1
        found += [rest.changed()]
    assert sorted(found) == [[f"policy/{i}"] for i in range(5)]
    rest.remember(groups, 1e9)
    state["3"] += 1
    assert rest.changed() == ["policy/3"]


def test_what_other_ranks_hold_too_is_left_to_the_comparison_of_copies(state):
    mesh = Mesh.of({"dp": 2})
    both = Group(dict(state), {name: nested(mesh, tuple(t.shape), {}) for name, t in state.items()})
    rest = AtRest(Copies(0))
    rest.remember({"policy": both})
    state["a"] += 1
    assert rest.changed() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_sum_of_a_device_without_xxh3_changes_with_any_bit(dtype):
    tensor = torch.arange(1, 14).to(dtype)
    before, words = int(_word_sum(tensor)), tensor.view(torch.uint8)
    assert int(_word_sum(torch.cat([tensor[:1], tensor])[1:])) == before  # not aligned to a word
    for place in range(len(words)):
        for bit in range(8):
            words[place] ^= 1 << bit
            assert int(_word_sum(tensor)) != before
            words[place] ^= 1 << bit
