"""The judge role, called directly: what it is asked, what comes of what it says, and that the same is said again."""

import numpy as np
import pytest

from tests.engines.reference import Plain
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.config.schema import JudgeConfig
from tilth.core.batch import Column, Jagged
from tilth.core.trajectory import Trajectory
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.rounds import RoundLimits
from tilth.models.config import DecoderConfig
from tilth.rewards.judging import question, steps
from tilth.roles.experience import OUTCOME, to_batch
from tilth.roles.judge import GRADE, JUDGED_BY, VERDICT, JudgeWorker
from tilth.roles.loader import PromptLoader
from tilth.roles.rollout import Ended

TOKENIZER = Tokenizer.characters("\n #+-0123456789=:?")
PROMPTS = PromptSet.of([{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(5)])
CONTEXT = 48


class Scripted(Plain):
    """An engine that says what it is told to, and remembers what it was asked."""

    max_length = CONTEXT
    version = 40

    def __init__(self, says):
        self.says, self.asked, self.flying = says, [], []

    def submit(self, requests):
        self.asked += requests
        self.flying += requests

    def poll(self):
        flying, self.flying = self.flying, []
        return [trajectory(r.id, 0, self.says(TOKENIZER.decode(r.prompt))) for r in flying]

    def abort(self, id):
        self.flying = [request for request in self.flying if request.id != id]


def trajectory(id, prompt, text):
    tokens = np.array([2, *TOKENIZER.encode(text)], np.int64)
    mask = np.ones(len(tokens), np.uint8)
    mask[0] = 0
    return Trajectory(
        id=id, prompt=prompt, group=0, tokens=tokens, mask=mask, logprobs=np.zeros(len(tokens), np.float32),
        versions=[(1, 0)], finish="stop", text=text,
    )  # fmt: skip


def written(store, *texts):
    """Solutions to the first prompts, with ids from 100."""
    return with_texts(store, to_batch([trajectory(100 + i, i, text) for i, text in enumerate(texts)], store))


def with_texts(store, batch):
    return PromptLoader(PROMPTS, make_template("", TOKENIZER), CONTEXT, store).texts(batch)


def judge(store, engine, **section):
    return JudgeWorker(engine, make_template("", TOKENIZER), JudgeConfig(path="x", **section), store)


def verdicts(says, *texts, **section):
    store = InlineStore()
    engine = Scripted(says)
    found = judge(store, engine, **section).verdicts(written(store, *texts))
    return found, engine


def test_it_is_asked_the_problem_its_answer_and_the_steps_as_a_judge_is_trained():
    _, engine = verdicts(lambda asked: "#-1", "0+0=0\n#0", " 1+1=2 \n\n#2\n")
    for request, prompt, text in zip(engine.asked, PROMPTS, ("0+0=0\n#0", "1+1=2\n#2")):
        assert TOKENIZER.decode(request.prompt) == question(prompt.text, prompt.answer, steps(text))
        assert request.params.temperature == 0 and request.params.stop_tokens == TOKENIZER.stop_ids
    assert [request.id for request in engine.asked] == [100, 101]


def test_what_it_says_becomes_a_verdict_of_each_row():
    said = iter(["#-1", "9-#0", "#1", "#2", "9+9+"])
    found, _ = verdicts(lambda asked: next(said), *["1+1=2\n#2"] * 5)
    assert found[VERDICT].tolist()[:3] == [-1, 0, 1] and np.isnan(found[VERDICT][3:]).all()
    assert found[JUDGED_BY].tolist() == [40] * 5 and found["id"].tolist() == [100, 101, 102, 103, 104]


def test_what_it_cannot_be_asked_about_has_no_verdict_and_harms_no_other():
    store = InlineStore()
    engine = Scripted(lambda asked: "#0")
    strange = [trajectory(100 + i, i, "#1") for i in range(4)]
    texts = ["#0", "\u00e9#0", "1" * CONTEXT, " \n "]
    batch = to_batch([t.__class__(**{**vars_of(t), "text": text}) for t, text in zip(strange, texts)], store)
    found = judge(store, engine).verdicts(with_texts(store, batch))
    assert found[VERDICT][0] == 0 and np.isnan(found[VERDICT][1:]).all() and len(engine.asked) == 1


def vars_of(t):
    return {name: getattr(t, name) for name in ("id", "prompt", "group", "tokens", "mask", "logprobs", "versions",
                                                "finish", "text")}  # fmt: skip


@pytest.mark.parametrize("most, room", [(4, 4), (256, None)])
def test_a_verdict_has_as_much_room_as_the_recipe_and_the_judges_context_leave(most, room):
    _, engine = verdicts(lambda asked: "#0", "#0", max_tokens=most)
    (request,) = engine.asked
    assert request.params.max_tokens == (room or CONTEXT - len(request.prompt))


def test_no_rows_are_no_question():
    found, engine = verdicts(lambda asked: "#0")
    assert len(found[VERDICT]) == 0 == len(engine.asked)


def test_a_real_engine_says_the_same_again():
    """Greedy, so a step that is run again, on the same rows, has the same verdicts."""
    shape = small.config()
    config = DecoderConfig(**{**vars(shape), "vocab_size": TOKENIZER.vocab_size, "max_positions": CONTEXT})
    model = small.Decoder(config)
    model.init_weights_(7)
    engine = Engine(config, EngineOptions(tokenizer=TOKENIZER, seed=1, max_rows=4))
    engine.update_weights(model.named_parameters(), version=12)
    store = InlineStore()
    worker, batch = judge(store, engine, max_tokens=8), written(store, *["1+1=2\n#2", "#2", "7", "0+0=1\n#0", "=\n="])
    said, poll = [], engine.poll
    engine.poll = lambda: [said.append(t.text) or t for t in poll()]
    first, second = worker.verdicts(batch), worker.verdicts(batch)
    assert sorted(said[:5]) == sorted(said[5:]) and len(said) == 10 and first[JUDGED_BY].tolist() == [12] * 5
    assert np.array_equal(first[VERDICT], second[VERDICT], equal_nan=True)


RUBRIC = "{prompt}#{answer}#{completion}:"


def graded(says, *solutions, alone=True, **section):
    store = InlineStore()
    engine, before = Scripted(says), np.float32([0.5, np.nan, 2.0][: len(solutions)])
    worker = judge(store, engine, rubric=RUBRIC, **section)
    batch = written(store, *solutions).with_rows(reward=before, **{OUTCOME: before.copy()})
    return worker.grade(batch, alone=alone), worker, engine


def test_a_judge_grades_every_answer_by_its_rubric():
    found, worker, engine = graded(lambda asked: f"#{len(asked)}", "2", "1+1=\n2")
    assert [TOKENIZER.decode(r.prompt) for r in engine.asked] == ["0+0=#0#2:", "1+1=#2#1+1=\n2:"]
    assert found[GRADE].tolist() == [9, 14] and found["reward"].tolist() == [9, 14] == found[OUTCOME].tolist()
    assert worker.failures() == {}


def test_its_score_is_added_to_another_reward_and_what_misses_either_is_missing():
    replies = {"0+0=#0#1:": "#3", "1+1=#2#2:": "#1", "2+2=#4#3:": "4"}
    found, worker, _ = graded(lambda asked: replies[asked], "1", "2", "3", alone=False)
    assert np.array_equal(found["reward"], np.float32([3.5, np.nan, np.nan]), equal_nan=True)
    assert np.array_equal(found[OUTCOME], np.float32([0.5, np.nan, 2.0]), equal_nan=True)
    assert np.array_equal(found[GRADE], np.float32([3.0, 1.0, np.nan]), equal_nan=True)
    (lost,) = worker.failures().items()
    assert lost[0] == 102 and lost[1]["status"] == "invalid" and "'4'" in lost[1]["reason"]


@pytest.mark.parametrize("solution", ["é", "1" * CONTEXT])
def test_an_answer_that_the_judge_cannot_read_has_no_score(solution):
    store = InlineStore()
    engine = Scripted(lambda asked: "#1")
    worker = judge(store, engine, rubric=RUBRIC)
    batch = to_batch([trajectory(100, 0, "1")], store)
    batch = with_texts(store, put_text(batch, store, solution))
    assert np.isnan(worker.grade(batch, alone=True)["reward"]).all() and not engine.asked
    assert "cannot read" in worker.failures()[100]["reason"]


def early(says, **more):
    """A judge that begins before ``grade``, the samples of a batch as a rollout reports them, and the batch."""
    store = InlineStore()
    worker = JudgeWorker(
        Scripted(says), make_template("", TOKENIZER), JudgeConfig(path="x", rubric=RUBRIC), store, PROMPTS, **more
    )
    batch = written(store, "2", "1+1=\n2", "4")
    batch = batch.with_rows(reward=np.zeros(3, np.float32), **{OUTCOME: np.zeros(3, np.float32)})
    columns = zip(*(batch[n].tolist() for n in ("id", "prompt", "identity")), ("2", "1+1=\n2", "4"))
    return worker, {i: Ended(p, c, t, False) for i, p, c, t in columns}, batch


def samples(ended, *ids):
    return [(i, ended[i].checksum) for i in ids or ended]


def test_what_was_graded_early_is_not_asked_again_and_has_the_score_of_the_batch():
    worker, ended, batch = early(lambda asked: f"#{len(asked)}" if len(asked) != 9 else "?")
    for i in (100, 101):
        worker.advance({i: ended[i]})
    assert len(worker.engine.asked) == 2 and not worker.engine.flying
    known = worker.settle(samples(ended))
    assert set(known) == {*samples(ended, 100, 101)}
    found = worker.grade(batch, alone=True, known=known)
    assert [r.id for r in worker.engine.asked] == [100, 101, 102]
    other, _, same = early(worker.engine.says)
    at_the_end = other.grade(same, alone=True)
    for name in ("reward", OUTCOME, GRADE):
        assert np.array_equal(found[name], at_the_end[name], equal_nan=True)
    assert worker.failures() == other.failures() and set(worker.failures()) == {100, 102}


def in_flight(ended):
    """A judge with these questions in flight."""
    worker, *_, batch = early(lambda asked: "#1")
    worker.rounds.limits = RoundLimits(0)
    worker.advance(ended)
    worker.rounds.limits = RoundLimits(1)
    return worker, batch


def test_what_a_round_leaves_is_graded_at_the_end():
    _, ended, _ = early(lambda asked: "#1")
    worker, _ = in_flight(ended)
    assert len(worker.engine.flying) == 3 and len(worker.settle(samples(ended))) == 3


def test_scores_wait_for_their_own_sample_whatever_is_graded_between():
    """An evaluation is graded while samples of training are in flight; each score is given once."""
    _, ended, _ = early(lambda asked: "#1")
    worker, batch = in_flight({100: ended[100]})
    found = worker.grade(batch.select(np.array([1])), alone=True)
    assert found["reward"].tolist() == [1] and worker._scores.keys() == {*samples(ended, 100)}
    worker.advance({102: ended[102]})
    assert worker.settle(samples(ended, 102)).keys() == {*samples(ended, 102)}
    assert worker.settle([(100, ended[100].checksum + 1)]) == {}
    assert worker.settle(samples(ended)).keys() == {*samples(ended, 100)} and worker.settle(samples(ended)) == {}
    assert [r.id for r in worker.engine.asked] == [100, 101, 102]


def test_samples_that_nobody_asks_for_leave_no_score():
    _, ended, _ = early(lambda asked: "#1")
    worker, _ = in_flight({i: ended[i] for i in (100, 101)})
    worker.forget(samples(ended, 100))
    assert worker.settle(samples(ended)).keys() == {*samples(ended, 101)} and not worker._scores
    worker.advance(ended)
    worker.forget(samples(ended, 100))
    assert worker._scores.keys() == {*samples(ended, 101, 102)}
    worker.forget()
    assert not worker._scores and not worker.engine.flying and worker.settle(samples(ended)) == {}


def test_an_answer_that_cannot_be_read_is_graded_early_too():
    worker, ended, _ = early(lambda asked: "#1")
    worker.advance({100: ended[100]._replace(text="é"), 101: ended[101]})
    assert {i: outcome.value for (i, _), outcome in worker.settle(samples(ended)).items()} == {100: None, 101: 1.0}


def test_each_engine_grades_its_share_early_and_one_whose_replies_depend_on_company_none():
    worker, ended, _ = early(lambda asked: "#1", share=(1, 2))
    worker.advance(ended)
    assert [i for i, _ in worker.settle(samples(ended))] == [101]
    worker.prompts = None
    worker.advance(ended)
    assert worker.settle(samples(ended)) == {}


def put_text(batch, store, text):
    handle = store.put("text", Jagged.of([np.frombuffer(text.encode(), np.uint8)]))
    return batch.with_payload(text=Column.whole(handle, 1))
