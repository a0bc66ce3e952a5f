"""Commands of the group ``guard`` and their options; each body is a module of its own."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tilth.cli.arguments import JsonOption, OverridesArgument, RecipeArgument, RunArgument, SeedOption
from tilth.cli.declare import command, group

guard = group("guard", "Find who stopped, slowed or falsified a job.")


@command("guard_inject:drill", guard, "inject")
def guard_inject(
    run: RunArgument,
    kind: Annotated[str, Argument(metavar="KIND", help="kill, stop, busy, gil, block, slow, nan, flip ...: see below")],
    rank: Annotated[int, Option(help="worker that it happens to")] = 0,
    after: Annotated[float, Option(min=0.0, help="seconds to wait before")] = 0.0,
    at: Annotated[str, Option(metavar="MOMENT", help="begin of an operation or a call: optimizer, policy.update")] = "",
    as_json: JsonOption = False,
) -> None:
    """Let a fault happen to a worker of one's own active run on this machine, as a drill.

    kill, stop: signals. busy, gil, block: its thread loops, holds the GIL, or reads, for ever. pause: it sleeps 4 s.
    slow: its forward passes take longer from then on. exception. collective: one that no other rank calls. nan, flip:
    in one weight. nan-gradient, flip-gradient: in one gradient (--at optimizer). disk-full: its writes fail from then
    on. files: it can open no more. oom: an allocation too large for any machine. clock: an hour ahead. Keys of --json:
    kind, rank, pid, time.
    """


@command("guard_update:update", guard, "update")
def guard_update(
    run: RunArgument,
    overrides: OverridesArgument = None,
    plugin: Annotated[
        list[str] | None,
        Option("--plugin", metavar="FILE.py", help="your code: takes the place of the plugin of this name; repeatable"),
    ] = None,
    now: Annotated[bool, Option("--now", help="after the step that runs, not at the next restart")] = False,
    as_json: JsonOption = False,
) -> None:
    """Update keys or code of an active run: another controller goes on with them, from the state in memory.

    As in: tilth guard update runs/addition-grpo-001 optimizer.lr=1e-4 --now. Without keys and plugins, the code of
    Tilth is imported again, after a checkpoint. At the next restart, in 24 hours at the latest. An update that fails
    before its first commit is undone. Keys of --json: number, changes (key -> message), urgent.
    """


@command("guard_check:check", guard, "check")
def guard_check(as_json: JsonOption = False) -> None:
    """Test this machine for two seconds: bits of products, compute and memory rates, transfers over loopback.

    Exit code 1 if products of equal matrices differ or bytes do not arrive; rates are only told, and a busy machine has
    lower ones. Keys of --json: sound, compute (GFLOP/s of a thread), memory, loopback (GB/s), unequal (products),
    failed (pairs), odd_peers (that failed in both pairings), seconds.
    """


@command("guard:locate", guard, "locate")
def guard_locate(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="dumps, one file a rank, named ...RANK")],
    as_json: JsonOption = False,
) -> None:
    """Name the ranks that hold up a hung job, by the dumps of PyTorch's flight recorder.

    NCCL writes them at a timeout (TORCH_FR_DUMP_TEMP_FILE). Nothing in them is executed. Keys of --json: dumps, silent
    (members of groups without a dump), verdict (kind, ranks, evidence, details; null: nobody waits).
    """


@command("guard_replay:replay", guard, "replay")
def guard_replay(
    run: RunArgument,
    step: Annotated[int, Option(min=1, help="step to replay")],
    ranks: Annotated[str, Option(help="workers to replay on, as 0,1,3; default: all")] = "",
    as_json: JsonOption = False,
) -> None:
    """Replay a step of a stored run on groups of its workers: did a device or the data make what was wrong?

    From the newest checkpoint before the step, on this machine, in a copy of the run's folder; every worker twice, in
    two groupings, and all of them once in the run's own layout. Keys of --json: step, checkpoint, ranks, verdict (kind,
    ranks, evidence, details; null: nothing is wrong), recorded (the run's metrics came back), outcomes (of each group:
    bits, finite, about).
    """


MEASURED = Option("--measured", metavar="FILE", help="JSON of benchmarks/faults.py, for detect, hangs and restart")
TRACE = Option("--trace", metavar="FILE", help="faults of nodes, in InfiniteHBD's JSON")


@command("studies.guard_simulate:simulate", guard, "simulate")
def guard_simulate(
    name: RecipeArgument,
    trace: Annotated[Path, TRACE],
    overrides: OverridesArgument = None,
    trace_nodes: Annotated[int, Option(min=1, help="nodes of the trace, with those that never failed")] = 400,
    nodes: Annotated[int | None, Option(min=1, help="nodes of the job; default: those of the trace")] = None,
    step: Annotated[float, Option(min=0.001, help="seconds of a step")] = 10.0,
    detect: Annotated[float, Option(min=0.0, help="seconds until a crash is seen")] = 1.0,
    hangs: Annotated[float, Option(min=0.0, max=0.95, help="share of failures that guard.hang_after must see")] = 0.1,
    restart: Annotated[float, Option(min=0.0, help="seconds from there to the next new step")] = 10.0,
    spares: Annotated[int | None, Option(min=0, help="warm spares; default: enough for 99 % of days")] = None,
    wake: Annotated[float, Option(min=0.0, help="seconds until a spare stands in")] = 5.0,
    cold: Annotated[float, Option(min=0.0, help="seconds to start another node; inf: repaired ones only")] = 600.0,
    measurements: Annotated[Path | None, MEASURED] = None,
    without: Annotated[str, Option(help="where there is no node: wait, or shrink")] = "wait",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate the effective training time (ETTR) of a recipe under a trace of faults.

    Beside its own settings (run.save_every, guard.hang_after): other intervals of checkpoints, spares and detection
    times, and each mechanism switched off. The seconds of the options are assumptions; --measured replaces those of
    detection and restart by medians of ranks that were killed and stopped.
    Keys of --json: nodes, days, incidents, probability (of a fault of a node in a day), standby (spares for 99 % of
    days), policy, rows (about, ettr, worst_hour, from_disk, stops, lost: cause -> seconds).
    """
