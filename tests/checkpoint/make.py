"""Tensors and checkpoints for the tests of this room."""

from pathlib import Path

import torch

from tilth.checkpoint import save
from tilth.checkpoint.manifest import SAFETENSORS_NAMES
from tilth.core.random import stream

DTYPES = list(SAFETENSORS_NAMES)


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, salt: str = "") -> torch.Tensor:
    """Arbitrary bits (NaNs and denormals too) of any dtype."""
    count = int(torch.Size(shape).numel())
    raw = stream(0, "tensor", salt).bits(0, count * dtype.itemsize + 1)[:-1].to(torch.uint8)
    return (raw > 127).view(shape) if dtype == torch.bool else raw.clone().view(dtype).view(shape)


def groups(salt: str = "") -> dict[str, dict[str, torch.Tensor]]:
    """A model and an optimizer."""
    model = {"embed.weight": tensor((7, 4), torch.bfloat16, salt), "norm.weight": tensor((5,), salt=salt)}
    return {"model": model, "optimizer": {"step": tensor((), torch.int64, salt), "m": tensor((3, 2), salt=salt)}}


def save_step(root: Path, step: int) -> Path:
    """A checkpoint whose contents tell its step."""
    return save(root, step, groups(str(step)), {"step": step, "seed": [1, 2.5, None]})


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
