"""Layouts of 1,024 and 12,288 ranks that the benchmarks name, and what one rank of each does in a training step.

The code that trains runs as it is, on a small model, for one rank of each class: ranks of a class have the same stage
and equal micro-batches, so they differ by the members of their groups alone.
"""

import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from tests.rehearsal.groups import TAPE, Peer, Program, alone_in
from tests.scripts import script
from tilth.config.load import load_recipe
from tilth.config.schema import ModelConfig, OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import PlanError
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.family import new_config
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import GradientSums, shard
from tilth.plan.batch import BatchPlan, MicroBatchLimits, PlannedMicroBatch, RowTable, plan_batch
from tilth.plan.devices import DEVICES, DeviceType
from tilth.plan.layout import cut, place
from tilth.plan.memory import policy_need
from tilth.plan.working import total
from tilth.training import engine as engine_room
from tilth.training.engine import TrainEngine, negative_log_likelihood

CAPACITY = 16
"""Tokens of a micro-batch."""
Signature = tuple[Any, ...]


class Real(NamedTuple):
    """The model that a small one stands for. longest: tokens of a sequence; micro: of a micro-batch."""

    shape: DecoderConfig
    longest: int
    micro: int
    device: DeviceType


@dataclass(frozen=True)
class World:
    """One layout. sizes, modes: as in a recipe."""

    sizes: dict[str, int]
    modes: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    tied: bool = False
    gangs: tuple[int, ...] = ()
    """Numbers of ranks of the sequences that take several."""
    rounds: int = 2
    """Micro-batches of each rank."""
    real: Real | None = None

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.sizes)

    @cached_property
    def config(self) -> DecoderConfig:
        width = max(128, self.mesh.size("dp", "tp"))  # so that updates divide, as those of the real model do
        shape: dict[str, Any] = {"vocab_size": width, "hidden_size": width, "intermediate_size": width}
        if self.real is not None and self.real.shape.num_experts:
            layers = tuple(range(self.layers))
            shape |= {"family": "mixtral", "num_experts": 8, "expert_size": width, "expert_layers": layers}
            shape["experts_per_token"] = self.real.shape.experts_per_token
        heads = {"num_heads": 8, "num_kv_heads": 8}
        return DecoderConfig(**shape, **heads, num_layers=self.layers, tie_embeddings=self.tied)

    @cached_property
    def batch(self) -> tuple[Jagged, np.ndarray]:
        """Tokens, and the mask of all but the first one of each sequence."""
        short = self.rounds * self.mesh.count("rows") - sum(self.gangs)
        lengths = np.array([ranks * CAPACITY for ranks in self.gangs] + [CAPACITY] * short)
        tokens = Jagged.with_lengths(np.arange(lengths.sum()) % self.config.vocab_size, lengths)
        mask = np.ones(len(tokens.values), np.uint8)
        mask[tokens.offsets[:-1]] = 0
        return tokens, mask

    @cached_property
    def plan(self) -> BatchPlan:
        """Rows and micro-batches of all ranks that divide rows."""
        ranks, units, stages = self.mesh.count("rows"), self.mesh.units, self.mesh.count("layers")
        limits = MicroBatchLimits(CAPACITY, in_step=stages > 1 or bool(self.mesh.shards))
        table = RowTable.of(*self.batch, digests=False)
        return plan_batch(table, None, ranks, limits, units=units, stages=stages)

    def part(self, rank: int) -> int:
        """Place of a rank among those that divide rows."""
        return self.mesh.index(rank, *self.mesh.over("rows"))

    @cached_property
    def _micros(self) -> list[Signature]:
        def of(part: int, micro: PlannedMicroBatch) -> Signature:
            if micro.several:
                place = micro.ranks.index(part % self.mesh.units)
                return len(micro.ranks), place, *micro.lengths.tolist()
            return 1, 0, *self.batch[0].lengths[self.plan.rows[part][micro.rows]].tolist()

        return [tuple(of(part, micro) for micro in plan.learn) for part, plan in enumerate(self.plan.ranks)]

    def replica(self, rank: int) -> Signature:
        """What ranks with equal rows share."""
        return self._micros[self.part(rank)]

    def class_of(self, rank: int) -> Signature:
        """What ranks share that do the same but for the members of their groups."""
        return self.mesh.coordinate("pp", rank), self.mesh.coordinate("cp", rank), self.replica(rank)

    def units(self, rank: int) -> list[tuple[int, ...]]:
        """Ranks of each micro-batch that several compute."""
        return [micro.ranks for micro in self.plan.ranks[self.part(rank)].learn if micro.several]

    @cached_property
    def classes(self) -> dict[Signature, list[int]]:
        """Ranks of each class; those of the last stage first, from which others get the loss."""
        found = dict[Signature, list[int]]()
        for rank in self.mesh.ranks:
            found.setdefault(self.class_of(rank), []).append(rank)
        return dict(sorted(found.items(), key=lambda one: -one[0][0]))

    def record(self, rank: int) -> Program:
        """Return what a rank begins and waits for in its first training step."""
        TAPE.begin(self.mesh, max(len(plan.learn) for plan in self.plan.ranks), self.replica(rank))
        tokens, mask = self.batch
        with alone_in(self.mesh, rank), _without_values():
            sharded = shard(lambda: Decoder(self.config), ParallelDims.of(self.mesh, rank), **self.modes)
            sharded.init_(0)
            section = OptimizerConfig(name="adamw", lr=1e-3, clip_norm=1.0)
            engine = TrainEngine(sharded, section, total_steps=2, micro_tokens=CAPACITY)
            rows, plan = self.plan.rows[self.part(rank)], self.plan.ranks[self.part(rank)]
            own, marks = tokens.take(rows), Jagged(mask, tokens.offsets).take(rows).values
            how: dict[str, Any] = {"starts": tokens.offsets[rows], "plan": plan, "entropy": False}
            engine.update(own, marks, {}, negative_log_likelihood(float(mask.sum())), **how)
        return TAPE.program

    def peak(self, rank: int) -> int:
        """Return the bytes at the peak of a step of the real model on the device of a rank, by the plan. The slack that
        malloc keeps on a CPU is left out."""
        assert self.real is not None
        shape, longest, micro, _ = self.real
        names = {"schedule": "pp_schedule"}
        layout = self.sizes | {names.get(key, key): str(value).lower() for key, value in self.modes.items()}
        keys = [f"policy.layout.{key}={value}" for key, value in layout.items()]
        keys += [
            f"cluster.workers={len(self.mesh)}",
            "cluster.backend=ray",
            "train.device=cuda",
            "train.precision=bf16",
        ]
        keys += [f"train.micro_tokens={micro}", f"supervised.batch={self.rounds * self.mesh.count('rows')}"]
        recipe = load_recipe(
            "sft", [*keys, "optimizer.name=adamw", f"train.checkpointing={str(longest > micro).lower()}"]
        )
        need = policy_need(recipe, cut(recipe, "policy", place(recipe)["policy"], shape, rank), longest)
        items = [item for item in (*need.held, *need.training) if not item.host]
        return total([item for item in items if item.name != "slack of the allocator"])

    @cached_property
    def programs(self) -> dict[Signature, tuple[int, Program]]:
        """A rank of each class, and its program."""
        return {one: (ranks[0], self.record(ranks[0])) for one, ranks in self.classes.items()}

    def program_of(self, rank: int) -> Program:
        return self.programs[self.class_of(rank)][1]

    def place_of(self, rank: int, peer: Peer) -> int:
        """Place in the group of a peer of the recorded rank, for another rank of its class."""
        if not peer.unit:
            return peer.place
        recorded = self.programs[self.class_of(rank)][0]
        return self.units(rank)[self.units(recorded).index(peer.unit)][peer.place]


