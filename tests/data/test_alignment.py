"""Tokens of one tokenizer in those of another: aligned by characters, and what cannot be is in no chunk."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from tests.errors import raises
from tilth.core.errors import DataError
from tilth.data import alignment
from tilth.data.alignment import AlignedChunk, Translator, align, boundaries
from tilth.data.tokenizer import TURN, Tokenizer

LETTERS = ["a", "b", " ", "1", "e\u0301", "\u0301", "שלום", "ע", "مرحبا", "👍🏽", "👩\u200d👧", "é", "中", "\n"]
TEXTS = st.lists(st.sampled_from(LETTERS), max_size=12).map("".join)


@cache
def trained(size, corpus):
    return Tokenizer.train([corpus * 3], size)


CORPORA = st.sampled_from(["ab ab 1 é שלום", "👍🏽👍🏽 中中 مرحبا"])
TOKENIZERS = st.builds(trained, st.sampled_from([260, 268, 300]), CORPORA)


def as_bytes(tokenizer, ids):
    """The bytes of each token of byte-level BPE, by GPT-2's table of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    table = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}
    return [bytes(table[c] for c in tokenizer.token(i)) for i in ids]


def oracle(text, mine, theirs):
    """Every end of a token that is the end of a character, in both, by counting bytes."""
    characters = {len(text[:i].encode()) for i in range(len(text) + 1)}

    def ends(parts):
        return {len(b"".join(parts[:i])): i for i in range(len(parts) + 1)}

    own, other = ends(mine), ends(theirs)
    places = sorted(own.keys() & other.keys() & characters)
    return [AlignedChunk(own[a], own[b], other[a], other[b]) for a, b in pairwise(places)]


@given(TEXTS, TOKENIZERS, TOKENIZERS)
def test_chunks_are_those_of_a_count_of_bytes(text, own, other):
    mine, theirs = own.encode(text), other.encode(text)
    expected = oracle(text, as_bytes(own, mine), as_bytes(other, theirs))
    assert align(own, mine, other, theirs) == expected


@given(st.lists(st.integers(4, 259), max_size=8), TOKENIZERS, TOKENIZERS)
def test_any_bytes_are_in_chunks_of_equal_text_or_in_none(ids, own, other):
    """What a policy writes need not be text, nor what its tokenizer would make of the text."""
    theirs = other.encode(own.decode(ids))
    end = other_end = 0
    for chunk in align(own, ids, other, theirs):
        assert end <= chunk.start < chunk.end and other_end <= chunk.other_start < chunk.other_end
        end, other_end = chunk.end, chunk.other_end
        text = b"".join(as_bytes(own, ids[chunk.start : chunk.end])).decode()
        assert text == b"".join(as_bytes(other, theirs[chunk.other_start : chunk.other_end])).decode()


def test_equal_tokens_are_chunks_of_one():
    own = trained(260, "ab ab 1 é שלום")
    ids = own.encode("ab 1")
    assert align(own, ids, own, ids) == [AlignedChunk(i, i + 1, i, i + 1) for i in range(len(ids))]


def test_special_tokens_and_bytes_that_are_no_text_are_in_no_chunk():
    own, other = trained(260, "ab ab 1 é שלום"), Tokenizer.characters("ab\ufffd")
    a, b = own.encode("a")[0], own.encode("b")[0]
    special = [a, own.eos_id, b]
    assert align(own, special, other, other.encode("ab")) == [AlignedChunk(0, 1, 0, 1), AlignedChunk(2, 3, 1, 2)]
    torn = [a, *own.encode("中")[:1], b]
    assert align(own, torn, other, other.encode("a\ufffdb")) == [AlignedChunk(0, 1, 0, 1)]
    assert align(own, [a, b], other, other.encode("ba")) == []


def plainly(tokenizer, ids):
    """What ``boundaries`` returns, by decoding all since the last place at each token."""
    text, found, before, head = tokenizer.decode(ids), [(0, 0)], 0, ""
    for count in range(1, len(ids) + 1):
        (start, at), piece = found[-1], tokenizer.decode(ids[before:count])
        new = piece[len(head) :]
        if piece.startswith(head) and not new.endswith("\ufffd") and text.startswith(new, at):
            before, head = start, tokenizer.decode(ids[start:count])
            found.append((count, at + len(new)))
    return text, found


def by_bytes():
    """A tokenizer that writes characters it lacks byte by byte, as Gemma's."""
    vocabulary = {"<pad>": 0, "</s>": 1, **{f"<0x{i:02X}>": i + 2 for i in range(256)}, "a": 258, "b": 259}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    core.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    return Tokenizer(core, "</s>", "<pad>")


