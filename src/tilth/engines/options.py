"""Options of a generation engine, whatever its kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tilth.config.schema import DraftConfig, LoraConfig
from tilth.engines.drafter import Drafter
from tilth.engines.stops import Decodes
from tilth.parallel.dims import ParallelDims
from tilth.plan.kernels import BLOCK


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of any engine; one that cannot do what an option asks for refuses it by name."""

    tokenizer: Decodes | None = None
    """For stop strings and ``Trajectory.text`` only."""
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32
    """Storage and compute of the decoder."""
    seed: int = 0
    """Token t of trajectory i is drawn by value t of the stream (seed, "sample", i), whatever else happens."""
    max_rows: int = 256
    """Sequences decoded at once."""
    kv_tokens: int = 0
    """Capacity of the KV cache; 0: ``max_rows`` whole sequences."""
    block_size: int = BLOCK
    """Tokens of a block of the native engine's KV cache."""
    step_tokens: int = 8192
    """Largest number of tokens per step, decode first."""
    max_length: int = 0
    """Tokens of the longest sequence; 0: the model's context."""
    compile: bool = False
    """torch.compile of decode steps (CUDA graphs on a GPU)."""
    parity: bool = False
    """Eager, in shapes whose log-probs equal those of a packed forward pass with ``parity`` bit for bit (CPU)."""
    padded: bool = True
    """Pad products of fewer than 8 rows, which take other kernels, so that requests that come and go in time do not
    change what others draw: no guarantee, as parity is."""
    routing: bool = False
    """Record the experts of each token (``Trajectory.routing``)."""
    dims: ParallelDims | None = None
    """Ranks along "ep" and "tp" are one engine, which divides experts along "ep"; heads, widths of MLPs and vocabulary
    along "tp", where each holds the KV of its own heads. All get the same calls and return the same trajectories."""
    draft: DraftConfig | None = None
    """Speculate (native engine); None: a pass computes one token of a row."""
    drafter: Callable[[], Drafter] | None = None
    """Makes what drafts, here or, pickled, in a process apart; None: suffixes."""
    branches: bool = False
    """Drafts are trees: several continuations of a token may be computed in a pass."""
    lora: LoraConfig | None = None
    """Adapters among the weights (``GenerationEngine.syncs_adapters``)."""
    patience: float = 600.0
    """Seconds without a token after which an engine in a process of its own is started again."""
    python: str = ""
    """Interpreter of an engine in a process of its own; empty: this one."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of an engine that is not the native one (``rollout.options``)."""
