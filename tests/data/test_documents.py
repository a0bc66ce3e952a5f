"""Every token of every document is in a piece, once and in order; a damaged cache is never believed."""

import json
import os
import pickle
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.data.test_examples import pair_tokenizer
from tests.errors import raises
from tests.examples import examples
from tests.memory import start_tracing
from tilth.core.errors import DataError, StorageError
from tilth.data import cache, documents
from tilth.data.documents import Corpus
from tilth.data.tokenizer import Tokenizer

LETTERS = Tokenizer.characters("abc \n")
TEXTS = ["abc", "a" * 10, "", "cab cab", "b"]


def whole(corpus):
    """All pieces after one another."""
    return corpus.tokens(range(len(corpus))).values.tolist()


def expected(texts, tokenizer):
    return [i for text in texts if text for i in [*tokenizer.encode(text), tokenizer.eos_id]]


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text("abc \n", max_size=40), max_size=12).filter(any), context=st.integers(2, 20))
def test_nothing_is_lost_cropped_or_twice(tmp_path, texts, context):
    corpus = Corpus.build(texts, LETTERS, context, tmp_path)
    assert whole(corpus) == expected(texts, LETTERS)
    lengths = corpus.lengths
    assert lengths.dtype == np.int32 and len(lengths) == len(corpus) and 0 < lengths.min() and lengths.max() <= context
    sizes = [len(t) + 1 for t in texts if t]
    assert len(corpus) == sum(-(-size // context) for size in sizes)  # as few pieces as can be
    assert corpus.tokens_in_all == sum(sizes) and corpus.bytes == sum(len(t.encode()) for t in texts)
    assert context == 2 or lengths.min() > 1  # a token alone has nothing to predict


def test_a_piece_belongs_to_one_document(tmp_path):
    corpus = Corpus.build(TEXTS, LETTERS, 6, tmp_path)
    pieces = [LETTERS.decode(corpus.tokens([i]).values, special=True) for i in range(len(corpus))]
    assert pieces == ["abc<eos>", "aaaaaa", "aaaa<eos>", "cab ca", "b<eos>", "b<eos>"]
    assert corpus.lengths.tolist() == [4, 6, 5, 6, 2, 2]


def test_the_last_token_is_never_alone(tmp_path):
    corpus = Corpus.build(["abcabcabc", "abcabc"], LETTERS, 3, tmp_path)
    assert corpus.lengths.tolist() == [3, 3, 2, 2, 3, 2, 2]
    assert Corpus.build(["abcab"], LETTERS, 2, tmp_path).lengths.tolist() == [2, 2, 2]
    assert Corpus.build(["abca"], LETTERS, 2, tmp_path).lengths.tolist() == [2, 2, 1]


def test_pieces_by_index_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_DOCUMENTS", 2)  # several record batches
    texts = ["abc" * n for n in range(1, 9)]
    corpus = Corpus.build(texts, LETTERS, 7, tmp_path)
    every = corpus.tokens(np.arange(len(corpus)))
    assert every.values.dtype == np.int64 and every.lengths.tolist() == corpus.lengths.tolist()
    asked = np.array([5, 0, len(corpus) - 1, 5])
    found = corpus.tokens(asked)
    assert [found.row(i).tolist() for i in range(4)] == [every.row(int(i)).tolist() for i in asked]
    assert len(corpus.tokens([]).offsets) == 1
    for wrong in (len(corpus), -1):
        with pytest.raises(IndexError, match=f"piece {wrong} of {len(corpus)}"):
            corpus.tokens([wrong])


def test_batches_do_not_change_what_is_written(tmp_path, monkeypatch):
    texts = ["abc" * n for n in range(9)]
    first = Corpus.build(texts, LETTERS, 5, tmp_path / "a")
    monkeypatch.setattr(documents, "_CHARACTERS", 7)
    second = Corpus.build(texts, LETTERS, 5, tmp_path / "b")
    assert whole(first) == whole(second) and first.lengths.tolist() == second.lengths.tolist()


def test_begin_tokens_are_those_of_the_tokenizer(tmp_path):
    tokenizer = pair_tokenizer(tmp_path)
    assert whole(Corpus.build(["1=3", "4"], tokenizer, 9, tmp_path)) == [0, 2, 5, 1, 0, 6, 1]


def test_a_document_ends_once(tmp_path):
    tokenizer = pair_tokenizer(tmp_path, "<s> $A </s>")
    assert whole(Corpus.build(["1=3", "4"], tokenizer, 9, tmp_path)) == [0, 2, 5, 1, 0, 6, 1]


# ---- long texts ----


def spied(tokenizer, monkeypatch):
    """Lengths of what the tokenizer is given at once."""
    lengths, encode = [], Tokenizer.encode_all

    def encode_all(self, texts, special=True):
        lengths.append(sum(map(len, texts)))
        return encode(self, texts, special)

    monkeypatch.setattr(Tokenizer, "encode_all", encode_all)
    return lengths


LONG = ("one two  three\n\nfour 567 five,\n  six\tsééven " * 5 + "\n") * 12


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(documents, "_CHARACTERS", 400)
    monkeypatch.setattr(documents, "_PART", 100)
    monkeypatch.setattr(documents, "_BESIDE", 32)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ab 1\n\t,'é", min_size=120, max_size=600))
def test_a_long_text_in_parts_has_the_tokens_of_the_whole(tmp_path, small_parts, text):
    tokenizer = Tokenizer.train([LONG], 400)
    assert whole(Corpus.build([text, "ab"], tokenizer, 50, tmp_path)) == expected([text, "ab"], tokenizer)


def test_a_long_text_is_never_tokenised_at_once(tmp_path, small_parts, monkeypatch):
    tokenizer = Tokenizer.train([LONG], 400)
    right = expected(["one", LONG, "two"], tokenizer)
    lengths = spied(tokenizer, monkeypatch)
    assert whole(Corpus.build(["one", LONG, "two"], tokenizer, 50, tmp_path)) == right
    assert len(LONG) > 2000 and max(lengths) <= 400


@pytest.mark.parametrize("template", ["<s> $A", "$A </s>", "<s> $A </s>"])
def test_what_is_put_around_a_long_text_is_put_once(tmp_path, small_parts, monkeypatch, template):
    monkeypatch.setattr(documents, "_BORDER", re.compile("(?<=4)(?=1)"))  # this tokenizer knows no spaces
    tokenizer = pair_tokenizer(tmp_path, template)
    text = "1=34" * 300
    lengths = spied(tokenizer, monkeypatch)
    found = whole(Corpus.build([text], tokenizer, 50, tmp_path))
    assert max(lengths) <= 400 < len(text)
    assert found == expected([text], tokenizer)
    assert found[:3] == ([0, 2, 5] if "<s>" in template else [2, 5, 6]) and found[-2:] == [6, 1]


def test_a_tokenizer_that_cannot_be_cut_gets_the_whole(tmp_path, small_parts, monkeypatch):
    core = tokenizers.Tokenizer.from_str(Tokenizer.train([LONG], 400)._core.to_str())
    core.normalizer = normalizers.Prepend("_")  # before every text, thus before every part
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    right = expected([LONG], tokenizer)
    lengths = spied(tokenizer, monkeypatch)
    assert whole(Corpus.build([LONG], tokenizer, 50, tmp_path)) == right and max(lengths) == len(LONG)


# ---- the cache ----


def build(folder, texts=TEXTS, tokenizer=LETTERS, context=6):
    return Corpus.build(texts, tokenizer, context, folder)


def test_a_second_build_reads_what_the_first_wrote(tmp_path, monkeypatch):
    first = build(tmp_path)
    assert first.note == "tokenised 25 tokens of 21 bytes"
    monkeypatch.setattr(Tokenizer, "encode_all", None)  # would fail if it were called
    second = build(tmp_path)
    assert second.note.startswith("tokens from ") and whole(second) == whole(first)
    assert (second.bytes, second.tokens_in_all) == (first.bytes, first.tokens_in_all)
    assert not [p for p in tmp_path.rglob(".*")]


@pytest.mark.parametrize(
    "other",
    [
        {"texts": [*TEXTS, "c"]},
        {"texts": TEXTS[::-1]},
        {"texts": ["abca" + "a" * 9, *TEXTS[2:]]},  # the same characters, divided otherwise
        {"tokenizer": Tokenizer.characters("abcd \n")},
        {"context": 7},
    ],
)
def test_other_texts_tokenizer_or_context_are_another_cache(tmp_path, other):
    build(tmp_path)
    assert build(tmp_path, **other).note.startswith("tokenised")
    assert build(tmp_path).note.startswith("tokens from") and len(list(tmp_path.iterdir())) == 2


def truncate(place):
    file = place / "pieces.arrow"
    file.write_bytes(file.read_bytes()[:-20])


def flip(place):
    file = place / "pieces.arrow"
    data = bytearray(file.read_bytes())
    at = bytes(data).index(np.array([4, 5, 6, 1], np.int32).tobytes())  # "abc<eos>"
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "its checksum differs"),
        (flip, "its checksum differs"),
        (lambda p: (p / "pieces.arrow").unlink(), "No such file"),
        (lambda p: (p / "about.json").unlink(), "No such file"),
        (lambda p: (p / "about.json").write_text('{"bytes": 1'), "delimiter"),
        (lambda p: (p / "about.json").write_text("[]"), "list indices"),
        (lambda p: (p / "about.json").write_text("{}"), "checksum"),
    ],
)
def test_a_damaged_cache_is_told_and_built_anew(tmp_path, damage, said):
    good = whole(build(tmp_path))
    (place,) = tmp_path.iterdir()
    damage(place)
    corpus = build(tmp_path)
    assert whole(corpus) == good and "is damaged" in corpus.note and said in corpus.note and "\n" not in corpus.note
    assert build(tmp_path).note.startswith("tokens from")


