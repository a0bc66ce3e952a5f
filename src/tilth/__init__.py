"""Tilth trains language models by reinforcement learning.

``tilth.train`` and ``tilth.rl`` are loaded on first use, so that ``import tilth`` does not import torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilth import rl
    from tilth.api import train
    from tilth.config.plugins import (
        advantage,
        backend,
        callback,
        command,
        compressor,
        encoder,
        engine,
        family,
        flow,
        optimizer,
        policy_loss,
        reward,
        role,
        task,
        tracker,
        transform,
    )
    from tilth.envs.environment import Environment, tool
    from tilth.flows.callbacks import Callback
    from tilth.serve.agents.agent import Agent
    from tilth.ui.track import Tracker

__version__ = "0.1.0"
_HOME = {
    **dict.fromkeys(
        ("advantage", "backend", "callback", "command", "compressor", "encoder", "engine", "family", "flow",
         "optimizer", "policy_loss", "reward", "role", "task", "tracker", "transform"), "tilth.config.plugins",
    ),
    "Agent": "tilth.serve.agents.agent",
    "Callback": "tilth.flows.callbacks",
    "Environment": "tilth.envs.environment",
    "tool": "tilth.envs.environment",
    "Tracker": "tilth.ui.track",
    "train": "tilth.api",
}  # fmt: skip
"""Name -> module that it is loaded from on first use."""
__all__ = ["__version__", "rl", *_HOME]

# Idle OpenMP threads spin and slow down other processes of a small machine 10 to 30 times. The runtime reads this
# variable once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# oneDNN and torch's layer above it cache kernels and their memory for the last 1,024 shapes. Sizes of packed batches
# hardly ever repeat, so that would be gigabytes; 32 are enough for the shapes of one layer.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "32")
# Packed batches have other sizes each time, so that blocks of a fixed size would divide a GPU's memory into pieces.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# Gloo processes connect on first communication instead of all at once (also read once), so that a role can be made on
# some workers before the others have joined.
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name == "rl":
            return importlib.import_module("tilth.rl")
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module 'tilth' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
