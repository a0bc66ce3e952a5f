"""Peak memory of a run, or of one worker of it, predicted item by item from shapes and the recipe."""

from collections.abc import Sequence
from typing import NamedTuple

from tilth.config.open_sets import OPTIMIZERS
from tilth.config.schema import Recipe
from tilth.plan.kernels import BLOCK, round_up
from tilth.plan.shape import DecoderShape, parameters
from tilth.plan.working import (
    FP32,
    EngineDemand,
    Item,
    ShardFactors,
    element_of,
    generation,
    kv_cache,
    on_gpu,
    scoring,
    total,
    training,
)

BASE = 400 * 2**20
"""Interpreter, torch, pyarrow, the other libraries and what they load as they are used (measured)."""
TOKEN = 600
"""Bytes of a token of the vocabulary in a tokenizer (measured)."""
CUDA = 500 * 2**20
"""A process's context on a GPU with the kernels that it has loaded (about; by others' measurements)."""
CERTAIN = ("parameters", "optimizer state", "model", "weights")
"""Ends of the names of what is held whatever the data are."""


class Memory(NamedTuple):
    """Predicted peak. Training and generation take turns, so of their working sets only the greater counts."""

    held: tuple[Item, ...]
    """There all the time."""
    training: tuple[Item, ...]
    """While a micro-batch is in flight."""
    generation: tuple[Item, ...]
    """While the engine steps."""
    gradients: int = 0
    """Of the greatest role, when all are there: at the moment that ``training`` is of they need not all be."""

    @property
    def items(self) -> tuple[Item, ...]:
        """What makes up the peak."""
        return self.held + max(self.training, self.generation, key=total)

    @property
    def peak(self) -> int:
        """Bytes."""
        return total(self.items)

    def by_name(self) -> dict[str, int]:
        """Bytes of each item."""
        return {item.name: item.bytes for item in self.items}

    def certain(self, *, gpu: bool) -> int:
        """Bytes that no length of a sequence moves: weights, gradients and optimizer state; gpu: those on a GPU."""
        return self.gradients + sum(i.bytes for i in self.held if i.name.endswith(CERTAIN) and not (gpu and i.host))

    def on_gpu(self) -> int:
        """Bytes at the peak on the GPU, where there is one."""
        return sum(item.bytes for item in self.items if not item.host)


class Need(NamedTuple):
    """What a role needs on one rank."""

    held: tuple[Item, ...]
    gradients: int = 0
    """Bytes; in ``training`` too. Roles of one worker take turns, and forget theirs after a step."""
    training: tuple[Item, ...] = ()
    generation: tuple[Item, ...] = ()


def together(recipe: Recipe, needs: Sequence[Need], vocab: int, base: int = BASE) -> Memory:
    """Of one process with these roles, which take turns, and a tokenizer of so many tokens."""
    held = [Item("interpreter and libraries", base, host=True), Item("tokenizer", TOKEN * vocab, host=True)]
    held += [Item("CUDA context", CUDA)] if on_gpu(recipe) else []
    held += [item for need in needs for item in need.held]
    working = max((need.training for need in needs), key=total, default=())
    speaking = max((need.generation for need in needs), key=total, default=())
    return Memory(tuple(held), working, speaking, max((need.gradients for need in needs), default=0))


def policy_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Of the policy's part on one rank."""
    own, head = cut.elements * FP32, not recipe.flow_spec.value
    held = [Item("parameters", own), Item("optimizer state", _optimizer(recipe, cut))]
    if recipe.train.ema:
        held.append(Item("average of the weights", own))
    held.append(_saved_copy(cut, held, "copy being saved"))
    if "noise_scale" in recipe.train.watch:
        held.append(Item("gradients of one micro-batch", own))
    return Need(tuple(held), own, training(recipe, cut, longest, head=head))


