"""Read records of any source as prompts and documents: which column is which."""

import base64
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tilth.core.errors import DataError
from tilth.core.media import MEDIA, Media, MediaItem, pack_media

if TYPE_CHECKING:
    from tilth.config.schema import ColumnRole

Columns = Mapping["ColumnRole", str]
"""Role of a column -> its name in the source, a path into an object, or a pattern of columns."""

SYNONYMS = {
    "prompt": ("question", "problem", "instruction", "input", "query"),
    "answer": ("solution", "response", "completion", "output", "target"),
    "messages": ("conversations", "conversation", "chat"),
    "tools": ("functions", "available_tools"),
    "text": ("content", "document", "body"),
    "chosen": ("preferred", "accepted", "response_chosen", "winner"),
    "rejected": ("dispreferred", "refused", "response_rejected", "loser"),
    "margin": (),
}
"""Names that other datasets give these columns, for hints."""

_PLAIN = frozenset((str, int, float, bool, type(None)))
_PROMPTS: tuple["ColumnRole", ...] = ("prompt", "messages")
"""Columns of which a record with a text may have one too."""
_LEVELS = 32
"""Levels of a record that is indexed together with others: whether more can be read depends on the stack."""
_SPEAKERS = ("system", "user", "assistant")
_ROLES = (*_SPEAKERS, "tool")
CALL_ID = "tilth0000"
"""Id of a call that has none; some templates need nine characters."""
_PATTERN = re.compile(r"\{([^{}]+)\}")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+[>,;]")
"""Address in the text of an object, which is another one in each process."""
_TIMES = ("M", "m")
"""Kinds of numpy's dates and times."""


def record_key(where: str, field: str = "") -> str:
    """Return the key of an error about a record: its place without folders, then the field at fault."""
    return ".".join(filter(None, (os.path.basename(where), field)))


class RecordError(DataError):
    """A record that cannot be used."""

    @classmethod
    def at(cls, message: str, where: str = "", *, key: str = "") -> Self:
        """Return the error of a record. where: its place, such as ``folder/file.jsonl:8``; it precedes the message and,
        without folders, the key."""
        return cls(f"{where}: {message}" if where else message, key=record_key(where, key))


class Pair(NamedTuple):
    """Two answers to a prompt. margin: by how much the chosen one is better, in units of the reward; 0: unknown."""

    chosen: str
    rejected: str
    margin: float = 0.0
    where: str = ""
    """Place of its record; empty for a task's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task: the text shown to the policy, its answer if there is one, and the other columns of its record."""

    index: int
    """Place in its source, the same in every split."""
    text: str
    answer: str | None = None
    """Target of a supervised example."""
    info: dict[str, Any] = field(default_factory=dict)
    """Input of the reward function: every column of the source but the prompt's own, the answer among them."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """role, content and tool calls of each turn, if the source has turns; the last one, if it is the assistant's, is
    the answer."""
    where: str = field(default="", compare=False)
    """Place of its record for messages, such as ``file.jsonl:8``; empty for a prompt of a task."""
    pairs: tuple[Pair, ...] = ()
    """Pairs of answers to learn from, where the source has them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools that the conversation lists."""
    media: Media = ()
    """The record's column ``media``, if it has ``MediaItem``s: at positions of the prompt's tokens."""
    whole: str = ""
    """Text to learn from as a whole, of a document, whose ``text`` is its prompt, or all of it; empty: a prompt."""

    @property
    def document(self) -> str:
        """The text to learn from as a whole: a document's, or prompt and answer."""
        return self.whole or self.text + (self.answer or "")

    @property
    def name(self) -> str:
        """Name for error messages."""
        return self.where or f"prompt {self.index}"

    @property
    def key(self) -> str:
        """Text without surrounding white space, with a hash of media, which decides on the side of a split.

        A line break that only one of two recipes puts after a question then moves no prompt.
        """
        return self.text.strip() + (blake2b(pack_media(self.media).tobytes()).hexdigest() if self.media else "")

    @property
    def asked(self) -> list[Mapping[str, Any]]:
        """The messages before the assistant's first turn."""
        found = list(takewhile(lambda message: message["role"] != "assistant", self.messages))
        return found or [{"role": "user", "content": self.text}]

    @property
    def episode(self) -> str:
        """Start of an episode, as JSON: the record's columns, ``messages`` (``asked``), and ``prompt``, their text."""
        prompt = joined(self.asked) if self.messages else self.text
        return json.dumps({**self.info, "prompt": prompt, "messages": self.asked}, default=str)


