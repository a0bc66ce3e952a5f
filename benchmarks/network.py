"""Is the network the bottleneck? The fused-bucket model beside measured steps, and what it says of larger rings.

    python benchmarks/network.py [--quick] [--json PATH]

After arXiv 2006.10103. Measured: data-parallel steps over a ring of local processes whose links a token bucket
throttles (``network_ring.py``; the passes are sleeps, so only transport and additions use the processor). For each
nominal bandwidth: f measured, f of the model at the nominal bandwidth in full use, and f of the model at the bandwidth
that an all-reduce of one bucket alone reached. Where the link is the bottleneck all three agree; on a fast link the
model's nominal f is above the measured one, and the gap is the transport's software. Simulated: ResNet50, ResNet101 and
VGG16 on 8 to 1,024 ranks, with the compression at which f reaches 0.95 (``network_models.py``: assumed times).
"""

import math
import statistics
from dataclasses import replace
from typing import Any

import network_models
import network_ring
import numpy as np
from driver import benchmark_parser, write_rows
from network_fusion import (
    Adding,
    Fusion,
    Ring,
    Step,
    compression_for,
    scaling_alone,
    scaling_at_best,
    server_seconds,
    synchronise,
)

GBIT = 1e9 / 8
MB = 2**20
LEVELS = (25e6, 50e6, 100e6, 200e6, 800e6, 12.5e9)
"""Bytes a second; the last is 100 Gbit/s, which no link of processes reaches here."""
Row = dict[str, Any]


def measured(ranks: int, levels: tuple[float, ...], steps: int) -> list[Row]:
    """Each level, with the same work: 64 MB in 16 gradients, 30 ms forward, 70 ms backward, buckets of 8 MB."""
    work = network_ring.Work(0.03, (0.07 / 16,) * 16, (4 * MB,) * 16)
    fusion = Fusion(8 * MB, math.inf)
    lone, _ = network_ring.run(work, 1, math.inf, fusion, steps)
    step = _typical(work, lone[0])
    sizes = [MB, 4 * MB, 16 * MB]
    additions = Adding(np.array(sizes, float), np.array(network_ring.adding(sizes)))
    return [
        _row(step, ranks, level, fusion, additions, network_ring.run(work, ranks, level, fusion, steps))
        for level in levels
    ]


def _typical(work: network_ring.Work, timed: list[network_ring.Timed]) -> Step:
    """The step without communication: medians."""
    ready = np.median([t.ready for t in timed], axis=0)
    back = max(statistics.median(t.back for t in timed), float(ready.max()))
    return Step(ready, np.array(work.bytes, float), back, back)


def _row(
    step: Step,
    ranks: int,
    level: float,
    fusion: Fusion,
    additions: Adding,
    found: tuple[list[list[network_ring.Timed]], list[float]],
) -> Row:
    timed, alone = found
    took = statistics.median(max(t.end for t in times) for times in zip(*timed))
    moved = 2 * fusion.limit * (ranks - 1) / ranks
    effective = moved / statistics.median(alone)
    nominal = synchronise(step, Ring(ranks, level, adding=additions), fusion)
    fitted = synchronise(step, Ring(ranks, effective), fusion)
    predicted = step.batch + fitted.overhead
    return {
        "kind": "measured", "ranks": ranks, "nominal_mb_per_s": level / 1e6, "effective_mb_per_s": effective / 1e6,
        "used": effective / level, "step_s": took, "alone_s": step.batch, "scaling_measured": step.batch / took,
        "scaling_nominal": nominal.scaling, "scaling_effective": fitted.scaling, "predicted_s": predicted,
        "error": predicted / took - 1,
    }  # fmt: skip


def simulated(ranks: tuple[int, ...], rates: tuple[float, ...]) -> list[Row]:
    """f of each model, number of ranks and Gbit/s, on additions at 900 GB/s of memory (three vectors each)."""
    sizes = np.array([1e6, 1e9])
    additions = Adding(sizes, 3 * sizes / 900e9)
    rows = []
    for model in network_models.SECONDS:
        step = network_models.step_of(model)
        for count in ranks:
            for rate in rates:
                ring = Ring(count, rate * GBIT, adding=additions)
                ratio = compression_for(step, ring, 0.95)
                servers = server_seconds(float(step.bytes.sum()), count, count, ring.bandwidth)
                rows.append(
                    {
                        "kind": "simulated", "model": model, "ranks": count, "gbit_per_s": rate,
                        "scaling": synchronise(step, ring).scaling, "scaling_no_overlap": scaling_alone(step, ring),
                        "scaling_at_best": scaling_at_best(step, ring),
                        "scaling_servers_no_overlap": step.batch / (step.batch + servers),
                        "scaling_latency_20us": synchronise(step, replace(ring, latency=20e-6)).scaling,
                        "compression_for_95_percent": ratio if math.isfinite(ratio) else None,
                    }
                )  # fmt: skip
    return rows


def fusion_rows() -> list[Row]:
    """f of ResNet50 on 64 ranks at 10 Gbit/s with 20 us a message, by limit and patience of the fusion."""
    step, ring = network_models.step_of("ResNet50"), Ring(64, 10 * GBIT, latency=20e-6)
    return [
        {"kind": "fusion", "limit_mb": limit, "patience_ms": patience,
         "scaling": synchronise(step, ring, Fusion(limit * MB, patience * 1e-3)).scaling}
        for limit in (1, 4, 16, 64) for patience in (0, 1, 5, 20)
    ]  # fmt: skip


def say(rows: list[Row]) -> None:
    """What a person reads."""
    for r in rows:
        if r["kind"] == "measured":
            print(
                f"{r['ranks']} ranks, link {r['nominal_mb_per_s']:>8,.0f} MB/s (reached "
                f"{r['effective_mb_per_s']:>6,.0f}, {100 * r['used']:>5.1f} %): step {r['step_s']:.3f} s, f measured "
                f"{r['scaling_measured']:.3f}, model "
                f"nominal {r['scaling_nominal']:.3f}, at the reached rate {r['scaling_effective']:.3f} "
                f"(step {100 * r['error']:+.1f} %)"
            )
        elif r["kind"] == "simulated":
            needs = r["compression_for_95_percent"]
            print(
                f"{r['model']:<9} {r['ranks']:>5} ranks, {r['gbit_per_s']:>4g} Gbit/s: f {r['scaling']:.3f} (no "
                f"overlap {r['scaling_no_overlap']:.3f}, at best {r['scaling_at_best']:.3f}, with 20 us a message "
                f"{r['scaling_latency_20us']:.3f}); 0.95 needs "
                + ("more than compression" if needs is None else f"a compression of {needs:.3g}")
            )
        else:
            print(f"fusion {r['limit_mb']:>3} MB, {r['patience_ms']:>3} ms: f {r['scaling']:.3f}")


def main() -> None:
    """Measure, simulate, print."""
    arguments = benchmark_parser(__doc__, "2 ranks, 3 levels, 3 steps")
    asked = arguments.parse_args()
    rows = list[Row]()
    for ranks in (2,) if asked.quick else (2, 4):
        levels = LEVELS[1::2] if asked.quick else LEVELS
        rows += measured(ranks, levels, 3 if asked.quick else 9)
    rows += simulated((8, 64) if asked.quick else (8, 64, 1024), (1, 10, 25, 100))
    rows += fusion_rows()
    say(rows)
    write_rows(asked.json, rows)


if __name__ == "__main__":
    main()
