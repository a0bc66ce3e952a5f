"""Bad data ends a run by a named error before it has a folder, or is left out by its source's policy and counted."""

import gzip
import json

import pytest

from tests.errors import raises
from tests.flows import tiny
from tilth.config.plugins import forget
from tilth.core.errors import DataError, PlanError, PluginError, RecipeError
from tilth.data.pairs import recipe_prompts
from tilth.launch import build
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(4)]
LINES = [json.dumps(record) for record in SUMS]
PLUGIN = """
import itertools, tilth
calls = itertools.count()

@tilth.transform("once")
def once(record):
    if next(calls) == 3:
        raise OSError("the disk is on fire")
    return record

@tilth.transform("always")
def always(record):
    raise OSError("the disk is on fire")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text("\n".join(LINES))
    (tmp_path / "mine.py").write_text(PLUGIN)
    yield tmp_path
    forget([])


def part(name="odd", **keys):
    return {"name": name, "source": "good.jsonl", **keys}


def recipe(folder, *parts, **sections):
    """Eight steps of sixteen samples."""
    data = {"source": "", "holdout": 0.0, "mixture": list(parts)}
    base = {"flow": "sft", "plugins": ["mine.py"], "model": {"context": 24}, "supervised": {"steps": 8}}
    made = tiny.settings(folder / "runs", **{**base, "run": {"eval_every": 0}, "data": data, **sections})
    made["data"].pop("digits")
    return tiny.from_dict(made)


def learn(folder, *parts, callbacks=(), **sections):
    """Half of the samples are from the good source."""
    return tiny.run(recipe(folder, part("good"), *parts, **sections), reward=None, callbacks=callbacks)


def odd(folder, name, content):
    """content: bytes, or a function of them where they take time."""
    (folder / name).write_bytes(content() if callable(content) else content)
    return {"source": name}


ALL = "\n".join(LINES).encode()
TWO_RANKS = {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"hdp": 2}}}
FOUR_RANKS = {"backend": "local", "workers": 4}
REFUSED = {
    "no file": (("none.jsonl", None), {}, DataError, "data.mixture.odd"),
    "unreadable": (("odd.jsonl.gz", b"rubbish"), {}, DataError, "odd.jsonl.gz"),
    "of no known format": (("odd.pkl", b"\x80"), {}, DataError, "odd.pkl.format"),
    "empty": (("odd.jsonl", b""), {}, DataError, "odd.jsonl"),
    "truncated": (("odd.jsonl", ALL[:-7]), {}, DataError, "odd.jsonl:40.json"),
    "truncated, compressed": (("odd.jsonl.gz", gzip.compress(ALL)[:-9]), {}, DataError, "odd.jsonl.gz"),
    "truncated, whatever the policy": (
        ("odd.jsonl.gz", gzip.compress(ALL)[:-9]),
        {"on_error": "skip"},
        DataError,
        "odd.jsonl.gz",
    ),
    "not UTF-8": (("odd.jsonl", ALL + b"\n\xff\n"), {}, DataError, "odd.jsonl:41.utf8"),
    "compressed beyond reason": (
        ("odd.jsonl.gz", lambda: gzip.compress(ALL + b" " * (1 << 27))),
        {"on_error": "skip"},
        DataError,
        "odd.jsonl.gz.size",
    ),
    "raises once": (None, {"transform": "once"}, PluginError, "data.mixture.odd.transform"),
    "raises always": (None, {"transform": "always"}, PluginError, "data.mixture.odd.transform"),
    "raises always, and skips": (None, {"transform": "always", "on_error": "skip"}, DataError, "good.jsonl"),
    "a name twice": (None, {"name": "good"}, RecipeError, "data.mixture.1.name.twice"),
    "ends": (None, {"at_end": "stop"}, DataError, "data.mixture.odd.at_end"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_is_refused(folder, case):
    file, keys, kind, key = REFUSED[case]
    if file is not None:
        keys = {"source": file[0], **keys}
        if file[1] is not None:
            odd(folder, *file)
    with raises(kind, key) as told:
        learn(folder, part(**keys))
    assert "\n" not in str(told.value) and not list(folder.glob("runs/*/metrics*"))


LAYOUT = {"cluster": {"backend": "local", "workers": 4}}
RECIPES = {
    "weights that sum to 0": ({"weight": 0.0}, {}, RecipeError, "data.mixture.weight"),
    "a schedule that ends before the run": ({"schedule": {"0": 1.0, "7": 0.0}}, {}, DataError, "data.mixture.weight"),
    "all sources leave before the run ends": ({"at_end": "leave"}, {}, DataError, "data.mixture.weight"),
    "hdp beside dp": ({}, {"policy": {"layout": {"hdp": 2}}, **LAYOUT}, RecipeError, "policy.layout.hdp"),
    "hdp beside cp": ({}, {"policy": {"layout": {"hdp": 2, "cp": 2}}, **LAYOUT}, RecipeError, "policy.layout.hdp"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_mixture_is_refused(folder, case):
    keys, sections, kind, key = RECIPES[case]
    with raises(kind, key) as told:
        tiny.run(recipe(folder, part("good", **keys), part(**keys), **sections), reward=None)
    assert "\n" not in str(told.value) and not list(folder.glob("runs/*/metrics*"))


def test_a_sample_longer_than_all_ranks_together_is_refused_before_there_are_roles(folder, monkeypatch):
    """The longest has 7 tokens; nothing is generated, so that no answer counts. A given answer of a warm-up may be
    longer than all that are generated."""
    monkeypatch.setattr(build, "make_roles", lambda *given: None)

    def built(ranks, tokens, **more):
        layout = {"cluster": {"backend": "local", "workers": ranks}, "policy": {"layout": {"hdp": ranks}}}
        sections = {"train": {"micro_tokens": tokens}, "rollout": {"max_tokens": 12}, **(layout if ranks > 1 else {})}
        sections |= more
        made = recipe(folder, part("good"), **sections)
        build.build(made, recipe_prompts(made), None, tiny.inline())

    with raises(PlanError, "layout.hdp"):
        built(2, 3)
    built(2, 4)
    built(1, 3)
    warm = {"flow": "grpo", "rollout": {"max_tokens": 1}, "reward": {"function": "exact"}}
    with raises(PlanError, "layout.hdp"):
        built(2, 3, **warm)
    built(2, 3, **warm, supervised={"steps": 0})


COUNTED = {
    "not UTF-8": (ALL + b"\n\xff\n", {}, 1),
    "truncated": (ALL[:-7], {}, 1),
    "raises once": (ALL, {"transform": "once"}, 1),
}


@pytest.mark.parametrize("case", ["not UTF-8", *(pytest.param(n, marks=pytest.mark.slow) for n in [*COUNTED][1:])])
def test_what_a_policy_leaves_out_is_counted(folder, case):
    content, keys, count = COUNTED[case]
    told = tiny.Recorder()
    found = learn(folder, part(**odd(folder, "odd.jsonl", content), on_error="skip", **keys), callbacks=[told])
    assert any(f"source 2: {count} by errors left out" in line for line in told.messages)
    drawn = [r["mixture/odd"] for r in read_metrics(found.directory)]
    assert 60 <= sum(drawn) <= 68


def test_a_source_that_leaves_the_mixture_is_told_and_the_others_go_on(folder):
    told = tiny.Recorder()
    found = learn(folder, part(at_end="leave"), callbacks=[told])
    drawn = [r["mixture/odd"] for r in read_metrics(found.directory)]
    assert sum(drawn) == 40 and drawn[-1] == 0
    assert any("odd has given all of its 40 samples, and leaves the mixture" in line for line in told.messages)


def test_a_source_that_shrinks_between_runs_is_another_run(folder):
    class Stop(tiny.Recorder):
        def on_step_end(self, run, step, metrics):
            if step == 3:
                run.stop("the test")

    file, named = odd(folder, "odd.jsonl", ALL), {"run": {"name": "mine", "eval_every": 0}}
    with raises(Interrupted, "stop"):
        learn(folder, part(**file), callbacks=[Stop()], **named)
    odd(folder, "odd.jsonl", "\n".join(LINES[:30]).encode())
    with raises(RecipeError, "data"):
        learn(folder, part(**file), **named)
