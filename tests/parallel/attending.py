"""What runs in each rank for the tests of context parallelism: attention of divided tokens beside the whole."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from long_context import Attention
from torch import Tensor

from tests.parallel.divided import far, one_device, sequences
from tilth.core.batch import Jagged
from tilth.core.layout import Mesh
from tilth.models.attention import DropoutContext
from tilth.models.converters import ValueModel
from tilth.parallel.collectives import gather_tokens
from tilth.parallel.context import ContextParallel
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.batch import MicroBatchLimits
from tilth.rl.packing import segment_sum
from tilth.training.packed import appraise, cut, model_input, plan_micros, score


def brute_force(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None, sinks: Tensor) -> Tensor:
    """Attention by one matrix over all packed tokens, with a mask."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    place = np.concatenate([np.arange(n) for n in lengths])
    apart = place[:, None] - place[None]
    visible = (sequence[:, None] == sequence) & (apart >= 0) & (apart < (window or 1 << 30))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(visible), -torch.inf)
    column = sinks[:, None, None].expand(-1, len(q), 1)
    return torch.einsum("hij,jhd->ihd", torch.cat((scores, column), -1).softmax(-1)[..., :-1], v)


def inputs(lengths: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(lengths))
    sizes = (heads, kv_heads, kv_heads, heads)
    made = [torch.randn(sum(lengths), n, width, generator=generator, dtype=torch.float64) * 1.5 for n in sizes]
    return [x.to(dtype) for x in made]


def attend(
    rank: int, ranks: int, style: str, cases: list[dict[str, Any]], dtype: str = "float64"
) -> list[dict[str, float]]:
    """How far output and gradients are from brute force, for each case: lengths, heads, kv_heads, window."""
    shape: Any = SimpleNamespace(num_heads=1 << 10, num_kv_heads=1 << 10)
    parallel = ContextParallel.of(ParallelDims.of(Mesh(("cp",), (ranks,)), rank), style, shape)
    return [_attend(parallel, getattr(torch, dtype), **case) for case in cases]


def _attend(
    parallel: ContextParallel,
    dtype: torch.dtype,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    window: int | None,
    sinks: bool = False,
    narrow: int = 0,
) -> dict[str, float]:
    """sinks: of every head; narrow: by how much values are narrower than keys."""
    share = parallel.share(lengths)
    whole = [x[..., : 4 - narrow * (i > 1)] for i, x in enumerate(inputs(lengths, heads, kv_heads, 4, dtype))]
    logits = [(torch.arange(heads, dtype=kind) * 0.5).requires_grad_() for kind in (dtype, torch.float64)]
    none = torch.full((heads,), -torch.inf, dtype=torch.float64)
    mine = [x[share.tokens].clone().requires_grad_(i < 3) for i, x in enumerate(whole)]
    wide = [x.double().requires_grad_(i < 3) for i, x in enumerate(whole)]
    found = share.context().attend(0, *mine[:3], window, *logits[: int(sinks)])
    wanted = brute_force(*wide[:3], lengths, window, logits[1] if sinks else none)
    assert found.dtype == dtype and found.shape == mine[3].shape
    sides = ((found, mine, logits[0]), (wanted, wide, logits[1]))
    grads = [torch.autograd.grad((a * x[3]).sum(), [*x[:3], *[s][: int(sinks)]]) for a, x, s in sides]
    pairs = zip(("out", "q", "k", "v"), (found, *grads[0][:3]), (wanted, *grads[1][:3]))
    distances = {name: far(a.detach().double(), b.detach()[share.tokens]) for name, a, b in pairs}
    if sinks:
        own = grads[0][3]
        dist.all_reduce(own, group=share.group)  # a rank's part
        distances["sinks"] = far(own.double(), grads[1][3])
    return distances


def compare(
    rank: int,
    sizes: dict[str, int],
    style: str = "ring",
    family: str = "qwen3",
    changes: dict[str, Any] | None = None,
    lengths: tuple[int, ...] = (5, 1, 12, 4, 23),
    value: bool = False,
    after: bool = False,
    sp: bool = False,
    checkpointing: bool = False,
    wrong: str = "",
) -> dict[str, float]:
    """Loss of whole sequences and every gradient of a model over a mesh against one device: how far each is, by name.

    wrong: function of ``parallel.context`` that sums what every rank has whole.
    """
    model = one_device(family, changes or {}, torch.float64, value)
    model.checkpointing = checkpointing
    grid = ParallelDims.of(Mesh.of(sizes), rank)
    twin = shard(lambda: one_device(family, changes or {}, torch.float64, value), grid, sp=sp, cp_style=style)
    twin.load_({name: p.detach() for name, p in model.named_parameters()})
    twin.model.checkpointing = checkpointing
    tokens, mask = sequences(model.config.vocab_size, False, lengths)
    with patch(f"tilth.parallel.context.{wrong}", gather_tokens) if wrong else nullcontext():
        losses = [_backward(each, tokens, mask, after) for each in (ShardedModel.alone(model), twin)]
    found = twin.assemble(list(twin.parameters), {name: p.grad for name, p in twin.parameters.items()})
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": far(losses[1], losses[0])} | {name: far(found[name], grad) for name, grad in wanted.items()}


def _backward(sharded: ShardedModel, tokens: Jagged, mask: np.ndarray, after: bool) -> Tensor:
    """Add the gradients of a loss that is not a sum over tokens; return it."""
    plan, total = plan_micros(tokens, mask, MicroBatchLimits(1000)).learn, torch.zeros(())
    for index, micro in cut(tokens, mask, {}, plan, torch.device("cpu"), sharded.context):
        dropout = DropoutContext(3, 1, 100 + torch.from_numpy(index)) if sharded.model.config.dropout else None
        hidden = sharded.forward(*model_input(micro, dropout=dropout))
        if isinstance(sharded.model, ValueModel):
            appraise(sharded.model, micro, hidden, after=after)
            column = micro.values
        else:
            score(sharded.model, micro, hidden, temperature=0.8, entropy=True)
            column = micro.logprobs + 0.3 * micro.entropy * torch.linspace(0.5, 1.5, len(micro.ids))
        rows = segment_sum(column, micro.lengths) / micro.lengths
        total = total + (rows.exp() + rows.sum().square()).sum()
    total.backward()
    sharded.gradients.reduce()
    return total.detach()


def moved(rank: int, ranks: int, style: str, lengths: list[int], kv_heads: int, window: int | None) -> dict[str, float]:
    """Bytes that this rank sends in the forward and in the backward pass of one attention, float32."""
    shape: Any = SimpleNamespace(num_heads=4, num_kv_heads=kv_heads)
    parallel = ContextParallel.of(ParallelDims.of(Mesh(("cp",), (ranks,)), rank), style, shape)
    share = parallel.share(lengths)
    q, k, v, _ = (x[share.tokens].requires_grad_() for x in inputs(lengths, 4, kv_heads, 8, torch.float32))
    with Attention() as forward:
        out = share.context().attend(0, q, k, v, window)
    with Attention() as backward:
        out.sum().backward()
    return {"forward": forward.bytes, "backward": backward.bytes}
