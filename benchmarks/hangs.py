"""Who hangs a job: culprits by the flight recorders of real gloo processes, ours beside PyTorch's ``fr_trace``.

    python benchmarks/hangs.py [--quick] [--json PATH] [--cases N] [--seed N]

Each case is a job of 2 to 16 processes on a mesh of dp, pp and tp that repeats a few collectives, and one fault on one
or two ranks: stopped by a signal, killed, asleep, holding the GIL, a call left out, another shape. When all is still,
each process is asked for its recorder; what gives no answer in DEADLINE is silent. ``tilth`` gets the dumps and what
each main thread does, ``recorder alone`` only the dumps. ``fr_trace`` gets the same dumps as files, with the ranks of
each group filled in, which gloo leaves empty: all ranks that it names, and those of its first finding. Precision and
recall count ranks.
"""

import contextlib
import itertools
import json
import logging
import multiprocessing
import pickle
import random
import re
import resource
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from driver import benchmark_parser, write_rows
from hang_rank import work

from tilth.guard.flight_recorder import decode, parse
from tilth.guard.localise import localise

KINDS = ("stop", "kill", "sleep", "gil", "missing", "shape")
MESHES = [
    {"dp": dp, "pp": pp, "tp": tp}
    for dp, pp, tp in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 4))
    if 2 <= dp * pp * tp <= 16
]
CALLS = [
    ("tp", "all_reduce"), ("tp", "all_gather"), ("pp", "pass"), ("pp", "broadcast"), ("dp", "all_reduce"),
    ("dp", "all_gather"),
]  # fmt: skip
STEPS = 8
STILL, DEADLINE, LIMIT = 1.0, 4.0, 60.0
"""Seconds without progress, for a dump, and for a case."""
SIDE_BY_SIDE = 4
"""Cases at a time, which mostly wait."""
NUMBERS = re.compile(r"missing ranks: (\{[^}]*\})|Culprit rank (\d+)|FR dumps from ranks \((\{[^}]*\})\)")


@dataclass(frozen=True)
class Case:
    """One job. program: (axis, operation, elements) of a step; faults: rank -> kind and number of the call."""

    number: int
    sizes: dict[str, int]
    program: list[tuple[str, str, int]]
    faults: dict[int, tuple[str, int]]

    @property
    def world(self) -> int:
        return self.sizes["dp"] * self.sizes["pp"] * self.sizes["tp"]


def make_case(number: int, seed: int) -> Case:
    """Draw mesh, program and faults; the kind goes round."""
    rng = random.Random(f"{seed}-{number}")
    kind = KINDS[number % len(KINDS)]
    sizes = rng.choice(MESHES)
    wide = [call for call in CALLS if sizes[call[0]] > 1]
    drawn = rng.sample(wide, rng.randint(1, len(wide))) + rng.sample(wide, rng.randint(0, len(wide)))
    program = [(axis, op, rng.choice((2, 4, 8))) for axis, op in drawn]
    if all(op == "pass" for _, op, _ in program):
        program.append((*rng.choice([call for call in wide if call[1] != "pass"]), 4))
    program.append(("world", "all_reduce", 1))
    several = kind not in ("missing", "shape") and rng.random() < 0.3
    world = sizes["dp"] * sizes["pp"] * sizes["tp"]
    ranks = rng.sample(range(world), 2 if several and world > 3 else 1)
    at = rng.randrange(3 * len(program), (STEPS - 1) * len(program))
    while kind in ("missing", "shape") and program[at % len(program)][1] in ("pass", "broadcast"):
        at += 1
    return Case(number, sizes, program, {rank: (kind, at) for rank in ranks})


def run(case: Case) -> tuple[dict[int, Any], float]:
    """Return rank -> what it answered, of those that did, and the seconds until the first was asked."""
    context = multiprocessing.get_context("fork")
    counts = context.RawArray("q", case.world + 1)  # calls begun, and the port of the store
    reached = context.RawArray("b", case.world)
    pipes = [context.Pipe() for _ in range(case.world)]
    made = [
        context.Process(target=work, args=(rank, case, STEPS, counts, reached, pipes[rank][1]))
        for rank in range(case.world)
    ]
    begin = time.monotonic()
    for process in made:
        process.start()
    try:
        last, still = list(counts), time.monotonic()
        while time.monotonic() - begin < LIMIT:
            time.sleep(0.05)
            if list(counts) != last:
                last, still = list(counts), time.monotonic()
            if all(reached[rank] for rank in case.faults) and time.monotonic() - still > STILL:
                break
        answers = dict[int, Any]()
        until = time.monotonic() + DEADLINE
        for pipe, _ in pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send("dump")
        for rank, (pipe, _) in enumerate(pipes):
            with contextlib.suppress(EOFError, ConnectionError):
                alive = made[rank].is_alive()
                if alive and pipe.poll(max(0.0, until - time.monotonic())):
                    answers[rank] = pipe.recv()
        return answers, time.monotonic() - begin
    finally:
        for process in made:
            process.kill()
            process.join()
            process.close()
        for ours, theirs in pipes:
            ours.close()
            theirs.close()


