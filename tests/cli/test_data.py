"""``tilth data show``: the tokens, masks and counts are those of the run, and what would stop it is said."""

import json
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from tokenizers import processors
from typer.testing import CliRunner

from tests.data.test_examples import pair_tokenizer
from tests.errors import raises
from tests.launch.laws import costs_of
from tilth.cli.data import coloured, lines, plain, runs
from tilth.cli.main import app
from tilth.config.load import from_dict
from tilth.data.documents import Corpus
from tilth.data.examples import supervised
from tilth.data.prompts import load_source
from tilth.data.template import TemplateError, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.launch.data_view import Lengths, ShownExample, look
from tilth.plan.costs import save_costs

TALKS = [
    {
        "messages": [
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "It is 4."},
            {"role": "user", "content": "And 3+3?"},
            {"role": "assistant", "content": "6 — naturally."},
        ]
    },
    {"prompt": "Say ho", "answer": "ho"},
    {"prompt": "Say hi", "answer": "hi"},
]


@pytest.fixture
def talks(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(t) + "\n" for t in TALKS))
    return path


def sft(source, **sections):
    data = {"source": str(source), "tokenizer": "bpe:300", "template": "chatml", "holdout": 0.0}
    sections["data"] = {**data, **sections.get("data", {})}
    return from_dict({"flow": "sft", "supervised": {"steps": 4}, **sections})


def toml(folder, text):
    (folder / "r.toml").write_text(text)
    return str(folder / "r.toml")


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


# ---- prompts ----


def test_examples_are_those_of_the_run(talks):
    recipe = sft(talks)
    view = look(recipe, 3)
    prompts = load_source(recipe.data)
    said = [
        "".join(f"{turn['role']}\n{turn['content']}\n" for turn in p.messages) or p.text + p.answer for p in prompts
    ]
    tokenizer = Tokenizer.train(said, 300)
    examples = supervised(list(prompts), make_template("chatml", tokenizer), 256)
    assert [s.index for s in view.examples] == [0, 1, 2]
    for shown, example in zip(view.examples, examples):
        assert shown.tokens == example.tokens.tolist() and shown.mask == example.mask.tolist()
    whole = [len(e.tokens) for e in examples]
    assert view.lengths["example"] == Lengths.of(np.array(whole)) and view.lengths["example"].most == max(whole)
    assert view.lengths["loss"].rows == 3 and view.lengths["loss"].least == 2
    assert view.loss_share == pytest.approx(sum(e.mask.sum() for e in examples) / sum(whole))
    assert (view.vocabulary, view.template) == (tokenizer.vocab_size, "chatml")
    assert view.stops == ["<|im_end|>", "<eos>"] and view.stable == "prefix-stable on 3 examples"
    assert (view.train, view.heldout, view.seen, view.problems) == (3, 0, 3, [])


def test_lengths_are_the_percentiles():
    found = Lengths.of(np.arange(101))
    assert found == Lengths(101, 0, 50.0, 95.0, 100)


def test_packing_is_that_of_the_trainer(talks):
    found = look(sft(talks, supervised={"steps": 1, "batch": 3}, train={"micro_tokens": 90}), 0)
    whole = found.lengths["example"]
    total = round(found.packing.fill * found.packing.micro_batches * 90)
    assert found.packing.rows == 3 and found.packing.micro_batches == (2 if total > 90 else 1)
    assert found.packing.padding == pytest.approx(1 - total / (3 * whole.most))


def test_a_row_longer_than_the_room_fills_a_micro_batch(talks):
    room = look(sft(talks), 0).lengths["example"].least - 1
    found = look(sft(talks, supervised={"steps": 1, "batch": 3}, train={"micro_tokens": room}), 0)
    assert found.packing.micro_batches == 3 and found.packing.fill == 1


def long_and_short(tmp_path, count=64, **sections):
    """One record in eight is 20 times as long as the others."""
    rows = [{"prompt": "a", "answer": "b" * (300 if i % 8 == 0 else 15)} for i in range(count)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"template": "", "tokenizer": ""}
    given = {"supervised": {"steps": 1, "batch": 16}, "model": {"context": 512}, "train": {"micro_tokens": 512}}
    workers = {"cluster": {"backend": "local", "workers": 4}, "run": {"dir": str(tmp_path / "runs")}}
    return sft(tmp_path / "long.jsonl", data=data, **{**given, **workers, **sections})


