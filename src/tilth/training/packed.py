"""Micro-batches of packed sequences, and the log-probs or values of a model on them."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tilth.core.batch import Jagged
from tilth.core.device import to_device, to_host
from tilth.core.errors import LossMaskError, PlanError
from tilth.core.media import MEDIA, check_media, unpack_media
from tilth.core.trajectory import OPENS
from tilth.models.attention import AttentionContext, DropoutContext, PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.models.family import family_of
from tilth.models.inputs import EncoderInput, ModelInput, place_media
from tilth.models.moe import ExpertContext
from tilth.models.rows import take_rows
from tilth.models.tree import PrefixTrees, TreeContext, plant
from tilth.parallel.comm import Exchange, Members, all_reduce
from tilth.parallel.context import ContextParallel, TokenShare, UnitShare
from tilth.parallel.sharded import ShardedModel
from tilth.plan.batch import (
    MicroBatches,
    MicroBatchLimits,
    MicroBatchPlan,
    RowTable,
    check_plan,
    plan_rows,
    prompt_lengths,
)
from tilth.plan.lora import has_adapters
from tilth.plan.shape import Flops, attended, pass_flops
from tilth.trace.spans import span

ROUTING = "routing"
"""Column of the generation engine's choices of experts, int64 [N, layers with experts, k]; below 0: not known."""
TARGETS = "targets"
"""Column of tokens whose log-probs are asked for at the places of others, int64 [N]."""
PLACES = "dropout/places"
"""Column of the index of each token in the whole batch, which numbers dropout masks, int64 [N]."""
SENT = (OPENS, TARGETS, PLACES, ROUTING)
"""Columns of integers that a model or what scores its states needs on each rank of a unit."""


