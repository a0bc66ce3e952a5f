"""Completions of a JSON schema: what is drawn, its log-probs, and company that has no schema."""

import json
import random
import string
import sys
import weakref

import numpy as np
import pytest
import tokenizers
import torch

from tests.engines.reference import Plain, make_model
from tests.errors import raises
from tilth.core.errors import DataError
from tilth.data.tokenizer import EOS, PAD, Tokenizer
from tilth.engines.engine import Engine
from tilth.engines.grammar import STOPS, Grammars, added_tokens, grammar_of_calls
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import EngineError
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.envs.calls import parse_calls
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
     "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"enum": ["left", "right"]},
]  # fmt: skip
TEXTS = ['{"a": 12, "b": "x"} [true, false] "left" "right" hello'] * 8
TOKENIZERS = {
    "characters": Tokenizer.characters(string.ascii_letters + string.digits + '{}[]",: -'),
    "bytes": Tokenizer.train(TEXTS, 300),
}


def made(tokenizer, **options):
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size + 3, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2,
        max_positions=96,
    )  # fmt: skip
    model = make_model(config, scale=1.0)
    engine = Engine(config, EngineOptions(tokenizer=tokenizer, seed=3, max_rows=8, **{"parity": True, **options}))
    engine.update_weights(dict(model.named_parameters()), version=5)
    return engine, model


def asked(tokenizer, schemas, **params):
    given = {"max_tokens": 60, "stop_tokens": (tokenizer.eos_id,), **params}
    prompt = tokenizer.encode("hello")
    return [
        Request(i, prompt, SamplingParams(schema=json.dumps(s) if s else "", **given)) for i, s in enumerate(schemas)
    ]


@pytest.fixture
def library():
    return pytest.importorskip("llguidance")


def test_without_the_library_a_schema_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tokenizer = TOKENIZERS["characters"]
    engine, _ = made(tokenizer)
    with raises(DataError, "request.schema.llguidance"):
        engine.generate(asked(tokenizer, SCHEMAS[:1]))
    assert engine.generate(asked(tokenizer, [None]))[0].finish in ("stop", "length")


def test_engines_without_schemas_refuse_them():
    with raises(EngineError, "request.schema.engine"):
        Plain().generate(asked(TOKENIZERS["characters"], SCHEMAS[:1]))


GREEDY = pytest.param({"temperature": 0.0}, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("params", [{}, GREEDY, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}])
def test_texts_follow_their_schemas_and_company_is_as_alone(library, name, params):
    jsonschema = pytest.importorskip("jsonschema")
    tokenizer = TOKENIZERS[name]
    schemas = [*SCHEMAS, None] * 4
    found = made(tokenizer)[0].generate(asked(tokenizer, schemas, **params))
    plain = made(tokenizer)[0].generate(asked(tokenizer, [None] * 16, **params))
    stopped = 0
    for t, without, schema in zip(found, plain, schemas):
        if schema is None:
            assert np.array_equal(t.tokens, without.tokens) and np.array_equal(t.logprobs, without.logprobs)
        elif t.finish == "stop":
            jsonschema.validate(json.loads(t.text), schema)
            stopped += 1
    assert stopped >= 8


def test_log_probs_are_those_of_the_policy_and_the_drawn_ones_those_among_what_is_allowed(library):
    """Against whole logits and a matcher of its own, token by token."""
    tokenizer = TOKENIZERS["characters"]
    engine, model = made(tokenizer)
    for t, schema in zip(engine.generate(asked(tokenizer, SCHEMAS, temperature=0.8)), SCHEMAS):
        grammar = engine._grammars.begin(json.dumps(schema), (tokenizer.eos_id,))
        with torch.no_grad():
            logits = model.logits(model(torch.from_numpy(t.tokens), PackedContext([len(t.tokens)]))).double() / 0.8
        for at in range(t.prompt_length, len(t.tokens)):
            logp, token = torch.log_softmax(logits[at - 1], -1), int(t.tokens[at])
            allowed = torch.from_numpy(grammar.allowed())
            assert allowed[token]
            among = logp[token] - torch.logsumexp(logp[allowed], 0)
            np.testing.assert_allclose(t.logprobs[at], logp[token], atol=1e-4)
            np.testing.assert_allclose(t.sampling_logprobs[at], among, atol=1e-4)
            grammar.push([token])


