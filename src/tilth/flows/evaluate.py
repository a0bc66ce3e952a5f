"""How good a model is at the prompts of a dataset: samples from the engine, scored in the pool, in honest numbers."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.errors import DataError, RewardError
from tilth.core.target import writing
from tilth.core.trajectory import Trajectory
from tilth.data.prompts import PromptSet
from tilth.data.sources import Prompt
from tilth.data.template import make_template
from tilth.flows.model import LoadedModel, make_engine, wants_tokenizer
from tilth.rewards.process_pool import Outcome, RewardPool
from tilth.rl.passk import Interval, avg_at_k, interval, pass_at_k
from tilth.rollout.protocol import GenerationEngine
from tilth.rollout.request import Request, SamplingParams
from tilth.runs.files import to_json

SAMPLES = 1 << 20
"""Trajectory ids are index of the prompt times this plus the number of the sample: neither how many prompts nor how
many samples are asked for changes the random numbers of one."""

GREEDY = SamplingParams(temperature=0.0)
Progress = Callable[[int, int], None]
"""Told (completions done, of all): first when nothing stands in the way of the first."""


@dataclass(frozen=True)
class How:
    """What is asked for. Raises DataError on what cannot be."""

    k: tuple[int, ...] = (1,)
    n: int = 0
    """Samples of each prompt; 0: the greatest k."""
    sampling: SamplingParams = GREEDY
    template: str = ""
    seed: int = 0
    max_rows: int = 256

    def __post_init__(self) -> None:
        if not self.k or min(self.k) < 1:
            raise DataError(
                f"k is {', '.join(map(str, self.k)) or 'empty'}; it must be whole numbers of at least 1", key="k"
            )
        if self.n and self.n < max(self.k):
            raise DataError(
                f"pass@{max(self.k)} needs at least {max(self.k)} samples of each prompt; n is {self.n}", key="n"
            )
        if self.samples > 1 and self.sampling.temperature == 0:
            raise DataError(
                f"temperature 0 says the same each time; {self.samples} samples of a prompt need more",
                key="temperature",
            )

    @property
    def samples(self) -> int:
        """Samples of each prompt."""
        return self.n or max(self.k)


@dataclass(frozen=True)
class Sample:
    """One completion and what became of it."""

    prompt: Prompt
    number: int
    said: Trajectory
    outcome: Outcome

    @property
    def score(self) -> float:
        """The part ``correct`` or else the reward; NaN: missing."""
        return self.outcome.verdict

    @property
    def right(self) -> bool | None:
        """Whether it is right; None: nobody knows."""
        return None if math.isnan(self.score) else self.score >= 1


@dataclass(frozen=True)
class Evaluation:
    """All completions, prompt by prompt, ``how.samples`` of each, and the numbers that follow from them."""

    how: How
    samples: list[Sample]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of generation and of scoring."""

    def _matrix(self, values: Callable[[Sample], float]) -> np.ndarray:
        """float64 [prompts, samples]; NaN: missing."""
        return np.array([values(s) for s in self.samples], np.float64).reshape(-1, self.how.samples)

    @cached_property
    def scores(self) -> np.ndarray:
        """float64 [prompts, samples]; NaN: missing."""
        return self._matrix(lambda s: s.score)

    def passes(self, k: int) -> tuple[Interval, int]:
        """pass@k, and the prompts with enough known rewards that it is the mean of."""
        known = ~np.isnan(self.scores)
        return self._over_prompts(pass_at_k((self.scores >= 1).sum(1), known.sum(1), k))

    def averages(self, k: int) -> tuple[Interval, int]:
        """avg@k, likewise."""
        return self._over_prompts(avg_at_k(self.scores, k))

    def _over_prompts(self, values: np.ndarray) -> tuple[Interval, int]:
        return interval(values, self.how.seed), int((~np.isnan(values)).sum())

    def parts(self) -> dict[str, Interval]:
        """Mean of the reward and of each of its parts, over prompts."""
        names = sorted({name for s in self.samples for name in s.outcome.parts})
        matrices = {"reward": self._matrix(lambda s: math.nan if s.outcome.value is None else s.outcome.value)}
        for name in names:
            matrices[name] = self._matrix(lambda s, name=name: s.outcome.parts.get(name, math.nan))  # type: ignore[misc]
        return {name: interval(_means(values), self.how.seed) for name, values in matrices.items()}

    @property
    def graded(self) -> bool:
        """Whether a score is neither 0 nor 1, so that no mean of them is a share of right answers."""
        return not np.isin(self.scores[~np.isnan(self.scores)], (0.0, 1.0)).all()

    @property
    def missing(self) -> list[Sample]:
        """Samples whose reward could not be had: they are in no mean."""
        return [s for s in self.samples if s.outcome.value is None]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(s.said.completion_length for s in self.samples)

    def summary(self) -> dict[str, Any]:
        """All numbers as plain data; only ``seconds`` and ``tokens_per_second`` may differ next time."""
        how, lengths = self.how, [s.said.completion_length for s in self.samples]
        cut = sum(s.said.finish == "length" for s in self.samples)
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
        """Every completion as plain data."""
        for s in self.samples:
            begin = s.said.prompt_length
            yield {
                "prompt": s.prompt.index,
                "sample": s.number,
                "prompt_text": s.prompt.text,
                "text": s.said.text,
                "answer": s.prompt.answer,
                "reward": s.outcome.value,
                "right": s.right,
                "parts": s.outcome.parts,
                "reason": s.outcome.reason,
                "finish": s.said.finish,
                "prompt_tokens": s.said.tokens[:begin].tolist(),
                "tokens": s.said.tokens[begin:].tolist(),
                "logprobs": s.said.logprobs[begin:].tolist(),
            }