def send_rows(
    unit: Members, count: int, ids: Tensor, mask: Tensor, columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return ids, mask and columns of all ``count`` tokens of a unit: on its first rank those given, which it sends; on
    the others, whose own are empty, ids, mask and the columns of ``SENT``."""
    names = [name for name in SENT if name in columns]
    widths = [1, 1, *(math.prod(columns[name].shape[1:]) for name in names)]
    table = torch.empty(count, sum(widths), dtype=torch.int64, device=ids.device)
    first = unit.place == 0
    if first:
        torch.cat([x.reshape(count, -1).long() for x in (ids, mask, *map(columns.__getitem__, names))], 1, out=table)
    others = [(place, table) for place in range(1, len(unit.ranks))]
    Exchange(unit, others if first else [], [] if first else [(0, table)]).wait()
    if first:
        return ids, mask, columns
    found, marks, *rest = table.split(widths, 1)
    given = {name: x.reshape(count, *columns[name].shape[1:]).contiguous() for name, x in zip(names, rest)}
    return found[:, 0].to(ids.dtype), marks[:, 0].to(mask.dtype), given


def check_units(plan: MicroBatches, context: ContextParallel, device: torch.device) -> None:
    """Raise PlanError on all ranks of the axis unless any two have the same units together, in the same order.

    One sum: of two ranks one adds the digest of their units, the other one subtracts it. On a device it is the first
    message of the group too, in which all of its ranks take part.
    """
    own, digests, wrong = context.group.rank(), dict[int, int](), ""
    for number, micro in enumerate(plan):
        ranks = micro.ranks
        if micro.several and (own not in ranks or list(ranks) != sorted({*ranks} & {*range(context.group.size())})):
            wrong = wrong or f"micro-batch {number} has the ranks {ranks} on rank {own} of {context.group.size()}; "
        for peer in ranks if micro.several else ():
            data = np.array([micro.check, *ranks, *micro.lengths], np.int64).tobytes()
            digests[peer] = zlib.crc32(data, digests.get(peer, 0))
    signed = sum(digest if own < peer else -digest for peer, digest in digests.items() if peer != own)
    found = torch.tensor([signed, int(bool(wrong))], device=device)
    all_reduce(found, context.group).wait()
    if found.any():
        message = f"{wrong}the ranks along the axis have other units, or the same ones in another order"
        raise PlanError(f"{message}: give each of them its part of one plan (plan.batch.plan_batch)", key="plan.units")


def shares_prompts(config: DecoderConfig, parity: bool, divided: bool = False) -> bool:
    """True if samples of one prompt may be computed as one tree.

    Not in parity mode (cached decoding has other shapes), with dynamic rope (the rotation of a prompt depends on the
    length of its sample), where ranks divide the tokens of each sequence (``divided``), or with encoders (equal tokens
    may have other media).
    """
    return not (parity or divided or config.rope_type == "dynamic" or family_of(config.family).encoders)


def limits_of(sharded: ShardedModel, tokens: int, *, parity: bool) -> MicroBatchLimits:
    """Return the limits of a model's micro-batches of at most ``tokens`` tokens."""
    shares = shares_prompts(sharded.model.config, parity, sharded.context is not None)
    return MicroBatchLimits(tokens, shares, in_step=sharded.in_step)


@dataclass
class MicroBatch:
    """One micro-batch, packed: per-token tensors [N] over ``len(lengths)`` sequences.

    ``seen``: lengths of conversations, whose tokens see each other alone; a sequence is one unless ``opens`` says more.
    ``logprobs``, ``entropy`` and ``squares`` (sums over the vocabulary of p squared) come from the policy, ``values``
    from the critic, 0 where ``mask`` is; ``columns``: the caller's, cut to these sequences. ``trees``: prompts that
    several sequences share, computed once. ``share``: the tokens that this rank computes; all else is of all tokens.
    ``media``: items of the sequences, which have no trees then. ``offload``: share of the activations' rows that moves
    to the host. ``learned``: packed indices of the tokens in the mask, int64; None: found there, for which the host
    waits.
    """

    ids: Tensor
    lengths: Tensor
    seen: Tensor
    mask: Tensor
    columns: dict[str, Tensor]
    trees: PrefixTrees | None = None
    share: TokenShare | None = None
    media: tuple[EncoderInput, ...] = ()
    offload: float = 0.0
    learned: Tensor | None = None
    logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))
    entropy: Tensor = field(default_factory=lambda: torch.zeros(0))
    values: Tensor = field(default_factory=lambda: torch.zeros(0))
    squares: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def computed(self) -> int:
        """Tokens that go through the model, of a unit on this rank."""
        if isinstance(self.share, UnitShare):
            return len(self.share.tokens)
        return len(self.ids) if self.trees is None else len(self.trees.source)

    @property
    def pairs(self) -> int:
        """Pairs of a computed token and a token it attends to, itself included; windows are ignored."""
        if isinstance(self.share, UnitShare):
            return int((self.share.division.positions(self.share.rank) + 1).sum())
        return attended(self.seen.numpy()) if self.trees is None else int((self.trees.position + 1).sum())

    @property
    def blank(self) -> bool:
        """True if the plan has no rows for this round."""
        return not len(self.lengths)

    @property
    def has_rows(self) -> bool:
        """True if this rank evaluates the loss."""
        return self.share is None or self.share.has_rows

    def nothing(self) -> Tensor:
        """Return 0 in place of the loss that another rank evaluates; its backward pass gets the gradient from there."""
        return self.logprobs.sum() + self.entropy.sum() + self.values.sum()


class WorkAmounts(NamedTuple):
    """Amount of work of a pass over a micro-batch, for its spans."""

    tokens: int
    squares: int
    """Sum of squared lengths; a shared prompt counts once, with what each sample adds."""
    flops: Flops

    @classmethod
    def of(cls, model: Decoder, micro: MicroBatch) -> "WorkAmounts":
        """Count model FLOPs, with the output head at every token; a value model has none."""
        tokens, pairs = micro.computed, micro.pairs
        head, frozen = not isinstance(model, ValueModel), has_adapters(row.name for row in model.table)
        return cls(tokens, 2 * pairs - tokens, pass_flops(model.config, tokens, pairs, head, frozen))


