"""The engine that learns: forward, backward, clip and step over packed sequences, with losses passed in as callables.

A loss sees one micro-batch at a time and divides by denominators of the whole batch, so the split into micro-batches
changes nothing but the order of additions.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tilth.config.schema import Optimizer as OptimizerSection
from tilth.core.batch import Ragged
from tilth.core.errors import NonFiniteError, TokenCountError
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.trace.spans import span
from tilth.training.optim import Optimizers
from tilth.training.packed import Micro, micros, score
from tilth.training.schedule import lr_factor


Loss = Callable[[Micro], tuple[Tensor, dict[str, float]]]
"""From a micro-batch to its share of the loss and named sums (added over micro-batches)."""


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did. ``sums`` are the loss's own, added over micro-batches."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    sums: dict[str, float]
    skipped: bool


class TrainEngine:
    """Owns a model's gradients, optimizer and schedule on one device."""

    def __init__(
        self,
        model: Decoder,
        optimizer: OptimizerSection,
        *,
        total_steps: int,
        micro_tokens: int,
        parity: bool = False,
        compile: bool = False,
        nonfinite: Literal["stop", "skip"] = "stop",
    ) -> None:
        self.model = model
        self.section = optimizer
        self.optimizers = Optimizers(dict(model.named_parameters()), optimizer)
        self.total_steps = total_steps
        self.micro_tokens = micro_tokens
        self.parity = parity
        self.nonfinite = nonfinite
        self.steps = 0
        self.compile_seconds = 0.0
        self._forward = torch.compile(model, dynamic=True) if compile else model
        self._compiling = compile
        self.device = next(model.parameters()).device

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.section.lr * lr_factor(
            self.section.schedule, self.steps, self.total_steps, self.section.warmup_steps
        )

    def update(
        self,
        tokens: Ragged,
        mask: np.ndarray,
        columns: Mapping[str, np.ndarray],
        loss: Loss,
        *,
        temperature: float = 1.0,
        entropy: bool = True,
    ) -> UpdateResult:
        """One optimizer step on the whole batch.

        tokens: n sequences, N tokens in all; mask: [N], 1 on tokens to learn from; columns: per token [N].
        Raises NonFiniteError under the policy "stop", TokenCountError if a token was used twice or not at all.
        """
        self.optimizers.zero_grad()
        total, counted, sums = 0.0, 0, dict[str, float]()
        for i, (_, micro) in enumerate(micros(tokens, mask, columns, self.micro_tokens, self.device)):
            with span("forward", micro_batch=i, tokens=len(micro.ids)):
                self._score(micro, temperature, entropy=entropy)
                value, parts = loss(micro)
            with span("backward", micro_batch=i, tokens=len(micro.ids)):
                value.backward()
            total += float(value.detach())
            counted += int(micro.mask.sum())
            for name, amount in parts.items():
                sums[name] = sums.get(name, 0.0) + amount
        if counted != int(mask.sum()):
            raise TokenCountError(f"trained on {counted} tokens, the batch has {int(mask.sum())} to learn from")
        return self._step(total, sums, len(mask), learn=counted > 0)

    def _step(self, loss: float, sums: dict[str, float], tokens: int, *, learn: bool) -> UpdateResult:
        lr = self.lr
        with span("optimizer"):
            norm = self.optimizers.clip(self.section.clip_norm) if learn else 0.0
            finite = math.isfinite(loss) and math.isfinite(norm)
            if not finite and self.nonfinite == "stop":
                raise NonFiniteError(
                    f"loss {loss:g}, gradient norm {norm:g} at optimizer step {self.steps}: lower optimizer.lr, "
                    "or set train.nonfinite=skip to leave such steps out"
                )
            if finite and learn:
                self.optimizers.step(lr)
            self.optimizers.zero_grad()
        self.steps += 1
        return UpdateResult(loss, norm, lr, tokens, sums, skipped=not (finite and learn))

    def _score(self, micro: Micro, temperature: float, *, entropy: bool) -> None:
        with span("compile" if self._compiling else "model") as spent:
            context = PackedContext(micro.lengths, parity=self.parity)
            score(self._forward, self.model, micro, context, temperature=temperature, entropy=entropy)
        if self._compiling:
            self.compile_seconds, self._compiling = spent.seconds, False
