"""Workers of a training service: an engine that samples on the first, clients' models over one frozen base on all."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tilth.cluster.backends.capacity import core_share
from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.config.axes import MODEL
from tilth.config.schema import LoraConfig
from tilth.core.errors import CheckpointError, TilthError
from tilth.core.files import atomic_write, make_folder
from tilth.core.trajectory import Trajectory
from tilth.engines.request import Request
from tilth.engines.rounds import Round
from tilth.engines.worker import EngineWorker, MakeEngine
from tilth.launch.workers import pick_device
from tilth.models.hf import save_pretrained
from tilth.models.peft import save_adapter
from tilth.parallel.dims import ParallelDims, join
from tilth.parallel.lora import merged_parts
from tilth.parallel.sharded import ShardedModel
from tilth.runs.models import load_model
from tilth.serve.tinker.trained import AdamStep, ModelSpec, SequenceScores, SharedBase, TrainedModel, score_sequence
from tilth.serve.tinker.wire import Datum

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
