"""The roles of a one-process run, built from its recipe."""

from dataclasses import dataclass, replace

import torch

from tilth.cluster.inline import InlineGroup, InlineStore
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, RecipeError
from tilth.data.examples import check_examples, check_prompts
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.flows.model import LoadedModel, choose_tokenizer, load_model, new_config
from tilth.flows.publish import DTYPES
from tilth.flows.run import Roles
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import load_weights
from tilth.plan.steps import RunPlan, plan_run
from tilth.roles.policy import PolicyWorker, ReferenceWorker
from tilth.roles.recorder import RecorderWorker
from tilth.roles.reward import RewardWorker
from tilth.roles.reward_pool import RewardPool
from tilth.roles.rollout import RolloutWorker
from tilth.rollout.engine import Engine
from tilth.training.engine import TrainEngine


@dataclass
class Parts:
    """What a run is made of, before it has a directory."""

    config: DecoderConfig
    tokenizer: Tokenizer
    train: PromptSet
    heldout: PromptSet
    plan: RunPlan
    store: InlineStore
    policy: PolicyWorker
    reference: ReferenceWorker | None
    roles: Roles


def pick_device(name: str) -> torch.device:
    """The device of ``train.device``; RecipeError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"train.device={name!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"train.device={name!r}, but torch sees no CUDA device; use auto or cpu")
    return device


def build(recipe: Recipe, prompts: PromptSet, pool: RewardPool) -> Parts:
    """Model, engines and roles. Everything that can be wrong with data, tokenizer or shape is found here."""
    train, heldout = prompts.split(recipe.data.holdout)
    if recipe.data.holdout and not len(heldout):
        raise DataError(f"data.holdout={recipe.data.holdout} of {len(prompts)} prompts leaves none to evaluate on")
    loaded = load_model(recipe.model.path) if recipe.model.path else None
    tokenizer = choose_tokenizer(recipe, prompts, loaded)
    config = _config(recipe, loaded, tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise DataError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}")
    template = make_template(recipe.data.template, tokenizer)
    longest = check_prompts(prompts, template, recipe.model.context - recipe.rollout.max_tokens)
    if recipe.supervised.steps:
        check_examples(train, template, recipe.model.context)
    plan = plan_run(recipe, config, train_prompts=len(train), heldout_prompts=len(heldout), longest_prompt=longest)
    store = InlineStore()
    policy = _policy(recipe, config, loaded, store)
    reference = ReferenceWorker(policy) if recipe.algorithm.kl_coef else None
    engine = _engine(recipe, config, tokenizer, policy.engine.device)
    roles = Roles(
        policy=InlineGroup("policy", policy),
        rollout=InlineGroup("rollout", RolloutWorker(engine, template, prompts, recipe.rollout, store)),
        reward=InlineGroup("reward", RewardWorker(pool, prompts, store)),
        reference=InlineGroup("reference", reference) if reference else None,
        recorder=InlineGroup("recorder", RecorderWorker(prompts, template, recipe.model.context, store)),
    )
    return Parts(config, tokenizer, train, heldout, plan, store, policy, reference, roles)


def _config(recipe: Recipe, loaded: LoadedModel | None, tokenizer: Tokenizer) -> DecoderConfig:
    """A loaded model keeps its own shape; the recipe's context must fit it, and its dropout holds."""
    if loaded is None:
        return new_config(recipe, tokenizer.vocab_size)
    if recipe.model.context > loaded.config.max_positions:
        raise RecipeError(
            f"model.context = {recipe.model.context} is more than the {loaded.config.max_positions} positions "
            f"of model.path = {recipe.model.path}"
        )
    return replace(loaded.config, dropout=recipe.model.dropout)


def _policy(recipe: Recipe, config: DecoderConfig, loaded: LoadedModel | None, store: InlineStore) -> PolicyWorker:
    device = pick_device(recipe.train.device)
    model = Decoder(config, dtype=DTYPES[recipe.train.precision])
    model.checkpointing = recipe.train.checkpointing
    if loaded:
        load_weights(model, loaded.tensors, str(loaded.source))
    else:
        model.init_weights_(recipe.seed)
    engine = TrainEngine(
        model.to(device),
        recipe.optimizer,
        total_steps=recipe.algorithm.steps,
        micro_tokens=recipe.train.micro_tokens,
        parity=recipe.train.parity,
        compile=recipe.train.compile,
        nonfinite=recipe.train.nonfinite,
        seed=recipe.seed,
        ema=recipe.train.ema,
        watch=recipe.train.watch,
    )
    return PolicyWorker(
        engine, store, temperature=recipe.rollout.temperature or 1.0, norm_length=recipe.rollout.max_tokens
    )


def _engine(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, device: torch.device) -> Engine:
    r = recipe.rollout
    return Engine(
        config,
        tokenizer=tokenizer,
        device=device,
        dtype=DTYPES[recipe.train.precision],
        seed=recipe.seed,
        max_rows=r.max_rows,
        kv_tokens=r.kv_tokens or r.max_rows * recipe.model.context,
        step_tokens=r.step_tokens,
        max_length=recipe.model.context,
        compile=r.compile,
        parity=recipe.train.parity,
    )
