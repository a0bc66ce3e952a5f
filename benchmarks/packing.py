"""Pack and balance real lengths as TRL, verl, nanochat and this package do it.

    python benchmarks/packing.py [--quick] [--json PATH] [--gsm8k ../shared/data/gsm8k]

Lengths: tokens (BPE, trained on a sample) of the code and Markdown files of the Python that runs this, and of GSM8K's
questions with their answers where the files are there. A document longer than all ranks hold is cut into pieces first.
The methods are written anew here, from the documentation and source of their projects:

- trl bfd: sequences truncated to a row, rows filled by best-fit decreasing and padded, dealt to the ranks in turn.
- trl wrapped: all tokens in one stream that is cut into rows, whose attention crosses the sequences.
- nanochat: each rank fills rows with the largest document that fits, out of 1,000, and crops the shortest for the rest.
- verl tokens, workload: truncated sequences to ranks in equal number, by Karmarkar-Karp on tokens or on
  24,576 n + n^2; those of a rank to as few micro-batches as its tokens need, likewise. Nothing checks their size.
- tilth none, tokens, cost: ``plan.schedule``. longest: ``packing.balance``; differencing: Karmarkar-Karp on the cost.
  Both are without gangs.

Columns: padding (room left in rows, which attention without padding does not compute) and cropped tokens, each over all
tokens; broken: sequences that lose their end or are cut apart; above: micro-batches beyond the limit of tokens; spread:
the largest load of a rank over the mean, less 1, by tokens, squares, and seconds of a model fitted on this machine; ms:
processor time of planning one batch. Where rows do not divide over the ranks, trl's last ones wait for the next batch.
"""

import heapq
import itertools
import json
import sys
import sysconfig
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driver import benchmark_parser, write_rows
from machine import config_of, random_model

from tilth.data.tokenizer import Tokenizer
from tilth.models.attention import PackedContext
from tilth.plan.cost_fit import error, fit
from tilth.plan.packing import balance, micro_batches
from tilth.plan.schedule import schedule

CAPACITY, RANKS = 8192, 8
"""Tokens of a row or micro-batch, and ranks."""
BATCH = 8 * RANKS * CAPACITY
"""Tokens of a global batch, about."""
VOCABULARY = 4096
BUFFER = 1000
"""Documents among which nanochat looks for one that fits."""
SEED = 0
Costs = Callable[[np.ndarray], np.ndarray]