def ours(answers: dict[int, Any], world: int, stacks: bool) -> tuple[str, set[int], str, float]:
    """Kind, ranks, evidence and seconds."""
    start = time.perf_counter()
    dumps = {rank: parse(answer["dump"], rank, f"rank-{rank}") for rank, answer in answers.items()}
    hosts = {rank: answer["host"] for rank, answer in answers.items()} if stacks else {}
    found = localise(dumps, [rank for rank in range(world) if rank not in dumps], hosts=hosts)
    taken = time.perf_counter() - start
    return (found.kind, set(found.ranks), found.evidence, taken) if found else ("", set(), "", taken)


def stock(answers: dict[int, Any], folder: Path) -> tuple[set[int], set[int], str, float]:
    """All ranks that ``fr_trace`` names, those of its first finding, its error, seconds."""
    from torch.distributed.flight_recorder import fr_trace

    for rank, answer in answers.items():
        value = decode(answer["raw"], f"rank-{rank}")
        value["pg_config"] = json.loads(answer["dump"])["pg_config"]
        (folder / f"dump_{rank}").write_bytes(pickle.dumps(value, 2))
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("Flight Recorder")
    log.handlers = [handler]
    start, error = time.perf_counter(), ""
    try:
        fr_trace.main([str(folder), "-p", "dump_", "--allow-incomplete-ranks"])
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - its failure is a result
        error = type(problem).__name__
    taken = time.perf_counter() - start
    found = [
        {int(number) for number in re.findall(r"\d+", next(part for part in match.groups() if part))}
        for line in lines
        for match in NUMBERS.finditer(line)
    ]
    return set().union(*found), found[0] if found else set(), error, taken


def judged(case: Case, answers: dict[int, Any], waited: float) -> list[dict[str, Any]]:
    """One row per method: the ranks it names beside the true ones."""
    with tempfile.TemporaryDirectory() as folder:
        every, first, error, taken = stock(answers, Path(folder))
    kind, ranks, evidence, seconds = ours(answers, case.world, True)
    bare = ours(answers, case.world, False)
    found = [
        ("tilth", kind, ranks, evidence, seconds), ("recorder alone", bare[0], bare[1], bare[2], bare[3]),
        ("fr_trace", "", every, error, taken), ("fr_trace, first finding", "", first, error, taken),
    ]  # fmt: skip
    fault = next(iter(case.faults.values()))[0]
    same = {"case": case.number, "ranks": case.world, "mesh": json.dumps(case.sizes), "fault": fault, "wait_s": waited}
    told = json.dumps({rank: answer["host"] for rank, answer in answers.items()})
    return [
        {**same, "method": method, "true": sorted(case.faults), "named": sorted(named), "kind": kind, "text": text,
         "localise_s": took, "hosts": told, "program": json.dumps(asdict(case)["program"])}
        for method, kind, named, text, took in found
    ]  # fmt: skip


def several(cases: list[Case], pipe: Any) -> None:
    """Run cases one after the other, in a process of its own."""
    for case in cases:
        pipe.send(judged(case, *run(case)))
    pipe.send(None)


def report(rows: list[dict[str, Any]]) -> str:
    """Precision and recall of each method, all faults and one by one."""
    sums = defaultdict[tuple[str, str], list[float]](lambda: [0.0] * 6)
    for row in rows:
        true, named = set(row["true"]), set(row["named"])
        for fault in ("all", row["fault"]):
            total = sums[row["method"], fault]
            counts = (1, len(true & named), len(named), len(true), true == named, row["localise_s"])
            sums[row["method"], fault] = [a + b for a, b in zip(total, counts)]
    lines = [
        "| method | fault | cases | precision | recall | exactly right | ms a case |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for (method, fault), (cases, hits, count, faulty, exact, seconds) in sorted(sums.items()):
        cells = (
            f"{cases:.0f}",
            f"{hits / count:.3f}" if count else "none named",
            f"{hits / faulty:.3f}",
            f"{exact:.0f}",
        )
        lines.append(f"| {' | '.join((method, fault, *cells, f'{1e3 * seconds / cases:.1f}'))} |")
    return "\n".join(lines)


def main() -> None:
    parser = benchmark_parser(__doc__, "12 cases")
    parser.add_argument("--cases", type=int, default=216)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    number = 12 if options.quick else options.cases
    cases = [make_case(i, options.seed) for i in range(number)]
    context, rows = multiprocessing.get_context("fork"), list[dict[str, Any]]()
    pipes, shards = list[Connection](), []
    for i in range(SIDE_BY_SIDE):
        mine, theirs = context.Pipe(duplex=False)
        shards.append(context.Process(target=several, args=(cases[i::SIDE_BY_SIDE], theirs)))
        shards[-1].start()
        theirs.close()
        pipes.append(mine)
    waiting = list(pipes)
    while waiting:
        for pipe in (pipe for pipe in wait(waiting) if isinstance(pipe, Connection)):
            try:
                found = pipe.recv()
            except EOFError as error:
                raise SystemExit("a process of this benchmark died") from error
            if found is None:
                waiting.remove(pipe)
                continue
            rows += found
            write_rows(options.json, rows)
    for shard in shards:
        shard.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(report(rows))
    print(f"{len(cases)} cases, {used.ru_utime + used.ru_stime:.0f} s of processor time")


if __name__ == "__main__":
    main()
