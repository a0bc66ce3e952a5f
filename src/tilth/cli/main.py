"""``tilth``: the commands. A class has the arguments and options of one; its body, in a module beside this one that is
imported when the command runs, takes an object of it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from tilth.cli.declare import app, command, group
from tilth.cli.groups import RunFirst
from tilth.config.errors import RecipeError
from tilth.config.imports import end_uncollected

if TYPE_CHECKING:
    from tilth.config.schema import Recipe

PUBLISHED = "published"
COMMAND = "command"
"""Object of the context of a process that is nothing but a command, so that it may fork."""
SHIPPED = Path(__file__).parent.parent / "recipes"


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes; nothing for a path, so that the shell offers files."""
    return [name for name in sorted(p.stem for p in SHIPPED.glob("*.toml")) if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Keys to set, as ``rollout.group=``."""
    return [f"{name}=" for name in keys(incomplete)]


def keys(incomplete: str) -> list[str]:
    from tilth.config.keys import all_names

    return [name for name in all_names() if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Folders of runs in the folder that was typed, or in ``runs``."""
    folder = incomplete.rpartition("/")[0] if "/" in incomplete else "runs"
    found = sorted(path.parent for path in Path(folder or "/").glob("*/run.json"))
    return [str(path) for path in found if str(path).startswith(incomplete)]


RecipeArgument = Annotated[
    str, Argument(metavar="RECIPE", help="name of a shipped recipe, or path of a TOML file", autocompletion=recipes)
]
OverridesArgument = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="keys to change", autocompletion=overrides)
]
RunArgument = Annotated[Path, Argument(metavar="RUN", help="directory of a run", autocompletion=runs)]


def _is_nowhere(ctx: typer.Context, spec: str) -> bool:
    """Return True for a word of a command line that is neither a URL nor a file or folder, with or without @WHICH."""
    places = (spec, spec.rpartition("@")[0] or spec)
    return not (ctx.resilient_parsing or "://" in spec or any(map(os.path.lexists, places)))


def _model(ctx: typer.Context, spec: str) -> str:
    """Return the name of a model. ModelError now, and not after imports that take seconds, if it is nowhere."""
    if _is_nowhere(ctx, spec):
        from tilth.models.hub import check_place

        check_place(spec)
    return spec


def _where(ctx: typer.Context, where: str) -> str:
    """Return the name of a place with checkpoints. DataError now, if it is a folder that is not there."""
    if _is_nowhere(ctx, where):
        from tilth.runs.readers import nowhere

        raise nowhere(where)
    return where


MODELS = "RUN, RUN@best, RUN@STEP, RUN@ema, a checkpoint's directory, a Hugging Face directory or hub id"
ModelArgument = Annotated[str, Argument(metavar="MODEL", help=MODELS, autocompletion=runs, callback=_model)]
CKPT = "RUN, RUN@best, RUN@STEP, a checkpoint's directory or URL, a folder of them (its newest)"
CheckpointArgument = Annotated[str, Argument(metavar="CKPT", help=CKPT, autocompletion=runs, callback=_model)]
WHERE = "a run, a folder of checkpoints or of runs, or the URL of a folder"
WhereArgument = Annotated[str, Argument(metavar="WHERE", help=WHERE, autocompletion=runs, callback=_where)]
AnyArgument = "any checkpoint (RUN, RUN@STEP, a directory, a URL) or a Hugging Face directory"
JsonOption = Annotated[bool, Option("--json", help="print everything as JSON")]
StepsOption = Annotated[str, Option("--steps", metavar="A:B", help="steps A to B-1, or one step; default: all")]
ATTEMPT = "attempt of a resumed run; default: the newest with a step"
AttemptOption = Annotated[int | None, Option("--attempt", metavar="N", min=1, help=ATTEMPT)]
ColumnsOption = Annotated[list[str] | None, Option(metavar="ROLE=NAME", help="column of a role: prompt=question")]
OutArgument = Annotated[str, Argument(metavar="OUT", help="a new directory")]
TemperatureOption = Annotated[float, Option(min=0.0, help="softmax temperature; 0: greedy")]
TopPOption = Annotated[float, Option(help="keep the smallest set of tokens with this mass")]
TopKOption = Annotated[int, Option(min=0, help="keep the k likeliest tokens; 0: all")]
STOP = "text that ends a completion; may be repeated; default: the run's"
StopOption = Annotated[list[str] | None, Option(help=STOP)]
SeedOption = Annotated[int, Option(min=0, help="seed of sampling")]
TEMPLATE = "text to prompt: model (its chat template), chatml, a Jinja file, or '' (unchanged); default: the run's"
TemplateOption = Annotated[str | None, Option(help=TEMPLATE)]
ALLOW = Option(metavar="KEY", help="a key or section that may have changed; repeatable", autocompletion=keys)


@command("run", "run:train")
class RunCommand(NamedTuple):
    """Train by a recipe.

    Start a new run in runs/, or resume an unfinished one of the same recipe. Override keys of the recipe on the command
    line, as in: tilth run addition-grpo algorithm.steps=50 run.name=short

    A run whose recipe has changed is resumed only if each change is allowed by name: --allow algorithm.steps
    """

    ctx: typer.Context
    name: RecipeArgument
    overrides: OverridesArgument = None
    allow: Annotated[list[str] | None, ALLOW] = None
    fallback: Annotated[
        bool, Option("--fallback", help="if the newest checkpoint is damaged, resume from the newest intact one")
    ] = False
    replay: Annotated[
        Path | None, Option(metavar="RUN", help="repeat an asynchronous run of this recipe by its log of events")
    ] = None


