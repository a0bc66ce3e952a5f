"""A game of three turns, as an environment; ``tests.serve.agents`` play it too."""

import re

import tilth

TURNS = 3
STOPS = "024"


class Echo(tilth.Environment):
    def reset(self, info):
        self.said = []
        return first(info)

    def step(self, message):
        self.said.append(message["content"])
        return [answer(self.said[-1])], len(self.said) == TURNS

    def reward(self):
        return score(self.said)


def first(info):
    return [{"role": "system", "content": "Say a number."}, {"role": "user", "content": info["prompt"]}]


def seen(text):
    """Length without what clients do not see: special tokens and stop strings."""
    return sum(one.isalnum() for one in re.split(f"[{STOPS}]", re.sub(r"<\|?\w+\|?>", "", text))[0])


def answer(text):
    return {"role": "user", "content": f"{seen(text)} characters, and now?"}


def score(said):
    return {"reward": sum(map(seen, said)) % 7, "turns_seen": len(said)}
