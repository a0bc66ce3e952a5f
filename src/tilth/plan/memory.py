"""Peak memory of a run, or of one worker of it, predicted item by item from shapes and the recipe."""

from collections.abc import Sequence
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
_LOGITS = "logits chunk"
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


class Cut(NamedTuple):
    """What of a model one rank has; in elements."""

    elements: int
    """Of the parameters that it holds."""
    gathered: int
    """Of the parameters of other ranks that it has too while it computes; while it trains, as many of gradients."""
    shape: DecoderShape
    """Of what it computes with: under tp, its heads and its part of the MLP and the vocabulary."""
    blocks: int
    """Of the matrices of the blocks that it holds."""
    spread: int = 1
    """Ranks that the tokens of the residual stream are divided over."""
    ranks: int = 1
    """Ranks that the rows of a batch are divided over."""
    copies: int = 1
    """Ranks that hold the same, of which each saves a share."""


class Need(NamedTuple):
    """What a role needs on one rank."""

    held: tuple[Item, ...]
    gradients: int = 0
    """Bytes; roles of one worker take turns, and forget theirs after a step."""
    training: tuple[Item, ...] = ()
    generation: tuple[Item, ...] = ()


def predict(recipe: Recipe, shape: DecoderShape, longest: int, base: int = BASE, *, generates: bool = True) -> Memory:
    """Of a run in one process in which a sequence has at most ``longest`` tokens, prompt and completion together.

    generates: whether the run has a rollout engine.
    """
    whole = Cut(parameters(shape), 0, shape, matrices(shape))
    needs = [policy_need(recipe, whole, longest)]
    if recipe.facts.critic:
        needs.append(critic_need(recipe, whole._replace(elements=value_parameters(shape)), longest))
    if generates:
        needs.append(rollout_need(recipe, shape))
    if recipe.refers:
        needs.append(reference_need(recipe, whole, longest))
    return together(needs, base)


def together(needs: Sequence[Need], base: int = BASE) -> Memory:
    """Of one process with these roles, which take turns."""
    gradients = Item("gradients", max((need.gradients for need in needs), default=0))
    held = [Item("interpreter and libraries", base), *([gradients] if gradients.bytes else [])]
    held += [item for need in needs for item in need.held]
    training = max((need.training for need in needs), key=_total, default=())
    generation = max((need.generation for need in needs), key=_total, default=())
    return Memory(tuple(held), training, generation)


def policy_need(recipe: Recipe, cut: Cut, longest: int) -> Need:
    """Of the policy's part on one rank."""
    own = cut.elements * _FP32
    held = [Item("parameters", own), Item("optimizer state", _optimizer(recipe, cut))]
    if recipe.train.ema:
        held.append(Item("average of the weights", own))
    held += _saved_copy(recipe, cut, held, "copy being saved")
    if "noise_scale" in recipe.train.watch:
        held.append(Item("gradients of one micro-batch", own))
    return Need(tuple(held), own, _training(recipe, cut, longest))


