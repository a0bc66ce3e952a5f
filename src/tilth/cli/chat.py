"""A conversation with a model in the terminal, word by word as it comes; lines may come from a pipe too."""

import contextlib
import signal
import string
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import typer

from tilth.core.errors import DataError
from tilth.core.trajectory import Trajectory
from tilth.data.sources import Prompt
from tilth.data.template import Template, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.flows.model import LoadedModel, load_model, make_engine, wants_tokenizer
from tilth.rollout.protocol import GenerationEngine
from tilth.rollout.request import Request, SamplingParams

HELP = """/reset   begin anew
/quit    end, as Ctrl-D does
/help    this
Ctrl-C ends the current answer only. Anything else is said to the model."""
_OPEN = "\N{REPLACEMENT CHARACTER}"
"""How a character looks whose last bytes are still to come."""


@dataclass(frozen=True)
class ChatOptions:
    """What is asked for, as on the command line."""

    model: str
    system: str = ""
    temperature: float = 0.7
    top_p: float = 1.0
    max_tokens: int = 512
    template: str | None = None
    """None: as the run did, or the chat template that came with the model."""
    seed: int = 0


def talk(wish: ChatOptions) -> None:
    """Answer line by line until there are no more. Answers go to standard output, all else to standard error."""
    loaded = load_model(wish.model)
    chat = Chat(loaded, wish)
    _tell(chat.greeting(wish.model))
    for line in _lines():
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            chat.conversation.reset()
            _tell("the conversation begins anew")
        elif line.startswith("/"):
            _tell(HELP if line == "/help" else f"there is no command {line}\n{HELP}")
        elif line:
            try:
                chat.turn(line)
            except DataError as error:  # such as a character without a token: the next line may be a better one
                _tell(f"error: {error}")


