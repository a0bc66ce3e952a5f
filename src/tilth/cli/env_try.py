"""``tilth env try``: play one episode of an environment, by hand or with a model, and print each turn. ``tilth env
records``: write the records that an environment brings."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import typer

from tilth.cli.main import EnvRecordsCommand, EnvTryCommand
from tilth.config.plugins import declared
from tilth.core.errors import DataError
from tilth.envs.calls import message_of
from tilth.envs.environment import shortened
from tilth.envs.pool import Answer, EnvironmentPool
from tilth.envs.process import load_environment

MOST_TEXT = 2000
"""Most characters of a message that are printed."""
HAND = "by hand: an empty line ends a turn, Ctrl-D the episode"


def play(options: EnvTryCommand) -> None:
    """Play the episode and print it. Raises DataError for an ``info`` that is no JSON object."""
    record = _record(options.info)
    own = declared("environment").get(options.environment)  # of a plugin that the command line names
    plugins = [own.plugin] if own and own.plugin else ()
    pool = EnvironmentPool(options.environment, timeout=options.seconds, plugins=plugins)
    try:
        (_by_model if options.model else _by_hand)(pool, record, options)
    finally:
        pool.close()


def write_records(options: EnvRecordsCommand) -> None:
    """Write an environment's records, one to a line. Raises DataError for a file that exists."""
    environment, file = options.environment, options.file
    if file.exists():
        raise DataError(f"{file} exists; remove it or choose another name", key="FILE.jsonl")
    kind = load_environment(environment)
    kind.prepare()
    lines = [json.dumps(dict(record), ensure_ascii=False) for record in kind.records(options.most)]
    file.write_text("".join(f"{line}\n" for line in lines))
    typer.echo(f"{len(lines):,} records; train on them with data.source={file} rollout.environment={environment}")


def _record(info: str) -> dict[str, Any]:
    try:
        found = json.loads(info)
    except ValueError as error:
        raise DataError(f"--info {info!r} is not JSON: {error}", key="info") from None
    if not isinstance(found, dict):
        message = f'--info is {info!r}, not an object such as {{"prompt": "1+1=", "answer": "2"}}'
        raise DataError(message, key="info.type")
    return {"prompt": "", "messages": [], **found}


def _by_hand(pool: EnvironmentPool, record: dict[str, Any], options: EnvTryCommand) -> None:
    pool.begin(0, record)
    begun, earned, over = _answer(pool), 0.0, False
    said: list[Mapping[str, Any]] = list(begun["messages"])
    if not options.as_json:
        for schema in begun["tools"]:
            typer.echo(f"tool {json.dumps(schema['function'])}")
        _show(said)
        typer.echo(HAND, err=True)
    for text, _ in zip(_typed(), range(options.turns)):
        message = message_of(text)
        pool.step(0, message)
        found = _answer(pool)
        said += [message, *found["messages"]]
        earned += found.get("reward", 0.0)
        if not options.as_json:
            _show(found["messages"])
            if "reward" in found:
                typer.echo(f"[reward of the turn {found['reward']:g}]")
        if over := found["done"]:
            break
    pool.reward(0, "" if over else "there are no further turns")
    score = _answer(pool)
    score["value"] = None if score["value"] is None else score["value"] + earned
    typer.echo(json.dumps({"messages": said, **score}) if options.as_json else _scored(score))


def _typed() -> Iterator[str]:
    """Yield turns from standard input: lines up to an empty one."""
    lines: list[str] = []
    for line in sys.stdin:
        if line.strip():
            lines.append(line.rstrip("\n"))
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _answer(pool: EnvironmentPool) -> Any:
    """Return the value of the next answer; DataError says why there is none."""
    answers: list[Answer] = []
    while not answers:
        answers = pool.poll(60.0)
    if answers[0].status != "ok":
        raise DataError(f"{answers[0].op}: {answers[0].reason}", key=f"environment.{answers[0].status}")
    return answers[0].value


def _show(messages: Sequence[Mapping[str, Any]]) -> None:
    for message in messages:
        text = message["content"].encode(errors="replace").decode()  # half a character is no UTF-8
        typer.echo(f"[{message['role']}] {shortened(text, MOST_TEXT)}")


def _scored(score: Mapping[str, Any]) -> str:
    value = f"missing: {score['reason']}" if score["value"] is None else f"{score['value']:g}"
    return f"reward {value}" + "".join(f", {name} {part:g}" for name, part in score["parts"].items())


def _by_model(pool: EnvironmentPool, record: dict[str, Any], options: EnvTryCommand) -> None:
    from tilth.data.template import make_template
    from tilth.engines.options import EngineOptions
    from tilth.engines.request import SamplingParams
    from tilth.rollout.episodes import EpisodeRequest, Limits, Player
    from tilth.runs.models import load_model, make_engine, wants_tokenizer

    loaded = load_model(options.model)
    tokenizer, context = wants_tokenizer(loaded), loaded.config.max_positions
    own = loaded.template if loaded.run is not None else "model" if tokenizer.chat_template else ""
    template = make_template(own, tokenizer)
    engine = make_engine(loaded, EngineOptions(seed=options.seed, max_rows=1))
    params = SamplingParams(options.max_tokens, options.temperature, stop=loaded.stop, stop_tokens=template.stops)
    player = Player(engine, template, tokenizer, pool, Limits(options.turns, context))
    (result,) = player.play([EpisodeRequest(0, record)], params)
    t = result.trajectory
    borders = [*(segment.start for segment in t.segments), len(t.tokens)]
    parts = [
        {
            "role": segment.role,
            "tokens": t.tokens[a:b].tolist(),
            "mask": t.mask[a:b].tolist(),
            "text": tokenizer.decode(t.tokens[a:b].tolist(), special=True),
            "reward": sum(reward for at, reward in t.turn_rewards if a <= at < b),
        }
        for segment, (a, b) in zip(t.segments, pairwise(borders))
    ]
    score = {"value": t.reward, "parts": result.parts, "reason": result.reason}
    if options.as_json:
        typer.echo(json.dumps({"segments": parts, "finish": t.finish, "turns": result.turns, **score}))
        return
    for part in parts:
        earned = f", reward {part['reward']:g}" if part["reward"] else ""
        about = f"{part['role']}, {len(part['tokens'])} tokens, {sum(part['mask'])} trained{earned}"
        typer.echo(f"[{about}] {part['text']!r}")
    typer.echo(f"{result.turns} turns, {len(t.tokens)} tokens, finish {t.finish}; {_scored(score)}")
