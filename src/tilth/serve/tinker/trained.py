"""Models of clients: adapters of one frozen base that all of them share, or weights of their own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.config.axes import MODEL
from tilth.config.schema import LoraConfig, OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import DataError
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.converters import LowRank
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, buckets, shard
from tilth.plan.lora import is_adapter
from tilth.rl.metrics import Metric
from tilth.serve.tinker.losses import LENGTHS, SAMPLED, TOKENS, TokenLoss, apart, loss_named, options_of, targets_of
from tilth.serve.tinker.wire import Datum, Topk
from tilth.training.engine import TrainEngine
from tilth.training.packed import MicroBatch, packed_targets, score_targets
from tilth.training.units import TARGETS

PLACE = "place"
"""Column: index of each token in the batch."""
MICRO_TOKENS = 16_384
ROWS = 256
"""Rows of logits that exist at a time."""
STEP = "step"
"""The optimizer's number of steps for each parameter, which all ranks have."""
State = dict[str, Tensor]
"""Tensors by "<group>/<name>": weights, optimizer, gradients."""


class AdamStep(NamedTuple):
    """Constants of one optimizer step, as Tinker's AdamParams. clip_norm: 0: no clipping."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a client's model. lora: rank 0: weights of its own. seed: of the initial adapters."""

    lora: LoraConfig
    seed: int