def cut(
    tokens: Jagged,
    mask: np.ndarray,
    columns: Mapping[str, np.ndarray],
    plan: MicroBatches,
    device: torch.device,
    context: ContextParallel | None = None,
) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """Yield the micro-batches of a plan: (indices into the packed columns [N], micro-batch).

    columns: of tokens [N]; ``media`` of sequences. context: how ranks divide the tokens of each. Of a unit of several
    ranks all but the first have no index, and the rows come when the micro-batch is asked for.
    """
    every = Jagged(np.arange(len(mask)), tokens.offsets)
    for planned in plan:
        rows = planned.rows
        part = every.take(rows)
        index, sizes = part.values, part.lengths
        trees = None
        if planned.shared:
            prompts = prompt_lengths(Jagged(mask[index], part.offsets))
            groups = np.split(np.arange(len(rows)), np.cumsum([len(g) for g in planned.groups])[:-1])
            trees = plant(Jagged(tokens.values[index], part.offsets), prompts, groups)
        names, marks = [name for name in columns if name != MEDIA], mask[index]
        here = [tokens.values[index], marks, np.flatnonzero(marks), *(columns[name][index] for name in names)]
        ids, own_mask, learned, *given = to_device(here, device)
        own = dict(zip(names, given))
        unit = Members(context.group, planned.ranks) if context is not None and planned.several else None
        if unit is not None:
            sizes = planned.lengths
            ids, own_mask, own = send_rows(unit, int(sizes.sum()), ids, own_mask, own)
        seen = sizes
        if (opens := own.pop(OPENS, None)) is not None:
            begins = columns[OPENS][index] if unit is None else opens.cpu().numpy()
            seen = _conversations(np.append(0, np.cumsum(sizes)), begins)
        divided = context is not None and (unit is not None or not context.units)
        share = context.share(seen, device, unit) if context is not None and divided else None
        media = _media(columns[MEDIA][rows], part, device) if MEDIA in columns else ()
        lengths = torch.from_numpy(sizes), torch.from_numpy(seen)
        marked = learned if unit is None else None
        yield index, MicroBatch(ids, *lengths, own_mask, own, trees, share, media, planned.offload, marked)


def _media(packed: np.ndarray, tokens: Jagged, device: torch.device) -> tuple[EncoderInput, ...]:
    """Return the media of packed sequences. DataError: an item has no place in its sequence."""
    every, lengths = [unpack_media(one) for one in packed], tokens.lengths.tolist()
    for i, (items, length) in enumerate(zip(every, lengths)):
        check_media(items, length, f"sequence {i} of a micro-batch")
    return place_media(zip(every, [0] * len(every), lengths, tokens.offsets.tolist()), device)


def _conversations(offsets: np.ndarray, opens: np.ndarray) -> np.ndarray:
    """Return the length of each conversation of packed sequences, int64."""
    return np.diff(np.unique(np.concatenate([offsets, np.flatnonzero(opens)]))).astype(np.int64)


def plan_micros(
    tokens: Jagged,
    mask: np.ndarray,
    limits: MicroBatchLimits,
    opens: np.ndarray | None = None,
    *,
    dropout: bool = False,
    plan: MicroBatchPlan | None = None,
) -> MicroBatchPlan:
    """Return the controller's plan of these rows, checked; None: make one as it does.

    Raises PlanError for a plan of other rows, or one that shares prompts in passes with dropout; LossMaskError for a
    mask that has the first token of a row.
    """
    _check_mask(tokens, mask)
    if plan is None:
        return plan_rows(RowTable.of(tokens, mask, opens, digests=limits.share), limits, dropout=dropout)
    table = RowTable.of(tokens, mask, opens, digests=any(micro.shared for micros in plan for micro in micros))
    for micros in plan if plan.learn is not plan.score else plan[:1]:
        check_plan(micros, table)
    if dropout and limits.dropout and any(micro.shared for micro in plan.learn):
        message = "the plan shares prompts, and with dropout each sample has a mask of its own: declare the method with"
        raise PlanError(f"{message} transfer(dropout=True)", key="plan.dropout")
    return plan


