"""Models and clocks on the device that a benchmark was given."""

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


def wait(device: torch.device | str) -> None:
    """Until the device has done all that it was given: before a clock is read."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def peak_allocated(device: torch.device | str) -> int | None:
    """Most bytes of tensors on a GPU since the process began or the last reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else None