class SharedBase:
    """Frozen weights on one device, and models that share them."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        grid: ParallelDims | None = None,
    ) -> None:
        """tensors: of the base; whole ones already on the device in fp32 are shared with their owner. grid: of the
        ranks that divide them. ModelError: it does not fit the model."""
        self.config, self.dtype, self.device = config, dtype, device
        divided = grid is not None and grid.mesh.count(*MODEL) > 1
        self.model = self._made(grid if divided else None)
        if divided:
            self.model.load_(tensors)
        else:
            for name, parameter in self.model.parameters.items():
                parameter.data = tensors[name].detach().to(device, torch.float32)
        self.model.model.requires_grad_(False)

    def _made(self, grid: ParallelDims | None, *converters: LowRank, base: ShardedModel | None = None) -> ShardedModel:
        build = lambda: Decoder(self.config, dtype=self.dtype)  # noqa: E731
        return shard(build, grid or ParallelDims.alone(), converters=converters, device=self.device, base=base)

    def adapted(self, spec: ModelSpec, grid: ParallelDims | None = None) -> ShardedModel:
        """Return a new model: adapters beside the shared weights, or a copy of these. grid: of its ranks, which divide
        parameters as those of the base do."""
        if not spec.lora.rank:
            made = self._made(grid)
            for name, p in self.model.parameters.items():
                made.load_part(name, p.detach())
            return made
        made = self._made(grid, LowRank(spec.lora, key="lora_config"), base=self.model)
        made.init_(spec.seed, [name for name in made.parameters if is_adapter(name)])
        return made


class TrainedModel:
    """One client's model, its gradients and its optimizer state; on several ranks, this one's part of it.

    All ranks make the same calls; ``forward_backward`` has rows of its own on each that divides rows, maybe none.
    """

    def __init__(self, base: SharedBase, spec: ModelSpec, grid: ParallelDims | None = None) -> None:
        self.spec, self.base = spec, base
        self.sharded = base.adapted(spec, grid)
        section = OptimizerConfig(clip_norm=0.0, weight_decay=0.0)
        how: dict[str, Any] = {"micro_tokens": MICRO_TOKENS, "scorer": score_targets}
        self.engine = TrainEngine(self.sharded, section, total_steps=1, **how)
        self.gradients = dict[str, Tensor]()
        """This rank's part of the gradient that no step has used, summed over all ranks; empty: there is none."""

    def weights(self) -> dict[str, Tensor]:
        """Return what the client learns, whole: adapters, or all weights. A collective call; of several ranks that
        divide parameters the first has them."""
        return self._whole({name: p.detach() for name, p in self.engine.optimizers.parameters.items()})

    def _whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Assemble tensors that are divided as parameters, on the first rank alone; return live ones if none is."""
        grid = self.sharded.grid
        if grid.mesh.count(*MODEL) == 1:
            return dict(parts)
        found = dict[str, Tensor]()
        for names in buckets({name: self.sharded.layouts[name].shape for name in parts}):
            whole = self.sharded.assemble(names, parts)
            if grid.first("rows", *MODEL):
                found |= {name: tensor.cpu() for name, tensor in whole.items()}
        return found

    def forward_backward(
        self, data: Sequence[Datum], loss: str, options: Mapping[str, float | str], *, forward_only: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Return log-probs of the targets, float32 in their shape, and sums; add to the gradients unless
        ``forward_only``."""
        flat = [part for datum in data for part in apart(datum)]
        batch = _Packed.of(flat, loss)
        spent = _LossSum(loss_named(loss), options_of(loss, options), np.zeros(len(batch.mask), np.float32))
        if forward_only:
            targets = batch.columns[TARGETS]
            found = packed_targets(self.sharded, batch.tokens, batch.mask, targets, max_tokens=MICRO_TOKENS)
            spent.measure(batch, found)
        else:
            found = spent.logprobs
            given: dict[str, Any] = {"entropy": False, "dropout": False}
            self.sharded.begin(self.engine.updates)
            self.engine.accumulate(batch.tokens, batch.mask, batch.columns, spent, **given)
            for name, added in self.engine.gradients().items():
                self.gradients[name] = added if name not in self.gradients else self.gradients[name].add_(added)
        parts = iter(found[a + 1 : b] for a, b in zip(batch.tokens.offsets, batch.tokens.offsets[1:]))
        rows = [np.stack(list(islice(parts, targets_of(datum))), -1) for datum in data]
        return [row.reshape(datum.columns[TOKENS].shape) for row, datum in zip(rows, data)], {"loss:sum": spent.total}

    def step(self, how: AdamStep) -> dict[str, float]:
        """Run one optimizer step and drop the gradients. Raises DataError without any, NonFiniteError."""
        if not self.gradients:
            raise DataError("there is no gradient: call forward_backward before optim_step", key="optim_step.gradient")
        used, self.gradients = self.gradients, {}
        self.engine.optimizers.retune(how.betas, how.eps, how.weight_decay)
        norm = self.engine.step(used, how.lr, how.clip_norm)
        return {"grad_norm:mean": norm, "learning_rate:mean": how.lr, "step:max": float(self.engine.steps)}

    def state(self, *, optimizer: bool = True) -> State:
        """Return all tensors of the state as ``weights`` does; optimizer: False for the weights alone."""
        found = {f"weights/{name}": tensor for name, tensor in self.weights().items()}
        if not optimizer:
            return found
        for kind, parts in self._moments().items():
            whole = parts if kind == STEP else self._whole(parts)
            found |= {f"optimizer/{kind}.{name}": tensor for name, tensor in whole.items()}
        return found | {f"gradients/{name}": tensor for name, tensor in self._whole(self.gradients).items()}

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's live state by kind and parameter."""
        found = dict[str, dict[str, Tensor]]()
        for name, tensor in self.engine.optimizers.state_tensors().items():
            kind, _, own = name.partition(".")
            found.setdefault(kind, {})[own] = tensor
        return found

    @torch.no_grad()
    def restore(self, state: Iterable[tuple[str, Tensor]], steps: int = 0) -> None:
        """Take over a state, of any layout; what it lacks of optimizer and gradients is zero. steps: that the optimizer
        has made."""
        self.engine.begin(0.0, 1)
        self.gradients, moments = {}, self._moments()
        for name, tensor in state:
            group, _, own = name.partition("/")
            if group == "weights":
                self.sharded.load_full(own, tensor)
            elif group == "gradients":
                self.gradients[own] = self.sharded.own_part(own, tensor).to(self.base.device, copy=True)
            else:
                kind, _, own = own.partition(".")
                moments[kind][own].copy_(tensor if kind == STEP else self.sharded.own_part(own, tensor))
        self.engine.steps = self.engine.updates = steps