@command("sweep", "sweep:train")
class SweepCommand(NamedTuple):
    """Train by a recipe with several values of keys and several seeds, and compare them with intervals over seeds.

    As in: tilth sweep addition-grpo optimizer.lr=1e-4,3e-4 --seeds 3. All combinations are trained, each by a run in
    runs/ that is named after them. The same command again continues what is not finished, and trains what was added.

    A comma parts values, unless it is inside a list, a table or quotes: data.source='"a,b.jsonl","c.jsonl"'

    Keys of --json: sweep, recipe, runs (run, values, seed, state, error), settings (values, seeds, runs, metric, final
    and best: mean, half: of the 95 % interval).
    """

    name: RecipeArgument
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="KEY=VALUE[,VALUE]...", help="keys to change, and values to compare", autocompletion=overrides
        ),
    ] = None
    seeds: Annotated[
        int | None, Option("--seeds", metavar="N", min=1, help="seeds of each, from the recipe's on [1]")
    ] = None
    parallel: Annotated[
        int, Option("--parallel", metavar="N", min=1, help="runs side by side, which share cores and GPUs")
    ] = 1
    as_json: JsonOption = False


def _flows(asked: "AlgorithmsCommand") -> tuple[list[str], dict[str, Any]]:
    """Return flows and keys. RecipeError: a flow that nobody declares, or a wrong key."""
    from tilth.config.load import check_flows, parse_overrides

    words = asked.words or []
    flows, keys = [word for word in words if "=" not in word], parse_overrides([word for word in words if "=" in word])
    check_flows(flows, keys)
    return flows, keys


@command("algorithms", "algorithms:compare", first=_flows)
class AlgorithmsCommand(NamedTuple):
    """List all algorithms side by side; for two or more named flows only the differences.

    As in: tilth algorithms dapo grpo; with your own: tilth algorithms 'plugins=["mine.py"]'. Keys of --json: algorithms
    (flow -> its keys, null: the flow has none), entries (kind -> names).
    """

    words: Annotated[
        list[str] | None,
        Argument(metavar="[FLOW]... [KEY=VALUE]...", help="flows to list and keys to override; default: all flows"),
    ] = None
    as_json: JsonOption = False


def _placed(asked: "LayoutCommand") -> "Recipe":
    """Return the recipe. TilthError: it is bad, a model is nowhere, or an option lacks the one that it is for."""
    from tilth.api import check_models
    from tilth.data.origin import check_sources
    from tilth.plan.devices import device_type
    from tilth.runs.trust import load_named

    recipe = load_named(asked.name, asked.overrides or ())
    check_models(recipe)
    if asked.check_against is None:
        read = recipe.flow != "pretrain" or not recipe.model.path
        if read and not recipe.data.tokenizer.startswith("bpe:"):  # else shape and lengths are known without data
            check_sources(recipe.data)
    elif asked.check_against != PUBLISHED:
        message = f"--check-against {asked.check_against!r} is not there; use {PUBLISHED}"
        raise RecipeError(message, key="--check-against")
    here = asked.device_type == asked._field_defaults["device_type"]
    if asked.search and not here:
        device_type(asked.device_type)
    if not asked.search and not (here and asked.devices is None):
        option = f"--devices {asked.devices}" if asked.devices is not None else f"--device-type {asked.device_type}"
        message = f"{option} is for --search, which chooses the layout; without it, set cluster.workers"
        raise RecipeError(message, key="--search")
    return recipe


@command("layout", "layout:show", first=_placed)
class LayoutCommand(NamedTuple):
    """Show where a recipe puts roles, ranks, shares of the model and memory, and which ranks communicate.

    Nothing is started. As in: tilth layout addition-grpo cluster.backend=local cluster.workers=4

    --search chooses the placement instead: tilth layout RECIPE --search --devices 128 --device-type h100
    --check-against published puts predicted step times of other systems' jobs beside those that they publish.
    """

    name: RecipeArgument
    overrides: OverridesArgument = None
    search: Annotated[bool, Option("--search", help="find pools and layouts with the shortest predicted step")] = False
    devices: Annotated[int | None, Option(min=1, help="with --search: devices; default: cluster.workers")] = None
    device_type: Annotated[
        str, Option(metavar="TYPE", help="with --search: a100-80g, h100, ..., a file TYPE.toml, or this machine: here")
    ] = "here"
    check_against: Annotated[str | None, Option(metavar=PUBLISHED, help="how far predictions are from them")] = None
    as_json: JsonOption = False


