"""Convert prompts and answers to token ids: joined as they stand, or by a model's chat template.

Rollout and supervised learning use the same ``Template``, so the trained ids are the generated ones.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tilth.core.errors import DataError
from tilth.data.columns import CALL_ID, Prompt, RecordError, record_key
from tilth.data.tokenizer import TURN_END, Tokenizer

if TYPE_CHECKING:
    from tilth.config.schema import DataConfig

CHATML = """\
{%- set alone = not tools or not messages or messages[0]['role'] != 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if not alone %}
        {{- messages[0]['content'] + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these tools:\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\nTo call one, answer with its name and arguments as JSON:\\n' }}
    {{- '<tool_call>\\n{"name": NAME, "arguments": {KEY: VALUE}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages if alone else messages[1:]) %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] }}
            {%- for call in message['tool_calls'] or [] %}
                {{- '\\n' if message['content'] or not loop.first }}
                {{- '<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' }}
                {{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_MARK = "tilth\u2e31turn"
"""Text of a turn whose place in a rendered conversation is sought."""
TODAY = datetime(2024, 7, 26)
"""Date for templates that print today's, so that a run repeats: the fallback of Llama 3.1's template."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools (``envs.tools.Tool.schema``)."""
Variables = Mapping[str, Any]
NONE: Variables = MappingProxyType({})
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")
"""Variables that each rendering sets itself."""
T = TypeVar("T")
Piece = tuple[str, bool]
"""A part of a conversation: its text, and True if the policy generates it."""


class TemplateError(DataError):
    """A chat template that cannot be read or rendered, or that rewrites earlier turns of a longer conversation."""


class Example(NamedTuple):
    """A supervised example. tokens: int64 [T]; mask: uint8 [T], 1 where the loss is taken."""

    tokens: np.ndarray
    mask: np.ndarray


class Template(Protocol):
    """Convert prompts to token ids."""

    name: str
    stops: tuple[int, ...]
    """Ids that end a completion."""

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the ids that the policy continues, for each prompt."""
        ...

    def examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        """Return prompt, answer and end of each, with the loss on the policy's tokens. Every prompt has an answer."""
        ...

    def check_tools(self) -> None:
        """Raise TemplateError if prompts cannot list tools."""
        ...

    def begin(self, messages: Messages, tools: Tools = (), variables: Variables = NONE) -> list[int]:
        """Return the ids of an episode's first messages, which the policy continues.

        variables: further ones for the template, such as enable_thinking. Raises TemplateError for one that it does not
        read.
        """
        ...

    def follow(self, new: Messages, tools: Tools = (), *, ended: bool = True, strict: bool = True) -> list[int]:
        """Return the ids from the end of the policy's newest turn to the beginning of its next one.

        new: the messages behind it. ended: False if the policy did not write its end token. Raises TemplateError for a
        template that writes earlier turns anew; with strict=False they stay as they were written.
        """
        ...


def make_template(name: str, tokenizer: Tokenizer, tools: Tools = (), key: str = "data.template") -> Template:
    """Return the template of ``data.template``: "" plain, "model" the tokenizer's, "chatml", or a Jinja file's path.

    A chat template and the token that ends its turns are added to the tokenizer, so a saved model contains them.
    tools: listed in prompts and examples whose record lists none. key: that names it. Raises ``TemplateError``.
    """
    if not name:
        return PlainTemplate(tokenizer)
    if name == "model" and not tokenizer.chat_template:
        message = f'{key} = "model", but the tokenizer brings no chat template; name chatml or a file'
        raise TemplateError(message, key="tokenizer.chat_template")
    source = tokenizer.chat_template if name == "model" else _read(name, key)
    template = ChatTemplate(tokenizer, source, name, tools)
    tokenizer.converse(template.source, template.stops)
    return template


class SourceTemplates:
    """Template of a mixture: prompts by that of their source, all else by ``data.template``."""

    def __init__(self, main: Template, others: Sequence[Template], starts: np.ndarray) -> None:
        """others: of each source; starts: first index of each, ascending."""
        self._main, self._others, self._starts = main, others, starts
        self.name = main.name
        self.stops = tuple(dict.fromkeys(stop for template in (main, *others) for stop in template.stops))
        self.check_tools, self.begin, self.follow = main.check_tools, main.begin, main.follow

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return self._each(prompts, lambda template, own: template.prompts(own))

    def examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        return self._each(prompts, lambda template, own: template.examples(own))

    def _each(self, prompts: Sequence[Prompt], convert: Callable[[Template, list[Prompt]], list[T]]) -> list[T]:
        """Convert the prompts of each source by its template; return the results in the order of the prompts."""
        places = np.searchsorted(self._starts, [prompt.index for prompt in prompts], side="right") - 1
        found: dict[int, T] = {}
        for number in np.unique(places).tolist():
            template = self._others[number] if number < len(self._others) else self._main
            mine = np.flatnonzero(places == number).tolist()
            found |= zip(mine, convert(template, [prompts[i] for i in mine]))
        return [found[i] for i in range(len(prompts))]


class TemplateNames(NamedTuple):
    """``data.template``, and the templates of the sources of a mixture, empty for those that have none."""

    main: str = ""
    others: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """Of ``others``, in the recipe."""


def template_names(data: "DataConfig") -> TemplateNames:
    """Return the names of a recipe's templates."""
    others = [(part.template, f"data.mixture.{part.name}.template") for part in data.mixture]
    return TemplateNames(data.template, *zip(*others))


def data_template(
    data: "DataConfig", tokenizer: Tokenizer, tools: Tools = (), starts: Sequence[int] = (0,)
) -> Template:
    """Return the template of a recipe's data. starts: first index of each of its sources. Raises ``TemplateError``."""
    return named_template(template_names(data), tokenizer, tools, starts)


def named_template(
    names: TemplateNames, tokenizer: Tokenizer, tools: Tools = (), starts: Sequence[int] = (0,)
) -> Template:
    """Return the template of these names; arguments and errors as of ``data_template``."""
    keys = dict(zip(reversed(names.others), reversed(names.keys)))  # the first of a name
    made = {name: make_template(name, tokenizer, tools, keys[name]) for name in names.others if name}
    main = make_template(names.main, tokenizer, tools)
    if not made:
        return main
    return SourceTemplates(main, [made.get(name, main) for name in names.others], np.asarray(starts))


def template_files(data: "DataConfig") -> list[bytes]:
    """Return the contents of the files among a recipe's templates."""
    paths = [Path(name) for name in (data.template, *(part.template for part in data.mixture)) if name]
    return [path.read_bytes() for path in paths if path.is_file()]


def _read(name: str, key: str) -> str:
    if name == "chatml":
        return CHATML
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{key} = {name!r} is neither model, chatml nor a readable file: {error}"
        raise TemplateError(message, key=key) from None


def transcript(name: str, tokenizer: str, key: str = "data.template") -> Callable[[Prompt], str]:
    """Return a function that renders a conversation as a document by ``data.template``, before a tokenizer is chosen.

    tokenizer: ``data.tokenizer``; the tokenizer's own template, or one that names its tokens, needs a folder here. The
    begin token is left out, since every document gets it. key: as of ``make_template``. Raises ``TemplateError``.
    """
    known = Tokenizer.load(Path(tokenizer)) if tokenizer and Path(tokenizer).is_dir() else None
    if name == "model" and known is None:
        message = f'{key} = "model" for documents needs data.tokenizer=FOLDER; or name chatml or a file'
        raise TemplateError(message, key="data.tokenizer")
    source = known.chat_template if known and name == "model" else _read(name, key)
    if "_token" in source and known is None:
        message = f"{key} = {name!r} names tokens, which needs data.tokenizer=FOLDER"
        raise TemplateError(message, key="data.tokenizer")
    special = {key: token for key, token in known.special_tokens.items() if key != "bos_token"} if known else {}
    render = _renderer(source, special, name)
    return lambda prompt: render([turn for turns in _split(prompt) for turn in turns], False, prompt.tools)


class PlainTemplate:
    """Join prompt and answer as they stand, and the end token."""

    name = "plain"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stops = tokenizer.stop_ids

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return self.tokenizer.encode_all([_alone(p).text for p in prompts])

    def examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        end = [self.tokenizer.eos_id]
        pieces = [[(_alone(p).text, False), (p.answer or "", True)] for p in prompts]
        return [_example([*rows, (end, True)]) for rows in _encode(pieces, self.tokenizer, special=True)]

    def check_tools(self) -> None:
        message = (
            "tools are listed by a chat template: set data.template=model, if the model's own lists tools, or to a "
            "Jinja file, or describes_tools = False in the environment"
        )
        raise TemplateError(message, key="template.tools")

    def begin(self, messages: Messages, tools: Tools = (), variables: Variables = NONE) -> list[int]:
        """Join the contents; tools and variables need a chat template."""
        _check_variables(variables, self.name, "")
        if tools:
            self.check_tools()
        return self.tokenizer.encode("".join(self.tokenizer.plain(message["content"]) for message in messages))

    def follow(self, new: Messages, tools: Tools = (), *, ended: bool = True, strict: bool = True) -> list[int]:
        return self.tokenizer.encode("".join(self.tokenizer.plain(m["content"]) for m in new), special=False)


class ChatTemplate:
    """Render a conversation by a Jinja template, with the environment of ``transformers``.

    In an example the loss is on every turn of the assistant up to and including its end token. Text that a template
    puts after that token, such as ChatML's line break, is never the policy's choice: it begins the next turn's prompt.
    ``stops``: the token that ends a turn, then the tokenizer's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, name: str, tools: Tools = ()) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.source = source
        self.name = name
        self._render = _renderer(source, tokenizer.special_tokens, name)
        self.stops = tuple(dict.fromkeys([self._turn_end(), *tokenizer.stop_ids]))
        self._known: dict[str, tuple[Tools, str]] = {}
        """The end of an answer -> tools and text of the conversation that was rendered with it last."""
        self._ends = [end for i in self.stops if (end := tokenizer.token(i))]

    def prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the ids of each conversation up to the assistant's next turn."""
        rows = _encode([self._prompt_pieces(_split(p)[0], self._listed(p)) for p in prompts], self.tokenizer)
        return [_ids(row) for row in rows]

    def examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        """Return each conversation with the loss on the assistant's turns, calls of tools included.

        Raises ``TemplateError``, ``DataError``.
        """
        rows = _encode([self._example_pieces([*asked, *answer], p) for p in prompts for asked, answer in [_split(p)]],
                       self.tokenizer)  # fmt: skip
        for prompt, row in zip(prompts, rows):
            self._check_ends(row, prompt)
        return [_example(row) for row in rows]

    def _listed(self, prompt: Prompt) -> Tools:
        """Return the tools that a prompt lists. Raises TemplateError for a template that knows none."""
        tools = prompt.tools or self.tools
        if tools:
            self.check_tools()
        return tools

    def check_tools(self) -> None:
        if "tools" not in self.source:
            message = (
                f"data.template={self.name} lists no tools; name a Jinja file that does, or model if the model's own "
                "does, or set describes_tools = False in the environment"
            )
            raise TemplateError(message, key="template.tools")

    def begin(self, messages: Messages, tools: Tools = (), variables: Variables = NONE) -> list[int]:
        """Render the conversation, with the tools. Raises TemplateError for a template that knows no tools."""
        _check_variables(variables, self.name, self.source)
        if tools:
            self.check_tools()
        said = [{**message, "content": self.tokenizer.plain(message["content"])} for message in messages]
        return _ids(_encode([[(self._render(said, True, tools, variables), False)]], self.tokenizer)[0])

    def follow(self, new: Messages, tools: Tools = (), *, ended: bool = True, strict: bool = True) -> list[int]:
        new = [{**message, "content": self.tokenizer.plain(message["content"])} for message in new]
        tail = self._tail(new, tools, strict)
        end = self._to_end(tail)
        kept = end if ended else end.removesuffix(max(filter(end.endswith, self._ends), key=len))
        return self.tokenizer.encode(tail[len(kept) :], special=False)

    def _tail(self, new: Messages, tools: Tools, strict: bool) -> str:
        """Return the text behind an answer when these messages follow it. Raises TemplateError."""
        alone, text = self._around(new, tools)
        at = text.rfind(_MARK)
        if strict and text[:at] != alone[: alone.rfind(_MARK)]:
            raise TemplateError(
                f"template {self.name} writes what came before anew when a message of {new[0]['role']} follows, its "
                "thoughts for instance: the policy would read something else than it wrote; answer with another role, "
                "or take another template",
                key="template.prefix",
            )
        return text[at + len(_MARK) :]

    def _around(self, new: Messages, tools: Tools) -> tuple[str, str]:
        """Render a question with a marked answer, without and with the messages behind it.

        What a template puts there depends on the neighbours only. Some refuse an answer of a tool without a call.
        """
        asked: list[Mapping[str, Any]] = [{"role": "user", "content": "?"}]
        turn = {"role": "assistant", "content": f"<think>\n?\n</think>\n\n{_MARK}"}
        try:
            return self._alone([*asked, turn], tools), self._render([*asked, turn, *new], True, tools)
        except TemplateError:
            if new[0]["role"] != "tool":
                raise
        call = {"id": CALL_ID, "type": "function", "function": {"name": _MARK, "arguments": {_MARK: _MARK}}}
        asked.append({"role": "assistant", "content": "", "tool_calls": [call]})
        answers = [{**message, "tool_call_id": call["id"]} for message in new]
        return self._alone(asked, tools), self._render([*asked, *answers], True, tools)

    def _alone(self, messages: Messages, tools: Tools) -> str:
        """Render one of the two conversations of ``_around`` without what follows; again only for other tools."""
        answer = messages[-1]["content"]
        if answer not in self._known or self._known[answer][0] != tools:
            self._known[answer] = tools, self._render(messages, False, tools)
        return self._known[answer][1]

    def _prompt_pieces(self, messages: Messages, tools: Tools) -> list[Piece]:
        """Pieces of a prompt, each as the policy read or generated it, so that its ids are those of training.

        A template that rewrites earlier turns is harmless here: nothing of them is trained.
        """
        chain = [*self._chain(messages, tools), self._render(messages, True, tools)]
        stable = all(longer.startswith(shorter) for shorter, longer in pairwise(chain))
        return _cut(chain) if stable else [(chain[-1], False)]

    def _example_pieces(self, messages: Messages, prompt: Prompt) -> list[Piece]:
        """Pieces of an example, each turn as it was when the policy generated it."""
        tools = self._listed(prompt)
        for message in (message for message in messages if message["role"] == "assistant"):
            text = message["content"] + json.dumps(message.get("tool_calls", ""), ensure_ascii=False)
            ends = [end for end in self._ends if end in text]
            if ends:
                raise RecordError.at(f"an answer has the end token {ends[0]} in its text", prompt.name, key="answer")
        chain = self._chain(messages, tools)
        broken = [i for i, (shorter, longer) in enumerate(pairwise(chain)) if not longer.startswith(shorter)]
        if not broken:
            return _cut(chain)
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        between = [messages[i + 1 : j] for i, j in pairwise(places)]
        if any(i % 2 == 0 for i in broken) or any(not new or new[0]["role"] != "tool" for new in between):
            raise self._unstable(prompt, broken[0], *chain[broken[0] : broken[0] + 2])
        return self._appended(chain, between, tools)

    def _appended(self, chain: Sequence[str], between: Sequence[Messages], tools: Tools) -> list[Piece]:
        """Pieces of a conversation as an episode appends them, for a template that rewrites turns once a tool answers.

        Qwen3's, for instance, writes an empty thought into the newest turn alone. between: what tools answer to each
        turn but the last. Raises ``TemplateError``.
        """
        tails = [self._tail(new, tools, strict=True) for new in between]
        heard = [chain[0], *(tail.removeprefix(self._to_end(tail)) for tail in tails)]
        turns = [after[len(before) :] for before, after in zip(chain[::2], chain[1::2])]
        return [piece for asked, turn in zip(heard, turns) for piece in ((asked, False), (turn, True))]

    def _check_calls(self, message: Mapping[str, Any], text: str) -> None:
        """Raise TemplateError for a template that leaves out the calls of a turn."""
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise TemplateError(
                    f"template {self.name} leaves out the call of {call['function']['name']} in tool_calls; write the "
                    "call into content, or take chatml, model or a Jinja file that renders tool_calls",
                    key="template.tool_calls",
                )

    def _chain(self, messages: Messages, tools: Tools) -> list[str]:
        """Texts of the conversation before each of the assistant's turns and after it, to its end token."""
        chain = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:i], True, tools)
                after = self._render(messages[: i + 1], False, tools)
                whole = after.startswith(before)
                self._check_calls(message, after[len(before) :] if whole else after)
                chain += [before, before + self._to_end(after[len(before) :]) if whole else after]
        return chain

    def _to_end(self, text: str) -> str:
        """Beginning of a text up to and including its first end token."""
        ends = [(at, -len(end)) for end in self._ends if (at := text.find(end)) >= 0]
        if not ends:
            message = f"template {self.name} ends a turn by {text[-20:]!r}, without any of {self._ends}"
            raise TemplateError(message, key="template.end")
        at, length = min(ends)
        return text[: at - length]

    def _turn_end(self) -> int:
        """Special token that follows an assistant's text, found by rendering one.

        Of several without anything between them, the one that ends a text of the tokenizer, if there is one.
        """
        answer = "tilth"
        text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}], False)
        if answer not in text:
            message = f"template {self.name} leaves out what the assistant says: {text[:60]!r}"
            raise TemplateError(message, key="template.answer")
        tail = text[text.rfind(answer) + len(answer) :]
        special = self.tokenizer.special()
        start = min((at for token in special if (at := tail.find(token)) >= 0), default=-1)
        if start < 0:
            hint = f"; one trained by data.tokenizer = 'bpe:SIZE' has {TURN_END}" if TURN_END in tail else ""
            raise TemplateError(
                f"template {self.name} ends a turn by {tail[:20]!r}, in which the tokenizer has no special token{hint}",
                key="template.special",
            )
        ends = [special[token] for token in _leading(tail[start:], sorted(special, key=len, reverse=True))]
        return next((i for i in ends if i in self.tokenizer.stop_ids), ends[0])

    def _check_ends(self, row: "Row", prompt: Prompt) -> None:
        for ids, learned in row:
            if learned and ids[-1] not in self.stops:
                raise TemplateError(
                    f"template {self.name}: {prompt.name} has a turn that ends by token {ids[-1]}, "
                    f"not by one that ends a completion {self.stops}",
                    key=record_key(prompt.name, "end"),
                )

    def _unstable(self, prompt: Prompt, number: int, shorter: str, longer: str) -> TemplateError:
        turn = f"{'after' if number % 2 else 'before'} turn {number // 2 + 1}"
        at = next((i for i, (a, b) in enumerate(zip(shorter, longer)) if a != b), min(len(shorter), len(longer)))
        return TemplateError(
            f"template {self.name} is not prefix-stable: {turn} of the assistant, {prompt.name} "
            f"has {shorter[at : at + 24]!r} at character {at}, but {longer[at : at + 24]!r} in the longer "
            f"conversation; make an example of each turn, or take another template",
            key=record_key(prompt.name, "prefix"),
        )


def _check_variables(variables: Variables, name: str, source: str) -> None:
    """Raise TemplateError for a variable that a template does not read, or that is not a caller's."""
    for key in variables:
        if key in _GIVEN or key.endswith("_token") or not re.search(rf"\b{re.escape(key)}\b", source):
            message = f"template {name} has no variable {key[:80]!r} that a caller may set; leave it out"
            raise TemplateError(message, key=f"template.variables.{key}")


def _alone(prompt: Prompt) -> Prompt:
    """Return the prompt if it is one text; joined turns of a conversation would be a text that nobody wrote."""
    roles = [message["role"] for message in prompt.messages]
    tools = bool(prompt.tools) or any(message.get("tool_calls") for message in prompt.messages)
    what = "with tools" if tools else f"of the roles {', '.join(roles)}"
    if tools or roles not in ([], ["user"], ["user", "assistant"]):
        raise RecordError.at(
            f"a conversation {what} needs a template; set data.template=chatml, or model for the tokenizer's own",
            prompt.name,
            key="template",
        )
    return prompt


Row = list[tuple[list[int], bool]]
"""Ids of each piece of a conversation, and True if the policy generates them."""


def _ids(row: Row) -> list[int]:
    return [i for ids, _ in row for i in ids]


def _split(prompt: Prompt) -> tuple[Messages, Messages]:
    """Split a conversation into the part before its answer, and the answer (none, or one message)."""
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1:]
    return messages, [] if prompt.answer is None else [{"role": "assistant", "content": prompt.answer}]


