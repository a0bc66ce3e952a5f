"""A mixture in runs: samples by source, a resume by position, prompts, answers, pairs and documents alike."""

import numpy as np
import pytest

from tests.errors import raises
from tests.flows import tiny
from tests.flows.tiny import write
from tilth.core.errors import DataError
from tilth.core.random import stream
from tilth.data.pairs import recipe_prompts
from tilth.launch.build import mixed
from tilth.launch.data_view import tokenise
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted
from tilth.training import engine


def settings(mixture, **data):
    return {"source": "", "mixture": mixture, "holdout": 0.2, **data}


def recipe(folder, mixture, **sections):
    more = {"flow": "sft", "model": {"context": 24}, "supervised": {"steps": 8}, **sections}
    return tiny.recipe(folder, **{**more, "data": settings(mixture, **sections.get("data", {}))})


def test_samples_by_source_and_a_resume_that_needs_the_position_alone(tmp_path, parts):
    parts[0]["schedule"] = {"0": 1.0, "4": 0.0}
    made = recipe(tmp_path / "a", parts)
    whole = tiny.run(made, reward=None, name="whole")
    counts = [[r["mixture/few"], r["mixture/more"]] for r in read_metrics(whole.directory)]
    assert all(few + more == 16 for few, more in counts) and len(counts) == 8
    assert all(abs(few - 4) <= 1 for few, _ in counts[:4]) and not any(few for few, _ in counts[4:])

    class Stop(tiny.Recorder):
        def on_step_end(self, run, step, metrics):
            if step == 3:
                run.stop("the test")

    made = recipe(tmp_path / "b", parts)
    with raises(Interrupted, "stop"):
        tiny.run(made, reward=None, name="cut", callbacks=[Stop()])
    cut = tiny.run(made, reward=None, name="cut")
    assert tiny.weights(cut.directory) == tiny.weights(whole.directory)
    assert tiny.same(tiny.numbers(cut.directory), tiny.numbers(whole.directory))


@pytest.mark.slow
def test_a_mixture_of_one_gives_the_bits_of_the_source(tmp_path, parts):
    source = {"data": {"source": parts[1]["source"], "digits": 1}, "flow": "sft", "model": {"context": 24}}
    plain = tiny.run(tiny.recipe(tmp_path / "a", **source, supervised={"steps": 4}), reward=None)
    one = tiny.run(recipe(tmp_path / "b", parts[1:], supervised={"steps": 4}), reward=None)
    assert tiny.weights(one.directory) == tiny.weights(plain.directory)


def test_prompts_of_reinforcement_learning(tmp_path, parts):
    made = recipe(tmp_path, parts, flow="grpo", supervised={"steps": 0}, algorithm={"steps": 3})
    drawn = [r["mixture/more"] for r in read_metrics(tiny.run(made).directory)]
    assert len(drawn) == 3 and 12 <= sum(drawn) <= 15  # three quarters of 18


def test_a_source_that_ends_behind_a_short_run_does_not_stop_it(tmp_path, parts):
    """Neither do the prompts on which engine and policy are compared, which are more than all that the run draws."""
    parts[0] |= {"source": write(tmp_path / "two.jsonl", tiny.SUMS[:2]), "weight": 3.0, "at_end": "stop"}
    sections = {"supervised": {"steps": 0}, "algorithm": {"steps": 1}, "run": {"eval_every": 0}}
    made = recipe(tmp_path, parts, flow="grpo", rollout={"prompts": 2}, data={"holdout": 0.0}, **sections)
    assert [r["mixture/few"] + r["mixture/more"] for r in read_metrics(tiny.run(made).directory)] == [2]