def _lines() -> Iterator[str]:
    """What is typed, or what comes through a pipe, without spaces around it."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in iter(sys.stdin.readline, ""))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and keys to edit with
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            _tell("")
            return
        except KeyboardInterrupt:
            _tell("\nCtrl-D or /quit ends")


def _tell(text: str) -> None:
    typer.echo(text, err=True)


class Conversation:
    """The token ids so far. What the model was given and has said stays as it is: nothing is tokenised twice."""

    def __init__(self, template: Template, tokenizer: Tokenizer, system: str = "") -> None:
        self.template, self.tokenizer = template, tokenizer
        self._first = [{"role": "system", "content": system}] if system else []
        self.reset()

    @property
    def plain(self) -> bool:
        """Whether turns are put together as they stand."""
        return self.template.name == "plain"

    def reset(self) -> None:
        """Forget all turns."""
        self.ids: list[int] = []
        self._messages: list[Mapping[str, str]] = list(self._first)

    def ask(self, text: str) -> list[int]:
        """The ids that the model continues if this is said next; nothing is kept before ``keep``."""
        if self.plain:
            return [*self.ids, *self.tokenizer.encode(text, special=not self.ids)]
        messages = [*self._messages, {"role": "user", "content": text}]
        if not self.ids:
            return self.template.prompts([Prompt(0, text, messages=tuple(messages))])[0]
        return [*self.ids, *self._between(messages, text)]

    def _between(self, messages: list[Mapping[str, str]], text: str) -> list[int]:
        """What the template puts between the end of the last answer and the next one.

        It is what the ids of the conversation end with whatever the last answer was; so nothing depends on how that
        answer would be tokenised, nor on templates that write earlier answers in another way.
        """
        variants = []
        for answer in self._unlike(text):
            variant = [*messages[:-2], {"role": "assistant", "content": answer}, messages[-1]]
            variants.append(Prompt(0, text, messages=tuple(variant)))
        one, other = self.template.prompts(variants)
        same = next(
            (i for i, (a, b) in enumerate(zip(reversed(one), reversed(other))) if a != b), min(len(one), len(other))
        )
        tail = one[len(one) - same :]
        said_end = self.ids[-1] in self.template.stops and tail[0] in self.template.stops
        return tail[1:] if said_end else tail  # an answer that was cut gets its end here

    def _unlike(self, text: str) -> list[str]:
        """Two characters that the tokenizer knows."""
        found: dict[int, str] = {}
        for letter in dict.fromkeys(string.digits + string.ascii_letters + text):
            with contextlib.suppress(DataError):
                found.setdefault(self.tokenizer.encode(letter, special=False)[-1], letter)
            if len(found) == 2:
                return list(found.values())
        raise DataError(
            "the tokenizer has too few characters to find where an answer ends; use --template ''", key="--template"
        )

    def keep(self, text: str, said: Trajectory) -> None:
        """The user said this and the model that. Without a template an end token would part what is put together."""
        ids = said.tokens.tolist()
        if self.plain and ids[-1] in self.template.stops and said.mask[-1]:
            ids.pop()
        self.ids = ids
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": said.text}]


class Chat:
    """A model, an engine of one row, and the conversation."""

    def __init__(self, loaded: LoadedModel, wish: ChatOptions) -> None:
        self.wish, self.config = wish, loaded.config
        self.tokenizer = wants_tokenizer(loaded)
        template = make_template(_template(loaded, self.tokenizer, wish), self.tokenizer)
        self.conversation = Conversation(template, self.tokenizer, wish.system)
        if wish.system and self.conversation.plain:
            raise DataError(
                f"--system: {wish.model} has no chat template that a system text could go into; name one: --template",
                key="--system",
            )
        self.params = SamplingParams(
            max_tokens=wish.max_tokens,
            temperature=wish.temperature,
            top_p=wish.top_p,
            stop=loaded.stop,
            stop_tokens=template.stops,
        )
        self.engine = make_engine(loaded, seed=wish.seed, max_rows=1, max_length=self.config.max_positions)
        self.turns = 0

    def greeting(self, name: str) -> str:
        """What speaks here, and how."""
        turns = "turns are put together as they stand" if self.conversation.plain else "turns by its chat template"
        return f"{name}: context of {self.config.max_positions:,} tokens, {turns}; /help says more"

    def turn(self, text: str) -> None:
        """Answer, and keep both; DataError, and nothing is kept, for a text that cannot be read."""
        prompt = self.conversation.ask(text)
        room = self.config.max_positions - len(prompt)
        if room < 1:
            _tell(f"this makes {len(prompt):,} tokens, more than the context of {self.config.max_positions:,} has room "
                  "for; /reset begins anew, or say less")  # fmt: skip
            return
        most = min(self.wish.max_tokens, room)
        said = self._speak(prompt, most)
        self.conversation.keep(text, said)
        if said.finish == "length":
            full = f"the context of {self.config.max_positions:,} tokens is full; /reset begins anew"
            _tell(f"({full if most == room else f'cut after {most:,} tokens, see --max-tokens'})")

    def _speak(self, prompt: list[int], most: int) -> Trajectory:
        request = Request(self.turns, prompt, replace(self.params, max_tokens=most))
        self.turns += 1
        held = max((len(s) - 1 for s in self.params.stop), default=0)
        voice = Voice(self.tokenizer, self.params.stop_tokens, held)
        said = listen(self.engine, request, voice)
        voice.close(said.text)
        return said


def _template(loaded: LoadedModel, tokenizer: Tokenizer, wish: ChatOptions) -> str:
    if wish.template is not None:
        return wish.template
    if loaded.run is not None:
        return loaded.template
    return "model" if tokenizer.chat_template else ""


class Voice:
    """Writes a text that grows. held: characters at its end that a stop string may still take back."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[int, ...], held: int) -> None:
        self._tokenizer, self._stops, self._held = tokenizer, stops, held
        self._said = ""

    def hear(self, tokens: np.ndarray) -> None:
        """Write what is new and certain of these tokens, all that there are so far."""
        text = self._tokenizer.decode(t for t in tokens.tolist() if t not in self._stops).rstrip(_OPEN)
        self._write(text[: len(text) - self._held])

    def _write(self, text: str) -> None:
        if len(text) > len(self._said) and text.startswith(self._said):
            new, self._said = text[len(self._said) :], text
            # What a model says must not steer the terminal.
            sys.stdout.write("".join(c if c.isprintable() or c in "\n\t" else _OPEN for c in new))
            sys.stdout.flush()

    def close(self, text: str) -> None:
        """Write the rest, and end the line."""
        self._write(text)
        sys.stdout.write("\n")
        sys.stdout.flush()


def listen(engine: GenerationEngine, request: Request, voice: Voice) -> Trajectory:
    """One answer, heard as it comes. Ctrl-C ends it at its next token, and what there is of it is the answer."""
    engine.submit([request])
    with _interruptible() as interrupted:
        while True:
            done = engine.poll()
            if done:
                return done[0]
            if interrupted.is_set():
                return engine.abort(request.id)
            voice.hear(engine.peek(request.id))


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets a flag, so that it never comes in the middle of a step. Other threads get no signals."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
