"""Continue a text by a trained model."""

import json
from dataclasses import dataclass
from typing import Any

import typer

from tilth.core.trajectory import Trajectory
from tilth.data.sources import Prompt
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.flows.model import load_model, make_engine, wants_tokenizer
from tilth.rollout.request import Request, SamplingParams

MAX_TOKENS = 64


@dataclass(frozen=True)
class GenerateOptions:
    """What is asked for, as on the command line."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    """None: 64, or what the context leaves."""
    stop: tuple[str, ...] = ()
    seed: int = 0
    template: str | None = None
    """None: as the run made prompts of texts; "": the text as it stands."""


def speak(model: str, prompt: str, wish: GenerateOptions, *, logprobs: bool, as_json: bool) -> None:
    """Print the completions: their text, the tokens with their log-probs, or JSON."""
    found, tokenizer = complete(model, prompt, wish)
    for trajectory in found:
        if as_json:
            typer.echo(json.dumps(as_object(trajectory, tokenizer, logprobs=logprobs), ensure_ascii=False))
        else:
            typer.echo(trajectory.text)
            for token, logprob in pairs(trajectory, tokenizer) if logprobs else ():
                typer.echo(f"  {logprob:8.4f}  {token!r}")


def complete(model: str, prompt: str, wish: GenerateOptions) -> tuple[list[Trajectory], Tokenizer]:
    """``wish.n`` completions of a prompt by the model that ``load_model`` finds."""
    loaded = load_model(model)
    tokenizer = wants_tokenizer(loaded)
    template = make_template(loaded.template if wish.template is None else wish.template, tokenizer)
    ids = template.prompts([Prompt(0, prompt)])[0]
    room = loaded.config.max_positions - len(ids)
    most = wish.max_tokens or max(min(MAX_TOKENS, room), 1)
    params = SamplingParams(
        max_tokens=most,
        temperature=wish.temperature,
        top_k=wish.top_k,
        top_p=wish.top_p,
        stop=wish.stop or loaded.stop,
        stop_tokens=template.stops,
    )
    longest = min(loaded.config.max_positions, len(ids) + most)
    engine = make_engine(loaded, seed=wish.seed, max_rows=wish.n, max_length=longest)
    return engine.generate([Request(id=i, prompt=ids, params=params) for i in range(wish.n)]), tokenizer


def pairs(trajectory: Trajectory, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """Each chosen token as text, with its log-prob (nats) at the sampling temperature."""
    chosen = trajectory.mask.astype(bool)
    texts = [tokenizer.decode([token], special=True) for token in trajectory.tokens[chosen]]
    return list(zip(texts, trajectory.logprobs[chosen].tolist()))


def as_object(trajectory: Trajectory, tokenizer: Tokenizer, *, logprobs: bool) -> dict[str, Any]:
    """A completion as plain data."""
    ids = trajectory.tokens[trajectory.mask.astype(bool)].tolist()
    found: dict[str, Any] = {"text": trajectory.text, "finish": trajectory.finish, "tokens": ids}
    if logprobs:
        found["logprobs"] = [logprob for _, logprob in pairs(trajectory, tokenizer)]
    return found
