"""Plugin of row 5 of ``faults.py``: passes of the model take as long as on devices that no other rank uses.

A forward or backward pass of training sleeps for ``PASS`` seconds beside what it computes, so that ranks that share
cores do not make each other slow. The process whose number the file TILTH_FAULTS.slow-pass has sleeps ``SLOWER`` times
as long.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tilth.models.decoder import Decoder

PASS = 0.5
"""Seconds."""
SLOWER = 1.5


def _pause() -> None:
    chosen = Path(os.environ["TILTH_FAULTS"] + ".slow-pass")
    slow = chosen.exists() and chosen.read_text() == str(os.getpid())
    time.sleep(PASS * (SLOWER if slow else 1.0))


def _passed(module: nn.Module, _: Any, out: Any) -> None:
    if isinstance(module, Decoder) and torch.is_grad_enabled() and isinstance(out, Tensor):
        _pause()
        out.register_hook(lambda _: _pause())


register_module_forward_hook(_passed)
