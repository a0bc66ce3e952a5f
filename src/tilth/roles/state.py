"""State of a role: its tensors with their layouts, saved to a checkpoint and loaded back."""

import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from tilth.checkpoint import Checkpoint, Group, Saver, Share, open_checkpoint, state_layouts
from tilth.checkpoint.copies import AtRest, Copies
from tilth.checkpoint.manifest import Report
from tilth.checkpoint.saver import MemorySaver
from tilth.checkpoint.snapshot import REPLICATED
from tilth.checkpoint.storage import storage_of
from tilth.cluster.protocol import transfer
from tilth.config.errors import listed
from tilth.core.checksum import checksum
from tilth.core.errors import CheckpointError, NonFiniteError, ReplicaMismatch, StorageError
from tilth.core.layout import Box, Layout
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import GradientReducer
from tilth.parallel.sharded import ShardedModel
from tilth.parallel.sync import by_rank
from tilth.plan.batch import MicroBatchLimits
from tilth.trace.spans import span
from tilth.training.engine import TrainEngine, UpdateResult
from tilth.training.rate import measured_flops

NAMED = 4
"""Most tensors that a message names."""
Groups = dict[str, Group]
"""Groups of tensors of a checkpoint: this worker's pieces, and their layouts."""


class StateCopy(NamedTuple):
    """One worker's part of a snapshot: what it wrote, and the role's ``position``; or why it could not be written."""

    reports: list[Report]
    position: Mapping[str, float]
    problem: str = ""
    copies: Mapping[int, int] = {}
    """As ``Copies.digests``."""


class Stateful:
    """A role with a state that a checkpoint holds. Its methods are called on all ranks of its group together."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        self.grid = sharded.grid
        self._saver = Saver()
        self._memory = MemorySaver()
        self._copies = Copies(self.grid.rank)
        self._at_rest = AtRest(self._copies)
        self._part = f"{self.grid.rank:05d}" if len(self.grid.mesh) > 1 else ""
        """This worker's part in the names of its files; "" if it is alone."""

    def groups(self) -> Groups:
        """Return the groups of its state by name."""
        raise NotImplementedError

    def saved(self) -> Groups:
        """Return what of them a snapshot holds."""
        return self.groups()

    def published(self) -> Groups:
        """Return what a checkpoint holds: what is saved, with models that others can read."""
        return self.saved()

    def averaged(self) -> AbstractContextManager[None]:
        """Let ranks that learn apart have one model in the block; a collective call."""
        return nullcontext()

    @transfer(split="all", gather="first", reads=True)
    def position(self) -> dict[str, float]:
        """Return everything but tensors that a resume must restore."""
        return {}

    @transfer(split="all", gather="first", reads=True)
    def kept(self) -> list[str]:
        """Return the names of its groups."""
        return list(self.published())

    @transfer(split="all", gather="all", patient=True, reads=True)
    def save(self, folder: str, background: bool) -> str:
        """Copy this worker's part for a checkpoint; the copy is written while training continues.

        One worker writes a tensor that several hold. background: False waits until it is written. Returns the error
        message of this save or the one before, or "".
        """
        try:
            with self.averaged():
                self._saver.start(folder, self.published(), self.grid.rank, self._part, background=background)
        except (StorageError, CheckpointError) as error:
            return str(error)
        return ""

    @transfer(split="all", gather="all", patient=True, reads=True)
    def snapshot(self, folder: str, slot: int) -> StateCopy:
        """Copy this worker's part into a slot of a folder in shared memory.

        Raises NonFiniteError for a state that no run could go on from, and ReplicaMismatch for one that is not that of
        the end of the last update.
        """
        self.check_at_rest()
        saved = self.saved()
        check_finite(saved)
        with span("checksums"):
            digests = self._copies.digests(self.groups())
        try:
            reports = self._memory.take(Path(folder), slot, saved, self.grid.rank, self._part)
        except StorageError as error:
            return StateCopy([], {}, str(error), digests)
        return StateCopy(reports, self.position(), "", digests)

    @transfer(split="all", gather="all", patient=True, reads=True)
    def copies(self) -> dict[str, tuple[int, int]]:
        """Return the digests of tensors that other workers hold too: see ``Copies.tensors``."""
        return self._copies.tensors(self.groups())

    @transfer(split="all", gather="all", patient=True, reads=True)
    def saving(self, wait: bool) -> str:
        """Return the error message of the running save, or "". wait: until it is written."""
        return self._saver.settle() if wait else self._saver.problem()

    @transfer(split="all", gather="first", patient=True)
    def load(self, path: str, position: Mapping[str, float]) -> None:
        """Load a checkpoint of any layout. CheckpointError."""
        with self._changing():
            read_state(path, self.groups(), self.sharded)

    def check_at_rest(self) -> None:
        """Raise ReplicaMismatch if a tensor is not the one of the last update, although nothing has written to it."""
        with span("checksums"):
            found = self._at_rest.changed()
        if found:
            self._at_rest.forget()
            message = "other bits than at the end of the last update, although nothing has written to them"
            raise ReplicaMismatch(f"{listed(found, NAMED)}: {message}", key="at_rest")

    def _changing(self) -> AbstractContextManager[None]:
        """Expect the state to change in the block."""
        return self._at_rest.changing(self.groups)


