"""The engine that learns: forward, backward, clip and step over packed sequences, with losses passed in as callables.

A loss sees one micro-batch at a time and divides by denominators of the whole batch, so the split into micro-batches
changes nothing but the order of additions.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tilth.config.axes import DATA, MODEL
from tilth.config.schema import OptimizerConfig as OptimizerSection
from tilth.core.batch import Jagged
from tilth.core.errors import NonFiniteError, RecipeError, TokenCountError
from tilth.models.attention import AttentionContext, DropoutContext
from tilth.models.decoder import Decoder, not_finite
from tilth.parallel.comm import lent
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel
from tilth.rl.metrics import Metric, merge_metrics
from tilth.trace.spans import span
from tilth.training.ema import Average
from tilth.training.micro_schedule import passes
from tilth.training.noise import WEIGHT, NoiseScale
from tilth.training.norms import LayerNorms
from tilth.training.optim import Optimizers
from tilth.training.packed import MicroBatch, Scorer, WorkAmounts, cut, model_input, plan_micros, score, shares_prompts
from tilth.training.schedule import lr_factor

Metrics = dict[str, Metric]
Loss = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""From a micro-batch to its share of the loss and its metrics (merged over micro-batches)."""


POSITION = ("steps", "updates", "peak_lr", "total_steps")
"""Step in the phase's schedule, optimizer steps of all phases (they number the dropout masks), and the schedule."""


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did. ``metrics`` are the loss's own, of all micro-batches.

    tokens: of the batch, prompts included; computed: those that went through the model, a shared prompt once.
    flops: model FLOPs of both passes over these. padded: empty micro-batches that this rank ran because another one had
    more. On several ranks ``loss`` and ``grad_norm`` are of the whole step, all else but ``lr`` of this rank's rows.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    computed: int
    metrics: dict[str, Metric]
    skipped: bool
    padded: int = 0
    flops: float = 0.0


class InFlight:
    """One micro-batch from its first forward pass on; once it has gone back it holds its loss and metrics only."""

    def __init__(
        self,
        x: Tensor,
        ctx: AttentionContext,
        work: WorkAmounts | None,
        loss: Callable[[Tensor], tuple[Tensor, Metrics, float]],
    ) -> None:
        """x, ctx: for the first part; work: None of a blank; loss: of what the last part gives."""
        self.work, self._ctx, self._loss = work, ctx, loss
        self._inputs, self._outputs = [x], list[Tensor]()
        self.value, self.metrics, self.weight = x, Metrics(), 0.0

    def timed(self, direction: str, i: int, parts: int) -> span:
        """The span of one of its passes."""
        if self.work is None:
            return span("padding", micro_batch=i)
        flops = getattr(self.work.flops, direction) / parts
        return span(direction, -1, i, self.work.tokens, flops=flops, squares=self.work.squares)

    def forward(self, part: Callable[..., Tensor], *, last: bool) -> None:
        """Let the next part take what the one before it gave; after the last one, take the loss."""
        given = part(self._inputs[-1], self._ctx)
        if last:
            self.value, self.metrics, self.weight = self._loss(given)
        else:
            self._inputs.append(given.detach().requires_grad_())
        self._outputs.append(self.value if last else given)

    @property
    def flying(self) -> bool:
        """Whether a backward pass is still to come."""
        return bool(self._outputs)

    def backward(self, *, last: bool) -> None:
        """Go back through the part whose turn it is, and drop what it kept."""
        self._outputs.pop().backward(None if last else self._inputs.pop().grad)
        if not self._outputs:
            self.value = self.value.detach()  # read at the end: a device need not wait for each micro-batch
            del self._inputs, self._ctx, self._loss


