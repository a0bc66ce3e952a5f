"""Peak memory of a run, or of one worker of it, predicted item by item from shapes and the recipe."""

import math
import mmap
from collections.abc import Sequence
from typing import NamedTuple

from tilth.config.axes import MODEL, over
from tilth.config.checks import pool_of
from tilth.config.open_sets import OPTIMIZERS
from tilth.config.schema import Recipe
from tilth.plan.kernels import BLOCK, PAGE, round_up
from tilth.plan.rules import rule_of
from tilth.plan.shape import pages_fit, parameter_shapes, torch_has_pages
from tilth.plan.working import (
    FP32,
    EngineDemand,
    Item,
    ShardFactors,
    drafting,
    element_of,
    generation,
    kv_cache,
    on_gpu,
    paged_cache,
    scoring,
    total,
    training,
)

BASE = 400 * 2**20
"""Bytes of interpreter, torch, pyarrow and other libraries in use (measured)."""
TOKEN = 600
"""Bytes of a tokenizer per token of its vocabulary (measured)."""
CUDA = 500 * 2**20
"""Bytes of a process's CUDA context with loaded kernels (approximate; published measurements)."""
CERTAIN = ("parameters", "optimizer state", "model", "weights")
"""Suffixes of names of items whose size does not depend on the data."""
SAVED = "being saved"
"""Suffix of names of copies of a role's state, which share its one buffer of host memory
(``checkpoint.snapshot.HostBuffer``)."""
DRAFTER = "rollout.draft.path"
"""Key of the drafting model, whose shape is among those of loaded models, by the keys of their paths."""


class Memory(NamedTuple):
    """Predicted peak. Training and generation alternate, so only the larger of their working sets counts."""

    held: tuple[Item, ...]
    """Permanent."""
    training: tuple[Item, ...]
    """During a micro-batch."""
    generation: tuple[Item, ...]
    """During an engine step."""
    gradients: int = 0
    """All gradients of the largest role; at the peak of ``training`` fewer may exist."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Items at the peak."""
        return self.held + max(self.training, self.generation, key=total)

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return total(self.items)

    def by_name(self) -> dict[str, int]:
        """Return item -> bytes at the peak."""
        return {item.name: item.bytes for item in self.items}

    def certain(self, *, gpu: bool) -> int:
        """Return bytes of weights, gradients and optimizer state, independent of the data. gpu: those on a GPU."""
        return self.gradients + sum(i.bytes for i in self.held if i.name.endswith(CERTAIN) and not (gpu and i.host))

    def on_gpu(self) -> int:
        """Return bytes at the peak that are on the GPU, if there is one."""
        return sum(item.bytes for item in self.items if not item.host)


class Need(NamedTuple):
    """Memory of a role on one rank."""

    held: tuple[Item, ...]
    gradients: int = 0
    """Bytes, part of ``training`` too. Roles of one worker alternate, and free theirs after a step."""
    training: tuple[Item, ...] = ()
    generation: tuple[Item, ...] = ()


def together(recipe: Recipe, needs: Sequence[Need], vocab: int, base: int = BASE) -> Memory:
    """Return the memory of one process with these alternating roles and a tokenizer of ``vocab`` tokens."""
    held = [Item("interpreter and libraries", base, host=True), Item("tokenizer", TOKEN * vocab, host=True)]
    held += [Item("CUDA context", CUDA)] if on_gpu(recipe) else []
    held += [item for need in needs for item in need.held]
    if on_gpu(recipe) and (spare := sum(_rounded_up(need) for need in needs)):
        held.append(Item("pinned memory, rounded up", spare, host=True))
    working = max((need.training for need in needs), key=total, default=())
    speaking = max((need.generation for need in needs), key=total, default=())
    return Memory(tuple(held), working, speaking, max((need.gradients for need in needs), default=0))


def _rounded_up(need: Need) -> int:
    """Return the bytes that a role's buffer of pinned memory has beside what is saved: it is aligned to a page, and
    torch rounds it up to a power of two."""
    saved = total(tuple(item for item in need.held if item.host and item.name.endswith(SAVED)))
    return (1 << (saved + mmap.PAGESIZE - 1).bit_length()) - saved if saved else 0


