"""Agents of OpenAI's client: what they call is the episode, token by token, and their failures are their own."""

import numpy as np
import pytest

from tests.errors import raises
from tests.rollout.test_episodes import TEXTS
from tests.rollout.reference import make_model
from tilth.core.errors import PluginError
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.envs.pool import EnvironmentPool
from tilth.models.config import DecoderConfig
from tilth.rollout.engine import Engine
from tilth.rollout.episodes import Limits, Player, Wanted
from tilth.rollout.request import SamplingParams

FILE = "tests/serve/agents.py"
ROLLOUT = {"serve": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def opened(name, **options):
    return EnvironmentPool(f"{FILE}:{name}", **{"timeout": 20.0, "rollout": ROLLOUT, **options})


def play(pool, infos, *, turns=4, context=400, max_tokens=12, engine=None):
    """Play episodes by a small model, in parity mode: nothing but what was said decides on tokens and log-probs."""
    tokenizer = Tokenizer.train(TEXTS, 300)
    template = make_template("chatml", tokenizer)
    if engine is None:
        config = DecoderConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
            num_kv_heads=2, max_positions=512,
        )  # fmt: skip
        engine = Engine(config, tokenizer=tokenizer, seed=3, max_length=context, parity=True)
        engine.update_weights(make_model(config, scale=1.0).named_parameters(), version=5)
    player = Player(engine, template, tokenizer, pool, Limits(turns, context))
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(*template.stops, *range(5, 60)))
    return player.play([Wanted(i, info, i // 2, i) for i, info in enumerate(infos)], params)


def test_the_same_game_is_the_same_trajectory():
    infos = [{"q": f"What is {i}?"} for i in range(6)]
    found = []
    for name in ("Echo", "Plays", "PlaysAsync"):
        pool = opened(name, rollout={**ROLLOUT, "serve": name != "Echo"})
        try:
            found.append(play(pool, infos))
        finally:
            pool.close()
    assert max(one.turns for one in found[0]) == 3
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            a, b = one.trajectory, two.trajectory
            assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.mask, b.mask)
            assert np.array_equal(a.logprobs, b.logprobs) and a.segments == b.segments and a.versions == b.versions
            assert (a.reward, a.finish, one.parts, one.reason) == (b.reward, b.finish, two.parts, two.reason)
            assert a.reward is not None
