"""Bytes that a model works with: of a micro-batch that is trained on or scored, and of a step of the rollout engine.

Live tensors are counted as torch allocates them, at the moments at which most of them are alive together. Every
sequence is taken to be as long as it can be. What is not known before (how long answers are that are given, how many
groups are left out) is taken at its most.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tilth.config.schema import Recipe
from tilth.plan.kernels import (
    BLOCK,
    CACHED_ELEMENTS,
    CAUSAL_UP_TO,
    CHOICE_ELEMENTS,
    KEYS,
    MASKED_UP_TO,
    PASS,
    PROMPT_WIDTH,
    ROWS,
    chunk_rows,
    grown,
    keeps,
    layouts_until,
    round_up,
    slots_for,
    spare_rows,
)
from tilth.plan.shape import DecoderShape, kv_bytes, layer_width, matrices

FP32 = 4
SLACK = 0.35
"""Of what layers keep and make: what malloc holds besides, after some steps (measured 0.2 to .45)."""
RECOMPUTED = 1.2
"""Layers more that it holds where they are computed again in the backward pass."""
BACKWARD = 0.15
"""Of a layer's activations: their gradients, while it goes backward and they become fewer (measured)."""
MATMUL_WORK = 3
"""Copies of the largest matrix at Muon's step."""
TREES_PAY = 0.9
"""Share of the tokens that sharing prompts must leave, at most, to be done."""
PROMPT_CHUNK = 512
"""Most tokens of one prompt in one forward pass of the engine."""


class Item(NamedTuple):
    """One line of the prediction."""

    name: str
    bytes: int
    host: bool = False
    """In host memory wherever the model is."""


class ShardFactors(NamedTuple):
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
    tokens: int = 1
    """Ranks that the tokens of each row are divided over."""


class LargestMicroBatch(NamedTuple):
    """The largest micro-batch of a phase, in tokens."""

    computed: int
    """That go through the model: a prompt that samples share counts once."""
    seen: int
    """Of all its sequences."""
    chosen: int
    """That logits are computed for, at most."""
    several: bool
    """Whether a step has more than one, so that gradients of earlier ones are there already."""
    temperature: float


def total(items: tuple[Item, ...]) -> int:
    """Bytes of all of them."""
    return sum(item.bytes for item in items)


def element_of(recipe: Recipe) -> int:
    """Bytes of an activation."""
    return 2 if recipe.train.precision == "bf16" else FP32


def on_gpu(recipe: Recipe) -> bool:
    """Whether the recipe names a GPU; what ``auto`` will find is not known here."""
    return recipe.train.device.startswith("cuda")


# ---- micro-batches ----