def _leading(text: str, tokens: Sequence[str]) -> Iterator[str]:
    """Yield the tokens that a text begins with, one after another; tokens: the longest first."""
    while token := next((t for t in tokens if text.startswith(t)), ""):
        yield token
        text = text[len(token) :]


def _cut(chain: Sequence[str]) -> list[Piece]:
    """Text that each element of a chain adds to the one before, by turns the template's and the policy's."""
    return [(longer[len(shorter) :], bool(i % 2)) for i, (shorter, longer) in enumerate(pairwise(["", *chain]))]


def _encode(rows: Sequence[Sequence[Piece]], tokenizer: Tokenizer, special: bool = False) -> list[Row]:
    """Encode the pieces of each row, so that a prefix of the pieces has a prefix of the row's ids.

    The policy continues the ids of a prompt, so these must not change: where a tokenizer merges across the border,
    the next piece is tokenised alone.
    """
    wholes = iter(tokenizer.encode_all([text for row in rows for text in accumulate(t for t, _ in row)], special))
    return [_continue(row, wholes, tokenizer) for row in rows]


def _continue(row: Sequence[Piece], wholes: Iterator[list[int]], tokenizer: Tokenizer) -> Row:
    before: list[int] = []
    found: Row = []
    for text, learned in row:
        whole = next(wholes)
        continues = not found or (whole[: len(before)] == before and len(whole) > len(before))
        ids = whole[len(before) :] if continues else tokenizer.encode(text, special=False)
        before = before + ids
        found.append((ids, learned))
    return found