FALLBACK = by_bytes()
TORN = {"lone": "é".encode()[1:], "cut": "中".encode()[:2], "whole": "é".encode(), "letter": b"a"}


@given(st.lists(st.sampled_from(sorted(TORN)), max_size=12), st.booleans())
def test_places_in_bytes_that_are_no_text_are_those_of_the_plain_way(parts, fallback):
    tokenizer = FALLBACK if fallback else trained(260, "ab ab 1 é שלום")
    alone = {as_bytes(tokenizer, [i])[0]: i for i in range(4, 260)} if not fallback else {}
    said = b"".join(TORN[part] for part in parts)
    ids = [int(b) + 2 if fallback else alone[bytes([b])] for b in said]
    assert boundaries(tokenizer, ids) == plainly(tokenizer, ids)


@pytest.mark.parametrize("said", [b"\xa9", "中".encode()[:2], "é".encode()], ids=str)
@pytest.mark.parametrize("fallback", [True, False])
def test_bytes_that_are_no_text_are_decoded_a_few_times_each(monkeypatch, said, fallback):
    tokenizer, decoded, decode = FALLBACK if fallback else trained(260, "ab ab 1 é שלום"), [0], Tokenizer.decode
    alone = {} if fallback else {as_bytes(tokenizer, [i])[0]: i for i in range(4, 260)}
    ids = [int(b) + 2 if fallback else alone[bytes([b])] for b in said * 300 + b"\xa9"]
    ids += [258, 259] if fallback else tokenizer.encode("ab")

    def counting(self, ids, special=False):
        decoded[0] += len(list(ids))
        return decode(self, ids, special)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    assert len(ids) in dict(boundaries(tokenizer, ids)[1])
    assert decoded[0] < 12 * len(ids)


# ---- translation ----


def translated(own, other, prompt, completion, most=1000):
    """Of a prompt's tokens and those that the policy chose."""
    ids = np.array([*prompt, *completion], np.int64)
    return Translator(own, other, most).translate(ids, (np.arange(len(ids)) >= len(prompt)).astype(np.uint8))


def chunks(found):
    return [tuple(chunk) for chunk in found.chunks]


def joined(some):
    return AlignedChunk(some[0].start, some[-1].end, some[0].other_start, some[-1].other_end)


@cache
def texts(tokenizer):
    return {i: tokenizer.decode([i]) for i in range(tokenizer.vocab_size) if "\ufffd" not in tokenizer.decode([i])}


def ends_alike(own, one, other, two):
    """By all tokens of both."""
    longer = []
    for tokenizer, i in ((own, one), (other, two)):
        known = texts(tokenizer)
        longer.append({t[len(known[i]) :] for t in known.values() if i in known and t.startswith(known[i])} - {""})
    either, alone = longer[0] | longer[1], longer[0] ^ longer[1]
    return len(alone) <= len(either) / 2


@given(TEXTS.filter(bool), TEXTS, TOKENIZERS, TOKENIZERS)
def test_a_translation_is_what_the_other_would_make_of_prompt_and_completion(prompt, completion, own, other):
    start, chosen = own.encode(prompt), own.encode(completion)
    found = translated(own, other, start, [*chosen, own.eos_id])
    theirs, said = other.encode(prompt), other.encode(completion)
    assert found.tokens.tolist() == [*theirs, *said, other.eos_id]
    inside = oracle(completion, as_bytes(own, chosen), as_bytes(other, said))
    first = 0
    expected = []
    for i, chunk in enumerate(inside):
        if ends_alike(own, chosen[chunk.end - 1], other, said[chunk.other_end - 1]):
            expected.append(joined(inside[first : i + 1]))
            first = i + 1
    expected.append(joined([*inside[first:], AlignedChunk(len(chosen), len(chosen) + 1, len(said), len(said) + 1)]))
    assert found.chunks == [chunk.moved(len(start), len(theirs)) for chunk in expected]
    covered = {i for chunk in found.chunks for i in range(chunk.other_start, chunk.other_end)}
    assert np.flatnonzero(found.mask).tolist() == sorted(covered)


@given(TEXTS.filter(bool), TEXTS, TOKENIZERS)
def test_to_the_same_tokenizer_nothing_changes(prompt, completion, own):
    start, chosen = own.encode(prompt), [*own.encode(completion), own.eos_id]
    found = translated(own, own, start, chosen)
    assert found.tokens.tolist() == [*start, *chosen]
    assert int(found.mask.sum()) == sum(chunk.other_end - chunk.other_start for chunk in found.chunks)
    assert all(chunk[:2] == chunk[2:] for chunk in found.chunks)


