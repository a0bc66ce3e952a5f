"""Roles of a few thousand parameters, built without a run."""

import numpy as np
import torch

from tilth.cluster.backends.inline import InlineStore
from tilth.config.schema import AlgorithmConfig, DataConfig, OptimizerConfig, RolloutConfig
from tilth.core.batch import Batch
from tilth.core.checksum import checksum
from tilth.data.prompts import PromptSet, load_source
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.flows.generation import Generation
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.rl.algorithm import Algorithm
from tilth.roles.loader import PromptLoader
from tilth.roles.policy import PolicyWorker
from tilth.roles.rollout import RolloutWorker, ask
from tilth.training.engine import TrainEngine

CONTEXT = 16
PROMPTS = load_source(DataConfig(digits=1))
TOKENIZER = Tokenizer.characters(PROMPTS.alphabet())
TEMPLATE = make_template("", TOKENIZER)


def algorithm(**keys) -> Algorithm:
    """The algorithm of these keys of [algorithm], resolved."""
    return Algorithm(AlgorithmConfig(**keys), norm_length=4)


HOW = algorithm(advantage="grpo_no_std")


def config(**changes) -> DecoderConfig:
    base = dict(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, qk_norm=True, tie_embeddings=True)
    return DecoderConfig(vocab_size=TOKENIZER.vocab_size, max_positions=CONTEXT, **{**base, **changes})


def policy(store=None, *, seed=1, dtype=torch.float32, micro_tokens=4096, temperature=1.0, lr=1e-2, **section):
    model = Decoder(config(), dtype=dtype)
    model.init_weights_(seed)
    engine = TrainEngine(model, OptimizerConfig(lr=lr, **section), total_steps=10, micro_tokens=micro_tokens, seed=seed)
    return PolicyWorker(engine, store or InlineStore(), temperature=temperature)


def loader(store, prompts: PromptSet = PROMPTS, context=CONTEXT) -> PromptLoader:
    return PromptLoader(prompts, TEMPLATE, context, store)


def asked(store, prompts, group: int, first_id: int) -> Batch:
    """Rows that ask for samples, with the tokens of their prompts."""
    return loader(store).encode(ask(prompts, group, first_id))


def rollout(store, *, dtype=torch.float32, model=None, dims=None, rank=0, parity=False, **section) -> RolloutWorker:
    settings = {"max_tokens": 4, "max_rows": 8, **section}
    how = {"dtype": dtype, "max_length": CONTEXT, "dims": dims, "parity": parity}
    engine = Engine(model or config(), EngineOptions(tokenizer=TOKENIZER, seed=1, max_rows=8, **how))
    return RolloutWorker(engine, TEMPLATE, RolloutConfig(**settings), store, rank=rank)


def generated(worker: RolloutWorker, rows: Batch, **how) -> Batch:
    """Samples of these rows, in order, as a flow drives the role."""
    generation = Generation(worker)
    generation.run(rows, **how)
    return generation.collect(rows["id"])


def experience(worker: PolicyWorker, prompts=(3, 8, 41), group=4, temperature=1.0) -> Batch:
    """Samples of the policy's own weights, with rewards that differ inside each group."""
    speaker = rollout(worker.store, temperature=temperature)
    speaker.receive(worker.weights(), 0)
    batch = generated(speaker, asked(worker.store, prompts, group, 0))
    return batch.with_rows(reward=(np.arange(len(batch)) % 3).astype(np.float32) - 0.5)


def checksums(tensors, dtype=torch.float32) -> dict[str, int]:
    """What these tensors amount to in a receiver of this dtype."""
    return {name: checksum(tensor.detach().to(dtype)) for name, tensor in tensors}
