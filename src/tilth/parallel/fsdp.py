"""FSDP by torch's ``fully_shard``, inside of the shards of tensor parallelism, with a span for each communication.

Imported where a mesh shards parameters: torch takes 0.8 s to import FSDP and DTensor, which one process never uses.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tilth.core.errors import ModelError
from tilth.models.decoder import Decoder
from tilth.models.moe import Experts
from tilth.parallel.checksums import GivenSums
from tilth.parallel.comm import Group, communication, is_fsdp
from tilth.parallel.dims import ParallelDims
from tilth.parallel.division import Division
from tilth.parallel.reducer import GradientPiece, GradientReducer, Pieces


def apply_fsdp(model: Decoder, grid: ParallelDims, zero: int, device: str) -> None:
    """Shard experts over the ranks that gather theirs, and all else over those that divide experts too."""
    kind = torch.device(device).type
    mesh, stacks = grid.device_mesh(kind), [m for m in model.modules() if isinstance(m, Experts)]
    ignored = {p for p in model.parameters() if not p.numel()}  # of a small vocabulary; fully_shard cannot reduce it
    meshes: list[tuple[nn.Module, DeviceMesh]] = [(layer, mesh) for layer in model.model.layers]
    if grid.size(*grid.mesh.expert_shards) > 1:
        meshes = [(experts, grid.device_mesh(kind, grid.mesh.expert_shards)) for experts in stacks] + meshes
    else:
        ignored |= {p for experts in stacks for p in experts.parameters()}
    for module, ranks in [*meshes, (model, mesh)]:
        # The root stays gathered after its forward pass: its embedding and head are used again for the loss.
        reshard = zero == 3 and module is not model
        fully_shard(module, mesh=ranks, reshard_after_forward=reshard, ignored_params=ignored)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(zero == 3, recurse=False)


def shard_parameters(division: Division) -> None:
    """Shard a model by ``apply_fsdp``, once for all axes that shard. Engines, and ranks under ``zero = 1``, hold whole
    parameters."""
    if not (division.engine or division.zero == 1 or is_fsdp(division.model)):
        apply_fsdp(division.model, division.grid, division.zero, division.device)


class _GatherModule(DefaultAllGather):
    """All-gather of a module's parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Group, async_op: bool = False
    ) -> dist.Work | None:
        with communication("all_gather", group, input_tensor.nbytes):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ScatterModule(DefaultReduceScatter):
    """Reduce-scatter of a module's gradients."""

    def __init__(
        self, given: GivenSums | None, reducer: GradientReducer, key: str, own: Sequence[tuple[str, torch.Size]]
    ) -> None:
        """own: names and whole shapes of its parameters, in torch's order."""
        self.ended, self.given, self.reducer, self.key, self.own = 0, given, reducer, key, own

    def pieces(self, ranks: int, count: int) -> Pieces:
        """Return what torch puts in the rows of a buffer: parts of each gradient, filled up to equal numbers of rows.
        ModelError: it has other than ``count`` elements."""
        found: list[list[GradientPiece]] = [[] for _ in range(ranks)]
        for name, (rows, *inner) in self.own:
            most, width = -(-rows // ranks), math.prod(inner)
            for r, pieces in enumerate(found):
                part = slice(min(rows, r * most), min(rows, (r + 1) * most))
                number = part.stop - part.start
                pieces += [GradientPiece(name, (part,), number * width), GradientPiece("", (), (most - number) * width)]
        if sum(piece.numel for pieces in found for piece in pieces) != count:
            message = f"{self.key}: a gradient is missing, and policy.comm.gradients compresses all; set it to exact"
            raise ModelError(message, key="policy.comm.gradients")
        return found

    def __call__(  # type: ignore[override]  # torch uses no handle
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Group,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if self.reducer.by_parts:
            pieces = self.pieces(group.size(), input_tensor.numel())
            self.reducer.code(input_tensor, group, self.key, pieces)
        if self.given is not None:
            self.given.add(input_tensor)
        self.reducer.reduce_scatter(output_tensor, input_tensor, group, self.key)()
        self.ended = time.perf_counter_ns()

    def summed(self, copies: Group) -> Callable[[Tensor], None]:
        """Return a hook to call after the sum over copies of the shard, which torch issues itself; its span starts
        where the reduce-scatter ended."""

        def record(reduced: Tensor) -> None:
            with communication("all_reduce", copies, reduced.nbytes) as issued:
                issued.start = self.ended

        return record


def _managed(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that torch gathers with a module, in its order: inner modules first."""
    for inner in module.children():
        if not is_fsdp(inner):
            yield from _managed(inner)
    yield from module.parameters(recurse=False)


def watch(
    modules: Iterable[FSDPModule],
    copies: Group | None,
    given: GivenSums | None,
    reducer: GradientReducer,
    names: Mapping[Tensor, str],
) -> None:
    """Let ``reducer`` sum the shards of modules, and record their communications as spans; copies: group over which
    torch itself sums their shards too; given: adds up their gradients; names: of the parameters that learn."""
    for number, module in enumerate(modules):
        own = [(names[p], p.shape) for p in dict.fromkeys(_managed(cast(nn.Module, module))) if p in names]
        scatter = _ScatterModule(given, reducer, f"fsdp.{type(module).__name__}.{number}", own)
        module.set_custom_all_gather(_GatherModule())
        module.set_custom_reduce_scatter(scatter)
        if copies is not None:
            module.set_all_reduce_hook(scatter.summed(copies))
