"""Simulate a step of MegaScale's 175B job (arXiv 2402.15627, tables 2 and 3) and put its MFU beside the published one.

Rates are those of an A100 of 80 GB (``tilth.plan.devices``). One constant is fitted, the share of the peak that matrix
products reach, so that the first row of the ablation is the published one; all else is predicted. Constants that the
paper does not publish (window, passes of unfused operators, idle time at a step's start) stand below.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from driver import benchmark_parser, write_rows

from tilth.config.schema import ModelConfig
from tilth.models.family import new_config
from tilth.plan.devices import DEVICES, DeviceType
from tilth.plan.search import AxisTime, StageTime, bubble_share, stage
from tilth.plan.shape import attended, matrices, parameters, token_flops

SEQUENCE, VOCABULARY, TP, PP, CHUNKS = 2048, 64_000, 8, 8, 6
WINDOW = 512
"""Tokens of the sliding window, which is not published."""
FLASH = {False: 0.35, True: 0.55}
"""Share of the peak that attention reaches, without and with FlashAttention-2 (arXiv 2307.08691, figure 4)."""
PASSES = {"norm": (6, 3), "residual": (3, 3), "gelu": (40, 8)}
"""Reads and writes of one hidden vector in an operator of a layer's forward pass: unfused and fused."""
PIECES = 4
"""Pieces of a product beside which its gather proceeds; the first one waits."""
IDLE = 0.25
"""Seconds of loading data and other work of the host before a step's first pass."""
STEPS = ("PTB", "SWA", "TP overlap", "PP overlap", "DP overlap", "operators", "misc", "LAMB x3")
ABLATION = (47.7, 52.3, 53.3, 55.5, 58.0, 59.5, 61.2, 62.3, 65.3)
"""Published MFU in percent on 256 GPUs with batch 256: nothing, then each of ``STEPS`` in addition."""
SCALING = (
    (256, 768, 65.3, 53.0),
    (1024, 768, 59.0, 44.7),
    (3072, 6144, 59.1, 48.7),
    (6144, 6144, 57.3, 47.8),
    (8192, 6144, 54.9, 43.3),
    (12288, 6144, 55.2, 41.2),
)
"""GPUs, batch, published MFU in percent of MegaScale and of Megatron-LM."""
SHAPE = new_config(
    ModelConfig(family="llama", hidden=12_288, layers=96, heads=128, ffn=32_768, context=SEQUENCE, tied=True),
    VOCABULARY,
)


class Job(NamedTuple):
    """One step of the 175B model. batch: sequences, each a micro-batch; on: those of ``STEPS`` in use."""

    gpus: int
    batch: int
    on: frozenset[str]

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (TP * PP)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica."""
        return self.batch // self.replicas


def layer_seconds(job: Job, device: DeviceType) -> float:
    """Return seconds of computing one layer's pass over a micro-batch, forward and backward, on one rank."""
    h, peak = SHAPE.hidden_size, device.flops["bf16"]
    products = 6.0 * matrices(SHAPE) / SHAPE.num_layers * SEQUENCE / TP / (device.attained * peak)
    pairs = attended(np.array([SEQUENCE]), WINDOW if "SWA" in job.on else None)
    scores = 12.0 * h * pairs / TP / (FLASH["operators" in job.on] * peak)
    fused, blocks = "operators" in job.on, 1 if "PTB" in job.on else 2
    passes = blocks * (PASSES["norm"][fused] + PASSES["residual"][fused]) + PASSES["gelu"][fused]
    moved = 3 * passes * h * 2 * SEQUENCE / TP
    return products + scores + moved / (device.links * device.memory_bandwidth)


def simulate(job: Job, device: DeviceType) -> StageTime:
    """Return the parts of a step: of the last stage, which has the output head and so takes longest."""
    layers, activation = SHAPE.num_layers / PP, SEQUENCE * SHAPE.hidden_size * 2
    head = 6.0 * SHAPE.hidden_size * VOCABULARY * SEQUENCE / TP / (device.attained * device.flops["bf16"])
    one = layers * layer_seconds(job, device) + head
    gathers = 5 * (1 if "PTB" in job.on else 2) * layers  # two forward, three backward, around each block
    tp = gathers * (TP - 1) / TP * activation / device.bandwidth(range(TP))
    tp /= PIECES if "TP overlap" in job.on else 1
    pp = 2 * CHUNKS * (activation / TP / device.bandwidth(range(0, 16, 8)) + device.hop)
    exposed = 0.0 if "PP overlap" in job.on else pp
    share = bubble_share(PP, job.micro_batches, CHUNKS)
    held, group = parameters(SHAPE) / (TP * PP), range(0, 8 * job.replicas, 8)
    dp = (2 + 4) * held * (job.replicas - 1) / job.replicas / device.bandwidth(group)  # bf16 gathered, fp32 scattered
    dp /= 2 * CHUNKS if "DP overlap" in job.on else 1
    update = 30 * held / job.replicas / (device.links * device.memory_bandwidth)
    m = job.micro_batches
    return stage(
        m * one + update,
        share * m * (one + tp) + share * m * pp,  # sends of warm-up and cool-down are never hidden
        [
            AxisTime("tp", m * tp, False),
            AxisTime("pp", m * exposed, False),
            AxisTime("dp", dp, False),
            AxisTime("host", 0.0 if "misc" in job.on else IDLE, False),
        ],
    )


