"""A call that begins again in the middle gets the answers that it had, and goes on behind them."""

import pytest

from tests.envs.test_pool import TALKER, begin, contents, say, take
from tests.errors import raises
from tilth.core.errors import DataError
from tilth.envs import journal as journal_module
from tilth.envs.journal import KEPT, Heard, ObservationJournal
from tilth.envs.pool import EnvironmentPool
from tilth.envs.process import Asked

pytestmark = pytest.mark.dist


@pytest.fixture
def pool():
    pool = EnvironmentPool(TALKER, workers=1, timeout=5.0)
    yield pool
    pool.close()


def test_known_answers_come_without_the_environment(pool, tmp_path):
    pool.keep(ObservationJournal.of_call(tmp_path, [0, 1], "version 1"))
    begin(pool, 0, 1)
    first = contents(say(pool, e0="new")[0])  # another time would be another answer
    pool.end(0)
    pool.end(1)
    pool.keep(ObservationJournal.of_call(tmp_path, [0, 1], "version 1"))
    pool._children[0].send = None  # nobody is asked
    begin(pool, 0, 1)
    assert contents(say(pool, e0="new")[0]) == first
    pool._children.clear()


def test_what_follows_is_asked_of_an_environment_that_has_heard_the_rest(pool, tmp_path):
    for more in (["a", "b"], ["a", "b", "c"]):
        pool.keep(ObservationJournal.of_call(tmp_path, [0], "version 1"))
        begin(pool, 0)
        found = [contents(say(pool, e0=text)[0]) for text in more]
        if len(more) < 3:
            pool.end(0)
    assert found == [["1 a"], ["2 b"], ["3 c"]]
    pool.reward(0)
    assert take(pool, 1)[0].value["value"] == 3.0


def test_another_turn_goes_another_way(pool, tmp_path):
    for said in (["a", "b"], ["a", "x", "c"]):
        pool.keep(ObservationJournal.of_call(tmp_path, [0], "version 1"))
        begin(pool, 0)
        found = [contents(say(pool, e0=text)[0]) for text in said]
        pool.end(0)
    assert found == [["1 a"], ["2 x"], ["3 c"]]


def attempt(folder, number, rank=0, **how):
    return ObservationJournal.of_attempt(folder, number, rank, **how)


def test_an_episode_of_an_asynchronous_run_goes_on_where_its_newest_course_ended(pool, tmp_path):
    """On any rank, and only if it is to go on; what a later attempt heard otherwise voids the rest."""
    for number, rank, said in ((1, 0, "abc"), (2, 1, "ax"), (3, 0, "")):
        journal = attempt(tmp_path, number, rank)
        journal.recall([0, 1], 0)
        pool.keep(journal)
        begin(pool, 0)
        found = [contents(say(pool, e0=text)[0]) for text in said]
        pool.end(0)
    assert found == [] and [heard.value for heard in journal._all[0]][2]["messages"][0]["content"] == "2 x"
    pool.keep(journal)
    begin(pool, 0)  # nothing is known of one that begins once more
    assert (tmp_path / "attempt-000003-rank-0-part-000000.jsonl").read_text().count("begin") == 1
    last = attempt(tmp_path, 4)
    last.recall([0], 1)
    assert not last.known  # lower ids are not read
    last = attempt(tmp_path, 4)
    last.recall([0], 0)
    assert [heard.asked.op for heard in last.known[0]] == ["begin"]


def test_parts_of_a_journal_that_have_no_episode_to_recall_are_not_read(tmp_path, monkeypatch):
    """An episode in flight at the end of a part goes on in the next one."""
    monkeypatch.setattr(journal_module, "PART", 1)
    journal = attempt(tmp_path, 1)
    for part in ([(0, 0), (1, 0)], [(1, 1), (2, 0)], [(2, 1)]):
        for episode, place in part:
            journal.write(place, Heard(Asked(episode, "step", {}), [episode, place]))
        journal.end_part()
    journal.write(0, Heard(Asked(3, "begin", {}), [3, 0]))
    paths = sorted(tmp_path.iterdir())
    paths[0].write_text(paths[0].read_text().replace("step", '"'))  # no JSON any more
    again = attempt(tmp_path, 2)
    again.recall([2, 3], 2)
    assert {i: [heard.value for heard in known] for i, known in again.known.items()} == {
        2: [[2, 0], [2, 1]],
        3: [[3, 0]],
    }
    with raises(DataError, f"{paths[0].name}.1"):
        attempt(tmp_path, 2).recall([1], 1)
    assert len(paths) == 4 and len([*tmp_path.iterdir()]) == 5