def _example(row: Row) -> Example:
    mask = [np.full(len(ids), learned, np.uint8) for ids, learned in row]
    return Example(np.array([i for ids, _ in row for i in ids], np.int64), np.concatenate(mask))


def _renderer(source: str, special: Mapping[str, str], name: str) -> Callable[..., str]:
    """Compile a template as transformers does, but with limits, to (messages, add generation prompt, tools) -> text."""
    from jinja2 import TemplateError as JinjaError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from tilth.data.rendering import LimitedEnvironment, OverrunError

    try:
        environment = LimitedEnvironment(_compile_jinja_template("").environment)  # compiling computes constants
        compiled = environment.compiled(source)
    except JinjaError as error:
        raise TemplateError(f"template {name} is not Jinja: {error}", key="template.syntax") from None

    def render(messages: Messages, generate: bool, tools: Tools = (), variables: Variables = NONE) -> str:
        known: dict[str, Any] = {
            **variables,
            "tools": list(tools) or None,
            "documents": None,
            "strftime_now": TODAY.strftime,
            **special,
        }
        environment.begin()
        try:
            return str(compiled.render(messages=[dict(m) for m in messages], add_generation_prompt=generate, **known))
        except OverrunError as error:
            raise TemplateError(f"template {name} is not rendered: {error}", key="template.limits") from None
        except (JinjaError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            roles = ", ".join(m["role"] for m in messages) or "none"
            message = f"template {name} cannot render a conversation of roles {roles}: {error}"
            raise TemplateError(message, key="template.render") from None

    return render
