"""``tilth generate``: continue a text by a trained model."""

import json
import sys
from pathlib import Path
from typing import Any

import typer

from tilth.cli.main import GenerateCommand
from tilth.core.errors import DataError
from tilth.core.trajectory import Trajectory
from tilth.data.columns import Prompt
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.runs.models import load_model, make_engine, wants_tokenizer
from tilth.ui.format import plain

MAX_TOKENS = 64


def speak(options: GenerateCommand) -> None:
    """Print the completions: their text, their tokens with log-probs, or JSON."""
    found, tokenizer = complete(options)
    lines = []
    for trajectory in found:
        if options.as_json:
            lines.append(json.dumps(as_object(trajectory, tokenizer, logprobs=options.logprobs), ensure_ascii=False))
        else:
            lines.append(plain(trajectory.text) if sys.stdout.isatty() else trajectory.text)
            lines += [f"  {p:8.4f}  {token!r}" for token, p in pairs(trajectory, tokenizer) if options.logprobs]
    typer.echo("\n".join(lines))


def complete(options: GenerateCommand) -> tuple[list[Trajectory], Tokenizer]:
    """Sample ``options.n`` completions of a prompt."""
    loaded = load_model(options.model)
    tokenizer = wants_tokenizer(loaded)
    name = loaded.template if options.template is None else options.template
    template = make_template(name, tokenizer, key="--template")
    ids = template.prompts([Prompt(0, options.prompt)])[0]
    room = loaded.config.max_positions - len(ids)
    most = options.max_tokens or max(min(MAX_TOKENS, room), 1)
    params = SamplingParams(
        max_tokens=most, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        stop=tuple(options.stop or ()) or loaded.stop, stop_tokens=template.stops,
        schema="" if options.schema is None else _read(options.schema),
    )  # fmt: skip
    longest = min(loaded.config.max_positions, len(ids) + most)
    engine = make_engine(loaded, EngineOptions(seed=options.seed, max_rows=options.n, max_length=longest))
    return engine.generate([Request(id=i, prompt=ids, params=params) for i in range(options.n)]), tokenizer


def _read(schema: Path) -> str:
    """Return the text of a schema's file. Raises DataError."""
    try:
        return json.dumps(json.loads(schema.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(f"--schema {schema} is no file of JSON: {error}", key="schema") from None


def pairs(trajectory: Trajectory, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """Return each sampled token as text, with its log-prob (nats) at the sampling temperature."""
    chosen = trajectory.mask.astype(bool)
    texts = [tokenizer.decode([token], special=True) for token in trajectory.tokens[chosen]]
    return list(zip(texts, trajectory.logprobs[chosen].tolist()))


def as_object(trajectory: Trajectory, tokenizer: Tokenizer, *, logprobs: bool) -> dict[str, Any]:
    """Return a completion as plain data."""
    ids = trajectory.tokens[trajectory.mask.astype(bool)].tolist()
    found: dict[str, Any] = {"text": trajectory.text, "finish": trajectory.finish, "tokens": ids}
    if logprobs:
        found["logprobs"] = [logprob for _, logprob in pairs(trajectory, tokenizer)]
    return found
