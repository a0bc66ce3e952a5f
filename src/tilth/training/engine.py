"""The engine that learns: forward, backward, clip and step over packed sequences, with losses passed in as callables.

A loss sees one micro-batch at a time and divides by denominators of the whole batch, so the split into micro-batches
changes nothing but the order of additions.
"""

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tilth.config.schema import Optimizer as OptimizerSection
from tilth.core.batch import Ragged
from tilth.core.errors import NonFiniteError, RecipeError, TokenCountError
from tilth.models.attention import DropoutContext
from tilth.models.decoder import Decoder, not_finite
from tilth.parallel.grid import DATA, MODEL, Grid
from tilth.parallel.meeting import lent
from tilth.parallel.sharded import Sharded
from tilth.rl.metrics import Metric, merge_metrics
from tilth.trace.spans import span
from tilth.training.ema import Average
from tilth.training.noise import WEIGHT, NoiseScale
from tilth.training.norms import LayerNorms
from tilth.training.optim import Optimizers
from tilth.training.packed import Micro, Scorer, Work, cut, plan_micros, score, shares_prompts
from tilth.training.schedule import lr_factor

Loss = Callable[[Micro], tuple[Tensor, dict[str, Metric]]]
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


class TrainEngine:
    """Owns a model's gradients, optimizer and schedule: on one device, or this rank's part of them.

    All ranks of a sharded model make the same calls, each with rows of its own, any number of them.
    """

    def __init__(
        self,
        model: Decoder | Sharded,
        optimizer: OptimizerSection,
        *,
        total_steps: int,
        micro_tokens: int,
        parity: bool = False,
        compile: bool = False,
        nonfinite: Literal["stop", "skip"] = "stop",
        seed: int = 0,
        scorer: Scorer = score,
        ema: float = 0.0,
        watch: Collection[str] = (),
    ) -> None:
        """scorer: fills in what the loss needs of a micro-batch; ``training.packed.appraise`` for a value model.

        ema: decay of an average of the weights; 0: none. watch: further metrics, as in the recipe's train.watch.
        RecipeError for what cannot work on parts of parameters.
        """
        self.sharded = Sharded.of(model)
        self.grid = self.sharded.grid
        self.model = model = self.sharded.model
        _check_layout(self.grid, watch)
        self.scorer = scorer
        self.section = optimizer
        parts = self.sharded if self.grid.size(*MODEL) > 1 else None
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
        self._measure = self.sharded.norm if self.grid.size(*MODEL) > 1 else None
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
        tokens: Ragged,
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
        values, works, metrics = list[Tensor](), list[Work](), list[dict[str, Metric]]()
        used, places = np.zeros(len(mask), np.int8), _places(tokens, starts)
        drops = dropout and bool(self.model.config.dropout)
        share = self._shares and not drops  # each sample has a mask of its own
        plan = plan_micros(tokens, mask, self.micro_tokens, share=share, several=self.noise is not None)
        rounds = self.sharded.agree(len(plan))
        for i, (index, micro) in enumerate(cut(tokens, mask, columns, plan, self.device)):
            self.sharded.micro(last=i == rounds - 1)
            work = Work.of(self.model, micro)
            with span("forward", -1, i, work.tokens, flops=work.flops.forward, squares=work.squares) as forward:
                self._score(micro, places[index] if drops else None, temperature, entropy=entropy)
                value, parts = loss(micro)
            with span("backward", -1, i, work.tokens, flops=work.flops.backward, squares=work.squares) as backward:
                self._backward(value, backward, micro, parts)
            if self._compiling:
                self.compile_seconds, self._compiling = forward.seconds + backward.seconds, False
            values.append(value.detach())  # read at the end: a device need not wait for each micro-batch
            used[index] += 1
            works.append(work)
            metrics.append(parts)
        _check_used(used)
        self._pad(len(plan), rounds)
        total = sum(torch.stack(values).tolist()) if values else 0.0
        computed, flops = sum(work.tokens for work in works), sum(work.flops.both for work in works)
        done = {"tokens": len(mask), "computed": computed, "flops": flops, "padded": rounds - len(plan)}
        result = self._step(total, merge_metrics(metrics), done, len(tokens.lengths), learn=bool(mask.any()))
        self._forget()
        return result

    def _pad(self, own: int, rounds: int) -> None:
        """Take part in the collectives of ranks that have more micro-batches than this one's ``own``."""
        for i in range(own, rounds):
            with span("padding", micro_batch=i) as padding, lent(padding):
                self.sharded.micro(last=i == rounds - 1)
                self.sharded.blank().backward()

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
                raise NonFiniteError(f"loss {loss:g}, gradient norm {norm:g} at optimizer step {self._why(lr)}")
            if finite and learn:
                self.optimizers.step(lr)
                self.ema.follow()
                watched |= self._noise_scale(norm, sequences)
                metrics |= {name: Metric(value, 1, "mean") for name, value in watched.items()}
        self.steps += 1
        self.updates += 1
        return UpdateResult(loss, norm, lr, metrics=metrics, skipped=not (finite and learn), **done)

    def _why(self, lr: float) -> str:
        """Which step was not finite, and what to do about it."""
        wrong = not_finite(self.optimizers.parameters.items()) if self.steps == 0 else ""
        if wrong:
            return f"0, before anything was learned: the weights that training began with are not finite: {wrong}"
        return (
            f"{self.steps}: lower the learning rate, here {lr:g} (optimizer.lr; supervised.lr or critic.lr where it "
            "is that), or set train.nonfinite=skip to leave such steps out"
        )

    def _whole(self, loss: float, sequences: int, learn: bool) -> tuple[float, int, bool]:
        """Of all data ranks: all of them come to the same decisions about the step."""
        if self.grid.size(*DATA) == 1:
            return loss, sequences, learn
        summed = self.grid.sum(torch.tensor([loss, sequences, learn], dtype=torch.float64)).tolist()
        return summed[0], int(summed[1]), summed[2] > 0

    def _backward(self, value: Tensor, around: span, micro: Micro, parts: Mapping[str, Metric]) -> None:
        with lent(around), self._apart(micro, parts):
            value.backward()

    def _forget(self) -> None:
        self.optimizers.zero_grad()
        if self.noise is not None:
            self.noise.forget()

    def _apart(self, micro: Micro, parts: Mapping[str, Metric]) -> AbstractContextManager[None]:
        """Around a backward pass: measures this micro-batch's own gradient, where the noise scale is watched."""
        if self.noise is None:
            return nullcontext()
        weight = float(parts[WEIGHT].total if WEIGHT in parts else micro.mask.sum())
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

    def _score(self, micro: Micro, index: np.ndarray | None, temperature: float, *, entropy: bool) -> None:
        """index: places of the tokens in the whole batch, which dropout masks go by; None: no dropout."""
        dropout = None
        if index is not None:
            dropout = DropoutContext(self.seed, self.updates, torch.from_numpy(index).to(self.device))
        self.scorer(self.model, micro, temperature=temperature, entropy=entropy, parity=self.parity, dropout=dropout)


def _places(tokens: Ragged, starts: np.ndarray | None) -> np.ndarray:
    """Index of each token in the whole batch: int64 [N]."""
    own = np.arange(len(tokens.values), dtype=np.int64)
    return own if starts is None else own + np.repeat(starts - tokens.offsets[:-1], tokens.lengths)


def _check_layout(grid: Grid, watch: Collection[str]) -> None:
    """RecipeError for what needs whole gradients where a rank has parts of them."""
    if grid.size(*MODEL) == 1:
        return
    layout = f"with fsdp={grid.size('fsdp')} and tp={grid.size('tp')} no rank has one: use dp alone"
    if "noise_scale" in watch:
        raise RecipeError(f"train.watch=noise_scale needs whole gradients of a micro-batch, and {layout}")


def _check_used(used: np.ndarray) -> None:
    """Raise TokenCountError unless every token of the batch was used once."""
    if (used != 1).any():
        wrong = int(np.flatnonzero(used != 1)[0])
        raise TokenCountError(f"token {wrong} of {len(used)} of the batch was used {used[wrong]} times in one update")
