"""Evaluate a model on prompts: sample from the engine, score in the pool, report pass@k and avg@k with intervals."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.errors import DataError, RewardError
from tilth.core.files import writing
from tilth.core.trajectory import Trajectory
from tilth.data.columns import Prompt
from tilth.data.prompts import PromptSet
from tilth.data.template import Template, make_template
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.envs.pool import EnvironmentPool
from tilth.rewards.process_pool import Outcome, RewardPool, Status, commonest
from tilth.rl.passk import Interval, avg_at_k, interval, pass_at_k
from tilth.rollout.episodes import EpisodeRequest, EpisodeResult, Limits, Player
from tilth.runs.files import to_json
from tilth.runs.models import LoadedModel, make_engine, wants_tokenizer

SAMPLES = 1 << 20
"""Trajectory id = index of the prompt * SAMPLES + number of the sample, so that a sample's random numbers do not depend
on the number of prompts or samples."""

_STATUS: Mapping[str, Status] = {one: one for one in get_args(Status)}
GREEDY = SamplingParams(temperature=0.0)
Progress = Callable[[int, int], None]
"""Called with (completions done, all completions), first with 0 done."""


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation; DataError for impossible ones."""

    k: tuple[int, ...] = (1,)
    n: int = 0
    """Samples of each prompt; 0: the greatest k."""
    sampling: SamplingParams = GREEDY
    template: str = ""
    seed: int = 0
    max_rows: int = 256

    def __post_init__(self) -> None:
        if not self.k or min(self.k) < 1:
            raise DataError(f"k is {', '.join(map(str, self.k)) or 'empty'}; use whole numbers of at least 1", key="k")
        if self.n and self.n < max(self.k):
            raise DataError(
                f"pass@{max(self.k)} needs at least {max(self.k)} samples of each prompt; n is {self.n}", key="n"
            )
        if self.samples > 1 and self.sampling.temperature == 0:
            raise DataError(
                f"temperature 0 gives {self.samples} equal samples of a prompt; use a higher temperature",
                key="temperature",
            )

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return self.n or max(self.k)


@dataclass(frozen=True)
class Sample:
    """One completion and its outcome."""

    prompt: Prompt
    number: int
    trajectory: Trajectory
    outcome: Outcome

    @property
    def score(self) -> float:
        """The part ``correct`` or else the reward; NaN: missing."""
        return self.outcome.verdict

    @property
    def right(self) -> bool | None:
        """True if it is right; None if its reward is missing."""
        return None if math.isnan(self.score) else self.score >= 1


@dataclass(frozen=True)
class Evaluation:
    """All completions, prompt by prompt, ``how.samples`` of each, and their statistics."""

    how: EvalSettings
    samples: list[Sample]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of ``generate`` and ``score``."""

    def _matrix(self, values: Callable[[Sample], float]) -> np.ndarray:
        """float64 [prompts, samples]; NaN: missing."""
        return np.array([values(s) for s in self.samples], np.float64).reshape(-1, self.how.samples)

    @cached_property
    def scores(self) -> np.ndarray:
        """float64 [prompts, samples]; NaN: missing."""
        return self._matrix(lambda s: s.score)

    def passes(self, k: int) -> tuple[Interval, int]:
        """Return pass@k, and the number of prompts with enough known rewards."""
        known = ~np.isnan(self.scores)
        return self._over_prompts(pass_at_k((self.scores >= 1).sum(1), known.sum(1), k))

    def averages(self, k: int) -> tuple[Interval, int]:
        """Return avg@k, and the number of prompts with enough known rewards."""
        return self._over_prompts(avg_at_k(self.scores, k))

    def _over_prompts(self, values: np.ndarray) -> tuple[Interval, int]:
        return interval(values, self.how.seed), int((~np.isnan(values)).sum())

    def parts(self) -> dict[str, Interval]:
        """Return the mean of the reward and of each of its parts, over prompts."""
        found = {"reward": self._mean(lambda s: math.nan if s.outcome.value is None else s.outcome.value)}
        for name in sorted({name for s in self.samples for name in s.outcome.parts}):
            found[name] = self._mean(lambda s, name=name: s.outcome.parts.get(name, math.nan))  # type: ignore[misc]
        return found

    def _mean(self, values: Callable[[Sample], float]) -> Interval:
        matrix = self._matrix(values)
        known = ~np.isnan(matrix)
        count = known.sum(1)
        means = np.where(count > 0, np.where(known, matrix, 0).sum(1) / np.maximum(count, 1), np.nan)
        return interval(means, self.how.seed)

    @property
    def graded(self) -> bool:
        """True if some score is neither 0 nor 1, so that their mean is no share of right answers."""
        return not np.isin(self.scores[~np.isnan(self.scores)], (0.0, 1.0)).all()

    @property
    def missing(self) -> list[Sample]:
        """Samples whose reward is missing, which are in no mean."""
        return [s for s in self.samples if s.outcome.value is None]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(s.trajectory.completion_length for s in self.samples)

    def summary(self) -> dict[str, Any]:
        """Return all numbers as plain data; only ``seconds`` and ``tokens_per_second`` differ between evaluations."""
        how, lengths = self.how, [s.trajectory.completion_length for s in self.samples]
        cut = sum(s.trajectory.finish == "length" for s in self.samples)
        return {
            "prompts": len(self.samples) // how.samples,
            "samples": how.samples,
            "pass": {str(k): _plain(*self.passes(k)) for k in how.k},
            "avg": {str(k): _plain(*self.averages(k)) for k in how.k},
            "graded": self.graded,
            "parts": {name: found._asdict() for name, found in self.parts().items()},
            "missing": len(self.missing),
            "timed_out": sum(s.outcome.status == "timeout" for s in self.missing),
            "missing_reason": self.missing[0].outcome.reason if self.missing else "",
            "length": {"mean": sum(lengths) / len(lengths), "max": max(lengths), "cut": cut / len(lengths)},
            "tokens": self.tokens,
            "sampling": {name: value for name, value in asdict(how.sampling).items() if name != "stop_tokens"},
            "template": how.template,
            "seed": how.seed,
            "seconds": dict(self.seconds),
            "tokens_per_second": self.tokens / max(self.seconds.get("generate", 0.0), 1e-9),
        }

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield every completion as plain data: ``FIELDS``."""
        for sample in self.samples:
            yield {name: value(sample) for name, (_, value) in FIELDS.items()}


