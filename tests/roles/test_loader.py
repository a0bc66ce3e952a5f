"""The loader role, called directly: prompts, their texts and examples for supervised steps as payload."""

import json
import pickle

import numpy as np
import pytest

from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError
from tilth.data.documents import Corpus
from tilth.data.examples import tokenised
from tilth.data.prompts import PromptSet, load_source
from tilth.data.tokenizer import Tokenizer
from tilth.roles.experience import check_identity, texts
from tilth.roles.rollout import ask


@pytest.fixture
def store():
    return InlineStore()


def test_the_mask_is_one_on_the_answer_and_its_end(store):
    batch = small.loader(store).examples(np.array([3, 99, 3]))
    read = batch.read(store, "tokens", "mask")
    for row, index in enumerate((3, 99, 3)):
        prompt, tokens, mask = small.PROMPTS[index], read["tokens"].row(row), read["mask"].row(row)
        assert small.TOKENIZER.decode(tokens[mask == 0]) == prompt.text
        assert small.TOKENIZER.decode(tokens[mask == 1][:-1]) == prompt.answer
        assert tokens[-1] == small.TOKENIZER.eos_id and mask[-1] == 1
        assert mask.tolist() == sorted(mask.tolist())
    assert batch["prompt"].tolist() == [3, 99, 3]
    assert batch["length"].tolist() == [len(read["tokens"].row(i)) for i in range(3)]


def test_examples_carry_the_identity_of_their_tokens(store):
    batch = small.loader(store).examples([3, 4])
    check_identity(batch.with_rows(id=np.arange(2)), batch.read(store, "tokens")["tokens"])


def test_an_example_that_does_not_fit_or_has_no_answer_is_named(store):
    with pytest.raises(DataError) as caught:
        small.loader(store, context=5).examples([3])
    assert "model.context is 5" in str(caught.value)
    with pytest.raises(DataError) as caught:
        small.loader(store, PromptSet.of(["1+1="])).examples([0])
    assert "record 1" in str(caught.value)


def test_prompts_are_encoded_once_and_shared_by_their_samples(store):
    asked = small.loader(store).encode(ask([41, 3], 3, 12))
    read = asked.read(store, "prompt_tokens")["prompt_tokens"]
    wanted = small.TEMPLATE.prompts([small.PROMPTS[i] for i in (41, 3)])
    assert [read.row(i).tolist() for i in range(6)] == [list(ids) for ids in wanted for _ in range(3)]
    assert store.get(asked.payload["prompt_tokens"].handles[0]).lengths.tolist() == [len(wanted[1]), len(wanted[0])]


def test_texts_are_those_of_the_prompt_and_its_answer(store):
    batch = small.loader(store).texts(ask([41, 3], 2, 0))
    read = batch.read(store, "prompt_text", "answer")
    prompts = [small.PROMPTS[i] for i in (41, 41, 3, 3)]
    assert texts(read["prompt_text"]) == [p.text for p in prompts] and texts(read["answer"]) == [
        p.answer for p in prompts
    ]


class Asked:
    """Loaders that note what they are asked to begin with."""

    def __init__(self):
        self.ahead = []

    def take(self, kind, indices):
        return tokenised(kind, small.PROMPTS, indices, small.TEMPLATE, small.CONTEXT)

    def ask(self, kind, indices):
        self.ahead.append((kind, indices))


def test_a_call_without_a_next_step_forgets_nothing_that_is_ahead(store):
    loader = small.loader(store)
    loader.loaders = Asked()
    loader.examples(np.array([3]), np.array([4, 5]))
    loader.examples(np.array([9]), np.array([], np.int64))
    loader.encode(ask([41], 1, 0))
    assert loader.loaders.ahead == [("examples", [4, 5])]


# ---- what travels ----


def test_prompts_of_a_file_travel_as_its_description(tmp_path):
    """Many times as many rows are as many bytes; what arrives is the same, from another working directory too."""
    sizes = []
    for count in (10, 2_000):
        file = tmp_path / f"data-{count:05}.jsonl"
        file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(count)))
        prompts = load_source(DataConfig(source=str(file)))
        sizes.append(len(pickle.dumps(prompts)))
        again = pickle.loads(pickle.dumps(prompts))
        assert again.fingerprint() == prompts.fingerprint() and again[7] == prompts[7]
        train, _ = prompts.split(0.5)
        assert pickle.loads(pickle.dumps(train)).rows.tolist() == train.rows.tolist()
    assert sizes[0] == sizes[1] < 1200


SELDOM = ("countdown", "sorting", "chain", "flaws")
TASKS = ["addition", *(pytest.param(task, marks=pytest.mark.slow) for task in SELDOM)]


@pytest.mark.parametrize("task", TASKS)
def test_tasks_travel_without_what_is_computed_from_them(task):
    prompts = load_source(DataConfig(source=task, digits=2))
    prompts.split(0.1)  # computes a hash of each prompt
    assert len(pickle.dumps(prompts)) < 500
    assert pickle.loads(pickle.dumps(prompts)).fingerprint() == prompts.fingerprint()


def test_a_file_that_changes_on_the_way_is_refused(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sent = pickle.dumps(load_source(DataConfig(source=str(file))))
    file.write_text('{"prompt": "1+1=", "answer": "3"}\n')
    with pytest.raises(DataError):
        pickle.loads(sent)


def test_given_data_travel_by_value():
    prompts = PromptSet.of([{"prompt": "1+1=", "answer": "2"}])
    assert pickle.loads(pickle.dumps(prompts))[0] == prompts[0]


def test_pieces_of_documents_travel_as_the_path_of_their_cache(tmp_path):
    texts = [f"{i} and {i + 1} are {2 * i + 1}. " * 20 for i in range(200)]
    corpus = Corpus.build(texts, Tokenizer.characters("".join(sorted(set("".join(texts))))), 16, tmp_path)
    sent = pickle.dumps(corpus)
    again = pickle.loads(sent)
    assert len(sent) < 500 < corpus.bytes and again.tokens([5]).values.tolist() == corpus.tokens([5]).values.tolist()
