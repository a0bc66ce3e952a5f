"""How prompts and answers become token ids: one after the other as they stand, or by a model's chat template.

Rolling out and supervised learning go through the same ``Template``, so what is trained is what is generated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilth.core.errors import DataError
from tilth.data.sources import Prompt
from tilth.data.tokenizer import TURN_END, Tokenizer

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TODAY = datetime(2024, 7, 26)
"""What templates that print today's date are told, so that a run repeats: the day that Llama 3.1's falls back to."""

Messages = Sequence[Mapping[str, str]]
Piece = tuple[str, bool]
"""A part of a conversation: its text, and whether the policy writes it."""


class TemplateError(DataError):
    """A chat template that cannot be read or rendered, or whose conversations do not begin as their beginnings do."""


class Example(NamedTuple):
    """A supervised example. tokens: int64 [T]; mask: uint8 [T], 1 where the loss is taken."""

    tokens: np.ndarray
    mask: np.ndarray


class Template(Protocol):
    """Makes token ids of prompts."""

    name: str
    stops: tuple[int, ...]
    """Ids that end a completion."""

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ids that the policy continues, for each prompt."""
        ...

    def examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        """Prompt, answer and end of each, with the loss on what the policy would write. Every one has an answer."""
        ...


def make_template(name: str, tokenizer: Tokenizer) -> Template:
    """The template of ``data.template``: "" plain, "model" the tokenizer's own, "chatml", or the path of a Jinja file.

    A chat template and the token that ends its turns stay with the tokenizer, so that a saved model brings them along.
    Raises ``TemplateError``.
    """
    if not name:
        return PlainTemplate(tokenizer)
    template = ChatTemplate(tokenizer, _source(name, tokenizer), name)
    tokenizer.converse(template.source, template.stops)
    return template


def _source(name: str, tokenizer: Tokenizer) -> str:
    if name == "model":
        if not tokenizer.chat_template:
            raise TemplateError(
                'data.template = "model", but the tokenizer brings no chat template; name chatml or a file'
            )
        return tokenizer.chat_template
    return _read(name)


def _read(name: str) -> str:
    if name == "chatml":
        return CHATML
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"data.template = {name!r} is neither model, chatml nor a readable file: {error}") from None


def transcript(name: str, tokenizer: str) -> Callable[[Prompt], str]:
    """What makes a document of a conversation by the template of ``data.template``, before a tokenizer is chosen.

    tokenizer: ``data.tokenizer``; a template that is the tokenizer's own or names its tokens needs a folder here. The
    begin token is left out, since every document gets it. Raises ``TemplateError``.
    """
    known = Tokenizer.load(Path(tokenizer)) if tokenizer and Path(tokenizer).is_dir() else None
    if name == "model" and known is None:
        raise TemplateError(
            'data.template = "model" for documents needs data.tokenizer=FOLDER; or name chatml or a file'
        )
    source = known.chat_template if known and name == "model" else _read(name)
    if "_token" in source and known is None:
        raise TemplateError(f"data.template = {name!r} names tokens, which needs data.tokenizer=FOLDER")
    special = {key: token for key, token in known.special_tokens.items() if key != "bos_token"} if known else {}
    render = _renderer(source, special, name)
    return lambda prompt: render([turn for turns in _split(prompt) for turn in turns], False)