def _saved_copy(recipe: Recipe, cut: Cut, state: Sequence[Item], name: str) -> list[Item]:
    """The host memory from which a checkpoint is written while training goes on."""
    return [Item(name, _total(tuple(state)) // cut.copies)] if recipe.run.save_background else []


def critic_need(recipe: Recipe, cut: Cut, longest: int) -> Need:
    """Of the critic's part on one rank. cut: of the value model, which has no logits."""
    own = cut.elements * _FP32
    state = Item("critic's optimizer state", _optimizer(recipe, cut))
    training = tuple(item for item in _training(recipe, cut, longest) if item.name != _LOGITS)
    held = [Item("critic's parameters", own), state]
    return Need((*held, *_saved_copy(recipe, cut, held, "critic's copy being saved")), own, training)


def reference_need(recipe: Recipe, cut: Cut, longest: int) -> Need:
    """Of the reference's part on one rank, which scores and never learns."""
    layer = _layer(recipe, cut, longest)
    working = [Item("activations of scoring", layer), Item("slack of the allocator", int(SLACK * layer))]
    if cut.gathered:
        working.append(Item("parameters of other ranks", cut.gathered * _FP32))
    logits = Item(_LOGITS, _logits(recipe, cut, longest))
    held = [Item("reference model", cut.elements * _FP32)]
    copy = _saved_copy(recipe, cut, held, "reference's copy being saved")
    return Need((*held, *copy), training=(*working, logits))


def reward_model_need(recipe: Recipe, cut: Cut, longest: int) -> Need:
    """Of a reward model's part on one rank, which scores and never learns; it has no logits and is not saved."""
    found = reference_need(recipe, cut, longest)
    return Need(
        (Item("reward model", cut.elements * _FP32),), training=tuple(i for i in found.training if i.name != _LOGITS)
    )


def rollout_need(recipe: Recipe, shape: DecoderShape) -> Need:
    """Of an engine with a whole copy of the model."""
    element = _element(recipe)
    copy = Item("engine's copy of the weights", parameters(shape) * element)
    cache = Item("KV cache", kv_tokens(recipe) * kv_bytes(shape, element))
    return Need((copy, cache), generation=_generation(recipe, shape, element))


def value_parameters(shape: DecoderShape) -> int:
    """Parameters of a value model on this shape: the decoder without an output head, a row and a bias for the value."""
    head = 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    return parameters(shape) - head + shape.hidden_size + 1


def kv_tokens(recipe: Recipe) -> int:
    """Tokens that the KV cache holds."""
    return recipe.rollout.kv_tokens or recipe.rollout.max_rows * recipe.model.context


def micro_tokens(recipe: Recipe, longest: int, ranks: int = 1) -> int:
    """Most tokens of one micro-batch: what the budget allows, and what a step can have on one of so many ranks."""
    w, samples = recipe.supervised, recipe.facts.samples and recipe.algorithm.steps > 0
    rows = recipe.rollout.prompts * recipe.rollout.group if samples else 0
    rows = -(-max(rows, w.batch * recipe.facts.rows if w.steps or w.epochs else 0) // ranks)
    return max(longest, min(recipe.train.micro_tokens, rows * longest))


def _element(recipe: Recipe) -> int:
    """Bytes of an activation."""
    return 2 if recipe.train.precision == "bf16" else _FP32


def _optimizer(recipe: Recipe, cut: Cut) -> int:
    """AdamW keeps two moments of each parameter; Muon one, of the matrices of the blocks."""
    return _FP32 * (2 * cut.elements - (cut.blocks if recipe.optimizer.name == "muon" else 0))


def _training(recipe: Recipe, cut: Cut, longest: int) -> tuple[Item, ...]:
    shape, element = cut.shape, _element(recipe)
    layer = _layer(recipe, cut, longest)
    kept = shape.num_layers * layer
    if recipe.train.checkpointing:
        tokens = -(-micro_tokens(recipe, longest, cut.ranks) // cut.spread)
        kept = shape.num_layers * tokens * shape.hidden_size * element + layer
    cast = matrices(shape) * element if element != _FP32 else 0
    kept += layer // 2  # while one layer goes backward, the gradients of its activations are alive beside them
    others = 2 * cut.gathered * _FP32
    return (
        Item("activations", kept),
        Item("slack of the allocator", int(SLACK * kept)),
        Item("weights cast to the compute dtype", cast),
        Item(_LOGITS, _logits(recipe, cut, longest)),
        *([Item("parameters and gradients of other ranks", others)] if others else ()),
    )


def _layer(recipe: Recipe, cut: Cut, longest: int) -> int:
    """Bytes that one layer keeps of a micro-batch."""
    element = _element(recipe)
    return micro_tokens(recipe, longest, cut.ranks) * _saved(cut.shape, longest, element, cut.spread) * element


def _logits(recipe: Recipe, cut: Cut, longest: int) -> int:
    tokens = micro_tokens(recipe, longest, cut.ranks)
    return min(LOGITS, tokens * cut.shape.vocab_size) * _FP32 * _ALIVE_LOGITS


def _saved(shape: DecoderShape, longest: int, element: int, spread: int = 1) -> int:
    """Elements that one layer keeps of one token for the backward pass (within 12 % of what torch allocates).

    spread: ranks that the residual stream's tokens are divided over; what both norms give is then gathered besides.
    """
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = 4 * shape.hidden_size // spread + (2 * shape.hidden_size if spread > 1 else 0)  # norms: input, output
    attention = 3 * (query + 2 * key) + 2 * query  # projected, normed, rotated (with halves); mixed, padded and not
    scores = shape.num_heads * min(longest, 256)  # the probabilities of plain matmul attention; SDPA keeps none
    unfused = (
        0 if element == _FP32 else 2 * shape.hidden_size // spread + query + key
    )  # norms keep one more output each
    return residual + attention + scores + unfused + 4 * shape.intermediate_size  # gate, silu, up, product


def _generation(recipe: Recipe, shape: DecoderShape, element: int) -> tuple[Item, ...]:
    r = recipe.rollout
    widest = max(2 * shape.intermediate_size, 6 * shape.num_heads * shape.head_dim) + 2 * shape.hidden_size
    return (
        Item("activations of generation", r.step_tokens * widest * element),
        Item("logits of generation", r.max_rows * shape.vocab_size * _FP32 * _ALIVE_LOGITS),
    )
