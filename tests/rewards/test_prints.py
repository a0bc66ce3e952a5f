"""What reward processes print: in a file of bounded size, all of it until it is full, and none on the terminal."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from tests.flows import tiny
from tilth.core.errors import RewardError
from tilth.rewards.process_pool import RewardPool

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a process need not import what only the tests need


def chatty(prompt, completion, info):
    """Prints in every way there is."""
    print("python out")
    print("python err", file=sys.stderr)
    libc = ctypes.CDLL(None)
    libc.puts(b"from C")
    libc.fflush(None)
    os.write(1, b"raw out\n")
    os.write(2, b"raw err\n")
    os.system("echo from a shell")
    return float(len(completion))


WAYS = ["python out", "python err", "from C", "raw out", "raw err", "from a shell"]


def test_every_way_of_printing_ends_in_the_file_and_none_on_the_terminal(tmp_path, capfd):
    with RewardPool(chatty, quiet=True) as pool:
        pool.score([(i, "p", "c", {}) for i in range(3)])
        pool.print_to(tmp_path / "a.log")  # what came before is there too
        pool.score([(i, "p", "c", {}) for i in range(4)])
    lines = (tmp_path / "a.log").read_text().splitlines()
    assert sorted(lines) == sorted(WAYS * 7) and capfd.readouterr() == ("", "")


def test_a_pool_that_is_not_quiet_prints_to_standard_error(capfd):
    with RewardPool(chatty) as pool:
        pool.score([(0, "p", "c", {})])
    assert sorted(capfd.readouterr().err.splitlines()) == sorted(WAYS)


def test_what_is_said_by_a_function_that_cannot_be_loaded_is_seen(tmp_path, capfd):
    (tmp_path / "bad.py").write_text("print('looking for my table')\nraise OSError('no table')\n")
    with pytest.raises(RewardError):
        RewardPool(f"{tmp_path}/bad.py:score", quiet=True)
    assert capfd.readouterr().err == "[printed] looking for my table\n"


@pytest.mark.parametrize("last", ["exit", "segfault"])
def test_the_last_words_of_a_process_that_dies_are_kept(tmp_path, last):
    def dies(prompt, completion, info):
        print("last words")
        os._exit(3) if last == "exit" else ctypes.string_at(0)

    with RewardPool(dies, quiet=True) as pool:
        pool.print_to(tmp_path / "a.log")
        assert pool.score([(0, "p", "c", {})])[0].status == "died"
    assert (tmp_path / "a.log").read_text() == "last words\n"


def test_a_process_that_outlives_its_reward_does_not_hold_up_the_end(tmp_path):
    def leaves(prompt, completion, info):
        subprocess.Popen(["sleep", "5"], start_new_session=True)
        return 1.0

    with RewardPool(leaves, quiet=True) as pool:
        pool.print_to(tmp_path / "a.log")
        assert pool.score([(0, "p", "c", {})])[0].value == 1


@pytest.mark.parametrize(
    "cluster", [{}, pytest.param({"backend": "local", "workers": 2}, marks=[pytest.mark.dist, pytest.mark.slow])]
)
def test_a_run_has_a_file_of_them_and_says_where(tmp_path, capfd, cluster):
    close_enough = tiny.close_enough  # itself: its process need not import the module

    def reward(prompt, completion, info):
        print("scoring", prompt)
        return close_enough(prompt, completion, info)

    watcher = tiny.Recorder()
    more = {"cluster": cluster, "policy": {"layout": {"fsdp": 2}}} if cluster else {}
    short = {"supervised": {"steps": 1}, "algorithm": {"steps": 3}}
    result = tiny.run(tiny.recipe(tmp_path, **short, **more), reward=reward, callbacks=[watcher])
    text = Path(result.directory / "reward.log").read_text()
    assert text.count("scoring ") == len(text.splitlines()) > 100
    assert sum("the reward function's output is in" in said for said in watcher.messages) == 1
    assert "scoring" not in "".join(capfd.readouterr())
