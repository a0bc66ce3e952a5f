"""Refusal of models whose products have no bits of their own on this machine: parity mode on a CPU."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from tilth.models.attention import matmul_attention
from tilth.models.config import DecoderConfig
from tilth.models.logprobs import wide
from tilth.models.row_product import prepare
from tilth.models.steady import TAILS, ProductShape, keeps_bits, of_heads, reference, refusal, summed
from tilth.plan.kernels import ROW_MULTIPLE
from tilth.plan.rules import rule_of
from tilth.plan.shape import parameter_shapes

LENGTHS = (16, 48, 272, 704)
"""Keys of a trial of attention: a part of a block, a block and a part, blocks and most of one."""


def check_parity(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Try the products of a model of this compute dtype on the CPU and number of threads that this thread has now.

    Returns the fewest rows with which no linear layer is padded: a pass of so many copies nothing.

    Raises RecipeError of ``train.parity`` that names those whose rows have other bits at other places.
    """
    prepare()
    threads = torch.get_num_threads()
    shapes = dict.fromkeys(products(config, dtype, threads))
    wrong = [str(shape) for shape in shapes if reference(shape) is None]
    heads = config.num_heads // config.num_kv_heads, config.head_dim, config.value_dim
    if not wrong and not _attends(*heads, wide(dtype), threads):
        wrong = [f"attention of heads {config.head_dim} wide"]
    if wrong:
        raise refusal("; ".join(wrong), threads)
    linear = [shape for shape in shapes if shape.kind == "linear"]
    if all(summed(shape, 1) for shape in linear):
        return 1
    return next((rows for rows in TAILS if all(keeps_bits(shape, rows) for shape in linear)), ROW_MULTIPLE)


def products(config: DecoderConfig, dtype: torch.dtype, threads: int) -> Iterator[ProductShape]:
    """Yield the products of a pass through a model, each once or several times."""
    shapes = parameter_shapes(config)
    for name, sizes in shapes.items():
        kind = rule_of(config.table, name).kind
        if len(sizes) < 2 or (kind == "embedding" and not config.tie_embeddings):
            continue
        biased = f"{name.removesuffix('weight')}bias" in shapes
        own = wide(dtype) if kind == "router" else dtype
        yield ProductShape("linear", sizes[-2], sizes[-1], own, threads, biased)
    yield of_heads("scores", config.head_dim, wide(dtype), threads)
    yield of_heads("values", config.value_dim, wide(dtype), threads)


@cache
def _attends(heads: int, width: int, value_width: int, dtype: torch.dtype, threads: int) -> bool:
    """Return True if a query of ``heads`` that share a key's has the same bits alone as among others."""
    some, longest = torch.Generator().manual_seed(0), LENGTHS[-1]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=some, dtype=dtype)

    q, k, v = random(2, 1, heads, 20, width), random(2, 1, longest, width), random(2, 1, longest, value_width)
    for seen in LENGTHS:
        mask = torch.zeros(2, 1, 1, 20, longest).masked_fill_(torch.arange(longest) >= seen, -torch.inf)
        among = matmul_attention(q, k, v, mask.to(dtype), parity=True)
        cut = k[1:, :, :seen], v[1:, :, :seen], mask[1:, ..., :1, :seen].to(dtype)
        if not torch.equal(matmul_attention(q[1:, ..., 7:8, :], *cut, parity=True), among[1:, ..., 7:8, :]):
            return False
    return True
