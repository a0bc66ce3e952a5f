"""FSDP by torch's ``fully_shard``, inside of the shards of tensor parallelism, with a span for each communication.

Imported where a mesh shards parameters: torch takes 0.8 s to import FSDP and DTensor, which one process never uses.
"""

import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from tilth.models.decoder import Decoder
from tilth.models.moe import Experts
from tilth.parallel.checksums import GivenSums
from tilth.parallel.comm import Group, communication, is_fsdp
from tilth.parallel.dims import ParallelDims
from tilth.parallel.division import Division
from tilth.parallel.reducer import GradientReducer


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

    def __init__(self, given: GivenSums | None, reducer: GradientReducer, key: str) -> None:
        self.ended, self.given, self.reducer, self.key = 0, given, reducer, key

    def __call__(  # type: ignore[override]  # torch uses no handle
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Group,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if self.given is not None:
            self.given.add(input_tensor)
        self.reducer.reduce_scatter(output_tensor, input_tensor, group, self.key)
        self.ended = time.perf_counter_ns()

    def summed(self, copies: Group) -> Callable[[Tensor], None]:
        """Return a hook to call after the sum over copies of the shard, which torch issues itself; its span starts
        where the reduce-scatter ended."""

        def record(reduced: Tensor) -> None:
            with communication("all_reduce", copies, reduced.nbytes) as issued:
                issued.start = self.ended

        return record


def watch(
    modules: Iterable[FSDPModule], copies: Group | None, given: GivenSums | None, reducer: GradientReducer
) -> None:
    """Let ``reducer`` sum the shards of modules, and record their communications as spans; copies: group over which
    torch itself sums their shards too; given: adds up their gradients."""
    for number, module in enumerate(modules):
        scatter = _ScatterModule(given, reducer, f"fsdp.{type(module).__name__}.{number}")
        module.set_custom_all_gather(_GatherModule())
        module.set_custom_reduce_scatter(scatter)
        if copies is not None:
            module.set_all_reduce_hook(scatter.summed(copies))
