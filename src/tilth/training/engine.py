"""The engine that learns: forward, backward, clip and step over packed sequences, with losses passed in as callables.

A loss sees one micro-batch at a time and divides by denominators of the whole batch, so the split into micro-batches
changes nothing but the order of additions.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.config.axes import DATA, MODEL
from tilth.config.schema import OptimizerConfig as OptimizerSection
from tilth.core.batch import Jagged
from tilth.core.device import to_host
from tilth.core.errors import NonFiniteError, RecipeError, ReplicaMismatch, TokenCountError, TokenDivisionError
from tilth.core.trajectory import OPENS
from tilth.models.activations import HostActivations
from tilth.models.attention import AttentionContext, DropoutContext
from tilth.models.casts import keep_casts
from tilth.models.decoder import Decoder, not_finite
from tilth.models.inputs import ModelInput
from tilth.parallel.comm import Members, is_fsdp, lent
from tilth.parallel.dims import ParallelDims
from tilth.parallel.pipeline import Handover
from tilth.parallel.ring import RingPlan, pass_around
from tilth.parallel.sharded import ShardedModel, squares_of
from tilth.plan.batch import MicroBatchLimits, MicroBatchPlan, RowTable, plan_rows
from tilth.plan.layout import tp_part
from tilth.plan.offload import OffloadLimits
from tilth.plan.pipeline import Pass
from tilth.rl.metrics import Metric, merge_metrics
from tilth.trace.spans import span
from tilth.training.experts import ROUTERS_ALONE, ExpertOptions, ExpertStep, correct_
from tilth.training.noise import WEIGHT, NoiseScale
from tilth.training.optim import Average, BatchScale, Optimizers, layer_norms, lr_factor, matrices_of
from tilth.training.packed import (
    PLACES,
    ROUTING,
    MicroBatch,
    Scored,
    Scorer,
    WorkAmounts,
    check_units,
    cut,
    limits_of,
    model_input,
    plan_micros,
    run_forward,
    score,
)

Metrics = dict[str, Metric]
Loss = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""Micro-batch -> its share of the loss, and metrics (merged over micro-batches)."""
OnNan = Literal["skip", "rollback", "stop"]
LEFT_OUT = 3
"""Optimizer steps in a row that are not finite, the last of which is an error also under the policy "skip"."""
BROKEN = 2.0**32
"""More than there are ranks."""