def check_finite(groups: Groups) -> None:
    """Raise NonFiniteError if a value is not finite. Reads everything once: a sum is finite if its terms are, or else
    they are looked at one by one."""
    for group in groups.values():
        for name, tensor in group.tensors.items():
            if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
                message = f"{name} is not finite at the end of a step, although its gradients were"
                raise NonFiniteError(message, key="snapshot")


def weights_group(sharded: ShardedModel, names: Collection[str] = ()) -> Group:
    """Return the parameters of a model as a group of a checkpoint. names: only these."""
    layouts = {name: layout for name, layout in sharded.layouts.items() if not names or name in names}
    own = {name: p.detach() for name, p in sharded.parameters.items() if name in layouts}
    dtypes = sharded.dtypes
    return Group(own, layouts, {name: dtypes[name] for name in layouts})


class Learner(Stateful):
    """A role with a train engine: weights, optimizer state and, where there is one, the average of the weights."""

    def __init__(self, engine: TrainEngine, model: str, optimizer: str, *, based: bool = False) -> None:
        """model, optimizer: what a checkpoint calls these groups. based: frozen weights are those of ``model.path``, to
        which a checkpoint refers."""
        super().__init__(engine.sharded)
        self.engine = engine
        self._names = model, optimizer
        self._frozen = self._base_sums() if based and engine.sharded.adapted else {}
        self._rows = dict[str, Layout]()
        """Layouts of the optimizer's state of ranks that learn apart."""
        engine.before_update, engine.after_update = self._before_update, self._after_update

    @property
    def limits(self) -> MicroBatchLimits:
        """Limits of its micro-batches."""
        return self.engine.limits

    def _before_update(self) -> None:
        self.check_at_rest()
        self._at_rest.forget()

    def _after_update(self, done: UpdateResult) -> None:
        with span("checksums"):
            self._at_rest.remember(self.groups(), done.flops)

    def groups(self) -> Groups:
        (model, optimizer), layouts, reducer = self._names, self.sharded.update_layouts, self._reducer
        state, average = self.engine.optimizers.state_tensors(), self.engine.ema.tensors
        kinds = {name: tensor.dtype for name, tensor in state.items()}
        if self.sharded.pipeline is not None or self.sharded.updates is not None:
            kinds = self.engine.optimizers.state_dtypes({n: self.sharded.dtypes[n] for n in self.sharded.learned})
        equal = [name for name in self.sharded.layouts if reducer.equal(name)]
        found = {model: weights_group(self.sharded, equal)} if equal else {}
        found[optimizer] = Group(state, state_layouts(layouts, kinds), kinds)
        found |= {optimizer: self._by_rank(found[optimizer])} if reducer.apart else {}
        found |= {"ema": Group(average, layouts, dict.fromkeys(layouts, torch.float32))} if average else {}
        return found | ({self._reducing: left_out} if (left_out := self._left_out()).layouts else {})

    def saved(self) -> Groups:
        """Return its groups without a frozen base."""
        groups, sharded = self.groups(), self.sharded
        if self._frozen:
            groups[self._names[0]] = weights_group(sharded, sharded.learned)
        return groups

    def published(self) -> Groups:
        found, model = self.saved(), self._names[0]
        whole = {model: weights_group(self.sharded)} if self._reducer.apart else {}
        return whole | found | whole

    def _by_rank(self, group: Group) -> Group:
        """Return the optimizer's state of ranks that learn apart: [data ranks, ...], but for what they have alike."""
        common, rows = (*REPLICATED, *self._reducer.common), self._rows
        for name, layout in group.layouts.items():
            if name.partition(".")[0] not in common and name not in rows:
                rows[name] = by_rank(layout)
        tensors = {name: t[None] if name in rows else t for name, t in group.tensors.items()}
        return group._replace(tensors=tensors, layouts={**group.layouts, **rows})

    def averaged(self) -> AbstractContextManager[None]:
        return self._reducer.averaged()

    @property
    def _reducer(self) -> GradientReducer:
        return self.sharded.gradients.reducer

    @property
    def _reducing(self) -> str:
        """Name of the group with the reducer's state."""
        return f"{self._names[0]}_reducer"

    def _left_out(self) -> Group:
        """Return the state of the reducer: what it left out of gradients or models, mostly of one rank each."""
        layouts, dtypes = self._reducer.layouts(), self.sharded.dtypes
        return Group(self._reducer.state(), layouts, {name: dtypes[name.partition(".")[2]] for name in layouts})

    @torch.no_grad()
    def _restore_rows(self, checkpoint: Checkpoint, name: str, group: Group) -> bool:
        """Fill tensors of which each data rank has its own; of another number of ranks it gets what the reducer makes
        of all of theirs. Returns True if the checkpoint has all of them, of as many ranks. CheckpointError: it has
        tensors that nothing takes."""
        there = checkpoint.names(name) if name in checkpoint.groups else []
        if lost := [one for one in there if one not in group.layouts]:
            message = f"{checkpoint.path}: {name}/{lost[0]} is state of policy.comm, and nothing has it now"
            raise CheckpointError(f"{message}; train on with the keys of policy.comm that saved it", key="reducer")
        alike = True
        for title, tensor in group.tensors.items():
            shape, found = group.layouts[title].shape, tensor
            saved = checkpoint.entry(name, title).shape if title in there else ()
            alike &= saved == shape
            for box in group.layouts[title].boxes(self.grid.rank) if title in there else ():
                if saved == shape:
                    found = checkpoint.read(name, title, box)
                elif len(saved) < len(shape):  # of ranks that learned together
                    found = checkpoint.read(name, title, Box(box.offset[1:], box.size[1:]))
                else:
                    every = Box((0, *box.offset[1:]), (saved[0], *box.size[1:]))
                    found = self._reducer.divided(checkpoint.read(name, title, every), shape[0])
                tensor.copy_(found.view_as(tensor))
        return alike

    def _restore_reducer(self, checkpoint: Checkpoint) -> None:
        """Give the reducer its state; 0 if it had none."""
        own = self._left_out()
        for tensor in own.tensors.values():
            tensor.zero_()
        self._restore_rows(checkpoint, self._reducing, own)

    def _load_apart(self, path: str, step: int) -> None:
        """Load a checkpoint, or a snapshot, whose models are those of single ranks where they are not equal. Another
        number of ranks begins with their mean."""
        checkpoint, (model, optimizer) = open_checkpoint(path), self._names
        if model in checkpoint.groups:
            held = weights_group(self.sharded, checkpoint.names(model))
            checkpoint.restore(model, held.tensors, held.layouts, self.grid.rank)
        self._restore_rows(checkpoint, optimizer, self.groups()[optimizer])
        self._reducer.begin(step)  # step and optimizer decide what ranks have alike
        with self._reducer.restoring():
            alike = self._restore_rows(checkpoint, self._reducing, self._left_out())
        if not alike:
            self._reducer.restart()

    def _base_sums(self) -> dict[str, int]:
        """Return the checksums of this rank's part of the frozen weights."""
        learned = set(self.sharded.learned)
        return {name: checksum(p.detach()) for name, p in self.sharded.parameters.items() if name not in learned}

    @transfer(split="all", gather="first", reads=True)
    def troubles(self) -> list[str]:
        """Return the optimizer steps left out since the last call: what was not finite, and which rows."""
        found, self.engine.troubles = self.engine.troubles, []
        return found

    @transfer(split="all", gather="all", reads=True)
    def peak_flops(self) -> float:
        """Measure this worker's share of the machine's matmul rate, all workers at once: FLOP/s."""
        return measured_flops(self.engine.device, self.engine.model.dtype)

    @transfer(split="all", gather="all", patient=True, reads=True)
    def time_passes(self, lengths: Sequence[int]) -> float:
        """Return the seconds of both passes over a micro-batch of sequences of these lengths; nothing is learned."""
        return self.engine.time_passes(lengths)

    @transfer(split="all", gather="all", patient=True, reads=True)
    def time_ring(self, tokens: int) -> float:
        """Return the seconds in which keys and values of a sequence of this length visit all ranks that make units."""
        return self.engine.time_ring(tokens)

    @transfer(split="all", gather="first")
    def begin(self, lr: float, total_steps: int) -> None:
        """Start a phase: fresh optimizer state, its peak learning rate, length of schedule in optimizer steps."""
        with self._changing():
            self.engine.begin(lr, total_steps)

    @transfer(split="all", gather="first", patient=True)
    def adopt(self, path: str) -> None:
        """Load the optimizer state from another run's checkpoint, of any layout. CheckpointError."""
        name = self._names[1]
        with self._changing():
            if self._reducer.apart:
                self._restore_rows(open_checkpoint(path), name, self.groups()[name])
            else:
                read_state(path, {name: self.groups()[name]}, self.sharded)

    @transfer(split="all", gather="first", reads=True)
    def tune(self, lr: float, total_steps: int, share: float = 1.0) -> None:
        """Continue a phase with this peak learning rate, length of schedule and share of the recipe's batch
        (``TrainEngine.tune``); state and position stay.

        It only reads: all are those of the recipe and its workers, and are told again to a role that has loaded its
        state.
        """
        self.engine.tune(lr, total_steps, share)

    @transfer(split="all", gather="first", reads=True)
    def position(self) -> dict[str, float]:
        return self.engine.position()

    @transfer(split="all", gather="first", patient=True)
    def load(self, path: str, position: Mapping[str, float]) -> None:
        with self._changing():
            if self._reducer.apart:
                self._load_apart(path, int(position["updates"]))
            else:
                groups = {name: group for name, group in self.saved().items() if name != self._reducing}
                self._restore_reducer(read_state(path, groups, self.sharded, self.groups()))
        if self._frozen and (wrong := [n for n, value in self._base_sums().items() if value != self._frozen[n]]):
            message = f"{wrong[0]}: other bits than when the base was loaded, although nothing writes to it"
            raise ReplicaMismatch(message, key="base")
        self.engine.restore(position)

    @transfer(split="all", gather="first", reads=True)
    def compile_seconds(self) -> float:
        """Seconds that torch.compile and the first pass took; 0 if nothing was compiled."""
        return self.engine.compile_seconds