@command("generate", "generate:speak")
class GenerateCommand(NamedTuple):
    """Continue a text by a trained model. --json: one object a completion."""

    model: ModelArgument
    prompt: Annotated[str, Argument(metavar="PROMPT", help="text to continue")]
    n: Annotated[int, Option("--n", min=1, help="number of completions")] = 1
    temperature: TemperatureOption = 1.0
    top_p: TopPOption = 1.0
    top_k: TopKOption = 0
    max_tokens: Annotated[int | None, Option(min=1, help="longest completion; default: 64, or what fits")] = None
    stop: StopOption = None
    schema: Annotated[Path | None, Option(help="JSON schema that the text follows (extra schema)")] = None
    template: TemplateOption = None
    seed: SeedOption = 0
    logprobs: Annotated[bool, Option("--logprobs", help="show each token with its log-prob")] = False
    as_json: JsonOption = False


@command("serve", "serve:serve")
class ServeCommand(NamedTuple):
    """Serve a model to any client of OpenAI's interface, on http://HOST:PORT/v1, until Ctrl-C.

    /v1/completions, /v1/chat/completions (tools, JSON schema), /v1/responses, /v1/embeddings, /v1/models, /tokenize,
    /detokenize, /health, /metrics. A request's model names MODEL, its last part or an adapter. Asked to end, it lets
    requests finish for 30 seconds.
    """

    model: ModelArgument
    host: Annotated[str, Option(help="address; beyond this machine only with a token")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="port; 0: any that is free")] = 8000
    token: Annotated[str, Option(envvar="TILTH_SERVE_TOKEN", help="token that clients must send")] = ""
    adapter: Annotated[list[str] | None, Option(metavar="NAME=DIR", help="adapter to serve, by PEFT; repeatable")] = (
        None
    )
    template: TemplateOption = None
    backend: Annotated[str, Option(help="of the workers: inline, local or ray")] = "local"
    train: Annotated[bool, Option("--train", help="offer Tinker's training API too, for TINKER_BASE_URL")] = False
    state: Annotated[Path | None, Option(help="--train: folder of models and checkpoints [tilth-service]")] = None
    name: Annotated[
        str,
        Option(
            "--name", "--served-model-name", help="name by which clients call the model, besides MODEL [its last part]"
        ),
    ] = ""
    fast: Annotated[bool, Option("--fast", help="on a CPU: faster, but company may change completions by rounding")] = (
        False
    )
    pooling: Annotated[str, Option(help="of embeddings: hidden state of the last token, or their mean")] = "last"
    address: Annotated[str, Option(help="of a Ray cluster, for --backend ray; auto: the one of this machine")] = ""
    layout: Annotated[str, Option(metavar="fsdp=N", help="--train: workers, as dp=2,fsdp=2,tp=2")] = ""
    requests: Annotated[int | None, Option(min=1, help="--train: requests of one client that may wait [1024]")] = None
    models: Annotated[int | None, Option(min=1, help="--train: models in memory; others are on disk [64]")] = None
    idle: Annotated[
        float | None, Option(min=1.0, help="--train: seconds until a silent client's models leave memory [120]")
    ] = None


@command("chat", "chat:talk")
class ChatCommand(NamedTuple):
    """Talk with a model.

    Each line is a turn. /reset starts over, /quit or Ctrl-D ends, Ctrl-C ends the current answer only. Lines may also
    come from a pipe.
    """

    model: ModelArgument
    system: Annotated[str, Option(help="system text before the first turn")] = ""
    temperature: TemperatureOption = 0.7
    top_p: TopPOption = 1.0
    max_tokens: Annotated[int, Option(min=1, help="longest answer in tokens, if it fits the context")] = 512
    template: TemplateOption = None
    seed: SeedOption = 0


REWARDS = Option(help="FILE.py:function or a verifier; repeated: their sum; default: the run's or the task's")


@command("eval", "eval:judge")
class EvalCommand(NamedTuple):
    """Evaluate a model on a dataset: pass@k and avg@k with their confidence intervals."""

    model: ModelArgument
    data: Annotated[str, Argument(metavar="DATA", help="a task or files; default: held-out data of the run")] = ""
    reward: Annotated[list[str] | None, REWARDS] = None
    k: Annotated[str, Option("--k", help="pass@k and avg@k for these, as in 1,8")] = "1"
    n: Annotated[int, Option("--n", min=0, help="samples of each prompt; 0: the greatest k")] = 0
    temperature: Annotated[
        float | None, Option(min=0.0, help="softmax temperature; default: 0 (greedy) for one sample, else 1")
    ] = None
    top_p: TopPOption = 1.0
    top_k: TopKOption = 0
    max_tokens: Annotated[int | None, Option(min=1, help="longest completion; default: the run's, or 512")] = None
    stop: StopOption = None
    template: TemplateOption = None
    columns: ColumnsOption = None
    limit: Annotated[int, Option(min=0, help="number of prompts, always the same ones; 0: all")] = 0
    seed: SeedOption = 0
    max_rows: Annotated[int, Option(min=1, help="most sequences decoded at once")] = 256
    workers: Annotated[int, Option(min=1, help="processes that score")] = 1
    timeout: Annotated[float | None, Option(min=0.001, help="seconds a reward; default: the run's, or 10")] = None
    out: Annotated[Path | None, Option(help="write every completion: FILE.jsonl or FILE.parquet")] = None
    as_json: JsonOption = False


AdapterOption = Annotated[bool, Option("--adapter", help="of a run with policy.lora: the adapters alone, for PEFT")]


