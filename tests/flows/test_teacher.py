"""Distillation from a teacher with another tokenizer, whole runs. ``python -m tests.flows.test_teacher FOLDER`` writes
the tokenizer of numbers."""

import json
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import DataError, RecipeError
from tilth.data.prompts import PromptSet
from tilth.data.sources import from_records
from tilth.data.tokenizer import EOS, PAD, Tokenizer
from tilth.flows.step_log import StepLog
from tilth.launch.checks import check_algorithm
from tilth.runs.metrics import Metrics
from tilth.runs.signals import Interrupted
from tilth.runs.state import RunState

ONCE = {"eval_every": 0, "save_every": 40}
STUDENT = {"flow": "distill", "supervised": {"steps": 1}, "rollout": {"max_tokens": 6}}
LEARNS = {"advantage": "distill", "loss": "reinforce", "steps": 4, "options": {"align": "characters"}}


def numbers() -> Tokenizer:
    """Byte-level BPE in which each number below 100 is one token."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings = {"special_tokens": [PAD, EOS], "initial_alphabet": sorted(alphabet), "show_progress": False}
    core.train_from_iterator([f"{i:02}" for i in range(100)] * 2, trainers.BpeTrainer(vocab_size=358, **settings))
    return Tokenizer(core, EOS, PAD)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run whose tokens are numbers."""
    folder = tmp_path_factory.mktemp("teacher")
    numbers().save(folder / "numbers")
    learned = {"steps": 6, "lr": 1e-2, "check_every": 40}
    made = tiny.recipe(folder, flow="sft", data={"tokenizer": str(folder / "numbers")}, supervised=learned, run=ONCE)
    return str(tiny.run(made).directory)


def student(folder, path, callbacks=(), **sections):
    named = {"path": path, **sections.pop("reference", {})}
    algorithm = {**LEARNS, **sections.pop("algorithm", {})}
    made = tiny.recipe(folder, **{**STUDENT, "reference": named, "algorithm": algorithm, "run": ONCE, **sections})
    return tiny.run(made, callbacks=callbacks).directory


def sampled(directory):
    return [record for record in tiny.numbers(directory) if record["phase"] == "distill"]


def test_a_number_is_one_token_there_and_two_here():
    found = numbers()
    assert [len(found.encode(f"{i:02}")) for i in range(100)] == [1] * 100


def test_a_run_learns_from_a_teacher_with_another_tokenizer(tmp_path, teacher):
    watcher = tiny.Recorder()
    records = sampled(student(tmp_path, teacher, [watcher]))
    assert all(0 <= record["reference/unaligned"] < 1 and record["kl_ref"] > 0 for record in records)
    assert any(text.startswith("align = characters: 32 prompts") for text in watcher.messages)


def test_with_the_same_tokenizer_a_run_is_the_plain_one_bit_for_bit(tmp_path):
    same = str(tiny.run(tiny.recipe(tmp_path / "t", flow="sft", run=ONCE)).directory)
    plain = student(tmp_path / "a", same, algorithm={"options": {}})
    aligned = student(tmp_path / "b", same)
    assert tiny.weights(plain) == tiny.weights(aligned)
    records = sampled(aligned)
    assert [record.pop("reference/unaligned") for record in records] == [0.0] * 4
    assert tiny.same(records, sampled(plain))


@pytest.mark.slow  # its teacher has no state; other roles in test_roles.py
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, teacher):
    whole = student(tmp_path / "whole", teacher)
    stop = tiny.Recorder(lambda record: signal.raise_signal(signal.SIGINT) if record["step"] == 3 else None)
    with pytest.raises(Interrupted):
        student(tmp_path / "again", teacher, [stop])
    again = student(tmp_path / "again", teacher)
    assert tiny.weights(again) == tiny.weights(whole) and tiny.same(tiny.numbers(again), tiny.numbers(whole))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [{}, {"fsdp": 2}, {"tp": 2}, {"hdp": 2}], ids=str)
