"""Tilth trains language models by reinforcement learning.

``tilth.train(...)`` and the pure functions of ``tilth.rl`` are loaded when they are first used, so that importing
``tilth`` costs no torch.
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
        engine,
        family,
        flow,
        optimizer,
        policy_loss,
        reward,
        role,
        task,
        tracker,
    )
    from tilth.flows.callbacks import Callback
    from tilth.ui.track import Tracker

__version__ = "0.1.0"
_HOME = {
    **dict.fromkeys(
        (
            "advantage",
            "backend",
            "callback",
            "command",
            "engine",
            "family",
            "flow",
            "optimizer",
            "policy_loss",
            "reward",
            "role",
            "task",
            "tracker",
        ),
        "tilth.config.plugins",
    ),
    "Callback": "tilth.flows.callbacks",
    "Tracker": "tilth.ui.track",
    "train": "tilth.api",
}
"""Name -> the module that it is loaded from when it is first used."""
__all__ = ["__version__", "rl", *_HOME]

# Idle OpenMP threads spin and starve every other process of a small machine (10 to 30 times slower);
# the runtime reads this once, when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# oneDNN (bf16, and fp32 at "medium") and torch's layer above it keep kernels and their memory for the last 1,024
# shapes: with packed batches, whose sizes hardly ever repeat, that is gigabytes. Only one layer's are used again.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "32")
# Processes of gloo connect when they first speak to each other, not all with all when they join (also read once): so a
# role can be made on some workers before the others have joined.
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


if not TYPE_CHECKING:  # a type checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        if name == "rl":
            return importlib.import_module("tilth.rl")
        if name in _HOME:
            return getattr(importlib.import_module(_HOME[name]), name)
        raise AttributeError(f"module 'tilth' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
