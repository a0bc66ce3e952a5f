"""Workers of a training service: an engine that samples on the first, clients' models over one frozen base on all."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tilth.cluster.backends.capacity import core_share
from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.config.axes import MODEL
from tilth.config.schema import LoraConfig, OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import CheckpointError, DataError, TilthError
from tilth.core.files import atomic_write, make_folder
from tilth.core.trajectory import Trajectory
from tilth.engines.request import Request
from tilth.engines.rounds import Round
from tilth.engines.worker import EngineWorker, MakeEngine
from tilth.launch.workers import pick_device
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.converters import LowRank
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained
from tilth.models.inputs import ModelInput
from tilth.models.peft import save_adapter
from tilth.parallel.dims import ParallelDims, join
from tilth.parallel.lora import merged_parts
from tilth.parallel.sharded import ShardedModel, buckets, shard
from tilth.plan.lora import is_adapter
from tilth.rl.metrics import Metric
from tilth.runs.models import load_model
from tilth.serve.tinker.losses import LENGTHS, SAMPLED, TOKENS, TokenLoss, apart, loss_named, options_of, targets_of
from tilth.serve.tinker.wire import Datum, Topk
from tilth.training.engine import TrainEngine
from tilth.training.packed import TARGETS, MicroBatch, packed_targets, score_targets

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


STATE = "state.safetensors"


@dataclass
class PublishedWeights:
    """Weights that sample and do not change. engine: that samples with them, if it is not the base's."""

    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    engine: EngineWorker | None = None
    model: ShardedModel | None = field(default=None, repr=False)


