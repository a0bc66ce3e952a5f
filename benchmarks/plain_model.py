"""A Qwen3-shaped decoder as one writes it by hand: batch [B, T], causal SDPA, parameter names of ``transformers``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilth.models.config import DecoderConfig


def rope(length: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, width]."""
    frequencies = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, H, T, width]."""
    low, high = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-high, low), -1) * sin.to(x.dtype)


class PlainAttention(nn.Module):
    """Projections, norms of queries and keys, SDPA."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = c.num_heads, c.num_kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, hidden]."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.width)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.width)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.width).transpose(1, 2)
        q, k = rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype)
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class PlainMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLayer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = PlainAttention(c), PlainMLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainStack(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)


class PlainModel(nn.Module):
    """ids int64 [B, T] to logits [B, T, V]."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.config, self.model = c, PlainStack(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """All logits."""
        x = self.model.embed_tokens(ids)
        cos, sin = rope(ids.shape[1], self.config.head_dim, self.config.rope_theta, ids.device)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))
