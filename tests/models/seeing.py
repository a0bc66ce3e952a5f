"""A toy family whose models see: an image of 8 x 8 grey pixels stands for four tokens, through one linear layer."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import tilth
from tests.config.test_plugins import forget
from tilth.core.media import MediaItem
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Linear
from tilth.models.families.llama import FAMILY
from tilth.models.family import Encoder
from tilth.plan.rules import Parameter

PIXELS = 16
NAME = "encoders.patches.proj.weight"


class Patches(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = Linear()

    def forward(self, items, counts, dtype):
        return self.proj(torch.cat([item.view(-1, PIXELS) for item in items]).to(dtype) / 255 - 0.5)


@contextmanager
def declared():
    rows = (Parameter(NAME, ("hidden_size", PIXELS), "matrix", "whole", "fan_in"),)
    tilth.encoder("patches")(lambda: Encoder(rows, Patches))
    tilth.family("seeing")(lambda: replace(FAMILY, encoders=("patches",)))
    yield
    forget()


def config(**changes):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 24}
    return DecoderConfig(**{**shape, "max_positions": 64, "family": "seeing", **changes})


def image(digit, seed, start=0):
    """An image at four positions, whose part number ``digit`` is bright."""
    pixels = np.random.default_rng(seed).integers(0, 60, 64)
    pixels[PIXELS * digit : PIXELS * (digit + 1)] += 190
    return MediaItem("patches", start, 4, pixels.astype(np.uint8).tobytes())
