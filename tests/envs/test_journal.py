"""A call that begins again in the middle gets the answers that it had, and goes on behind them."""

import pytest

from tests.envs.test_pool import TALKER, begin, contents, say, take
from tilth.envs.journal import KEPT, ObservationJournal
from tilth.envs.pool import EnvironmentPool

pytestmark = pytest.mark.dist


@pytest.fixture
def pool():
    pool = EnvironmentPool(TALKER, workers=1, timeout=5.0)
    yield pool
    pool.close()


def test_known_answers_come_without_the_environment(pool, tmp_path):
    pool.keep(ObservationJournal(tmp_path, [0, 1], "version 1"))
    begin(pool, 0, 1)
    first = contents(say(pool, e0="new")[0])  # another time would be another answer
    pool.end(0)
    pool.end(1)
    pool.keep(ObservationJournal(tmp_path, [0, 1], "version 1"))
    pool._children[0].send = None  # nobody is asked
    begin(pool, 0, 1)
    assert contents(say(pool, e0="new")[0]) == first
    pool._children.clear()


def test_what_follows_is_asked_of_an_environment_that_has_heard_the_rest(pool, tmp_path):
    for more in (["a", "b"], ["a", "b", "c"]):
        pool.keep(ObservationJournal(tmp_path, [0], "version 1"))
        begin(pool, 0)
        found = [contents(say(pool, e0=text)[0]) for text in more]
        if len(more) < 3:
            pool.end(0)
    assert found == [["1 a"], ["2 b"], ["3 c"]]
    pool.reward(0)
    assert take(pool, 1)[0].value["value"] == 3.0


def test_another_turn_goes_another_way(pool, tmp_path):
    for said in (["a", "b"], ["a", "x", "c"]):
        pool.keep(ObservationJournal(tmp_path, [0], "version 1"))
        begin(pool, 0)
        found = [contents(say(pool, e0=text)[0]) for text in said]
        pool.end(0)
    assert found == [["1 a"], ["2 x"], ["3 c"]]


def test_files_of_other_calls_torn_lines_and_old_calls(tmp_path):
    one = ObservationJournal(tmp_path, [0], "version 1")
    one.close()
    one.path.write_text('[0, "begin", {}, 5]\n[0, "step", {}, 6')
    assert not ObservationJournal(tmp_path, [0], "version 2").known
    assert not ObservationJournal(tmp_path, [1], "version 1").known
    again = ObservationJournal(tmp_path, [0], "version 1")
    assert [value for _, value in again.known[0]] == [5] and again.path.read_text() == '[0, "begin", {}, 5]\n'
    for i in range(9):
        ObservationJournal(tmp_path, [i], "version 3").close()
    assert len(list(tmp_path.glob("*.jsonl"))) <= KEPT + 1