PlainTurns = Sequence[tuple[str, str]]
"""Role and content of each turn of a conversation; none of a prompt that is a text."""


class PlainJson(NamedTuple):
    """JSON of prompts in columns."""

    texts: Sequence[str]
    answers: Sequence[str]
    infos: Sequence[str]
    turns: Sequence[str]
    """List of the turns of each, ``[]`` without any."""
    sorted_turns: Sequence[str]
    """List of the turns with sorted keys, "" without any."""


class PlainPrompts:
    """Prompts in columns, of records as JSON has them, without tools and calls: indexed and stored together, they take
    half the time.

    Iterating gives each as ``to_prompt`` makes it of its record, of documents as ``sources.read_documents`` does.
    """

    def __init__(self, columns: Columns, *, documents: bool = False) -> None:
        """columns: as of ``to_prompt``. documents: each record is a text to learn from as a whole."""
        self.documents, self.start, self.size = documents, 0, 0
        """start: number of the first one; size: characters of all."""
        self.texts, self.answers = list[str](), list[str | None]()
        self.turns = list[PlainTurns]()
        self.encoded: tuple[list[bytes], list[bytes]] = [], []
        """UTF-8 of texts and of answers."""
        self.infos, self.places = list[dict[str, Any]](), list[str]()
        self.json: PlainJson | None = None
        """JSON of all, once it is made."""
        role: ColumnRole = "text" if documents else "prompt"
        self._columns, self._name, self._answer = columns, columns.get(role, role), columns.get("answer", "answer")
        self._turns = "messages" in columns and "prompt" not in columns
        """True if the prompt has turns."""
        if self._turns and not documents:
            self._name = columns["messages"]

    def next(self) -> "PlainPrompts":
        """Return an empty one of this kind."""
        return PlainPrompts(self._columns, documents=self.documents)

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[Prompt]:
        columns = zip(self.texts, self.answers, self.infos, self.turns, self.places)
        for number, (text, answer, info, turns, where) in enumerate(columns, self.start):
            own = {sys.intern(name): value for name, value in info.items()}
            said = tuple({"role": role, "content": content} for role, content in turns)
            yield Prompt(number, text, answer, own, said, where, whole=text if self.documents else "")

    def add(self, record: Any, where: str, number: int) -> bool:
        """Add the prompt of a record, which becomes its info. False, with no change: it is of another kind, or one with
        an error."""
        if type(record) is not dict:
            return False
        name, given = self._name, None if self.documents else record.get(self._answer)
        needed = not self.documents and "answer" in self._columns
        if type(given) is not str and (given is not None or (needed and self._answer not in record)):
            return False
        text, answer, gold = record.get(name), given, given
        turns: PlainTurns = ()
        if type(text) is not str:
            if not self._turns and "prompt" not in self._columns and "prompt" not in record:
                name = "messages"
            turns = self._turns_of(record.get(name), record)
            last = turns[-1][1] if turns and turns[-1][0] == "assistant" else None
            text = "\n\n".join([content for _, content in (turns if last is None else turns[:-1])])
            answer, gold = (given, given) if last is None else (last, last if given is None else given)
        elif self._turns or (self.documents and _has_prompt(record, self._columns)):
            return False
        if not text:
            return False
        try:
            if not turns:
                size = _json_size(record.values())
            else:  # nothing else of them is kept
                size = len(text) + _json_size([value for column, value in record.items() if column != name])
            encoded = text.encode(), (answer or "").encode()
            if gold is not answer and gold is not None:
                gold.encode()
        except (TypeError, UnicodeEncodeError):
            return False
        if not self.texts:
            self.start = number
        self.size += size
        self.texts.append(text)
        self.answers.append(answer)
        self.turns.append(turns)
        self.encoded[0].append(encoded[0])
        self.encoded[1].append(encoded[1])
        self.infos.append({} if self.documents else record)
        self.places.append(where)
        del record[name]
        if gold is not None:
            record["answer"] = gold
        return True

    def _turns_of(self, value: Any, record: dict[str, Any]) -> PlainTurns:
        """Return role and content of each turn of a conversation as ``messages`` does; none if it has tools or calls,
        or an error."""
        if type(value) is not list or self.documents or "tools" in self._columns or "tools" in record:
            return ()
        try:
            found = [(turn["role"], turn["content"]) for turn in value if not turn.get("tool_calls")]
        except (AttributeError, KeyError, TypeError):
            return ()
        roles = [role for role, content in found if type(content) is str and role in _SPEAKERS]
        sound = len(roles) == len(value) and "user" in roles and roles[0] != "assistant" and roles[-1] != "system"
        return found if sound else ()