def alternating(needs: Sequence[Need]) -> Need:
    """Return the need of one role with several models on one rank, of which one computes at a time."""
    held = dict[str, Item]()
    for item in (item for need in needs for item in need.held):
        held[item.name] = item._replace(bytes=item.bytes + (held[item.name].bytes if item.name in held else 0))
    return Need(
        tuple(held.values()),
        max(need.gradients for need in needs),
        max((need.training for need in needs), key=total),
        max((need.generation for need in needs), key=total),
    )


def policy_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Return the need of the policy on one rank."""
    own, head = cut.learned * FP32, not recipe.flow_spec.value
    held = [Item("parameters", (cut.elements + cut.adapters) * FP32), Item("optimizer state", _optimizer(recipe, cut))]
    if recipe.train.ema:
        held.append(Item("average of the weights", cut.updated * FP32))
    saved = [Item("adapters", own), *held[1:]] if cut.adapters else held
    held.append(_saved_copy(cut, saved, "copy being saved"))
    comm = recipe.policy.comm
    gradients = (cut.elements + cut.gathered + cut.elements // cut.copies * comm.two_way) * comm.residual
    weights = 2 * cut.updated * (comm.weights != "exact")  # that an optimizer steps from, and how they differ
    if left := FP32 * (gradients + weights):
        new = left - FP32 * weights // 2  # until a step is settled there are residuals of before and after it
        saved_too = Item("copy of that being saved", left, host=True)
        held += [Item("left out by compression", left), Item("left out by the step under way", new), saved_too]
    if comm.local != "none":
        common = own * (comm.local == "cser")
        held += [Item("model that all ranks share", common), Item("model of one rank, where others read a mean", own)]
        held.append(Item("copy of models and state of one rank being saved", own + common + held[1].bytes, host=True))
    if on_many_machines(recipe):
        held += _relay(recipe, cut, cut.copies)
    if "noise_scale" in recipe.train.watch:
        held.append(Item("gradients of one micro-batch", own))
    return Need(tuple(held), own, training(recipe, cut, longest, head=head))


def _saved_copy(cut: ShardFactors, state: Sequence[Item], name: str) -> Item:
    """Return the host memory from which checkpoints are written, kept between saves. state: weights, then what ranks
    that divide updates have parts of, who write as large parts of the weights."""
    if cut.updates != (1, 1):
        return Item(name, cut.updated * FP32 + total(tuple(state[1:])), host=True)
    return Item(name, total(tuple(state)) // cut.copies, host=True)


def critic_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Return the need of the critic, a value model without logits, on one rank."""
    own, every = cut.learned * FP32, (cut.elements + cut.adapters) * FP32
    held = [Item("critic's parameters", every), Item("critic's optimizer state", _optimizer(recipe, cut))]
    copy = _saved_copy(cut, held, "critic's copy being saved")
    return Need((*held, copy), own, training(recipe, cut, longest, head=False))


def reference_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Return the need of the reference on one rank, which only scores. One with a path is not saved."""
    held = [Item("reference model", cut.elements * FP32)]
    given = recipe.reference.path or recipe.reference.teachers
    copy = [] if given else [_saved_copy(cut, held, "reference's copy being saved")]
    return Need((*held, *copy), training=scoring(recipe, cut, longest))


def reward_model_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Return the need of a reward model on one rank, which only scores, has no logits and is not saved."""
    return Need((Item("reward model", cut.elements * FP32),), training=scoring(recipe, cut, longest, head=False))