def _generated(name: str) -> Callable[[Sample], Any]:
    """Return a function from a sample to a column of the tokens that follow its prompt."""
    return lambda s: getattr(s.trajectory, name)[s.trajectory.prompt_length :].tolist()


FIELDS: dict[str, tuple[pa.DataType, Callable[[Sample], Any]]] = {
    "prompt": (pa.int64(), lambda s: s.prompt.index),
    "sample": (pa.int32(), lambda s: s.number),
    "prompt_text": (pa.string(), lambda s: s.prompt.text),
    "text": (pa.string(), lambda s: s.trajectory.text),
    "answer": (pa.string(), lambda s: s.prompt.answer),
    "reward": (pa.float64(), lambda s: s.outcome.value),  # null: missing
    "right": (pa.bool_(), lambda s: s.right),
    "parts": (pa.map_(pa.string(), pa.float64()), lambda s: s.outcome.parts),
    "reason": (pa.string(), lambda s: s.outcome.reason),  # why the reward is missing
    "finish": (pa.string(), lambda s: s.trajectory.finish),
    "prompt_tokens": (pa.list_(pa.int32()), lambda s: s.trajectory.tokens[: s.trajectory.prompt_length].tolist()),
    "tokens": (pa.list_(pa.int32()), _generated("tokens")),
    "logprobs": (pa.list_(pa.float32()), _generated("logprobs")),
}
"""Columns of a completion: their types in Parquet, and how they are read of a sample."""


def _plain(found: Interval, prompts: int) -> dict[str, Any]:
    return {**found._asdict(), "prompts": prompts}


def evaluate(
    model: LoadedModel, prompts: PromptSet, pool: RewardPool, how: EvalSettings, progress: Progress | None = None
) -> Evaluation:
    """Generate and score ``how.samples`` completions of each prompt, a pure function of the arguments.

    DataError for a prompt that does not fit the context, or no prompts; RewardError if all rewards are missing.
    """
    asked, template = _asked(prompts), make_template(how.template, wants_tokenizer(model))
    ids = template.prompts(asked)
    _check_lengths(asked, ids, how, model.config.max_positions)
    pool.ready()
    engine, params = _engine(model, how, template, len(asked), max(map(len, ids)) + how.sampling.max_tokens)
    requests = [  # adjacent for one prompt, so that they share its prefill
        Request(prompt.index * SAMPLES + number, tokens, params, i, prompt.index, media=prompt.media)
        for i, (prompt, tokens) in enumerate(zip(asked, ids))
        for number in range(how.samples)
    ]
    begin, found, show = time.perf_counter(), dict[int, Trajectory](), progress or (lambda done, of: None)
    show(0, len(requests))
    for trajectory in EngineRounds(engine).drain(requests):
        found[trajectory.id] = trajectory
        show(len(found), len(requests))
    done = [(asked[request.group], found[request.id]) for request in requests]
    middle = time.perf_counter()
    outcomes = pool.score([(t.id, prompt.text, t.text, prompt.info) for prompt, t in done])
    seconds = {"generate": middle - begin, "score": time.perf_counter() - middle}
    return _evaluation(how, asked, list(zip((t for _, t in done), outcomes)), seconds)