@dataclass
class Packed:
    """Micro-batches of each rank: pieces as (length, share of their cost that this rank has)."""

    ranks: list[list[list[tuple[int, float]]]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    sequences: int = 0
    padding: int = 0
    cropped: int = 0
    broken: int = 0
    waiting: int = 0
    """Tokens left for the next batch."""
    counted: float = 1.0
    """Share of the rows planned that are of this batch."""

    def deal(self, packs: list[list[int]]) -> "Packed":
        """Give rows, in random order, to the ranks in turn, the same number to each."""
        order = np.random.default_rng(SEED).permutation(len(packs))
        full = len(packs) // RANKS * RANKS
        for at, pack in enumerate(order[:full]):
            self.ranks[at % RANKS].append([(n, 1.0) for n in packs[pack]])
        self.padding = sum(CAPACITY - sum(packs[pack]) for pack in order[:full])
        self.waiting += sum(sum(packs[pack]) for pack in order[full:])
        return self

    def loads(self, costs: Costs) -> np.ndarray:
        """Return the cost of each rank."""
        pieces = [np.array([p for micro in rank for p in micro]).reshape(-1, 2) for rank in self.ranks]
        return np.array([float((costs(p[:, 0]) * p[:, 1]).sum()) for p in pieces])

    def above(self) -> int:
        """Count micro-batches of too many tokens."""
        sizes = [sum(n * share for n, share in micro) for rank in self.ranks for micro in rank]
        return sum(size > CAPACITY + 1 for size in sizes)


def truncated(lengths: np.ndarray) -> tuple[np.ndarray, Packed]:
    """Cut sequences to one row, and count what is lost."""
    kept = np.minimum(lengths, CAPACITY)
    lost = lengths - kept
    return kept, Packed(sequences=len(lengths), cropped=int(lost.sum()), broken=int((lost > 0).sum()))


def trl_bfd(lengths: np.ndarray) -> Packed:
    """Truncate, and fill rows by best-fit decreasing."""
    kept, packed = truncated(lengths)
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for n in sorted(kept.tolist(), reverse=True):
        fits = [pair for pair in room if pair[0] >= n]
        left, row = min(fits, default=(CAPACITY, len(rows)))
        if fits:
            room.remove((left, row))
        else:
            rows.append([])
        rows[row].append(n)
        room.append((left - n, row))
    return packed.deal(rows)


def trl_wrapped(lengths: np.ndarray) -> Packed:
    """Cut the stream of all tokens into rows."""
    total, ends = int(lengths.sum()), np.cumsum(lengths)
    full = total // CAPACITY
    packed = Packed(sequences=len(lengths), waiting=total - full * CAPACITY)
    packed.broken = int(((ends - 1) // CAPACITY != (ends - lengths) // CAPACITY).sum())
    return packed.deal([[CAPACITY]] * full)


def nanochat(lengths: np.ndarray) -> Packed:
    """Fill rows with the largest document that fits, and crop the shortest one for the rest; documents come again.

    Documents longer than a row wait until they fill the buffer: where there are any, rows count after ``BUFFER``.
    """
    number, before = int(lengths.sum()) // (RANKS * CAPACITY), BUFFER * bool(lengths.max() > CAPACITY)
    packed = Packed(counted=number / (before + number))
    for rank in range(RANKS):
        coming = itertools.cycle(lengths[rank::RANKS].tolist())
        near = [next(coming) for _ in range(BUFFER)]
        for at in range(before + number):
            room, row = CAPACITY, list[tuple[int, float]]()
            while room:
                found = max((n for n in near if n <= room), default=0) or min(near)
                near[near.index(found)] = next(coming)
                packed.sequences += at >= before
                packed.cropped += max(found - room, 0) * (at >= before)
                packed.broken += found > room and at >= before
                row.append((min(found, room), 1.0))
                room -= min(found, room)
            if at >= before:
                packed.ranks[rank].append(row)
    return packed


def karmarkar_karp(values: list[float], parts: int, equal: bool) -> list[list[int]]:
    """Divide by largest differencing; equal: into parts of one size."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    groups = [order[i : i + parts] for i in range(0, len(order), parts)] if equal else [[i] for i in order]
    heap = []
    for number, group in enumerate(groups):
        sets = [(values[i], [i]) for i in group] + [(0.0, list[int]())] * (parts - len(group))
        heap.append((sets[-1][0] - sets[0][0], number, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        sets = [(a + b, x + y) for (a, x), (b, y) in zip(one, other[::-1])]
        sets.sort(key=lambda pair: -pair[0])
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], number, sets))
    return [rows for _, rows in heap[0][2]]


def verl(lengths: np.ndarray, work: Costs) -> Packed:
    """Divide over ranks in equal number, then over as few micro-batches as the fullest rank needs."""
    kept, packed = truncated(lengths)
    ranks = [kept[rows] for rows in karmarkar_karp(work(kept).tolist(), RANKS, True)]
    number = max(-(-int(own.sum()) // CAPACITY) for own in ranks)
    for rank, own in enumerate(ranks):
        found = karmarkar_karp(work(own).tolist(), min(number, len(own)), False)
        packed.ranks[rank] = [[(int(own[i]), 1.0) for i in rows] for rows in found]
    return packed


def tilth(lengths: np.ndarray, costs: Costs, how: Any) -> Packed:
    """Schedule with gangs for long sequences."""
    packed = Packed(sequences=len(lengths))
    for unit in (unit for units in schedule(lengths, CAPACITY, RANKS, costs, balance=how) for unit in units):
        for rank in unit.ranks:
            packed.ranks[rank].append([(int(lengths[row]), 1 / len(unit.ranks)) for row in unit.rows])
    return packed


def balanced(lengths: np.ndarray, parts: Iterable[Any]) -> Packed:
    """Give the rows of each part to a rank, then pack them; a long sequence is alone, above the limit."""
    packed = Packed(sequences=len(lengths))
    for rank, rows in enumerate(parts):
        own = lengths[rows]
        packed.ranks[rank] = [[(int(n), 1.0) for n in own[found]] for found in micro_batches(own, CAPACITY)]
    return packed


def methods(costs: Costs) -> dict[str, Callable[[np.ndarray], Packed]]:
    """Return each method by its name."""
    return {
        "trl bfd": trl_bfd,
        "trl wrapped": trl_wrapped,
        "nanochat": nanochat,
        "verl tokens": lambda n: verl(n, lambda m: m.astype(np.float64)),
        "verl workload": lambda n: verl(n, lambda m: 24_576.0 * m + m.astype(np.float64) ** 2),
        "longest": lambda n: balanced(n, balance(costs(n), RANKS)),
        "differencing": lambda n: balanced(n, karmarkar_karp(costs(n).tolist(), RANKS, False)),
        "tilth none": lambda n: tilth(n, costs, "none"),
        "tilth tokens": lambda n: tilth(n, costs, "tokens"),
        "tilth cost": lambda n: tilth(n, costs, "cost"),
    }


def files(most: int) -> list[str]:
    """Return texts of code and Markdown of this Python's libraries, in random order, up to ``most`` characters."""
    folders = {sysconfig.get_paths()["stdlib"], *(p for p in sys.path if Path(p).name == "site-packages")}
    found = sorted({file for folder in folders for end in ("py", "md") for file in Path(folder).rglob(f"*.{end}")})
    texts, size = list[str](), 0
    for at in np.random.default_rng(SEED).permutation(len(found)):
        text = found[at].read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        texts += [text] if text else []
        if size > most:
            break
    return texts


def gsm8k(folder: Path) -> list[str]:
    """Return questions with their answers."""
    file = folder / "train.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]


def measured(texts: list[str]) -> np.ndarray:
    """Return tokens of each text and its end; a text beyond all ranks is several pieces."""
    tokenizer = Tokenizer.train(texts[: max(len(texts) // 8, 1)], VOCABULARY)
    pieces = []
    for ids in tokenizer.encode_all(texts):
        whole, rest = divmod(len(ids) + 1, CAPACITY * RANKS)
        pieces += [CAPACITY * RANKS] * whole + [rest] * (rest > 0)
    return np.array(pieces, np.int64)


def fitted(longest: int, times: int) -> tuple[Costs, dict[str, Any]]:
    """Fit the seconds of training on one sequence of a small decoder; return them, and a row about the fit."""
    model = random_model(config_of("6M"), torch.float32, "cpu")
    sizes = np.array([n for n in (32, 64, 128, 256, 512, 1024, 2048) if n <= longest])
    seconds = []
    for n in np.repeat(sizes, times):
        ids, begin = torch.zeros(int(n), dtype=torch.int64), time.process_time()
        model(ids, PackedContext([int(n)])).square().mean().backward()
        seconds.append(time.process_time() - begin)
    amounts = np.repeat(sizes, times).astype(np.float64)
    features = np.stack([amounts, amounts**2, np.ones(len(amounts))], 1)
    found = fit(features, np.array(seconds))
    wrong = error(features, np.array(seconds), found)
    token, square, fixed = found.tolist()
    about = {"table": "model", "per_token": token, "per_square": square, "fixed": fixed, "median_error": wrong.median}
    return lambda n: token * n + square * np.asarray(n, np.float64) ** 2, about


def global_batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Cut lengths in random order into batches, each of a multiple of ``RANKS`` sequences, as verl needs."""
    every = np.random.default_rng(SEED).permutation(lengths)
    cuts = np.searchsorted(np.cumsum(every), np.arange(BATCH, int(every.sum()) + 1, BATCH)) // RANKS * RANKS
    return [batch for batch in np.split(every, cuts)[:-1] if len(batch)]


def spread(loads: list[np.ndarray]) -> float:
    """Return the largest load of a rank over the mean, less 1, on average over batches."""
    return float(np.mean([load.max() / load.mean() - 1 for load in loads]))


def compare(data: str, batches: list[np.ndarray], costs: Costs) -> Iterator[dict[str, Any]]:
    """Yield a row for each method: means over global batches."""
    measures: dict[str, Costs] = {
        "tokens": lambda n: n, "squares": lambda n: np.asarray(n, np.float64) ** 2, "seconds": costs
    }  # fmt: skip
    for name, pack in methods(costs).items():
        begin = time.process_time()
        found = [pack(batch) for batch in batches]
        took = time.process_time() - begin
        tokens = sum(p.loads(lambda n: n).sum() + p.cropped + p.waiting for p in found)
        loads = {kind: [p.loads(cost) for p in found] for kind, cost in measures.items()}
        yield {
            "table": "packing", "data": data, "method": name, "batches": len(batches),
            "sequences": sum(map(len, batches)), "tokens": int(tokens), "longest": int(max(map(max, batches))),
            "padding": sum(p.padding for p in found) / tokens, "cropped": sum(p.cropped for p in found) / tokens,
            "broken": sum(p.broken for p in found) / sum(p.sequences for p in found),
            "above": sum(p.above() for p in found),
            **{f"spread_{kind}": spread(each) for kind, each in loads.items()},
            "planning_ms": 1000 * took * found[0].counted / len(batches),
        }  # fmt: skip


def rows_of(chosen: Namespace) -> Iterator[dict[str, Any]]:
    """Yield all rows."""
    torch.set_num_threads(1)
    costs, about = fitted(512 if chosen.quick else 2048, 2 if chosen.quick else 3)
    yield about
    most, count = (1 << 21, 1) if chosen.quick else (1 << 23, 8)
    sources = {"files": files(most), "gsm8k": gsm8k(chosen.gsm8k)[: most >> 9]}
    for data, texts in sources.items():
        batches = global_batches(measured(texts)) if texts else []
        if batches:
            yield from compare(data, batches[:count], costs)
        else:
            print(f"{data}: fewer tokens than a batch of {BATCH:,}, left out")


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    if row["table"] == "model":
        return (
            f"seconds of {row['per_token']:.2e} n + {row['per_square']:.2e} n^2, median error {row['median_error']:.1%}"
        )
    spreads = "  ".join(f"{row[f'spread_{kind}']:7.1%}" for kind in ("tokens", "squares", "seconds"))
    return (
        f"{row['data']:<9}{row['method']:<14} padding {row['padding']:6.1%}  cropped {row['cropped']:6.1%}  "
        f"broken {row['broken']:6.1%}  above {row['above']:3}  spread {spreads}  {row['planning_ms']:7.1f} ms"
    )


def main() -> None:
    """Print and write the rows."""
    parser = benchmark_parser(__doc__, "one batch of each kind of text")
    shared = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
    parser.add_argument("--gsm8k", type=Path, default=shared, metavar="FOLDER", help="its train.jsonl")
    chosen, rows = parser.parse_args(), list[dict[str, Any]]()
    for row in rows_of(chosen):
        rows.append(row)
        print(shown(row), flush=True)
        write_rows(chosen.json, rows)


if __name__ == "__main__":
    main()