def test_on_two_workers_it_is_the_same(tmp_path, teacher, layout):
    """Each rank translates its rows, and the controller plans the teacher's passes from their lengths."""
    one = sampled(student(tmp_path / "one", teacher))
    cluster = {"backend": "local", "workers": 2}
    micro = {"threads": 1, "micro_tokens": 8} if "hdp" in layout else {"threads": 1}
    two = sampled(student(tmp_path / "two", teacher, cluster=cluster, reference={"layout": layout}, train=micro))
    for a, b in zip(two, one, strict=True):
        assert a["reference/unaligned"] == b["reference/unaligned"] or "hdp" in layout
        assert a["kl_ref"] == pytest.approx(b["kl_ref"], rel=1e-3)


@pytest.mark.slow
def test_a_student_comes_closer_to_a_teacher_with_another_tokenizer(tmp_path, teacher):
    sections = {"algorithm": {"steps": 16}, "optimizer": {"lr": 1e-2}, "supervised": {"steps": 0}}
    records = sampled(student(tmp_path, teacher, rollout={"prompts": 16, "max_tokens": 6}, **sections))
    gap = [record["kl_ref"] for record in records]
    assert np.mean(gap[-5:]) < 0.8 * np.mean(gap[:5])


# ---- refused ----


@pytest.mark.parametrize(
    "sections, key",
    [
        ({"algorithm": {"kl_coef": 0.1}}, "algorithm.kl_coef.align"),
        ({"algorithm": {"options": {"align": "characters", "horizon": 0.5}}}, "algorithm.options.horizon.align"),
        ({"rollout": {"environment": "word-game"}}, "rollout.environment.align"),
        ({"flow": "grpo", "algorithm": {"kl_coef": 0.1}}, "chunk_tokens"),
        ({"flow": "grpo", "algorithm": {"kl_coef": 0.1, "advantage": "grpo"}}, "algorithm.options.align"),
        ({"algorithm": {"advantage": "grpo"}}, "algorithm.advantage.ref_logprobs"),
        ({"algorithm": {"options": {"align": "words"}}}, "distill.align"),
    ],
)
def test_what_compares_tokens_is_refused(tmp_path, sections, key):
    made = {**STUDENT, "reference": {"path": "x"}, **sections, "algorithm": {**LEARNS, **sections.get("algorithm", {})}}
    with raises(RecipeError, key):
        check_algorithm(tiny.recipe(tmp_path, **made))


def test_a_teacher_that_cannot_write_the_prompts_or_has_no_tokenizer_is_refused(tmp_path):
    prompts = PromptSet(from_records([{"prompt": f"{a}x", "answer": a} for a in "abcdefgh"]))
    letters = tiny.run(tiny.recipe(tmp_path / "t", flow="sft", run=ONCE), prompts=prompts).directory
    with raises(DataError, "tokenizer.+"):
        student(tmp_path / "s", str(letters))
    for file in (letters / "model").glob("tokenizer*"):
        file.unlink()
    with raises(DataError, "tokenizer.json"):
        student(tmp_path / "s", str(letters))


def test_a_teacher_with_less_context_is_refused(tmp_path, teacher):
    with raises(RecipeError, "reference.path.context"):
        student(tmp_path, teacher, model={"context": 17})


if __name__ == "__main__":
    numbers().save(sys.argv[1])


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ([("", 6, 10)], ["6 of 10"]),
        ([("", 5, 10), ("", 6, 10)], []),
        ([("a", 0, 90), ("b", 10, 10), ("b", 10, 10)], ["reference.teachers.b: 10 of 10"]),
        ([("a", 0, 0), ("a", 6, 10)], ["reference.teachers.a: 6 of 10"]),  # the first step has no row of it
    ],
)
def test_a_teacher_with_which_most_of_its_first_answers_cannot_be_aligned_is_named(steps, warned):
    warnings, log = list[str](), StepLog.__new__(StepLog)
    log.metrics, log.state, log.say = Metrics(), SimpleNamespace(step=0, aligned=[]), print
    log.directory = SimpleNamespace(warn=lambda step, text: warnings.append(text))
    for teacher, lost, tokens in steps:
        log.add_unaligned(lost, tokens, teacher)
    assert [text.partition(" tokens")[0] for text in warnings] == warned
    lost, tokens = (sum(step[i] for step in steps) for i in (1, 2))
    assert log.metrics.values()["reference/unaligned"] == lost / tokens
    log.state = RunState(**json.loads(json.dumps(vars(log.state))))
    log.add_unaligned(8, 10, steps[-1][0])
    assert len(warnings) == len(warned), "a resumed run does not warn again"