@command("export", "export:export")
class ExportCommand(NamedTuple):
    """Write a model for transformers and vLLM; tilth ckpt export has more options."""

    spec: ModelArgument
    where: OutArgument
    adapter: AdapterOption = False


@command("expand", "export:expand")
class ExpandCommand(NamedTuple):
    """Write a larger model that computes the same function, from which a run goes on (LEMON, arXiv 2310.07999).

    As in: tilth expand runs/mine OUT --hidden 384 --layers 8 --heads 6 --ffn 1024. What is not given stays; key heads
    grow with heads. Then: tilth run RECIPE model.path=OUT, with the learning rate of a new model and fewer steps.
    """

    spec: ModelArgument
    where: OutArgument
    hidden: Annotated[int | None, Option(min=1, help="width of the residual stream")] = None
    layers: Annotated[int | None, Option(min=1, help="decoder layers")] = None
    heads: Annotated[int | None, Option(min=1, help="query heads; their key heads come along")] = None
    ffn: Annotated[int | None, Option(min=1, help="inner width of the MLP")] = None
    expert_ffn: Annotated[int | None, Option(min=1, help="inner width of an expert")] = None
    untie: Annotated[bool, Option("--untie", help="give the output head weights of its own")] = False


@command("report", "show:write")
class ReportCommand(NamedTuple):
    """Write report.html of a run, finished or still running."""

    run: RunArgument


@command("show", "show:show_run")
class ShowCommand(NamedTuple):
    """Summarise a run, finished or still running."""

    run: RunArgument
    as_json: JsonOption = False
    parquet: Annotated[
        Path | None, Option(metavar="PATH", help="only write the metrics of all steps there, with units")
    ] = None


@command("ls", "ls:ls")
class LsCommand(NamedTuple):
    """List runs, the newest first: flow, state, steps, newest metric, time since the last write.

    Exit code 1: one of them cannot be read. Keys of --json: run, recipe, flow, state, error, step, metric, value, age
    (seconds since it wrote its last step or its state).
    """

    folder: Annotated[Path, Argument(metavar="FOLDER", help="a folder of runs, or a run", autocompletion=runs)] = Path(
        "runs"
    )
    as_json: Annotated[bool, Option("--json", help="a list with an object for each")] = False


reward = group("reward", "Inspect reward functions.")
REWARD = Argument(
    metavar="REWARD",
    help="FILE.py:function, module:function, a verifier (gsm8k, math_equal, unit_tests, exact, json:SCHEMA.json, "
    "regex:PATTERN, https://HOST/PATH ...), or several with weights, as in '{gsm8k = 1.0, \"regex:####\" = 0.1}'",
)


@command("try", "reward:try_reward", reward)
class RewardTryCommand(NamedTuple):
    """Score right, wrong and empty answers of some records, to test a reward before a run depends on it.

    The answer of each record, another record's, and an empty one are scored in a process with a time limit, as in a
    run. Report the rewards, the failures and their reasons, and the time. Exit code 1: the verdict is "broken".
    """

    reward: Annotated[str, REWARD]
    source: Annotated[str, Argument(metavar="DATA", help="files as for data.source, or a task")]
    columns: ColumnsOption = None
    n: Annotated[int, Option("--n", min=1, help="number of records, spread evenly")] = 20
    completion: Annotated[str | None, Option(help="your own completion, scored for each record")] = None
    digits: Annotated[int, Option(min=1, max=9, help="digits of the numbers of a task")] = 3
    timeout: Annotated[float, Option(min=0.001, help="seconds one call may take")] = 10.0
    as_json: JsonOption = False


env = group("env", "Try environments of several turns.")


@command("try", "env_try:play", env)
class EnvTryCommand(NamedTuple):
    """Play one episode, by hand or with a model, and print each turn with its tokens and how many are trained.

    Keys of --json: value (the reward), parts, reason; by hand messages; with a model segments (role, tokens, mask,
    text, reward), finish, turns.
    """

    environment: Annotated[str, Argument(metavar="FILE:CLASS", help="or the name of a task's or plugin's environment")]
    model: Annotated[str, Option(metavar="RUN", help="a run or model that plays; empty: by hand")] = ""
    info: Annotated[str, Option(metavar="JSON", help='columns of a record, as in {"prompt": "1+1="}')] = "{}"
    seed: Annotated[int, Option(help="of sampling")] = 0
    temperature: Annotated[float, Option(min=0.0, help="of sampling; 0: greedy")] = 1.0
    max_tokens: Annotated[int, Option(min=1, help="most tokens of a turn")] = 64
    turns: Annotated[int, Option(min=1, help="most turns")] = 8
    seconds: Annotated[float, Option(min=0.1, help="limit of one call of the environment")] = 10.0
    as_json: JsonOption = False


@command("records", "env_try:write_records", env)
class EnvRecordsCommand(NamedTuple):
    """Write the records that an environment brings, for data.source: a dataset's rows, or seeds of games."""

    environment: Annotated[str, Argument(metavar="NAME", help="such as verifiers:NAME, gymnasium:ID or FILE.py:Class")]
    file: Annotated[Path, Argument(metavar="FILE.jsonl", help="must not exist")]
    most: Annotated[int, Option("--count", min=0, help="most records; 0: all that it has")] = 0


