"""Working sets in bytes: of a training or scoring micro-batch, and of a step of the rollout engine.

Live tensors are counted as torch allocates them, at the moments with the most of them alive. Every sequence counts at
its maximum length, and unknown amounts (lengths of given answers, dropped groups) at their maximum.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tilth.config.open_sets import OPTIMIZERS
from tilth.config.schema import Recipe
from tilth.plan.kernels import (
    BLOCK,
    CACHED_ELEMENTS,
    CAUSAL_UP_TO,
    CHOICE_ELEMENTS,
    DRAFT_WIDTH,
    HEAD_SPAN,
    KEYS,
    MASKED_UP_TO,
    PAGE,
    PASS,
    PROMPT_WIDTH,
    ROWS,
    chunk_rows,
    gradient_columns,
    grown,
    keeps,
    layouts_until,
    round_up,
    slots_for,
)
from tilth.plan.offload import HostRates, OffloadLimits, ratios
from tilth.plan.shape import DecoderShape, cached_widths, kv_bytes, layer_width, matrices, parameters, routing_bytes

FP32 = 4
SLACK = 0.35
"""Share of the layers' activations that malloc holds in addition after some steps (measured 0.2 to 0.45)."""
RECOMPUTED = 1.2
"""Additional layers that malloc holds under activation checkpointing."""
BACKWARD = 0.15
"""Share of a layer's activations that their gradients need in its backward pass (measured)."""
MATMUL_WORK = {"fp32": 4, "bf16": 3}
"""Copies of the largest matrix in Muon's step, in fp32, by its precision."""
TREES_PAY = 0.9
"""Maximum share of the tokens left by prompt sharing for which samples share their prompt."""
PROMPT_CHUNK = 512
"""Maximum tokens of one prompt in one forward pass of the engine."""


class Item(NamedTuple):
    """One line of the prediction."""

    name: str
    bytes: int
    host: bool = False
    """True: in host memory, wherever the model is."""


class StagePart(NamedTuple):
    """Part of a model on one stage of a pipeline."""

    layers: int
    first: bool
    last: bool
    flights: float
    """Micro-batches whose activations it holds at the same time, if there are enough of them."""
    late: float
    """Micro-batches besides whose gradients of matrices it has still to compute then."""


