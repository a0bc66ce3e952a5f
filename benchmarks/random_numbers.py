"""Million random numbers per second, beside torch's own generator; the statistics of the output are checked first.

    python benchmarks/random_numbers.py [--quick] [--json PATH] [--threads N]

Torch's generator is sequential: it uses one thread whatever it is given, and a shard cannot get its part of the stream
without making the rest. Both columns are the best of several runs in the same process.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
from driver import benchmark_parser, write_rows
from torch import Tensor
from work import same_work

from tilth.core.random import dropout_mask, fill_normal_, stream, uniform_rows

WIDTH = 256


def check(values: int) -> None:
    """Stop unless the values are distributed as they should be and a slice has the bits of the whole."""
    source = stream(0, "benchmark")
    for name, distribution in (("uniform", lambda x: x), ("normal", torch.special.ndtr)):
        made = getattr(source, name)(0, values)
        assert torch.equal(made[7:-3], getattr(source, name)(7, values - 10)), f"{name}: a slice differs"
        ordered = distribution(made.double().sort().values)
        grid = torch.arange(1, values + 1, dtype=torch.float64) / values
        statistic = float((ordered - grid).abs().max()) * math.sqrt(values)
        assert statistic < 1.95, f"{name}: Kolmogorov-Smirnov statistic {statistic:.2f}, expected below 1.95"
        pairs = torch.corrcoef(made.view(-1, 2).T)[0, 1] * math.sqrt(values / 2)
        assert abs(float(pairs)) < 4, f"{name}: neighbours correlate ({float(pairs):.2f} standard errors)"
    order = source.permutation(values)
    assert torch.equal(order.sort().values, torch.arange(values)), "permutation: a number is missing"


def cases(n: int) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Name -> (ours, torch's)."""
    source, out, tokens, ids = stream(0, "benchmark"), torch.empty(n), torch.arange(n // WIDTH), torch.arange(512)
    mask = torch.empty(n // WIDTH, WIDTH, dtype=torch.bool)
    return {
        "uniform": (lambda: source.uniform(0, n), lambda: torch.rand(n)),
        "normal": (lambda: fill_normal_(out, source, 0.02), lambda: out.normal_(0, 0.02)),
        "dropout": (lambda: dropout_mask(source, tokens, WIDTH, 0.1), lambda: mask.bernoulli_(0.9)),
        "permutation": (lambda: source.permutation(n // 8), lambda: torch.randperm(n // 8)),
        "512 streams x 8": (lambda: uniform_rows(0, ids, 8, 8), lambda: torch.rand(512, 8)),
    }


def best_seconds(calls: Sequence[Callable[[], Tensor]], rounds: int) -> list[float]:
    """The shortest time of each, measured in turns so that a busy machine treats them alike."""
    best = [math.inf] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    parser = benchmark_parser(__doc__, "fewer values and rounds")
    parser.add_argument("--threads", type=int, default=min(2, torch.get_num_threads()))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    check(100_000 if options.quick else 1_000_000)
    rows = []
    print(f"{'':16} {'tilth M/s':>10} {'torch M/s':>10} {'ratio':>6}   ({options.threads} threads)")
    for name, (ours, theirs) in cases(1 << (20 if options.quick else 22)).items():
        values = ours().numel()
        same_work({"tilth": {"values": values}, "torch": {"values": theirs().numel()}})
        tilth, torch_ = (values / s / 1e6 for s in best_seconds([ours, theirs], 8 if options.quick else 40))
        print(f"{name:16} {tilth:10.1f} {torch_:10.1f} {tilth / torch_:6.2f}")
        rows.append(
            {
                "name": name,
                "values": values,
                "threads": options.threads,
                "tilth_million_values_per_second": tilth,
                "torch_million_values_per_second": torch_,
                "ratio": tilth / torch_,
            }
        )
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
