"""Process of a source loader: reads samples by index and tokenises them. Imports no torch.

A source is opened when its first sample is due: a process that serves hundreds begins at once.

Messages are pickled; both ends are this program, and only they have the pipes.
"""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from tilth.config.imports import uncollected
from tilth.core.errors import TilthError
from tilth.data.computed import Source
from tilth.data.examples import Kind, LoadedSample, tokenised
from tilth.data.records import Joined, PromptSet
from tilth.data.template import Template, TemplateNames, Tools, named_template
from tilth.data.tokenizer import Tokenizer
from tilth.process.frames import frame, read_frame

SIGN = 0.1
"""Seconds between two signs of life at least: more would wake the process of the role for nothing."""


@dataclass(frozen=True)
class LoaderSettings:
    """Settings by which samples become tokens: templates, tokenizer, context, and the tools of prompts.

    plugins: imported before a source is opened.
    """

    templates: TemplateNames
    tokenizer: Tokenizer
    context: int
    tools: Tools = ()
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Places:
    """Indices of several sources. starts: int64 [sources + 1], first index of each; media: True if one has some."""

    starts: np.ndarray
    media: bool


class OpenSources(Joined):
    """Sources that this process serves, at the indices that they have among all sources."""

    def __init__(self, places: Places, tell: Callable[[str], None]) -> None:
        """tell: sends "alive" before a sample is read, "opening" and "opened" before and after a source is opened."""
        self.starts, self.held = places.starts, False
        self._closed, self._opened = dict[int, bytes](), dict[int, Source | TilthError]()
        self._media, self._tell, self._signed = places.media, tell, time.monotonic()
        self.seconds = 0.0
        """Processor seconds of opening sources."""

    @property
    def media(self) -> bool:
        return self._media

    def keep(self, wanted: Mapping[int, bytes]) -> None:
        """Serve the sources of these numbers, pickled, empty where one is served already, and close all others."""
        self._opened = {number: one for number, one in self._opened.items() if number in wanted}
        self._closed = {n: sent or self._closed[n] for n, sent in wanted.items() if n not in self._opened}

    def part(self, number: int) -> Source:
        """Return the source of this number. Raises the error of one that cannot be opened."""
        if time.monotonic() > self._signed + SIGN:
            self._tell("alive")
            self._signed = time.monotonic()
        if number not in self._opened:
            self._opened[number] = self._open(number)
        found = self._opened[number]
        if isinstance(found, TilthError):
            raise found
        return found

    def _open(self, number: int) -> "Source | TilthError":
        """Return a source, or the error of opening it, which each of its samples has."""
        began = time.process_time()
        self._tell("opening")
        try:
            found: Source | TilthError = pickle.loads(self._closed.pop(number))
        except TilthError as error:
            found = error
        self._tell("opened")
        self.seconds += time.process_time() - began
        return found


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Serve until the pipe from the parent is closed."""

    def reply(*message: Any) -> None:
        replies.write(frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        replies.flush()

    try:
        with uncollected():
            settings, places = greeted(requests)
            opened = OpenSources(places, reply)
            template = named_template(settings.templates, settings.tokenizer, settings.tools, places.starts.tolist())
        while (body := read_frame(requests)) is not None:
            what, *given = pickle.loads(body)
            if what == "serve":
                opened.keep(given[0])
                reply("serving")
            else:
                made = [timed(kind, own, opened, template, settings.context) for kind, own in given[0]]
                reply("loaded", made)
    except TilthError as error:
        reply("failed", error)


def greeted(requests: BinaryIO) -> tuple[LoaderSettings, Places]:
    """Return what the parent sends first; the plugins are imported before what may need them."""
    plugins, body = pickle.loads(read_frame(requests) or b"")
    if plugins:
        from tilth.config.plugins import load_plugins  # else a tenth of the start

        load_plugins(plugins)
    found: tuple[LoaderSettings, Places] = pickle.loads(body)
    return found


def timed(
    kind: Kind, indices: Sequence[int], opened: OpenSources, template: Template, context: int
) -> tuple[list[LoadedSample | TilthError], float]:
    """Return what ``loaded`` does, and its processor seconds without those of opening a source."""
    began = time.process_time() - opened.seconds
    found = loaded(kind, indices, opened, template, context)
    return found, time.process_time() - opened.seconds - began


def loaded(
    kind: Kind, indices: Sequence[int], opened: OpenSources, template: Template, context: int
) -> list[LoadedSample | TilthError]:
    """Return the sample at each index, or its error."""
    prompts = PromptSet(opened, np.zeros(0, np.int64))
    try:
        return list(tokenised(kind, prompts, indices, template, context))
    except TilthError as error:
        if len(indices) == 1:
            return [error]
        return [found for i in indices for found in loaded(kind, [i], opened, template, context)]