def _json_size(values: Iterable[Any], level: int = 0) -> int:
    """Characters of values as JSON has them, of all but texts 1. Raises ``TypeError`` for any other value, and for one
    that is nested too deep."""
    size = 0
    if level > _LEVELS:
        raise TypeError
    for value in values:
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind in _PLAIN:
            size += 1
        elif kind is list:
            size += _json_size(value, level + 1) + 1
        elif kind is dict:
            size += _json_size(value.values(), level + 1) + 1
        else:
            raise TypeError
    return size


def each_prompt(prompts: Iterable[Prompt | PlainPrompts]) -> Iterator[Prompt]:
    """Yield prompts one by one."""
    for one in prompts:
        if isinstance(one, Prompt):
            yield one
        else:
            yield from one


def joined(turns: Iterable[Mapping[str, Any]]) -> str:
    """Join what turns of a conversation say."""
    return "\n\n".join(turn["content"] for turn in turns)


class Document(NamedTuple):
    """A text to learn from as a whole, and the part of it that is a prompt, if any."""

    text: str
    prompt: str = ""


def to_prompt(record: Any, index: int, where: str, columns: Columns) -> Prompt:
    """Return the prompt of a record.

    columns: prompt, answer, messages -> the name of a column; a path into an object, as in
    ``reward_model.ground_truth``; or a pattern with columns in braces, as in ``"{question}\\n"``.

    Raises ``DataError``; its key is the record's place and the column.
    """
    if type(record) is not dict and not isinstance(record, Mapping):  # a test of a class costs more
        raise RecordError.at(f"a {type(record).__name__}, not an object with a prompt", where, key="type")
    items = record.get(MEDIA)
    if isinstance(items, (list, tuple)) and items and isinstance(items[0], MediaItem):
        rest = {name: value for name, value in record.items() if name != MEDIA}
        return replace(to_prompt(rest, index, where, columns), media=tuple(items))
    name = columns.get("prompt", "prompt")
    turns = "prompt" not in columns and ("messages" in columns or (name not in record and "messages" in record))
    if turns:
        name = columns.get("messages", "messages")
    value = value_of(record, "messages" if turns else "prompt", name, where)
    # one string object for a column's name, however many records have it
    info = {sys.intern(k) if type(k) is str else k: v for k, v in record.items() if k != name}
    if turns or isinstance(value, (list, dict)):
        return _conversation(value, record, index, where, name, columns, info)
    text = text_of(value, where, name)
    if not text:
        raise RecordError.at(f"{name} is '', not a text of at least one character", where, key=f"{name}.empty")
    answer = _answer(record, where, columns)
    if answer is not None:
        info["answer"] = answer
    return Prompt(index, text, answer, info, where=where)


def to_document(record: Any, where: str, columns: Columns, render: Callable[[Prompt], str] | None = None) -> Document:
    """Return the document of a record: its text, or prompt and answer joined without a separator.

    render: converts a conversation to text; without it a conversation is a ``DataError``.
    """
    name = columns.get("text", "text")
    if not isinstance(record, Mapping):
        raise RecordError.at(f"a {type(record).__name__}, not an object with a text", where, key="type")
    items = record.get(MEDIA)
    if isinstance(items, (list, tuple)) and any(isinstance(item, MediaItem) for item in items):
        raise RecordError.at("a record with media is no document; leave the column out", where, key=MEDIA)
    has_prompt = _has_prompt(record, columns)
    if has_prompt and "text" not in columns and name not in record:
        prompt = to_prompt(record, 0, where, columns)
        return Document(_rendered(prompt, render), prompt.text)
    text = text_of(value_of(record, "text", name, where), where, name)
    prompt_text = ""
    if has_prompt:
        with suppress(DataError):  # other flows refuse such a record: as a document it has no prompt
            prompt_text = to_prompt(record, 0, where, columns).text
    return Document(text, prompt_text or _prompt_in_pattern(name, record, where, columns))


def _has_prompt(record: Mapping[str, Any], columns: Columns) -> bool:
    return any(role in columns or role in record for role in _PROMPTS)