def _saved_copy(cut: ShardFactors, state: Sequence[Item], name: str) -> Item:
    """The host memory from which a checkpoint is written, kept from save to save."""
    return Item(name, total(tuple(state)) // cut.copies, host=True)


def critic_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Of the critic's part on one rank. cut: of the value model, which has no logits."""
    own = cut.elements * FP32
    held = [Item("critic's parameters", own), Item("critic's optimizer state", _optimizer(recipe, cut))]
    copy = _saved_copy(cut, held, "critic's copy being saved")
    return Need((*held, copy), own, training(recipe, cut, longest, head=False))


def reference_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Of the reference's part on one rank, which scores and never learns. One with a path is not saved."""
    held = [Item("reference model", cut.elements * FP32)]
    copy = [] if recipe.reference.path else [_saved_copy(cut, held, "reference's copy being saved")]
    return Need((*held, *copy), training=scoring(recipe, cut, longest))


def reward_model_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Of a reward model's part on one rank, which scores and never learns; it has no logits and is not saved."""
    return Need((Item("reward model", cut.elements * FP32),), training=scoring(recipe, cut, longest, head=False))


def rollout_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Of an engine with a whole copy of the model, one of those that divide the rows."""
    r, context, ranks = recipe.rollout, recipe.model.context, cut.ranks
    evaluated = -(-recipe.run.eval_prompts // ranks)
    wanted = [(evaluated, 1)] + ([(-(-r.prompts * r.group // ranks), r.group)] if recipe.flow_spec.samples else [])
    most = [_asked(recipe, rows, group, longest, r.max_tokens, context, kv_tokens(recipe)) for rows, group in wanted]
    needs = [_engine_need(recipe, cut.shape, asked, "engine's copy of the weights", "KV cache") for asked in most]
    return max(needs, key=lambda need: total((*need.held, *need.generation)))


def judge_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Of a judge, an engine of its own model. Its questions are taken to have twice the tokens of what they are about,
    which they repeat step by step."""
    positions = getattr(cut.shape, "max_positions", recipe.model.context)
    r, most = recipe.rollout, min(positions, 2 * longest + recipe.judge.max_tokens)
    rows = -(-r.prompts * r.group // cut.ranks)
    capacity = r.max_rows * round_up(positions, BLOCK)
    asked = _asked(recipe, rows, 1, most, recipe.judge.max_tokens, positions, capacity)
    return _engine_need(recipe, cut.shape, asked, "judge's weights", "judge's KV cache")


def _asked(recipe: Recipe, rows: int, group: int, longest: int, new: int, context: int, capacity: int) -> EngineDemand:
    most = min(rows, recipe.rollout.max_rows, recipe.rollout.step_tokens, max(1, capacity // BLOCK))
    return EngineDemand(most, -(-rows // group), group, max(1, longest - new), longest, context, capacity)


def _engine_need(recipe: Recipe, shape: DecoderShape, asked: EngineDemand, weights: str, cache: str) -> Need:
    element = element_of(recipe)
    held, besides = kv_cache(shape, asked, element, fixed=on_gpu(recipe))
    working = generation(recipe, shape, asked, element)
    grows = Item("cache while it grows", besides)
    return Need(
        (Item(weights, parameters(shape) * element), Item(cache, held)),
        generation=max((working, (grows,)), key=total),  # not while tokens are computed
    )


def kv_tokens(recipe: Recipe) -> int:
    """Tokens that the KV cache holds."""
    return recipe.rollout.kv_tokens or recipe.rollout.max_rows * recipe.model.context


def micro_tokens(recipe: Recipe, longest: int, ranks: int = 1) -> int:
    """Most tokens of one micro-batch: what the budget allows, and what a step can have on one of so many ranks."""
    w, samples = recipe.supervised, recipe.flow_spec.samples and recipe.algorithm.steps > 0
    rows = recipe.rollout.prompts * recipe.rollout.group if samples else 0
    rows = -(-max(rows, w.batch * recipe.flow_spec.rows if w.steps or w.epochs else 0) // ranks)
    return max(longest, min(recipe.train.micro_tokens, rows * longest))


def _optimizer(recipe: Recipe, cut: ShardFactors) -> int:
    """Tensors of the optimizer's state; Muon's are of the matrices of the blocks, the rest is AdamW's."""
    name = recipe.optimizer.name
    own = cut.blocks if name == "muon" else cut.elements
    return FP32 * (len(OPTIMIZERS[name]) * own + len(OPTIMIZERS["adamw"]) * (cut.elements - own))