def _check_mask(tokens: Jagged, mask: np.ndarray) -> None:
    rows = np.flatnonzero(tokens.lengths)
    wrong = rows[mask[tokens.offsets[rows]] != 0]
    if len(wrong):
        raise LossMaskError(
            f"the loss mask has the first token of sequence {wrong[0]} of {len(tokens.lengths)}, before which there is "
            "none that could predict it; a prompt needs at least one token",
            key=f"mask.{wrong[0]}",
        )


class Scorer(Protocol):
    """Fill in what a loss needs of a micro-batch, given the hidden states of its ``model_input``."""

    def __call__(self, model: Any, micro: MicroBatch, hidden: Tensor, *, temperature: float, entropy: bool) -> None: ...


def model_input(
    micro: MicroBatch, parity: bool = False, dropout: DropoutContext | None = None
) -> tuple[ModelInput, AttentionContext]:
    """Return the arguments of a model's first part."""
    device = micro.ids.device
    if micro.share is not None:
        return ModelInput(micro.ids[micro.share.tokens], media=micro.media), micro.share.context(dropout)
    if micro.trees is None:
        return ModelInput(micro.ids, media=micro.media), PackedContext(micro.seen, device, parity, dropout)
    return ModelInput(micro.ids[computed_tokens(micro)]), TreeContext(micro.trees, device)


def recorded_of(micro: MicroBatch) -> Tensor | None:
    """Take recorded choices of experts out of a micro-batch: int64 [tokens that are computed, layers, k]."""
    found = micro.columns.pop(ROUTING, None)
    return found if found is None else found[computed_tokens(micro)]


def computed_tokens(micro: MicroBatch) -> Tensor:
    """Return the packed index of each token that goes through this rank's model, int64 [n]."""
    if micro.share is not None:
        return micro.share.tokens
    every = np.arange(len(micro.ids)) if micro.trees is None else micro.trees.source
    return to_device([every], micro.ids.device)[0]


def score(model: Decoder, micro: MicroBatch, hidden: Tensor, *, temperature: float, entropy: bool) -> None:
    """Fill in log-probs (and entropy) of the tokens in the mask; only their logits are ever computed."""
    chosen = _chosen(micro)
    before = _states(micro, hidden, chosen - 1)
    found, entropies = model.token_logprobs(
        before, model.head_weight, micro.ids[chosen], temperature=temperature, entropy=entropy
    )
    micro.logprobs, *more = _spread(micro, chosen, found, *([entropies] if entropy else []))
    if entropy:
        (micro.entropy,) = more