def _rendered(prompt: Prompt, render: Callable[[Prompt], str] | None) -> str:
    if not prompt.messages:
        return prompt.text + (prompt.answer or "")
    if render is None:
        message = "turns of a conversation are no document; set data.template=chatml or a file"
        raise RecordError.at(message, prompt.where, key="template")
    return render(prompt)


def _prompt_in_pattern(pattern: str, record: Mapping[str, Any], where: str, columns: Columns) -> str:
    """Prompt inside a pattern such as ``"Q: {question} A: {answer}"``: the columns before the answer's."""
    answers = {columns.get("answer", "answer"), "answer", *SYNONYMS["answer"]}
    found = list(_PATTERN.finditer(pattern))
    end = next((i for i, match in enumerate(found) if match[1] in answers), 0)
    if pattern in record or not end:
        return ""
    return str(value_of(record, "text", pattern[found[0].start() : found[end - 1].end()], where))


def plain(value: Any, where: str = "") -> Any:
    """Convert to JSON types: sequences, arrays and sets (sorted) become lists, bytes base64, any other object its
    ``str``.

    Return the same object if it is plain already, or is a mapping whose values are texts and numbers only. Raises
    DataError, with the record's place ``where``, for a value that is nested too deep, for an object in whose ``str`` is
    an address, and for an array that cannot be a list.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        message = "a value is nested hundreds of levels deep; make it a text"
        raise RecordError.at(message, where, key="depth") from None


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is dict and _PLAIN.issuperset(map(type, value.values()))):
        return value
    if isinstance(value, Mapping):
        if all(type(v) in _PLAIN for v in value.values()):
            return value
        return {str(k): _plain(v, where) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, where) for v in value]
    if isinstance(value, (set, frozenset)):  # whose order is another one in each process
        return sorted((_plain(v, where) for v in value), key=str)
    if hasattr(value, "tolist"):  # arrays, whose text leaves out what is in the middle, and their numbers
        return _listed(value, where)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    text = str(value)
    if not isinstance(value, str) and _ADDRESS.search(text):
        message = (
            f"a {kind.__name__} is no text, number, list or object of these, and its text has an address; convert it"
        )
        raise RecordError.at(message, where, key=f"type.{kind.__name__}")
    return text


def _listed(value: Any, where: str) -> Any:
    """Convert an array or a number of numpy, or a tensor. Dates and times become texts: of nanoseconds ``tolist`` makes
    integers, and of numbers of more than 64 bits nothing else."""
    of = getattr(getattr(value, "dtype", None), "kind", "")
    if of in _TIMES:
        return [_listed(v, where) for v in value] if value.ndim else str(value)
    try:
        found = value.tolist()
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        message = f"a {type(value).__name__} cannot be a list: {why}; convert it, as a sparse tensor by to_dense()"
        raise RecordError.at(message, where, key=f"type.{type(value).__name__}") from None
    if of and type(found) is type(value):
        found = complex(value) if of == "c" else float(value)
    return _plain(found, where)


# -- values ------------------------------------------------------------------------------------------------------------


def value_of(record: Mapping[str, Any], role: str, name: str, where: str, inside: str = "") -> Any:
    """Return the value of a column, a path or a pattern.

    role: the key of ``data.columns``, or the full name of another key; inside: the path to the record with a dot behind
    it, if it is an object in one. Both are for the hint.
    """
    if name in record:
        return record[name]
    if _PATTERN.search(name):
        return _PATTERN.sub(lambda match: _in_pattern(value_of(record, role, match[1], where), where, match[1]), name)
    head, _, rest = name.partition(".")
    inner = record.get(head)
    if rest and isinstance(inner, Mapping):
        return value_of(inner, role, rest, f"{where} in {head}", f"{inside}{head}.")
    hint = _column_hint(record, role, name, inside)
    raise RecordError.at(f"no column {name!r}; {hint}", where, key=f"{name}.missing")


def _column_hint(record: Mapping[str, Any], role: str, name: str, inside: str) -> str:
    """List the columns of a record, and suggest the one that was probably meant."""
    names = [str(column) for column in record]
    if not names:
        return "there is none"
    typed = [(role, near) for near in difflib.get_close_matches(name, names, 1, 0.75)]
    roles = ("prompt", "messages") if role == "prompt" else (role,)
    usual = [(key, near) for key in roles for near in SYNONYMS.get(key, ()) if near in names]
    key, near = next(iter([*typed, *usual]), (role, _pattern_hint(names, inside) if role == "text" else "NAME"))
    place = "" if key == "text" and near not in names else inside  # which a pattern has in its braces
    listed = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return f"there is {listed}; try {key if '.' in key else f'data.columns.{key}'}={place}{near}"


def _pattern_hint(names: Sequence[str], inside: str) -> str:
    """Return a pattern of the columns that look like a prompt and its answer, or of the first column."""
    usual = [next((n for n in (role, *SYNONYMS[role]) if n in names), "") for role in ("prompt", "answer")]
    pattern = "\\n".join(f"{{{inside}{name}}}" for name in filter(None, usual))
    return f"'\"{pattern or f'{{{inside}{names[0]}}}'}\"', a pattern of columns"


def _in_pattern(value: Any, where: str, name: str) -> str:
    if value is None:
        raise RecordError.at(f"{name} is null, but a pattern needs it", where, key=f"{name}.null")
    if isinstance(value, (str, bytes)):
        return text_of(value, where, name)
    return json.dumps(plain(value, where), ensure_ascii=False)


def text_of(value: Any, where: str, name: str) -> str:
    """Return a value that is a text, or UTF-8 bytes; raises ``DataError`` for any other."""
    if type(value) is str and value.isascii():
        return value
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            hint = f'; "{{{name}}}" makes it one' if isinstance(value, (int, float)) else ""
            raise RecordError.at(f"{name} is {short(value)}, not a text{hint}", where, key=f"{name}.type")
        text.encode()
    except UnicodeDecodeError:
        raise RecordError.at(f"{name} is bytes that are not UTF-8", where, key=f"{name}.utf8") from None
    except UnicodeEncodeError:
        message = f"{name} is no valid Unicode text (a lone surrogate)"
        raise RecordError.at(message, where, key=f"{name}.unicode") from None
    return text


def short(value: Any) -> str:
    """Return at most 80 characters of a value's ``repr``, for messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _answer(record: Mapping[str, Any], where: str, columns: Columns) -> str | None:
    """Answer's column; it may be missing unless the recipe names it."""
    name = columns.get("answer", "answer")
    if "answer" not in columns and name not in record:
        return None
    value = value_of(record, "answer", name, where)
    return None if value is None else text_of(value, where, name)