def read_state(path: str, groups: Groups, sharded: ShardedModel, whole: Groups | None = None) -> Checkpoint:
    """Fill tensors of a model in place from a checkpoint of any layout, which it returns; a collective call.
    CheckpointError.

    whole: what earlier checkpoints hold of these groups, with the base of adapters.
    """
    grid = sharded.grid
    share = replicas(grid) if storage_of(path).remote or not _one_machine(grid) else None
    checkpoint = open_checkpoint(path, share)
    divided = set(map(id, sharded.update_layouts.values())) - set(map(id, sharded.layouts.values()))
    for name, group in groups.items():
        if whole is not None and len(checkpoint.names(name)) == len(whole[name].layouts):
            group = whole[name]
        alike = share if all(id(layout) not in divided for layout in group.layouts.values()) else None
        checkpoint.restore(name, group.tensors, group.layouts, grid.rank, alike)
    sharded.reshard()
    return checkpoint


def replicas(grid: ParallelDims) -> Share | None:
    """Return the ranks with equal tensors, which can read parts of them for each other; None without such.

    This pays if bytes come over a network; on one machine all ranks read from its page cache, which is faster than
    gloo.
    """
    copies = grid.mesh.copies
    group = grid.group(*copies)
    return None if group is None else Share.of_group(group, grid.ranks(*copies), grid.rank)


def _one_machine(grid: ParallelDims) -> bool:
    """True if all data ranks are on one machine; a collective call."""
    name = zlib.crc32(os.uname().nodename.encode())
    return grid.most(name) == -grid.most(-name)