data = group("data", "Inspect data, and tokenise them ahead of a run.")


def _recipe(asked: "DataShowCommand | DataTokenizeCommand") -> "Recipe":
    """Return the recipe that a command names. TilthError: it is bad, or its data are nowhere."""
    from tilth.data.origin import check_sources
    from tilth.runs.trust import load_named

    recipe = load_named(asked.name, asked.overrides or ())
    check_sources(recipe.data)
    return recipe


@command("show", "data:show", data, _recipe)
class DataShowCommand(NamedTuple):
    """Show what a model will see: tokens, loss mask, template, lengths, what would stop the run (exit code 1).

    Of supervised steps also what lengths cost, and before any training how even the ranks of the layout would be and
    how long an update takes, beside other balances and layouts.

    Of a mixture also how many samples the run draws of each source.

    balance in --json: source, error, lengths (least, most, rows, tokens, cost: shares), layouts (layout, balance, here,
    spread, idle, padding, seconds).
    """

    name: RecipeArgument
    overrides: OverridesArgument = None
    n: Annotated[int, Option("--n", min=0, help="number of examples, spread evenly")] = 3
    as_json: JsonOption = False


@command("tokenize", "data:tokenize", data, _recipe)
class DataTokenizeCommand(NamedTuple):
    """Build the caches of a recipe's data ahead of its run; print samples, tokens and weight of each source.

    Keys of --json: source, samples, tokens, weight.
    """

    name: RecipeArgument
    overrides: OverridesArgument = None
    as_json: JsonOption = False


ckpt = group("ckpt", "Inspect, compare and remove checkpoints. Exit code 1: something is damaged or different.")


@command("ls", "ckpt:ls", ckpt)
class CkptLsCommand(NamedTuple):
    """List checkpoints: step, when saved, layout, tensors, bytes, state.

    States: complete, damaged (and why), unfinished (a save in progress, or cut off), replaced (by one of the same
    step). A complete one of another run is marked. A run resumes from the newest. Exit code 1: a run's checkpoints
    are lost or cannot be listed; in --json its state is missing and its step null. Keys of --json: run, checkpoint,
    step, state, reason, newest, best, bytes, saved, layout, tensors.
    """

    where: WhereArgument
    as_json: JsonOption = False


@command("show", "ckpt:show", ckpt)
class CkptShowCommand(NamedTuple):
    """Show the contents of a checkpoint or a Hugging Face directory. No data is read.

    Keys of --json: path, kind, step, saved, layout, bytes, groups (group, tensors, elements, bytes, dtypes), files
    (name, group, bytes), objects, and on request tensors (group, name, shape, dtype, bytes, files, boxes).
    """

    spec: CheckpointArgument
    pattern: Annotated[
        str | None, Option("--tensors", metavar="PATTERN", help="list tensors whose name matches, as in 'model/*norm*'")
    ] = None
    boxes: Annotated[bool, Option("--boxes", help="list the boxes of each tensor too")] = False
    as_json: JsonOption = False


@command("verify", "ckpt:verify", ckpt)
class CkptVerifyCommand(NamedTuple):
    """Compare every byte with its checksum; name damaged files and tensors, and checkpoints of another run.

    Exit code 1: there are some. Checkpoints that a running process removes meanwhile are skipped. Keys of --json: run,
    checkpoint, step, intact, bytes, seconds, problems, own (its run made it).
    """

    where: Annotated[str, Argument(metavar="WHERE", help="as for ls, or one checkpoint as for show", callback=_where)]
    everything: Annotated[bool, Option("--all", help="all checkpoints, not the newest only")] = False
    as_json: JsonOption = False


@command("diff", "ckpt:diff", ckpt)
class CkptDiffCommand(NamedTuple):
    """List tensors, values and objects in which two checkpoints differ; with a Hugging Face directory, weights only.

    Exit code 1: they do. Never compared: events, the number of the attempt. Keys of --json: equal, a, b, tensors
    (group, name, kind, a, b, count, share, max_abs, max_rel, first), objects (key, a, b, there), compared, groups,
    bytes, tolerance, within (greatest difference of the tensors that do not differ by more), left_out.
    """

    a: Annotated[str, Argument(metavar="A", help=AnyArgument, callback=_model)]
    b: Annotated[str, Argument(metavar="B", help="likewise", callback=_model)]
    tolerance: Annotated[
        float | None, Option(help="greatest difference of two equal values; default: they are equal bit for bit")
    ] = None
    as_json: JsonOption = False


@command("export", "export:ckpt_export", ckpt)
class CkptExportCommand(NamedTuple):
    """Write weights for transformers and vLLM; model.path=OUT loads them.

    Keys of --json: path, step, files, bytes.
    """

    spec: Annotated[
        str,
        Argument(metavar="CKPT", help="RUN, RUN@best, RUN@STEP, or a checkpoint in its run's folder", callback=_model),
    ]
    where: OutArgument
    group: Annotated[str, Option(help="weights to write: model, ema, critic, reference or reward_model")] = ""
    dtype: Annotated[str, Option(help="fp32 or bf16; default: as saved")] = ""
    adapter: AdapterOption = False
    as_json: JsonOption = False