# -- conversations -----------------------------------------------------------------------------------------------------


def _conversation(
    value: Any, record: Mapping[str, Any], index: int, where: str, name: str, columns: Columns, info: dict[str, Any]
) -> Prompt:
    turns = messages(value, where, name)
    listed = columns.get("tools", "tools")
    has_tools = "tools" in columns or listed in record
    tools = tools_of(value_of(record, "tools", listed, where), where, listed) if has_tools else ()
    column = _answer(record, where, columns)
    last = turns[-1]["content"] if turns[-1]["role"] == "assistant" else None
    asked = turns if last is None else turns[:-1]
    text = joined(asked)
    if not text:
        raise RecordError.at(f"{name} has no text before the assistant's turn", where, key=f"{name}.empty")
    gold = last if column is None else column
    if gold is not None:
        info["answer"] = gold
    return Prompt(index, text, column if last is None else last, info, turns, where, tools=tools)


def messages(value: Any, where: str, name: str = "messages") -> tuple[dict[str, Any], ...]:
    """Return role, content and tool calls of each turn of a conversation; a tool's turn has the tool's name.

    Raises ``DataError`` unless it begins with system or user, has a user's turn and does not end with system.
    """
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, turn)) for turn in zip(*value.values())]  # a table of turns, as datasets saves them
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise RecordError.at(f"{name} is {short(value)}, not a list of {{role, content}}", where, key=f"{name}.type")
    turns = tuple(turn_of(turn, where, f"{name}[{i}]") for i, turn in enumerate(value))
    roles = [turn["role"] for turn in turns]
    if roles[0] not in ("system", "user"):
        message = f"{name} begins with the {roles[0]}'s turn, not with system or user"
        raise RecordError.at(message, where, key=f"{name}.first")
    if "user" not in roles:
        raise RecordError.at(f"{name} has no turn of the user", where, key=f"{name}.user")
    if roles[-1] == "system":
        message = f"{name} ends with the system's turn, not with user, tool or assistant"
        raise RecordError.at(message, where, key=f"{name}.last")
    _answer_calls(turns)
    return turns