class PlainTemplate:
    """Prompt and answer as they stand, and the end token."""

    name = "plain"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stops = tokenizer.stop_ids

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ids of each text."""
        return self.tokenizer.encode_all([_alone(p).text for p in prompts])

    def examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        """Loss on answer and end token."""
        end = [self.tokenizer.eos_id]
        pieces = [[(_alone(p).text, False), (p.answer or "", True)] for p in prompts]
        return [_example([*rows, (end, True)]) for rows in _encode(pieces, self.tokenizer, special=True)]


class ChatTemplate:
    """A conversation by a Jinja template, rendered as ``transformers`` renders it.

    In an example the loss is on every turn of the assistant up to and including its end token. What a template puts
    after that token, such as ChatML's line break, is never the policy's choice: it begins the next turn's prompt.
    ``stops``: the token that ends a turn, then the tokenizer's own.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, name: str) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.name = name
        self._render = _renderer(source, tokenizer.special_tokens, name)
        self.stops = tuple(dict.fromkeys([self._turn_end(), *tokenizer.stop_ids]))
        self._ends = [end for i in self.stops if (end := tokenizer.token(i))]

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ids of each conversation up to where the assistant is to speak."""
        rows = _encode([self._asked(_split(p)[0]) for p in prompts], self.tokenizer)
        return [[i for ids, _ in row for i in ids] for row in rows]

    def examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        """Loss on what the assistant says in each conversation. Raises ``TemplateError``, ``DataError``."""
        rows = _encode(
            [self._told([*asked, *answer], p) for p in prompts for asked, answer in [_split(p)]], self.tokenizer
        )
        for prompt, row in zip(prompts, rows):
            self._check_ends(row, prompt)
        return [_example(row) for row in rows]

    def _asked(self, messages: Messages) -> list[Piece]:
        """What a prompt is made of: as the policy would have read and said it, so that its ids are those of training.

        A template that later writes earlier turns in another way is no harm here, where nothing of them is trained.
        """
        chain = [*self._chain(messages), self._render(messages, True)]
        return _cut(chain) if all(map(_begins, pairwise(chain))) else [(chain[-1], False)]

    def _told(self, messages: Messages, prompt: Prompt) -> list[Piece]:
        """What an example is made of, every turn of it as it was when the policy said it."""
        for message in messages:
            held = [end for end in self._ends if message["role"] == "assistant" and end in message["content"]]
            if held:
                raise DataError(f"{prompt.name}: an answer has the end token {held[0]} in its text")
        chain = self._chain(messages)
        for number, (shorter, longer) in enumerate(pairwise(chain)):
            if not longer.startswith(shorter):
                raise self._unstable(prompt, number, shorter, longer)
        return _cut(chain)

    def _chain(self, messages: Messages) -> list[str]:
        """The conversation as it stands before and after each of the assistant's turns; after: to its end token."""
        chain = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = self._render(messages[:i], True), self._render(messages[: i + 1], False)
                chain += [before, before + self._said(after[len(before) :]) if after.startswith(before) else after]
        return chain

    def _said(self, text: str) -> str:
        """The beginning of a text up to and including its first end token."""
        ends = [(at, -len(end)) for end in self._ends if (at := text.find(end)) >= 0]
        if not ends:
            raise TemplateError(f"template {self.name} ends a turn by {text[-20:]!r}, without any of {self._ends}")
        at, length = min(ends)
        return text[: at - length]

    def _turn_end(self) -> int:
        """The special token that follows what the assistant says, found by trying.

        Of several without anything between them, it is the one that ends a text of the tokenizer, if one does.
        """
        answer = "tilth"
        text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}], False)
        if answer not in text:
            raise TemplateError(f"template {self.name} leaves out what the assistant says: {text[:60]!r}")
        tail = text[text.rfind(answer) + len(answer) :]
        special = self.tokenizer.special()
        start = min((at for token in special if (at := tail.find(token)) >= 0), default=-1)
        if start < 0:
            hint = f"; one trained by data.tokenizer = 'bpe:SIZE' has {TURN_END}" if TURN_END in tail else ""
            raise TemplateError(
                f"template {self.name} ends a turn by {tail[:20]!r}, in which the tokenizer has no special token{hint}"
            )
        ends = [special[token] for token in _leading(tail[start:], sorted(special, key=len, reverse=True))]
        return next((i for i in ends if i in self.tokenizer.stop_ids), ends[0])

    def _check_ends(self, row: "Row", prompt: Prompt) -> None:
        for ids, said in row:
            if said and ids[-1] not in self.stops:
                raise TemplateError(
                    f"template {self.name}: {prompt.name} has a turn that ends by token {ids[-1]}, "
                    f"not by one that ends a completion {self.stops}"
                )

    def _unstable(self, prompt: Prompt, number: int, shorter: str, longer: str) -> TemplateError:
        turn = f"{'after' if number % 2 else 'before'} turn {number // 2 + 1}"
        at = next((i for i, (a, b) in enumerate(zip(shorter, longer)) if a != b), min(len(shorter), len(longer)))
        return TemplateError(
            f"template {self.name} is not prefix-stable: {turn} of the assistant, {prompt.name} "
            f"has {shorter[at : at + 24]!r} at character {at}, but {longer[at : at + 24]!r} in the conversation that "
            f"goes on; make an example of each turn, or take another template"
        )