EVERY = "also keep steps that are a multiple; default: run.keep_every of the run"


@command("prune", "ckpt:remove", ckpt)
class CkptPruneCommand(NamedTuple):
    """Remove old checkpoints, never the newest nor the best. Refused while a process writes the run.

    In a folder or URL outside of any run no such process is known, so --damaged leaves unfinished ones there.
    Keys of --json: dry_run, removed (run, checkpoint, step, state, bytes), bytes, kept.
    """

    where: WhereArgument
    keep: Annotated[int | None, Option(min=1, help="newest ones to keep; default: run.keep of the run")] = None
    every: Annotated[int | None, Option(min=0, help=EVERY)] = None
    dry: Annotated[bool, Option("--dry-run", help="only list what would be removed")] = False
    damaged: Annotated[bool, Option("--damaged", help="also remove damaged, unfinished and replaced ones")] = False
    as_json: JsonOption = False


trace = group("trace", "Analyse the trace of a run. As in: tilth trace runs/addition-grpo-001 --steps 10:20", RunFirst)


@command("RUN", "trace_run:account_of", trace)
class TraceRunCommand(NamedTuple):
    """Break down the time of a run, finished or still running, and estimate the gain of removing the worst.

    Roles beside those of the recipe: weight_sync carries the policy's weights to its copies, loader turns training data
    into rows. S: time of a step over its time if ranks and communications were as their peers.

    Keys of --json: run, state, attempt, steps (first, last, count), seconds, step (mean, median, longest, longest_at),
    parts (name: seconds, share; means over ranks), roles (role: rank: seconds), ranks (rank, busy, pace, communication,
    parts), communication (by_op, transfer, waiting, hidden), controller (rank, busy; null inline), rates, predicted
    (micro_batches, predicted, measured, error, p90; null unless the run balances by cost), profiled (steps), events,
    dropped, gain (slowdown, step, ideal_step, error, earlier, cause; null inline), notes (what is missing of the
    trace). Times in seconds.
    """

    run: RunArgument
    steps: StepsOption = ""
    attempt: AttemptOption = None
    as_json: JsonOption = False


@command("whatif", "studies.trace_whatif:analyse", trace)
class TraceWhatifCommand(NamedTuple):
    """Estimate the cost of stragglers, name their operations, stages and workers, and the likely cause.

    S: time of a step over its ideal time; of an operation or worker: the same if everything else were ideal.
    M_W: share of the lost time that is gained if the worst 3 % of workers (at least one) were ideal; M_S: if the last
    stage were.

    Keys of --json: slowdown, ideal_step (seconds), by_optype, by_stage, by_dp, by_worker (dp, stage, rank, exact,
    shortcut), m_w, m_s, cause (text, findings, evidence). Of a RUN also by_axis, step, model_error, steps, left_out,
    earlier, profiled, other_network, assumed, attempt, notes, and in findings seconds, those of a step without the
    cause.
    """

    path: Annotated[Path, Argument(metavar="RUN|FILE", help="a run, or a trace in the straggler study's format")]
    meta: Annotated[Path | None, Option(metavar="META.yaml", help="of a FILE: the job's sizes, to check it")] = None
    steps: StepsOption = ""
    attempt: AttemptOption = None
    bandwidth: Annotated[str, Option(metavar="RATE", help="of a RUN: on another network, as 10Gbit")] = ""
    latency: Annotated[str, Option(metavar="TIME", help="of a RUN: on another network, as 50us")] = ""
    svg: Annotated[Path | None, Option(metavar="PATH", help="write the heat map of workers as SVG")] = None
    as_json: JsonOption = False


PATH = Argument(metavar="PATH", help="the file to write, .gz: compressed; default: RUN/perfetto.json.gz")
PERFETTO = Option("--perfetto", help="for ui.perfetto.dev; the only format, and the default", show_default=False)


@command("export", "trace_export:write", trace)
class TraceExportCommand(NamedTuple):
    """Write the events of a run for Perfetto: ranks on one clock, threads, counters, arrows of calls.

    As in: tilth trace export RUN --perfetto trace.json.gz --steps 10:20. Keys of --json: path, spans, arrows, counters,
    bytes, ranks, steps, clock_error (seconds; null: not known), notes.
    """

    run: RunArgument
    path: Annotated[Path | None, PATH] = None
    perfetto: Annotated[bool, PERFETTO] = True
    steps: StepsOption = ""
    attempt: AttemptOption = None
    ranks: Annotated[str, Option(metavar="0,1", help="of these ranks only")] = ""
    as_json: JsonOption = False


@command("costs", "costs:costs", trace)
class TraceCostsCommand(NamedTuple):
    """Fit the cost of work on this machine: seconds against tokens and bytes, each with its error.

    Keys of --json and of the file: format, version, about, compute (op, role, fixed, per_token, per_square in seconds,
    tokens, squares, lengths, count, ranks, separate, separate_squares, error), links (op, ranks, latency, bandwidth,
    least, greatest, count, separate, error), left.
    """

    run: RunArgument
    steps: StepsOption = ""
    attempt: AttemptOption = None
    save: Annotated[Path | None, Option(metavar="PATH", help="write them as JSON, for planners")] = None
    as_json: JsonOption = False


