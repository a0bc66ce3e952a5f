"""The roles of a one-process run, built from its recipe."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tilth.cluster.inline import InlineGroup, InlineStore
from tilth.config.schema import Optimizer, Recipe
from tilth.core.errors import DataError, RecipeError
from tilth.data.documents import Corpus
from tilth.data.examples import check_examples, check_prompts
from tilth.data.order import Order
from tilth.data.prompts import PromptSet
from tilth.data.template import Template, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.flows.model import LoadedModel, choose_tokenizer, load_model, new_config
from tilth.flows.publish import DTYPES
from tilth.flows.run import Roles, Split
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import load_weights
from tilth.models.value import ValueModel
from tilth.plan.steps import RunPlan, plan_run, supervised_steps
from tilth.roles.critic import CriticWorker
from tilth.roles.documents import DocumentWorker
from tilth.roles.policy import PolicyWorker, ReferenceWorker
from tilth.roles.recorder import RecorderWorker
from tilth.roles.reward import RewardWorker
from tilth.roles.reward_pool import RewardPool
from tilth.roles.rollout import RolloutWorker
from tilth.rollout.engine import Engine
from tilth.training.engine import TrainEngine
from tilth.training.packed import appraise

CACHE = ".cache"
"""Folder in run.dir of what can be made again: tokenised documents."""


class Texts(NamedTuple):
    """Documents of flow pretrain."""

    train: Sequence[str]
    heldout: Sequence[str]

    @classmethod
    def of(cls, prompts: PromptSet, holdout: float) -> "Texts":
        """Prompts, each with its answer as it stands, as documents."""
        return cls(*([p.text + (p.answer or "") for p in side] for side in prompts.split(holdout)))

    def fingerprint(self) -> str:
        """Tells these documents from any others."""
        found = hashlib.blake2b(digest_size=8)
        for text in (*self.train, "\0heldout\0", *self.heldout):
            found.update(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return found.hexdigest()


Material = PromptSet | Texts
"""What a run learns from: prompts, or whole documents for flow pretrain."""


@dataclass
class Parts:
    """What a run is made of, before it has a directory."""

    recipe: Recipe
    """With supervised.steps instead of epochs."""
    config: DecoderConfig
    tokenizer: Tokenizer
    train: Split
    heldout: Split
    plan: RunPlan
    store: InlineStore
    policy: PolicyWorker
    reference: ReferenceWorker | None
    critic: CriticWorker | None
    roles: Roles
    notes: list[str]
    """What is to be told of the data."""


@dataclass
class Lesson:
    """What is learned, tokenised and checked. longest: tokens of the longest prompt, or such that the plan is right."""

    train: Split
    heldout: Split
    longest: int
    recorder: RecorderWorker | DocumentWorker
    template: Template | None = None
    notes: list[str] = field(default_factory=list)


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


def build(recipe: Recipe, material: Material, pool: RewardPool | None, earlier: Path | None = None) -> Parts:
    """Model, engines and roles. Everything that can be wrong with data, tokenizer or shape is found here.

    pool: None where nothing is generated. earlier: model folder of the run that is to go on, with its tokenizer.
    """
    loaded = load_model(recipe.model.path) if recipe.model.path else None
    tokenizer = _tokenizer(recipe, material, loaded, earlier)
    config = _config(recipe, loaded, tokenizer)
    store = InlineStore()
    if isinstance(material, Texts):
        lesson = _documents(recipe, material, tokenizer, store)
    else:
        lesson = _prompts(recipe, material, tokenizer, store, generates=pool is not None)
    train, heldout = lesson.train, lesson.heldout
    plan = plan_run(
        recipe,
        config,
        train_prompts=len(train),
        heldout_prompts=len(heldout),
        longest_prompt=lesson.longest,
        generates=pool is not None,
    )
    policy = _policy(recipe, config, loaded, store)
    reference = ReferenceWorker(policy) if recipe.algorithm.kl_coef and recipe.flow in ("grpo", "ppo") else None
    critic = _critic(recipe, policy.engine.model, store) if recipe.flow == "ppo" else None
    roles = Roles(
        policy=InlineGroup("policy", policy),
        rollout=None,
        reward=None,
        reference=InlineGroup("reference", reference) if reference else None,
        recorder=InlineGroup("recorder", lesson.recorder),
        critic=InlineGroup("critic", critic) if critic else None,
    )
    if pool is not None and lesson.template is not None and isinstance(material, PromptSet):
        engine = _engine(recipe, config, tokenizer, policy.engine.device)
        roles.rollout = InlineGroup("rollout", RolloutWorker(engine, lesson.template, material, recipe.rollout, store))
        roles.reward = InlineGroup("reward", RewardWorker(pool, material, store))
    counted = _counted(recipe, len(train))
    return Parts(
        counted, config, tokenizer, train, heldout, plan, store, policy, reference, critic, roles, lesson.notes
    )


def _counted(recipe: Recipe, examples: int) -> Recipe:
    """The recipe with as many supervised steps as its epochs take."""
    steps = supervised_steps(recipe.supervised, examples)
    return recipe.model_copy(update={"supervised": recipe.supervised.model_copy(update={"steps": steps})})


def _tokenizer(recipe: Recipe, material: Material, loaded: LoadedModel | None, earlier: Path | None) -> Tokenizer:
    if earlier is not None and loaded is None and recipe.data.tokenizer.startswith("bpe:"):
        return Tokenizer.load(earlier)  # trained once, when the run began
    if isinstance(material, Texts):
        return choose_tokenizer(recipe, None, loaded, material.train)
    return choose_tokenizer(recipe, material, loaded)


def _documents(recipe: Recipe, texts: Texts, tokenizer: Tokenizer, store: InlineStore) -> Lesson:
    context, folder = recipe.model.context, Path(recipe.run.dir) / CACHE
    train = Corpus.build(texts.train, tokenizer, context, folder)
    heldout = Corpus.build(texts.heldout, tokenizer, context, folder) if texts.heldout else None
    mine, theirs = (Order(np.arange(0 if corpus is None else len(corpus))) for corpus in (train, heldout))
    recorder = DocumentWorker(train, heldout, tokenizer, store)
    return Lesson(mine, theirs, context, recorder, notes=[f"documents: {train.note}"])


def _prompts(
    recipe: Recipe, prompts: PromptSet, tokenizer: Tokenizer, store: InlineStore, *, generates: bool
) -> Lesson:
    train, heldout = prompts.split(recipe.data.holdout)
    template = make_template(recipe.data.template, tokenizer)
    context, room = recipe.model.context, recipe.rollout.max_tokens
    longest = check_prompts(prompts, template, context - room) if generates else 0
    if recipe.flow == "sft":  # what is held out is read too
        longest = max(longest, check_examples(prompts, template, context) - room)
    elif recipe.supervised.steps or recipe.supervised.epochs:
        check_examples(train, template, context)
    if recipe.data.holdout and not recipe.data.heldout and not len(heldout):
        raise DataError(
            f"data.holdout={recipe.data.holdout} of {len(prompts)} prompts leaves none to evaluate on; "
            f"set a larger data.holdout, data.heldout=FILE, or data.holdout=0 for no evaluation"
        )
    told = f"{prompts.copies} prompts are in data.heldout too, word for word, and are left out of training"
    recorder = RecorderWorker(prompts, template, context, store)
    return Lesson(train, heldout, longest, recorder, template, [told] if prompts.copies else [])


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
    engine = _trainer(recipe, model.to(device), recipe.optimizer, ema=recipe.train.ema, watch=recipe.train.watch)
    return PolicyWorker(
        engine, store, temperature=recipe.rollout.temperature or 1.0, norm_length=recipe.rollout.max_tokens
    )


def _critic(recipe: Recipe, policy: Decoder, store: InlineStore) -> CriticWorker:
    """It gets its weights, those of the policy, again where its first phase begins."""
    section = recipe.optimizer.model_copy(update={"lr": recipe.critic.lr})
    engine = _trainer(recipe, ValueModel(policy), section, scorer=appraise)
    return CriticWorker(engine, store, clip=recipe.critic.clip, norm_length=recipe.rollout.max_tokens)


def _trainer(recipe: Recipe, model: Decoder, section: Optimizer, **more: Any) -> TrainEngine:
    return TrainEngine(
        model,
        section,
        total_steps=recipe.algorithm.steps,
        micro_tokens=recipe.train.micro_tokens,
        parity=recipe.train.parity,
        compile=recipe.train.compile,
        nonfinite=recipe.train.nonfinite,
        seed=recipe.seed,
        **more,
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
