"""Words and calls of a turn, in one piece and as a stream: no special tokens, no lost characters, stop strings."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.examples import examples
from tilth.core.trajectory import Trajectory
from tilth.data.tokenizer import Tokenizer
from tilth.engines.completion import Delta
from tilth.engines.request import Request, SamplingParams
from tilth.engines.stops import StopStrings
from tilth.envs.calls import ToolCall
from tilth.rollout.turns import split_turn, stop_string
from tilth.serve.choices import ChatChoice

WORDS = Tokenizer.train(["some text "] * 2, 260)
WORDS._core.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("<tool_call>", special=True)])
SPECIAL = ("<|im_start|>", "<pad>", "[TOOL_CALLS]", "<tool_call>")
END = WORDS.special()["<|im_end|>"]
CALL = json.dumps({"name": "add", "arguments": {"a": 1}})
BODY = SimpleNamespace(parallel_tool_calls=None, logprobs=False, return_token_ids=False, stop=None)


def ids_of(parts):
    """Tokens of texts, special tokens, and bytes, which may be a part of a character."""
    known = WORDS.vocabulary()
    letters = WORDS.encode("".join(map(chr, range(128))), special=False)
    found = []
    for part in parts:
        if isinstance(part, bytes):
            euro = WORDS.encode("€", special=False)
            found += [letters[byte] if byte < 128 else euro[0] for byte in part]
        elif part in SPECIAL:
            found.append(known[part])
        else:
            found += WORDS.encode(part.replace("<", "< ") if part in SPECIAL else part, special=False)
    return found


def answer(parts, stop=(), ended=True):
    """The request of a turn, and its trajectory as the engine makes it."""
    params, ids = SamplingParams(max_tokens=99, stop=tuple(stop), stop_tokens=(END,)), ids_of(parts)
    watch, special = StopStrings(params.stop, WORDS, WORDS.special()), [END] if ended else []
    cut = next((n for n, id in enumerate(ids, 1) if watch.push([id])), None)
    ids = [*ids, *special] if cut is None else ids[:cut]
    text = watch.text if cut else WORDS.decode(ids[:-1] if ended else ids)
    tokens = np.array([5, *ids])
    finish = "stop" if ended or cut else "length"
    turn = Trajectory(0, 0, 0, tokens, np.array([0] + [1] * len(ids), np.uint8), np.zeros(len(tokens), np.float32),
                      finish=finish, text=text)  # fmt: skip
    return Request(0, [5], params), turn


def streamed(request, turn, places):
    """Deltas of a stream whose pieces end at these places."""
    choice, ids = ChatChoice(WORDS, request, BODY, calls=True), turn.tokens[1:]
    ends = [0, *sorted({place for place in places if 0 < place < len(ids)}), len(ids)]
    return [
        part["delta"]
        for begin, end in pairwise(ends)
        for part in choice.delta(
            Delta(ids[begin:end], np.zeros(end - begin), whole=turn if end == len(ids) else None)
        )
    ]  # fmt: skip


PARTS = st.lists(
    st.text("ab{ \n€", min_size=1, max_size=3)
    | st.sampled_from([*SPECIAL, b"\xe2", "</tool_call>", CALL, f"<tool_call>{CALL}</tool_call>", "STOP", "<tool"]),
    max_size=8,
)


@settings(max_examples=examples(150), deadline=None)
@given(PARTS, st.sets(st.integers(0, 60)), st.sampled_from([(), ("STOP",), ("b", "TOP"), ("<pad>",)]), st.booleans())
@example(["ab", "<pad>", "cd"], set(), (), True)
@example(["ab", b"\xe2"], {1}, (), False)
@example(["  so", f"<tool_call>{CALL}</tool_call>"], {2}, (), True)
@example(["so ", "<pad>", " ", "[TOOL_CALLS]", f"[{CALL}]"], {1, 2, 3}, (), True)
@example(["<|im_start|>", "<pad>"], set(), ("<pad>",), False)
def test_a_stream_with_tools_is_the_answer_in_one_piece(parts, places, stop, ended):
    request, turn = answer(parts, stop, ended)
    whole = ChatChoice(WORDS, request, BODY, calls=True).whole(turn)["message"]
    deltas = streamed(request, turn, places)
    assert "".join(delta.get("content") or "" for delta in deltas) == (whole["content"] or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    plain = lambda call: (call["function"]["name"], call["function"]["arguments"])  # noqa: E731
    assert [*map(plain, calls)] == [*map(plain, whole.get("tool_calls", ()))]
    if not calls:
        assert whole["content"] == turn.text
    split, found = split_turn(WORDS, turn, (END,))
    assert found or split == turn.text
    assert len(turn.text) >= len(split)
    assert (stop_string(WORDS, turn, (END,), stop) in stop) == (turn.finish == "stop" and turn.tokens[-1] != END)


@pytest.mark.parametrize(
    ("parts", "stop", "content", "count"),
    [
        (["so<pad>", "<pad>", "[TOOL_CALLS]", f"[{CALL}, {CALL}]"], (), "so", 2),
        (["<|im_start|>", "so ", "<tool_call>", CALL, "</tool_call>", " and", "<pad>", " so"], (), "so  and so", 1),
        (["so ", f"<tool_call>{CALL}</tool_call>", " end STOP it"], ("STOP",), "so  end", 1),
        (["so STOP", f"<tool_call>{CALL}</tool_call>"], ("STOP",), "so ", 0),
        (["so ", "<tool_call>", CALL, "<pad>", "</tool_call>"], ("<pad>",), "so", 1),
        (["so ", f"<tool_call>{CALL[:-3]}", "<pad>"], ("<pad>",), None, 1),
        ([CALL], (), "", 1),
        (["  so", b"\xe2"], (), "  so\ufffd", 0),
    ],
)
def test_words_and_calls_are_told_apart(parts, stop, content, count):
    parts = [part.replace("<pad>", "") if isinstance(part, str) and part not in SPECIAL else part for part in parts]
    _, turn = answer(parts, stop)
    said, calls = split_turn(WORDS, turn, (END,))
    assert len(calls) == count and (content is None) == any(call.problem for call in calls)
    assert content is None or (said == content and calls == [ToolCall("add", {"a": 1})] * count)


@pytest.mark.parametrize(
    ("parts", "stop", "wanted", "found"),
    [
        (["<|im_start|>", "<pad>"], ("<pad>", "t"), ("<pad>", "t"), "<pad>"),  # a letter of another special token
        (["<tool_call>", "X"], ("X",), ("tool",), None),
        (["<tool_call>", "X"], ("X",), ("tool", "X"), "X"),
        (["ab", "<pad>"], ("<", "<pad>"), ("<", "<pad>"), "<pad>"),  # which stands in no text
        (["ab", "<pad>", "<|im_start|>"], ("<|im_start|>",), ("<pad>", "<|im_start|>"), "<|im_start|>"),
        (["ab", "<pad>", "cd"], ("<pad>cd", "e"), ("c", "<pad>cd"), "<pad>cd"),
        (["ab", "<pad>", "cd"], ("<pad>c",), ("<pad>c",), "<pad>c"),
        (["abSTOP"], ("STOP", "S"), ("STOP", "S"), "S"),
        (["abSTOP"], ("STOP",), ("TOP",), None),
        (["ab", "<pad>"], ("<pad>",), ("b",), None),
        (["< pad>"], ("pad",), ("pad", "<pad>"), "pad"),
    ],
)
def test_the_stop_string_that_has_ended_a_turn_is_named(parts, stop, wanted, found):
    _, turn = answer(parts, stop)
    assert turn.finish == "stop" and turn.tokens[-1] != END
    assert stop_string(WORDS, turn, (END,), wanted) == found


def test_a_stop_string_that_came_too_early_has_ended_nothing():
    """``min_tokens``: the special token stands where the text ends, and ended it not."""
    watch, ids = StopStrings(("<pad>", "beyond"), WORDS, WORDS.special(), least=2), ids_of(["<pad>", "beyond"])
    assert [watch.push([id]) for id in ids][-1] and watch.text == ""
    turn = Trajectory(0, 0, 0, np.array(ids), np.ones(len(ids), np.uint8), np.zeros(len(ids), np.float32),
                      finish="stop", text="")  # fmt: skip
    assert stop_string(WORDS, turn, (END,), ("<pad>", "beyond")) == "beyond"