@command("capture", "capture:capture", trace)
class TraceCaptureCommand(NamedTuple):
    """Record the next steps of a running run with torch's profiler, and print the paths of the traces.

    Every operation with its shapes, from the end of one step to that of another, as Chrome traces in RUN/profiles. For
    steps that are known beforehand: run.profile=A:B. Keys of --json: id, state, first, last, ranks, memory, errors
    (rank -> why), files (rank -> path, bytes).
    """

    run: RunArgument
    steps: Annotated[int, Option("--steps", metavar="N", help="number of its next steps")] = 3
    ranks: Annotated[str, Option("--ranks", metavar="0,1", help="ranks of workers")] = "0"
    memory: Annotated[bool, Option("--memory", help="record each allocation too")] = False
    as_json: JsonOption = False


@command("top", "top:top")
class TopCommand(NamedTuple):
    """Watch a run of another process: steps, rates, curves, activity of each rank.

    Reads only files of the run, and of its session on this machine. Keys of --json: run, state, attempt, step, phase,
    phase_step, phase_steps, seconds, left, silent (since the last step), loss, reward, accuracy, reward_heldout,
    tokens_per_second, time, memory, recent (first, last, parts, ranks: shares of the newest steps), workers (rank, pid,
    state, call, operation, heartbeat_age, progress_age, memory, cores), recoveries, warnings, ettr, ettr_last_hour,
    message.
    """

    run: RunArgument
    once: Annotated[bool, Option("--once", help="show the state once, not until the run ends")] = False
    every: Annotated[float, Option(min=0.1, help="seconds between two updates")] = 1.0
    as_json: JsonOption = False


@command("ui", "ui:serve")
class UiCommand(NamedTuple):
    """Show the runs of a folder in a browser until Ctrl-C, also while they train: curves, samples, time, health.

    Needs no network. Nothing that a browser asks for changes a run.
    """

    folder: Annotated[Path, Argument(metavar="RUNS_DIR", help="a folder of runs, or a run", autocompletion=runs)] = (
        Path("runs")
    )
    port: Annotated[int, Option(min=0, max=65535, help="port; 0: any that is free")] = 8600
    host: Annotated[str, Option(help="address; beyond this machine only with a token")] = "127.0.0.1"
    token: Annotated[
        str, Option(envvar="TILTH_UI_TOKEN", help="token that is needed; the printed address is good for one visit")
    ] = ""
    no_open: Annotated[bool, Option("--no-open", help="print the address, and open no browser")] = False


@command("doctor", "doctor:examine")
class DoctorCommand(NamedTuple):
    """Examine this machine and suggest settings."""

    as_json: JsonOption = False


simulation = group("simulate", "Predict by simulation.")


@command("rollout", "studies.simulate_rollout:rollout", simulation)
class SimulateRolloutCommand(NamedTuple):
    """Compare synchronous and asynchronous rollouts of a recipe: speed, staleness, idle time.

    As in: tilth simulate rollout addition-grpo --gpus 64 --device-type h100 --lengths runs/addition-grpo-001

    Lengths of completions are drawn from the run or file with the recipe's seed. generate: devices with replicas, the
    fastest of several divisions. Keys of --json: mode, generating, samples_per_minute, tokens_per_second, replica_idle,
    trainer_idle, kv_use, staleness (updates -> share), load_wait, moves, seconds, lengths (mean tokens admitted and
    trained).
    """

    name: RecipeArgument
    gpus: Annotated[int, Option(min=2, help="devices in all")]
    lengths: Annotated[
        Path, Option(metavar="FILE|RUN", help="lengths in tokens, one a line or a JSON list; or a run that has sampled")
    ]
    overrides: OverridesArgument = None
    device_type: Annotated[
        str, Option(metavar="TYPE", help="a100-80g, h100, ..., a file TYPE.toml, or this machine: here")
    ] = "here"
    as_json: JsonOption = False


guard = group("guard", "Find who stopped, slowed or falsified a job.")


@command("inject", "studies.drill:drill", guard)
class GuardInjectCommand(NamedTuple):
    """Let a fault happen to a worker of one's own active run on this machine, as a drill.

    kill, stop: signals. busy, gil, block: its thread loops, holds the GIL, or reads, for ever. pause: it sleeps 4 s.
    slow: its forward passes take longer from then on. exception. collective: one that no other rank calls. nan, flip:
    in one weight. nan-gradient, flip-gradient: in one gradient (--at optimizer). disk-full: its writes fail from then
    on. files: it can open no more. oom: an allocation too large for any machine. clock: an hour ahead. Keys of --json:
    kind, rank, pid, time.
    """

    run: RunArgument
    kind: Annotated[str, Argument(metavar="KIND", help="kill, stop, busy, gil, block, slow, nan, flip ...: see below")]
    rank: Annotated[int, Option(help="worker that it happens to")] = 0
    after: Annotated[float, Option(min=0.0, help="seconds to wait before")] = 0.0
    at: Annotated[str, Option(metavar="MOMENT", help="begin of an operation or a call: optimizer, policy.update")] = ""
    as_json: JsonOption = False


