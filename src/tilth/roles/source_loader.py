"""Process of a source loader: opens sources, reads samples by index and tokenises them. Imports no torch.

Messages are pickled; both ends are this program, and only they have the pipes.
"""

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from tilth.config.imports import uncollected
from tilth.config.plugins import load_plugins
from tilth.config.schema import DataConfig
from tilth.core.errors import TilthError
from tilth.data.computed import Source
from tilth.data.prompts import PromptSet
from tilth.data.samples import Kind, LoadedSample, tokenised
from tilth.data.sources import Joined
from tilth.data.template import Template, Tools, data_template
from tilth.data.tokenizer import Tokenizer
from tilth.process.frames import frame, read_frame

SIGN = 0.1
"""Seconds between two signs of life at least: more would wake the process of the role for nothing."""


@dataclass(frozen=True)
class LoaderSettings:
    """Settings by which samples become tokens: keys of ``[data]``, tokenizer, context, and the tools of prompts.

    plugins: imported before a source is opened.
    """

    data: DataConfig
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
    """Sources that this process has opened, at the indices that they have among all sources."""

    def __init__(self, places: Places, alive: Callable[[], None]) -> None:
        """alive: sends a sign of life, before a sample is read."""
        self.starts, self.held, self.opened = places.starts, False, dict[int, Source]()
        self._media, self._alive, self._signed = places.media, alive, time.monotonic()

    @property
    def media(self) -> bool:
        return self._media

    def keep(self, wanted: Mapping[int, bytes]) -> None:
        """Open the sources of these numbers, pickled, that are not open yet, and close all others. Raises their
        errors."""
        for number in self.opened.keys() - wanted.keys():
            del self.opened[number]
        for number in wanted.keys() - self.opened.keys():
            self.opened[number] = pickle.loads(wanted[number])

    def part(self, number: int) -> Source:
        if time.monotonic() > self._signed + SIGN:
            self._alive()
            self._signed = time.monotonic()
        return self.opened[number]


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Serve until the pipe from the parent is closed."""

    def reply(*message: Any) -> None:
        replies.write(frame(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        replies.flush()

    try:
        with uncollected():
            settings, places = greeted(requests)
            opened = OpenSources(places, lambda: reply("alive"))
            template = data_template(settings.data, settings.tokenizer, settings.tools, places.starts.tolist())
        while (body := read_frame(requests)) is not None:
            what, *given = pickle.loads(body)
            if what == "open":
                opened.keep(given[0])
                reply("opened")
            else:
                (kind, indices), began = given, time.process_time()
                found = loaded(kind, indices, opened, template, settings.context)
                reply("loaded", found, time.process_time() - began)
    except TilthError as error:
        reply("failed", error)


def greeted(requests: BinaryIO) -> tuple[LoaderSettings, Places]:
    """Return what the parent sends first; the plugins are imported before what may need them."""
    plugins, body = pickle.loads(read_frame(requests) or b"")
    load_plugins(plugins)
    found: tuple[LoaderSettings, Places] = pickle.loads(body)
    return found


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
