"""Stop strings, wherever tokens cut them, in text that is decoded piece by piece."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.reference import make_engine, make_model, naive
from tilth.rollout.request import Request, SamplingParams
from tilth.rollout.stops import StopStrings, completion_text


class Bytes:
    """Token = byte, so that characters and stop strings are cut everywhere."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return bytes(ids).decode(errors="replace")


class Words:
    """Token = one of these pieces; a piece reads with a space unless it is the first."""

    pieces = ("a", "b", "ab", "ba", "aab", "x", "é")

    def decode(self, ids):
        return " ".join(self.pieces[i % len(self.pieces)] for i in ids)


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=100, deadline=None)
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

    def decode(self, ids):
        return "".join("abcdefghij"[i % 10] * (1 + i // 50) for i in ids)


def stopped(tokens, stop):
    """How many completion tokens until the text contains the string; None if it never does."""
    return next((n for n in range(1, len(tokens) + 1) if stop in Letters().decode(tokens[:n])), None)


@pytest.mark.parametrize("options", [{}, {"max_rows": 3, "kv_tokens": 160}], ids=str)
def test_the_engine_keeps_the_tokens_and_cuts_the_text(options):
    params = SamplingParams(max_tokens=60, stop=("ac", "jj"))
    requests = [Request(i, [i, 1, 2], params) for i in range(10)]
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
        engine.step()
    engine.resume(engine.abort(request.id), params)
    again = engine.step()[0]
    assert again.tokens.tolist() == whole.tokens.tolist() and again.text == whole.text and again.finish == "stop"


def test_text_is_the_completion_without_its_end_token():
    assert completion_text(Letters(), np.array([1, 2, 3]), (3,)) == "bc"
    assert completion_text(Letters(), np.array([1, 3, 2]), (3,)) == "bdc"
    assert completion_text(None, np.array([1]), ()) == ""
