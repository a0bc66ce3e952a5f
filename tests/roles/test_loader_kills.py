"""Loaders that are killed at random, under plans that change, give the samples of an undisturbed pass, in its order."""

import os
import signal
from contextlib import suppress

import numpy as np
import pytest

from tests.roles.test_source_loaders import CONTEXT, PLANS, here, same, sources, sums, until, write
from tilth.config.schema import DataConfig, MixtureSource
from tilth.core.random import stream
from tilth.data.mixture import Mixture
from tilth.data.prompts import load_source
from tilth.data.template import template_names
from tilth.data.tokenizer import Tokenizer
from tilth.roles.source_loader import LoaderSettings
from tilth.roles.source_loaders import SourceLoaders

pytestmark = pytest.mark.dist


def test_what_a_lost_loader_had_in_flight_is_made_by_those_that_load_its_source_now(tmp_path):
    """A plan takes its source away, or all of its sources, and it dies before it has ended its requests."""
    parts = [MixtureSource(name=n, source=write(tmp_path / f"{n}.jsonl", sums(i, 40))) for i, n in enumerate("abc")]
    data, tokenizer = DataConfig(source="", mixture=tuple(parts)), Tokenizer.characters("0123456789+=")
    prompts = load_source(data)
    made = SourceLoaders(
        dict(zip("abc", prompts.source.parts)), LoaderSettings(template_names(data), tokenizer, CONTEXT), []
    )
    try:
        for number, plan in enumerate([[{"a": 1.0}, {"c": 1.0}], [{"a": 1.0}]]):
            made.follow([{"a": 1.0, "b": 1.0}, {"c": 1.0}])
            wanted = list(range(40 * number, 40 * number + 80))
            made.take("examples", [0, 119])
            for pid in (stopped := made.pids()):
                os.kill(pid, signal.SIGSTOP)
            made.ask("examples", wanted)
            until(lambda: any(child.flying for place in made._places for child in place.team))
            made.follow(plan)
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            until(lambda: not made._open)
            same(made.take("examples", wanted), here("examples", data, prompts, tokenizer, wanted))
    finally:
        made.close()


@pytest.mark.slow
def test_twenty_random_kills(tmp_path):
    rng = np.random.default_rng(0)
    records = [{"prompt": f"{i}+1=" * int(rng.integers(1, 9)), "answer": str(i + 1)} for i in range(300)]
    files = {"few": records[:60], "more": records[60:260], "given": records[260:]}
    parts = [MixtureSource(name=n, source=write(tmp_path / f"{n}.jsonl", own)) for n, own in files.items()]
    data, tokenizer = DataConfig(source="", mixture=tuple(parts)), Tokenizer.train(["0123456789+= 1=2"], 300)
    prompts = load_source(data)
    epoch = Mixture(parts, prompts.parts, 10).take(stream(0, "examples"), 0, 400)
    made = SourceLoaders(sources(prompts), LoaderSettings(template_names(data), tokenizer, CONTEXT), PLANS[-1])
    kills, found = 0, []
    try:
        for step in range(40):
            ids = epoch[10 * step :]
            if step % 7 == 3:
                made.follow(PLANS[step // 7 % len(PLANS)])
            made.ask("examples", ids[:50].tolist())
            if step % 2 and (pids := made.pids()):
                with suppress(ProcessLookupError):
                    os.kill(int(rng.choice(pids)), signal.SIGKILL)
                    kills += 1
            found += made.take("examples", ids[:10].tolist())
    finally:
        made.close()
    assert kills >= 18 and len(found) == 400
    same(found, here("examples", data, prompts, tokenizer, epoch.tolist()))
