"""Rules of restarts, against counting by hand."""

from tilth.process.restarts import RestartPolicy


def test_work_begins_as_often_as_the_rule_allows():
    for attempts in range(1, 5):
        rules, begun = RestartPolicy(attempts=attempts), 1
        while rules.again(begun):
            begun += 1
        assert begun == attempts
    assert RestartPolicy().again(10**9, fruitless=10**9)


def test_losses_without_fruit_are_borne_as_often_as_the_rule_allows():
    rules = RestartPolicy(fruitless=3)
    assert [rules.again(9, fruitless=lost) for lost in range(6)] == [True] * 4 + [False] * 2


def test_pauses_double_up_to_the_longest():
    assert [RestartPolicy(backoff=0.5, latest=3.0).pause(begun) for begun in range(1, 6)] == [0.5, 1, 2, 3, 3]
    assert RestartPolicy().pause(7) == 0
