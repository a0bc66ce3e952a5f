"""Records of any source as prompts and documents: which column is which."""

import base64
import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tilth.core.errors import DataError

Columns = Mapping[Literal["prompt", "answer", "messages", "text", "chosen", "rejected", "margin"], str]
"""Which column of a source is which."""

_NEAR = {
    "prompt": ("question", "problem", "instruction", "input", "query"),
    "answer": ("solution", "response", "completion", "output", "target"),
    "messages": ("conversations", "conversation", "chat"),
    "text": ("content", "document", "body"),
    "chosen": ("preferred", "accepted", "response_chosen", "winner"),
    "rejected": ("dispreferred", "refused", "response_rejected", "loser"),
    "margin": (),
}
"""What other datasets call these columns, for hints."""

_PLAIN = frozenset((str, int, float, bool, type(None)))
_ROLES = ("system", "user", "assistant", "tool")
_PATTERN = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task: the text shown to the policy, the right answer if it is known, and what else the source says."""

    index: int
    """Place in its source, the same in every split."""
    text: str
    answer: str | None = None
    """What a supervised example teaches to say."""
    info: dict[str, Any] = field(default_factory=dict)
    """What a reward function is given: every column of the source but the prompt's own, the answer among them."""
    messages: tuple[Mapping[str, str], ...] = ()
    """role and content of each turn, if the source has turns; the last one, if it is the assistant's, is the answer."""
    where: str = field(default="", compare=False)
    """Place of its record, such as ``file.jsonl:8``, for what is told of it; empty for a task's."""

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.where or f"prompt {self.index}"

    @property
    def key(self) -> str:
        """What decides on its side of a split: its text without the white space around it.

        So a line break that one recipe puts after a question and another does not moves no prompt.
        """
        return self.text.strip()


class Document(NamedTuple):
    """A text to learn from as a whole, and what it has for a prompt, if anything."""

    text: str
    prompt: str = ""

    @property
    def key(self) -> str:
        """As of ``Prompt``: of its prompt where it has one, else of all of it."""
        return (self.prompt or self.text).strip()


def to_prompt(record: Any, index: int, where: str, columns: Columns) -> Prompt:
    """The prompt that a record holds.

    columns: prompt, answer, messages, text -> the name of a column; a path into an object, as in
    ``reward_model.ground_truth``; or a pattern with columns in braces, as in ``"{question}\\n"``.

    Raises ``DataError`` with the place and what would be right.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a {type(record).__name__}, not an object with a prompt")
    name = columns.get("prompt", "prompt")
    turns = "prompt" not in columns and ("messages" in columns or (name not in record and "messages" in record))
    if turns:
        name = columns.get("messages", "messages")
    value = value_of(record, "messages" if turns else "prompt", name, where)
    info = {_shared(k): v for k, v in record.items() if k != name}
    if turns or isinstance(value, (list, dict)):
        return _conversation(value, record, index, where, name, columns, info)
    text = text_of(value, where, name)
    if not text:
        raise DataError(f"{where}: {name} is '', not a text of at least one character")
    answer = _answer(record, where, columns)
    if answer is not None:
        info["answer"] = answer
    return Prompt(index, text, answer, info, where=where)


def to_document(record: Any, where: str, columns: Columns, render: Callable[[Prompt], str] | None = None) -> Document:
    """The document that a record holds: its text, or else prompt and answer one after the other as they stand.

    render: makes a text of a conversation; without it one is a ``DataError``, since its turns are not a text.
    """
    name = columns.get("text", "text")
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a {type(record).__name__}, not an object with a text")
    asked = any(column in columns or column in record for column in ("prompt", "messages"))
    if asked and "text" not in columns and name not in record:
        prompt = to_prompt(record, 0, where, columns)
        return Document(_told(prompt, render), prompt.text)
    text = text_of(value_of(record, "text", name, where), where, name)
    said = _asked(record, where, columns) if asked else ""
    return Document(text, said or _asked_in(name, record, where, columns))


def _told(prompt: Prompt, render: Callable[[Prompt], str] | None) -> str:
    if not prompt.messages:
        return prompt.text + (prompt.answer or "")
    if render is None:
        raise DataError(f"{prompt.where}: turns of a conversation are no document; set data.template=chatml or a file")
    return render(prompt)


def _asked(record: Mapping[str, Any], where: str, columns: Columns) -> str:
    """The prompt that other flows read here; none where they would refuse the record."""
    try:
        return to_prompt(record, 0, where, columns).text
    except DataError:
        return ""


def _asked_in(pattern: str, record: Mapping[str, Any], where: str, columns: Columns) -> str:
    """What a pattern such as ``"Q: {question} A: {answer}"`` has for a prompt: its columns before the answer's."""
    answers = {columns.get("answer", "answer"), "answer", *_NEAR["answer"]}
    found = list(_PATTERN.finditer(pattern))
    end = next((i for i, match in enumerate(found) if match[1] in answers), 0)
    if pattern in record or not end:
        return ""
    return str(value_of(record, "text", pattern[found[0].start() : found[end - 1].end()], where))


def plain(value: Any) -> Any:
    """As JSON has it: other sequences are lists, bytes are base64, and what else there is, is its text.

    The very object if it is plain already and, of a table, all its values are texts or numbers.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        if all(type(v) in _PLAIN for v in value.values()):
            return value
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _shared(name: str) -> str:
    """One object for a column's name, however many records have it."""
    return sys.intern(name) if type(name) is str else name


