"""A game of three turns, for environments and agents."""

import re

TURNS = 3
STOPS = "024"


def first(info):
    return [{"role": "system", "content": "Say a number."}, {"role": "user", "content": info["prompt"]}]


def seen(text):
    """Length without what clients do not see: special tokens and stop strings."""
    return sum(one.isalnum() for one in re.split(f"[{STOPS}]", re.sub(r"<\|?\w+\|?>", "", text))[0])


def answer(text):
    return {"role": "user", "content": f"{seen(text)} characters, and now?"}


def score(said):
    return {"reward": sum(map(seen, said)) % 7, "turns_seen": len(said)}