class TrainEngine:
    """Owns a model's gradients, optimizer and schedule: on one device, or this rank's part of them.

    All ranks of a sharded model make the same calls, each with rows of its own, any number of them.
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
        nonfinite: Literal["stop", "skip"] = "stop",
        seed: int = 0,
        scorer: Scorer = score,
        schedule: str = "sequential",
        ema: float = 0.0,
        watch: Collection[str] = (),
    ) -> None:
        """scorer: fills in what the loss needs of a micro-batch; ``training.packed.appraise`` for a value model.
        schedule: in which order the parts of the model do their passes (``micro_schedule.SCHEDULES``).
        ema: decay of an average of the weights; 0: none. watch: further metrics, as in the recipe's train.watch.
        RecipeError for what cannot work on parts of parameters.
        """
        self.sharded = ShardedModel.of(model)
        self.grid = self.sharded.grid
        self.model = model = self.sharded.model
        _check_layout(self.grid, watch)
        self.scorer, self.schedule = scorer, schedule
        self.section = optimizer
        parts = self.sharded if self.grid.mesh.count(*MODEL) > 1 else None
        self.optimizers = Optimizers(self.sharded.parameters, optimizer, model.table, parts)
        self.ema = Average(self.optimizers.parameters, ema)
        self.noise = NoiseScale() if "noise_scale" in watch else None
        self.norms = LayerNorms(list(self.optimizers.parameters)) if "layer_norms" in watch else None
        self.peak_lr = optimizer.lr
        self.total_steps = total_steps
        self.micro_tokens = micro_tokens
        self.parity = parity
        self.nonfinite = nonfinite
        self.seed = seed
        self.steps = 0
        self.updates = 0
        self.compile_seconds = 0.0
        if compile:
            model.compile()
        self._compiling = compile
        self._measure = self.sharded.norm if self.grid.mesh.count(*MODEL) > 1 else None
        self._shares = shares_prompts(model.config, parity)
        self.device = next(iter(self.optimizers.parameters.values())).device

    def begin(self, peak_lr: float, total_steps: int) -> None:
        """Start a new phase: optimizer state of zeros, averages anew, step 0 of a schedule of this length and peak."""
        for tensor in self.optimizers.state_tensors().values():
            tensor.zero_()
        self.ema.begin()
        if self.noise is not None:
            self.noise.begin()
        self.peak_lr, self.total_steps, self.steps = peak_lr, total_steps, 0

    def position(self) -> dict[str, float]:
        """Everything but tensors that a resume must restore."""
        return {name: getattr(self, name) for name in POSITION} | (self.noise.position() if self.noise else {})

    def restore(self, position: Mapping[str, float]) -> None:
        """Inverse of ``position``."""
        for name in POSITION:
            setattr(self, name, position[name])
        if self.noise is not None:
            self.noise.restore(position)

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.peak_lr * lr_factor(self.section.schedule, self.steps, self.total_steps, self.section.warmup_steps)

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
    ) -> UpdateResult:
        """One optimizer step on the whole batch.

        tokens: n sequences, N tokens in all; mask: [N], 1 on tokens to learn from; columns: per token [N]. dropout:
        False for a loss that compares with what a model said before: without dropout, as always where nothing learns.
        starts: int64 [n], index of each sequence's first token in the whole batch, of which these are one rank's rows:
        so that dropout masks are those of one device. None: these are all.
        Raises NonFiniteError under the policy "stop", TokenCountError if a token was used twice or not at all.
        """
        self.sharded.begin()
        self._forget()
        used, places = np.zeros(len(mask), np.int8), _places(tokens, starts)
        drops = dropout and bool(self.model.config.dropout)
        share = self._shares and not drops  # each sample has a mask of its own
        plan = plan_micros(tokens, mask, self.micro_tokens, share=share, several=self.noise is not None)
        every = cut(tokens, mask, columns, plan, self.device)

        def begin() -> Iterator[InFlight]:
            for index, micro in every:
                work = WorkAmounts.of(self.model, micro)
                given = model_input(micro, self.parity, self._dropout(places[index]) if drops else None)
                used[index] += 1
                yield InFlight(*given, work, partial(self._score, micro, loss, temperature, entropy))
            while True:  # other ranks have more
                yield InFlight(*self.sharded.blank_input(), None, lambda hidden: (self.sharded.nothing(hidden), {}, 0))

        rounds = self.sharded.agree(len(plan))
        done = self._passes(begin(), rounds)[: len(plan)]
        for index, _ in every:  # none is left, if these are the micro-batches of the plan
            used[index] += 1
        _check_used(used)
        total = sum(torch.stack([one.value for one in done]).tolist()) if done else 0.0
        works = [one.work for one in done if one.work is not None]
        computed, flops = sum(work.tokens for work in works), sum(work.flops.both for work in works)
        facts = {"tokens": len(mask), "computed": computed, "flops": flops, "padded": rounds - len(plan)}
        metrics = merge_metrics([one.metrics for one in done])
        result = self._step(total, metrics, facts, len(tokens.lengths), learn=bool(mask.any()))
        self._forget()
        return result

    def _passes(self, begin: Iterator[InFlight], micro_batches: int) -> list[InFlight]:
        """Let the parts do what the schedule says; every micro-batch, in order, once it is done."""
        parts, found = self.sharded.parts, list[InFlight]()
        order = passes(self.schedule, len(parts), micro_batches)
        final = {part: at for at, (direction, part, _) in enumerate(order) if direction == "backward"}
        for at, (direction, part, i) in enumerate(order):
            if i == len(found):
                found.append(next(begin))
            one = found[i]
            with one.timed(direction, i, len(parts)) as around:
                if direction == "forward":
                    one.forward(parts[part], last=part == len(parts) - 1)
                else:
                    alone = sum(other.flying for other in found) == 1
                    self.sharded.micro(part, last=at == final[part], alone=alone)
                    with lent(around), self._apart(one.weight):
                        one.backward(last=part == len(parts) - 1)
            if self._compiling:
                self.compile_seconds += around.seconds
                self._compiling = (direction, part, i) != ("backward", 0, 0)
        return found

    def _step(
        self, loss: float, metrics: dict[str, Metric], done: dict[str, Any], sequences: int, *, learn: bool
    ) -> UpdateResult:
        lr = self.lr
        with span("reduce"):
            self.sharded.finish()
            loss, sequences, learn = self._whole(loss, sequences, learn)
        with span("optimizer"):
            watched = self._layer_norms()
            norm = self.optimizers.clip(self.section.clip_norm, self._measure) if learn else 0.0
            finite = math.isfinite(loss) and math.isfinite(norm)
            if not finite and self.nonfinite == "stop":
                raise self._not_finite(loss, norm, lr)
            if finite and learn:
                self.optimizers.step(lr)
                self.ema.follow()
                watched |= self._noise_scale(norm, sequences)
                metrics |= {name: Metric(value, 1, "mean") for name, value in watched.items()}
        self.steps += 1
        self.updates += 1
        return UpdateResult(loss, norm, lr, metrics=metrics, skipped=not (finite and learn), **done)

    def _not_finite(self, loss: float, norm: float, lr: float) -> NonFiniteError:
        """Return the error of a step whose loss or gradient is not finite: which step, and what the user can do."""
        wrong = not_finite(self.optimizers.parameters.items()) if self.steps == 0 else ""
        found = f"loss {loss:g}, gradient norm {norm:g} at optimizer step {self.steps}"
        if wrong:
            return NonFiniteError(
                f"{found}, before anything was learned: the weights that training began with are not finite: {wrong}",
                key=wrong.partition(" ")[0],
            )
        return NonFiniteError(
            f"{found}: lower the learning rate, here {lr:g} (optimizer.lr; supervised.lr or critic.lr where it "
            "is that), or set train.nonfinite=skip to leave such steps out",
            key="grad_norm" if math.isfinite(loss) else "loss",
        )

    def _whole(self, loss: float, sequences: int, learn: bool) -> tuple[float, int, bool]:
        """Of all data ranks: all of them come to the same decisions about the step."""
        if self.grid.mesh.count(*DATA) == 1:
            return loss, sequences, learn
        own = [loss, sequences * self.grid.first("tokens"), learn]  # ranks that divide tokens have the same sequences
        summed = self.grid.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        return summed[0], int(summed[1]), summed[2] > 0

    def _forget(self) -> None:
        self.optimizers.zero_grad()
        if self.noise is not None:
            self.noise.forget()

    def _apart(self, weight: float) -> AbstractContextManager[None]:
        """Around a backward pass: measures this micro-batch's own gradient, where the noise scale is watched."""
        if self.noise is None or not weight:
            return nullcontext()
        return self.noise.part(list(self.optimizers.parameters.values()), weight)

    def _noise_scale(self, norm: float, sequences: int) -> dict[str, float]:
        """The averages after this step; no ratio where the noise hides the gradient altogether."""
        found = self.noise.take(norm, sequences, self.grid.gather_rows) if self.noise is not None else None
        if found is None:
            return {}
        ratio = {"noise_scale": found.trace / found.signal} if found.signal > 0 else {}
        return ratio | {"noise/trace": found.trace, "noise/signal": found.signal}

    def _layer_norms(self) -> dict[str, float]:
        """Of the weights that the gradient was taken at, and of the gradient before clipping."""
        if self.norms is None:
            return {}
        weights = {name: p.detach() for name, p in self.optimizers.parameters.items()}
        grads = {name: p.grad for name, p in self.optimizers.parameters.items() if p.grad is not None}
        squares = self.sharded.squares if self._measure is not None else None
        measured = {"weight": self.norms.measure(weights, squares), "grad": self.norms.measure(grads, squares)}
        return {f"norm/{kind}/{layer}": norm for kind, found in measured.items() for layer, norm in found.items()}

    def _score(
        self, micro: MicroBatch, loss: Loss, temperature: float, entropy: bool, hidden: Tensor
    ) -> tuple[Tensor, dict[str, Metric], float]:
        """Loss and metrics of a micro-batch, and its weight in the batch, given what the last part makes of it."""
        self.scorer(self.model, micro, hidden, temperature=temperature, entropy=entropy)
        value, metrics = loss(micro)
        watched = self.noise is not None
        weight = (metrics[WEIGHT].total if WEIGHT in metrics else micro.mask.sum()) if watched else 0.0
        return value, metrics, float(weight)

    def _dropout(self, index: np.ndarray) -> DropoutContext:
        """index: places of the tokens in the whole batch, which dropout masks go by."""
        return DropoutContext(self.seed, self.updates, torch.from_numpy(index).to(self.device))


def _places(tokens: Jagged, starts: np.ndarray | None) -> np.ndarray:
    """Index of each token in the whole batch: int64 [N]."""
    own = np.arange(len(tokens.values), dtype=np.int64)
    return own if starts is None else own + np.repeat(starts - tokens.offsets[:-1], tokens.lengths)


def _check_layout(grid: ParallelDims, watch: Collection[str]) -> None:
    """RecipeError for what needs whole gradients where a rank has parts of them."""
    if grid.mesh.count(*MODEL) == 1:
        return
    sizes = " and ".join(f"{name}={grid.size(name)}" for name in grid.mesh.over(*MODEL))
    layout = f"with {sizes} no rank has one: use dp alone"
    if "noise_scale" in watch:
        raise RecipeError(
            f"train.watch=noise_scale needs whole gradients of a micro-batch, and {layout}", key="train.watch"
        )


def _check_used(used: np.ndarray) -> None:
    """Raise TokenCountError unless every token of the batch was used once."""
    if (used != 1).any():
        wrong = int(np.flatnonzero(used != 1)[0])
        raise TokenCountError(
            f"token {wrong} of {len(used)} of the batch was used {used[wrong]} times in one update", key="tokens"
        )