def rollout_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Return the need of one rank of an engine, beside the policy's shard if they share memory."""
    r, context, ranks = recipe.rollout, recipe.model.context, cut.ranks
    evaluated = -(-recipe.run.eval_prompts // ranks)
    group = 1 if r.environment else r.group  # episodes of a prompt differ from their first turn on
    steps = r.buffer if r.staleness == "free" else r.staleness + 1  # whose samples may be in flight
    wanted = [(evaluated, 1)] + ([(-(-steps * r.prompts * r.group // ranks), group)] * recipe.flow_spec.samples)
    most = [_asked(recipe, rows, group, longest, r.max_tokens, context, kv_tokens(recipe)) for rows, group in wanted]
    if shares_memory(recipe):
        cut = cut._replace(elements=cut.elements - _shared(cut, recipe.policy.layout.tp // r.layout.tp))
    names = "engine's copy of the weights", "KV cache"
    records = recipe.train.routing != "own" and recipe.flow_spec.samples
    how = {"parity": recipe.train.parity, "drafts": r.speculate != "off", "routing": records}
    needs = [
        _beside_drafts(recipe, cut, asked, _engine_need(recipe, cut, r.layout.tp, asked, names, **how))
        for asked in most
    ]
    need = max(needs, key=lambda need: total((*need.held, *need.generation)))
    return need._replace(held=(*need.held, *_relay(recipe, cut, 1 if on_many_machines(recipe) else cut.ranks)))


def _beside_drafts(recipe: Recipe, cut: ShardFactors, asked: EngineDemand, need: Need) -> Need:
    """Return the need of an engine and of its drafting model, whole on each rank; apart, in a process of its own that
    computes while the engine does."""
    if cut.drafter is None:
        return need
    held, working = drafting(recipe, cut.drafter, asked, element_of(recipe))
    if not recipe.rollout.draft.apart:
        return need._replace(held=(*need.held, *held), generation=max(need.generation, working, key=total))
    process = [Item("process of the drafting model", BASE, host=True)]
    process += [Item("CUDA context of the drafting model", CUDA)] if on_gpu(recipe) else []
    return need._replace(held=(*need.held, *held, *process), generation=(*need.generation, *working))


def has_relay(recipe: Recipe) -> bool:
    """True if engines take the policy's weights from memory that the processes of a node share (``roles.relay``): where
    they generate beside it, and inline where they keep earlier weights for samples in flight."""
    r = recipe.rollout
    beside = recipe.cluster.backend != "inline" or r.inflight == "finish"
    return bool(r.staleness) and beside and r.engine == "native"


def on_many_machines(recipe: Recipe) -> bool:
    """True if the workers are on the nodes of a Ray cluster that is there already."""
    return recipe.cluster.backend == "ray" and bool(recipe.cluster.address)


def _relay(recipe: Recipe, cut: ShardFactors, sharers: int) -> tuple[Item, ...]:
    """Return this rank's share of the relay of its node, which holds two versions of the weights of one engine.

    sharers: ranks with the same part of the weights on the node. All engines of one machine share a relay. On many
    machines each engine may have a node of its own; the policy is taken to be on one, which has a relay too.
    """
    if not has_relay(recipe):
        return ()
    adapters = cut.adapters if recipe.rollout.adapters == "adapter" else 0
    size = 2 * (cut.elements + adapters) * element_of(recipe)
    return (Item("relay's two versions of the weights", size // sharers, host=True),)


def shares_memory(recipe: Recipe) -> bool:
    """True if the policy's shards are slices of the weights of engines on its workers (``roles.weight_sync``)."""
    p, r = recipe.policy.layout, recipe.rollout.layout
    divided = [name for name in over(*MODEL) if getattr(p, name) > 1]
    together = pool_of(recipe, "rollout") == pool_of(recipe, "policy")
    plain = recipe.train.precision == "fp32" and recipe.rollout.engine == "native" and not recipe.policy.lora.rank
    return plain and together and divided == ["tp"] and p.tp % r.tp == 0 and r.ep == 1


def _shared(cut: ShardFactors, parts: int) -> int:
    """Return the elements of the policy's shard, one of ``parts`` of an engine's, that lie in it. A slice along
    columns, or of each expert, is not contiguous, and is copied unless it is all of it."""
    whole = {name: math.prod(sizes) for name, sizes in parameter_shapes(cut.shape).items()}
    rules = {name: rule_of(cut.shape.table, name) for name in whole if parts > 1}
    copied = sum(whole[name] for name, rule in rules.items() if rule.tp == "columns" or rule.stacked)
    return (cut.elements - copied) // parts


def judge_need(recipe: Recipe, cut: ShardFactors, longest: int) -> Need:
    """Return the need of a judge, an engine with its own model. A question is assumed to have twice the tokens of the
    solution that it quotes step by step."""
    positions = getattr(cut.shape, "max_positions", recipe.model.context)
    r, most = recipe.rollout, min(positions, 2 * longest + recipe.judge.max_tokens)
    rows = -(-r.prompts * r.group // cut.ranks)
    capacity = r.max_rows * round_up(positions, _block(recipe))
    asked = _asked(recipe, rows, 1, most, recipe.judge.max_tokens, positions, capacity)
    names, layout = ("judge's weights", "judge's KV cache"), recipe.judge.layout
    whole = layout.tp * layout.ep == 1 and r.engine == "native"
    return _engine_need(recipe, cut, layout.tp, asked, names, parity=recipe.grades and whole and not on_gpu(recipe))


def _asked(recipe: Recipe, rows: int, group: int, longest: int, new: int, context: int, capacity: int) -> EngineDemand:
    most = min(rows, recipe.rollout.max_rows, recipe.rollout.step_tokens, max(1, capacity // BLOCK))
    return EngineDemand(most, -(-rows // group), group, max(1, longest - new), longest, context, capacity)


def _engine_need(
    recipe: Recipe,
    cut: ShardFactors,
    tp: int,
    asked: EngineDemand,
    names: tuple[str, str],
    *,
    parity: bool,
    drafts: bool = False,
    routing: bool = False,
) -> Need:
    """Return the need of one of ``tp`` ranks of an engine; names: of its weights and its cache. parity: it has the
    trainer's bits; drafts: it speculates; routing: it keeps the experts of each token. On a GPU its cache is the larger
    of pages and slots."""
    element, (weights, cache) = element_of(recipe), names
    sizes = {"fixed": on_gpu(recipe), "routing": routing, "latent": not parity}
    held, besides = kv_cache(cut.shape, asked, element, **sizes)
    plain = not (parity or drafts) and not (routing and cut.shape.num_experts)
    if plain and _block(recipe) == PAGE and pages_fit(cut.shape) and torch_has_pages():  # which GPU it is, nobody knows
        held, besides = max((held, besides), paged_cache(cut.shape, asked, element), key=sum)
    working = generation(recipe, cut.shape, asked, element, vocab=cut.shape.vocab_size * tp)
    grows = Item("cache while it grows", besides)
    return Need(
        (Item(weights, (cut.elements + cut.adapters) * element), Item(cache, held)),
        generation=max((working, (grows,)), key=total),  # not while tokens are computed
    )


def kv_tokens(recipe: Recipe) -> int:
    """Return the capacity of the KV cache in tokens; automatic, that of the blocks of ``max_rows`` whole sequences."""
    return recipe.rollout.kv_tokens or recipe.rollout.max_rows * round_up(recipe.model.context, _block(recipe))


def _block(recipe: Recipe) -> int:
    """Return the tokens of a block of an engine's KV cache: of a page where the recipe allows pages."""
    return PAGE if on_gpu(recipe) and element_of(recipe) < FP32 else BLOCK


def micro_tokens(recipe: Recipe, longest: int, ranks: int = 1) -> int:
    """Return the maximum tokens of one micro-batch: the budget, or fewer if a step has fewer on one of ``ranks``."""
    w, samples = recipe.supervised, recipe.flow_spec.samples and recipe.algorithm.steps > 0
    rows = recipe.rollout.prompts * recipe.rollout.group if samples else 0
    rows = -(-max(rows, w.batch * recipe.flow_spec.rows if w.steps or w.epochs else 0) // ranks)
    return max(longest, min(recipe.train.micro_tokens, rows * longest))


def _optimizer(recipe: Recipe, cut: ShardFactors) -> int:
    """Return bytes of a rank's optimizer state; of one that needs matrices for these, and AdamW's for the rest."""
    spec = OPTIMIZERS[recipe.optimizer.name]
    own = (cut.adapters or cut.blocks) if spec.needs == "matrices" else cut.learned
    whole = len(spec.state) * own + len(OPTIMIZERS["adamw"].state) * (cut.learned - own)
    return FP32 * (whole * cut.updated // max(1, cut.learned))
