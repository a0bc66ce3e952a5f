"""A small cached context: one query per row and step over a bucketed cache. What the rollout engine does, by hand."""

import torch
from torch import Tensor

from tilth.models.attention import matmul_attention
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.moe import ExpertContext


class CachedContext:
    """Row r of the batch holds a sequence of ``self.length[r]`` tokens."""

    dropout, experts = None, ExpertContext(parity=True)

    def __init__(self, config: DecoderConfig, rows: int, bucket: int, dtype: torch.dtype) -> None:
        self.rows, self.bucket = rows, bucket
        shape = (self.rows, config.num_kv_heads, bucket, config.head_dim)
        self.k = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.positions = torch.zeros(self.rows, dtype=torch.int64)

    def at(self, positions: Tensor) -> "CachedContext":
        self.positions = positions
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        row = torch.arange(self.rows)
        self.k[layer][row, :, self.positions] = k
        self.v[layer][row, :, self.positions] = v
        b, heads, hd = q.shape
        kv_heads = k.shape[1]
        grouped = q.view(b, kv_heads, heads // kv_heads, 1, hd)
        place = torch.arange(self.bucket)
        visible = place <= self.positions[:, None]
        if window is not None:
            visible &= place > self.positions[:, None] - window
        mask = visible.view(b, 1, 1, 1, self.bucket)
        out = matmul_attention(grouped, self.k[layer], self.v[layer], mask, parity=True)
        return out[..., 0, :].reshape(q.shape)


@torch.no_grad()
def decode_hidden(model: Decoder, sequences: list[Tensor], bucket: int) -> list[Tensor]:
    """Teacher-forced, token by token, all sequences as one batch: hidden [T, width] of each."""
    ctx = CachedContext(model.config, len(sequences), bucket, model.dtype)
    hidden = []
    for t in range(max(len(s) for s in sequences)):
        ids = torch.stack([s[min(t, len(s) - 1)] for s in sequences])
        place = torch.tensor([min(t, len(s) - 1) for s in sequences])
        hidden.append(model(ids, ctx.at(place)))
    return [torch.stack([h[i] for h in hidden[: len(s)]]) for i, s in enumerate(sequences)]