def _answer_calls(turns: Sequence[dict[str, Any]]) -> None:
    """Give a tool's turn the name and the id of its call where it has none: by id, else in the order of the calls."""
    open_calls: list[dict[str, Any]] = []
    for turn in turns:
        open_calls += turn.get("tool_calls", ())
        if turn["role"] == "tool" and open_calls:
            place = next((i for i, call in enumerate(open_calls) if call["id"] == turn.get("tool_call_id")), 0)
            call = open_calls.pop(place)
            turn.setdefault("name", call["function"]["name"])
            turn.setdefault("tool_call_id", call["id"])


def turn_of(turn: Any, where: str, name: str) -> dict[str, Any]:
    """Return role, content and tool calls of one turn. name: the turn's, such as ``messages[2]``, for errors."""
    calls = turn.get("tool_calls") if isinstance(turn, Mapping) else None
    if not isinstance(turn, Mapping) or "role" not in turn or not (calls or "content" in turn):
        message = f"{name} is {short(turn)}, not an object with role and content"
        raise RecordError.at(message, where, key=f"{name}.type")
    if turn["role"] not in _ROLES:
        message = f"{name}: role is {short(turn['role'])}, not one of {', '.join(_ROLES)}"
        raise RecordError.at(message, where, key=f"{name}.role")
    content = "" if calls and turn.get("content") is None else turn["content"]
    found: dict[str, Any] = {"role": turn["role"], "content": text_of(content, where, f"{name}.content")}
    if calls and turn["role"] != "assistant":
        message = f"{name} has tool_calls, but only the assistant calls tools, not {turn['role']}"
        raise RecordError.at(message, where, key=f"{name}.tool_calls")
    if calls:
        found["tool_calls"] = calls_of(calls, where, f"{name}.tool_calls")
    named = ("name", "tool_call_id") if turn["role"] == "tool" else ()
    return found | {key: turn[key] for key in named if isinstance(turn.get(key), str)}


# -- tools -------------------------------------------------------------------------------------------------------------


def calls_of(value: Any, where: str, name: str) -> list[dict[str, Any]]:
    """Return the calls of a turn as chat templates take them: id, type, and function with arguments as an object.

    A null argument of an object is left out, since a table has one for every key of its other rows; JSON keeps it.
    Raises ``DataError``.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RecordError.at(f"{name} is {short(value)}, not a list of calls", where, key=f"{name}.type")
    return [_call(call, where, f"{name}[{number}]") for number, call in enumerate(value)]


def _call(call: Any, where: str, name: str) -> dict[str, Any]:
    function = _function(call, where, name)
    given = function.get("arguments")
    arguments = _parsed(given or "{}") if isinstance(given, str) else _without_null(given or {})
    if not isinstance(arguments, Mapping):
        message = f"{name}: the arguments of {function['name']} are {short(given)}, not a JSON object"
        raise RecordError.at(message, where, key=f"{name}.arguments")
    return {
        "id": call.get("id") or CALL_ID,
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def tools_of(value: Any, where: str, name: str) -> tuple[dict[str, Any], ...]:
    """Return the schemas of the tools that a record lists, in a list or its JSON; null lists none.

    A bare function is wrapped, and null is left out of a list but for defaults. Raises ``DataError``.
    """
    listed = _parsed(value or "[]") if isinstance(value, str) else [] if value is None else value
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        raise RecordError.at(f"{name} is {short(value)}, not a list of tools", where, key=f"{name}.type")
    found = [_function(tool, where, f"{name}[{i}]") for i, tool in enumerate(listed)]
    tools = [tool if "function" in tool else {"type": "function", "function": f} for f, tool in zip(found, listed)]
    return tuple(tools if isinstance(value, str) else [_without_null(tool, ("default",)) for tool in tools])


def _function(value: Any, where: str, name: str) -> Mapping[str, Any]:
    """Return the function of a call or of a tool, wrapped or bare."""
    found = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str) or not found["name"]:
        message = f'{name} is {short(value)}, not {{"type": "function", "function": {{"name": ...}}}}'
        raise RecordError.at(message, where, key=f"{name}.type")
    return found


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None for a text that is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _without_null(value: Any, kept: Sequence[str] = ()) -> Any:
    """Leave out the keys whose value is null, at any depth. kept: keys for which null is a value."""
    if isinstance(value, Mapping):
        return {k: _without_null(v, kept) for k, v in value.items() if v is not None or k in kept}
    return [_without_null(v, kept) for v in value] if isinstance(value, (list, tuple)) else value
