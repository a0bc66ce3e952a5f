"""Decode passes of few rows in parity mode as one call of C++ (``row_product.cpp``) in place of some 300 of torch.

A pass computes a token of each row through all layers of a plain decoder: pre-norm blocks with RMSNorm, rotary
embedding, attention over the cache and SwiGLU, in float32. Products are those of ``row_product``, and what lies between
them that of ``fused``; all are tried on this machine. Where one has other bits than torch's, or a model has more than
this, there is no such pass and the modules compute.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilth.models.decoder import MLP, Attention, Decoder, Layer, Linear, RMSNorm
from tilth.models.fused import LANES, exponential_of, norm_lanes, rotates
from tilth.models.row_product import MOST, SHARED, library, ready
from tilth.models.steady import KEY_BLOCK, ProductShape, linear, of_heads, summed

_Table = tuple[np.ndarray, np.ndarray]
"""``Sizes`` and a ``Block`` for each layer, in C++; lengths and pointers are filled in by each pass."""


class RowPass:
    """Passes of a model whose parameters stay the same objects; their storage may change."""

    def __init__(self, model: Decoder) -> None:
        """model: one that ``is_plain``."""
        self._model = model
        self._layers = [_parts(layer) for layer in model.model.layers]
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
        if not 0 < sizes[0] <= MOST or length % LANES[0]:
            return None
        if sizes not in self._tables:
            self._tables[sizes] = self._table(*sizes)
        if (found := self._tables[sizes]) is None:
            return None
        numbers, table = found
        numbers[7:9] = length, keys[0].shape[2]
        for row, (linears, norms), *cached in zip(table, self._layers, keys, values):
            row[0:21:3] = [one.weight.data_ptr() for one in linears]
            row[1:21:3] = [0 if one.bias is None else one.bias.data_ptr() for one in linears]
            row[21:25] = [0 if one is None else one.weight.data_ptr() for one in norms]
            row[25:27] = [one.data_ptr() for one in cached]
        model = self._model
        x, last, scale = model.embed(ids), model.model.norm, model.config.head_dim**-0.5
        given = (x, *model.rope.tables(start, None, torch.float32), start)
        pointers = (*(one.data_ptr() for one in given), table.ctypes.data, numbers.ctypes.data, last.weight.data_ptr())
        library().row_pass(*pointers, exponential_of(), last.eps, scale)
        return x

    def _table(self, rows: int, threads: int) -> _Table | None:
        """Return the table of a pass, None if a product or a function has other bits."""
        if not ready() or not exponential_of():
            return None
        c, layers = self._model.config, self._model.model.layers
        linears = [one for some, _ in self._layers for one in some]
        shapes = (ProductShape("linear", *p.weight.shape, torch.float32, threads, p.bias is not None) for p in linears)
        terms = [summed(shape, rows) for shape in shapes]
        inner = [of_heads(kind, c.head_dim, torch.float32, threads) for kind in ("scores", "values")]
        whole = inner[0].width == inner[1].out == c.head_dim and rotates(c.head_dim)
        attention = [summed(shape, c.num_heads // c.num_kv_heads) for shape in inner]
        lanes = [norm_lanes(width, c.rms_norm_eps) for width in (c.hidden_size, c.head_dim)[: 1 + c.qk_norm]]
        if not whole or not all([*terms, *attention, *lanes]):
            return None
        sizes = [rows, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, len(layers), 0, 0]
        numbers = [*sizes, threads, SHARED, lanes[0], lanes[-1], *attention, KEY_BLOCK]
        table = np.zeros((len(layers), 28), np.int64)
        table[:, 2:21:3] = np.reshape(terms, (len(layers), 7))
        table[:, 27] = [layer.window or 0 for layer in layers]
        return np.array(numbers, np.int64), table


def _parts(layer: Layer) -> tuple[list[Linear], list[RMSNorm | None]]:
    own, mlp = layer.self_attn, layer.mlp
    linears = [own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return linears, [layer.input_layernorm, layer.post_attention_layernorm, own.q_norm, own.k_norm]


def is_plain(model: Decoder) -> bool:
    """Return True if a model is one on a CPU that ``RowPass`` computes, without changes of its layers."""
    c, layers, plain = model.config, [*model.model.layers], model.rope.local is None and model.first and model.last
    for one in layers:
        plain = plain and type(one) is Layer and type(one.self_attn) is Attention and type(one.mlp) is MLP
        plain = plain and one.mlp.activation == "silu" and one.self_attn.sinks is None and one.self_attn.scale == 1
        plain = plain and not one.self_attn.wide_norm
    if not plain or not c.rope_dim == c.value_dim == c.head_dim:
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