def evaluate_episodes(
    model: LoadedModel,
    prompts: PromptSet,
    pool: EnvironmentPool,
    how: EvalSettings,
    turns: int,
    progress: Progress | None = None,
) -> Evaluation:
    """Play ``how.samples`` episodes of each prompt, of at most this many turns; the environment gives the rewards.

    Errors as of ``evaluate``. ``turns`` is a part of every outcome.
    """
    asked, context, tokenizer = _asked(prompts), model.config.max_positions, wants_tokenizer(model)
    template = make_template(how.template, tokenizer)
    engine, params = _engine(model, how, template, len(asked), context)
    requests = [
        EpisodeRequest(prompt.index * SAMPLES + number, json.loads(prompt.episode), i, prompt.index)
        for i, prompt in enumerate(asked)
        for number in range(how.samples)
    ]
    show = progress or (lambda done, of: None)
    show(0, len(requests))
    begin = time.perf_counter()
    found = Player(engine, template, tokenizer, pool, Limits(turns, context)).play(requests, params)
    seconds = {"generate": time.perf_counter() - begin, "score": 0.0}
    show(len(requests), len(requests))
    return _evaluation(how, asked, [(one.trajectory, _outcome(one)) for one in found], seconds)


def _asked(prompts: PromptSet) -> list[Prompt]:
    if not len(prompts):
        raise DataError("there are no prompts to evaluate on", key="prompts")
    return list(prompts)


def _engine(
    model: LoadedModel, how: EvalSettings, template: Template, prompts: int, longest: int
) -> tuple[GenerationEngine, SamplingParams]:
    """Return an engine for sequences of at most ``longest`` tokens, and how it samples."""
    rows = min(how.max_rows, prompts * how.samples)
    engine = make_engine(model, EngineOptions(seed=how.seed, max_rows=rows, max_length=longest))
    return engine, SamplingParams(**{**asdict(how.sampling), "stop_tokens": template.stops})


def _evaluation(
    how: EvalSettings, asked: list[Prompt], done: list[tuple[Trajectory, Outcome]], seconds: Mapping[str, float]
) -> Evaluation:
    if all(o.value is None for _, o in done):
        why = commonest(o.reason for _, o in done)
        raise RewardError(f"all {len(done)} rewards are missing; most often: {why}", key="reward")
    samples = [Sample(asked[i // how.samples], i % how.samples, t, o) for i, (t, o) in enumerate(done)]
    return Evaluation(how, samples, seconds)


def _outcome(one: EpisodeResult) -> Outcome:
    parts, value = {"turns": float(one.turns), **one.parts}, one.trajectory.reward
    return Outcome(value, parts, "" if value is not None else one.reason, 0.0, _STATUS.get(one.status, "error"))


def _check_lengths(asked: list[Prompt], ids: list[list[int]], how: EvalSettings, context: int) -> None:
    for prompt, tokens in zip(asked, ids):
        if not tokens:
            raise DataError(f"prompt {prompt.index} has no tokens", key=f"prompts.{prompt.index}.tokens")
        if len(tokens) + how.sampling.max_tokens > context:
            raise DataError(
                f"prompt {prompt.index} has {len(tokens)} tokens; with max_tokens = {how.sampling.max_tokens} that "
                f"exceeds the model's context of {context}",
                key=f"prompts.{prompt.index}.length",
            )


# ---- files ----


def check_out(path: Path) -> None:
    """Raise DataError if completions cannot be written to this path."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{str(path)!r} must end in .jsonl or .parquet", key="path.suffix")
    if not path.parent.is_dir():
        raise DataError(f"{str(path)!r}: there is no folder {str(path.parent)!r}", key="path.parent")


def write_completions(path: Path, evaluation: Evaluation) -> None:
    """Write every completion with tokens, log-probs and reward, as JSON lines or Parquet by suffix. StorageError."""
    with writing(path):
        if path.suffix == ".jsonl":
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(to_json(record) + "\n" for record in evaluation.records())
        else:
            rows = [{**record, "parts": list(record["parts"].items())} for record in evaluation.records()]
            pq.write_table(
                pa.Table.from_pylist(rows, schema=pa.schema([(name, kind) for name, (kind, _) in FIELDS.items()])), path
            )
