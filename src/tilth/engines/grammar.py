"""Completions that a JSON schema allows, or whose calls of tools follow the tools' schemas, by the library llguidance
(extra ``schema``): a mask of tokens each step.
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from tilth.core.errors import DataError
from tilth.engines.stops import Decodes

GRAMMAR = "%llguidance"
SCHEMAS = 256
"""Compiled schemas that an engine keeps."""
STOPS = 16
"""Sets of end tokens for which it keeps the tokenizer as the library reads it, which is as large as the vocabulary."""
_FUEL = 200_000
"""Work that a schema's compilation may cost, in the library's units: about 0.2 s, in which all other requests wait."""
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def added_tokens(tokenizer: Decodes) -> frozenset[str]:
    """Return the texts of tokens that were added to a vocabulary, which are no text to a grammar."""
    return frozenset(token["content"] for token in json.loads(tokenizer.to_json())["added_tokens"])


def check_calls(tools: str) -> None:
    """Raise DataError for tools whose calls cannot be held to their schemas, whatever the vocabulary.

    tools: as for ``grammar_of_calls``."""
    library = _library()
    limits = library.LLParserLimits(initial_lexer_fuel=_FUEL)
    grammar = library.LLMatcher.grammar_from_lark(grammar_of_calls(tools))
    if why := library.LLMatcher.validate_grammar(grammar, limits=limits):
        raise _refused(tools, why.splitlines()[0])


@lru_cache(SCHEMAS)
def grammar_of_calls(tools: str, added: frozenset[str] = frozenset()) -> str:
    """Return the grammar of a turn: any text, and calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of
    these tools with arguments of their schemas.

    tools: JSON of a list of ``envs.tools.Tool.schema``. added: ``added_tokens``."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, "arguments": _closed(one["parameters"])},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in (tool["function"] for tool in json.loads(tools))
    ]
    begin, end = (tag if tag in added else json.dumps(tag) for tag in ("<tool_call>", "</tool_call>"))
    lazy = "" if "<tool_call>" in added else "[lazy]"
    return (
        f"{GRAMMAR} {{}}\nstart: (begin call)* TEXT\nbegin{lazy}: TEXT {begin}\n"
        f"call: /\\n?/ body /\\n?/ {end}\nbody: %json {json.dumps({'anyOf': calls, 'x-guidance': _SPACES})}\n"
        "TEXT: /(.|\\n)*/\n"
    )


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {**parameters, "additionalProperties": False}


class Grammar:
    """Position of one completion in its schema."""

    def __init__(self, matcher: Any, vocabulary: int, stops: tuple[int, ...]) -> None:
        self._matcher, self._vocabulary, self._stops = matcher, vocabulary, stops
        self.stuck = False
        """True if no token of the vocabulary continues the text, which the schema does not allow to end here."""

    def push(self, ids: Iterable[int]) -> bool:
        """Add the next tokens; True once nothing can follow."""
        for id in ids:
            self._matcher.consume_token(int(id))
        stopped = bool(self._matcher.is_stopped())
        self.stuck |= stopped and not self._matcher.is_accepting()
        return self.stuck or stopped

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next, bool [vocabulary], at least one."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)
        going = found.copy()
        going[list(self._stops)] = False
        if not going.any() and not self._matcher.is_accepting():
            self.stuck = True
            found[list(self._stops)] = True
        return found


class Grammars:
    """Compiled schemas of one tokenizer. vocabulary: tokens that the model has."""

    def __init__(self, tokenizer: Decodes, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compiled = lru_cache(SCHEMAS)(lambda schema, stops: self._compile(schema, stops))
        self._read = lru_cache(STOPS)(lambda stops: self._tokens(_library(), stops))

    def begin(self, schema: str, stops: tuple[int, ...]) -> Grammar:
        """Return the beginning of a completion. Raises DataError for a schema that cannot be followed.

        schema: text of a JSON schema, or of a grammar of the library, which begins with ``GRAMMAR``."""
        matcher = self._compiled(schema, stops).deep_copy()
        found = Grammar(matcher, self._vocabulary, stops or tuple(self._read(stops).eos_tokens))
        found.allowed()
        if found.stuck:
            why = matcher.get_error().partition("\n")[0]
            raise _refused(schema, why or "the vocabulary has no tokens for what must be in it")
        return found

    def _compile(self, schema: str, stops: tuple[int, ...]) -> Any:
        library = _library()
        try:
            if schema.startswith(GRAMMAR):
                grammar = library.LLMatcher.grammar_from_lark(schema)
            else:
                grammar = library.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
            limits = library.LLParserLimits(initial_lexer_fuel=_FUEL)
            matcher = library.LLMatcher(self._read(stops), grammar, limits=limits)
        except ValueError as error:
            raise _refused(schema, str(error)) from None
        if matcher.is_error():
            raise _refused(schema, matcher.get_error().splitlines()[0])
        return matcher

    def _tokens(self, library: Any, stops: tuple[int, ...]) -> Any:
        """Return the tokenizer as the library reads it; one of words, which it does not know, token by token."""
        whole, ends = self._tokenizer.to_json(), list(stops) or None
        if json.loads(whole)["model"]["type"] != "WordLevel":
            return library.LLTokenizer(whole, n_vocab=self._vocabulary, eos_token=ends)
        words = library.TokenizerWrapper(_Words(self._tokenizer, self._vocabulary, stops))
        return library.LLTokenizer(words, n_vocab=self._vocabulary, eos_token=ends)


class _Words:
    """A tokenizer whose tokens are texts, in the form that llguidance takes."""

    def __init__(self, tokenizer: Decodes, vocabulary: int, stops: tuple[int, ...]) -> None:
        special = set(tokenizer.special().values())
        self.tokens = [tokenizer.token(i).encode() for i in range(vocabulary)]
        self.special_token_ids = sorted(special)
        self.eos_token_id, self.bos_token_id = (stops or tuple(sorted(special)))[0], None
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(), special=False)


def _refused(schema: str, why: str) -> DataError:
    if "NoExtensionBias" in why:  # all that the library tells
        why = "no text of finite length is of it; a $ref may name what it stands in"
    return DataError(f"sampling schema {schema[:80]!r} cannot be followed: {why}", key="request.schema")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        message = "a sampling schema needs the library llguidance: pip install '.[schema]' in Tilth's folder"
        raise DataError(message, key="request.schema.llguidance") from None
    return llguidance