def micro_batches_of(recipe: Recipe, longest: int, cut: ShardFactors) -> Iterator[LargestMicroBatch]:
    """The largest micro-batch of each phase that the recipe has, on one rank."""
    for micro in _whole_rows(recipe, longest, cut.ranks):
        computed, seen, chosen = (-(-count // cut.tokens) for count in micro[:3])
        yield micro._replace(computed=computed, seen=seen, chosen=chosen)


def _whole_rows(recipe: Recipe, longest: int, ranks: int) -> Iterator[LargestMicroBatch]:
    w, budget = recipe.supervised, recipe.train.micro_tokens
    if w.steps or w.epochs:
        rows = -(-w.batch * recipe.flow_spec.rows // ranks)
        tokens = max(longest, min(budget, rows * longest))
        yield LargestMicroBatch(tokens, tokens, tokens, rows * longest > budget, 1.0)
    if recipe.flow_spec.samples and recipe.algorithm.steps:
        yield _of_samples(recipe, longest, ranks)
    elif not (w.steps or w.epochs):
        yield LargestMicroBatch(longest, longest, longest, False, 1.0)


def _of_samples(recipe: Recipe, longest: int, ranks: int) -> LargestMicroBatch:
    r, how = recipe.rollout, recipe.algorithm
    rows = -(-r.prompts * r.group // (ranks * how.minibatches))
    share, new = _shared(recipe, longest), min(r.max_tokens, longest)
    computed = max(longest, min(recipe.train.micro_tokens, int(rows * longest * share)))
    seen = max(longest, min(int(computed / share), rows * longest))
    chosen = -(-seen * new // longest)
    several = rows * longest * share > recipe.train.micro_tokens
    return LargestMicroBatch(computed, seen, chosen, several, r.temperature or 1.0)


def _shared(recipe: Recipe, longest: int) -> float:
    """Share of the tokens that is computed where samples of a prompt are one tree."""
    if recipe.train.parity or recipe.model.dropout:
        return 1.0
    group, new = recipe.rollout.group, min(recipe.rollout.max_tokens, longest)
    share = (longest - new + group * new) / (group * longest)
    return share if share <= TREES_PAY else 1.0


# ---- layers ----


def layer_bytes(recipe: Recipe, cut: ShardFactors, longest: int, micro: LargestMicroBatch) -> int:
    """That one layer keeps of a micro-batch for its backward pass."""
    element, shape = element_of(recipe), cut.shape
    kept = micro.computed * _saved(recipe, shape, longest, cut.spread, shared=micro.seen > micro.computed)
    if micro.seen > micro.computed:  # keys and values of a prompt are copied to each of its samples
        kept += micro.seen * 2 * shape.num_kv_heads * shape.head_dim
    return kept * element


def _saved(recipe: Recipe, shape: DecoderShape, longest: int, spread: int, *, shared: bool) -> int:
    """Elements that one layer keeps of one token for the backward pass (within 12 % of what torch allocates).

    spread: ranks that the residual stream's tokens are divided over; what both norms give is then gathered besides.
    shared: attention has a mask, since samples share their prompts.
    """
    element = element_of(recipe)
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    normed = layer_width(shape, "norm", "residual")
    residual = 2 * normed // spread + (2 * shape.hidden_size if spread > 1 else 0)  # norms: input, output
    attention = 3 * (query + 2 * key) + 2 * query  # projected, normed, rotated (with halves); mixed, padded and not
    most = 0 if on_gpu(recipe) else (MASKED_UP_TO if shared else CAUSAL_UP_TO)[element]
    scores = shape.num_heads * longest if longest <= most else 0  # plain matmul keeps probabilities, SDPA keeps none
    norms = normed // spread + query + key  # in bf16 they keep one more output each
    inner = 2 * (layer_width(shape, "matrix", "rows") - query)  # what goes up, and what is made of it
    return residual + attention + scores + (0 if element == FP32 else norms) + inner


# ---- the output head ----


def logits_bytes(recipe: Recipe, cut: ShardFactors, rows: int, temperature: float, *, learns: bool) -> int:
    """Of logits, and what is made of them, at the peak: they go through the head in chunks of rows.

    A chunk is there as logits, as log-probs and, but for temperature 1, divided; going forward, so are the log-probs of
    the one before. Where all log-probs together are few they are kept for the backward pass. There, the gradient of a
    chunk has room of its own, and parts that fit a processor's cache (on a GPU: all of it) have two copies.
    """
    vocab, element = cut.shape.vocab_size, element_of(recipe)
    chunk = min(chunk_rows(vocab), rows)
    one, copies = chunk * vocab * FP32, 2 + (temperature != 1)
    weight = 0 if element == FP32 else vocab * cut.shape.hidden_size * element
    keep = learns and keeps(rows, vocab)
    kept = rows * vocab * FP32 if keep else 0
    forward = (max(0, kept - one) if keep else one * (rows > chunk)) + copies * one + weight
    if not learns:
        return forward
    parts = 2 * (chunk * vocab if on_gpu(recipe) else min(CACHED_ELEMENTS, chunk * vocab)) * FP32
    filled = kept + parts if keep else max(copies * one, one + parts)
    return max(forward, filled + chunk * vocab * element + 2 * weight)


# ---- a step of training ----


def training(recipe: Recipe, cut: ShardFactors, longest: int, *, head: bool = True) -> tuple[Item, ...]:
    """Working set, gradients included, of the moment of a step that needs most. head: whether there are logits."""
    moments = [
        moment for m in micro_batches_of(recipe, longest, cut) for moment in _moments(recipe, cut, longest, m, head)
    ]
    return max(moments, key=total)


def _moments(
    recipe: Recipe, cut: ShardFactors, longest: int, micro: LargestMicroBatch, head: bool
) -> Iterator[tuple[Item, ...]]:
    """The loss; the first layer that goes backward; the embedding; the optimizer.

    The gradient of the head exists from the loss on: beside that of earlier micro-batches, and, where it is the
    embedding's too, until the embedding has its own.
    """
    shape, own = cut.shape, cut.elements * FP32
    layer, table = layer_bytes(recipe, cut, longest, micro), shape.vocab_size * shape.hidden_size * FP32
    kept, slack = _kept(recipe, cut, micro, layer)
    before, flying = own if micro.several else 0, table if head else 0
    others = 2 * cut.gathered * FP32
    weights = (
        Item("weights cast to the compute dtype", _cast(recipe, shape)),
        *([Item("parameters and gradients of other ranks", others)] if others else ()),
    )
    inside = (Item("slack of the allocator", slack), *weights)
    logits = logits_bytes(recipe, cut, micro.chosen, micro.temperature, learns=True) if head else 0
    yield Item("gradients", before + flying), Item("activations", kept), Item("logits", logits), *inside
    yield Item("gradients", before + flying), Item("activations", kept + int(BACKWARD * layer)), *inside
    last = own + (flying if shape.tie_embeddings else 0) + (table if micro.several else 0)
    yield Item("gradients", last), Item("activations", int(BACKWARD * layer)), *inside
    largest = max(shape.hidden_size, shape.num_heads * shape.head_dim) * max(shape.intermediate_size, shape.hidden_size)
    scratch = MATMUL_WORK * FP32 * largest if recipe.optimizer.name == "muon" else 0
    yield Item("gradients", own), Item("scratch of the optimizer", scratch), *inside


def _kept(recipe: Recipe, cut: ShardFactors, micro: LargestMicroBatch, layer: int) -> tuple[int, int]:
    """What all layers keep of a micro-batch, and the allocator's slack."""
    made = cut.shape.num_layers * layer
    if not recipe.train.checkpointing:
        return made, int(SLACK * made)
    tokens = -(-micro.computed // cut.spread)
    inputs = cut.shape.num_layers * tokens * cut.shape.hidden_size * element_of(recipe)
    return inputs + layer, int(SLACK * made + RECOMPUTED * layer)


def _cast(recipe: Recipe, shape: DecoderShape) -> int:
    """Matrices in the compute dtype are kept for the backward pass; of layers that are computed again, one's are."""
    if element_of(recipe) == FP32:
        return 0
    return matrices(shape) * element_of(recipe) // (shape.num_layers if recipe.train.checkpointing else 1)


def scoring(recipe: Recipe, cut: ShardFactors, longest: int, *, head: bool = True) -> tuple[Item, ...]:
    """Working set of a pass without gradients. head: whether there are logits."""
    found = []
    for micro in micro_batches_of(recipe, longest, cut):
        layer = layer_bytes(recipe, cut, longest, micro)
        logits = logits_bytes(recipe, cut, micro.chosen, micro.temperature, learns=False) if head else 0
        working = [Item("activations of scoring", layer), Item("slack of the allocator", int(SLACK * layer))]
        working += [Item("parameters of other ranks", cut.gathered * FP32)] if cut.gathered else []
        found.append((*working, *([Item("logits", logits)] if head else [])))
    return max(found, key=total)


# ---- the rollout engine ----


class EngineDemand(NamedTuple):
    """What an engine is asked for at once, at most."""

    rows: int
    """Sequences that decode together."""
    prompts: int
    """Different prompts, of all that it is asked for."""
    group: int
    """Samples of a prompt."""
    prompt: int
    """Tokens of the longest prompt."""
    longest: int
    """Tokens of the longest sequence."""
    context: int
    kv_tokens: int
    """Accounted capacity of its cache."""

    @property
    def computed(self) -> int:
        """Prompts that are computed at once."""
        return min(self.prompts, -(-self.rows // self.group), max(1, PASS // self.prompt))


def kv_cache(shape: DecoderShape, asked: EngineDemand, element: int, *, fixed: bool) -> tuple[int, int]:
    """Bytes of the KV cache when all sequences are long, and of what is there besides while it grows for the last time.

    Rows of each lane that a sequence goes through, prompts on their way into them, and the store of shared prefixes;
    each in buffers with one spare. fixed: as on a GPU.
    """
    token, spare = kv_bytes(shape, element), 1 + 1 / (2 * shape.num_layers)
    held = besides = 0
    for slots in layouts_until(asked.prompt, asked.longest, asked.context, fixed):
        size = before = 0
        for need in slots:
            before, size = (size, grown(size, need)) if need > size else (before, size)
        held, besides = held + asked.rows * size, max(besides, asked.rows * before)
    width = round_up(asked.prompt + PROMPT_WIDTH, KEYS)
    staged = asked.computed * width
    doubled = 1 << (asked.prompts - 1).bit_length()
    stored = min(asked.prompt // BLOCK * BLOCK * doubled, asked.kv_tokens // 4)
    return int((held + staged + stored) * token * spare), int(besides * token * spare)


def generation(recipe: Recipe, shape: DecoderShape, asked: EngineDemand, element: int) -> tuple[Item, ...]:
    """Working set of a step of the engine, which computes prompts or decodes; ``besides`` of its cache left out."""
    chunk = PROMPT_CHUNK if asked.prompt > PROMPT_CHUNK else asked.computed * asked.prompt
    tokens = max(asked.rows, min(recipe.rollout.step_tokens, chunk))
    widest = max(2 * shape.intermediate_size, 6 * shape.num_heads * shape.head_dim) + 2 * shape.hidden_size
    pairs = max(min(tokens, chunk) * asked.prompt, asked.rows * slots_for(asked.longest))
    scores = 0 if on_gpu(recipe) else 2 * shape.num_heads * pairs
    return (
        Item("activations of generation", (tokens * widest + scores) * element),
        Item("logits of generation", _choice(recipe, shape.vocab_size, asked)),
    )


def _choice(recipe: Recipe, vocab: int, asked: EngineDemand) -> int:
    """Logits while tokens are chosen: of the rows that decode; or of first tokens, beside those of their prompts.

    Logits, log-probs and these filled up to groups of tokens; one more on a GPU (probabilities of all rows) and where a
    filter is, five where the vocabulary must be sorted for top-p.
    """
    r = recipe.rollout
    more = 5 if r.top_p < 1 and not r.top_k else int(bool(r.top_k or r.min_p or r.top_p < 1))
    first = min(asked.rows, max(1, CHOICE_ELEMENTS // vocab))
    decoding = round_up(asked.rows, ROWS) * (2 + on_gpu(recipe) + (more or r.temperature not in (0, 1)))
    prompts = asked.computed + spare_rows(asked.computed)
    return max(decoding, prompts + first * (3 + more)) * vocab * FP32
