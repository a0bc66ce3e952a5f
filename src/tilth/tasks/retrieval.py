"""Task retrieval: answer questions about invented people by searching a local index of sentences."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache

from tilth.config.tasks import Task
from tilth.data.columns import Prompt
from tilth.data.computed import Computed
from tilth.envs.environment import Answering, tool
from tilth.rewards.verifiers import Exact, answer_of

COLORS = ("red", "blue", "green", "white", "black", "gray")
PEOPLE, CITIES = 2000, 200
UNKNOWN = "unknown"
"""What a conversation says that gives up."""
_STARTS, _ENDS = (
    ("ka", "lo", "mi", "su", "te", "vo", "za", "ri", "ne", "du"),
    ("nar", "vel", "tok", "sim", "bur", "dax"),
)


class TextIndex:
    """Sentences by their words: those that share the rarest words with a query come first."""

    def __init__(self, sentences: tuple[str, ...]) -> None:
        self.sentences = sentences
        self._having: dict[str, list[int]] = {}
        for place, sentence in enumerate(sentences):
            for word in set(_words(sentence)):
                self._having.setdefault(word, []).append(place)

    def search(self, query: str, count: int = 1) -> list[str]:
        """Return the best sentences; none that shares no word."""
        scores: dict[int, float] = {}
        for word in set(_words(query)):
            having = self._having.get(word, [])
            for place in having:
                scores[place] = scores.get(place, 0.0) + 1.0 / len(having)
        best = sorted(scores, key=lambda place: (-scores[place], place))
        return [self.sentences[place] for place in best[:count]]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


@cache
def world() -> tuple[tuple[tuple[str, str], ...], dict[str, str], TextIndex]:
    """Return people with their cities, cities with their colours, and the index of all sentences; always the same."""
    drawn = random.Random("retrieval")
    names = [a + b + c for a in _STARTS for b in _STARTS for c in _ENDS]
    cities = [f"{name}ia" for name in drawn.sample(names, CITIES)]
    people = [f"{a}{b}" for a in drawn.sample(names, 500) for b in ("", "an", "el", "os")][:PEOPLE]
    homes = tuple((person, drawn.choice(cities)) for person in people)
    colors = {city: drawn.choice(COLORS) for city in cities}
    about_cities = (f"{city} is {color}" for city, color in colors.items())  # first: they come first for a city's name
    sentences = [*about_cities, *(f"{a} lives in {b}" for a, b in homes)]
    return homes, colors, TextIndex(tuple(sentences))


class RetrievalPrompts(Computed):
    """``where lives NAME?`` (one search) and ``color of NAME?``, of the city (two), each with a worked conversation.

    A share ``flawed`` of these gives up before the last search.
    """

    def __init__(self, flawed: float) -> None:
        self.flawed = flawed

    def __len__(self) -> int:
        return 2 * PEOPLE

    def prompt(self, index: int) -> Prompt:
        """Return the question of an index."""
        homes, colors, sentences = world()
        person, city = homes[index // 2]
        searches = [person] if index % 2 == 0 else [person, city]
        answer = said = city if index % 2 == 0 else colors[city]
        if random.Random(f"retrieval {index}").random() < self.flawed:
            searches.pop()
            said = UNKNOWN
        turns = [{"role": "user", "content": self._question(index)}]
        for query in searches:
            call = json.dumps({"name": "search", "arguments": {"query": query}})
            turns.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
            turns.append({"role": "tool", "content": sentences.search(query)[0]})
        turns.append({"role": "assistant", "content": said})
        return Prompt(index, turns[0]["content"], answer, {"answer": answer}, tuple(turns))

    @staticmethod
    def _question(index: int) -> str:
        person = world()[0][index // 2][0]
        return f"where lives {person}?" if index % 2 == 0 else f"color of {person}?"

    def texts(self) -> Iterator[str]:
        """Yield the text of each question."""
        return map(self._question, range(len(self)))

    def alphabet(self) -> str:
        """Return letters and the signs of a call."""
        return "".join(sorted(set("abcdefghijklmnopqrstuvwxyz ?" + json.dumps({"a": {"b": "_"}}) + "</>_")))

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"retrieval of {PEOPLE} people in {CITIES} cities, {self.flawed} flawed"


class Retrieval(Answering):
    """Searches an index of sentences; the turn without a call is the answer."""

    @tool
    def search(self, query: str) -> str:
        """Return the sentence that fits a query best."""
        return next(iter(world()[2].search(query)), "nothing found")

    def reward(self) -> dict[str, float]:
        """Return 1 for the right answer."""
        return {"reward": float(self.said.strip() == answer_of(self.info))}


TASK = Task(RetrievalPrompts, Exact(), environment=Retrieval)