POSITION = ("steps", "updates", "peak_lr", "total_steps")
"""Step in the phase's schedule (in batches of the recipe), optimizer steps of all phases (they number the dropout
masks), and the schedule."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step. ``metrics``: the loss's, of all micro-batches.

    tokens: of the batch, prompts included; computed: tokens that went through the model, a shared prompt once. flops:
    model FLOPs of both passes over these. padded: empty micro-batches that this rank ran because another one had more.
    On several ranks ``loss`` and ``grad_norm`` are of the whole step, all else but ``lr`` of this rank's rows; of ranks
    that learn apart the norm is of the rank's gradient.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    computed: int
    metrics: dict[str, Metric]
    skipped: bool
    not_finite: bool = False
    padded: int = 0
    flops: float = 0.0


class Passed(NamedTuple):
    """Result of the passes over a batch. suspects: rows that may have made the loss not finite."""

    loss: float
    metrics: Metrics
    suspects: np.ndarray
    amounts: dict[str, Any]
    experts: ExpertStep | None


class InFlight:
    """One micro-batch from its first forward pass on; after its last backward pass it holds loss and metrics only."""

    def __init__(
        self, given: ModelInput, ctx: AttentionContext, micro: MicroBatch | None = None, work: WorkAmounts | None = None
    ) -> None:
        """given, ctx: arguments of the first part; micro, work: None of a blank."""
        self.given, self.ctx, self.micro, self.work = given, ctx, micro, work
        self.inputs, self.outputs = dict[int, Tensor](), dict[int, Tensor]()
        """By number of the part."""
        self.products = dict[int, Any]()
        """What is left of backward passes for "weight" passes, by number of the part."""
        self.value, self.metrics = torch.zeros(()), Metrics()

    def timed(self, one: Pass, parts: int, *, split: bool) -> span:
        """Return the span of one pass. split: backward passes leave half of their work to "weight" passes."""
        if self.work is None:
            return span("padding", micro_batch=one.micro_batch)
        flops = (self.work.flops.forward if one.direction == "forward" else self.work.flops.backward) / parts
        flops = flops / 2 if split and one.direction != "forward" else flops
        direction = one.direction
        return span(direction, -1, one.micro_batch, self.work.tokens, flops=flops, squares=self.work.squares)

    def backward(self, part: int, grad: Tensor | None) -> Tensor | None:
        """Run the backward pass of a part and free its activations. Returns the gradient of its input, if it has one.

        grad: of its output; None of the loss.
        """
        self.outputs.pop(part).backward(grad)
        x = self.inputs.pop(part, None)
        if not self.outputs:
            self.value = self.value.detach()  # read at the end: a device need not wait for each micro-batch
            self.micro = None
        return None if x is None else x.grad


class TrainEngine:
    """Gradients, optimizer and schedule of a model: on one device, or this rank's part of a sharded one.

    All ranks of a sharded model make the same calls, each with its own rows, any number of them.
    """

    def __init__(
        self,
        model: Decoder | ShardedModel,
        optimizer: OptimizerSection,
        *,
        total_steps: int,
        micro_tokens: int,
        parity: bool = False,
        compile: bool = False,
        on_nan: OnNan = "skip",
        seed: int = 0,
        scorer: Scorer = score,
        schedule: str = "",
        ema: float = 0.0,
        watch: Collection[str] = (),
        experts: ExpertOptions = ROUTERS_ALONE,
        offload: float | OffloadLimits = 0.0,
    ) -> None:
        """scorer: fills in what the loss needs of a micro-batch; ``training.packed.appraise`` for a value model.
        schedule: order of the passes of the model's parts (``plan.pipeline.SCHEDULES``); "": the model's own. ema:
        decay of an average of the weights; 0: none. watch: further metrics (train.watch). experts: how routers learn.
        offload: share of the activations' rows that moves to the host, or what decides it for each micro-batch.
        on_nan: a step whose loss or gradient is not finite is left out ("skip"), or it and the ``LEFT_OUT``-th in a row
        raise NonFiniteError.
        RecipeError for what cannot work on parts of parameters."""
        self.sharded = ShardedModel.of(model)
        self.grid = self.sharded.grid
        self.model = model = self.sharded.model
        _check_layout(self.grid, watch)
        self.scorer, self.schedule, self.experts = scorer, schedule or self.sharded.schedule, experts
        self.section = optimizer
        parts = self.sharded if self.grid.mesh.count(*MODEL) > 1 or model.config.num_experts else None
        learned = self.sharded.divide_updates(matrices_of(optimizer, model.table, self.sharded.layouts))
        squares = self.sharded.squares if self.sharded.updates or self.grid.mesh.count(*MODEL) > 1 else squares_of
        self.optimizers = Optimizers(learned, optimizer, model.table, self.sharded.updates or parts, squares)
        self.batch = BatchScale(optimizer.ramp_steps, self.optimizers.linear)
        self.ema = Average(self.optimizers.parameters, ema)
        self.noise = NoiseScale() if "noise_scale" in watch else None
        self._watches_layers = "layer_norms" in watch
        self.peak_lr, self.total_steps, self.micro_tokens = optimizer.lr, total_steps, micro_tokens
        self.parity, self.on_nan, self.seed = parity, on_nan, seed
        self.troubles = list[str]()
        """Steps that were left out since someone took this list: what was not finite, and which rows."""
        self._tokens = np.zeros(2)
        """Of this rank's rows, and how many of them it has computed, since gradients were dropped."""
        self._left_out = self.updates = 0
        self.steps: float = 0
        self.before_update: Callable[[], None] = lambda: None
        self.after_update: Callable[[UpdateResult], None] = lambda _: None
        """Called before each optimizer step, and after it."""
        self.compile_seconds = 0.0
        if compile:
            model.compile()
        self._compiling = self._compiled = compile
        self._gathers = any(is_fsdp(module) for part in self.sharded.parts for module in part.modules())
        self._measure = self.sharded.norm if self.sharded.updates or self.grid.mesh.count(*MODEL) > 1 else None
        self._drops = self.sharded.drops
        self.sharded.gradients.reducer.follow(self.optimizers.made, self.optimizers.state_tensors())
        limits = limits_of(self.sharded, micro_tokens, parity=parity)
        self.limits = replace(limits, several=self.noise is not None, dropout=self._drops, offload=offload)
        self.device = self.sharded.device
        for part in self.sharded.parts if offload else ():
            part.offload = HostActivations(part.parameters(), self.device)

    def begin(self, peak_lr: float, total_steps: int) -> None:
        """Start a new phase: zero the optimizer state and averages, and start a schedule of this length and peak."""
        for tensor in self.optimizers.state_tensors().values():
            tensor.zero_()
        self.sharded.gradients.reducer.restart()
        if self.sharded.updates is not None:
            self.sharded.updates.refresh()
        self.ema.begin()
        if self.noise is not None:
            self.noise.begin()
        self.peak_lr, self.total_steps, self.steps = peak_lr, total_steps, 0
        self.batch.restore({})

    def tune(self, peak_lr: float, total_steps: int, share: float = 1.0) -> None:
        """Go on with this peak learning rate and length of the schedule. share: number of samples of a step over that
        of the recipe, by which the learning rate and progress in the schedule go (``BatchScale``)."""
        self.peak_lr, self.total_steps = peak_lr, total_steps
        self.batch.change(share, self.updates)
        if not self.steps:
            self.batch.before = share

    def position(self) -> dict[str, float]:
        """Return everything but tensors that a resume must restore."""
        found = {name: getattr(self, name) for name in POSITION} | self.batch.position()
        return found | (self.noise.position() if self.noise else {})

    def restore(self, position: Mapping[str, float]) -> None:
        """Restore what ``position`` returned, and forget a step that was not completed."""
        self._forget()
        self._left_out = 0
        self.troubles.clear()
        for name in POSITION:
            setattr(self, name, position[name])
        self.sharded.gradients.reducer.begin(self.updates)
        self.batch.restore(position)
        if self.noise is not None:
            self.noise.restore(position)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        section, scale = self.section, self.batch.factor(self.updates)
        length = self.total_steps, section.warmup_steps, section.plateau_steps
        return self.peak_lr * lr_factor(section.schedule, self.steps, *length) * scale

    def update(
        self,
        tokens: Jagged,
        mask: np.ndarray,
        columns: Mapping[str, np.ndarray],
        loss: Loss,
        *,
        temperature: float = 1.0,
        entropy: bool = True,
        dropout: bool = True,
        starts: np.ndarray | None = None,
        routing: np.ndarray | None = None,
        names: Mapping[str, np.ndarray] | None = None,
        plan: MicroBatchPlan | None = None,
    ) -> UpdateResult:
        """Run one optimizer step on the whole batch.

        tokens: n sequences, N tokens in all; mask: [N], 1 on tokens to learn from; columns: per token [N], but for
        ``media`` of sequences [n]. dropout: False for a loss that compares with earlier outputs of the model. starts:
        int64 [n], index of each sequence's first token in the whole batch, of which these are one rank's rows, so that
        dropout masks are those of one device; None: these are all. routing: int64 [N, layers with experts, k], the
        generation engine's choices (below 0: not known). names: int64 [n] each, which name rows in messages. plan: the
        controller's, of these rows; None: the engine makes one. Raises NonFiniteError (see ``on_nan``), PlanError for a
        plan of other rows, TokenCountError if a token was used twice or not at all, TokenDivisionError if ranks that
        divide tokens have not computed each of them once, ReplicaMismatch on the rank whose shard of the gradients is
        not what all ranks gave for it.
        """
        self.before_update()
        self.sharded.begin(self.updates, early=self.noise is None)
        self._forget()
        how: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "dropout": dropout}
        found = self.accumulate(tokens, mask, columns, loss, starts=starts, routing=routing, plan=plan, **how)
        bad = found.suspects
        named = {
            name: column[bad].astype(np.int64)
            for name, column in (names or {"row": np.arange(len(tokens.lengths))}).items()
        }
        result = self._step(found, len(tokens.lengths), named, learn=bool(mask.any()))
        self.after_update(result)
        self._forget()
        return result

    def accumulate(
        self,
        tokens: Jagged,
        mask: np.ndarray,
        columns: Mapping[str, np.ndarray],
        loss: Loss,
        *,
        temperature: float = 1.0,
        entropy: bool = True,
        dropout: bool = True,
        starts: np.ndarray | None = None,
        routing: np.ndarray | None = None,
        plan: MicroBatchPlan | None = None,
    ) -> "Passed":
        """Run forward and backward passes, which add to the gradients that are there; arguments of ``update``."""
        used, context = np.zeros(len(mask), np.int8), self.sharded.context
        micros = plan_micros(tokens, mask, self.limits, columns.get(OPENS), dropout=dropout, plan=plan).learn
        if context is not None and context.units:
            check_units(micros, context, self.device)
        given = columns if routing is None else {**columns, ROUTING: routing}
        if dropout and self._drops:
            given = {**given, PLACES: _places(tokens, starts)}
        cutting = partial(cut, tokens, mask, given, micros, self.device, context)
        every, step = cutting(), self._expert_step(len(mask))
        rounds = self.sharded.sync_micro_batch_count(len(micros))
        input_of = partial(self._input_of, experts=step)

        if step is not None and step.counts_first:
            scored = (Scored(*input_of(m), index, None if m.blank else m) for index, m in cutting())
            self._count_loads(step, scored, len(micros))
        scorer = partial(self.scorer, self.model, temperature=temperature, entropy=entropy)
        with self._casts():
            done = self._passes(self._in_flight(every, used, input_of), rounds, scorer, loss)[: len(micros)]
        for index, _ in every:  # none is left, if these are the micro-batches of the plan
            used[index] += 1
        check_used(used)
        values = torch.stack([one.value for one in done]).tolist() if done else []
        bad = suspects([micro.rows for micro in micros], values, tokens, columns)
        found = sum(values), _on_host(merge_metrics([one.metrics for one in done])), bad
        padded = rounds - sum(one.work is not None for one in done)
        amounts = {"tokens": len(mask), "padded": padded, **_amounts(done)}
        return Passed(*self.sharded.share_object(found), amounts, step)

    def time_passes(self, lengths: Sequence[int]) -> float:
        """Return the seconds of both passes over a micro-batch of sequences of these lengths, without a step.

        All ranks must call it, each with the same lengths. Gradients are dropped; weights, state and position stay.
        """
        tokens = Jagged.of([np.arange(n, dtype=np.int64) % self.model.config.vocab_size for n in lengths])
        mask = np.ones(len(tokens.values), np.uint8)
        mask[tokens.offsets[:-1]] = 0
        planned = plan_rows(RowTable.of(tokens, mask), MicroBatchLimits(len(mask)))
        self.sharded.begin(self.updates)
        self._forget()
        started = self._now()
        self.accumulate(tokens, mask, {}, _sum_of_scores, entropy=False, dropout=False, plan=planned)
        seconds = self._now() - started
        self.sharded.begin(self.updates)
        self._forget()
        return seconds

    def time_ring(self, tokens: int) -> float:
        """Return the seconds in which keys and values of a sequence of this length, and their gradients, visit all
        ranks that make units, in all layers of the model; nothing is computed.

        All ranks must call it. 0 where no ranks make units.
        """
        context, config = self.sharded.context, self.model.config
        if context is None or not context.units:
            return 0.0
        own = tp_part(config, self.grid.size("tp"))
        share = context.share([tokens], self.device, Members.of(context.group))
        shape = len(share.tokens), 2, own.num_kv_heads, own.head_dim
        kv = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        plan = RingPlan(share.division, share.rank, None, own.num_heads, self.device)
        started = self._now()
        for _ in range(config.num_layers):
            pass_around(kv, plan, share.members)
        return self._now() - started

    def _now(self) -> float:
        """Return the time in seconds when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _in_flight(
        self,
        every: Iterable[tuple[np.ndarray, MicroBatch]],
        used: np.ndarray,
        input_of: Callable[..., tuple[ModelInput, AttentionContext]],
    ) -> Iterator[InFlight]:
        """Yield the micro-batches, then blanks without end; count in ``used`` each token that is used."""
        for index, micro in every:
            used[index] += 1
            given, ctx = input_of(micro)
            if micro.blank:
                yield InFlight(given, ctx)
                continue
            self._tokens += len(index), len(given.ids) if micro.trees is None else len(index)
            yield InFlight(given, ctx, micro, WorkAmounts.of(self.model, micro))
        while True:  # other ranks have more
            yield InFlight(*self.sharded.blank_input(self.parity))

    def _input_of(self, micro: MicroBatch, *, experts: ExpertStep | None) -> tuple[ModelInput, AttentionContext]:
        """Return a model's arguments for a micro-batch. Without the column of places it has no dropout."""
        if micro.blank:
            return self.sharded.blank_input(self.parity)
        places = micro.columns.pop(PLACES, None)
        given, ctx = model_input(micro, self.parity, None if places is None else self._dropout(places))
        if experts is not None:
            ctx.experts = experts.context(micro)
        return given, ctx

    def _expert_step(self, tokens: int) -> ExpertStep | None:
        """Return what routers need in one step; None for a dense model. tokens: of this rank's rows."""
        if not self.model.config.num_experts:
            return None
        whole = float(self.grid.sum(torch.tensor([tokens], dtype=torch.float64), "rows"))
        return ExpertStep(self.model.config, self.grid, self.experts, whole, self.parity)

    def _count_loads(self, step: ExpertStep, begin: Iterator[Scored], count: int) -> None:
        """Run the micro-batches of a step, and blanks, to count the loads of experts."""
        run_forward(self.sharded, begin, count, parity=self.parity)
        self.sharded.reshard()
        step.count()

    def _casts(self) -> AbstractContextManager[None]:
        """Keep weights in the compute dtype for all micro-batches of the block, where a pass keeps all of them anyway,
        and they stay where they are."""
        again = any(part.checkpointing for part in self.sharded.parts)
        if self._compiled or again or self._gathers:
            return nullcontext()
        return keep_casts(p for part in self.sharded.parts for p in part.parameters())

    def _passes(
        self, begin: Iterator[InFlight], micro_batches: int, scorer: Callable[[MicroBatch, Tensor], None], loss: Loss
    ) -> list[InFlight]:
        """Run the passes of this rank's parts in the order of the schedule; return the micro-batches in order."""
        sharded, found = self.sharded, list[InFlight]()
        handover = sharded.handover(self.schedule, micro_batches)
        final = {one[:2]: at for at, one in enumerate(handover.order)}

        def context(i: int) -> AttentionContext:
            if i == len(found):
                found.append(next(begin))
            return found[i].ctx

        for at, one in enumerate(handover.passes(context)):
            flight = found[one.micro_batch]
            with flight.timed(one, handover.parts, split=sharded.deferred is not None) as around:
                last = at == final[one[:2]]
                if one.direction == "forward":
                    self._forward(flight, one, handover, scorer, loss)
                elif one.direction == "backward":
                    alone = sum(bool(other.outputs) for other in found) == 1
                    sharded.start_micro_batch(sharded.part(one.part), last=last, alone=alone)
                    with lent(around), self._apart(flight):
                        self._backward(flight, one, handover)
                elif sharded.deferred is not None:
                    sharded.deferred.finish(flight.products.pop(one.part), last=last)
            if self._compiling:
                self.compile_seconds += around.seconds
                self._compiling = one != Pass("backward", sharded.stage, 0)
        return found

    def _forward(
        self, flight: InFlight, one: Pass, handover: Handover, scorer: Callable[[MicroBatch, Tensor], None], loss: Loss
    ) -> None:
        """Run the forward pass of a part and, after the last one, the loss."""
        given = flight.given
        if one.part:
            flight.inputs[one.part] = handover.take(one).requires_grad_()
            given = given._replace(ids=flight.inputs[one.part])
        part = self.sharded.parts[self.sharded.part(one.part)]
        if part.offload is not None:
            part.offload.ratio = 0.0 if flight.micro is None else flight.micro.offload
        hidden = part(given, flight.ctx)
        if one.part < handover.parts - 1:
            handover.give(one, hidden.detach())
        elif flight.micro is None:
            flight.value = hidden = self.sharded.nothing(hidden)
        else:
            scorer(flight.micro, hidden)
            flight.value, flight.metrics = loss(flight.micro) if flight.micro.has_rows else (flight.micro.nothing(), {})
            hidden = flight.value
        flight.outputs[one.part] = hidden

    def _backward(self, flight: InFlight, one: Pass, handover: Handover) -> None:
        """Run the backward pass of a part."""
        passed = flight.backward(one.part, None if one.part == handover.parts - 1 else handover.take(one))
        if self.sharded.deferred is not None:
            flight.products[one.part] = self.sharded.deferred.take()
        if passed is not None:
            handover.give(one, passed)

    def _step(self, passed: "Passed", sequences: int, named: Mapping[str, np.ndarray], *, learn: bool) -> UpdateResult:
        lr, loss, metrics, experts = self.lr, passed.loss, passed.metrics, passed.experts
        loads = None if experts is None else experts.loads()
        if experts is not None and loads is not None:
            metrics |= experts.metrics(loads)
        with span("reduce"):
            self.sharded.gradients.reduce()
        with span("optimizer"):
            if wrong := self.sharded.gradients.misreduced():
                raise ReplicaMismatch(f"gradients changed on their way between ranks: {wrong}", key="gradients")
            watched = self._layer_norms()
            norm = self.optimizers.clip(self.section.clip_norm, self._measure)
            loss, sequences, learn, norm = self._whole(loss, sequences, learn, norm)
            finite = math.isfinite(loss) and math.isfinite(norm)
            if not finite:
                self._leave_out(loss, norm, named)
            if finite and learn:
                self._left_out = 0
                if (factor := self.batch.factor(self.updates)) != self.batch.used:
                    self.optimizers.rescale(factor / self.batch.used)
                    self.batch.used = factor
                self.sharded.gradients.reducer.prepare()
                self.optimizers.step(lr)
                if loads is not None and self.experts.correction:
                    correct_(self.sharded, loads, self.experts.correction)
                self.ema.follow()
                watched |= self._noise_scale(norm, sequences)
                metrics |= {name: Metric(value, 1, "mean") for name, value in watched.items()}
        self.sharded.gradients.reducer.settle(finite and learn)
        self.steps += 1 if self.batch.share == 1 else self.batch.share
        self.updates += 1
        return UpdateResult(
            loss, norm, lr, metrics=metrics, skipped=not (finite and learn), not_finite=not finite, **passed.amounts
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's part of the gradients that ``accumulate`` has added up, summed over all ranks."""
        given, computed = self.grid.sum(torch.from_numpy(self._tokens), *DATA).tolist()
        check_divided(given / self.grid.mesh.pieces, computed)
        self.sharded.gradients.reduce()
        if wrong := self.sharded.gradients.misreduced():
            raise ReplicaMismatch(f"gradients changed on their way between ranks: {wrong}", key="gradients")
        return {name: p.grad for name, p in self.optimizers.parameters.items() if p.grad is not None}

    def step(self, gradients: Mapping[str, Tensor], lr: float, clip_norm: float = 0.0) -> float:
        """Run one optimizer step with what ``gradients`` returns; return its norm. clip_norm: the greatest; 0: any.
        All ranks must call it. NonFiniteError: the norm is not finite; weights and optimizer state stay."""
        for name, p in self.optimizers.parameters.items():
            p.grad = gradients.get(name)
        norm = self.optimizers.clip(clip_norm, self._measure)
        if math.isfinite(norm):
            self.sharded.gradients.reducer.prepare()
            self.optimizers.step(lr)
            self.steps, self.updates = self.steps + 1, self.updates + 1
        self.sharded.gradients.reducer.settle(math.isfinite(norm))
        self._forget()
        if not math.isfinite(norm):
            message = f"the gradient norm is {norm:g}: the step is left out, and its gradients are dropped"
            raise NonFiniteError(message, key="grad_norm.step")
        return norm

    def _leave_out(self, loss: float, norm: float, named: Mapping[str, np.ndarray]) -> None:
        """Leave a step out on all ranks, which have the same loss and norm, or raise NonFiniteError on all of them."""
        found = f"loss {loss:g}, gradient norm {norm:g} at optimizer step {self.steps}"
        if self.steps == 0:
            wrong = not_finite(self.optimizers.parameters.items())
            if self.grid.sum(torch.tensor([float(bool(wrong))]), "rows", "tokens", *MODEL).item():
                raise NonFiniteError(
                    f"{found}, before anything was learned: the weights that training began with are not finite: "
                    f"{wrong or 'see the other ranks'}",
                    key=wrong.partition(" ")[0] or "weights",
                )
        every = self.grid.gather_rows(named)
        self.troubles.append(found := f"{found}; {listed(every)}")
        self._left_out += 1
        if self.on_nan != "skip" or self._left_out >= LEFT_OUT:
            again = f", {self._left_out} steps in a row" if self._left_out > 1 else ""
            raise NonFiniteError(
                f"{found}{again}: lower the learning rate, here {self.lr:g} (optimizer.lr; supervised.lr or critic.lr "
                'where it is that), or leave such steps out (guard.on_nan = "skip")',
                key="grad_norm" if math.isfinite(loss) else "loss",
            )

    def _whole(self, loss: float, sequences: int, learn: bool, norm: float) -> tuple[float, int, bool, float]:
        """Combine over data ranks, so that all of them decide alike about the step. Their gradient norms are copies of
        one. One that alone is not finite (a flipped bit) makes it NaN for all: its rank adds ``BROKEN`` to the number
        of those that learn."""
        counted = float(learn) + (0.0 if math.isfinite(norm) else BROKEN)
        given, computed = self._tokens.tolist()
        if self.grid.mesh.count("rows") > 1:
            own = torch.tensor([loss, sequences, counted, given, computed], dtype=torch.float64)
            loss, sequences, counted, given, computed = self.grid.sum(own).tolist()
        if self.grid.mesh.pieces > 1:
            own = torch.tensor([counted, computed], dtype=torch.float64)
            counted, computed = self.grid.sum(own, "tokens", without=("rows",)).tolist()
        check_divided(given, computed)
        broken, learning = divmod(counted, BROKEN)
        if broken and math.isfinite(norm):
            norm = math.nan
        return loss, int(sequences), learning > 0, norm if learning else 0.0

    def _forget(self) -> None:
        self.optimizers.zero_grad()
        self._tokens[:] = 0
        if self.noise is not None:
            self.noise.forget()

    def _apart(self, one: InFlight) -> AbstractContextManager[None]:
        """Measure a micro-batch's gradient in the block, if the noise scale is watched."""
        if self.noise is None or one.micro is None:
            return nullcontext()
        weight = float(one.metrics[WEIGHT].total if WEIGHT in one.metrics else one.micro.mask.sum())
        learned = [p for p in self.sharded.parameters.values() if p.requires_grad]
        return self.noise.part(learned, weight) if weight else nullcontext()

    def _noise_scale(self, norm: float, sequences: int) -> dict[str, float]:
        """Return the averages after this step; no ratio if the noise hides the gradient."""
        found = self.noise.take(norm, sequences, self.grid.gather_rows) if self.noise is not None else None
        if found is None:
            return {}
        ratio = {"noise_scale": found.trace / found.signal} if found.signal > 0 else {}
        return ratio | {"noise/trace": found.trace, "noise/signal": found.signal}

    def _layer_norms(self) -> dict[str, float]:
        """Return norms of the weights at which the gradient was taken, and of the gradient before clipping."""
        if not self._watches_layers:
            return {}
        weights = {name: p.detach() for name, p in self.optimizers.parameters.items()}
        grads = {name: p.grad for name, p in self.optimizers.parameters.items() if p.grad is not None}
        found = {kind: self.sharded.squares(of) for kind, of in (("weight", weights), ("grad", grads))}
        norms = {kind: layer_norms(names, *squares) for kind, (names, squares) in found.items()}
        return {f"norm/{kind}/{layer}": norm for kind, found in norms.items() for layer, norm in found.items()}

    def _dropout(self, places: Tensor) -> DropoutContext:
        """places: of the tokens in the whole batch, which number the dropout masks."""
        return DropoutContext(self.seed, self.updates, places)


def _amounts(done: Iterable[InFlight]) -> dict[str, float]:
    """Return the tokens that these micro-batches sent through the model, and the FLOPs."""
    works = [one.work for one in done if one.work is not None]
    return {"computed": sum(work.tokens for work in works), "flops": sum(work.flops.both for work in works)}


def _places(tokens: Jagged, starts: np.ndarray | None) -> np.ndarray:
    """Return the index of each token in the whole batch: int64 [N]."""
    own = np.arange(len(tokens.values), dtype=np.int64)
    return own if starts is None else own + np.repeat(starts - tokens.offsets[:-1], tokens.lengths)


def _check_layout(grid: ParallelDims, watch: Collection[str]) -> None:
    """Raise RecipeError for options that need whole gradients where a rank has parts of them."""
    if "noise_scale" in watch and grid.mesh.count("tokens", *MODEL) > 1:
        sizes = " and ".join(f"{name}={grid.size(name)}" for name in grid.mesh.over("tokens", *MODEL))
        message = f"train.watch=noise_scale needs whole gradients of a micro-batch, and with {sizes} no rank has one"
        raise RecipeError(f"{message}: use dp alone", key="train.watch")


def _on_host(metrics: Metrics) -> Metrics:
    """Return metrics without tensors of a device, for which the host waits once."""
    every = [(name, field, v) for name, m in metrics.items() for field, v in vars(m).items() if isinstance(v, Tensor)]
    moved: dict[str, dict[str, Any]] = {name: {} for name in metrics}
    there = [(name, field, v) for name, field, v in every if v.device.type != "cpu"]
    for (name, field, _), value in zip(there, to_host([v for *_, v in there])):
        moved[name][field] = torch.from_numpy(value)
    return {name: replace(metric, **moved[name]) for name, metric in metrics.items()}


def _sum_of_scores(micro: MicroBatch) -> tuple[Tensor, Metrics]:
    """Loss of a pass whose gradient nobody uses."""
    return micro.logprobs.sum() + micro.values.sum(), {}


def negative_log_likelihood(denominator: float) -> Loss:
    """Sum of -log p over the tokens in the mask, divided by the number of such tokens in the whole batch."""

    def loss(micro: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        return -micro.logprobs.sum() / max(denominator, 1.0), {}

    return loss


NAMED = 8
"""Most rows that a message names."""


def check_used(used: np.ndarray) -> None:
    """Raise TokenCountError unless every token of the batch was used once."""
    if (used != 1).any():
        wrong = int(np.flatnonzero(used != 1)[0])
        raise TokenCountError(
            f"token {wrong} of {len(used)} of the batch was used {used[wrong]} times in one update", key="tokens"
        )


def check_divided(given: float, computed: float) -> None:
    """Raise TokenDivisionError unless all ranks together have computed each token of their batch once."""
    if given != computed:
        raise TokenDivisionError(
            f"all ranks together computed {computed:.0f} tokens of a batch of {given:.0f}: the mechanism of an axis "
            "that splits tokens does not divide them among its ranks",
            key="tokens.divided",
        )


def suspects(
    plan: Sequence[np.ndarray], values: Sequence[float], tokens: Jagged, columns: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the rows that may have made a loss not finite, in order: int64.

    plan: rows of each micro-batch; values: their losses; columns: per token. Of the rows of a micro-batch whose loss is
    not finite, those with a number that is not; all of them if the model made it of finite numbers.
    """
    found = [rows for rows, value in zip(plan, values) if not math.isfinite(value)]
    rows = np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)
    wrong = np.zeros(len(tokens.values) + 1, np.int64)
    for column in columns.values():
        if len(rows) and column.dtype.kind == "f":
            wrong[1:] += ~np.isfinite(column).reshape(len(column), -1).all(1)
    upto = np.cumsum(wrong)
    given = upto[tokens.offsets[rows + 1]] > upto[tokens.offsets[rows]]
    return rows[given] if given.any() else rows


def listed(rows: Mapping[str, np.ndarray]) -> str:
    """Return the rows whose loss is not finite as text. rows: what names them."""
    count = len(next(iter(rows.values())))
    if not count:
        return "the loss of every row is finite, the gradient is not"
    more = " ..." if count > NAMED else ""
    texts = [f"{name} {', '.join(map(str, column[:NAMED]))}{more}" for name, column in rows.items()]
    return f"{count} rows may be the cause: {'; '.join(texts)}"
