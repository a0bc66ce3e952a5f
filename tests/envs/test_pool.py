"""Environments answer side by side; one that raises, hangs or dies costs its own episode only."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.errors import raises
from tilth.core.errors import PluginError
from tilth.envs.pool import SUSPECTS, EnvironmentPool, _Child

TALKER = f"{Path(__file__).parent / 'talkers.py'}:Talker"
pytestmark = pytest.mark.dist


@pytest.fixture
def pool():
    """For a test that harms its processes."""
    pool = EnvironmentPool(TALKER, workers=1, timeout=3.0)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def calm():
    """For tests that end no process: a start is most of what they would take."""
    pool = EnvironmentPool(TALKER, workers=1, timeout=3.0)
    yield pool
    pool.close()


def test_what_environments_print_goes_to_a_file(tmp_path, capfd):
    pool = EnvironmentPool(TALKER, timeout=10.0)
    pool.begin(0, {"prompt": "?"})
    take(pool, 1)
    pool.print_to(tmp_path / "said.log")
    pool.step(0, {"role": "assistant", "content": "print"})
    take(pool, 1)
    pool.close()
    assert (tmp_path / "said.log").read_text() == "heard\n" and "heard" not in "".join(capfd.readouterr())


def test_what_they_print_is_shown_marked_at_the_end(capfd):
    pool = EnvironmentPool(TALKER, timeout=10.0)
    pool.begin(0, {"prompt": "?"})
    take(pool, 1)
    pool.step(0, {"role": "assistant", "content": "print"})
    take(pool, 1)
    assert capfd.readouterr() == ("", "")
    pool.close()
    assert capfd.readouterr() == ("", "[printed] heard\n")


def take(pool, count, seconds=30):
    found = {}
    while len(found) < count:
        now = pool.poll(seconds)
        assert now, f"only {found}"
        found |= {a.episode: a for a in now}
    return found


def begin(pool, *episodes):
    for i in episodes:
        pool.begin(i, {"prompt": f"p{i}"})
    return take(pool, len(episodes))


def say(pool, **texts):
    for name, text in texts.items():
        pool.step(int(name[1:]), {"role": "assistant", "content": text})
    return take(pool, len(texts))


def contents(answer):
    return [m["content"] for m in answer.value["messages"]]


def test_episodes_are_apart(calm):
    assert {i: contents(a) for i, a in begin(calm, 0, 1, 2).items()} == {0: ["p0"], 1: ["p1"], 2: ["p2"]}
    say(calm, e0="a", e1="b")
    found = say(calm, e0="bye", e2="c")
    assert contents(found[0]) == ["2 bye"] and found[0].value["done"] and contents(found[2]) == ["1 c"]
    calm.reward(0)
    assert take(calm, 1)[0].value == {"value": 2.0, "parts": {"first": 1.0}, "reason": ""}


@pytest.mark.slow
def test_all_episodes_of_a_process_hang(pool):
    begin(pool, 0, 1)
    assert [answer.status for answer in say(pool, e0="hang", e1="hang").values()] == ["timeout", "timeout"]
    assert contents(begin(pool, 2)[2]) == ["p2"]


@pytest.mark.parametrize("said, status", [("raise", "error"), ("bytes", "error"), ("hang", "timeout")])
def test_one_fails_and_the_others_stay_where_they_are(calm, said, status):
    begin(calm, 0, 1)
    before = contents(say(calm, e1="new")[1])
    found = say(calm, e0=said)[0]
    assert found.status == status and found.value is None and found.reason
    assert before and contents(say(calm, e1="x")[1]) == ["2 x"]
    assert contents(begin(calm, 2)[2]) == ["p2"]


@pytest.mark.parametrize(
    "said, why",
    [
        ("object", "not JSON: Object of type object"),
        ("mute", "Mute: (its text raises ZeroDivisionError) at talkers.py"),
        ("order", "done=0.5, not True or False"),
        ("tools", "waits for the async tool wait"),
        ("bytes", "step returned the message b'no'; a message is"),
    ],
)
def test_nonsense_is_named_at_once(calm, said, why):
    begin(calm, 0)
    found = say(calm, e0=said)[0]
    assert found.status == "error" and why in found.reason and "process.py" not in found.reason


@pytest.mark.slow
@pytest.mark.parametrize("said, status", [("gil", "timeout"), ("stop", "timeout")])
def test_who_waits_is_not_blamed_for_who_holds_the_process(pool, said, status):
    """Three wait, within their limit, when a fourth one stops them."""
    begin(pool, *range(4))
    for i in range(3):
        pool.step(i, {"role": "assistant", "content": "slow"})
    time.sleep(0.2)
    pool.step(3, {"role": "assistant", "content": said})
    found = take(pool, 4, seconds=60)
    assert [found[i].status for i in range(4)] == ["ok", "ok", "ok", status]
    assert contents(say(pool, e1="x")[1]) == ["2 x"]


@pytest.mark.slow
@pytest.mark.parametrize("said, status", [("gil", "timeout"), ("exit", "died"), ("kill", "died"), ("spin", "timeout")])
def test_episodes_of_a_lost_process_begin_again_elsewhere(pool, said, status):
    begin(pool, 0, 1)
    say(pool, e1="a")
    say(pool, e1="b")
    found = say(pool, e0=said)[0]
    assert found.status == status
    assert contents(say(pool, e1="c")[1]) == ["3 c"]
    pool.reward(1)
    assert take(pool, 1)[1].value["value"] == 3.0


@pytest.mark.slow
def test_an_episode_that_does_not_repeat_itself_fails(pool):
    begin(pool, 0, 1)
    say(pool, e1="new")
    pool.step(0, {"role": "assistant", "content": "exit"})
    pool.step(1, {"role": "assistant", "content": "a"})
    found = take(pool, 2)
    assert found[1].status == "differs" and found[0].status == "died"


def test_a_fork_that_comes_back_answers_nothing():
    pool = EnvironmentPool(TALKER.replace("Talker", "Forks"), workers=1, timeout=20.0)
    begin(pool, 0)
    for _ in range(3):
        assert contents(say(pool, e0="x")[0]) == ["again"]
    assert not pool.poll(0.2)
    pool.close()


def test_processes_outlive_the_thread_that_made_the_pool():
    made = []
    thread = threading.Thread(target=lambda: made.append(EnvironmentPool(TALKER, timeout=10.0)))
    thread.start()
    thread.join()
    before = [child.pid for child in made[0]._children]
    time.sleep(0.05)
    begin(made[0], 0)
    after = [child.pid for child in made[0]._children]
    made[0].close()
    assert after == before


def test_a_record_that_cannot_begin(calm):
    calm.begin(0, {"prompt": "", "fail": True})
    found = take(calm, 1)[0]
    assert found.status == "error" and "no such record" in found.reason


def test_an_episode_is_closed_whatever_its_end_was(tmp_path):
    pool = EnvironmentPool(TALKER.replace(":Talker", ":Closes"), timeout=10.0)
    try:
        for i in range(2):
            pool.begin(i, {"path": str(tmp_path / f"{i}")})
        take(pool, 2)
        pool.step(0, {"role": "assistant", "content": ""})
        assert take(pool, 1)[0].status == "error"
        pool.end(1)
        until = time.monotonic() + 30
        while not all((tmp_path / f"{i}").exists() for i in range(2)) and time.monotonic() < until:
            time.sleep(0.01)
        assert [(tmp_path / f"{i}").read_text() for i in range(2)] == ["closed\n"] * 2
    finally:
        pool.close()


def test_names_that_are_none():
    with raises(PluginError, "rollout.environment"):
        EnvironmentPool("nothing")
    with raises(PluginError, "rollout.environment"):
        EnvironmentPool(f"{Path(__file__).parent / 'talkers.py'}:asyncio")
    with raises(PluginError, "environment.reward"):
        EnvironmentPool(f"{Path(__file__).parent / 'talkers.py'}:Wide")
    with raises(PluginError, "environment.timeout"):
        EnvironmentPool(TALKER, timeout=0)


def test_an_answer_longer_than_a_pipe_that_came_while_nobody_listened_is_heard(calm):
    """As between two rounds of an engine that are further apart than the limit."""
    begin(calm, 0)
    calm.step(0, {"role": "assistant", "content": "much"})
    calm._episodes[0].deadline = time.monotonic() + 0.2
    time.sleep(0.4)
    assert len(contents(take(calm, 1)[0])[0]) == 300_000


@pytest.mark.slow
def test_an_episode_that_is_late_for_another_ones_sake_begins_again(pool):
    """One holds the GIL; the other is late at the same moment, and innocent."""
    begin(pool, 0, 1)
    for episode, text in ((0, "gil"), (1, "a")):
        pool.step(episode, {"role": "assistant", "content": text})
        time.sleep(0.05)
    pool._episodes[1].deadline = pool._episodes[0].deadline
    found = take(pool, 2)
    assert found[0].status == "timeout" and found[1].status == "ok" and contents(found[1]) == ["1 a"]


def test_the_start_of_a_process_counts_in_no_episodes_limit(pool, monkeypatch):
    """An answer that comes in time, while a lost process is replaced and nobody reads, is heard."""
    begin(pool, 0)
    pool._children[0].retiring = True  # the next episode gets another process
    begin(pool, 1)
    wait_ready = _Child.wait_ready
    monkeypatch.setattr(_Child, "wait_ready", lambda child: (wait_ready(child), time.sleep(1.2))[0])
    pool.step(0, {"role": "assistant", "content": "slow"})
    pool._episodes[0].deadline = time.monotonic() + 1.1
    pool._children[1].process.kill()
    assert take(pool, 1)[0].status == "ok"


@pytest.mark.slow
def test_an_episode_alone_in_a_process_that_was_stopped_begins_again(pool):
    begin(pool, 0)
    say(pool, e0="a")
    os.kill(pool._children[0].pid, signal.SIGSTOP)
    assert contents(say(pool, e0="b")[0]) == ["2 b"]
    assert say(pool, e0="stop")[0].status == "timeout"  # it stops each of its processes


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_killed_while_it_replaces_another_is_replaced_once(pool, monkeypatch, times):
    begin(pool, 0)
    wait_ready, left = _Child.wait_ready, [1] * times

    def wait_killed(child):
        if left:
            left.pop()
            child.process.kill()
        return wait_ready(child)

    monkeypatch.setattr(_Child, "wait_ready", wait_killed)
    pool._children[0].process.kill()
    if times == 1:
        assert contents(say(pool, e0="a")[0]) == ["1 a"]
    else:
        with raises(PluginError, "environment"):
            say(pool, e0="a")


@pytest.fixture
def started(pool, monkeypatch):
    """Processes that begin later than the pool."""
    found, start = [], pool._pool.start
    monkeypatch.setattr(pool._pool, "start", lambda: found.append(start()) or found[-1])
    return found


def say_at_once(pool, count, culprit):
    begin(pool, *range(count))
    for i in range(count):
        pool.step(i, {"role": "assistant", "content": "exit" if i == culprit else "slow"})


def test_episodes_of_a_lost_process_share_new_ones(pool, started, monkeypatch):
    monkeypatch.setattr("tilth.envs.pool.SUSPECTS", 1)
    say_at_once(pool, 3, culprit=None)
    pool._children[0].process.kill()
    assert {answer.status for answer in take(pool, 3).values()} == {"ok"}
    assert len(started) == 2  # one in place of the lost one, one for all that may have ended it


@pytest.mark.slow
def test_the_one_to_blame_is_found_among_many(pool, started):
    say_at_once(pool, 12, culprit=5)
    assert {i: a.status for i, a in take(pool, 12).items()} == {i: "died" if i == 5 else "ok" for i in range(12)}
    assert len(started) <= 1 + SUSPECTS + 3  # three shared a process that died again


def test_an_episode_goes_on_from_what_was_kept(calm):
    """Also if it has gone further since, or is gone."""
    begin(calm, 0, 1)
    say(calm, e0="a", e1="b")
    kept = calm.said(0)
    assert contents(say(calm, e0="x")[0]) == ["2 x"]
    calm.resume(0, kept)
    assert contents(say(calm, e0="y")[0]) == ["2 y"]
    kept = calm.said(0)
    calm.keep_only([1])
    calm.resume(0, kept)
    assert {i: contents(a) for i, a in say(calm, e0="z", e1="c").items()} == {0: ["3 z"], 1: ["2 c"]}
    calm.resume(0, [*kept, kept[-1]])  # what it has never said
    assert say(calm, e0="z")[0].status == "differs"


def test_an_episode_that_begins_again_gets_no_answer_of_its_former_life(calm):
    """Its thread still steps when it ends, as in a step of a run that begins again."""
    begin(calm, 7)
    calm.step(7, {"role": "assistant", "content": "slow"})
    calm.end(7)
    begin(calm, 7)
    calm.step(7, {"role": "assistant", "content": "slow again"})
    (answer,) = take(calm, 1).values()
    assert "slow again" in str(answer.value)
