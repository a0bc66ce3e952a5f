"""Seconds of passes over a model from rates of a device: training and scoring bound by compute, decoding by memory.

An estimate in the manner of HybridFlow's simulators (arXiv 2409.19256, section 6): a share of the peak that layers
reach, a least time of each kernel, bytes over links, bubbles of a pipeline. All sequences are as long as they can be.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tilth.plan.devices import DeviceType
from tilth.plan.pipeline import layer_costs, stages_of
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


def bubble_share(
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    schedule: str = "1f1b",
    *,
    again: bool = False,
    learns: bool = True,
) -> float:
    """Return the idle time of a pipeline over the time of its passes; ``tilth_studies.pipeline_idle`` finds equal ones.

    A backward pass counts as two forward passes, and three if it computes the forward pass again. 1F1B: (stages - 1) /
    micro-batches, divided by the chunks of interleaving (arXiv 2104.04473), which waits for every micro-batch that its
    last group lacks. Zero-bubble ZB-H1 (arXiv 2401.10241): passes for weights fill the bubble if there are
    enough micro-batches. learns: False for forward passes alone.
    """
    m, backward = max(1, micro_batches), 2 + again
    each, lacking = m * (1.0 + backward), -m % stages
    if schedule == "zero-bubble" and learns:
        return ((stages - 1) * (backward - 1) + max(0, stages - m)) / each
    waits = 1.0 if not learns or m < stages else backward / (1 + backward)
    return ((stages - 1) + lacking * (chunks - 1) * waits) / (m * chunks)


def uneven(shape: DecoderShape, stages: int, schedule: str, values: bool) -> float:
    """Return the time of the slowest stage over that of all stages' mean: the last one has the output head too."""
    if stages == 1:
        return 1.0
    placed, costs = stages_of(shape, stages, schedule, value=values), layer_costs(shape, value=values)
    each = [sum(costs[layer] for part in placed.parts(k) for layer in placed.layers[part]) for k in range(stages)]
    return stages * max(each) / sum(each)


UPDATED = 30
"""Bytes that an optimizer step reads and writes for each element: gradient, two moments and weight in fp32."""


def optimizer_seconds(device: DeviceType, elements: int) -> float:
    """Return seconds of one optimizer step over the elements of a rank, which memory bounds."""
    return UPDATED * elements / (device.links * device.memory_bandwidth)


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
