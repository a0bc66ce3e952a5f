"""Evaluation: completions are those of the model, numbers are those of the completions, the missing count nowhere."""

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cli import speaking
from tests.errors import raises
from tilth.core.errors import DataError, RewardError
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.request import SamplingParams
from tilth.envs.pool import EnvironmentPool
from tilth.launch.evaluate import (
    EvalSettings,
    Evaluation,
    Sample,
    check_out,
    evaluate,
    evaluate_episodes,
    write_completions,
)
from tilth.rewards.process_pool import Outcome, RewardPool
from tilth.rl.passk import avg_at_k, interval, pass_at_k
from tilth.runs.models import load_model

PROMPTS = PromptSet.of([{"prompt": f"{a}+{a + 3}=", "answer": str(2 * a + 3)} for a in range(12)])
SHORT = SamplingParams(max_tokens=8)


def even(prompt, completion, info):
    """Right for an even number of characters; raises for what begins with a 7, and says its format apart."""
    if completion.startswith("7"):
        raise ValueError("seven")
    return {
        "reward": 2.0 * (len(completion) % 2 == 0),
        "correct": len(completion) % 2 == 0,
        "format": "+" in completion,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "m"
    speaking.directory(path, tokenizer=Tokenizer.characters("0123456789+="), context=48)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def pool():
    with RewardPool(even) as made:
        yield made


def run(model, pool, *, prompts=PROMPTS, **how):
    return evaluate(model, prompts, pool, EvalSettings(**{"sampling": SHORT, **how}))


def completions(found):
    return {(s.prompt.index, s.number): s.trajectory.tokens.tolist() for s in found.samples}


# ---- episodes ----

ECHO = """
import tilth

class Echo(tilth.Environment):
    def reset(self, info):
        self.said, self.info = [], info
        return [{"role": "user", "content": info["prompt"]}]

    def step(self, message):
        self.said.append(message["content"])
        return [{"role": "user", "content": "1+1="}], len(self.said) == 2

    def reward(self):
        if self.info["answer"] == "7":
            raise ValueError("seven")
        return {"reward": len("".join(self.said)), "correct": len(self.said) == 2}
"""


@pytest.mark.dist
def test_episodes_are_played_as_in_a_run(model, tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    how = EvalSettings((1, 2), 2, SamplingParams(max_tokens=8, stop=("=",)), seed=3)
    pool = EnvironmentPool(f"{tmp_path / 'echo.py'}:Echo")
    try:
        found, again = (evaluate_episodes(model, PROMPTS, pool, how, turns=2) for _ in range(2))
        cut = evaluate_episodes(model, PROMPTS, pool, how, turns=1)
        with raises(DataError, "prompts"):
            evaluate_episodes(model, PromptSet(PROMPTS.source, PROMPTS.rows[:0]), pool, how, turns=2)
    finally:
        pool.close()
    assert completions(found) == completions(again) and len(found.samples) == 24
    assert len(found.missing) == 2 and "seven" in found.summary()["missing_reason"]
    for sample in found.samples:
        ids = model.tokenizer.encode(sample.prompt.text)
        assert sample.trajectory.tokens[: len(ids)].tolist() == ids
        assert sample.prompt.answer == "7" or sample.outcome.parts["turns"] == 2.0 - (not sample.right)
    assert {s.trajectory.finish for s in cut.samples} == {"length", "error"} and not any(s.right for s in cut.samples)


# ---- completions ----


def test_greedy_answers_are_those_of_the_plain_loop(model, pool):
    found = run(model, pool, sampling=SamplingParams(max_tokens=8, temperature=0.0))
    decoder = speaking.decoder(model.tokenizer, context=48)
    for sample in found.samples:
        ids = model.tokenizer.encode(sample.prompt.text)
        assert sample.trajectory.tokens.tolist() == [*ids, *speaking.greedy(decoder, ids, 8, model.tokenizer.stop_ids)]
        begin = sample.trajectory.text
        assert begin == model.tokenizer.decode(sample.trajectory.tokens[len(ids) :])


def test_a_template_makes_the_prompts_and_ends_the_answers(tmp_path):
    decoder, tokenizer = speaking.directory(tmp_path / "m", template="chatml")
    with RewardPool("exact") as exact:
        greedy = SamplingParams(max_tokens=8, temperature=0.0)
        found = run(load_model(tmp_path / "m"), exact, sampling=greedy, template="model", prompts=PROMPTS.subset(4))
    template = make_template("model", tokenizer)
    for sample in found.samples:
        (ids,) = template.prompts([sample.prompt])
        assert sample.trajectory.tokens.tolist() == [*ids, *speaking.greedy(decoder, ids, 8, template.stops)]


def test_the_same_again_and_something_else_with_another_seed(model, pool):
    first, again, other = (run(model, pool, k=(4,), seed=seed) for seed in (1, 1, 2))
    assert completions(first) == completions(again) != completions(other)
    times = ("seconds", "tokens_per_second")
    a, b = ({k: v for k, v in f.summary().items() if k not in times} for f in (first, again))
    assert json.dumps(a) == json.dumps(b)


def test_a_sample_is_the_same_whatever_else_is_asked(model, pool):
    """However many prompts and samples there are and however many decode at once."""
    few = {"prompts": PROMPTS.subset(6)}
    all_of_them = completions(run(model, pool, k=(4,), **few))
    for other in ({"n": 2}, {"n": 4, "prompts": PROMPTS.subset(3)}, {"n": 4, "max_rows": 3}):
        some = completions(run(model, pool, **{**few, **other}))
        assert some and all(all_of_them[key] == tokens for key, tokens in some.items())


def test_progress_is_told(model, pool):
    told = []
    evaluate(model, PROMPTS, pool, EvalSettings(sampling=SHORT, n=2), lambda done, of: told.append((done, of)))
    assert told == [(i, 24) for i in range(25)]


def test_nothing_is_told_of_what_cannot_begin(model, pool):
    told = []
    with raises(DataError, "prompts.0.length"):
        evaluate(
            model, PROMPTS, pool, EvalSettings(sampling=SamplingParams(max_tokens=10**6)), lambda *far: told.append(far)
        )
    assert not told


# ---- numbers ----


def fake(rewards, *, parts=None, k=(1,), lengths=None):
    """An evaluation with these rewards, [prompts][samples]; None: missing."""
    from tilth.core.trajectory import Trajectory

    samples = []
    for i, row in enumerate(rewards):
        for j, reward in enumerate(row):
            n = 3 if lengths is None else lengths[i][j]
            said = Trajectory(0, i, i, np.arange(n + 1), np.r_[0, np.ones(n)].astype(np.uint8), np.zeros(n + 1))
            said.finish = "length" if n > 4 else "stop"
            outcome = Outcome(
                reward, {} if parts is None or reward is None else parts[i][j], "" if reward is not None else "why"
            )
            samples.append(Sample(PROMPTS[i], j, said, outcome))
    return Evaluation(EvalSettings(k=k, n=len(rewards[0]), sampling=SHORT), samples, {"generate": 2.0, "score": 1.0})


def test_numbers_by_brute_force():
    rewards = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [1, 0, 1, 1]]
    found = fake(rewards, k=(1, 2, 4))
    for k in (1, 2, 4):
        shares = [sum(map(any, combinations(row, k))) / math.comb(4, k) for row in rewards]
        value, prompts = found.passes(k)
        assert value.value == pytest.approx(np.mean(shares)) and prompts == 5
        assert value.low <= value.value <= value.high
        assert found.averages(k)[0].value == pytest.approx(np.mean([sum(row[:k]) / k for row in rewards]))
    assert found.parts()["reward"].value == pytest.approx(0.5)


def test_what_is_missing_counts_nowhere_and_is_told():
    found = fake([[1, None, 0], [None, None, None], [None, 1, 1]], k=(1, 2))
    assert len(found.missing) == 5
    value, prompts = found.passes(2)
    assert prompts == 2 and value.value == 1.0  # both known samples of each: one right is enough
    assert found.averages(2)[0].value == pytest.approx((0.5 + 1.0) / 2)
    assert found.parts()["reward"].value == pytest.approx((0.5 + 1.0) / 2)
    summary = found.summary()
    assert (summary["missing"], summary["missing_reason"], summary["pass"]["1"]["prompts"]) == (5, "why", 2)


def test_a_part_that_says_correct_decides():
    parts = [[{"correct": 1.0, "format": 0.0}], [{"correct": 0.0, "format": 1.0}]]
    found = fake([[0.2], [3.0]], parts=parts)
    assert [s.right for s in found.samples] == [True, False]
    assert found.passes(1)[0].value == found.averages(1)[0].value == 0.5
    means = {name: v.value for name, v in found.parts().items()}
    assert means == {"reward": pytest.approx(1.6), "correct": 0.5, "format": 0.5}


def test_a_part_that_only_some_have():
    found = fake([[0.0, 0.5]], parts=[[{"format": 1.0}, {}]])
    assert found.parts()["format"].value == 1.0 and found.averages(2)[0].value == 0.25
    assert [s.right for s in found.samples] == [False, False]


def test_lengths_and_speed():
    summary = fake([[0, 1], [1, 1]], lengths=[[2, 6], [4, 8]], k=(2,)).summary()
    assert summary["length"] == {"mean": 5.0, "max": 8, "cut": 0.5}
    assert summary["tokens"] == 20 and summary["tokens_per_second"] == pytest.approx(10)


def test_the_whole_way(model, pool):
    """Rewards from the pool reach the sample they were made for; the numbers are those of the records."""
    found = run(model, pool, k=(1, 3), n=6)
    records = list(found.records())
    rewards = np.full((12, 6), np.nan)
    for r in records:
        said = r["text"]
        if said.startswith("7"):
            assert r["reward"] is None and r["right"] is None and "ValueError: seven" in r["reason"]
            continue
        right = len(said) % 2 == 0
        assert (r["reward"], r["right"], r["parts"]) == (2.0 * right, right, {"correct": right, "format": "+" in said})
        rewards[r["prompt"], r["sample"]] = right
        assert model.tokenizer.decode(r["prompt_tokens"]) == r["prompt_text"] and len(r["logprobs"]) == len(r["tokens"])
    assert 0 < np.isnan(rewards).sum() == len(found.missing) < 72
    known = ~np.isnan(rewards)
    assert found.passes(3)[0] == interval(pass_at_k((rewards == 1).sum(1), known.sum(1), 3))
    assert found.averages(3)[0] == interval(avg_at_k(rewards, 3))


# ---- what is kept ----


def test_lines_and_parquet_keep_the_same(model, pool, tmp_path):
    found = run(model, pool, n=3)
    for name in ("c.jsonl", "c.parquet"):
        check_out(tmp_path / name)
        write_completions(tmp_path / name, found)
    lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    rows = [{**row, "parts": dict(row["parts"])} for row in pq.read_table(tmp_path / "c.parquet").to_pylist()]
    assert len(lines) == 36 and lines == rows == json.loads(json.dumps(list(found.records())))


@pytest.mark.parametrize(("name", "key"), [("c.csv", "path.suffix"), ("no/c.jsonl", "path.parent")])
def test_where_it_cannot_be_kept_is_said_before(tmp_path, name, key):
    with raises(DataError, key):
        check_out(tmp_path / name)


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"k": ()}, "k"),
        ({"k": (0,)}, "k"),
        ({"k": (8,), "n": 4}, "n"),
        ({"k": (2,), "sampling": SamplingParams(temperature=0.0)}, "temperature"),
    ],
)
def test_what_cannot_be_asked(how, key):
    with raises(DataError, key):
        EvalSettings(**how)


def test_a_prompt_that_leaves_no_room_is_named(model, pool):
    long = PromptSet.of([{"prompt": "1+1="}, {"prompt": "1" * 45}])
    with raises(DataError, "prompts.1.length"):
        run(model, pool, prompts=long)


def test_no_prompts(model, pool):
    with raises(DataError, "prompts"):
        run(model, pool, prompts=PROMPTS.subset(0))


def test_a_reward_that_never_works_is_an_error(model):
    with RewardPool(lambda prompt, completion, info: info["nothing"]) as broken:
        with raises(RewardError, "reward"):
            run(model, broken)


def test_a_model_without_a_tokenizer(model, pool):
    with raises(DataError, "tokenizer.json"):
        run(model._replace(tokenizer=None), pool)


def test_samples_default_to_the_greatest_k():
    assert (
        EvalSettings(k=(1, 8), sampling=SHORT).samples == 8
        and EvalSettings(k=(1, 8), n=16, sampling=SHORT).samples == 16
    )
    assert replace(EvalSettings(), seed=3).samples == 1
