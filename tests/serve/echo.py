"""The game as an environment; ``agents.py`` plays it too. Nothing imports it but by its path, which declares it."""

import tilth
from tests.serve.game import TURNS, answer, first, score


class Echo(tilth.Environment):
    def reset(self, info):
        self.said = []
        return first(info)

    def step(self, message):
        self.said.append(message["content"])
        return [answer(self.said[-1])], len(self.said) == TURNS

    def reward(self):
        return score(self.said)