SMALL, BYTES = Tokenizer.characters("ab"), trained(260, "ab ab 1 é שלום")


def test_nothing_is_aligned_behind_what_the_other_has_no_tokens_for():
    a, b, c = (BYTES.encode(letter)[0] for letter in "abc")
    whole = translated(BYTES, SMALL, [a], [b, a, BYTES.eos_id])
    assert chunks(whole) == [(1, 2, 1, 2), (2, 3, 2, 3), (3, 4, 3, 4)] and whole.tokens[-1] == SMALL.eos_id
    turn = BYTES.special()[TURN]
    assert chunks(translated(BYTES, SMALL, [a], [b, turn, a])) == [(1, 2, 1, 2)]
    assert chunks(translated(BYTES, SMALL, [a], [c, b, BYTES.eos_id])) == []
    with raises(DataError, f"align.{TURN}"):
        translated(BYTES, SMALL, [a, turn], [b])
    with raises(DataError, "tokenizer.c"):
        translated(BYTES, SMALL, [a, c], [b])


def test_a_translation_is_cut_where_the_other_s_context_ends():
    found = translated(SMALL, BYTES, SMALL.encode("a"), SMALL.encode("bab"), most=3)
    assert found.tokens.tolist() == BYTES.encode("aba") and chunks(found) == [(1, 2, 1, 2), (2, 3, 2, 3)]
    wide = trained(300, "👍🏽👍🏽 中中 مرحبا")
    cut = translated(wide, BYTES, wide.encode("a"), wide.encode("中中"), most=6)
    assert len(cut.tokens) == 6 and all(chunk.other_end <= 6 for chunk in cut.chunks)


def test_text_that_reads_as_a_special_token_becomes_none():
    letters = Tokenizer.characters("a<eos>")
    found = translated(letters, BYTES, letters.encode("a"), [letters.encode(x)[0] for x in "a"] * 2)
    assert len(found.chunks) == 2
    ids = [letters.vocabulary()[x] for x in "<eos>"]
    assert letters.eos_id not in ids
    found = translated(letters, BYTES, letters.encode("a"), ids)
    assert BYTES.eos_id not in found.tokens and found.chunks == []


def beginning(token):
    """Byte-level BPE that puts a token before every text."""
    core = tokenizers.Tokenizer.from_str(trained(268, "ab ab 1 é שלום").to_json())
    core.add_special_tokens([token])
    id = core.token_to_id(token)
    core.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, id)])
    return Tokenizer(core, "<eos>", "<pad>"), id


@pytest.mark.parametrize("own, other", [("", "<s>"), ("<s>", ""), ("<s>", "<bos>")])
def test_each_begins_with_its_own_first_tokens(own, other):
    sides = [(trained(268, "ab ab 1 é שלום"), None) if not token else beginning(token) for token in (own, other)]
    (mine, _), (theirs, _) = sides
    found = translated(mine, theirs, mine.encode("ab"), mine.encode("1", special=False))
    assert found.tokens.tolist() == theirs.encode("ab1") and len(found.chunks) == 1


def test_what_ends_a_completion_becomes_what_ends_one_there():
    """Also where the other has a token of that text, by which its completions do not end."""
    own, other = trained(260, "ab ab 1 é שלום"), trained(268, "👍🏽👍🏽 中中 مرحبا")
    turn_end = own.special()["<|im_end|>"]
    chat = Tokenizer(tokenizers.Tokenizer.from_str(own.to_json()), "<|im_end|>", "<pad>")
    a = own.encode("a")
    ends = translated(chat, other, [*a, turn_end, *a], [turn_end])
    assert ends.tokens[-1] == other.eos_id and ends.tokens[1] == other.special()["<|im_end|>"]
    assert len(ends.chunks) == 1


@pytest.mark.parametrize("whose", ["policy", "teacher"])
def test_a_tokenizer_that_writes_a_space_before_every_text_is_refused(whose, monkeypatch):
    """As SentencePiece does for Llama 2: "2+2=" and "12" apart would be read as "2+2= 12"."""
    monkeypatch.setattr(alignment, "_Continuations", lambda tokenizer: pytest.fail("decoded a whole vocabulary"))
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=["<pad>", "</s>"], show_progress=False)
    core.train_from_iterator(["2+2= 12 ab"] * 3, trainer)
    spaced, plain = Tokenizer(core, "</s>", "<pad>"), Tokenizer.train(["2+2= 12 ab"] * 3, 260)
    with raises(DataError, f"align.{whose}"):
        Translator(*((spaced, plain) if whose == "policy" else (plain, spaced)), 9)
    monkeypatch.undo()
    Translator(plain, Tokenizer.characters("ab12"), 9)