@contextmanager
def _without_values() -> Iterator[None]:
    """Let checks of values send what they send, and find nothing: numbers of other ranks are made up."""
    misreduced, check_units = GradientSums.misreduced, engine_room.check_units

    def unread(self: GradientSums) -> str:
        misreduced(self)
        return ""

    def sent(*args: Any) -> None:
        try:
            check_units(*args)
        except PlanError:
            pass

    with ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(GradientSums, "misreduced", unread))
        stack.enter_context(unittest.mock.patch.object(engine_room, "check_units", sent))
        stack.enter_context(unittest.mock.patch.object(engine_room, "check_divided", lambda *_: None))
        yield


def megascale(gpus: int, batch: int) -> World:
    """The 175B job; batch: sequences, each a micro-batch."""
    job = script("megascale.py")
    replicas = gpus // (job.TP * job.PP)
    sizes = {"pp": job.PP, "dp": replicas, "tp": job.TP}
    modes = {"sp": True, "schedule": "interleaved", "zero": 1}
    real = Real(job.SHAPE, job.SEQUENCE, job.SEQUENCE, DEVICES["a100-80g"])
    return World(sizes, modes, layers=2 * job.PP, tied=True, rounds=batch // replicas, real=real)


def hybrid(name: str, gpus: int, gangs: tuple[int, ...] = (8, 4, 2)) -> World:
    """A job of ByteScale, of one and several ranks a sequence; gangs: ranks of the long sequences."""
    jobs = script("hdp_scale.py")
    model, longest = jobs.MODELS[name], 2048 * jobs.K
    experts = {"family": "mixtral", "experts": 8, "experts_per_token": model.experts} if model.experts > 1 else {}
    of_recipe = {"hidden": model.hidden, "layers": model.layers, "heads": model.heads, "kv_heads": model.kv_heads}
    shape = new_config(ModelConfig(**of_recipe, ffn=model.ffn, context=longest, **experts), 32_000)
    real = Real(shape, longest, jobs.CAPACITY, DEVICES["h800"])
    sizes = {"pp": model.pp, "hdp": gpus // (model.tp * model.pp), "tp": model.tp}
    rounds = 4 if experts else 2  # gradients of routers, which no formula has, are few beside more tokens
    return World(sizes, {"sp": True}, layers=max(2, model.pp), gangs=gangs, rounds=rounds, real=real)


BYTESCALE = ("7B", "13B", "30B", "70B", "8x7B", "141B")
WORLDS: dict[str, Callable[[], World]] = {
    "175B on 1,024": lambda: megascale(1024, 768),
    "175B on 12,288": lambda: megascale(12_288, 1536),  # a quarter of its batch
    "shards on 1,024": lambda: World({"dp": 4, "fsdp": 16, "cp": 2, "tp": 8}, {"sp": True}),
    **{f"{name} on {gpus:,}": partial(hybrid, name, gpus) for gpus in (1024, 12_288) for name in BYTESCALE},
}
"""Every layout of docs/benchmarks.md for these numbers of ranks, and one with the axes that none of them has."""
