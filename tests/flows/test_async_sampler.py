"""Runs whose samples may be behind: within the bound, each once, with the tokens that their versions draw."""

import shutil
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_episodes import Falls
from tests.flows.test_resume import kill_and_resume
from tilth.checkpoint import latest, open_checkpoint
from tilth.cluster.controller.lazy import LazyBatch
from tilth.core.errors import PluginError, RecipeError
from tilth.data.trajectories import read_trajectories
from tilth.engines.protocol import EngineError
from tilth.flows.async_sampler import FLYING, AsyncSampler
from tilth.flows.ledger import SampleGroup
from tilth.flows.replicas import Replicas
from tilth.launch.life import _roll_back
from tilth.rewards.process_pool import RewardPool
from tilth.runs.events import EVENTS, RunReplay, read_events
from tilth.runs.readers import read_metrics, summarise
from tilth.runs.state import Intervals, RunState
from tilth.ui.format import behind

TIMED = ("fully_async/buffer", "fully_async/trainer", "fully_async/rollouter")
"""Metrics that depend on a clock."""


def recipe(folder, staleness=1, **sections):
    """Completions of up to 40 tokens, five rounds of the inline backend, so that updates come while they grow."""
    sections = {k: dict(v) if isinstance(v, dict) else v for k, v in sections.items()}
    how = {"staleness": staleness, "max_tokens": 40, "group": 2, "max_rows": 16}
    sections["rollout"] = {**how, **sections.get("rollout", {})}
    sections["model"] = {"context": 48, **sections.get("model", {})}
    sections["supervised"] = {"steps": 0}
    return tiny.recipe(folder, **sections)


def rows(result):
    return {row["id"]: row for row in read_trajectories(result.directory).to_pylist()}


def state(result):
    """What the newest checkpoint has of the controller."""
    return RunState(**open_checkpoint(latest(result.directory / "checkpoints")).objects["progress"])


def members(pairs):
    return {i for start, stop in pairs for i in range(start, stop)}


def numbers(result):
    return [{k: v for k, v in r.items() if not k.startswith(TIMED)} for r in tiny.numbers(result.directory)]


def check_once(result, steps, prompts=6, group=2):
    """Each step has whole groups, each sample once, and the books know of each what has become of it."""
    found, books = read_trajectories(result.directory).to_pylist(), state(result)
    assert len({row["id"] for row in found}) == len(found)
    assert Counter(row["step"] for row in found) == dict.fromkeys(range(1, steps + 1), prompts * group)
    where = {}
    for row in found:
        where.setdefault(row["group"], []).append(row["step"])
    assert all(len(seen) == group and len(set(seen)) == 1 for seen in where.values())
    consumed, dropped = members(books.consumed), members(books.dropped)
    assert consumed == {row["id"] for row in found} and consumed.isdisjoint(dropped)
    assert consumed | dropped == members(books.admitted) and not books.flying


@pytest.mark.parametrize(
    ("staleness", "order"),
    [
        pytest.param(1, "fifo", marks=pytest.mark.slow),
        (3, "fresh"),
        pytest.param("free", "fifo", marks=pytest.mark.slow),
    ],
)
def test_samples_are_within_the_bound_and_consumed_once(tmp_path, staleness, order):
    result = tiny.run(recipe(tmp_path, staleness, rollout={"order": order}))
    check_once(result, 6)
    records = read_metrics(result.directory)
    behind = [record["staleness/max"] for record in records]
    assert max(behind) > 0 and (staleness == "free" or max(behind) <= staleness)
    assert any(record["fully_async/partial/partial_ratio"] > 0 for record in records)
    for i, record in enumerate(records):
        limit = 12 * (min(i + (2 if staleness == "free" else staleness + 1), 6))
        assert record["samples/begun"] <= limit and record["samples"] == record["samples/consumed"] == 12
    found = summarise(result.directory)["generation"]
    assert found["samples/admitted"] == found["samples/finished"] == 72 and found["samples/moved"] == 0
    assert 0 < found["kv_cache_usage/mean"] < found["kv_cache_usage/max"] <= 1
    ages = summarise(result.directory)["behind"]
    chosen = sum(sum(row["mask"]) for row in rows(result).values())
    assert ages["max"] == max(behind) and sum(ages["tokens"].values()) == chosen
    assert ages["samples"] == {"finished": 72, "consumed": 72, "dropped": 0} and ages["dropped"] == {}
    assert ages["lengths"]["finished"] == pytest.approx(ages["lengths"]["consumed"])


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_run(tmp_path):
    """The inline backend counts its rounds, so no clock has a say in what is behind."""
    one, other = (tiny.run(recipe(tmp_path, 2, algorithm={"steps": 3}), name=name) for name in ("one", "other"))
    assert tiny.same(numbers(one), numbers(other)) and tiny.weights(one.directory) == tiny.weights(other.directory)


