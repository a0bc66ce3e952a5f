"""Progress inside a step: what the run's thread notes is what others read, with what they can count."""

import json
import time

from tilth.core.errors import WorkerLost
from tilth.runs.progress import PROGRESS, Doing, StepProgress, read_progress


def test_parts_of_a_step_as_text():
    assert str(Doing(what="generating", done=31, of=64)) == "generating 31 of 64"
    assert str(Doing(what="updating", done=0, of=1)) == str(Doing(what="updating")) == "updating"
    assert str(Doing(what="generating", done=9, of=8)) == "generating 8 of 8"  # a call that went on with others
    assert str(Doing()) == ""


def test_a_counter_counts_the_part_that_it_was_given_for(tmp_path):
    progress, done = StepProgress(tmp_path), [3]
    progress.begin("grpo", 2, 40)
    progress.at("generating", 0, 64)
    with progress.counted(lambda: done[0]):
        assert str(progress.look()) == "generating 3 of 64" and (progress.now.phase, progress.now.step) == ("grpo", 2)
        done[0] = 31
        assert str(progress.look()) == "generating 31 of 64"
    progress.at("updating", 1, 8)
    assert str(progress.look()) == "updating 1 of 8"


def test_a_count_that_comes_late_is_of_no_other_part(tmp_path):
    progress = StepProgress(tmp_path)
    progress.at("generating", 0, 64)

    def late():
        progress.at("updating", 0, 8)
        return 64

    with progress.counted(late):
        progress.look()
    assert progress.now.what == "" and progress.look().what == "updating" and progress.now.done == 0


def test_a_worker_that_cannot_be_asked_stops_nobody(tmp_path):
    def lost():
        raise WorkerLost("rank 1 is gone", key="rank-1")

    progress = StepProgress(tmp_path)
    progress.at("generating", 0, 64)
    with progress.counted(lost):
        assert str(progress.look()) == "generating 0 of 64"


def test_the_file_says_it_while_the_run_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.runs.progress.EVERY", 0.01)
    progress = StepProgress(tmp_path)
    with progress.watched():
        progress.begin("grpo", 1, 40)
        progress.at("evaluating", 12, 32)
        until = time.monotonic() + 20
        while read_progress(tmp_path) != progress._doing and time.monotonic() < until:
            time.sleep(0.01)
        assert json.loads((tmp_path / PROGRESS).read_text())["done"] == 12
    assert not (tmp_path / PROGRESS).exists() and read_progress(tmp_path) is None
