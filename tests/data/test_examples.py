"""Token ids of prompts and of supervised examples, with every length checked."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.data.examples import check_examples, check_prompts, encode_prompts, supervised
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer

RECORDS = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "10+20=", "answer": "30"}]


@pytest.fixture
def prompts():
    return PromptSet.of(RECORDS)


@pytest.fixture
def tokenizer(prompts):
    return Tokenizer.characters(prompts.alphabet())


@pytest.fixture
def template(tokenizer):
    return make_template("", tokenizer)


def test_encode_prompts(prompts, tokenizer, template):
    rows = encode_prompts(list(prompts), template, 6)
    assert [tokenizer.decode(r) for r in rows] == ["1+2=", "10+20="] and all(r.dtype == np.int64 for r in rows)


def test_too_long_a_prompt_is_named_with_its_length(prompts, template):
    for check in (
        lambda: encode_prompts(list(prompts), template, 5),
        lambda: check_prompts(prompts, template, 5),
    ):
        with raises(DataError, "record 2.tokens"):
            check()


def test_check_prompts_tells_the_longest(prompts, template):
    assert check_prompts(prompts, template, 6) == 6


def test_check_of_a_large_set_looks_at_the_longest(monkeypatch, template):
    monkeypatch.setattr("tilth.data.examples._CHECKED", 2)
    some = PromptSet.of(["1", "2", "1+2=1+2=", "3", "0"])
    assert check_prompts(some, template, 8) == 8
    with raises(DataError, "record 3.tokens"):
        check_prompts(some, template, 7)


def test_check_of_a_large_set_of_examples_looks_at_the_longest_with_their_answers(monkeypatch, template):
    monkeypatch.setattr("tilth.data.examples._CHECKED", 1)
    some = PromptSet.of([{"prompt": "1+2+3=", "answer": "0"}, {"prompt": "1=", "answer": "1023" * 2}, *RECORDS])
    assert check_examples(some, template, 11) == 11 == len("1=10231023") + 1
    with raises(DataError, "record 2.tokens"):
        check_examples(some, template, 10)


def test_a_prompt_without_tokens(tmp_path):
    core = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1}))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    with raises(DataError, "record 1.empty"):
        encode_prompts(list(PromptSet.of([" "])), make_template("", Tokenizer.load(tmp_path)), 5)


def spaceless_tokenizer(folder, letters):
    """One token per letter; white space is nothing."""
    core = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(["</s>", *letters])}))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(tokenizers.Regex("."), "isolated")]
    )
    core.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.fixture
def spaceless(tmp_path):
    return make_template("", spaceless_tokenizer(tmp_path, "0123+="))


EMPTY = [*RECORDS, {"prompt": "\n", "answer": "3"}]


def test_an_example_whose_prompt_has_no_tokens(spaceless):
    """Nothing would come before the first token that is learned, so that it would be read from its neighbour."""
    some = PromptSet.of(EMPTY)
    assert len(supervised(list(some)[:2], spaceless, 16)) == 2
    for check in (lambda: supervised(list(some), spaceless, 16), lambda: check_examples(some, spaceless, 16)):
        with raises(DataError, "record 3.empty"):
            check()


@pytest.mark.parametrize("check", [check_prompts, check_examples])
def test_check_of_a_large_set_looks_at_the_shortest_too(monkeypatch, spaceless, check):
    monkeypatch.setattr("tilth.data.examples._CHECKED", 1)
    with raises(DataError, "record 3.empty"):
        check(PromptSet.of([*EMPTY, *RECORDS]), spaceless, 16)


def test_supervised_takes_the_loss_on_answer_and_end(prompts, tokenizer, template):
    first, second = supervised(list(prompts), template, 16)
    assert tokenizer.decode(second.tokens, special=True) == "10+20=30<eos>"
    assert second.mask.tolist() == [0] * 6 + [1] * 3 and second.mask.dtype == np.uint8
    assert first.tokens.tolist() == [*tokenizer.encode("1+2=3"), tokenizer.eos_id]


def test_supervised_without_an_answer(template):
    with raises(DataError, "record 2.answer"):
        supervised(list(PromptSet.of([*RECORDS[:1], "1+1="])), template, 16)
    with raises(DataError, "record 1.answer") as caught:
        supervised(list(PromptSet.of([{"prompt": "1+1=", "completion": "2"}])), template, 16)
    assert "data.columns.answer=completion" in str(caught.value)


def test_supervised_too_long(prompts, template):
    assert len(supervised(list(prompts), template, 9)) == 2
    with raises(DataError, "record 2.tokens"):
        supervised(list(prompts), template, 8)


def pair_tokenizer(folder, template="<s> $A"):
    """Merges ``=3`` into one token, and puts what the template says around a text."""
    core = tokenizers.Tokenizer(
        models.BPE({"<s>": 0, "</s>": 1, "1": 2, "=": 3, "3": 4, "=3": 5, "4": 6}, [("=", "3")])
    )
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(template, None, [("<s>", 0), ("</s>", 1)])
    core.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("answer", "template", "tokens"),
    [
        ("4", "<s> $A", [0, 2, 3, 6, 1]),
        ("3", "<s> $A", [0, 2, 3, 4, 1]),  # not [0, 2, 5, 1]: the prompt's tokens are those that generation will see
        ("4", "<s> $A </s>", [0, 2, 3, 6, 1]),  # the prompt goes on, and the answer ends once
        ("3", "$A </s>", [2, 3, 4, 1]),
        ("", "<s> $A", [0, 2, 3, 1]),
    ],
)
def test_the_prompts_own_tokens_stand(tmp_path, answer, template, tokens):
    tokenizer = pair_tokenizer(tmp_path, template)
    (example,) = supervised(list(PromptSet.of([{"prompt": "1=", "answer": answer}])), make_template("", tokenizer), 9)
    (asked,) = make_template("", tokenizer).prompts(list(PromptSet.of(["1="])))
    assert example.tokens.tolist() == tokens and example.tokens[: len(asked)].tolist() == asked
    assert example.mask.sum() == len(tokens) - len(asked)


# ---- conversations ----

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture
def chat():
    return make_template("chatml", Tokenizer.train(["one two three four user assistant"], 300))


def test_every_turn_of_the_assistant_is_learnt_from(chat):
    (example,) = supervised(list(PromptSet.of([{"messages": TALK}])), chat, 100)
    said = chat.tokenizer.decode(example.tokens[example.mask == 1], special=True)
    assert said == "two<|im_end|>four<|im_end|>" and not example.mask[0] and example.mask[-1]


def test_the_longest_of_examples_and_prompts_of_conversations(chat):
    some = PromptSet.of([{"messages": TALK}, {"messages": TALK[:2]}, {"prompt": "one", "answer": "two"}])
    example = supervised([some[0]], chat, 100)[0]
    n = len(example.tokens)
    assert check_examples(some, chat, n) == n
    last = int(np.flatnonzero(np.diff(example.mask))[-1]) + 1
    assert check_prompts(some, chat, last) == last < n
    with raises(DataError, "record 1.tokens"):
        check_examples(some, chat, n - 1)
    with raises(DataError, "record 1.tokens"):
        check_prompts(some, chat, last - 1)


def test_a_conversation_that_ends_with_the_user_has_no_answer(chat):
    some = PromptSet.of([{"messages": TALK}, {"messages": TALK[:3]}])
    with raises(DataError, "record 2.answer"):
        check_examples(some, chat, 100)
    assert check_prompts(some, chat, 100)
