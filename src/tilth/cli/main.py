"""``tilth``: the commands and their options. Each body lives in a module of its own, imported when it is called."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tilth.cli import completion, version
from tilth.cli.arguments import (
    AnyArgument,
    AttemptOption,
    CheckpointArgument,
    ModelArgument,
    OverridesArgument,
    RecipeArgument,
    RunArgument,
    StepsOption,
    WhereArgument,
)
from tilth.cli.groups import Commands, RunFirst
from tilth.cli.ls import ls
from tilth.core.errors import DataError

app = typer.Typer(
    cls=Commands,
    callback=version.options,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TEMPLATE: Any = typer.Option(
    help="how a text becomes a prompt: model (its chat template), chatml, a Jinja file, or '' (as it stands); "
    "default: as the run did"
)


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="a key or section that may differ in the run that goes on; may be repeated",
            autocompletion=completion.keys,
        ),
    ] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="where the newest checkpoint is damaged, take the newest that is not")
    ] = False,
) -> None:
    """Train by a recipe.

    The run goes into a new folder of runs/, or on in an unfinished one of the same recipe. Keys of the recipe are
    changed on the command line, as in: tilth run addition-grpo algorithm.steps=50 run.name=short

    A run whose recipe has changed is not gone on with, unless what changed is allowed by name: --allow algorithm.steps
    """
    from tilth.cli.run import train

    train(recipe, overrides or [], allow or [], fallback=fallback)


@app.command()
def algorithms(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FLOW]... [KEY=VALUE]...", help="these only, as keys of a recipe change them; default: all"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="by plain keys, and every name there is, as JSON")] = False,
) -> None:
    """List all algorithms side by side; of two or more that are named only what differs.

    As in: tilth algorithms dapo grpo; with your own: tilth algorithms 'plugins=["mine.py"]'. Keys of --json: algorithms
    (flow -> its keys, null: there is no such thing), entries (kind -> names).
    """
    from tilth.cli.algorithms import compare

    compare(words or [], as_json=as_json)


@app.command()
def layout(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="the whole plan as one JSON object")] = False,
) -> None:
    """Show what a recipe puts where: roles, ranks, shares of the model, memory, and who talks to whom.

    Nothing is started. As in: tilth layout addition-grpo cluster.backend=local cluster.workers=4
    """
    from tilth.cli.layout import show

    show(recipe, overrides or [], as_json=as_json)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="text to continue")],
    n: Annotated[int, typer.Option("--n", min=1, help="number of completions")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="softmax temperature; 0: greedy")] = 1.0,
    top_p: Annotated[float, typer.Option(help="keep the smallest set of tokens with this mass")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="keep the k likeliest tokens; 0: all")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest completion in tokens; default: 64, or what the context leaves")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="text that ends a completion; may be repeated; default: the run's")
    ] = None,
    template: Annotated[str | None, TEMPLATE] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of sampling")] = 0,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="show each token with its log-prob")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a completion")] = False,
) -> None:
    """Continue a text by a trained model."""
    from tilth.cli.generate import GenerateOptions, speak

    wish = GenerateOptions(n, temperature, top_p, top_k, max_tokens, tuple(stop or ()), seed, template)
    speak(model, prompt, wish, logprobs=logprobs, as_json=as_json)


@app.command()
def chat(
    model: ModelArgument,
    system: Annotated[str, typer.Option(help="what the model is told before the first turn")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, help="softmax temperature; 0: greedy")] = 0.7,
    top_p: Annotated[float, typer.Option(help="keep the smallest set of tokens with this mass")] = 1.0,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="longest answer in tokens, if the context leaves as many")
    ] = 512,
    template: Annotated[str | None, TEMPLATE] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of sampling")] = 0,
) -> None:
    """Talk with a model.

    Each line is a turn. /reset begins anew, /quit or Ctrl-D ends, Ctrl-C ends the current answer only. Lines may also
    come from a pipe.
    """
    from tilth.cli.chat import ChatOptions, talk

    talk(ChatOptions(model, system, temperature, top_p, max_tokens, template, seed))


@app.command("eval")
def evaluate(
    model: ModelArgument,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="a task or files, as data.source; default: what the run held out")
    ] = "",
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="FILE.py:function or a verifier; may be repeated for their sum; default: the run's or the task's"
        ),
    ] = None,
    k: Annotated[str, typer.Option("--k", help="pass@k and avg@k for these, as in 1,8")] = "1",
    n: Annotated[int, typer.Option("--n", min=0, help="samples of each prompt; 0: the greatest k")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="softmax temperature; default: 0 (greedy) for one sample, else 1")
    ] = None,
    top_p: Annotated[float, typer.Option(help="keep the smallest set of tokens with this mass")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="keep the k likeliest tokens; 0: all")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest completion in tokens; default: the run's, or 512")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="text that ends a completion; default: the run's")] = None,
    template: Annotated[str | None, TEMPLATE] = None,
    columns: Annotated[list[str] | None, typer.Option(help="which column is which, as in prompt=question")] = None,
    limit: Annotated[int, typer.Option(min=0, help="that many of the prompts, always the same; 0: all")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="seed of sampling and of the intervals")] = 0,
    max_rows: Annotated[int, typer.Option(min=1, help="most sequences decoded at once")] = 256,
    workers: Annotated[int, typer.Option(min=1, help="processes that score")] = 1,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="seconds one reward may take; default: the run's, or 10")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="keep every completion: FILE.jsonl or FILE.parquet")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="all numbers as one JSON object")] = False,
) -> None:
    """Say how good a model is at a dataset: pass@k, avg@k, how sure that is."""
    from tilth.cli.eval import EvalOptions, judge

    wish = EvalOptions(
        model, data, tuple(reward or ()), k, n, temperature, top_p, top_k, max_tokens, tuple(stop or ()), template,
        tuple(columns or ()), limit, seed, max_rows, workers, timeout, out, as_json,
    )  # fmt: skip
    judge(wish)


@app.command()
def export(model: ModelArgument, out: Annotated[str, typer.Argument(metavar="OUT", help="a new directory")]) -> None:
    """Write a model for transformers and vLLM; tilth ckpt export has more to choose."""
    from tilth.cli.export import write_model

    write_model(model, out)


@app.command()
def report(run: RunArgument) -> None:
    """Write report.html of a run, also while it goes on."""
    from tilth.cli.show import write

    write(run)


@app.command()
def show(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="all numbers as one JSON object")] = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="PATH", help="write the metrics of all steps there, with units, and no more")
    ] = None,
) -> None:
    """Say how a run stands, also while it goes on."""
    from tilth.cli.show import show_run, write_table

    if parquet is not None:
        write_table(run, parquet)
    else:
        show_run(run, as_json=as_json)


app.command()(ls)


reward = typer.Typer(help="Look at reward functions.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(reward, name="reward")


@reward.command(name="try")
def reward_try(
    function: Annotated[
        str,
        typer.Argument(
            metavar="REWARD",
            help="FILE.py:function, module:function, a verifier (addition, countdown, gsm8k, exact, regex:PATTERN), "
            "or several with weights, as in '{gsm8k = 1.0, \"regex:####\" = 0.1}'",
        ),
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="files as for data.source, or a task")],
    columns: Annotated[
        list[str] | None, typer.Option(metavar="ROLE=NAME", help="which column is which: prompt=question; repeatable")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="number of records, spread evenly")] = 20,
    completion: Annotated[str | None, typer.Option(help="a completion of your own to score for each record")] = None,
    digits: Annotated[int, typer.Option(min=1, max=9, help="digits of the numbers of a task")] = 3,
    timeout: Annotated[float, typer.Option(min=0.001, help="seconds one call may take")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="all findings as one JSON object")] = False,
) -> None:
    """Score right, wrong and empty answers of some records, before a run is spent on a reward that cannot tell them.

    The answer of each record, another record's, and an empty one are scored in a process with a time limit, as in a
    run. Says what they earn, what fails and why, and how long it takes. Exit code 1: the verdict is "broken".
    """
    from tilth.cli.reward import RewardOptions, columns_of, try_reward

    wish = RewardOptions(columns_of(columns or []), n, completion, timeout, digits)
    try_reward(function, data, wish, as_json=as_json)


data = typer.Typer(help="Look at data.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")


@data.command(name="show")
def data_show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    n: Annotated[int, typer.Option("--n", min=0, help="number of examples, spread evenly")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="all findings and examples as one JSON object")] = False,
) -> None:
    """Show what a model will see: tokens, loss mask, template, lengths, what would stop the run (then exit code 1)."""
    from tilth.cli.data import show

    show(recipe, overrides or [], n, as_json=as_json)


ckpt = typer.Typer(
    help="Look at checkpoints, compare, export and remove them. Exit code 1: something is damaged or different.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(ckpt, name="ckpt")


@ckpt.command(name="ls")
def ckpt_ls(
    where: WhereArgument,
    as_json: Annotated[bool, typer.Option("--json", help="a list with an object for each")] = False,
) -> None:
    """List checkpoints: step, when saved, by which layout, tensors, bytes, state.

    States: complete, damaged (and why), unfinished (a save under way, or cut off), replaced (by one of the same step).
    Of a complete one that another run made it says so. A run goes on from the newest. Exit code 1: a run's checkpoints
    are lost or cannot be listed; in --json its state is missing and its step null. Keys of --json: run, checkpoint,
    step, state, reason, newest, best, bytes, saved, layout, tensors.
    """
    from tilth.cli.ckpt import ls

    ls(where, as_json=as_json)


@ckpt.command(name="show")
def ckpt_show(
    checkpoint: CheckpointArgument,
    tensors: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="list the tensors that are called so, as in 'model/*norm*'")
    ] = None,
    boxes: Annotated[bool, typer.Option("--boxes", help="and the boxes that each consists of")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON object")] = False,
) -> None:
    """Say what is in a checkpoint, or in a Hugging Face directory. No data is read.

    Keys of --json: path, kind, step, saved, layout, bytes, groups (group, tensors, elements, bytes, dtypes), files
    (name, group, bytes), objects, and where asked for tensors (group, name, shape, dtype, bytes, files, boxes).
    """
    from tilth.cli.ckpt_show import show

    show(checkpoint, pattern=tensors, boxes=boxes, as_json=as_json)


@ckpt.command(name="verify")
def ckpt_verify(
    where: Annotated[str, typer.Argument(metavar="WHERE", help="as for ls, or one checkpoint as for show")],
    everything: Annotated[bool, typer.Option("--all", help="all checkpoints, not the newest only")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="a list with an object for each")] = False,
) -> None:
    """Compare every byte with its checksum; names files and tensors that are damaged, and what another run made.

    Exit code 1: there are some. What a running process removes meanwhile is passed over. Keys of --json: run,
    checkpoint, step, intact, bytes, seconds, problems, own (its run made it).
    """
    from tilth.cli.ckpt import verify

    verify(where, everything=everything, as_json=as_json)


@ckpt.command(name="diff")
def ckpt_diff(
    a: Annotated[str, typer.Argument(metavar="A", help=AnyArgument)],
    b: Annotated[str, typer.Argument(metavar="B", help="likewise")],
    tolerance: Annotated[
        float | None, typer.Option(help="greatest difference of a value that is none; default: bit for bit")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON object")] = False,
) -> None:
    """Say in which tensors, values and objects two checkpoints differ; with a Hugging Face directory, in weights only.

    Exit code 1: they do. Never compared: events, the number of the attempt. Keys of --json: equal, a, b, tensors
    (group, name, kind, a, b, count, share, max_abs, max_rel, first), objects (key, a, b, there), compared, groups,
    bytes, tolerance, within (greatest difference of the tensors that do not differ by more), left_out.
    """
    from tilth.cli.ckpt_diff import diff

    diff(a, b, tolerance=tolerance, as_json=as_json)


@ckpt.command(name="export")
def ckpt_export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="RUN, RUN@best, RUN@STEP, or a checkpoint in its run's folder")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="a new directory")],
    group: Annotated[str, typer.Option(help="weights to write: model, ema, critic, reference or reward_model")] = "",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16; default: as they are kept")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="what was written as one JSON object")] = False,
) -> None:
    """Write weights for transformers and vLLM; model.path=OUT reads them back.

    Keys of --json: path, step, files, bytes.
    """
    from tilth.cli.export import write_model

    write_model(checkpoint, out, group=group, dtype=dtype, as_json=as_json)


@ckpt.command(name="prune")
def ckpt_prune(
    where: WhereArgument,
    keep: Annotated[int | None, typer.Option(min=1, help="newest ones that stay; default: run.keep of the run")] = None,
    every: Annotated[
        int | None, typer.Option(min=0, help="steps that are a multiple stay too; default: run.keep_every of the run")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="what is damaged, unfinished or replaced goes too")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON object")] = False,
) -> None:
    """Remove old checkpoints, never the newest nor the best. Refused while a process writes the run.

    Of a folder or URL that lies in no run that is not known, so --damaged leaves there what is unfinished.
    Keys of --json: dry_run, removed (run, checkpoint, step, state, bytes), bytes, kept.
    """
    from tilth.cli.ckpt import prune

    prune(where, keep=keep, every=every, dry=dry_run, damaged=damaged, as_json=as_json)


trace = typer.Typer(
    cls=RunFirst,
    help="Say what happened, and what would be gained. As in: tilth trace runs/addition-grpo-001 --steps 10:20",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(trace, name="trace")


@trace.command(name="RUN")
def trace_run(
    run: RunArgument,
    steps: StepsOption = "",
    attempt: AttemptOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="all numbers as one JSON object")] = False,
) -> None:
    """Say where the time of a run went, and what would be gained if the worst were mended; also while it goes on.

    Roles beside those of the recipe: weight_sync carries the policy's weights to its copies, loader turns what is
    learned from into rows. S: how many times as long a step takes as it would if ranks and communications were as their
    peers.

    Keys of --json: run, state, attempt, steps (first, last, count), seconds, step (mean, median, longest, longest_at),
    parts (name: seconds, share; means over ranks), roles (role: rank: seconds), ranks (rank, busy, pace, communication,
    parts), communication (by_op, transfer, waiting, hidden), controller (rank, busy; null inline), rates,
    profiled (steps), events, dropped, gain (slowdown, step, ideal_step, error, earlier, cause; null inline),
    notes (what is missing of the trace). Times in seconds.
    """
    from tilth.cli.trace_run import account_of

    account_of(run, steps, attempt, as_json=as_json)


@trace.command(name="whatif")
def trace_whatif(
    path: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="a run, or a trace in the straggler study's format")],
    meta: Annotated[
        Path | None, typer.Option(metavar="META.yaml", help="of a FILE: the job's sizes, to check it")
    ] = None,
    steps: StepsOption = "",
    attempt: AttemptOption = None,
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="of a RUN: on another network, as 10Gbit")] = "",
    latency: Annotated[str, typer.Option(metavar="TIME", help="of a RUN: on another network, as 50us")] = "",
    svg: Annotated[Path | None, typer.Option(metavar="PATH", help="write the heat map of workers as a picture")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="all numbers as one JSON object")] = False,
) -> None:
    """Say what stragglers cost, which operations, stages and workers they are, and the likely cause.

    S: how many times as long a step takes as it would if all were ideal; of an operation or worker: if all else were.
    M_W: share of the lost time that is gained if the worst 3 % of workers (at least one) were ideal; M_S: if the last
    stage were.

    Keys of --json: slowdown, ideal_step (seconds), by_optype, by_stage, by_dp, by_worker (dp, stage, rank, exact,
    shortcut), m_w, m_s, cause (text, findings, evidence). Of a RUN also by_axis, step, model_error, steps, left_out,
    earlier, profiled, other_network, assumed, attempt, notes, and in findings seconds, those of a step without the
    cause.
    """
    if path.is_dir():
        from tilth.cli.trace_whatif import whatif_of_run

        if meta is not None:
            raise DataError("--meta describes a trace in the straggler study's format, not a run", key="--meta")
        whatif_of_run(path, steps, latency, bandwidth, svg, attempt, as_json=as_json)
        return
    from tilth.cli.trace_whatif import whatif_of_file

    if steps or bandwidth or latency or attempt is not None:
        raise DataError(
            "--steps, --bandwidth, --latency and --attempt need a RUN, not a trace in the straggler study's format",
            key="RUN",
        )
    whatif_of_file(path, meta, svg, as_json=as_json)


@trace.command(name="export")
def trace_export(
    run: RunArgument,
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="the file to write, .gz: compressed; default: RUN/perfetto.json.gz"),
    ] = None,
    perfetto: Annotated[
        bool,
        typer.Option("--perfetto", help="for ui.perfetto.dev; the only format, and the default", show_default=False),
    ] = True,
    steps: StepsOption = "",
    attempt: AttemptOption = None,
    ranks: Annotated[str, typer.Option(metavar="0,1", help="of these ranks only")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="what was written as one JSON object")] = False,
) -> None:
    """Write the events of a run for Perfetto: ranks on one clock, threads, counters, arrows of calls.

    As in: tilth trace export RUN --perfetto trace.json.gz --steps 10:20. Keys of --json: path, spans, arrows, counters,
    bytes, ranks, steps, clock_error (seconds; null: not known), notes.
    """
    from tilth.cli.trace_export import write

    write(run, path, steps, ranks, attempt, as_json=as_json)


@trace.command(name="costs")
def trace_costs(
    run: RunArgument,
    steps: StepsOption = "",
    attempt: AttemptOption = None,
    save: Annotated[Path | None, typer.Option(metavar="PATH", help="write them as JSON, for planners")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as one JSON object")] = False,
) -> None:
    """Say what work costs on this machine: seconds against tokens and bytes, fitted, each with its error.

    Keys of --json and of the file: format, version, about, compute (op, role, fixed, per_token, per_square in seconds,
    tokens, squares, lengths, count, ranks, separate, separate_squares, error), links (op, ranks, latency, bandwidth,
    least, greatest, count, separate, error), left.
    """
    from tilth.cli.costs import costs

    costs(run, steps, save, attempt, as_json=as_json)


@trace.command(name="capture")
def trace_capture(
    run: RunArgument,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="how many of its next steps")] = 3,
    ranks: Annotated[str, typer.Option("--ranks", metavar="0,1", help="ranks of workers")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="each allocation too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="what was recorded as one JSON object")] = False,
) -> None:
    """Let torch's profiler record the next steps of a run that goes on, and say where the traces are.

    Every operation with its shapes, from the end of one step to that of another, as Chrome traces in RUN/profiles. For
    steps that are known beforehand: run.profile=A:B. Keys of --json: id, state, first, last, ranks, memory, errors
    (rank -> why), files (rank -> path, bytes).
    """
    from tilth.cli.capture import capture

    capture(run, steps, ranks, memory=memory, as_json=as_json)


@app.command()
def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="one look, not until the run ends")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="one look as one JSON object")] = False,
) -> None:
    """Watch a run that goes on in another process: steps, rates, curves, what each rank is busy with.

    Reads only what is on disk. Keys of --json: run, state, attempt, step, phase, phase_step, phase_steps, seconds,
    left, silent (since the last step), loss, reward, accuracy, reward_heldout, tokens_per_second, time, memory, recent
    (first, last, parts, ranks: shares of the newest steps), message.
    """
    from tilth.cli.top import top

    top(run, every, once=once, as_json=as_json)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="all findings as one JSON object")] = False,
) -> None:
    """Look at this machine and say what to set."""
    from tilth.cli.doctor import examine

    examine(as_json=as_json)


def main() -> None:
    """Entry point of the ``tilth`` script."""
    app()
