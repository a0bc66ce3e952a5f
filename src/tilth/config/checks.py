"""What must hold between the keys of a recipe, as far as it can be known without the model and the data."""

import re
from collections.abc import Iterator

from tilth.config.errors import RecipeError
from tilth.config.schema import Recipe

KV_BLOCK = 16
"""Tokens of a block of the rollout engine's cache."""


def check(recipe: Recipe) -> None:
    """Raise ``RecipeError`` for the first two keys that contradict each other."""
    for rule in (_shape, _lengths, _parity, _learning, _places):
        for problem in rule(recipe):
            raise RecipeError(problem)


def _shape(recipe: Recipe) -> Iterator[str]:
    m = recipe.model
    if m.path:
        return
    if not m.head_dim and m.hidden % m.heads:
        yield f"model.hidden = {m.hidden} is not a multiple of model.heads = {m.heads}; or set model.head_dim"
    width = m.head_dim or m.hidden // m.heads
    if width < 2 or width % 2:
        yield f"a head is {width} wide (model.head_dim, or hidden / heads); rotary embedding needs an even width"
    if m.kv_heads and m.heads % m.kv_heads:
        yield f"model.kv_heads = {m.kv_heads} does not divide model.heads = {m.heads}"


def _lengths(recipe: Recipe) -> Iterator[str]:
    context, r = recipe.model.context, recipe.rollout
    if recipe.flow == "pretrain":  # generates nothing
        return
    if r.max_tokens >= context:
        yield f"rollout.max_tokens = {r.max_tokens} leaves no room for a prompt in model.context = {context}"
    least = -(-context // KV_BLOCK) * KV_BLOCK
    if r.kv_tokens and r.kv_tokens < least:
        yield (
            f"rollout.kv_tokens = {r.kv_tokens} does not hold one sequence of model.context = {context}; "
            f"at least {least}, or 0: automatic"
        )


def _parity(recipe: Recipe) -> Iterator[str]:
    t = recipe.train
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", t.device):
        yield f"train.device = {t.device!r} is not auto, cpu, cuda or cuda:N"
    if not t.parity:
        return
    if t.device.startswith("cuda"):
        yield f"train.parity = true holds on a CPU only; train.device is {t.device!r}"
    for name, on in (("train.compile", t.compile), ("rollout.compile", recipe.rollout.compile)):
        if on:
            yield f"train.parity = true needs eager kernels; set {name} = false"


def _learning(recipe: Recipe) -> Iterator[str]:
    a, r, w = recipe.algorithm, recipe.rollout, recipe.supervised
    supervised = bool(w.steps or w.epochs)
    if recipe.flow in ("sft", "pretrain") and not supervised:
        yield f"nothing to train: flow = {recipe.flow}, and supervised.steps and supervised.epochs are both 0"
    if not a.steps and not supervised:
        yield "nothing to train: algorithm.steps and supervised.steps are both 0"
    if supervised and w.until < 1 and recipe.data.holdout == 0 and not recipe.data.heldout:
        yield f"supervised.until = {w.until} needs held-out prompts; data.holdout is 0 and data.heldout empty"
    if recipe.data.holdout == 1 and not recipe.data.heldout:
        yield "data.holdout = 1 leaves no prompt to train on"
    if a.dual_clip and a.dual_clip < 1:
        yield f"algorithm.dual_clip = {a.dual_clip} is neither 0 (none) nor at least 1"
    if a.clip_low > 1:
        yield f"algorithm.clip_low = {a.clip_low} is above 1: a ratio cannot fall below 0"
    if recipe.flow in ("grpo", "ppo") and a.steps:
        yield from _experience(recipe)
    if a.minibatches > r.prompts * r.group:
        yield f"algorithm.minibatches = {a.minibatches} is more than rollout.prompts x group = {r.prompts * r.group}"


def _experience(recipe: Recipe) -> Iterator[str]:
    if recipe.rollout.temperature == 0:
        yield f"rollout.temperature = 0 samples the same completion each time; flow {recipe.flow} needs it above 0"
    if recipe.flow == "grpo" and recipe.rollout.group == 1 and recipe.algorithm.drop_flat:
        yield "rollout.group = 1 with algorithm.drop_flat = true drops every group; use a group of 2 or more"


def _places(recipe: Recipe) -> Iterator[str]:
    name = recipe.run.name
    if "/" in name or name in (".", ".."):
        yield f"run.name = {name!r} is a path; give the name of a folder in run.dir"
    if not recipe.run.dir:
        yield "run.dir is empty; give a folder, such as runs"