def mfu(job: Job, device: DeviceType) -> float:
    """Return model FLOPs over the peak in percent, attention counted in full."""
    flops = job.batch * SEQUENCE * token_flops(SHAPE, (SEQUENCE + 1) / 2).both
    return 100 * flops / (job.gpus * device.flops["bf16"] * simulate(job, device).total)


def fitted() -> DeviceType:
    """Return the device whose products reach the share of the peak that gives the ablation's first row."""
    low, high, device = 0.3, 1.0, DEVICES["a100-80g"]
    for _ in range(50):
        device = replace(device, attained=(low + high) / 2)
        below = mfu(Job(256, 256, frozenset()), device) < ABLATION[0]
        low, high = (device.attained, high) if below else (low, device.attained)
    return device


def ablation(device: DeviceType) -> list[dict[str, Any]]:
    """Return a row for each line of the ablation."""
    rows, before = [], 0.0
    for count, published in enumerate(ABLATION):
        on = frozenset(STEPS[:count])
        job = Job(256, 768 if "LAMB x3" in on else 256, on)
        found, parts = mfu(job, device), simulate(job, device)
        gain = published - ABLATION[count - 1] if count else 0.0
        rows.append({
            "table": "ablation", "added": STEPS[count - 1] if count else "nothing", "gpus": 256, "batch": job.batch,
            "seconds": parts.total, "mfu_percent": found, "published_percent": published,
            "gain_points": found - before if count else 0.0, "published_gain_points": gain, **_parts(parts),
        })  # fmt: skip
        before = found
    return rows


def scaling(device: DeviceType) -> list[dict[str, Any]]:
    """Return two rows for each size of the strong scaling."""
    systems = (("MegaScale", frozenset(STEPS) - {"LAMB x3"}, 0), ("Megatron-LM", frozenset[str](), 1))
    rows = []
    for gpus, batch, *published in SCALING:
        for name, on, at in systems:
            parts = simulate(Job(gpus, batch, on), device)
            found = mfu(Job(gpus, batch, on), device)
            rows.append({
                "table": "scaling", "system": name, "gpus": gpus, "batch": batch, "seconds": parts.total,
                "mfu_percent": found, "published_percent": published[at], **_parts(parts),
            })  # fmt: skip
    return rows


def without(device: DeviceType) -> list[dict[str, Any]]:
    """Return a row for each overlap: 12,288 GPUs with all of ``STEPS`` but this one."""
    every, rows = frozenset(STEPS) - {"LAMB x3"}, []
    whole = mfu(Job(12_288, 6144, every), device)
    for name in ("TP overlap", "PP overlap", "DP overlap"):
        job = Job(12_288, 6144, every - {name})
        parts, found = simulate(job, device), mfu(job, device)
        rows.append({
            "table": "without", "left_out": name, "gpus": job.gpus, "batch": job.batch, "seconds": parts.total,
            "mfu_percent": found, "lost_points": whole - found, **_parts(parts),
        })  # fmt: skip
    return rows


def _parts(parts: StageTime) -> dict[str, float]:
    each = {f"{name}_seconds": seconds for name, seconds in parts.exposed}
    return {"compute_seconds": parts.compute, "bubble_seconds": parts.bubble, **each}


def main() -> None:
    """Print and write the rows."""
    parser = benchmark_parser(__doc__, "without the scaling")
    chosen = parser.parse_args()
    device = fitted()
    print(f"fitted: matrix products reach {device.attained:.3f} of the peak")
    rows = ablation(device) + without(device) + ([] if chosen.quick else scaling(device))
    for row in rows:
        name = row.get("added") or row.get("system") or f"no {row['left_out']}"
        where = f"{row['gpus']:6,} GPUs, batch {row['batch']:5,}, {name:<13}"
        parts = ", ".join(f"{k.removesuffix('_seconds')} {v:.2f}" for k, v in row.items() if k.endswith("_seconds"))
        published = f"(published {row['published_percent']}) " if "published_percent" in row else ""
        print(f"{where} {row['seconds']:6.2f} s  {row['mfu_percent']:5.1f} % {published}{parts}")
    write_rows(chosen.json, rows)


if __name__ == "__main__":
    main()
