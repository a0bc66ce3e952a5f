"""Rotary position embedding: inverse frequencies of each scaling (as in transformers), tables, rotation."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tilth.models.config import DecoderConfig, check
from tilth.models.logprobs import wide

Tables = tuple[Tensor, ...]
"""Cosines and sines of each token, once or twice (see ``Rope.tables``)."""


def inverse_frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    """Return (float32 [rope_dim / 2] radians per token, factor of cos and sin); dynamic scaling without its growth."""
    plain = 1.0 / _powers(config.rope_theta, config.rope_dim)
    scaling = config.rope_scaling or {}
    if config.rope_type == "linear":
        return plain / scaling["factor"], 1.0
    if config.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if config.rope_type == "yarn":
        return _yarn(config, scaling)
    return plain, 1.0


def _powers(base: float, dim: int) -> Tensor:
    """Return powers of the base by pair of dimensions, on the CPU: models are made on the meta device, for which
    ``arange`` imports torch.compile."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def _llama3(plain: Tensor, scaling: dict) -> Tensor:
    """Stretch long waves by ``factor``, keep short ones, interpolate between (Llama 3.1)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wave = 2 * math.pi / plain
    smooth = (context / wave - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wave > context / low, plain / factor, plain)
    return torch.where((wave >= context / high) & (wave <= context / low), between, stretched)


def _yarn(config: DecoderConfig, scaling: dict) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, ramp between, scale attention (YaRN, arXiv 2309.00071)."""
    factor, dim = scaling["factor"], config.rope_dim
    powers = _powers(config.rope_theta, dim)
    low, high = _yarn_range(config, scaling)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=powers.device) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep, _yarn_attention(factor, scaling)


def _yarn_range(config: DecoderConfig, scaling: dict) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        context = scaling["original_max_position_embeddings"]
        return config.rope_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rope_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention(factor: float, scaling: dict) -> float:
    def growth(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given, mscale, all_dim = (scaling.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    return growth(mscale) / growth(all_dim) if mscale and all_dim else growth(1.0)


class Rope:
    """Rotary tables of a forward pass. Frequencies stay fp32 for any dtype of the model."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.frequencies, self.factor = inverse_frequencies(config)
        theta = config.window_rope_theta
        local = None if theta is None else replace(config, rope_theta=theta, rope_scaling=None, window_rope_theta=None)
        self.local = None if local is None else Rope(local)
        """Of the layers with a window, if theirs is another."""

    def tables(self, positions: Tensor, extents: Tensor | None, dtype: torch.dtype) -> Tables:
        """Return cos and sin, [N, 1, rope_dim] in ``dtype``, with the first half of sin negated for ``rotate``; then,
        if they have their own, those of the layers with a window.

        positions: int64 [N]. extents: int64 [N], length of the sequence that each token belongs to; only ``dynamic``
        scaling reads it, and only beyond ``max_positions``; None: each token's own position + 1.
        """
        own = self._tables(positions, extents, dtype)
        return own if self.local is None else own + self.local.tables(positions, extents, dtype)

    def _tables(self, positions: Tensor, extents: Tensor | None, dtype: torch.dtype) -> Tables:
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None] * self._frequencies(positions, extents).to(wide(dtype))
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def _frequencies(self, positions: Tensor, extents: Tensor | None) -> Tensor:
        """[rope_dim / 2], or [N, rope_dim / 2] with dynamic scaling: the base grows with the sequence (NTK)."""
        if self.config.rope_type != "dynamic":
            return self.frequencies
        assert self.config.rope_scaling is not None
        factor, dim, limit = self.config.rope_scaling["factor"], self.config.rope_dim, self.config.max_positions
        length = (positions + 1 if extents is None else extents).clamp(min=limit).float()
        base = self.config.rope_theta * (factor * length / limit - (factor - 1)) ** (dim / (dim - 2))
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
        return 1.0 / base[:, None] ** exponent


def along_one_axis(positions: Tensor, rows: int) -> Tensor:
    """Return positions int64 [rows] of int64 [rows, 1]. ModelError: there are others, or several axes."""
    found, right = list(positions.shape), [rows, 1]
    check(found == right, "positions", found, f"{right}: rotary embedding has one axis")
    return positions[:, 0]


def tables_of(tables: Tables, windowed: bool) -> Tables:
    """Return cos and sin of a layer with or without a window."""
    return tables[2:] if windowed and len(tables) > 2 else tables[:2]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [N, H, head_dim] by ``Rope.tables`` in three kernels: roll, multiply, multiply-add."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)
