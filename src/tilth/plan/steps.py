"""Plan of a run, made before its first step."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilth.config.schema import Recipe, SupervisedConfig
from tilth.plan.layout import RankPlan, per_rank
from tilth.plan.memory import Memory
from tilth.plan.shape import DecoderShape, parameters, token_flops


@dataclass(frozen=True)
class RunPlan:
    """Maximum work of a run; a warm-up may end earlier, and groups with equal rewards are left out of updates."""

    parameters: int
    critic_parameters: int
    """0: no critic."""
    train_prompts: int
    """Flow pretrain: pieces of documents."""
    heldout_prompts: int
    longest: int
    """Tokens of the longest possible sequence: longest prompt and longest completion."""
    supervised_steps: int
    supervised_examples: int
    value_steps: int
    """Steps that train the critic alone."""
    steps: int
    prompts: int
    samples: int
    """Prompts and samples of steps and value steps."""
    optimizer_steps: int
    """Optimizer steps of the policy."""
    critic_optimizer_steps: int
    tokens_per_step: int
    """Maximum tokens of one step's batch, prompts included."""
    evaluations: int
    flops: float
    """Model FLOPs of all training passes, all sequences at maximum length."""
    workers: tuple[RankPlan, ...]
    pieces: bool = False
    """True: training data are pieces of documents, not prompts."""

    @property
    def memory(self) -> Memory:
        """Memory of the worker that needs most."""
        return max((worker.memory for worker in self.workers), key=lambda memory: memory.peak)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for run.json, memory as {item: bytes} and its peak."""
        plain = asdict(replace(self, workers=()))  # a copy of each worker's plan would be the most of the work
        del plain["workers"]
        return plain | {"memory": self.memory.by_name(), "memory_peak": self.memory.peak}

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        what = "pieces of documents" if self.pieces else "prompts"
        critic = f" and a critic of {_count(self.critic_parameters)}" if self.critic_parameters else ""
        lines = [
            f"model: {_count(self.parameters)} parameters{critic}; {self.train_prompts:,} {what} to train on, "
            f"{self.heldout_prompts:,} held out"
        ]
        if self.supervised_steps:
            steps = f"{self.supervised_steps:,} step{'s' if self.supervised_steps > 1 else ''}"
            lines.append(f"supervised: at most {steps}, {self.supervised_examples:,} examples")
        if self.value_steps:
            lines.append(f"value pre-training: {self.value_steps:,} steps of the critic alone")
        if self.steps:
            lines.append(
                f"reinforcement learning: {self.steps:,} steps, {self.prompts:,} prompts, {self.samples:,} samples, "
                f"{self.optimizer_steps:,} optimizer steps, at most {self.tokens_per_step:,} tokens a step"
            )
        lines.append(f"evaluations on held-out prompts: {self.evaluations}")
        lines.append(f"predicted memory: {size(self.memory.peak)} ({self._greatest()})")
        return lines

    def _greatest(self) -> str:
        greatest = sorted(self.memory.items, key=lambda item: -item.bytes)[:4]
        return ", ".join(f"{item.name} {size(item.bytes)}" for item in greatest)


def supervised_steps(supervised: SupervisedConfig, examples: int) -> int:
    """Return the steps of the supervised phase: ``steps``, or those of ``epochs`` passes over the examples."""
    return supervised.steps or math.ceil(round(supervised.epochs * examples / supervised.batch, 9))


def longest_sequence(recipe: Recipe, longest_prompt: int) -> int:
    """Return the tokens of the longest possible sequence of a run. longest_prompt: as of ``plan_run``."""
    if recipe.flow_spec.learns == "documents":
        return recipe.model.context
    return min(recipe.model.context, longest_prompt + recipe.rollout.max_tokens)


def plan_run(
    recipe: Recipe,
    shape: DecoderShape,
    *,
    train_prompts: int,
    heldout_prompts: int,
    longest_prompt: int,
    generates: bool = True,
    loaded: Mapping[str, DecoderShape] | None = None,
) -> RunPlan:
    """Plan a run from its recipe, the model's shape, the sizes of the data and the longest prompt in tokens.

    Flow pretrain: train_prompts and heldout_prompts count pieces of at most the context. generates: True if the run has
    a rollout engine. loaded: key of a path -> shape of its model if that is not the policy's.
    """
    a, r, w = recipe.algorithm, recipe.rollout, recipe.supervised
    critic, pretrain = recipe.flow_spec.critic, recipe.flow_spec.learns == "documents"
    steps = a.steps if recipe.flow_spec.samples else 0
    values = recipe.critic.steps if critic else 0
    warm = supervised_steps(w, train_prompts)
    longest = longest_sequence(recipe, longest_prompt)
    rows, updates = r.prompts * r.group, a.epochs * a.minibatches
    given, learned = w.batch * recipe.flow_spec.rows, rows * a.epochs
    policy_rows, critic_rows = warm * given + steps * learned, critic * (steps + values) * learned
    seen = (longest + 1) / 2
    at_first = warm == 0 or not recipe.flow_spec.samples  # the end of a warm-up is the beginning of what follows
    flops = policy_rows * token_flops(shape, seen).both + critic_rows * token_flops(shape, seen, head=False).both
    counted = recipe.replaced("run", eval_prompts=min(recipe.run.eval_prompts, heldout_prompts))
    return RunPlan(
        parameters=parameters(shape),
        critic_parameters=parameters(shape, value=True) if critic else 0,
        train_prompts=train_prompts,
        heldout_prompts=heldout_prompts,
        longest=longest,
        supervised_steps=warm,
        supervised_examples=warm * w.batch,
        value_steps=values,
        steps=steps,
        prompts=(steps + values) * r.prompts,
        samples=(steps + values) * rows,
        optimizer_steps=warm + steps * updates,
        critic_optimizer_steps=critic * (steps + values) * updates,
        tokens_per_step=(rows if steps else given) * longest,
        evaluations=_evaluations(warm, w.check_every) + _evaluations(steps, recipe.run.eval_every) + at_first,
        flops=longest * flops,
        workers=tuple(per_rank(counted, shape, longest, generates=generates, loaded=loaded)),
        pieces=pretrain,
    )


def _evaluations(steps: int, every: int) -> int:
    """Count evaluations after each ``every`` steps and after the last step."""
    return 0 if steps == 0 else 1 if every == 0 else -(-steps // every)


def size(nbytes: float) -> str:
    """Format bytes: ``1.4 GB`` (10^9)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def _count(number: int) -> str:
    return next((f"{number / s:.3g}{u}" for u, s in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= s), str(number))