def test_a_completion_goes_on_in_its_schema_after_a_pause(library):
    tokenizer = TOKENIZERS["characters"]
    whole = made(tokenizer)[0].generate(asked(tokenizer, SCHEMAS[:1]))[0]
    engine, _ = made(tokenizer)
    (first,) = engine.generate(asked(tokenizer, SCHEMAS[:1], max_tokens=4))
    rounds = EngineRounds(engine)
    rounds.resume(first, asked(tokenizer, SCHEMAS[:1])[0].params)
    (rest,) = rounds.drain()
    assert np.array_equal(rest.tokens, whole.tokens) and rest.finish == whole.finish


ENDLESS = {"anyOf": [{"type": "string", "pattern": f"a{{{i}}}b"} for i in range(400, 900)]}


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"enum": ["ä"]}, {"$ref": "#"}, ENDLESS])
def test_a_schema_that_cannot_be_followed_is_refused_before_anything_is_queued(library, schema):
    tokenizer = Tokenizer.characters("ab")
    engine, _ = made(tokenizer)
    with raises(DataError, "request.schema"):
        engine.generate([Request(0, [2], SamplingParams(4, schema=json.dumps(schema)))])
    assert not engine.pending


class Stuck:
    """A matcher that allows the token 2, then nothing."""

    def __init__(self):
        self.heard = []

    def deep_copy(self):
        return Stuck()

    def consume_token(self, token):
        self.heard.append(token)

    def compute_bitmask(self):
        return bytes([0 if self.heard else 4, 0, 0, 0])

    def is_stopped(self):
        return False

    def is_accepting(self):
        return False


def test_a_text_that_no_token_continues_ends_as_an_error():
    tokenizer = Tokenizer.characters("ab")
    engine, _ = made(tokenizer)
    engine._grammars._compile = lambda schema, stops: Stuck()
    (t,) = engine.generate([Request(0, [3], SamplingParams(9, schema="{}", stop_tokens=(1,)))])
    assert t.finish == "error" and t.tokens.tolist() == [3, 2, 1]


ADD = {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}}
TOOLS = json.dumps(
    [
        {"function": {"name": name, "parameters": {"type": "object", "properties": ADD, "required": ["a"]}}}
        for name in ("add", "take")
    ]
)


@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_calls_of_tools_follow_their_schemas(library, kind):
    """Random turns of whatever is allowed, in which a call begins here and there."""
    tags = ["<tool_call>", "</tool_call>"]
    core = tokenizers.Tokenizer.from_str(Tokenizer.train([*TEXTS, *tags * 20], 340).to_json())
    if kind != "text":
        core.add_special_tokens(tags) if kind == "special" else core.add_tokens(tags)
    tokenizer = Tokenizer(core, EOS, PAD)
    stop, begin = tokenizer.eos_id, core.encode("<tool_call>").ids
    grammars, calls = Grammars(tokenizer, tokenizer.vocab_size), 0
    for seed in range(12):
        draw = random.Random(seed)
        one, ids = grammars.begin(grammar_of_calls(TOOLS, added_tokens(tokenizer)), (stop,)), []
        while len(ids) < 200 and (not ids or ids[-1] != stop):
            allowed = np.flatnonzero(one.allowed()).tolist()
            new = begin if set(begin) <= set(allowed) and draw.random() < 0.3 else [draw.choice(allowed)]
            one.push(new)
            ids += new
        assert not one.stuck
        whole, found, _ = tokenizer.decode(ids, special=True).rpartition("</tool_call>")
        for call in parse_calls(whole + found)[1] if found else ():
            assert not call.problem and call.name in ("add", "take") and call.arguments["a"] <= 99
            assert call.arguments.get("b", "x") in ("x", "yy") and call.arguments.keys() <= ADD.keys()
            calls += 1
    assert calls > 10


def test_whatever_end_tokens_requests_name_few_tokenizers_are_kept(library, monkeypatch):
    tokenizer, kept = TOKENIZERS["characters"], weakref.WeakSet()

    class Read:
        eos_tokens = (0,)

    def read(*given):
        kept.add(found := Read())
        return found

    monkeypatch.setattr(Grammars, "_tokens", read)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for stop in range(3 * STOPS):
        grammars._read((stop,))
    assert len(kept) == STOPS