def _means(values: np.ndarray) -> np.ndarray:
    """Mean of what is known in each row; NaN where nothing is."""
    known = ~np.isnan(values)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, values, 0).sum(1) / np.maximum(count, 1), np.nan)


def _plain(found: Interval, prompts: int) -> dict[str, Any]:
    return {**found._asdict(), "prompts": prompts}


def evaluate(
    model: LoadedModel, prompts: PromptSet, pool: RewardPool, how: How, progress: Progress | None = None
) -> Evaluation:
    """``how.samples`` completions of each prompt, scored.

    The same model, prompts and ``how`` give the same completions. Raises DataError for a prompt that does not fit the
    context or a set without prompts, RewardError if not one reward can be had.
    """
    if not len(prompts):
        raise DataError("there are no prompts to evaluate on", key="prompts")
    asked = list(prompts)
    pool.ready()
    said, generating = _generate(model, asked, how, progress)
    begin = time.perf_counter()
    items = [(t.id, asked[i // how.samples].text, t.text, asked[i // how.samples].info) for i, t in enumerate(said)]
    outcomes = pool.score(items)
    scoring = time.perf_counter() - begin
    if all(o.value is None for o in outcomes):
        raise RewardError(
            f"none of {len(outcomes)} rewards could be had; the first reason: {outcomes[0].reason}", key="reward"
        )
    samples = [Sample(asked[i // how.samples], i % how.samples, t, o) for i, (t, o) in enumerate(zip(said, outcomes))]
    return Evaluation(how, samples, {"generate": generating, "score": scoring})


def _generate(
    model: LoadedModel, asked: list[Prompt], how: How, progress: Progress | None
) -> tuple[list[Trajectory], float]:
    """Completions, those of one prompt side by side (they share the work on it), and the seconds they took."""
    template = make_template(how.template, wants_tokenizer(model))
    ids = template.prompts(asked)
    longest = max(map(len, ids)) + how.sampling.max_tokens
    _check_lengths(asked, ids, how, model.config.max_positions)
    params = SamplingParams(**{**asdict(how.sampling), "stop_tokens": template.stops})
    rows = min(how.max_rows, len(asked) * how.samples)
    engine = make_engine(model, seed=how.seed, max_rows=rows, max_length=longest)
    requests = [
        Request(prompt.index * SAMPLES + number, tokens, params, group=i, prompt_index=prompt.index)
        for i, (prompt, tokens) in enumerate(zip(asked, ids))
        for number in range(how.samples)
    ]
    begin = time.perf_counter()
    found = _run(engine, requests, progress)
    return found, time.perf_counter() - begin


def _check_lengths(asked: list[Prompt], ids: list[list[int]], how: How, context: int) -> None:
    for prompt, tokens in zip(asked, ids):
        if not tokens:
            raise DataError(f"prompt {prompt.index} has no tokens", key=f"prompts.{prompt.index}.tokens")
        if len(tokens) + how.sampling.max_tokens > context:
            raise DataError(
                f"prompt {prompt.index} has {len(tokens)} tokens; with max_tokens = {how.sampling.max_tokens} that "
                f"exceeds the model's context of {context}",
                key=f"prompts.{prompt.index}.length",
            )


def _run(engine: GenerationEngine, requests: list[Request], progress: Progress | None) -> list[Trajectory]:
    found, tell = dict[int, Trajectory](), progress or (lambda done, of: None)
    tell(0, len(requests))
    for trajectory in engine.stream(requests):
        found[trajectory.id] = trajectory
        tell(len(found), len(requests))
    return [found[r.id] for r in requests]


# ---- what is kept ----


def check_out(path: Path) -> None:
    """Raise DataError if completions cannot be written there, before any is made."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{str(path)!r} must end in .jsonl or .parquet", key="path.suffix")
    if not path.parent.is_dir():
        raise DataError(f"{str(path)!r}: there is no folder {str(path.parent)!r}", key="path.parent")


def write_completions(path: Path, evaluation: Evaluation) -> None:
    """Every completion with its tokens, log-probs and reward, as JSON lines or Parquet by the ending. StorageError."""
    with writing(path):
        if path.suffix == ".jsonl":
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(to_json(record) + "\n" for record in evaluation.records())
        else:
            pq.write_table(pa.Table.from_pylist([_row(r) for r in evaluation.records()], schema=COLUMNS), path)


def _row(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "parts": list(record["parts"].items())}


COLUMNS = pa.schema(
    [
        ("prompt", pa.int64()),
        ("sample", pa.int32()),
        ("prompt_text", pa.string()),
        ("text", pa.string()),
        ("answer", pa.string()),
        ("reward", pa.float64()),  # null: missing
        ("right", pa.bool_()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("reason", pa.string()),  # why the reward is missing
        ("finish", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