@pytest.mark.slow
def test_documents(tmp_path):
    one = write(tmp_path / "a.jsonl", [{"text": text} for text in tiny.TEXTS[:40]])
    other = write(tmp_path / "b.jsonl", [{"text": text} for text in tiny.TEXTS[40:]])
    mixture = [{"name": "a", "source": one, "at_end": "leave"}, {"name": "b", "source": other}]
    data = settings(mixture, tokenizer="bpe:300", holdout=0.1)
    made = tiny.recipe(tmp_path, flow="pretrain", model={"context": 12}, supervised={"steps": 6}, data=data)
    found = tiny.run(made, reward=None)
    counts = [r["mixture/a"] for r in read_metrics(found.directory)]
    assert 40 <= sum(counts) <= 56 and sum(r["mixture/b"] for r in read_metrics(found.directory)) == 96 - sum(counts)
    rows, notes = tokenise(made)
    assert [row.source for row in rows] == ["a", "b"] and all(row.tokens > row.samples for row in rows)
    assert len(notes) == 2 and all(note.startswith("tokens from") for note in notes)


def test_pairs(tmp_path):
    chosen = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(30)]
    files = [write(tmp_path / "a.jsonl", chosen[:20]), write(tmp_path / "b.jsonl", chosen[20:])]
    made = recipe(
        tmp_path, [{"name": n, "source": f} for n, f in zip("ab", files)], flow="dpo", supervised={"steps": 2}
    )
    drawn = [r["mixture/a"] for r in read_metrics(tiny.run(made, reward=None).directory)]
    assert sum(drawn) == 16 and all(abs(count - 8) <= 1 for count in drawn)


# ---- refused before anything is allocated ----


def test_a_source_that_ends_before_the_run(tmp_path, parts):
    parts[0]["at_end"] = "stop"
    with raises(DataError, "data.mixture.few.at_end"):
        tiny.run(recipe(tmp_path, parts), reward=None)


@pytest.mark.slow
def test_a_schedule_that_ends_before_the_run(tmp_path, parts):
    for part in parts:
        part["schedule"] = {"0": 1.0, "7": 0.0}
    with raises(DataError, "data.mixture.weight"):
        tiny.run(recipe(tmp_path, parts), reward=None)
    tiny.run(recipe(tmp_path, parts, supervised={"steps": 7}), reward=None)


def test_files_that_shrink_between_runs_are_other_data(tmp_path, parts):
    made = recipe(tmp_path, parts)
    before = recipe_prompts(made)
    write(tmp_path / "few.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    after = recipe_prompts(made)
    assert before.fingerprint() != after.fingerprint() and len(after) < len(before)


# ---- lengths and templates by source ----


@pytest.mark.slow
def test_a_schedule_by_tokens_counts_those_behind_the_template(tmp_path, parts):
    parts[0] |= {"schedule": {"0": 1.0, "200": 0.0}, "schedule_by": "tokens", "template": "chatml"}
    made = recipe(tmp_path, parts, data={"tokenizer": "bpe:300"}, model={"context": 32})
    rows, _ = tokenise(made)
    few, more = (row.tokens / row.samples for row in rows)
    assert few > more + 3  # the tokens of chatml's turns
    first = read_metrics(tiny.run(made, reward=None).directory)
    drawn = [(r["mixture/few"], r["mixture/more"]) for r in first]
    assert drawn[0][0] and not any(few for few, _ in drawn[3:])


def test_membership_does_not_depend_on_the_layout(tmp_path, parts):
    made = recipe(tmp_path, parts)
    train = recipe_prompts(made).split(0.2)[0]
    orders = [mixed(one, train.parts, None) for one in (made, made.replaced("cluster", workers=4, backend="local"))]
    drawn = [order.take(stream(made.seed, "examples"), 48, 16) for order in orders]
    assert np.array_equal(*drawn)


# ---- packing ----


@pytest.mark.slow
def test_without_packing_each_sample_is_alone_and_the_loss_is_the_same(tmp_path, parts, monkeypatch):
    plan, counts = engine.plan_micros, []

    def counted(*args, **how):
        counts.append(len((found := plan(*args, **how)).learn))
        return found

    monkeypatch.setattr(engine, "plan_micros", counted)
    losses = []
    for packing in ("fit", "none"):
        made = recipe(tmp_path / packing, parts, supervised={"steps": 2}, data={"packing": packing})
        losses.append([r["loss"] for r in read_metrics(tiny.run(made, reward=None).directory)])
        counts.append(0)
    assert max(counts[: counts.index(0)]) < 16 and counts[-3:] == [16, 16, 0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