# -- values ------------------------------------------------------------------------------------------------------------


def value_of(record: Mapping[str, Any], role: str, name: str, where: str) -> Any:
    """What a column, a path or a pattern is in a record."""
    if name in record:
        return record[name]
    if _PATTERN.search(name):
        return _PATTERN.sub(lambda match: _spelled(value_of(record, role, match[1], where), where, match[1]), name)
    head, _, rest = name.partition(".")
    inner = record.get(head)
    if rest and isinstance(inner, Mapping):
        return value_of(inner, role, rest, f"{where} in {head}")
    raise DataError(f"{where}: no column {name!r}; {_columns(record, role, name)}")


def _columns(record: Mapping[str, Any], role: str, name: str) -> str:
    """Which columns there are, and the one that was probably meant."""
    names = [str(column) for column in record]
    if not names:
        return "there is none"
    typed = [(role, near) for near in difflib.get_close_matches(name, names, 1, 0.75)]
    roles = ("prompt", "messages") if role == "prompt" else (role,)
    usual = [(key, near) for key in roles for near in _NEAR[key] if near in names]
    key, near = next(iter([*typed, *usual]), (role, _joined(names) if role == "text" else "NAME"))
    listed = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return f"there is {listed}; try data.columns.{key}={near}"


def _joined(names: Sequence[str]) -> str:
    """A pattern that makes a text of the columns that look like a prompt and its answer, or of the first."""
    usual = [next((n for n in (role, *_NEAR[role]) if n in names), "") for role in ("prompt", "answer")]
    pattern = "\\n".join(f"{{{name}}}" for name in filter(None, usual))
    return f"'\"{pattern or f'{{{names[0]}}}'}\"', a pattern of columns"


def _spelled(value: Any, where: str, name: str) -> str:
    """A value inside a pattern."""
    if value is None:
        raise DataError(f"{where}: {name} is null, but a pattern needs it")
    if isinstance(value, (str, bytes)):
        return text_of(value, where, name)
    return json.dumps(plain(value), ensure_ascii=False)


def text_of(value: Any, where: str, name: str) -> str:
    """The text that a value is; DataError names the place and the column otherwise."""
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            hint = f'; "{{{name}}}" makes it one' if isinstance(value, (int, float)) else ""
            raise DataError(f"{where}: {name} is {short(value)}, not a text{hint}")
        text.encode()
    except UnicodeDecodeError:
        raise DataError(f"{where}: {name} is bytes that are not UTF-8") from None
    except UnicodeEncodeError:
        raise DataError(f"{where}: {name} is no valid Unicode text (a lone surrogate)") from None
    return text


def short(value: Any) -> str:
    """A value in an error message."""
    said = repr(value)
    return said if len(said) <= 80 else said[:77] + "..."


def _answer(record: Mapping[str, Any], where: str, columns: Columns) -> str | None:
    """The answer's column; one that the recipe does not name may be missing."""
    name = columns.get("answer", "answer")
    if "answer" not in columns and name not in record:
        return None
    value = value_of(record, "answer", name, where)
    return None if value is None else text_of(value, where, name)


# -- conversations -----------------------------------------------------------------------------------------------------


def _conversation(
    value: Any,
    record: Mapping[str, Any],
    index: int,
    where: str,
    name: str,
    columns: Columns,
    info: dict[str, Any],
) -> Prompt:
    turns = messages(value, where, name)
    answer = _answer(record, where, columns)
    said = turns[-1]["content"] if turns[-1]["role"] == "assistant" else None
    asked = turns if said is None else turns[:-1]
    text = "\n\n".join(turn["content"] for turn in asked)
    if not text:
        raise DataError(f"{where}: {name} has no text before the assistant's turn")
    gold = said if answer is None else answer
    if gold is not None:
        info["answer"] = gold
    return Prompt(index, text, answer if said is None else said, info, turns, where)


def messages(value: Any, where: str, name: str = "messages") -> tuple[dict[str, str], ...]:
    """The turns of a conversation, checked: role and content of each, from system or user to user or assistant."""
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, turn)) for turn in zip(*value.values())]  # a table of turns, as datasets saves them
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise DataError(f"{where}: {name} is {short(value)}, not a list of {{role, content}}")
    turns = tuple(turn_of(turn, f"{where}: {name}[{i}]") for i, turn in enumerate(value))
    roles = [turn["role"] for turn in turns]
    if roles[0] not in ("system", "user"):
        raise DataError(f"{where}: {name} begins with the {roles[0]}'s turn, not with system or user")
    if "user" not in roles:
        raise DataError(f"{where}: {name} has no turn of the user")
    if roles[-1] == "system":
        raise DataError(f"{where}: {name} ends with the system's turn, not with user, tool or assistant")
    return turns


def turn_of(turn: Any, where: str) -> dict[str, str]:
    """One turn of a conversation, checked."""
    if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
        raise DataError(f"{where} is {short(turn)}, not an object with role and content")
    if turn["role"] not in _ROLES:
        raise DataError(f"{where}: role is {short(turn['role'])}, not one of {', '.join(_ROLES)}")
    if turn.get("tool_calls"):
        raise DataError(f"{where} has tool_calls, which are not supported; write the call into content")
    return {"role": turn["role"], "content": text_of(turn["content"], where, "content")}
