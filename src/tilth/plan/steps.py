"""The plan of a run, known before its first step."""

from dataclasses import asdict, dataclass
from typing import Any

from tilth.config.schema import Recipe
from tilth.plan.flops import token_flops
from tilth.plan.memory import Memory, predict
from tilth.plan.shape import DecoderShape, parameters


@dataclass(frozen=True)
class RunPlan:
    """What a run will do at most; a warm-up may end earlier, and groups without spread are left out of updates."""

    parameters: int
    train_prompts: int
    heldout_prompts: int
    longest: int
    """Tokens of the longest possible sequence: longest prompt and longest completion."""
    supervised_steps: int
    supervised_examples: int
    steps: int
    prompts: int
    samples: int
    optimizer_steps: int
    tokens_per_step: int
    """Most tokens of one step's batch, prompts included."""
    evaluations: int
    flops: float
    """Model FLOPs of all training passes, every sequence as long as it can be."""
    memory: Memory

    def as_dict(self) -> dict[str, Any]:
        """For run.json: plain numbers, memory as {item: bytes} and its peak."""
        plain = {k: v for k, v in asdict(self).items() if k != "memory"}
        return plain | {"memory": dict(self.memory.items), "memory_peak": self.memory.peak}

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"model: {_count(self.parameters)} parameters; {self.train_prompts:,} prompts to train on, "
            f"{self.heldout_prompts:,} held out"
        ]
        if self.supervised_steps:
            lines.append(f"supervised: at most {self.supervised_steps:,} steps, {self.supervised_examples:,} examples")
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


def plan_run(
    recipe: Recipe, shape: DecoderShape, *, train_prompts: int, heldout_prompts: int, longest_prompt: int
) -> RunPlan:
    """From the recipe, the model's shape, the sizes of the data and the longest prompt in tokens."""
    a, r, w = recipe.algorithm, recipe.rollout, recipe.supervised
    steps = a.steps if recipe.flow == "grpo" else 0
    longest = min(recipe.model.context, longest_prompt + r.max_tokens)
    rows = r.prompts * r.group
    trained = w.steps * w.batch + steps * rows * a.epochs
    return RunPlan(
        parameters=parameters(shape),
        train_prompts=train_prompts,
        heldout_prompts=heldout_prompts,
        longest=longest,
        supervised_steps=w.steps,
        supervised_examples=w.steps * w.batch,
        steps=steps,
        prompts=steps * r.prompts,
        samples=steps * rows,
        optimizer_steps=w.steps + steps * a.epochs * a.minibatches,
        tokens_per_step=rows * longest,
        evaluations=_evaluations(w.steps, w.check_every) + _evaluations(steps, recipe.run.eval_every) + (w.steps == 0),
        flops=trained * longest * token_flops(shape, (longest + 1) / 2).both,
        memory=predict(recipe, shape, longest),
    )


def _evaluations(steps: int, every: int) -> int:
    """Each ``every`` steps, and after the last one."""
    return 0 if steps == 0 else 1 if every == 0 else -(-steps // every)


def size(nbytes: float) -> str:
    """Bytes in words: ``1.4 GB`` (10^9)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def _count(number: int) -> str:
    return next((f"{number / s:.3g}{u}" for u, s in (("B", 1e9), ("M", 1e6), ("k", 1e3)) if number >= s), str(number))