def test_balance_is_predicted_for_this_layout_beside_others(tmp_path):
    found = look(long_and_short(tmp_path), 0).balance
    assert sum(b.rows for b in found.lengths) == pytest.approx(1)
    assert sum(b.tokens for b in found.lengths) == pytest.approx(1) == pytest.approx(sum(b.cost for b in found.lengths))
    assert [(b.least, b.most) for b in found.lengths] == [(16, 31), (256, 511)]
    assert found.lengths[1].rows == 1 / 8 and found.lengths[1].tokens < found.lengths[1].cost
    here = {one.balance: one for one in found.layouts if one.here}
    assert set(here) == {"tokens", "cost", "none"} and here["cost"].layout == {"dp": 4}
    assert here["cost"].seconds <= here["tokens"].seconds < here["none"].seconds
    assert here["cost"].spread <= here["tokens"].spread < here["none"].spread
    others = [one for one in found.layouts if not one.here]
    assert others and all(one.balance == "tokens" and one.seconds > 0 for one in others)
    assert [one.seconds for one in others] == sorted(one.seconds for one in others)
    assert len({str(one.layout) for one in found.layouts}) == len(others) + 1


def test_costs_of_a_file_predict_the_update(tmp_path):
    save_costs(costs_of(1e-3), tmp_path / "costs.json")
    made = long_and_short(tmp_path, cluster={"costs": str(tmp_path / "costs.json")})
    view = look(made, 0)
    (here,) = [one for one in view.balance.layouts if one.balance == "cost" and one.here]
    tokens = view.lengths["example"]
    assert view.balance.error == 0.01 and "costs.json" in view.balance.source and here.layout == {}
    batch = 1e-3 * view.packing.fill * view.packing.micro_batches * view.packing.room
    assert here.seconds == pytest.approx(batch, rel=0.1) and here.spread == here.idle == 0
    assert tokens.most > 300


def test_balance_is_shown_and_in_json(tmp_path):
    recipe = long_and_short(tmp_path)
    text = (
        f'flow = "sft"\n[data]\nsource = "{recipe.data.source}"\nholdout = 0.0\n[supervised]\nsteps = 1\nbatch = 16\n'
    )
    more = ["model.context=512", "cluster.backend=local", "cluster.workers=2", f"run.dir={tmp_path}"]
    shown = call("data", "show", toml(tmp_path, text), *more)
    assert shown.exit_code == 0, shown.output
    assert "256 to 511" in shown.stdout and "dp=2" in shown.stdout and "none" in shown.stdout
    plain_ = json.loads(call("data", "show", toml(tmp_path, text), *more, "--json").stdout)["balance"]
    assert {one["balance"] for one in plain_["layouts"] if one["here"]} == {"tokens", "cost", "none"}


# ---- mixtures ----