class SampleWorker(EngineWorker):
    """Engine of the base and of snapshots. Files that it reads lie where the controller can read them."""

    def __init__(self, make: MakeEngine, source: str) -> None:
        """source: reference of the base model."""
        super().__init__(make)
        self._make = make
        loaded = load_model(source)
        own = dict(self.engine.named_parameters())
        device = next(iter(own.values())).device if own else torch.device("cpu")
        shared = {name: own[name] if own[name].dtype == torch.float32 else loaded.tensors[name] for name in own}
        dtype = next(iter(own.values())).dtype if own else torch.float32
        self.base = SharedBase(loaded.config, shared or loaded.tensors, dtype=dtype, device=str(device))
        self.snapshots = dict[str, PublishedWeights]()

    @transfer(split="all", gather="first", patient=True)
    def publish(self, name: str, folder: str, lora: LoraConfig) -> None:
        """Let requests whose adapter is ``name`` sample with the weights that ``write`` has written."""
        tensors, _ = read_state(folder)
        weights = {n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")}
        snapshot = PublishedWeights(ModelSpec(lora, 0), weights)
        if lora.rank and self.engine.adapts:
            self.engine.load_adapter(name, lora, weights)
        else:
            snapshot.engine = EngineWorker(self._make)
            model = self._model(snapshot)
            whole = merged_parts(model, list(self.base.model.parameters))
            snapshot.engine.engine.update_weights(iter(whole.items()), version=0)
        self.snapshots[name] = snapshot

    @transfer(split="all", gather="first")
    def retract(self, name: str) -> None:
        """Free a snapshot; requests in flight go on."""
        snapshot = self.snapshots.pop(name, None)
        if snapshot is not None and snapshot.engine is None:
            self.engine.remove_adapter(name)

    @transfer(split="all", gather="first")
    def score_tokens(
        self, name: str, tokens: np.ndarray, topk: int = 0, targets: np.ndarray | None = None
    ) -> SequenceScores:
        """Return log-probs of a sequence under a snapshot, or the base ("")."""
        model = self.base.model if not name else self._model(self.snapshots[name])
        return score_sequence(model, tokens, topk=topk, targets=targets)

    def _model(self, snapshot: PublishedWeights) -> ShardedModel:
        if snapshot.model is None:
            made = snapshot.model = self.base.adapted(snapshot.spec)
            for name, tensor in snapshot.tensors.items():
                made.parameters[name].data = tensor.to(self.base.device)
            made.model.requires_grad_(False)
        return snapshot.model

    @transfer(split="all", gather="first", patient=True)
    def advance(self, new: Sequence[Request], aborted: Iterable[int]) -> Round:
        """Advance the base's engine and those of snapshots with weights of their own."""
        aborted = list(aborted)
        apart = {name: own.engine for name, own in self.snapshots.items() if own.engine is not None}
        rounds = [super().advance([r for r in new if r.adapter not in apart], aborted)]
        for name, worker in apart.items():
            own = [replace(request, adapter="") for request in new if request.adapter == name]
            rounds.append(worker.advance(own, aborted))
        if len(rounds) == 1:
            return rounds[0]
        progress, failed, finished = dict[int, Any](), dict[int, TilthError](), list[Trajectory]()
        for one in rounds:
            progress |= one.progress
            failed |= one.failed
            finished += one.finished
        return Round(finished, failed, progress)


class TrainWorker:
    """Models of clients, whole or in parts, on each worker. Files lie where all workers can read them."""

    def __init__(self, base: SharedBase, source: str, grid: ParallelDims) -> None:
        """source: reference of the base model."""
        self.base, self.source, self.grid = base, source, grid
        self.models = dict[str, TrainedModel]()

    @property
    def _writes(self) -> bool:
        """True on the one rank that writes files."""
        return self.grid.first("rows", "parameters")

    @transfer(split="all", gather="first", patient=True)
    def create(self, model: str, spec: ModelSpec) -> None:
        """Make a model, in place of the one that has the name."""
        self.models[model] = TrainedModel(self.base, spec, self.grid)

    @transfer(split="all", gather="first")
    def forget(self, model: str) -> None:
        """Free a model."""
        self.models.pop(model, None)

    @transfer(split="each", gather="all")
    def forward_backward(
        self, data: Sequence[Datum], model: str, loss: str, options: Mapping[str, float | str], forward_only: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Run passes over this rank's data: ``TrainedModel.forward_backward``."""
        return self.models[model].forward_backward(data, loss, options, forward_only=forward_only)

    @transfer(split="all", gather="first")
    def optim_step(self, model: str, how: AdamStep) -> dict[str, float]:
        """Run one optimizer step: ``TrainedModel.step``."""
        return self.models[model].step(how)

    @transfer(split="all", gather="first", patient=True)
    def write(self, model: str, folder: str, about: Mapping[str, Any], optimizer: bool) -> int:
        """Write a model's state into a folder, atomically; return its bytes. about: what ``read_about`` returns."""
        trained = self.models[model]
        facts = {**about, "steps": trained.engine.steps}
        state = trained.state(optimizer=optimizer)
        if not self._writes:
            return 0
        make_folder(Path(folder))
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
        raw = save(tensors, {"about": json.dumps(facts)})
        with atomic_write(Path(folder) / STATE) as made:
            made.write_bytes(raw)
        return len(raw)

    @transfer(split="all", gather="first", patient=True)
    def read(self, model: str, folder: str, optimizer: bool) -> None:
        """Take over a state that ``write`` has written; optimizer: False for the weights alone."""
        with _opened(folder) as (stored, about):
            names = [name for name in stored.keys() if optimizer or name.startswith("weights/")]  # noqa: SIM118
            if optimizer and not any(name.startswith("optimizer/") for name in names):
                message = f"{folder} has no optimizer state: it was saved for sampling"
                raise CheckpointError(message, key="optimizer.missing")
            tensors = ((name, stored.get_tensor(name)) for name in names)
            self.models[model].restore(tensors, int(about["steps"]) if optimizer else 0)

    @transfer(split="all", gather="first", patient=True)
    def export(self, model: str, folder: str) -> int:
        """Write adapters in the format of PEFT, or whole weights as a Hugging Face directory; return their bytes."""
        trained = self.models[model]
        weights = trained.weights()
        if not self._writes:
            return 0
        make_folder(Path(folder))
        tensors = {name: tensor.cpu() for name, tensor in weights.items()}
        if trained.spec.lora.rank:
            save_adapter(Path(folder), self.base.config, trained.spec.lora, tensors, self.source)
        else:
            save_pretrained(Path(folder), self.base.config, tensors)
        return sum(file.stat().st_size for file in Path(folder).iterdir())


@contextmanager
def _opened(folder: str | Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a state; yield its file and its facts. CheckpointError: it is not there or damaged."""
    file = Path(folder) / STATE
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored, dict(json.loads((stored.metadata() or {})["about"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", key=STATE) from error


def read_state(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts of a state. CheckpointError: it is not there or damaged."""
    with _opened(folder) as (stored, about):
        return {name: stored.get_tensor(name) for name in stored.keys()}, about  # noqa: SIM118


def read_about(folder: str | Path) -> dict[str, Any]:
    """Return the facts of a state. CheckpointError."""
    with _opened(folder) as (_, about):
        return about


def sample_worker(context: Context, make: MakeEngine, source: str) -> SampleWorker:
    """Construct the role "serve" of a training service."""
    return SampleWorker(make, source)


def train_worker(context: Context, source: str) -> TrainWorker:
    """Construct the role "train" of a training service; it shares the base with the role "serve" of its process."""
    served, device = context.roles.get("serve"), torch.device("cpu")
    if context.workers > 1:
        torch.set_num_threads(core_share(context.workers))
        device = pick_device("auto", context.local_rank)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
        join(context.rank, context.workers, context.init_method, context.timeout, device=device.type)
    grid = ParallelDims.of(context.mesh, context.rank, context.generation)
    if isinstance(served, SampleWorker) and context.mesh.count(*MODEL) == 1:
        return TrainWorker(served.base, source, grid)
    loaded = load_model(source)
    return TrainWorker(SharedBase(loaded.config, loaded.tensors, device=str(device), grid=grid), source, grid)