class _Packed(NamedTuple):
    """Packed sequences of one request, each one token longer than its input: position t + 1 holds the target of
    token t."""

    tokens: Jagged
    mask: np.ndarray
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, data: Sequence[Datum], loss: str) -> "_Packed":
        longer = [np.append(datum.tokens, datum.columns[TOKENS][-1]) for datum in data]
        tokens = Jagged.with_lengths(np.concatenate([np.zeros(0, np.int64), *longer]), [*map(len, longer)])
        mask = np.ones(len(tokens.values), np.uint8)
        mask[tokens.offsets[:-1]] = 0
        columns = {PLACE: np.arange(len(mask))}
        names = {TOKENS: TARGETS} | {name: name for name in loss_named(loss).needs}
        if loss_named(loss).provenance:
            sampled = [np.insert(datum.sampled, 0, False) for datum in data]
            columns[SAMPLED] = np.concatenate([np.zeros(0, bool), *sampled])
        for name, own in names.items():
            none = np.zeros(0, np.int64 if name == TOKENS else np.float32)
            columns[own] = np.concatenate([none, *(np.insert(datum.columns[name], 0, 0) for datum in data)])
        return cls(tokens, mask, columns)


class _LossSum:
    """The sum of a loss over the tokens of a request, micro-batch by micro-batch, with the log-probs it saw."""

    def __init__(self, loss: TokenLoss, options: Mapping[str, float], logprobs: np.ndarray) -> None:
        self.loss, self.options, self.logprobs = loss, options, logprobs
        self.total = 0.0

    def __call__(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
        """Return the sum over a micro-batch."""
        values = self._values(micro.logprobs, {**micro.columns, LENGTHS: micro.lengths}, micro.mask)
        self.logprobs[micro.columns[PLACE].cpu().numpy()] = micro.logprobs.detach().float().cpu().numpy()
        return values.sum(), {}

    def measure(self, batch: _Packed, logprobs: np.ndarray) -> None:
        """Add up the loss of log-probs that are known."""
        columns = {name: torch.from_numpy(values) for name, values in batch.columns.items()}
        columns[LENGTHS] = torch.from_numpy(np.diff(batch.tokens.offsets))
        self._values(torch.from_numpy(logprobs), columns, torch.from_numpy(batch.mask))

    def _values(self, logprobs: Tensor, columns: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        values = torch.where(mask != 0, self.loss.values(logprobs, columns, self.options), 0.0)
        self.total += float(values.detach().double().sum())
        return values


class SequenceScores(NamedTuple):
    """Log-probs of a sequence under a model: of its own tokens float32 [n], the first NaN; the k most likely at each
    place [n, k]; of other targets float32 [n - 1, K]."""

    own: np.ndarray
    topk: Topk | None = None
    targets: np.ndarray | None = None


@torch.no_grad()
def score_sequence(
    model: ShardedModel, tokens: np.ndarray, *, topk: int = 0, targets: np.ndarray | None = None
) -> SequenceScores:
    """Return log-probs of one sequence int64 [n]. targets: int64 [n - 1, K]; below 0: NaN."""
    device = model.device
    ids = torch.from_numpy(tokens).to(device)
    hidden = model.forward(ModelInput(ids), PackedContext([len(tokens)], device))[:-1]
    own, best, others = [np.full(1, np.nan, np.float32)], [], []
    for at in range(0, len(hidden), ROWS):
        logp = torch.log_softmax(model.model.logits(hidden[at : at + ROWS]), -1)
        own.append(logp.gather(1, ids[1 + at : 1 + at + len(logp), None]).squeeze(1).float().cpu().numpy())
        best.append(logp.topk(min(topk, logp.shape[1])) if topk else None)
        if targets is not None:
            wanted = torch.from_numpy(targets[at : at + len(logp)]).to(device)
            scored = logp.gather(1, wanted.clamp(min=0)).float().masked_fill(wanted < 0, torch.nan)
            others.append(scored.cpu().numpy())
    found = _topk(best, topk) if topk else None
    return SequenceScores(np.concatenate(own), found, np.concatenate(others) if others else None)


def _topk(parts: Sequence[Any], k: int) -> Topk:
    """Return the most likely tokens of all parts, behind a first place of which nothing is known."""
    tokens = torch.cat([part.indices for part in parts]) if parts else torch.zeros(0, k, dtype=torch.int64)
    logprobs = torch.cat([part.values for part in parts]) if parts else torch.zeros(0, k)
    first = np.full((1, tokens.shape[1]), np.nan, np.float32)
    found = np.concatenate([first, logprobs.float().cpu().numpy()])
    return Topk(np.concatenate([np.zeros_like(first, np.int64), tokens.cpu().numpy()]), found)
