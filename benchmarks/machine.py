"""Models and clocks on the device that a benchmark was given."""

import json
from pathlib import Path
from typing import Any

import torch
from shapes import CONTEXT, SHAPES

from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def config_of(name: str) -> DecoderConfig:
    """The whole shape."""
    return DecoderConfig(**{"qk_norm": True, "max_positions": CONTEXT, "tie_embeddings": True, **SHAPES[name]})


def random_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Random weights in fp32, made on the device; activations in ``dtype``."""
    model = Decoder(config, dtype).to_empty(device=device)
    model.init_weights_(0)
    return model


def write_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write what there is so far, whole at any time; who stops the script finds it."""
    if path is not None:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(rows, indent=1) + "\n")
        part.replace(path)


def wait(device: torch.device | str) -> None:
    """Until the device has done all that it was given: before a clock is read."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def peak_allocated(device: torch.device | str) -> int | None:
    """Most bytes of tensors on a GPU since the process began or the last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else None