def test_parts_that_no_resume_needs_are_dropped(tmp_path, monkeypatch):
    """Of this rank and of earlier attempts, whose last part has no end; a replay needs all."""
    monkeypatch.setattr(journal_module, "PART", 1)
    first = attempt(tmp_path, 1, 1)
    first.write(0, Heard(Asked(0, "begin", {}), 0))
    other, own = attempt(tmp_path, 2, 0), attempt(tmp_path, 2, 1)
    for journal in (other, own):
        for episode in (1, 2):
            journal.write(0, Heard(Asked(episode, "begin", {}), 0))
            journal.end_part()
    own.recall([0], 0)
    own.forget(1, files=False)
    assert own._all.keys() == {1} and len([*tmp_path.iterdir()]) == 7
    own.forget(2, files=True)
    left = ["2-rank-0-part-000000", "2-rank-0-part-000001", "2-rank-0-part-000002"]
    left += ["2-rank-1-part-000001", "2-rank-1-part-000002"]
    assert sorted(path.stem.removeprefix("attempt-00000") for path in tmp_path.iterdir()) == left
    later = ObservationJournal(tmp_path / "attempt-000003-rank-0-part-000000.jsonl", [first.path, own.path])
    later.recall([0, 2], 0)  # parts that are gone by then have nothing
    assert not later.known


@pytest.mark.parametrize("said", ["raise", "hang"])
def test_a_failure_is_repeated(pool, tmp_path, said):
    pool.timeout = 1.0
    for _ in range(2):
        pool.keep(ObservationJournal.of_call(tmp_path, [0], "version 1"))
        begin(pool, 0)
        found = say(pool, e0=said)[0]
        for child in pool._children:
            child.send = None  # nobody is asked any more
        assert found.status == {"raise": "error", "hang": "timeout"}[said] and found.reason and found.value is None
    pool._children.clear()


def test_a_failure_while_the_policy_writes_is_repeated_in_place_of_the_answer_before(pool, tmp_path):
    pool.keep(ObservationJournal.of_call(tmp_path, [0], "version 1"))
    begin(pool, 0)
    say(pool, e0="a")
    pool._fail(pool._episodes[0], "its process died", "died")
    pool.keep(ObservationJournal.of_call(tmp_path, [0], "version 1"))
    begin(pool, 0)
    answer = say(pool, e0="a")[0]
    assert (answer.status, answer.reason, answer.value) == ("died", "its process died", None)


def test_an_episode_that_fails_between_two_calls_is_in_no_journal(pool, tmp_path):
    journal = ObservationJournal.of_call(tmp_path, [0], "version 1")
    pool.keep(journal)
    begin(pool, 0)
    journal.close()
    assert pool._fail(pool._episodes[0], "its process died", "died").status == "died"
    assert [heard.status for heard in ObservationJournal.of_call(tmp_path, [0], "version 1").known[0]] == ["ok"]


def test_a_replay_asks_environments_nothing(pool, tmp_path):
    pool.keep(attempt(tmp_path, 1))
    begin(pool, 0)
    say(pool, e0="a")
    pool.end(0)
    for more in ("a", "b"):
        journal = attempt(tmp_path, 2, complete=True)
        journal.recall([0], 0)
        pool.keep(journal)
        begin(pool, 0)
        if more == "a":
            assert contents(say(pool, e0="a")[0]) == ["1 a"]
    with raises(DataError, "observations"):
        say(pool, e0="b")


def test_files_of_other_calls_torn_lines_and_old_calls(tmp_path):
    one = ObservationJournal.of_call(tmp_path, [0], "version 1")
    one.close()
    one.path.write_text('[0, "begin", {}, 5, 0, "", "ok"]\n[0, "step", {}, 6')
    assert not ObservationJournal.of_call(tmp_path, [0], "version 2").known
    assert not ObservationJournal.of_call(tmp_path, [1], "version 1").known
    again = ObservationJournal.of_call(tmp_path, [0], "version 1")
    assert [heard.value for heard in again.known[0]] == [5] and again.path.read_text().count("\n") == 1
    for i in range(9):
        ObservationJournal.of_call(tmp_path, [i], "version 3").close()
    assert len(list(tmp_path.glob("*.jsonl"))) <= KEPT + 1