def test_a_killed_build_leaves_nothing_that_is_believed(tmp_path, monkeypatch):
    def killed(file: Path, to: Path, *, durable: bool) -> None:
        if to.name == "about.json":
            raise KeyboardInterrupt
        os.replace(file, to)

    monkeypatch.setattr(cache, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path)
    monkeypatch.undo()
    assert build(tmp_path).note.startswith("tokenised") and build(tmp_path).note.startswith("tokens from")


def test_the_file_is_plain_arrow(tmp_path):
    corpus = build(tmp_path)
    (file,) = tmp_path.glob("*/pieces.arrow")
    table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    assert table.schema == pa.schema([("tokens", pa.list_(pa.int32()))])
    assert [len(row) for row in table["tokens"].to_pylist()] == corpus.lengths.tolist()
    about = json.loads((file.parent / "about.json").read_text())
    assert about["bytes"] == corpus.bytes


# ---- memory ----


def test_memory_while_building_is_that_of_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_CHARACTERS", 1 << 12)
    texts = ["abc " * 256] * 400  # 400 thousand tokens, of which 1024 are in hand at a time
    start_tracing()
    try:
        corpus = Corpus.build(texts, LETTERS, 64, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert corpus.tokens_in_all == 400 * 1025 and peak < 1 << 20


# ---- what can be wrong ----


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_text(tmp_path, texts):
    with raises(DataError, "texts"):
        build(tmp_path, texts=texts)


def test_no_room_to_predict(tmp_path):
    with raises(DataError, "context"):
        build(tmp_path, context=1)


def test_a_character_without_a_token_leaves_no_cache(tmp_path):
    with raises(DataError, "tokenizer.x"):
        build(tmp_path, texts=["abc", "axb"])
    with raises(DataError, "tokenizer.x"):
        build(tmp_path, texts=["abc", "axb"])


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(StorageError, "pieces.arrow"):
        build(tmp_path / "file")


# ---- packing, several sources ----


def test_pieces_across_documents_are_full_and_lose_nothing(tmp_path):
    corpus = Corpus.build(TEXTS, LETTERS, 4, tmp_path, "concat")
    assert whole(corpus) == expected(TEXTS, LETTERS)
    assert set(corpus.lengths[:-2].tolist()) == {4} and 1 < min(corpus.lengths)
    assert Corpus.build(TEXTS, LETTERS, 4, tmp_path, "concat").note.startswith("tokens from")
    assert Corpus.build(TEXTS, LETTERS, 4, tmp_path).note.startswith("tokenised")  # another packing


@pytest.mark.parametrize("context", [2, 3, 5, 25, 26, 100])
def test_batches_do_not_change_pieces_across_documents(tmp_path, monkeypatch, context):
    one = Corpus.build(TEXTS, LETTERS, context, tmp_path / "a", "concat")
    monkeypatch.setattr(documents, "_CHARACTERS", 3)
    other = Corpus.build(TEXTS, LETTERS, context, tmp_path / "b", "concat")
    assert whole(one) == whole(other) == expected(TEXTS, LETTERS)
    assert one.lengths.tolist() == other.lengths.tolist() and min(one.lengths) > 0


@pytest.mark.parametrize("context", range(3, 27))
def test_the_last_piece_across_documents_has_a_token_to_predict(tmp_path, context):
    corpus = Corpus.build(TEXTS, LETTERS, context, tmp_path, "concat")
    assert whole(corpus) == expected(TEXTS, LETTERS)
    assert min(corpus.lengths) > 1 and set(corpus.lengths[:-2].tolist()) <= {context}


def test_corpora_of_several_sources_are_one(tmp_path):
    parts = [Corpus.build(texts, LETTERS, 6, tmp_path) for texts in (TEXTS[:2], TEXTS[2:])]
    joined = pickle.loads(pickle.dumps(Corpus.joined(parts)))
    assert whole(joined) == expected(TEXTS, LETTERS) and len(joined) == sum(map(len, parts))
    assert joined.bytes == sum(part.bytes for part in parts)
