"""``tilth chat``: a conversation with a model that streams its answers; lines come from a terminal or a pipe."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import typer

from tilth.cli.main import ChatCommand
from tilth.core.errors import DataError
from tilth.core.trajectory import Trajectory
from tilth.data.columns import Prompt
from tilth.data.template import Template, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.process.handlers import handling
from tilth.runs.models import LoadedModel, load_model, make_engine, wants_tokenizer
from tilth.serve.choices import StreamedText
from tilth.ui.format import plain

HELP = """/reset   begin anew
/quit    end, as Ctrl-D does
/help    this
Ctrl-C ends the current answer only. Anything else goes to the model."""


def talk(options: ChatCommand) -> None:
    """Answer line by line. Answers go to standard output, everything else to standard error."""
    loaded = load_model(options.model)
    chat = Chat(loaded, options)
    _print(chat.greeting(options.model))
    for line in _lines():
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            chat.conversation.reset()
            _print("the conversation begins anew")
        elif line.startswith("/"):
            _print(HELP if line == "/help" else f"there is no command {line}\n{HELP}")
        elif line:
            try:
                chat.turn(line)
            except DataError as error:  # such as a character without a token
                _print(f"error: {error}")


def _lines() -> Iterator[str]:
    """Yield lines that are typed or come through a pipe, stripped."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in iter(sys.stdin.readline, ""))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and keys to edit with
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            _print("")
            return
        except KeyboardInterrupt:
            _print("\nCtrl-D or /quit ends")


def _print(text: str) -> None:
    typer.echo(text, err=True)


class Conversation:
    """The token ids so far. They never change: nothing is tokenised twice."""

    def __init__(self, template: Template, tokenizer: Tokenizer, system: str = "") -> None:
        self.template, self.tokenizer = template, tokenizer
        self._first = [{"role": "system", "content": system}] if system else []
        self.reset()

    @property
    def plain(self) -> bool:
        """True without a chat template: turns are concatenated."""
        return self.template.name == "plain"

    def reset(self) -> None:
        self.ids: list[int] = []

    def ask(self, text: str) -> list[int]:
        """Return the ids to continue if the user says this next; ``keep`` stores the turn."""
        if self.ids:
            ended = self.ids[-1] in self.template.stops
            return [*self.ids, *self.template.follow([_user(text)], ended=ended, strict=False)]
        if self.plain:
            return self.tokenizer.encode(text)
        return self.template.prompts([Prompt(0, text, messages=(*self._first, _user(text)))])[0]

    def keep(self, answer: Trajectory) -> None:
        """Store a turn. Without a template its end token is dropped, which would separate the turns."""
        ids = answer.tokens.tolist()
        if self.plain and ids[-1] in self.template.stops and answer.mask[-1]:
            ids.pop()
        self.ids = ids


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Chat:
    """A model, an engine of one row, and the conversation."""

    def __init__(self, loaded: LoadedModel, options: ChatCommand) -> None:
        self.options, self.config = options, loaded.config
        self.tokenizer = wants_tokenizer(loaded)
        default = loaded.template if loaded.run is not None else "model" if self.tokenizer.chat_template else ""
        name = default if options.template is None else options.template
        template = make_template(name, self.tokenizer, key="--template")
        self.conversation = Conversation(template, self.tokenizer, options.system)
        if options.system and self.conversation.plain:
            raise DataError(
                f"--system: {options.model} has no chat template to put a system text into; name one: --template",
                key="--system",
            )
        self.params = SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p,
            stop=loaded.stop, stop_tokens=template.stops,
        )  # fmt: skip
        self.engine = make_engine(loaded, EngineOptions(seed=options.seed, max_rows=1))
        self.turns = 0

    def greeting(self, name: str) -> str:
        """Return a line on the model and its template."""
        turns = "turns are put together as they stand" if self.conversation.plain else "turns by its chat template"
        return f"{name}: context of {self.config.max_positions:,} tokens, {turns}; /help says more"

    def turn(self, text: str) -> None:
        """Answer and store the turn. DataError, and nothing is stored: the text cannot be tokenised."""
        prompt = self.conversation.ask(text)
        room = self.config.max_positions - len(prompt)
        if room < 1:
            context = f"more than the context of {self.config.max_positions:,} has room for"
            _print(f"this makes {len(prompt):,} tokens, {context}; /reset begins anew, or write less")
            return
        most = min(self.options.max_tokens, room)
        answer = self._answer(prompt, most)
        self.conversation.keep(answer)
        if answer.finish == "length":
            full = f"the context of {self.config.max_positions:,} tokens is full; /reset begins anew"
            _print(f"({full if most == room else f'cut after {most:,} tokens, see --max-tokens'})")

    def _answer(self, prompt: list[int], most: int) -> Trajectory:
        request = Request(self.turns, prompt, replace(self.params, max_tokens=most))
        self.turns += 1
        text = StreamedText(self.tokenizer, self.params.stop_tokens, self.params.stop)
        answer = listen(self.engine, request, lambda tokens: write(text.send(text.hear(tokens))))
        write(text.send(answer.text) + "\n")
        return answer


def write(text: str) -> None:
    """Write a part of an answer, which must not control the terminal."""
    sys.stdout.write(plain(text))
    sys.stdout.flush()


def listen(engine: GenerationEngine, request: Request, hear: Callable[[np.ndarray], None]) -> Trajectory:
    """Generate one answer; call ``hear`` with new tokens. Ctrl-C ends it at its next token and keeps the tokens so far,
    and never interrupts a step."""
    rounds, interrupted = EngineRounds(engine), threading.Event()
    rounds.submit([request])
    with handling({signal.SIGINT: lambda number, frame: interrupted.set()}):
        while True:
            for finished in rounds.advance(aborted=[request.id] if interrupted.is_set() else []).finished:
                return finished
            for newest in rounds.progress().values():
                hear(newest.tokens)