@command("update", "guard:update", guard)
class GuardUpdateCommand(NamedTuple):
    """Update keys or code of an active run: another controller goes on with them, from the state in memory.

    As in: tilth guard update runs/addition-grpo-001 optimizer.lr=1e-4 --now. Without keys and plugins, the code of
    Tilth is imported again, after a checkpoint. At the next restart, in 24 hours at the latest. An update that fails
    before its first commit is undone, but for the code of Tilth. Keys of --json: number, changes (key -> message),
    urgent.
    """

    run: RunArgument
    overrides: OverridesArgument = None
    plugin: Annotated[
        list[str] | None,
        Option("--plugin", metavar="FILE.py", help="your code: takes the place of the plugin of this name; repeatable"),
    ] = None
    now: Annotated[bool, Option("--now", help="after the step that runs, not at the next restart")] = False
    as_json: JsonOption = False


@command("check", "guard:check", guard)
class GuardCheckCommand(NamedTuple):
    """Test this machine for two seconds: bits of products, compute and memory rates, transfers over loopback.

    Exit code 1 if products of equal matrices differ or bytes do not arrive; rates are only told, and a busy machine has
    lower ones. Keys of --json: sound, compute (GFLOP/s of a thread), memory, loopback (GB/s), unequal (products),
    failed (transfers), seconds.
    """

    as_json: JsonOption = False


@command("locate", "guard:locate", guard)
class GuardLocateCommand(NamedTuple):
    """Name the ranks that hold up a hung job, by the dumps of PyTorch's flight recorder.

    NCCL writes them at a timeout (TORCH_FR_DUMP_TEMP_FILE). Nothing in them is executed. Keys of --json: dumps, silent
    (members of groups without a dump), verdict (kind, ranks, evidence, details; null: nobody waits).
    """

    folder: Annotated[Path, Argument(metavar="FOLDER", help="dumps, one file a rank, named ...RANK")]
    as_json: JsonOption = False


@command("replay", "studies.guard_replay:print_replay", guard)
class GuardReplayCommand(NamedTuple):
    """Replay a step of a stored run on groups of its workers: did a device or the data make what was wrong?

    From the newest checkpoint before the step, on this machine, in a copy of the run's folder; every worker twice, in
    two groupings, and all of them once in the run's own layout. Keys of --json: step, checkpoint, ranks, verdict (kind,
    ranks, evidence, details; null: nothing is wrong), recorded (the run's metrics came back), outcomes (of each group:
    bits, finite, about).
    """

    run: RunArgument
    step: Annotated[int, Option(min=1, help="step to replay")]
    ranks: Annotated[str, Option(help="workers to replay on, as 0,1,3; default: all")] = ""
    as_json: JsonOption = False


MEASURED = Option("--measured", metavar="FILE", help="JSON of benchmarks/faults.py, for detect, hangs and restart")
TRACE = Option("--trace", metavar="FILE", help="faults of nodes, in InfiniteHBD's JSON")


@command("simulate", "studies.guard_simulate:simulate", guard)
class GuardSimulateCommand(NamedTuple):
    """Simulate the effective training time (ETTR) of a recipe under a trace of faults.

    Beside its own settings (run.save_every, guard.hang_after): other intervals of checkpoints, spares and detection
    times, and each mechanism switched off. The seconds of the options are assumptions; --measured replaces those of
    detection and restart by medians of ranks that were killed and stopped.
    Keys of --json: nodes, days, incidents, probability (of a fault of a node in a day), standby (spares for 99 % of
    days), policy, rows (about, ettr, worst_hour, from_disk, stops, lost: cause -> seconds).
    """

    name: RecipeArgument
    trace: Annotated[Path, TRACE]
    overrides: OverridesArgument = None
    trace_nodes: Annotated[int, Option(min=1, help="nodes of the trace, with those that never failed")] = 400
    nodes: Annotated[int | None, Option(min=1, help="nodes of the job; default: those of the trace")] = None
    step: Annotated[float, Option(min=0.001, help="seconds of a step")] = 10.0
    detect: Annotated[float, Option(min=0.0, help="seconds until a crash is seen")] = 1.0
    hangs: Annotated[float, Option(min=0.0, max=0.95, help="share of failures that guard.hang_after must see")] = 0.1
    restart: Annotated[float, Option(min=0.0, help="seconds from there to the next new step")] = 10.0
    spares: Annotated[int | None, Option(min=0, help="warm spares; default: enough for 99 % of days")] = None
    wake: Annotated[float, Option(min=0.0, help="seconds until a spare stands in")] = 5.0
    cold: Annotated[float, Option(min=0.0, help="seconds to start another node; inf: repaired ones only")] = 600.0
    measurements: Annotated[Path | None, MEASURED] = None
    without: Annotated[str, Option(help="where there is no node: wait, or shrink")] = "wait"
    seed: SeedOption = 0
    as_json: JsonOption = False


def main() -> None:
    """Entry point of the ``tilth`` script."""
    end_uncollected()
    app(obj=COMMAND)


def control(handover: Mapping[str, Any]) -> None:
    """Entry point of a controller that the fork server of a supervisor has forked: the command as it was given."""
    from tilth.launch.supervisor import Inherited

    end_uncollected()
    handed = Inherited.of(handover)
    handed.beat()
    app(obj=handed)
