"""Images from records to weights and back: a model learns to tell their bright part, also of those it never saw."""

import numpy as np
import pytest

from tests.models import seeing
from tests.roles.small import generated
from tilth.cluster.backends.inline import InlineStore
from tilth.config.schema import OptimizerConfig, RolloutConfig
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.models.decoder import Decoder
from tilth.roles.experience import texts
from tilth.roles.loader import PromptLoader
from tilth.roles.policy import PolicyWorker
from tilth.roles.rollout import RolloutWorker, ask
from tilth.training.engine import TrainEngine

TOKENIZER = Tokenizer.characters(".=0123")
RECORDS = [{"prompt": "....=", "answer": str(i % 4), "media": [seeing.image(i % 4, i)]} for i in range(48)]


@pytest.fixture(scope="module", autouse=True)
def _declared():
    with seeing.declared():
        yield


@pytest.fixture(scope="module")
def taught():
    """A policy after 50 supervised steps on the first 32 images, with the loader of all, and an engine."""
    config, store = seeing.config(vocab_size=TOKENIZER.vocab_size), InlineStore()
    template, model = make_template("", TOKENIZER), Decoder(config)
    model.init_weights_(1)
    learning = TrainEngine(model, OptimizerConfig(lr=5e-3), total_steps=100, micro_tokens=512)
    policy, loader = PolicyWorker(learning, store), PromptLoader(PromptSet.of(RECORDS), template, 16, store)
    batch = loader.examples(range(32))
    losses = [policy.sft_step(batch)["loss"].total for _ in range(50)]
    assert losses[0] > 1 and losses[-1] < 0.1
    learning.parity = True
    engine = Engine(config, EngineOptions(tokenizer=TOKENIZER, max_length=16, block_size=4, parity=True))
    rollout = RolloutWorker(engine, template, RolloutConfig(max_tokens=2), store)
    rollout.receive(policy.weights(), 1)
    return policy, loader, rollout


def test_it_reads_images_with_equal_log_probs_in_training_and_generation(taught):
    policy, loader, rollout = taught
    found = generated(rollout, loader.encode(ask(range(32, 48), 2, 0)), greedy=True)
    read = found.read(policy.store, "text", "rollout_logprobs", "mask", "media")
    answers = [RECORDS[i]["answer"] for i in range(32, 48) for _ in range(2)]
    assert sum(map(str.__eq__, texts(read["text"]), answers)) > 24  # 8 by chance
    again = policy.logprobs(found).read(policy.store, "old_logprobs")["old_logprobs"].values
    assert np.array_equal(again, read["rollout_logprobs"].values) and read["mask"].values.sum() == 64


def test_the_prefix_cache_knows_an_image_by_its_bytes(taught):
    *_, rollout = taught
    rollout.engine.reset_prefix_cache()
    ids, cached = TOKENIZER.encode("....="), []
    for i in (40, 40, 41, 40):
        rollout.engine.stats(reset=True)
        rollout.engine.generate([Request(i, ids, SamplingParams(max_tokens=1), media=tuple(RECORDS[i]["media"]))])
        cached.append(rollout.engine.stats().cached_tokens)
    assert cached == [0, 4, 0, 4]
