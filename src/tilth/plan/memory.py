"""Peak memory of a one-process run, predicted item by item from shapes and the recipe."""

from typing import NamedTuple

from tilth.config.schema import Recipe
from tilth.plan.shape import DecoderShape, kv_bytes, matrices, parameters

BASE = 340 * 2**20
"""Interpreter, torch, pyarrow, the other libraries and a million prompts, before the first tensor (measured)."""
LOGITS = 2**21
"""Most logits alive at once in training (a chunk of models.logprobs)."""
SLACK = 0.25
"""Of the activations: what the C library's allocator holds besides (measured 0 to 0.5; more with checkpointing)."""
_FP32 = 4
_ALIVE_LOGITS = 3
"""Copies of a chunk of logits at its peak: logits, log-softmax, and the gradient or a sorted copy."""


class Item(NamedTuple):
    """One line of the prediction."""

    name: str
    bytes: int


class Memory(NamedTuple):
    """Predicted peak. Training and generation take turns, so of their working sets only the greater counts."""

    held: tuple[Item, ...]
    """There all the time."""
    training: tuple[Item, ...]
    """While a micro-batch is in flight."""
    generation: tuple[Item, ...]
    """While the engine steps."""

    @property
    def items(self) -> tuple[Item, ...]:
        """What makes up the peak."""
        return self.held + max(self.training, self.generation, key=_total)

    @property
    def peak(self) -> int:
        """Bytes."""
        return _total(self.items)


def _total(items: tuple[Item, ...]) -> int:
    return sum(item.bytes for item in items)


def predict(recipe: Recipe, shape: DecoderShape, longest: int, base: int = BASE, *, generates: bool = True) -> Memory:
    """Of a run in which a sequence has at most ``longest`` tokens, prompt and completion together.

    generates: whether the run has a rollout engine.
    """
    element = 2 if recipe.train.precision == "bf16" else _FP32
    count, critic = parameters(shape), value_parameters(shape) if recipe.flow == "ppo" else 0
    held = [
        Item("interpreter and libraries", base),
        Item("parameters", count * _FP32),
        Item("gradients", max(count, critic) * _FP32),  # policy and critic take turns, and forget theirs after a step
        Item("optimizer state", _optimizer(recipe, shape, count)),
    ]
    if recipe.train.ema:
        held.append(Item("average of the weights", count * _FP32))
    if "noise_scale" in recipe.train.watch:
        held.append(Item("gradients of one micro-batch", count * _FP32))
    if critic:
        held.append(Item("critic's parameters", critic * _FP32))
        held.append(Item("critic's optimizer state", _optimizer(recipe, shape, critic)))
    if generates:
        held.append(Item("engine's copy of the weights", count * element))
        held.append(Item("KV cache", kv_tokens(recipe) * kv_bytes(shape, element)))
    if recipe.algorithm.kl_coef and recipe.flow in ("grpo", "ppo"):
        held.append(Item("reference model", count * _FP32))
    generation = _generation(recipe, shape, element) if generates else ()
    return Memory(tuple(held), _training(recipe, shape, longest, element), generation)


def value_parameters(shape: DecoderShape) -> int:
    """Parameters of a value model on this shape: the decoder without an output head, a row and a bias for the value."""
    head = 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    return parameters(shape) - head + shape.hidden_size + 1


def kv_tokens(recipe: Recipe) -> int:
    """Tokens that the KV cache holds."""
    return recipe.rollout.kv_tokens or recipe.rollout.max_rows * recipe.model.context


def micro_tokens(recipe: Recipe, longest: int) -> int:
    """Most tokens of one micro-batch: what the budget allows, and what a step can have."""
    w, samples = recipe.supervised, recipe.flow in ("grpo", "ppo") and recipe.algorithm.steps > 0
    rows = recipe.rollout.prompts * recipe.rollout.group if samples else 0
    rows = max(rows, w.batch if w.steps or w.epochs else 0)
    return max(longest, min(recipe.train.micro_tokens, rows * longest))


def _optimizer(recipe: Recipe, shape: DecoderShape, count: int) -> int:
    """AdamW keeps two moments of each of ``count`` parameters; Muon one, of the matrices of the blocks."""
    blocks = matrices(shape) if recipe.optimizer.name == "muon" else 0
    return _FP32 * (2 * count - blocks)


def _training(recipe: Recipe, shape: DecoderShape, longest: int, element: int) -> tuple[Item, ...]:
    tokens = micro_tokens(recipe, longest)
    layer = tokens * _saved(shape, longest, element) * element
    kept = shape.num_layers * layer
    if recipe.train.checkpointing:
        kept = shape.num_layers * tokens * shape.hidden_size * element + layer
    cast = matrices(shape) * element if element != _FP32 else 0
    logits = min(LOGITS, tokens * shape.vocab_size) * _FP32 * _ALIVE_LOGITS
    kept += layer // 2  # while one layer goes backward, the gradients of its activations are alive beside them
    return (
        Item("activations", kept),
        Item("slack of the allocator", int(SLACK * kept)),
        Item("weights cast to the compute dtype", cast),
        Item("logits chunk", logits),
    )


def _saved(shape: DecoderShape, longest: int, element: int) -> int:
    """Elements that one layer keeps of one token for the backward pass (within 12 % of what torch allocates)."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = 4 * shape.hidden_size  # both norms: input and output
    attention = 3 * (query + 2 * key) + 2 * query  # projected, normed, rotated (with halves); mixed, padded and not
    scores = shape.num_heads * min(longest, 256)  # the probabilities of plain matmul attention; SDPA keeps none
    unfused = 0 if element == _FP32 else 2 * shape.hidden_size + query + key  # norms keep one more output each
    return residual + attention + scores + unfused + 4 * shape.intermediate_size  # gate, silu, up, product


def _generation(recipe: Recipe, shape: DecoderShape, element: int) -> tuple[Item, ...]:
    r = recipe.rollout
    widest = max(2 * shape.intermediate_size, 6 * shape.num_heads * shape.head_dim) + 2 * shape.hidden_size
    return (
        Item("activations of generation", r.step_tokens * widest * element),
        Item("logits of generation", r.max_rows * shape.vocab_size * _FP32 * _ALIVE_LOGITS),
    )
