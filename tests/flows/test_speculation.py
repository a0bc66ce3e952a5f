"""A run with drafts is the run without them, and counts what they saved."""

import psutil
import pytest

from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import TilthError
from tilth.data.prompts import PromptSet
from tilth.data.sources import from_records
from tilth.engines import draft as drafting
from tilth.flows.measured import measure_engines
from tilth.runs.metrics import Metrics


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Guesses pay in so small a model too, as if its positions took long."""
    monkeypatch.setattr(drafting, "LAYER", {"cpu": 1.0})


def test_a_run_with_drafts_has_the_bits_of_one_without(tmp_path):
    """Also where prompts of later steps were answered before, of which nothing is learned or counted."""
    more = {"off": {"speculate": "off"}, "suffix": {"speculate": "suffix"}}
    more |= {"tree": {"speculate": "tree"}, "ahead": {"speculate": "suffix", "run_ahead": True}}
    made = {
        how: tiny.run(
            tiny.recipe(
                tmp_path,
                train={"parity": True},
                supervised={"steps": 1},
                algorithm={"steps": 3},
                model={"context": 32},
                rollout={"max_tokens": 20, "temperature": 0.3, **section},
            ),
            name=how,
        ).directory
        for how, section in more.items()
    }
    plain = tiny.numbers(made["off"])
    for how in ("suffix", "tree", "ahead"):
        assert tiny.weights(made["off"]) == tiny.weights(made[how])
        drafted = tiny.numbers(made[how])
        own = [{name: record.pop(name) for name in [*record] if name.startswith("draft/")} for record in drafted]
        assert plain == drafted
        assert any(0 < record.get("draft/acceptance", 0) <= 1 for record in own)
        assert sum(0 < record.get("draft/passes", 1) < 1 for record in own) > 1
        assert any(record.get("draft/ahead", 0) > 0 for record in own) == (how == "ahead")


@pytest.mark.slow  # quickly in tests/engines/test_apart.py
def test_a_run_loses_its_drafters_apart_and_no_bit(tmp_path):
    """Each dies at the end of a step; the log says so once."""
    plain, drafted = (
        tiny.recipe(
            tmp_path,
            train={"parity": True},
            supervised={"steps": 1},
            algorithm={"steps": 4},
            model={"context": 32},
            rollout={"max_tokens": 20, "temperature": 0.3, **more},
        )
        for more in ({}, {"speculate": "suffix", "draft": {"apart": True}})
    )

    def kill(metrics):
        for child in psutil.Process().children():
            if child.status() != psutil.STATUS_ZOMBIE and "tilth.engines.apart:main" in " ".join(child.cmdline()):
                child.kill()

    watcher = tiny.Recorder(kill)
    runs = [tiny.run(plain, name="plain").directory, tiny.run(drafted, name="drafted", callbacks=[watcher]).directory]
    assert tiny.weights(runs[0]) == tiny.weights(runs[1])
    plain, drafted = map(tiny.numbers, runs)
    own = [{name: record.pop(name) for name in [*record] if name.startswith("draft/")} for record in drafted]
    assert plain == drafted
    assert sum(record.get("draft/lost", 0) for record in own) >= 1
    assert any(record.get("draft/missed", 0) > 0 for record in own)
    assert sum("rollout.draft.apart" in text for text in watcher.messages) == 1


def learned(folder, prompts=None, **shape):
    return str(
        tiny.learn(folder, "sft", prompts=prompts, model={"context": 32, **shape}, supervised={"steps": 2}).directory
    )


def test_a_run_with_a_drafting_model_has_the_bits_of_one_without(tmp_path):
    plain, drafted = (
        tiny.run(
            tiny.recipe(
                tmp_path,
                train={"parity": True},
                supervised={"steps": 1},
                algorithm={"steps": 2},
                model={"context": 32, "layers": 6},  # so that a guess costs little
                rollout={"max_tokens": 12, **more},
            ),
            name=name,
        ).directory
        for name, more in {
            "plain": {},
            "drafted": {"speculate": "model", "draft": {"path": learned(tmp_path / "small", hidden=8)}},
        }.items()
    )
    assert tiny.weights(plain) == tiny.weights(drafted)
    assert any(record.get("draft/acceptance", 0) > 0 for record in tiny.numbers(drafted))


def test_a_drafting_model_has_the_tokens_of_the_policy(tmp_path):
    other = PromptSet(from_records([{"prompt": f"{a}x", "answer": a} for a in "abcdefgh"]))
    for key, path in {
        "rollout.draft.path.vocab_size": learned(tmp_path / "other", prompts=other),
        "rollout.draft.path": str(tmp_path / "none"),
    }.items():
        with raises(TilthError, key):
            tiny.run(tiny.recipe(tmp_path, rollout={"speculate": "model", "draft": {"path": path}}))


def test_drafts_and_kv_caches_are_summed_over_engines():
    metrics = Metrics()
    none = (0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
    measure_engines(metrics, [(10, 8, 4, 7, 2, 1, 3, 1.5, 0.75), none, (10, 2, 1, 3, 3, 0, 1, 0.5, 0.5)], drafts=True)
    found = metrics.values()
    assert found["draft/acceptance"] == pytest.approx(0.5) and found["draft/passes"] == pytest.approx(0.75)
    assert found["draft/ahead"] == 10 and found["draft/missed"] == 5 and found["draft/lost"] == 1
    assert found["kv_cache_usage/mean"] == pytest.approx(0.5) and found["kv_cache_usage/max"] == 0.75
    measure_engines(empty := Metrics(), [none], drafts=True)
    measure_engines(empty, [], drafts=True)
    assert not empty.values()