def score_targets(
    model: Decoder, micro: MicroBatch, hidden: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> None:
    """Fill in log-probs of the column ``targets`` in place of the tokens in the mask, given the tokens before each."""
    chosen = _chosen(micro)
    before, targets = _states(micro, hidden, chosen - 1), micro.columns[TARGETS][chosen]
    found, _ = model.token_logprobs(before, model.head_weight, targets, temperature=temperature, entropy=False)
    (micro.logprobs,) = _spread(micro, chosen, found)


def score_squares(
    model: Decoder, micro: MicroBatch, hidden: Tensor, *, temperature: float, entropy: bool = False
) -> None:
    """Fill in log-probs, the same bits as ``score``, and sums of squared probabilities; no gradient, no entropy."""
    chosen = _chosen(micro)
    before = _states(micro, hidden, chosen - 1)
    found = model.token_squares(before, model.head_weight, micro.ids[chosen], temperature=temperature)
    micro.logprobs, micro.squares = _spread(micro, chosen, *found)


def appraise(
    model: ValueModel,
    micro: MicroBatch,
    hidden: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    after: bool = False,
) -> None:
    """Fill in values: of the states before the tokens in the mask, or ``after`` them; scorer of a value model.

    A value depends on neither ``temperature`` nor ``entropy``.
    """
    chosen = _chosen(micro, after)
    values = model.score(_states(micro, hidden, chosen - 1 + after))
    (micro.values,) = _spread(micro, chosen, values, after=after)


rate: Scorer = partial(appraise, after=True)
"""Scorer of a reward model: the score of a sequence is the value after its last token."""


def _learned(micro: MicroBatch) -> Tensor:
    return torch.nonzero(micro.mask, as_tuple=True)[0] if micro.learned is None else micro.learned


def _chosen(micro: MicroBatch, after: bool = False) -> Tensor:
    """Return the tokens in the mask whose state, before or ``after`` them, is on this rank: int64 packed indices."""
    every = _learned(micro)
    return every if micro.share is None else every[micro.share.here(every - 1 + after)]


def _spread(micro: MicroBatch, chosen: Tensor, *values: Tensor, after: bool = False) -> tuple[Tensor, ...]:
    """Put each of the values of the chosen tokens into a column [N], 0 elsewhere; those of other ranks' tokens too."""
    if micro.share is None:
        return tuple(each.new_zeros(len(micro.ids)).index_copy(0, chosen, each) for each in values)
    own = torch.stack(values, 1)
    at_state = own.new_zeros(len(micro.share.tokens), len(values))
    whole = micro.share.whole(at_state.index_copy(0, micro.share.local(chosen - 1 + after), own))
    every = _learned(micro)
    columns = own.new_zeros(len(micro.ids), len(values)).index_copy(0, every, whole[every - 1 + after])
    return columns.T.contiguous().unbind()


def _states(micro: MicroBatch, hidden: Tensor, at: Tensor) -> Tensor:
    """Return hidden states [k, hidden] at packed tokens, int64 [k], of this rank."""
    if micro.share is not None:
        return take_rows(hidden, micro.share.local(at))
    if micro.trees is None:
        return take_rows(hidden, at)
    (slot,) = to_device([micro.trees.slot], hidden.device)
    return hidden.index_select(0, slot[at])  # the end of a prompt comes before several tokens


def packed_logprobs(model: Decoder | ShardedModel, tokens: Jagged, mask: np.ndarray, **how: Any) -> np.ndarray:
    """Return the log-prob of each token in the mask, float32 [N]; 0 elsewhere. No gradient.

    how: ``max_tokens`` of a micro-batch, optionally ``plan``, ``temperature``, ``parity``, ``columns`` (``opens``,
    ``media``) and ``routing`` (int64 [N, layers with experts, k], choices of experts to follow; below 0: the model's
    own). All ranks of a sharded model call it, each with its own rows, any number of them.
    """
    return _without_gradient(score, ("logprobs",), model, tokens, mask, **how)[0]


def packed_squares(model: Decoder | ShardedModel, tokens: Jagged, mask: np.ndarray, **how: Any) -> np.ndarray:
    """Return log-probs, the same bits as ``packed_logprobs``, and sums over the vocabulary of pi squared: [2, N].

    The second row is the column ``sum_pi_squared`` of the optimal token baseline. One pass, without a tensor of all
    logits.
    """
    return _without_gradient(score_squares, ("logprobs", "squares"), model, tokens, mask, **how)


def packed_targets(
    model: Decoder | ShardedModel, tokens: Jagged, mask: np.ndarray, targets: np.ndarray, **how: Any
) -> np.ndarray:
    """Return the log-prob of ``targets`` (int64 [N]) at each place in the mask, float32 [N]; see
    ``packed_logprobs``."""
    given = {TARGETS: targets}
    return _without_gradient(score_targets, ("logprobs",), model, tokens, mask, columns=given, **how)[0]


def packed_values(model: ValueModel | ShardedModel, tokens: Jagged, mask: np.ndarray, **how: Any) -> np.ndarray:
    """Return the value of the state before each token in the mask, float32 [N]; see ``packed_logprobs``."""
    return _without_gradient(appraise, ("values",), model, tokens, mask, **how)[0]


def packed_ratings(model: ValueModel | ShardedModel, tokens: Jagged, mask: np.ndarray, **how: Any) -> np.ndarray:
    """Return the value of the state after each token in the mask, float32 [N]; see ``packed_logprobs``."""
    return _without_gradient(rate, ("values",), model, tokens, mask, **how)[0]


@torch.no_grad()
def _without_gradient(
    scorer: Scorer,
    what: tuple[str, ...],
    model: Decoder | ShardedModel,
    tokens: Jagged,
    mask: np.ndarray,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    parity: bool = False,
    routing: np.ndarray | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    plan: MicroBatchPlan | None = None,
) -> np.ndarray:
    """Return what the scorer fills in, over the micro-batches of an update on the same batch: float32 [k, N]."""
    found = np.zeros((len(what), len(mask)), np.float32)
    sharded = ShardedModel.of(model)
    decoder, limits = sharded.model, limits_of(sharded, max_tokens, parity=parity)
    device = next(iter(sharded.parameters.values())).device
    beside = dict(columns or {}) | ({} if routing is None else {ROUTING: routing})
    micros = plan_micros(tokens, mask, limits, beside.get(OPENS), plan=plan).score
    if sharded.context is not None and sharded.context.units:
        check_units(micros, sharded.context, device)
    score_micro = partial(scorer, decoder, temperature=temperature, entropy=False)

    def begin() -> Iterator[Scored]:
        for index, micro in cut(tokens, mask, beside, micros, device, sharded.context):
            if micro.blank:
                yield Scored(*sharded.blank_input(parity))
                continue
            given, ctx = model_input(micro, parity)
            if (recorded := recorded_of(micro)) is not None:
                ctx.experts = ExpertContext(parity=parity, replay=recorded)
            yield Scored(given, ctx, index, micro)

    def keep(index: np.ndarray, micro: MicroBatch, hidden: Tensor) -> None:
        score_micro(micro, hidden)
        for row, values in zip(found, to_host([getattr(micro, name) for name in what]) if micro.has_rows else ()):
            row[index] = values

    run_forward(sharded, begin(), len(micros), keep, parity=parity)
    sharded.share(torch.from_numpy(found))
    sharded.reshard()
    return found


@dataclass
class Scored:
    """Micro-batch on its way through the parts of a model without gradients; a blank has no ``micro``."""

    given: ModelInput
    ctx: AttentionContext
    index: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    micro: MicroBatch | None = None

    def timed(self, model: Decoder, i: int, parts: int) -> span:
        """Return the span of one pass."""
        if self.micro is None:
            return span("padding", micro_batch=i)
        work = WorkAmounts.of(model, self.micro)
        return span("infer", -1, i, work.tokens, flops=work.flops.forward / parts, squares=work.squares)


@torch.no_grad()
def run_forward(
    sharded: ShardedModel,
    begin: Iterator[Scored],
    count: int,
    keep: Callable[[np.ndarray, MicroBatch, Tensor], None] = lambda index, micro, hidden: None,
    parity: bool = False,
) -> None:
    """Run all parts over ``count`` micro-batches, and as many blanks as other ranks have more. parity: of all of them.

    keep: gets the tokens of a micro-batch, the micro-batch, and hidden states of the last part.
    """
    handover = sharded.handover("", sharded.sync_micro_batch_count(count))
    started, final = dict[int, Scored](), max((one.part for one in handover.order), default=0)

    def context(i: int) -> AttentionContext:
        if i not in started:
            started[i] = next(begin) if i < count else Scored(*sharded.blank_input(parity))
        return started[i].ctx

    for one in handover.passes(context):
        each = started[one.micro_batch] if one.part < final else started.pop(one.micro_batch)
        with each.timed(sharded.model, one.micro_batch, handover.parts):
            given = each.given._replace(ids=handover.take(one)) if one.part else each.given
            hidden = sharded.parts[sharded.part(one.part)](given, each.ctx)
            if one.part < handover.parts - 1:
                handover.give(one, hidden)
            elif each.micro is not None:
                keep(each.index, each.micro, hidden)
