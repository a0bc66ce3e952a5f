"""Progress inside a step: what the run's thread notes is what others read, with what they can count."""

import json
import time

from tilth.runs.progress import PROGRESS, Doing, StepProgress, read_progress


def test_parts_of_a_step_as_text():
    assert str(Doing(what="generating", done=31, of=64)) == "generating 31 of 64"
    assert str(Doing(what="updating", done=0, of=1)) == str(Doing(what="updating")) == "updating"
    assert str(Doing(what="generating", done=9, of=8)) == "generating 8 of 8"  # a call that went on with others
    assert str(Doing()) == ""


def test_a_part_counts_on_from_when_it_began(tmp_path):
    progress = StepProgress(tmp_path)
    progress.begin("grpo", 2, 40)
    progress.at("generating", 0, 64)
    since = progress.now.since
    progress.at("generating", 31, 64)
    assert str(progress.now) == "generating 31 of 64" and progress.now.since == since
    assert (progress.now.phase, progress.now.step) == ("grpo", 2)
    progress.at("updating", 1, 8)
    assert str(progress.now) == "updating 1 of 8" and progress.now.since > since


def test_the_file_says_it_while_the_run_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.runs.progress.EVERY", 0.01)
    progress = StepProgress(tmp_path)
    with progress.watched():
        progress.begin("grpo", 1, 40)
        progress.at("evaluating", 12, 32)
        until = time.monotonic() + 20
        while read_progress(tmp_path) != progress.now and time.monotonic() < until:
            time.sleep(0.01)
        assert json.loads((tmp_path / PROGRESS).read_text())["done"] == 12
    assert not (tmp_path / PROGRESS).exists() and read_progress(tmp_path) is None
