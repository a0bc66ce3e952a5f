"""The log of an asynchronous run: whole up to its last commit whatever happens to its end, and repeated as it was."""

import json
import os
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import ArgumentError, DataError, StorageError, TokenCountError, TokenIdentityError
from tilth.core.trajectory import Trajectory, token_versions
from tilth.core.write_queue import WriteQueue, settle
from tilth.runs.directory import RunDir
from tilth.runs.events import EVENTS, KINDS, AsyncLog, Event, RunReplay, _line, committed_drops, read_events
from tilth.runs.identity import Identity
from tilth.runs.readers import read_state

MINE = ("first", "mine")


def log_at(folder, recipes=MINE, **how):
    return AsyncLog(folder / "log.jsonl", recipes, **how)


def event(kind, id, n=0):
    some = {"id": id, "group": id // 2, "prompt": n, "versions": [[3, n]], "length": 9, "checksum": n, "batch": n}
    some |= {"version": n, "reason": "stale", "tokens": n, "from": 0, "to": 1, "replica": n % 2, "opened": [5]}
    return {name: some[name] for name in KINDS[kind]}


def fill(log, count, seed=0):
    """Append random events, and return (kind, fields) of each."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        kind = rng.choice([*KINDS])
        id = log.number + 100 if kind in ("consume", "drop") else rng.randrange(20)
        made.append((kind, event(kind, id, rng.randrange(99))))
        log.append(kind, **made[-1][1])
    return made


def since(log, number=0):
    """Events of a log behind this number, commits left out."""
    settle(log.path)
    return [one for one in read_events(log.path, needed=number) if one.number > number and one.kind in KINDS]


def told(events):
    return [(one.kind, one.fields) for one in events]


# ---- what is appended ----


def test_events_come_back_in_order_with_their_numbers(tmp_path):
    log = log_at(tmp_path, queue=WriteQueue())
    assert [log.append("admit", **event("admit", i)) for i in range(3)] == [1, 2, 3]
    assert log.sync(1) == 4 and log.append("publish", version=1) == 5
    assert told(since(log)) == [*(("admit", event("admit", i)) for i in range(3)), ("publish", {"version": 1})]
    assert since(log, 2) == [Event(3, "admit", event("admit", 2)), Event(5, "publish", {"version": 1})]


@pytest.mark.parametrize("kind, fields", [("admit", {"id": 1}), ("drop", {"id": 1, "reason": "x", "why": 1})])
def test_an_event_with_other_fields_is_refused(tmp_path, kind, fields):
    log = log_at(tmp_path)
    with raises(ArgumentError, f"events.{kind}"):
        log.append(kind, **fields)
    with raises(ArgumentError, "events.eat"):
        log.append("eat", id=1)
    assert log.number == 0 and since(log) == []


@pytest.mark.parametrize("kind", ["consume", "drop"])
def test_a_trajectory_is_consumed_or_dropped_once(tmp_path, kind):
    log = log_at(tmp_path)
    log.append("consume", id=4, batch=1, checksum=7)
    number = log.sync(1)
    with raises(TokenCountError, "events.twice"):
        log.append(kind, **event(kind, 4))
    log.append("drop", id=5, reason="stale", tokens=None)
    again = log_at(tmp_path)
    again.cut(number)
    with raises(TokenCountError, "events.twice"):
        again.append(kind, **event(kind, 4))
    again.append(kind, **event(kind, 5))  # its drop was not committed


def test_threads_share_the_numbers(tmp_path):
    log = log_at(tmp_path, queue=WriteQueue())
    with ThreadPoolExecutor(8) as pool:
        numbers = [*pool.map(lambda i: log.append("admit", **event("admit", i)), range(200))]
    assert sorted(numbers) == [*range(1, 201)]
    assert [one.number for one in since(log)] == [*range(1, 201)]
    assert {one.fields["id"]: one.number for one in since(log)} == dict(enumerate(numbers))


def test_an_event_that_cannot_be_written_has_not_happened(tmp_path, monkeypatch):
    log = log_at(tmp_path)
    log.append("publish", version=1)
    with monkeypatch.context() as patch, raises(StorageError, "log.jsonl"):
        patch.setattr(log._lines, "_append", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        log.append("publish", version=2)
    assert log.append("publish", version=3) == 2
    assert told(since(log)) == [("publish", {"version": 1}), ("publish", {"version": 3})]


# ---- a resume ----


def test_an_old_log_takes_events_after_a_cut_only(tmp_path):
    log_at(tmp_path).append("publish", version=1)
    with pytest.raises(AssertionError):
        log_at(tmp_path).append("publish", version=2)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_cut_leaves_what_was_committed(tmp_path_factory, before, after, seed):
    folder = tmp_path_factory.mktemp("log")
    log = log_at(folder)
    first = fill(log, before, seed)
    number = log.sync(1)
    fill(log, after, seed + 1)
    again = log_at(folder)
    again.cut(number)
    assert told(since(again)) == first
    assert again.append("publish", version=5) == number + 1
    assert [one.number for one in read_events(log.path)] == [*range(number + 2)]


def test_drops_are_counted_by_reason_up_to_the_newest_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.runs.events._TAIL", 64)  # the commit is further from the end
    assert committed_drops(tmp_path) is None
    log = AsyncLog(tmp_path / EVENTS, MINE)
    assert committed_drops(tmp_path) == {}
    for i, (reason, tokens) in enumerate([("stale", 5), ("stale", None), ("end", 0), ('"kind": "commit"', None)]):
        log.append("drop", id=i, reason=reason, tokens=tokens)
    first, found = log.sync(1), {"stale": (2, 1, 5), "end": (1, 1, 0), '"kind": "commit"': (1, 0, 0)}
    assert committed_drops(tmp_path) == found
    log.append("drop", id=9, reason="end", tokens=3)
    assert committed_drops(tmp_path) == found  # the attempt may fall
    again = AsyncLog(tmp_path / EVENTS, MINE)
    again.cut(first)
    again.append("drop", id=9, reason="end", tokens=3)
    again.sync(2)
    assert committed_drops(tmp_path) == found | {"end": (2, 2, 3)}


def test_a_log_whose_commits_count_no_drops_says_nothing_of_them(tmp_path):
    log = AsyncLog(tmp_path / EVENTS, MINE)
    log.append("drop", id=1, reason="end", tokens=3)
    with log.path.open("a") as file:
        file.write(_line(Event(2, "commit", {"step": 1})) + "\n")
    assert committed_drops(tmp_path) is None


def test_a_cut_of_a_long_log_holds_little_of_it_and_writes_none_of_it_again(tmp_path):
    log = log_at(tmp_path)
    number = 8000
    with log.path.open("a") as file:
        for i in range(1, number):
            file.write(_line(Event(i, "consume", {"id": i, "batch": 1, "checksum": i})) + "\n")
    tail = [Event(number, "commit", {"step": 1}), Event(number + 1, "publish", {"version": 1})]
    with log.path.open("a") as file:
        file.writelines(_line(one) + "\n" for one in tail)
    before, size = log.path.stat(), log.path.stat().st_size
    again = log_at(tmp_path)
    tracemalloc.start()
    again.cut(number)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    after = log.path.stat()
    assert peak < size / 3 and after.st_ino == before.st_ino and after.st_size == size - len(_line(tail[1])) - 1
    with raises(TokenCountError, "events.twice"):
        again.append("drop", id=number - 1, reason="stale", tokens=None)
    assert again.append("publish", version=1) == number + 1


def test_a_cut_that_the_disk_refuses_leaves_the_log(tmp_path, monkeypatch):
    log = log_at(tmp_path)
    number = log.sync(1)
    fill(log, 3)
    data, again = log.path.read_bytes(), log_at(tmp_path)
    with monkeypatch.context() as patch, raises(StorageError, "log.jsonl"):
        patch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        again.cut(number)
    assert data.startswith(log.path.read_bytes())
    again.cut(number)
    assert since(again) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_torn_end_is_dropped_behind_the_commit_and_named_before_it(tmp_path, seed):
    rng = random.Random(seed)
    log = log_at(tmp_path)
    first = fill(log, 12, seed)
    number = log.sync(1)
    durable = log.path.stat().st_size
    fill(log, 12, seed + 100)
    os.truncate(log.path, place := rng.randrange(1, log.path.stat().st_size))
    again = log_at(tmp_path)
    if place < durable:
        with raises(DataError, "events.cut"):
            again.cut(number)
        return
    again.cut(number)
    assert told(since(again)) == first and log.path.stat().st_size == durable
    assert again.append("publish", version=1) == number + 1


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_byte_is_dropped_behind_the_commit_and_named_before_it(tmp_path, seed):
    log = log_at(tmp_path)
    first = fill(log, 6, seed)
    number = log.sync(1)
    durable = log.path.stat().st_size
    fill(log, 6, seed + 100)
    data = bytearray(log.path.read_bytes())
    place = random.Random(seed).randrange(len(data))
    data[place] ^= 1
    log.path.write_bytes(data)
    again = log_at(tmp_path)
    if place < durable:
        with raises(DataError, "events.cut"):
            again.cut(number)
        committed = place < data.rfind(b"\n", 0, durable - 1) + 1  # else the byte is one of the commit itself
        with raises(DataError, "events.cut") if committed else nullcontext():
            [*read_events(log.path)]
        return
    assert len([*read_events(log.path)]) > number
    again.cut(number)
    assert told(since(again)) == first


def test_a_line_that_is_missing_is_named(tmp_path):
    log = log_at(tmp_path)
    fill(log, 5)
    number = log.sync(1)
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with raises(DataError, "events.cut") as caught:
        log_at(tmp_path).cut(number)
    assert "line 4" in str(caught.value)


def test_before_the_first_commit_nothing_counts(tmp_path):
    log = log_at(tmp_path)
    fill(log, 3)
    for left in (0, 10, 200):
        os.truncate(log.path, left)
        again = log_at(tmp_path)
        again.cut(0)
        assert since(again) == [] and again.append("publish", version=1) == 1


def test_a_run_that_has_changed_goes_on_and_another_run_does_not(tmp_path):
    log = log_at(tmp_path)
    number = log.sync(1)
    AsyncLog(log.path, ["mine", "changed as allowed"]).cut(number)
    with raises(DataError, "events.recipe"):
        AsyncLog(log.path, ["yours"]).cut(number)
    with raises(DataError, "events.recipe"):
        RunReplay(log.path, ["yours"])


def test_another_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tilth.runs.events.FORMAT", 2)
        number = log_at(tmp_path).sync(1)
    with raises(DataError, "events.format"):
        log_at(tmp_path).cut(number)


# ---- a replay ----


def played(folder, seed, steps=4, batch=3, **how):
    """Write the log of a made-up run; return it with its batches, and its trajectories by id."""
    rng, log = random.Random(seed), log_at(folder, **how)
    batches, every = [], {}
    for step in range(1, steps + 1):
        for _ in range(batch + 1):
            every[i] = made(i := len(every), rng, step)
            log.append("admit", id=i, group=i // 2, prompt=i * 10)
        open_ = [i for i in every if not any(i in some for some in batches)]
        batches.append(rng.sample(open_, batch))
        for i in batches[-1]:
            t = every[i]
            facts = {"versions": t.versions, "opened": t.opened, "length": len(t.tokens)}
            log.append("finish", id=i, checksum=i + 100, **facts)
        for i in batches[-1]:
            log.append("consume", id=i, batch=step, checksum=i + 100)
        log.append("publish", version=step)
        log.sync(step)
    return log, batches, every


def made(i, rng, version):
    """Return a trajectory whose tokens several versions drew."""
    start, length = rng.randrange(1, 5), rng.randrange(6, 20)
    cuts = sorted({start, *rng.sample(range(start, length), rng.randrange(3))})
    mask = (np.arange(length) >= start).astype(np.uint8)
    spans = [(cut, version + n) for n, cut in enumerate(cuts)]
    return Trajectory(i, i * 10, i // 2, np.zeros(length, np.int64), mask, np.zeros(length, np.float32), versions=spans)


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_tells_batches_and_who_drew_each_token(tmp_path, seed):
    log, batches, every = played(tmp_path, seed)
    fill(log, 5)  # of a step that was not committed
    replay = RunReplay(log.path, MINE)
    assert replay.steps == 4 and [[part.id for part in replay.batch(step)] for step in range(1, 5)] == batches
    drawn = {i: [] for some in batches for i in some}
    for version in range(1, 9):
        for part in replay.parts(version):
            t, before = every[part.id], drawn[part.id]
            assert (part.prompt, part.group, part.version) == (t.prompt, t.group, version)
            before.append(part)
    for i, parts in drawn.items():
        stops = [every[i].prompt_length, *(part.stops.get(0, len(every[i].tokens)) for part in parts)]
        versions = np.repeat([0, *(part.version for part in parts)], np.diff(stops, prepend=0))
        assert versions.tolist() == token_versions([every[i]]).tolist()
        assert [bool(part.stops) for part in parts] == [True] * (len(parts) - 1) + [False]
    for after in range(5):
        left = {i for some in batches[after:] for i in some}
        wanted = {version: {p.id for p in replay.parts(version)} & left for version in range(1, 9)}
        assert {version: {p.id for p in replay.parts(version, after)} for version in range(1, 9)} == wanted
        below = replay.lowest(after)
        assert below == min((every[i].group for i in left), default=below) and (left or below > max(every) // 2)


def test_conversations_of_an_episode_stop_each_in_its_own_place(tmp_path):
    """The second one begins under a later version than the first one, and ends before it."""
    log, spans = log_at(tmp_path), [(3, 1), (8, 2), (12, 4), (23, 2), (27, 3), (34, 4)]
    log.append("admit", id=6, group=6, prompt=2)
    log.append("finish", id=6, versions=spans, opened=[20, 30], length=40, checksum=5)
    log.append("consume", id=6, batch=1, checksum=5)
    log.append("admit", id=7, group=6, prompt=2)
    log.append("finish", id=7, versions=[], opened=[], length=1, checksum=5)
    log.append("consume", id=7, batch=1, checksum=5)
    log.sync(1)
    replay = RunReplay(log.path)
    stops = {version: part.stops for version in range(9) for part in replay.parts(version)}
    assert stops == {1: {0: 8, 1: 3, 2: 4}, 2: {0: 12, 1: 7, 2: 4}, 3: {0: 12, 2: 4}, 4: {}}
    assert [(part.id, part.version, part.stops) for part in replay.batch(1)] == [(6, 4, {}), (7, -1, {})]


def test_a_step_that_was_not_committed_is_not_replayed(tmp_path):
    log, _, _ = played(tmp_path, 0)
    replay = RunReplay(log.path)
    for step in (0, 5):
        with raises(DataError, "replay.step"):
            replay.batch(step)


def test_a_trajectory_that_was_consumed_without_its_end_is_named(tmp_path):
    log = log_at(tmp_path)
    log.append("consume", id=3, batch=1, checksum=1)
    log.sync(1)
    with raises(DataError, "events.order"):
        RunReplay(log.path)


# ---- a run that is replayed ----


def identity(folder, **sections):
    return Identity(tiny.recipe(folder, **sections), {"data": "data1"})


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has committed four steps."""
    who = identity(tmp_path)
    with RunDir.create(who.recipe, "demo", who.inputs) as directory:
        log, *_ = played(directory.path, 1, recipes=[directory.digest])
        for step in range(1, 5):
            directory.commit_step({"step": step})
    log.path.rename(directory.path / EVENTS)
    return directory.path


def test_a_run_is_replayed_by_its_own_recipe_on_any_workers(tmp_path, run):
    assert RunReplay.of(run, identity(tmp_path)).steps == 4
    elsewhere = {"cluster": {"workers": 2, "backend": "local"}, "run": {"name": "again"}, "guard": {"restarts": 0}}
    assert RunReplay.of(run, identity(tmp_path, **elsewhere)).name == f"{run.resolve()} to step 4"


@pytest.mark.parametrize("sections", [{"seed": 9}, {"optimizer": {"lr": 1.0}}, {"policy": {"layout": {"fsdp": 2}}}])
def test_another_recipe_does_not_replay_it(tmp_path, run, sections):
    more = {"cluster": {"workers": 2, "backend": "local"}} if "policy" in sections else {}
    with raises(DataError, "events.recipe"):
        RunReplay.of(run, identity(tmp_path, **sections, **more))
    with raises(DataError, "events.recipe"):
        RunReplay.of(run, Identity(tiny.recipe(tmp_path), {"data": "data2"}))


def test_drafts_that_round_by_their_timing_are_not_replayed(tmp_path, run):
    drafts = {"rollout": {"speculate": "suffix"}}
    with raises(DataError, "rollout.speculate"):
        RunReplay.of(run, identity(tmp_path, **drafts))
    with raises(DataError, "events.recipe"):  # in parity they change no bit
        RunReplay.of(run, identity(tmp_path, **drafts, train={"parity": True}))


def test_a_run_with_two_recipes_is_not_replayed(tmp_path, run):
    state = read_state(run)
    (run / "run.json").write_text(json.dumps({**state, "digests": ["other", *state["digests"]]}))
    with raises(DataError, "events.recipe"):
        RunReplay.of(run, identity(tmp_path))


def test_a_run_without_a_log_or_with_a_part_of_it_is_not_replayed(tmp_path, run):
    lines = (run / EVENTS).read_text().splitlines(keepends=True)
    (run / EVENTS).write_text("".join(lines[:-1]))  # a commit is missing
    with raises(DataError, "events.cut"):
        RunReplay.of(run, identity(tmp_path))
    (run / EVENTS).unlink()
    with raises(DataError, "--replay"):
        RunReplay.of(run, identity(tmp_path))
    with raises(DataError, "run.json"):
        RunReplay.of(tmp_path, identity(tmp_path))


# ---- the run that repeats it ----


def again(folder, log):
    (folder / "again").mkdir()
    return log_at(folder / "again", replay=RunReplay(log.path))


def test_a_run_that_repeats_is_told_apart_from_one_that_does_not(tmp_path):
    log, *_ = played(tmp_path, 1)
    (tmp_path / "again").mkdir()
    other, *_ = played(tmp_path / "again", 1, replay=RunReplay(log.path))
    assert other.path.read_bytes() == log.path.read_bytes()


@pytest.mark.parametrize("change", [{"checksum": 5}, {"id": 77}, {"batch": 2}])
def test_another_trajectory_is_an_error_before_it_is_consumed(tmp_path, change):
    log, batches, _ = played(tmp_path, 1)
    other, first = again(tmp_path, log), batches[0][0]
    with raises(TokenIdentityError, "replay.trajectory"):
        other.append("consume", **{"id": first, "batch": 1, "checksum": first + 100, **change})
    assert since(other) == []
    other.append("consume", id=first, batch=1, checksum=first + 100)


def test_another_order_or_a_step_that_learns_from_fewer_is_an_error(tmp_path):
    log, batches, _ = played(tmp_path, 1)
    other, (first, second, _), next_ = again(tmp_path, log), batches[0], batches[1][0]
    with raises(TokenIdentityError, "replay.trajectory"):
        other.append("consume", id=second, batch=1, checksum=second + 100)
    other.append("consume", id=first, batch=1, checksum=first + 100)
    with raises(TokenIdentityError, "replay.trajectory"):
        other.sync(1)
    other.cut(0)  # the step begins again
    for i in batches[0]:
        other.append("consume", id=i, batch=1, checksum=i + 100)
    assert other.sync(1) == 4
    with raises(TokenIdentityError, "replay.trajectory"):
        other.append("consume", id=next_, batch=1, checksum=next_ + 100)
    other.append("consume", id=next_, batch=2, checksum=next_ + 100)


def test_lines_are_json(tmp_path):
    log = log_at(tmp_path)
    log.append("drop", id=3, reason='ends in ", "sum": 5}', tokens=4)
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert rows[0]["recipe"] == "mine" and rows[1]["reason"] == since(log)[0].fields["reason"]