def mixture(folder, flow="sft", steps=3, **more):
    """Many short sums and few long ones, two steps of which are of the long ones."""
    pairs = {"chosen": "b" * 8, "rejected": "c"}
    short = [{"prompt": f"{i}?", "answer": "b"} | (pairs if flow == "dpo" else {}) for i in range(40)]
    long = [{"prompt": f"{i}?", "answer": "b" * 90} | (pairs if flow == "dpo" else {}) for i in range(10)]
    parts = []
    for name, rows, weight in (("short", short, 3.0), ("long", long, 1.0)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{" * (flow != "dpo"))
        parts.append(
            {
                "name": name,
                "on_error": "skip",
                "source": str(folder / f"{name}.jsonl"),
                "weight": weight,
                **more.pop(name, {}),
            }
        )
    data = {"mixture": parts, "holdout": 0.0}
    given = {"supervised": {"steps": steps, "batch": 8}, "model": {"context": 128}, "run": {"dir": str(folder)}}
    return from_dict({"flow": flow, "data": data, **given, **more})


@pytest.mark.parametrize("flow", ["sft", "dpo", "pretrain"])
def test_a_mixture_is_shown_as_the_run_draws_it(tmp_path, flow):
    recipe = mixture(tmp_path, flow, short={"schedule": {"0": 1.0, "2": 0.0}})
    view = look(recipe, 0)
    assert [(one.source, one.weight) for one in view.mixture] == [("short", 0.75), ("long", 0.25)]
    drawn = [one.drawn for one in view.mixture]
    assert any("1 by errors left out" in note for note in view.notes) == (flow != "dpo")
    assert sum(drawn) == 24 and drawn[0] < 16 and drawn[1] > 8 and not view.problems
    if flow != "dpo":  # where the long ones are as likely as any
        assert view.packing.rows == 8 and view.packing.fill * view.packing.micro_batches > look_fill(tmp_path, flow)
    else:
        assert view.packing.rows == 16
    text = "\n".join(lines(view))
    assert "75.0% of the first step" in text and f"the run draws {drawn[1]:,}" in text


def test_neighbouring_draws_of_one_prompt_are_samples_of_their_own(tmp_path):
    recipe, short = mixture(tmp_path, "dpo"), tmp_path / "short.jsonl"
    short.write_text(short.read_text().splitlines()[0])  # 18 draws of one prompt
    view = look(recipe, 0)
    assert view.packing.rows == 16 and not view.problems


@pytest.mark.parametrize("flow", ["sft", "pretrain"])
def test_a_wrong_template_of_a_source_is_named_by_the_key_of_the_source(tmp_path, flow):
    with raises(TemplateError, "data.mixture.long.template"):
        look(mixture(tmp_path, flow, long={"template": "chatlm"}), 0)


def look_fill(folder, flow):
    """Room that is filled where no step draws more of the long ones than their share."""
    found = look(mixture(folder, flow), 0).packing
    return found.fill * found.micro_batches


@pytest.mark.parametrize(
    ("ends", "said"),
    [({"at_end": "stop"}, "source long of data.mixture ends"), ({"schedule": {"0": 0.0, "9": 1.0}}, "")],
)
def test_a_mixture_that_ends_before_the_run_would_stop_it(tmp_path, ends, said):
    view = look(mixture(tmp_path, steps=20, long=ends), 0)
    assert [said in problem for problem in view.problems] == ([True] if said else [])
    assert [one.drawn is None for one in view.mixture] == [bool(said)] * 2 and view.packing is not None


def test_a_part_of_a_large_source_is_told(talks, monkeypatch):
    monkeypatch.setattr("tilth.launch.data_view.MOST", 2)
    view = look(sft(talks), 1)
    assert (view.seen, view.train) == (2, 3)


def test_a_task_needs_no_file():
    result = call("data", "show", "addition-grpo", "data.digits=1", "--n", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert any(line.startswith("template") and "plain" in line and "<eos>" in line for line in lines)
    assert lines[-2] == "  0·+·0·=" and lines[-1] == "+ 0·0·<eos>"


# ---- what would stop the run ----


def test_too_long_examples_and_prompts(talks):
    view = look(sft(talks, model={"context": 30}, rollout={"max_tokens": 1}), 0)
    assert view.longer == {"prompt": 1, "example": 1}
    assert view.problems[:1] == ["1 examples are longer than the context of 30 tokens"]
    data = {"source": str(talks), "tokenizer": "bpe:300", "template": "chatml", "holdout": 0.0}
    view = look(from_dict({"data": data, "model": {"context": 64}, "rollout": {"max_tokens": 40}}), 0)
    assert view.problems[:1] == ["1 prompts are longer than the 24 tokens that model.context leaves for them"]
    assert view.packing is None  # nothing supervised


def test_answers_longer_than_a_completion_can_be(talks):
    data = {"source": str(talks), "tokenizer": "bpe:300", "template": "chatml", "holdout": 0.0}
    view = look(from_dict({"data": data, "rollout": {"max_tokens": 8}, "reward": {"function": "exact"}}), 1)
    last = "".join(view.examples[0].texts).rsplit("assistant\n", 1)[1]
    assert last.startswith("6 ") and last.endswith("<|im_end|>")
    most = view.examples[0].mask[::-1].index(0)  # of the last turn, not of both
    assert view.notes == [f"1 given answers are longer than rollout.max_tokens = 8 (most: {most})"]
    assert sum(view.examples[0].mask) > most
    assert not look(from_dict({"data": data, "rollout": {"max_tokens": 99}, "reward": {"function": "exact"}}), 1).notes


def test_answers_that_are_missing(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "answer": "2"}\n')
    view = look(sft(tmp_path / "d.jsonl"), 2)
    assert view.problems[:1] == ["1 prompts have no answer, which supervised steps need"]
    assert sum(view.examples[0].mask) == 0 < sum(view.examples[1].mask)


def test_a_template_that_is_not_prefix_stable(talks, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    view = look(sft(talks, data={"template": str(template)}), 3)
    assert "is not prefix-stable: after turn 1 of the assistant, " in view.stable and "talks.jsonl:1" in view.stable
    assert view.problems[:1] == ["1 examples cannot be made"] and view.lengths["example"].rows == 2
    assert [sum(s.mask) > 0 for s in view.examples] == [False, True, True]


def test_the_plain_template_makes_no_promise(talks):
    view = look(_plain(talks), 0)
    assert view.template == "plain" and view.stable == ""


def _plain(talks, **sections):
    talks.write_text("".join(json.dumps(t) + "\n" for t in TALKS[1:]))
    return sft(talks, data={"template": "", **sections.pop("data", {})}, **sections)


def test_what_is_held_out_and_the_rewards_check_would_stop_too(talks, tmp_path):
    (tmp_path / "te.jsonl").write_text(json.dumps({"prompt": "Say " + "hi " * 99, "answer": "x"}) + "\n")
    made = _plain(talks, data={"heldout": str(tmp_path / "te.jsonl")}, model={"context": 64}, rollout={"max_tokens": 8})
    (said,) = look(made, 0).problems
    assert "te.jsonl:1" in said and "model.context is 64" in said
    made = _plain(talks, reward={"function": "gsm8k"})
    (said,) = look(made, 0).problems
    assert "talks.jsonl:1" in said and "'ho'" in said


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    "changes",
    [
        ["reward.function=gsm8k"],
        ["model.context=20"],
        ["train.micro_tokens=4", "policy.layout.hdp=2", "cluster.backend=local", "cluster.workers=2"],
    ],
)
def test_what_would_stop_the_run_fails_the_command(talks, tmp_path, changes, as_json):
    talks.write_text("".join(json.dumps(t) + "\n" for t in TALKS[1:]))
    recipe = toml(tmp_path, f'flow = "sft"\n[data]\nsource = "{talks}"\nholdout = 0.0\n[supervised]\nsteps = 1\n')
    asked = ["data", "show", recipe, "data.tokenizer=bpe:300", "data.template=chatml", "rollout.max_tokens=8", *as_json]
    assert call(*asked).exit_code == 0
    result = call(*asked, *changes)
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["problems"] if as_json else "\nwould stop  " in result.stdout


def test_an_environment_gives_the_reward_and_its_turns_get_what_room_there_is(talks):
    """Episodes share the context; rollout.max_tokens limits one turn."""
    turns = {"environment": "calculator", "max_tokens": 60}
    made = sft(talks, flow="grpo", supervised={}, model={"context": 64}, rollout=turns)
    assert not look(made, 0).problems


def test_errors_are_one_line():
    result = call("data", "show", "none.toml")
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


# ---- documents ----


def test_pieces_of_documents(tmp_path):
    texts = ["one two three " * 20, "four", "five six " * 9]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    recipe = from_dict(
        {
            "flow": "pretrain",
            "model": {"context": 64},
            "data": {"source": str(tmp_path / "d.jsonl"), "holdout": 0.0},
            "rollout": {"max_tokens": 1},
            "supervised": {"steps": 2, "batch": 2},
            "run": {"dir": str(tmp_path)},
        }
    )
    view = look(recipe, 99)
    corpus = Corpus.build(texts, Tokenizer.characters("".join(texts)), 64, tmp_path / ".cache")
    assert corpus.note.startswith("tokens from")  # what the run will read is what was shown
    assert [s.tokens for s in view.examples] == [corpus.tokens([i]).values.tolist() for i in range(len(corpus))]
    assert all(s.mask == [0, *[1] * (len(s.tokens) - 1)] for s in view.examples)
    assert view.lengths["piece"] == Lengths.of(corpus.lengths) and view.train == 3
    assert view.loss_share == pytest.approx(1 - len(corpus) / sum(len(t) + 1 for t in texts))
    assert 0 < view.packing.fill <= 1 and view.packing.rows == 2


# ---- tokenizers that end a text ----


@pytest.mark.parametrize("flow", ["sft", "pretrain"])
@pytest.mark.parametrize(("around", "told"), [("<s> $A </s>", ["</s>"]), ("<s> $A", [])])
def test_an_end_that_the_tokenizer_puts_is_left_out_and_told(tmp_path, flow, around, told):
    pair_tokenizer(tmp_path, around)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "1=", "answer": "4"}) + "\n")
    data = {"source": str(tmp_path / "d.jsonl"), "holdout": 0.0, "tokenizer": str(tmp_path)}
    run = {"dir": str(tmp_path)}
    sections = {"data": data, "supervised": {"steps": 1, "batch": 1}, "run": run, "rollout": {"max_tokens": 1}}
    view = look(from_dict({"flow": flow, "model": {"context": 16}, **sections}), 1)
    assert view.examples[0].texts == ["<s>", "1", "=", "4", "</s>"] and not view.problems
    notes = [note for note in view.notes if "puts" in note]
    assert len(notes) == len(told) and all(token in note for token, note in zip(told, notes))


