"""Seconds of passes over a model from rates of a device: training and scoring bound by compute, decoding by memory.

An estimate in the manner of HybridFlow's simulators (arXiv 2409.19256, section 6): a share of the peak that layers
reach, a least time of each kernel, bytes over links, bubbles of a pipeline. All sequences are as long as they can be.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tilth.plan.devices import DeviceType
from tilth.plan.shape import DecoderShape, kv_bytes, parameters

KERNELS = 16
"""Kernels of one layer in the forward pass; the backward pass has twice as many."""


class AxisTime(NamedTuple):
    """Communication of one rank over one axis in a stage."""

    axis: str
    seconds: float
    hidden: bool
    """True if it proceeds beside compute."""


class StageTime(NamedTuple):
    """Seconds of one rank in a stage of a step."""

    compute: float
    bubble: float
    """Idle in the pipeline while it fills and drains."""
    exposed: tuple[tuple[str, float], ...]
    """(axis, seconds of communication beside which nothing is computed)."""

    @property
    def total(self) -> float:
        """Seconds of the stage."""
        return self.compute + self.bubble + sum(seconds for _, seconds in self.exposed)


def stage(compute: float, bubble: float, exchanges: Iterable[AxisTime]) -> StageTime:
    """Add communication to compute; what proceeds beside it counts only as far as it takes longer."""
    exposed, beside = dict[str, float](), 0.0
    for axis, seconds, hidden in exchanges:
        if hidden:
            hid = min(seconds, compute - beside)
            beside, seconds = beside + hid, seconds - hid
        exposed[axis] = exposed.get(axis, 0.0) + seconds
    return StageTime(compute, bubble, tuple(exposed.items()))


def bubble_share(stages: int, micro_batches: int, chunks: int = 1, schedule: str = "1f1b") -> float:
    """Return the idle time of a pipeline over the time of its passes.

    (stages - 1) / (micro-batches x chunks) for 1F1B and, with several chunks a stage, interleaved 1F1B (arXiv
    2104.04473); a third for zero-bubble ZB-H1, whose passes for weights fill two thirds (arXiv 2401.10241).
    """
    share = (stages - 1) / max(1, micro_batches * chunks)
    return share / 3 if schedule == "zero-bubble" else share


def pass_seconds(device: DeviceType, rate: float, flops: float, layer_passes: float) -> float:
    """Return seconds of ``flops`` in this many forward passes of a layer, whose kernels have a least time."""
    return max(flops / rate, layer_passes * KERNELS * device.launch)


class Decoding(NamedTuple):
    """Load of one engine in a step."""

    rows: int
    """Sequences."""
    prompts: int
    """Different prompts."""
    together: int
    """Most sequences that decode at once."""
    prompt: int
    new: int
    """Tokens of a prompt and of a completion."""


def decode_seconds(
    device: DeviceType, rate: float, shape: DecoderShape, load: Decoding, element: int, ranks: int, link: float
) -> tuple[float, float]:
    """Return seconds of generation on an engine whose model ``ranks`` ranks divide, and those of them on links.

    A decode step reads all weights and the keys and values of its sequences, or computes, whichever takes longer.
    link: bytes/s between the ranks.
    """
    if not load.rows:
        return 0.0, 0.0
    size = parameters(shape)
    batch = min(load.rows, load.together)
    waves, seen = -(-load.rows // batch), load.prompt + load.new / 2
    read = (size * element + batch * seen * kv_bytes(shape, element)) / ranks
    compute = 2.0 * size * batch / ranks / rate
    least = shape.num_layers * KERNELS * device.launch
    one = max(read / (device.links * device.memory_bandwidth), compute, least)
    prefill = pass_seconds(device, rate, 2.0 * size * load.prompts * load.prompt / ranks, shape.num_layers)
    sums, moved = 2 * shape.num_layers, 2 * (ranks - 1) / ranks * shape.hidden_size * element
    steps, tokens = waves * load.new, load.rows * load.new + load.prompts * load.prompt
    talk = (steps * sums * device.hop * (ranks - 1) + tokens * sums * moved / link) if ranks > 1 else 0.0
    return steps * one + prefill + talk, talk
