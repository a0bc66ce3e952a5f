"""Stop strings, wherever tokens cut them, in text that is decoded piece by piece."""

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.reference import make_engine, make_model, naive
from tests.examples import examples
from tilth.data.tokenizer import Tokenizer
from tilth.engines.request import Request, SamplingParams
from tilth.engines.stops import StopStrings, completion_text


class Bytes:
    """Token = byte, so that characters and stop strings are cut everywhere."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids, special=False):
        self.decoded += len(ids)
        return bytes(ids).decode(errors="replace")


class Words:
    """Token = one of these pieces; a piece reads with a space unless it is the first."""

    pieces = ("a", "b", "ab", "ba", "aab", "x", "é")

    def decode(self, ids, special=False):
        return " ".join(self.pieces[i % len(self.pieces)] for i in ids)


@settings(max_examples=examples(200), deadline=None)
@given(st.text("abé€", max_size=30), st.lists(st.text("abé€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_found_as_in_the_whole_text(text, stops):
    watch, raw = StopStrings(tuple(stops), Bytes()), text.encode()
    for n, byte in enumerate(raw, 1):
        found = watch.push([byte])
        so_far = raw[:n].decode(errors="ignore")
        places = [so_far.find(s) for s in stops if s in so_far]
        assert found == bool(places)
        if found:
            assert watch.text == so_far[: min(places)] and watch.found
            return
    assert watch.text == text


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 6), max_size=20), st.sampled_from(["b a", "ab b", "é", "x a"]))
def test_pieces_that_read_differently_after_others(ids, stop):
    tokenizer = Words()
    watch = StopStrings((stop,), tokenizer)
    for n, token in enumerate(ids, 1):
        if watch.push([token]):
            assert stop in tokenizer.decode(ids[:n])
            return
    assert stop not in tokenizer.decode(ids)
    assert watch.text == tokenizer.decode(ids)


def test_decoding_is_incremental():
    tokenizer = Bytes()
    watch = StopStrings(("zzz",), tokenizer)
    for byte in b"abcdefgh" * 100:
        watch.push([byte])
    assert tokenizer.decoded < 4 * 800


MODEL = make_model()


class Letters:
    """100 tokens that read as one or two letters."""

    def decode(self, ids, special=False):
        return "".join("abcdefghij"[i % 10] * (1 + i // 50) for i in ids)

    def special(self):
        return {}


def stopped(tokens, stop):
    """How many completion tokens until the text contains the string; None if it never does."""
    return next((n for n in range(1, len(tokens) + 1) if stop in Letters().decode(tokens[:n])), None)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"max_rows": 3, "kv_tokens": 160}], ids=str
)
def test_the_engine_keeps_the_tokens_and_cuts_the_text(options):
    params = SamplingParams(max_tokens=60, stop=("ac", "jj"))
    requests = [Request(i, [i, 1, 2], params) for i in range(6)]
    found = make_engine(MODEL, tokenizer=Letters(), **options).generate(requests)
    seen = set()
    for request, t in zip(requests, found):
        completion = naive(MODEL, request)[0][3:]
        ends = [n for n in (stopped(completion, s) for s in params.stop) if n]
        count = min(ends) if ends else 60
        assert t.tokens[3:].tolist() == completion[:count]
        assert t.finish == ("stop" if ends else "length")
        text = Letters().decode(completion[:count])
        places = [text.find(s) for s in params.stop if s in text]
        assert t.text == (text[: min(places)] if places else text)
        seen.add((t.finish, count == 1))
    assert ("stop", False) in seen


def test_an_answer_that_is_resumed_remembers_half_a_stop_string():
    params = SamplingParams(max_tokens=60, stop=("ac", "jj", "hb"))
    engine = make_engine(MODEL, tokenizer=Letters())
    request = next(r for i in range(20) if stopped(naive(MODEL, r := Request(i, [i, 1], params))[0][2:], "ac"))
    whole = engine.generate([request])[0]
    engine.submit([request])
    for _ in range(whole.completion_length - 1):
        engine.poll()
    engine.resume(engine.abort(request.id), params)
    again = engine.poll()[0]
    assert again.tokens.tolist() == whole.tokens.tolist() and again.text == whole.text and again.finish == "stop"


# ---- stop strings with special tokens, which a text is without ----

NAMES = ("<|a|>", "<|b|>", "<|a|b|>")


class Marked(Bytes):
    """Token = byte, or from 256 a special token."""

    def decode(self, ids, special=False):
        runs = [list(run) for _, run in groupby(ids, lambda i: i > 255)]
        named = [
            "".join(NAMES[i - 256] for i in run) * special if run[0] > 255 else super(Marked, self).decode(run)
            for run in runs
        ]
        return "".join(named)

    def special(self):
        return {name: 256 + i for i, name in enumerate(NAMES)}


SAID = st.lists(st.text("ab|é€", min_size=1, max_size=3) | st.sampled_from(NAMES), max_size=12)
"""Texts, and special tokens; a name may also be written letter by letter."""
STOPS = st.lists(st.sampled_from(NAMES) | st.text("ab|é", min_size=1, max_size=3), min_size=1, max_size=3).map("".join)


@settings(max_examples=examples(400), deadline=None)
@given(SAID, st.lists(STOPS, min_size=1, max_size=3), st.booleans())
def test_special_tokens_in_stop_strings_are_found_as_they_are_spelled(said, stops, letters):
    tokenizer = Marked()
    ids, signs = [], []  # of each character so far: itself, whether it is of a special token, tokens until it is whole
    for part in said:
        if part in NAMES and not letters:
            ids.append(tokenizer.special()[part])
            signs += [(c, True, len(ids)) for c in part]
            continue
        for c in part:
            ids += c.encode()
            signs.append((c, False, len(ids)))
    marked = [s for s in stops if any(name in s for name in NAMES)]
    watch = StopStrings(tuple(stops), tokenizer, tokenizer.special())
    for n, token in enumerate(ids, 1):
        now = [(c, special) for c, special, end in signs if end <= n]
        spelled, text = "".join(c for c, _ in now), "".join(c for c, special in now if not special)
        places = [(text.find(s), len(s), s) for s in stops if s not in marked and s in text]
        for s in marked:
            if s in spelled:
                places.append((sum(not special for _, special in now[: spelled.find(s)]), len(s), s))
        assert watch.push([token]) == bool(places)
        if places:
            assert watch.text == text[: min(places)[0]] and min(places)[1:] == (len(watch.found.string), watch.found[1])
            return
    assert watch.text == "".join(c for c, special, _ in signs if not special)


WRITES = Tokenizer.characters("abcdefghijklmnopqrstuvwxyz" + "".join(map(chr, range(0x400, 0x448))))
"""100 tokens: <pad>, <eos>, and letters."""


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"max_rows": 3, "kv_tokens": 160}], ids=str
)
def test_a_stop_string_that_is_a_special_token_ends_as_that_stop_token_does(options):
    ends = {"<eos>": 1, "<pad>": 0}
    by_string, by_token = (
        make_engine(MODEL, tokenizer=WRITES, parity=True, **options).generate(
            [Request(i, [i, 1, 2], SamplingParams(max_tokens=60, **stop)) for i in range(10)]
        )
        for stop in ({"stop": tuple(ends)}, {"stop_tokens": tuple(ends.values())})
    )
    for one, other in zip(by_string, by_token):
        assert (one.tokens.tolist(), one.finish, one.text) == (other.tokens.tolist(), other.finish, other.text)
        assert np.array_equal(one.logprobs, other.logprobs) and np.array_equal(one.mask, other.mask)
    assert {t.finish for t in by_string} == {"stop", "length"}


def test_a_stop_string_of_text_and_a_special_token():
    requests = [Request(i, [i, 1, 2], SamplingParams(max_tokens=60)) for i in range(40)]
    for request in requests:
        completion = naive(MODEL, request)[0][3:]
        if 1 in completion[2:] and min(completion[completion.index(1) - 2 : completion.index(1)]) > 1:
            break
    at = completion.index(1)
    before = WRITES.decode(completion[:at])
    for stop in (f"{before[-1]}<eos>", f"{before[-2:]}<eos>"):
        params = SamplingParams(max_tokens=60, stop=(stop,))
        (t,) = make_engine(MODEL, tokenizer=WRITES).generate([Request(request.id, request.prompt, params)])
        assert t.tokens[3:].tolist() == completion[: at + 1] and t.finish == "stop"
        assert t.text + stop == before + "<eos>"


@pytest.mark.parametrize("others", [(), ("zzzzz",)])
def test_a_stop_string_of_tokens_that_did_not_count_is_over(others):
    """It is another one that ends a completion, whatever stop strings are beside it."""
    watch = StopStrings(("a", *others), Bytes(), least=1)
    assert [watch.push([byte]) for byte in b"abba"] == [False, False, False, True]
    assert watch.text == "abb" and watch.found.string == "a"


def test_text_is_the_completion_without_its_end_token():
    assert completion_text(Letters(), np.array([1, 2, 3]), (3,)) == "bc"
    assert completion_text(Letters(), np.array([1, 3, 2]), (3,)) == "bdc"
    assert completion_text(None, np.array([1]), ()) == ""