def test_an_end_that_a_chat_template_never_gets_is_not_told(talks, tmp_path):
    core = tokenizers.Tokenizer.from_str(Tokenizer.train(["one user assistant"] * 2, 300)._core.to_str())
    core.post_processor = processors.TemplateProcessing("$A <eos>", None, [("<eos>", 1)])
    core.save(str(tmp_path / "tokenizer.json"))
    view = look(sft(talks, data={"tokenizer": str(tmp_path)}), 1)
    assert view.template == "chatml" and not view.notes and "<eos>" not in view.examples[0].texts


# ---- how it is printed ----


def test_json_has_everything(talks, tmp_path):
    recipe = toml(tmp_path, f'flow = "sft"\n[data]\nsource = "{talks}"\nholdout = 0.0\n[supervised]\nsteps = 1\n')
    result = call("data", "show", recipe, "data.tokenizer=bpe:300", "data.template=chatml", "--n", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["lengths"]["example"]["rows"] == 3 and found["packing"]["rows"] == 3
    assert [len(e["tokens"]) == len(e["mask"]) == len(e["texts"]) for e in found["examples"]] == [True, True]
    assert "—" not in found["examples"][0]["texts"] and any("Ģ" in t for t in found["examples"][0]["texts"])


def test_the_mask_is_seen_with_and_without_colour():
    example = ShownExample(7, [1, 2, 3, 4], ["a", "\n", "b\x1b[2J", "<eos>"], [0, 0, 1, 1])
    assert plain(example).split("\n") == ["", "[7] 4 tokens, 2 with loss", "  a·⏎", "+ b\\x1b[2J·<eos>"]
    text = coloured(example)
    assert text.plain == "\n[7] 4 tokens, 2 with loss\na⏎\nb\\x1b[2J<eos>"
    green = [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]
    assert green == ["b\\x1b[2J", "<eos>"]


def test_a_long_example_is_cut_and_says_so():
    example = ShownExample(0, list(range(700)), ["x"] * 700, [0] * 650 + [1] * 50)
    assert sum(len(texts) for _, texts in runs(example)) == 600
    assert plain(example).endswith("\n  and 100 tokens more") and plain(example).count("\n") == 3
    assert coloured(example).plain.endswith("\n  and 100 tokens more")


@pytest.mark.parametrize("mask", [[], [0], [1], [0, 1, 1, 0, 1], [1, 0, 0]])
def test_runs_are_the_mask(mask):
    example = ShownExample(0, mask, [str(i) for i in range(len(mask))], mask)
    found = list(runs(example))
    assert [m for m, texts in found for _ in texts] == mask
    assert [t for _, texts in found for t in texts] == example.texts
    assert all(a[0] != b[0] for a, b in pairwise(found))


def test_tokenize_builds_what_a_run_reads(tmp_path):
    for name, texts in (("a", ["one two", "three"]), ("b", ["four five six"] * 3)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    a, b = (f'{{name = "{n}", source = "{tmp_path}/{n}.jsonl", weight = {w}}}' for n, w in (("a", 1.0), ("b", 3.0)))
    keys = ["data.source=", f"data.mixture=[{a}, {b}]", f"run.dir={tmp_path}", "data.holdout=0", "model.context=8"]
    asked = ["data", "tokenize", "pretrain", *keys, "data.tokenizer=characters"]
    shown = CliRunner().invoke(app, [*asked, "--json"])
    assert json.loads(shown.stdout) == [
        {"source": "a", "samples": 2, "tokens": 14, "weight": 0.25},
        {"source": "b", "samples": 6, "tokens": 42, "weight": 0.75},
    ]
    again = CliRunner().invoke(app, asked).stdout
    assert again.count("tokens from") == 2 and "75.0%" in again
