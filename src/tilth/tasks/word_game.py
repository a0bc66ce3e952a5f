"""Task word_game: find a word of three letters by guesses, each answered by where it stands in the alphabet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from tilth.config.tasks import Task
from tilth.data.columns import Prompt
from tilth.data.computed import Computed
from tilth.envs.environment import Environment, Message
from tilth.rewards.verifiers import Exact

WORDS = tuple("".join(letters) for letters in product("bdg", "aeio", "knt"))
"""36 words, of which any may be the secret."""
GUESSES = 6
FIRST = "?"


def place(guess: str, secret: str) -> str:
    """Return where the secret stands in the alphabet, as seen from a guess."""
    return "found" if guess == secret else "before" if secret < guess else "after"


class WordGamePrompts(Computed):
    """``game 17``: a secret word each, and a worked game that guesses any word that is left."""

    def __len__(self) -> int:
        return 20_000

    def prompt(self, index: int) -> Prompt:
        """Return the game of an index."""
        drawn = random.Random(f"word game {index}")
        secret = drawn.choice(WORDS)
        turns = _game(drawn, secret)
        return Prompt(index, f"game {index}", secret, {"answer": secret}, tuple(turns))

    def texts(self) -> Iterator[str]:
        """Yield the text of each prompt."""
        return (f"game {index}" for index in range(len(self)))

    def alphabet(self) -> str:
        """Return the letters of words and marks, and digits."""
        return "".join(sorted(set("".join(WORDS) + f"beforaftund{FIRST} 0123456789ame")))

    def fingerprint(self) -> str:
        """Return the task and its size."""
        return f"word game of {len(WORDS)} words"


def _game(drawn: random.Random, secret: str) -> list[dict[str, str]]:
    """Return a game that finds the word by guessing any of those that are left."""
    while True:
        turns, left = [{"role": "user", "content": FIRST}], list(WORDS)
        for _ in range(GUESSES):
            guess = drawn.choice(left)
            turns.append({"role": "assistant", "content": guess})
            if guess == secret:
                return turns
            said = place(guess, secret)
            left = [word for word in left if place(guess, word) == said]
            turns.append({"role": "user", "content": said})


class WordGame(Environment):
    """Places each guess; the reward falls with the number of guesses, and is 0 without the word."""

    describes_tools = False

    def reset(self, info: dict[str, Any]) -> list[Message]:
        """Begin with a question mark."""
        self.secret, self.guesses, self.found = info["answer"], 0, False
        return [{"role": "user", "content": FIRST}]

    def step(self, message: Message) -> tuple[list[Message], bool]:
        """Place a guess."""
        guess = message["content"].strip()
        self.guesses += 1
        self.found = guess == self.secret
        said = place(guess, self.secret) if guess in WORDS else "no word"
        return [{"role": "user", "content": said}], self.found or self.guesses >= GUESSES

    def reward(self) -> dict[str, float]:
        """Return 1 for the first guess, a tenth less for each further one, 0 without the word."""
        value = 1.0 - 0.1 * (self.guesses - 1) if self.found else 0.0
        return {"reward": value, "correct": float(self.found)}


TASK = Task(WordGamePrompts, Exact(), environment=WordGame)