def test_under_weights_that_stay_samples_are_those_of_a_synchronous_run(tmp_path, monkeypatch):
    """Also those that were set aside for an evaluation, whatever was in flight beside them; each reward is computed
    once, those of samples that were scored ahead too."""
    asked, plain = Counter(), RewardPool.score

    def score(pool, items, known=None):
        asked.update(item[0] for item in items if item[0] not in (known or {}))
        return plain(pool, items, known)

    still = {"optimizer": {"lr": 0.0}, "train": {"parity": True}, "algorithm": {"steps": 3}, "run": {"eval_every": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(RewardPool, "score", score)
        behind = rows(tiny.run(recipe(tmp_path, 2, **still), name="behind"))
    assert {asked.pop(i) for i in [*asked] if i < 0} == {4} and asked == dict.fromkeys(behind, 1)
    exact = rows(tiny.run(recipe(tmp_path, 0, **still), name="exact"))
    assert behind.keys() == exact.keys() and len(behind) == 36
    for i, row in behind.items():
        for name in ("tokens", "logprobs", "reward", "finish", "prompt"):
            assert row[name] == exact[i][name], name


@pytest.fixture(scope="module")
def fell(tmp_path_factory):
    """The folder of a run that fell after step 5."""
    folder = tmp_path_factory.mktemp("fell")
    with pytest.raises(PluginError):
        tiny.run(recipe(folder, 2, run={"save_every": 2}), name="run", callbacks=[Falls(5)])
    return folder


@pytest.fixture
def fallen(fell, tmp_path):
    """A copy of it, and the groups that its checkpoint has in flight."""
    shutil.copytree(fell, tmp_path, dirs_exist_ok=True)
    (found,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    return state(SimpleNamespace(directory=found)).flying


@pytest.fixture(scope="module")
def resumed(fell, tmp_path_factory):
    """That run, gone on with."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(fell, folder, dirs_exist_ok=True)
    return tiny.run(recipe(folder, 2, run={"save_every": 2}), name="run")


def test_a_run_that_falls_asks_again_for_what_was_in_flight(resumed):
    result = resumed
    check_once(result, 6)
    assert max(record["staleness/max"] for record in read_metrics(result.directory)) <= 2
    check_resumed(result, flying={i for i, row in rows(result).items() if row["step"] > 4})
    assert not [*(result.directory / FLYING).glob("*.bin")]


def check_resumed(result, flying):
    """Some of the samples that were in flight have gone on, with the tokens of versions before."""
    log = [*read_events(result.directory / EVENTS)]
    found = {e.fields["id"]: e.fields for e in log if e.kind == "resume"}
    ends = {e.fields["id"]: e.fields["versions"] for e in log if e.kind == "finish"}
    assert found.keys() <= flying and sum(ends[i][0][1] < one["version"] for i, one in found.items()) > 2
    assert sum(record["samples/resumed"] for record in read_metrics(result.directory)) == len(found)
    for i, one in found.items():
        begun, now = ends[i][0][0] + one["tokens"], one["version"]
        assert one["tokens"] and all(version <= now if at < begun else version >= now for at, version in ends[i]), i


@pytest.mark.slow
def test_after_a_fall_samples_say_what_they_would_have_said(tmp_path):
    """Under weights that stay, in parity mode: those of which tokens were kept, and all others."""
    still = {"optimizer": {"lr": 0.0}, "train": {"parity": True}, "algorithm": {"steps": 8}, "run": {"save_every": 2}}
    exact = rows(tiny.run(recipe(tmp_path, 0, **still), name="exact"))
    with pytest.raises(PluginError):
        tiny.run(recipe(tmp_path, 2, **still), name="run", callbacks=[Falls(5)])
    result = tiny.run(recipe(tmp_path, 2, **still), name="run")
    assert sum(record["samples/resumed"] for record in read_metrics(result.directory)) > 10
    for i, row in rows(result).items():
        for name in ("tokens", "logprobs", "reward", "finish", "prompt"):
            assert row[name] == exact[i][name], name


def left_out(result, flying):
    """Reasons for which the samples of these groups were dropped."""
    ids, dropped = {i for first, size, *_ in flying for i in range(first, first + size)}, state(result).dropped
    assert ids and ids.isdisjoint(rows(result)) and all(i in Intervals(dropped) for i in ids)
    return {e.fields["reason"] for e in read_events(result.directory / EVENTS) if e.kind == "drop"}


def test_what_was_in_flight_over_data_that_changed_is_dropped(tmp_path, fallen):
    """Also by the attempt after the one that brought the change, which has saved nothing."""
    made = recipe(tmp_path, 2, run={"save_every": 2}, data={"holdout": 0.3})
    with pytest.raises(PluginError):
        tiny.run(made, name="run", allow=["data.holdout"], callbacks=[Falls(5)])
    result = tiny.run(made, name="run")
    check_once(result, 6)
    assert left_out(result, fallen) == {"recipe"}
    lost, found = sum(size for _, size, *_ in fallen), summarise(result.directory)["behind"]
    assert found["dropped"] == {"recipe": lost} and found["samples"]["dropped"] == lost


def test_what_a_shorter_recipe_has_no_room_for_is_counted_as_dropped(tmp_path, fallen):
    """At the end of the run it is in no record of a step."""
    made = recipe(tmp_path, 2, run={"save_every": 2}, algorithm={"steps": 5})
    result = tiny.run(made, name="run", allow=["algorithm.steps"])
    gone = [e for e in read_events(result.directory / EVENTS) if e.kind == "drop"]
    assert gone and {e.fields["reason"] for e in gone} == {"recipe"}
    found = summarise(result.directory)["behind"]
    assert found["dropped"] == {"recipe": len(gone)} and found["samples"]["dropped"] == len(gone)
    assert found["lengths"]["dropped"] is None  # none of them had ended
    assert f"({len(gone)} recipe)" in dict(behind(found))["samples"]


def test_lengths_of_what_was_dropped_are_of_samples_that_had_ended(tmp_path, own_loop):
    def stops_early(run):
        for _ in run.experience(group=2):
            if run.state.step == 1:
                break
            run.sync_weights(run.policy)
        run.sampler.leave()

    own_loop(stops_early)
    result = tiny.run(recipe(tmp_path, 2))
    gone = [e.fields for e in read_events(result.directory / EVENTS) if e.kind == "drop"]
    ended = [one["tokens"] for one in gone if one["tokens"] is not None]
    found = summarise(result.directory)["behind"]
    assert found["dropped"] == {"end": len(gone)} and len(gone) > len(ended)
    assert found["lengths"]["dropped"] == (pytest.approx(sum(ended) / len(ended)) if ended else None)


@pytest.mark.slow
def test_a_run_that_goes_back_drops_what_was_in_flight_then(tmp_path, fallen):
    class Back(tiny.Recorder):
        def on_run_start(self, run):
            _roll_back(run, run.sampler.position(), lambda: None)

    result = tiny.run(recipe(tmp_path, 2, run={"save_every": 2}), name="run", callbacks=[Back()])
    check_once(result, 6)
    assert left_out(result, fallen) == {"rollback"}


@pytest.mark.parametrize(
    ("flow", "more"),
    [
        ("dapo", {"algorithm": {"advantage": "grpo", "refill": 4, "steps": 3}}),
        pytest.param("remax", {"algorithm": {"advantage": "remax", "steps": 3}}, marks=pytest.mark.slow),
        pytest.param("ppo", {"algorithm": {"advantage": "gae", "steps": 3}}, marks=pytest.mark.slow),
        pytest.param("vapo", {"algorithm": {"advantage": "vapo"}, "critic": {"steps": 2}}, marks=pytest.mark.slow),
    ],
)
def test_other_flows_learn_from_samples_that_are_behind(tmp_path, flow, more):
    """Dynamic sampling, greedy baselines, a critic, and a phase before."""
    made = recipe(tmp_path, 1, flow=flow, **more)
    result = tiny.run(made)
    books, found = state(result), rows(result)
    consumed, dropped = members(books.consumed), members(books.dropped)
    assert consumed.isdisjoint(dropped)
    assert consumed | dropped == members(books.admitted) and not books.flying
    assert consumed <= set(found) and len(found) >= made.algorithm.steps * 12
    if flow != "dapo":
        assert not dropped


def loop(run, sync=True, rounds=None, group=2):
    """A loop of a user's own. rounds: a count of them: the engines generate in a block around the update."""
    seen = []
    for batch in run.experience(group=group):
        batch = run.policy.advantages(run.logprobs(batch), run.algo)
        with run.generating() if rounds is not None else nullcontext():
            seen.append(0 if rounds is None else rounds())
            run.log_update(run.policy.update(batch, run.algo))
        if sync:
            run.sync_weights(run.policy)
        seen.append(0 if rounds is None else rounds())
    return seen


@pytest.fixture
def own_loop(monkeypatch):
    """Run a loop of the test's own."""

    def use(how):
        monkeypatch.setattr("tilth.launch.life.policy_gradient", how)

    return use


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_loop_may_hold_generation_to_a_block(tmp_path, own_loop, monkeypatch, staleness):
    """From the second step on there are rounds in the block and where the loop waits; synchronously it does nothing."""
    done, seen, plain = [], [], Replicas._round
    monkeypatch.setattr(Replicas, "_round", lambda self: (done.append(self._holds), plain(self)))
    own_loop(lambda run: seen.extend(loop(run, rounds=lambda: len(done))))
    result = tiny.run(recipe(tmp_path, staleness, algorithm={"steps": 3}))
    assert Counter(row["step"] for row in rows(result).values()) == dict.fromkeys(range(1, 4), 12)
    assert len(seen) == 6 and not any(done)
    assert all(inside == after for inside, after in zip(seen[::2], seen[1::2]))
    assert (seen[-1] > seen[0] > 0) if staleness else not done


@pytest.mark.slow
def test_a_loop_may_ask_for_groups_of_another_size_than_the_recipe_s(tmp_path, own_loop):
    own_loop(lambda run: loop(run, group=3))
    result = tiny.run(recipe(tmp_path, 1, run={"eval_every": 0}, algorithm={"steps": 3}))
    check_once(result, 3, group=3)


def test_a_group_that_was_dropped_in_flight_leaves_no_payload(tmp_path, own_loop):
    def drops(run):
        for batch in run.experience(group=2):
            run.log_update(run.policy.update(run.policy.advantages(run.logprobs(batch), run.algo), run.algo))
            run.sync_weights(run.policy)
            sampler = run.sampler
            flying = [first for first in sampler.ledger.open if first not in sampler._flights]
            leases = {sampler._leases[first].key for first in flying}
            sampler._drop(flying, "stale")
            sampler.leave()
            assert leases and leases.isdisjoint(run.store._open)
            raise PluginError("seen", key="seen")

    own_loop(drops)
    with raises(PluginError, "seen"):
        tiny.run(recipe(tmp_path, 1, run={"eval_every": 0}))


def test_prompts_of_all_groups_are_sent_before_one_is_waited_for():
    seen, flights = [], []

    def encode(row, **then):
        first = int(row["id"][0])
        seen.append(("sent", first, *then))
        return LazyBatch(lambda: seen.append(("waited", first)) or row)

    given = {
        "events": SimpleNamespace(append=lambda *_, **__: None),
        "store": SimpleNamespace(lease=str, under=lambda lease: nullcontext()),
        "_load": encode,
        "then": lambda: {"then": [7]},
    }
    one = SimpleNamespace(
        _attempt=1, _publisher=None, _leases={}, _replicas=lambda: SimpleNamespace(submit=flights.append), **given
    )
    AsyncSampler._send(one, [SampleGroup(first, 2, 5, 0) for first in (0, 2, 4)])
    assert seen == [("sent", 0), ("sent", 2), ("sent", 4, "then"), ("waited", 0), ("waited", 2), ("waited", 4)]
    assert [(one.first, one.lease) for one in flights] == [(0, "group 0"), (2, "group 2"), (4, "group 4")]


def test_a_loop_that_syncs_no_weights_is_named(tmp_path, own_loop):
    own_loop(lambda run: loop(run, sync=False))
    with raises(EngineError, "rollout.staleness.sync"):
        tiny.run(recipe(tmp_path, 1, run={"eval_every": 0}))


@pytest.mark.parametrize("advantage", ["gae", "reinforce_pp", "reinforce_pp_baseline", "gdpo"])
def test_moments_over_any_number_of_versions_are_refused(tmp_path, advantage):
    flow = "ppo" if advantage == "gae" else "grpo"
    with raises(RecipeError, "algorithm.advantage.staleness"):
        tiny.run(recipe(tmp_path, "free", flow=flow, algorithm={"advantage": advantage}))


def test_an_engine_that_resumes_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr("tilth.engines.engine.Engine.resume")
    with raises(RecipeError, "rollout.engine.resume"):
        tiny.run(recipe(tmp_path, 1))


def test_the_log_has_what_became_of_each_sample(resumed):
    """Its consumed trajectories are those of the run, in their order, with the versions that drew their tokens."""
    found, log = rows(resumed), RunReplay(resumed.directory / EVENTS)
    assert log.steps == 6
    for step in range(1, 7):
        assert [one.id for one in log.batch(step)] == sorted(i for i, row in found.items() if row["step"] == step)
    parts = [part for version in range(8) for part in log.parts(version)]
    assert sorted(part.id for part in parts if not part.stops) == sorted(found) and len(parts) > len(found)
    kinds = Counter(event.kind for event in read_events(resumed.directory / EVENTS))
    assert kinds["admit"] == kinds["consume"] == 72 <= kinds["finish"] and not kinds["drop"] and kinds["publish"] >= 6


def ones(prompt, completion, info):
    """A reward that anybody can learn."""
    return completion.count("1") / 8


@pytest.mark.slow
def test_samples_that_are_behind_teach_what_others_teach(tmp_path):
    """At equal samples, with the default correction."""
    how = {"optimizer": {"lr": 2e-2}, "algorithm": {"steps": 25}, "run": {"eval_every": 0}}
    ends = {}
    for staleness in (0, 1, 4, "free"):
        made = recipe(tmp_path, staleness, rollout={"max_tokens": 24, "group": 4}, **how)
        rewards = [record["reward/mean"] for record in read_metrics(tiny.run(made, reward=ones).directory)]
        ends[staleness] = sum(rewards[-5:]) / 5
        assert ends[staleness] > 5 * rewards[0]
    assert all(abs(end - ends[0]) < 0.2 * ends[0] for end in ends.values()), ends


STRIKES = [("generating", 120), ("training", 4), ("publishing", 5), ("committing", 4), ("flushing", 3), ("renaming", 2)]


@pytest.mark.parametrize(
    ("point", "call"), [STRIKES[2], *(pytest.param(*s, marks=pytest.mark.slow) for s in STRIKES if s != STRIKES[2])]
)
def test_a_run_that_is_killed_consumes_each_sample_once(tmp_path, point, call):
    """Wherever it is killed: between the log, the books and the checkpoint too."""
    kill_and_resume(tmp_path, point, call, "behind")
    result = SimpleNamespace(directory=tmp_path / "tiny-001")
    check_once(result, 6)
    log = RunReplay(result.directory / EVENTS)
    assert any(event.kind == "resume" and event.fields["tokens"] for event in read_events(result.directory / EVENTS))
    consumed = [one.id for step in range(1, 7) for one in log.batch(step)]
    assert sorted(consumed) == sorted(rows(result)) and len(set(consumed)) == len(consumed)
    assert max(record["staleness/max"] for record in read_metrics(result.directory)) <= 2
