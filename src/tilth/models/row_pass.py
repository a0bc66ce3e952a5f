"""Decode passes of few rows in parity mode as one call of C++ (``row_product.cpp``) in place of some 300 of torch.

A pass computes a token of each row through all layers of a plain decoder: pre-norm blocks with RMSNorm, rotary
embedding, attention over the cache and SwiGLU, in float32. Products are those of ``row_product``, and what lies between
them that of ``fused``; all are tried on this machine. Where one has other bits than torch's, or a model has more than
this, there is no such pass and the modules compute.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilth.models.decoder import MLP, Attention, Decoder, Layer, Linear, RMSNorm
from tilth.models.fused import exponential_of, norms, rotates
from tilth.models.row_product import MOST, SHARED, library, ready
from tilth.models.steady import KEY_BLOCK, ProductShape, linear, of_heads, summed
from tilth.plan.kernels import KEYS

PLACES = [*(at for at in range(21) if at % 3 < 2), *range(21, 25)]
"""Columns of a ``Block`` for weights, biases and norms."""
_Table = tuple[np.ndarray, np.ndarray]
"""``Sizes`` and a ``Block`` for each layer, in C++; lengths and pointers are filled in by each pass."""


class RowPass:
    """Passes of a model whose parameters stay the same objects; their storage may change."""

    def __init__(self, model: Decoder) -> None:
        """model: one that ``is_plain``."""
        self._model = model
        parts = [_parts(layer) for layer in model.model.layers]
        self._linears = [one for linears, _ in parts for one in linears]
        self._parameters: list[Tensor | None] = []
        for linears, some in parts:
            self._parameters += [part for one in linears for part in (one.weight, one.bias)]
            self._parameters += [None if one is None else one.weight for one in some]
        self._tables: dict[tuple[int, int], _Table | None] = {}

    def hidden(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], ids: Tensor, start: Tensor, length: int
    ) -> Tensor | None:
        """Return hidden states after the final norm [n, hidden] of ids int64 [n] at positions start int64 [n], and
        write their keys and values; None if this machine or so many rows have no such pass.

        keys, values: of each layer, [rows, heads, capacity, width], dense, of which the first n rows and ``length``
        slots are read.
        """
        sizes = len(ids), torch.get_num_threads()
        if not 0 < sizes[0] <= MOST or length % KEYS:
            return None
        if sizes not in self._tables:
            self._tables[sizes] = self._table(*sizes)
        if (found := self._tables[sizes]) is None:
            return None
        numbers, table = found
        numbers[7:9] = length, keys[0].shape[2]
        pointers = np.array([0 if one is None else one.data_ptr() for one in self._parameters])
        table[:, PLACES] = pointers.reshape(len(table), -1)
        table[:, 25], table[:, 26] = ([one.data_ptr() for one in cached] for cached in (keys, values))
        model = self._model
        x, last, scale = model.embed(ids), model.model.norm, model.config.head_dim**-0.5
        given = (x, *model.rope.tables(start, None, torch.float32), start)
        tables = table.ctypes.data, numbers.ctypes.data, last.weight.data_ptr(), exponential_of()
        library().row_pass(*(one.data_ptr() for one in given), *tables, last.eps, scale)
        return x

    def _table(self, rows: int, threads: int) -> _Table | None:
        """Return the table of a pass, None if a product or a function has other bits."""
        if not ready() or not exponential_of():
            return None
        c, layers = self._model.config, list[Any](self._model.model.layers)
        sizes = ((*one.weight.shape, one.bias is not None) for one in self._linears)
        shapes = (ProductShape("linear", out, width, torch.float32, threads, biased) for out, width, biased in sizes)
        terms = [summed(shape, rows) for shape in shapes]
        inner = [of_heads(name, c.head_dim, torch.float32, threads) for name in ("scores", "values")]
        whole = inner[0].width == inner[1].out == c.head_dim and rotates(c.head_dim)
        attention = [summed(shape, c.num_heads // c.num_kv_heads) for shape in inner]
        normed = [norms(width, c.rms_norm_eps) for width in (c.hidden_size, c.head_dim)[: 1 + c.qk_norm]]
        if not whole or not all([*terms, *attention, *normed]):
            return None
        widths = [rows, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, len(layers), 0, 0]
        numbers = [*widths, threads, SHARED, *attention, KEY_BLOCK]
        table = np.zeros((len(layers), 28), np.int64)
        table[:, 2:21:3] = np.reshape(terms, (len(layers), 7))
        table[:, 27] = [layer.window or 0 for layer in layers]
        return np.array(numbers, np.int64), table


def _parts(layer: Any) -> tuple[list[Linear], list[RMSNorm | None]]:
    own, mlp = layer.self_attn, layer.mlp
    linears = [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return linears, [layer.input_layernorm, layer.post_attention_layernorm, own.q_norm, own.k_norm]


def is_plain(model: Decoder) -> bool:
    """Return True if a model is one on a CPU that ``RowPass`` computes, without changes of its layers."""
    c, layers, plain = model.config, list[Any](model.model.layers), model.rope.local is None
    for one in layers:
        plain = plain and type(one) is Layer and type(one.self_attn) is Attention and type(one.mlp) is MLP
        plain = plain and one.mlp.activation == "silu" and one.self_attn.sinks is None and one.self_attn.scale == 1
        plain = plain and not one.self_attn.wide_norm
    if not (plain and model.first and model.last) or not c.rope_dim == c.value_dim == c.head_dim:
        return False
    parts = [_parts(one) for one in layers]
    norms = [model.model.norm, *(one for _, some in parts for one in some if one is not None)]
    linears = [one for some, _ in parts for one in some]
    weights = [one.weight for one in (*norms, *linears)]
    return (
        all(type(one) is RMSNorm for one in norms)
        and all(one.lora is None and one.product is linear for one in linears)
        and all(one.dtype == torch.float32 and one.device.type == "cpu" and one.is_contiguous() for one in weights)
    )