def _alone(prompt: Prompt) -> Prompt:
    """A prompt that is one text: what several turns run together would say is none of what was said."""
    roles = [message["role"] for message in prompt.messages]
    if roles not in ([], ["user"], ["user", "assistant"]):
        raise DataError(
            f"{prompt.name}: a conversation of the roles {', '.join(roles)} needs a template; "
            f"set data.template=chatml, or model for the tokenizer's own"
        )
    return prompt


Row = list[tuple[list[int], bool]]
"""The ids of each piece of a conversation, and whether the policy writes them."""


def _split(prompt: Prompt) -> tuple[Messages, Messages]:
    """A conversation up to its answer, and the answer (none, or one message)."""
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1:]
    return messages, [] if prompt.answer is None else [{"role": "assistant", "content": prompt.answer}]


def _leading(text: str, tokens: Sequence[str]) -> Iterator[str]:
    """The tokens that a text begins with, one after another; tokens: the longest first."""
    while token := next((t for t in tokens if text.startswith(t)), ""):
        yield token
        text = text[len(token) :]


def _begins(pair: tuple[str, str]) -> bool:
    return pair[1].startswith(pair[0])


def _cut(chain: Sequence[str]) -> list[Piece]:
    """What each text of a chain adds to the one before: by turns the template's and the policy's."""
    return [(longer[len(shorter) :], bool(i % 2)) for i, (shorter, longer) in enumerate(pairwise(["", *chain]))]


def _encode(rows: Sequence[Sequence[Piece]], tokenizer: Tokenizer, special: bool = False) -> list[Row]:
    """Ids of the pieces of each row; those of a beginning of the row are a beginning of its ids.

    The policy will continue the ids it is given, so these must stand as they are: where a tokenizer merges across the
    border, the next piece is tokenised alone.
    """
    wholes = iter(tokenizer.encode_all([text for row in rows for text in accumulate(t for t, _ in row)], special))
    return [_continue(row, wholes, tokenizer) for row in rows]


def _continue(row: Sequence[Piece], wholes: Iterator[list[int]], tokenizer: Tokenizer) -> Row:
    before: list[int] = []
    found: Row = []
    for text, said in row:
        whole = next(wholes)
        first = not found
        continues = first or (whole[: len(before)] == before and len(whole) > len(before))
        ids = whole[len(before) :] if continues else tokenizer.encode(text, special=False)
        before = before + ids
        found.append((ids, said))
    return found


def _example(row: Row) -> Example:
    mask = [np.full(len(ids), said, np.uint8) for ids, said in row]
    return Example(np.array([i for ids, _ in row for i in ids], np.int64), np.concatenate(mask))


def _renderer(source: str, special: Mapping[str, str], name: str) -> Callable[[Messages, bool], str]:
    """(messages, whether the assistant is to speak) -> text, by the sandbox that transformers renders templates in."""
    from jinja2 import TemplateError as JinjaError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled = _compile_jinja_template(source)
    except JinjaError as error:
        raise TemplateError(f"template {name} is not Jinja: {error}") from None

    def render(messages: Messages, speak: bool) -> str:
        known: dict[str, Any] = {"tools": None, "documents": None, "strftime_now": TODAY.strftime, **special}
        try:
            return str(compiled.render(messages=[dict(m) for m in messages], add_generation_prompt=speak, **known))
        except (JinjaError, TypeError, ValueError, LookupError) as error:
            roles = ", ".join(m["role"] for m in messages) or "none"
            raise TemplateError(f"template {name} cannot render a conversation of roles {roles}: {error}") from None

    return render