class ShardFactors(NamedTuple):
    """One rank's part of a model, in elements."""

    elements: int
    """Parameters that the rank holds."""
    gathered: int
    """Parameters of other ranks that it gathers to compute; in training, as many gradients."""
    shape: DecoderShape
    """Shape that it computes with: under tp, its heads and its part of the MLP and the vocabulary."""
    blocks: int
    """Elements of block matrices that it holds."""
    spread: int = 1
    """Ranks that divide the tokens of the residual stream."""
    ranks: int = 1
    """Ranks that divide the rows of a batch."""
    copies: int = 1
    """Ranks with the same parameters, each of which saves a share."""
    tokens: int = 1
    """Ranks that divide the tokens of each row."""
    experts: int = 0
    """Elements of experts that it holds."""
    divided: int = 0
    """Elements of block matrices that it holds, but for experts that are divided between matrices alone."""
    stage: StagePart | None = None
    """Its stage of a pipeline; None: it has all layers."""
    ring: bool = False
    """True: keys of other ranks visit it, and its attention keeps no probabilities."""
    adapters: int = 0
    """Elements of adapters that it holds, which are then learned instead of ``elements``."""
    updates: tuple[int, int] = 1, 1
    """Ranks that divide the updates of its parameters, and of its experts."""
    units: int = 1
    """Ranks of which a row is on as many as it takes."""
    drafter: DecoderShape | None = None
    """Shape of the model that drafts for an engine; None: there is none."""

    @property
    def learned(self) -> int:
        """Elements with gradients and optimizer state."""
        return self.adapters or self.elements

    @property
    def updated(self) -> int:
        """Elements that the rank updates: with optimizer state and average."""
        (ranks, of_experts), experts = self.updates, 0 if self.adapters else self.experts
        return -(-(self.learned - experts) // ranks) + -(-experts // of_experts)

    @property
    def layers(self) -> int:
        """Layers that the rank has."""
        return self.shape.num_layers if self.stage is None else self.stage.layers

    @property
    def head(self) -> bool:
        """True if the rank computes logits or values."""
        return self.stage is None or self.stage.last

    @property
    def table(self) -> int:
        """Elements of the embedding or head that the rank computes with."""
        here = self.stage is None or self.stage.last or self.stage.first
        return self.shape.vocab_size * self.shape.hidden_size * here


class LargestMicroBatch(NamedTuple):
    """Largest micro-batch of a phase, in tokens."""

    computed: int
    """Tokens through the model: a prompt that samples share counts once."""
    seen: int
    """Tokens of all its sequences."""
    chosen: int
    """Maximum tokens with logits."""
    several: bool
    """True if a step has several micro-batches, so that gradients of earlier ones exist."""
    temperature: float


def total(items: tuple[Item, ...]) -> int:
    """Sum the bytes of items."""
    return sum(item.bytes for item in items)


def element_of(recipe: Recipe) -> int:
    """Return bytes per element of activations."""
    return 2 if recipe.train.precision == "bf16" else FP32


def with_device(recipe: Recipe) -> Recipe:
    """Return the recipe with the device type that ``train.device=auto`` has on this machine."""
    if recipe.train.device != "auto":
        return recipe
    import torch  # where a recipe leaves it open

    return recipe.replaced("train", device="cuda" if torch.cuda.is_available() else "cpu")


def on_gpu(recipe: Recipe) -> bool:
    """True if the recipe names a GPU; the device of ``auto`` is that of ``with_device``."""
    return recipe.train.device.startswith("cuda")


# ---- micro-batches ----


def micro_batches_of(recipe: Recipe, longest: int, cut: ShardFactors) -> Iterator[LargestMicroBatch]:
    """Yield the largest micro-batch of each phase of the recipe, on one rank."""
    parts = cut.tokens * spread_over(recipe, longest, cut.units)
    for micro in _whole_rows(recipe, longest, cut.ranks, cut.tokens * cut.units > 1):
        computed, seen, chosen = (-(-count // parts) for count in micro[:3])
        yield micro._replace(computed=computed, seen=seen, chosen=chosen)


def spread_over(recipe: Recipe, longest: int, units: int) -> int:
    """Return how many of ``units`` ranks take a row of this length."""
    return min(units, max(1, -(-longest // recipe.train.micro_tokens)))


def _whole_rows(recipe: Recipe, longest: int, ranks: int, divided: bool) -> Iterator[LargestMicroBatch]:
    w, budget = recipe.supervised, recipe.train.micro_tokens
    if w.steps or w.epochs:
        rows = -(-w.batch * recipe.flow_spec.rows // ranks)
        tokens = max(longest, min(budget, rows * longest))
        chosen = tokens - tokens // longest  # a sequence's first token has no logits
        yield LargestMicroBatch(tokens, tokens, chosen, rows * longest > budget, 1.0)
    if recipe.flow_spec.samples and recipe.algorithm.steps:
        yield _of_samples(recipe, longest, ranks, divided)
    elif not (w.steps or w.epochs):
        yield LargestMicroBatch(longest, longest, longest, False, 1.0)


def _of_samples(recipe: Recipe, longest: int, ranks: int, divided: bool) -> LargestMicroBatch:
    r, how = recipe.rollout, recipe.algorithm
    rows = -(-r.prompts * r.group // (ranks * how.minibatches))
    share, new = 1.0 if divided else _shared(recipe, longest), min(written(recipe), longest)
    computed = max(longest, min(recipe.train.micro_tokens, int(rows * longest * share)))
    seen = max(longest, min(int(computed / share), rows * longest))
    chosen = -(-seen * new // longest)
    several = rows * longest * share > recipe.train.micro_tokens
    return LargestMicroBatch(computed, seen, chosen, several, r.temperature or 1.0)


def written(recipe: Recipe) -> int:
    """Return the most tokens that the policy writes in a sample."""
    return recipe.rollout.max_tokens * (recipe.rollout.turns if recipe.rollout.environment else 1)


def _shared(recipe: Recipe, longest: int) -> float:
    """Return the share of tokens that is computed if the samples of a prompt share it."""
    if recipe.train.parity or recipe.model.dropout or recipe.policy.lora.dropout or recipe.rollout.environment:
        return 1.0  # of episodes: what environments say is each one's own
    group, new = recipe.rollout.group, min(recipe.rollout.max_tokens, longest)
    share = (longest - new + group * new) / (group * longest)
    return share if share <= TREES_PAY else 1.0


# ---- layers ----


def layer_bytes(recipe: Recipe, cut: ShardFactors, longest: int, micro: LargestMicroBatch) -> int:
    """Return the bytes that one layer keeps of a micro-batch for its backward pass."""
    element, shape = element_of(recipe), cut.shape
    kept = micro.computed * _saved(recipe, cut, longest, shared=micro.seen > micro.computed)
    if micro.seen > micro.computed:  # keys and values of a prompt are copied to each of its samples
        kept += micro.seen * shape.num_kv_heads * (shape.head_dim + shape.value_dim)
    return kept * element


def _saved(recipe: Recipe, cut: ShardFactors, longest: int, *, shared: bool) -> int:
    """Return elements that one layer keeps of one token for the backward pass (within 12 % of torch's allocation).
    Where ranks divide the residual stream's tokens, the outputs of both norms are gathered in addition. shared:
    attention has a mask, since samples share their prompts."""
    element, shape, spread = element_of(recipe), cut.shape, cut.spread
    query, mixed = shape.num_heads * shape.head_dim, shape.num_heads * shape.value_dim
    key, value = shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_dim
    normed = layer_width(shape, "norm", "residual")
    residual = 2 * normed // spread + (2 * shape.hidden_size if spread > 1 else 0)  # norms: input, output
    attention = 3 * (query + key + value) + 2 * mixed  # projected, normed, rotated (with halves); mixed, padded and not
    most = 0 if on_gpu(recipe) else (MASKED_UP_TO if shared else CAUSAL_UP_TO)[element]
    plain = longest <= most and not cut.ring  # matmul and softmax, which keep probabilities
    scores = shape.num_heads * longest if plain else 0
    norms = normed // spread + query + key  # in bf16 they keep one more output each
    inner = 2 * (layer_width(shape, "matrix", "rows") - query) if shape.dense_layers else 0  # goes up; is made of it
    if shape.expert_layers:
        inner = max(inner, _saved_by_experts(shape, query))
    return residual + attention + scores + (0 if element == FP32 else norms) + inner


def _saved_by_experts(shape: DecoderShape, query: int) -> int:
    """Return elements that a block of experts keeps of one token. What goes up and is made of it, rows and results of
    its pairs with experts, the router's logits, scores and choice."""
    width = 2 * (layer_width(shape, "matrix", "rows", experts=True) - query)
    return width + 2 * shape.experts_per_token * shape.hidden_size + 3 * shape.num_experts


# ---- the output head ----


def logits_bytes(recipe: Recipe, cut: ShardFactors, rows: int, temperature: float, *, learns: bool) -> int:
    """Return peak bytes of logits and their derivatives, which are computed in chunks of rows.

    A chunk exists as logits, as log-probs and, unless the temperature is 1, scaled; in the forward pass the log-probs
    of the previous chunk exist too. If all log-probs together are small they are kept for the backward pass, where a
    chunk's gradient has its own buffer and parts of the size of a CPU's cache (on a GPU: all of it) have two copies.
    Where a kernel computes the head there are no logits: see ``_without_logits``.
    """
    if _head_by_kernel(recipe):
        return _without_logits(recipe, cut, rows, learns=learns)
    vocab, element = cut.shape.vocab_size, element_of(recipe)
    chunk = min(chunk_rows(vocab, gpu=on_gpu(recipe)), rows)
    one, copies = chunk * vocab * FP32, 2 + (temperature != 1)
    weight = 0 if learns and _keeps_casts(recipe, cut) else _head(recipe, cut)
    keep = learns and keeps(rows, vocab)
    kept = rows * vocab * FP32 if keep else 0
    forward = (max(0, kept - one) if keep else one * (rows > chunk)) + copies * one + weight
    if not learns:
        return forward
    parts = 2 * (chunk * vocab if on_gpu(recipe) else min(CACHED_ELEMENTS, chunk * vocab)) * FP32
    filled = kept + parts if keep else max(copies * one, one + parts)
    return max(forward, filled + chunk * vocab * element + 2 * weight)


def _head_by_kernel(recipe: Recipe) -> bool:
    """Return True if a kernel computes the head (``models.kernels``)."""
    if not on_gpu(recipe) or element_of(recipe) == FP32:
        return False
    from tilth.core.device import gpus_run_triton  # here: it imports torch

    return gpus_run_triton()


def _without_logits(recipe: Recipe, cut: ShardFactors, rows: int, *, learns: bool) -> int:
    """Return peak bytes of the kernel: statistics of each part of the vocabulary, then gradients of a part of the
    logits, of the hidden states in fp32, and what this part adds to them or gives to the weight."""
    vocab, width, element = cut.shape.vocab_size, cut.shape.hidden_size, element_of(recipe)
    weight = 0 if learns and _keeps_casts(recipe, cut) else _head(recipe, cut)
    numbers = 5 * rows * FP32  # of a row
    forward = numbers * (-(-vocab // HEAD_SPAN) + 1) + weight
    if not learns:
        return forward
    columns = gradient_columns(rows, vocab)
    backward = 2 * numbers + rows * columns * element + rows * width * FP32 + max(rows, columns) * width * element
    return max(forward, backward + weight)


# ---- a step of training ----


def training(recipe: Recipe, cut: ShardFactors, longest: int, *, head: bool = True) -> tuple[Item, ...]:
    """Return the working set, gradients included, of a step's peak. head: False for a model without logits."""
    own = head and cut.head
    moments = [
        moment for m in micro_batches_of(recipe, longest, cut) for moment in _moments(recipe, cut, longest, m, own)
    ]
    return max(moments, key=total)


def _moments(
    recipe: Recipe, cut: ShardFactors, longest: int, micro: LargestMicroBatch, head: bool
) -> Iterator[tuple[Item, ...]]:
    """Yield the working sets of four moments: loss, backward of the last layer, of the embedding, optimizer. The
    gradient of the head exists from the loss on: beside that of earlier micro-batches and, with tied embeddings, until
    the embedding's gradient is added."""
    shape, own = cut.shape, cut.learned * FP32
    layer, table = layer_bytes(recipe, cut, longest, micro), 0 if cut.adapters else cut.table * FP32
    kept, slack = _kept(recipe, cut, micro, layer, longest)
    before, flying = own if micro.several else 0, table if head else 0
    others = (1 if cut.adapters else 2) * cut.gathered * FP32
    weights = (
        Item("weights cast to the compute dtype", _cast(recipe, cut, head)),
        *([Item("parameters and gradients of other ranks", others)] if others else ()),
    )
    inside = (Item("slack of the allocator", slack), *weights)
    logits = logits_bytes(recipe, cut, micro.chosen, micro.temperature, learns=True) if head else 0
    moved = int(_moved(recipe, cut, micro) * kept * (cut.layers - 1) / cut.layers)  # the last layer's stay
    there = (Item("activations on the host", moved, host=True),) if moved else ()
    here = kept - moved + (layer if moved else 0)  # one on its way is in both places
    yield Item("gradients", before + flying), Item("activations", here), *there, Item("logits", logits), *inside
    used = Item("activations", here + int(BACKWARD * layer))
    yield Item("gradients", before + flying), used, *there, *inside
    last = own + (flying if shape.tie_embeddings else 0) + (table if micro.several else 0)
    yield Item("gradients", last), Item("activations", int(BACKWARD * layer)), *inside
    largest = max(shape.hidden_size, shape.num_heads * shape.head_dim) * max(shape.intermediate_size, shape.hidden_size)
    whole = OPTIMIZERS[recipe.optimizer.name].needs == "matrices"
    scratch = MATMUL_WORK[recipe.optimizer.muon_precision] * FP32 * largest if whole else 0
    yield Item("gradients", own), Item("scratch of the optimizer", scratch), *inside


def _moved(recipe: Recipe, cut: ShardFactors, micro: LargestMicroBatch) -> float:
    """Return the share of the activations' rows that moves to the host."""
    if recipe.train.offload != "auto":
        return recipe.train.offload
    limits = OffloadLimits(cut.layers, 1.0, np.zeros_like, HostRates(math.inf, math.inf, math.inf))
    return float(ratios(np.array([micro.computed * cut.tokens]), 1, recipe.train.micro_tokens, limits)[0])


def _kept(recipe: Recipe, cut: ShardFactors, micro: LargestMicroBatch, layer: int, longest: int) -> tuple[int, int]:
    """Return the bytes that all layers keep of the micro-batches in flight, and the allocator's slack."""
    flights = cut.stage.flights if cut.stage is not None and micro.several else 1
    late = cut.stage.late if cut.stage is not None and micro.several else 0
    made = int(flights * cut.layers * layer) + int(late * cut.layers * _products(recipe, cut, micro))
    if not recipe.train.checkpointing:
        return made, int(SLACK * made)
    selective, element = recipe.train.checkpointing == "selective", element_of(recipe)
    inputs = -(-micro.computed // cut.spread) * cut.shape.hidden_size * element
    chosen = micro.computed * _chosen(recipe, cut.shape, longest) * element if selective else 0
    again = layer - chosen  # of the layer that is recomputed
    own = made - int(flights * cut.layers * (layer - inputs - chosen))
    return own + again, int(SLACK * made + RECOMPUTED * layer)


def _products(recipe: Recipe, cut: ShardFactors, micro: LargestMicroBatch) -> int:
    """Return the bytes from which one layer's gradients of matrices are computed: inputs of the matrices, each once,
    and gradients of their outputs."""
    shape, experts = cut.shape, bool(cut.shape.expert_layers)
    outputs = sum(layer_width(shape, "matrix", tp, experts=experts) for tp in ("rows", "copied", "columns"))
    inner = (layer_width(shape, "matrix", "rows", experts=experts) - shape.num_heads * shape.head_dim) // 2
    inputs = 2 * shape.hidden_size + shape.num_heads * shape.value_dim + inner
    return micro.computed * (outputs + inputs) * element_of(recipe)


def _chosen(recipe: Recipe, shape: DecoderShape, longest: int) -> int:
    """Return elements of one token that a layer keeps under selective recomputation (``models.activations.KEPT``). They
    are the outputs of matrix products; of attention, and one number per head in fp32, if it is no plain matmul."""
    element, query = element_of(recipe), shape.num_heads * shape.head_dim
    experts = bool(shape.expert_layers)
    products = sum(layer_width(shape, "matrix", tp, experts=experts) for tp in ("rows", "copied", "columns"))
    if on_gpu(recipe) or longest > CAUSAL_UP_TO[element]:
        products += query + shape.num_heads * FP32 // element
    return products


def _cast(recipe: Recipe, cut: ShardFactors, head: bool) -> int:
    """Return bytes of matrices cast to the compute dtype, kept for the backward pass; one layer's if recomputed. head:
    the pass has logits; its matrix is one of them where casts are kept for a step."""
    if element_of(recipe) == FP32:
        return 0
    layers = 1 if recipe.train.checkpointing else cut.layers
    kept = _head(recipe, cut) if head and _keeps_casts(recipe, cut) else 0
    return matrices(cut.shape) * element_of(recipe) * layers // cut.shape.num_layers + kept


def _keeps_casts(recipe: Recipe, cut: ShardFactors) -> bool:
    """Return True if weights are cast once for all passes of a step (``TrainEngine``)."""
    train = recipe.train
    return not (train.checkpointing or train.compile is True or cut.gathered)


def _head(recipe: Recipe, cut: ShardFactors) -> int:
    """Return bytes of the output head cast to the compute dtype."""
    element = element_of(recipe)
    return 0 if element == FP32 else cut.shape.vocab_size * cut.shape.hidden_size * element


def scoring(recipe: Recipe, cut: ShardFactors, longest: int, *, head: bool = True) -> tuple[Item, ...]:
    """Return the working set of a pass without gradients. head: False for a model without logits."""
    found, head = [], head and cut.head
    for micro in micro_batches_of(recipe, longest, cut):
        layer = layer_bytes(recipe, cut, longest, micro)
        logits = logits_bytes(recipe, cut, micro.chosen, micro.temperature, learns=False) if head else 0
        working = [Item("activations of scoring", layer), Item("slack of the allocator", int(SLACK * layer))]
        working += [Item("parameters of other ranks", cut.gathered * FP32)] if cut.gathered else []
        found.append((*working, *([Item("logits", logits)] if head else [])))
    return max(found, key=total)


# ---- the rollout engine ----


class EngineDemand(NamedTuple):
    """Maximum simultaneous load of an engine."""

    rows: int
    """Sequences that decode together."""
    prompts: int
    """Different prompts of a request."""
    group: int
    """Samples per prompt."""
    prompt: int
    """Tokens of the longest prompt."""
    longest: int
    """Tokens of the longest sequence."""
    context: int
    kv_tokens: int
    """Capacity of its KV cache."""

    @property
    def computed(self) -> int:
        """Prompts in one prefill pass."""
        return min(self.prompts, -(-self.rows // self.group), max(1, PASS // self.prompt))


def kv_cache(
    shape: DecoderShape, asked: EngineDemand, element: int, *, fixed: bool, routing: bool = False, latent: bool = True
) -> tuple[int, int]:
    """Return bytes of the KV cache at full length, and additional bytes while its buffers grow for the last time.

    Counts rows of each length bucket that a sequence passes, prompts in prefill and shared prefixes, each in buffers
    with one spare. fixed: buffers have their final size at once, as on a GPU. routing: each token's experts are kept;
    latent: see ``kv_bytes``.
    """
    widths = cached_widths(shape, latent)
    alike = 2 if len(widths) == 2 and widths[0] == widths[1] else 1  # tensors of a layer that share a spare
    token, spare = kv_bytes(shape, element, latent), 1 + 1 / (alike * shape.num_layers)
    token += routing_bytes(shape) if routing else 0
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


def paged_cache(shape: DecoderShape, asked: EngineDemand, element: int) -> tuple[int, int]:
    """Return ``kv_cache`` in pages of a GPU.

    Counts the pages of rows, of prompts in prefill and of those that stay; full pages of a prompt are there once. The
    pool grows by half, and while it grows a tensor of one layer is there twice.
    """
    whole, capacity = asked.prompt // PAGE, -(-asked.kv_tokens // PAGE)
    running = -(-asked.rows // asked.group)
    shared = min(asked.prompts, running + capacity // 4 // max(1, whole)) * whole
    own, staged = (-(-length // PAGE) - whole for length in (asked.longest, asked.prompt))
    need = asked.rows * own + shared + asked.computed * staged
    held = (min(grown(need - 1, need), capacity) + 1) * PAGE * kv_bytes(shape, element, latent=False)
    return held, held // (2 * shape.num_layers)


def generation(recipe: Recipe, shape: DecoderShape, asked: EngineDemand, element: int, vocab: int) -> tuple[Item, ...]:
    """Return the working set of an engine step, prefill or decode, without the growth of its cache.

    shape: of one rank; vocab: of the whole model, since every rank has all logits.
    """
    chunk = PROMPT_CHUNK if asked.prompt > PROMPT_CHUNK else asked.computed * asked.prompt
    tokens = max(asked.rows, min(recipe.rollout.step_tokens, chunk))
    pairs = max(min(tokens, chunk) * asked.prompt, asked.rows * slots_for(asked.longest))
    return (
        Item("activations of generation", _pass_bytes(recipe, shape, tokens, pairs, element)),
        Item("logits of generation", _choice(recipe, vocab, asked)),
    )


def _pass_bytes(recipe: Recipe, shape: DecoderShape, tokens: int, pairs: int, element: int) -> int:
    """Return bytes of activations of a pass without gradients. pairs: of tokens with slots that they attend to."""
    pairs_wide = shape.experts_per_token * (2 * shape.expert_size + 2 * shape.hidden_size) + 2 * shape.shared_size
    inner = max(2 * shape.intermediate_size * bool(shape.dense_layers), pairs_wide)
    widest = max(inner, 6 * shape.num_heads * shape.head_dim) + 2 * shape.hidden_size
    scores = 0 if on_gpu(recipe) else 2 * shape.num_heads * pairs
    return (tokens * widest + scores) * element


def drafting(
    recipe: Recipe, shape: DecoderShape, asked: EngineDemand, element: int
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Return the weights and the cache of a drafting model beside an engine, and the working set of its pass.

    Its cache has a row for each of the engine's, doubled as they come, and grows with the longest of them.
    """
    rows, size, widths = ROWS, 0, cached_widths(shape)
    while rows < asked.rows:
        rows *= 2
    first = min(asked.prompt + 1, DRAFT_WIDTH)  # a prompt comes in parts
    lengths = *range(first, asked.longest, KEYS), asked.longest
    capacities = {round_up(slots_for(tokens), ROWS) for tokens in lengths}
    for capacity in sorted(capacities):
        size = grown(size, rows * capacity)
    alike = 2 if len(widths) == 2 and widths[0] == widths[1] else 1
    cache = int(size * kv_bytes(shape, element) * (1 + 1 / (alike * shape.num_layers)))
    tokens = rows * min(asked.longest, DRAFT_WIDTH)
    used = _pass_bytes(recipe, shape, tokens, tokens * max(capacities), element)
    held = Item("drafting model", parameters(shape) * element), Item("drafting model's KV cache", cache)
    logits = Item("logits of drafting", _choice(recipe, shape.vocab_size, asked))
    return held, (Item("activations of drafting", used), logits)


def _choice(recipe: Recipe, vocab: int, asked: EngineDemand) -> int:
    """Return bytes of logits during sampling, of decoding rows or of first tokens beside those of their prompts. Counts
    logits and log-probs, those of decoding rows padded to groups; one more copy on a GPU (probabilities of all rows),
    one for a filter, five if top-p sorts the vocabulary, one where a graph divides by any temperature."""
    r = recipe.rollout
    more = 5 if r.top_p < 1 and not r.top_k else int(bool(r.top_k or r.min_p or r.top_p < 1))
    first = min(asked.rows, max(1, CHOICE_ELEMENTS // vocab))
    scaled = more or r.temperature not in (0, 1) or (on_gpu(recipe) and r.compile)
    decoding = round_up(asked.rows, ROWS) * (2 + on_gpu(recipe) + scaled)
    return max(decoding, asked.computed + first * (3 + more)) * vocab * FP32
