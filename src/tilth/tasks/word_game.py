"""Task word_game: find a word of three letters by guesses, each answered by where it stands in the alphabet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import log
from typing import Any

from tilth.config.tasks import Task
from tilth.data.columns import Prompt
from tilth.data.computed import Computed
from tilth.envs.environment import Environment, Message
from tilth.rewards.verifiers import Exact

WORDS = tuple("".join(letters) for letters in product("bdg", "aeio", "knt"))
"""36 words, of which any may be the secret."""
GUESSES = 6
FEW = 4
"""Words that are left when a flawed game forgets how to go on."""
FIRST = "?"


def place(guess: str, secret: str) -> str:
    """Return where the secret stands in the alphabet, as seen from a guess."""
    return "found" if guess == secret else "before" if secret < guess else "after"


class WordGamePrompts(Computed):
    """``game 17``: a secret word each, and a worked game that guesses the middle one of the words that are left.

    A share ``flawed`` of the worked games forgets that when few are left, and says the guess before again and again.
    """

    def __init__(self, flawed: float) -> None:
        self.flawed = flawed

    def __len__(self) -> int:
        return 20_000

    def prompt(self, index: int) -> Prompt:
        """Return the game of an index."""
        drawn = random.Random(f"word game {index}")
        secret = drawn.choice(WORDS)
        turns = _game(secret, forgets=drawn.random() < self.flawed)
        return Prompt(index, f"game {index}", secret, {"answer": secret}, tuple(turns))

    def texts(self) -> Iterator[str]:
        """Yield the text of each prompt."""
        return (f"game {index}" for index in range(len(self)))

    def alphabet(self) -> str:
        """Return the letters of words and marks, and digits."""
        return "".join(sorted(set("".join(WORDS) + f"beforaftund{FIRST} 0123456789ame")))

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"word game of {len(WORDS)} words, halved, {self.flawed} flawed"


def _game(secret: str, *, forgets: bool) -> list[dict[str, str]]:
    """Return a game that halves the words that are left; one that ``forgets`` does not find a word among the last."""
    turns, left, guess = [{"role": "user", "content": FIRST}], list(WORDS), ""
    for _ in range(GUESSES):
        guess = guess if forgets and len(left) <= FEW else left[len(left) // 2]
        turns.append({"role": "assistant", "content": guess})
        if guess == secret:
            break
        said = place(guess, secret)
        left = [word for word in left if place(guess, word) == said]
        turns.append({"role": "user", "content": said})
    return turns if turns[-1]["role"] == "assistant" else turns[:-1]


class WordGame(Environment):
    """Places each guess. A turn earns half of the share of log 36 by which it narrows the word down; the word earns the
    other half."""

    describes_tools = False

    def reset(self, info: dict[str, Any]) -> list[Message]:
        """Begin with a question mark."""
        self.secret, self.guesses, self.found, self.left = info["answer"], 0, False, WORDS
        return [{"role": "user", "content": FIRST}]

    def step(self, message: Message) -> tuple[list[Message], bool, float]:
        """Place a guess."""
        guess = message["content"].strip()
        self.guesses += 1
        self.found = guess == self.secret
        said, before = place(guess, self.secret) if guess in WORDS else "no word", self.left
        if guess in WORDS:
            self.left = tuple(word for word in before if place(guess, word) == said)
        earned = 0.5 * log(len(before) / len(self.left)) / log(len(WORDS))
        return [{"role": "user", "content": said}], self.found or self.guesses >= GUESSES, earned

    def reward(self) -> dict[str, float]:
        """Return a half for the word, beside what its turns earned."""
        return {"reward": 0.5 * self.found, "correct": float(self.found)}


TASK = Task(WordGamePrompts, Exact(), environment=WordGame)
