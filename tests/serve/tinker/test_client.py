"""Snapshots that the engine of a training service holds."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from tilth.config.schema import LoraConfig
from tilth.core.errors import CheckpointError
from tilth.serve.tinker.samplers import LIVE, TrainClient


def room(deleted=()):
    """A room without a worker, and the calls on it."""
    made, calls = object.__new__(TrainClient), []
    made._published, made._publishing = {}, asyncio.Lock()

    async def call(method, name, *more, idempotent=False):
        calls.append((method, name))

    def publish(name, folder, lora):
        if name in deleted:
            raise CheckpointError("gone", key="state")
        calls.append(("publish", name))

    made.call, made.group = call, SimpleNamespace(publish=publish)
    return made, calls


def publish(made, names, busy=()):
    async def all_of_them():
        for name in names:
            await made.publish(name, Path(name), LoraConfig(rank=2), busy)

    asyncio.run(all_of_them())


def test_the_snapshots_used_longest_ago_make_place_and_no_others():
    made, calls = room()
    names = [f"s{i}" for i in range(LIVE)]
    publish(made, [*names, "s0"])
    assert [name for method, name in calls if method == "retract"] == []
    publish(made, ["new", "newer"], busy={"s1"})
    assert [name for method, name in calls if method == "retract"] == ["s2", "s3"]


def test_a_snapshot_whose_files_are_deleted_does_not_keep_a_worker_from_starting_again():
    made, calls = room(deleted={"b"})
    publish(made, "abc")
    calls.clear()
    made.restore()
    assert calls == [("publish", "a"), ("publish", "c")] and list(made._published) == ["a", "c"]
