"""The reward of a run; a trial of one before a run depends on it: right, wrong and empty answers, and a verdict."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NoReturn

from tilth.config.plugins import task_names
from tilth.config.schema import DataConfig, Recipe
from tilth.core.errors import RecipeError, RewardError
from tilth.rewards.functions import Reward, check_answers, of_plugins
from tilth.rewards.process_pool import Outcome, RewardPool
from tilth.rewards.verifiers import Gsm8k, MathEquivalence, builtin, marked_number, verifier_specs

if TYPE_CHECKING:
    from tilth.data.prompts import Prompt, PromptSet

Spec = str | Mapping[str, float] | Reward
"""A reward function, its name, or several names with weights."""
RIGHT, AGAIN, OTHER, EMPTY, GIVEN = "right", "again", "other", "empty", "given"
"""Kinds of completions; ``again``, the second call, counts for the verdict only."""
STEP_SAMPLES = 512  # completions of a step with the default recipe, by which speed is judged
SLOW_SECONDS = 5.0
FIRST_SECONDS, FIRST_TIMES = 0.1, 10
"""A first call that takes more than this, and more than FIRST_TIMES the mean of the others, is reported."""
NEIGHBOURS = 20  # most records beside the chosen ones whose answers stand in for another's


def chosen_reward(recipe: Recipe, prompts: object = None, given: Spec | None = None) -> Spec | None:
    """Return the reward; None if nothing is generated (pre-training, fine-tuning without a reward), an environment
    gives it, or a teacher alone is learned from. prompts: data without a name, instead of the recipe's. Raises
    RewardError if nothing gives a reward."""
    function = of_plugins(named_reward(recipe, prompts, given))
    silent = not recipe.flow_spec.samples or recipe.scores or _taught(recipe)
    return function or (None if silent else _no_reward(recipe, prompts))


def named_reward(recipe: Recipe, prompts: object = None, given: Spec | None = None) -> Spec:
    """Return the function that scores answers, in a role of its own: what is given, or the recipe's, or its task's; ""
    for none. prompts, given: as of ``chosen_reward``."""
    if not _answers(recipe) or recipe.rollout.environment:
        return ""
    own = given or recipe.reward.function
    return own or ("" if prompts is not None or recipe.reward.model or recipe.grades else task_name(recipe))


def generating(recipe: Recipe) -> bool:
    """Return True if the run has an engine and a reward: fine-tuning has them where its answers can be scored."""
    return recipe.flow_spec.samples or (_answers(recipe) and bool(recipe.scores or named_reward(recipe)))


def _answers(recipe: Recipe) -> bool:
    """Return True if the flow trains a model that answers prompts."""
    return recipe.flow_spec.learns != "documents" and not recipe.flow_spec.value


def is_unscored(recipe: Recipe) -> bool:
    """Return True if a run without a reward function samples answers that nothing else scores."""
    return recipe.flow_spec.samples and not recipe.scores


def _taught(recipe: Recipe) -> bool:
    """Return True if the run learns from a teacher, and from nothing that a reward returns."""
    if not recipe.teaches:
        return False
    from tilth.rl.algorithm import Algorithm  # which imports torch

    algorithm = Algorithm.of(recipe)
    return not algorithm.estimator.reads_reward and not algorithm.parts


def task_name(recipe: Recipe) -> str:
    """Return the name of the task in ``data.source``, which is also that of its reward; "" for other data."""
    return recipe.data.source if recipe.data.source in task_names() else ""


def _no_reward(recipe: Recipe, prompts: object) -> NoReturn:
    from tilth.data.prompts import load_source

    if prompts is None:
        load_source(recipe.data)  # raises for a mistyped source
    what = "the data" if prompts is not None else f"data.source={recipe.data.source}"
    known = ", ".join(verifier_specs())
    raise RewardError(
        f"{what} has no reward of its own; set reward.function to FILE.py:function or one of {known}",
        key="reward.function",
    )


# ---- trial ----


@dataclass(frozen=True)
class Tried:
    """A record and the outcome of each completion."""

    prompt: "Prompt"
    outcomes: dict[str, Outcome]

    def value(self, case: str) -> float | None:
        """Return the reward of a case; None: missing, or not tried."""
        return self.outcomes[case].value if case in self.outcomes else None

    def above(self, case: str) -> bool | None:
        """True if the record's answer earns more than a case; None: unknown."""
        own, other = self.value(RIGHT), self.value(case)
        return None if own is None or other is None else own > other

    @property
    def doubtful(self) -> bool:
        """True if the rewards are wrong or missing."""
        return False in (self.above(OTHER), self.above(EMPTY)) or any(o.value is None for o in self.outcomes.values())


@dataclass(frozen=True)
class Trial:
    """All findings. formed: the first answer that was reformatted before scoring, as scored; empty: none was."""

    reward: str
    data: str
    records: int
    tried: list[Tried]
    formed: str = ""

    @property
    def cases(self) -> list[str]:
        """Return the kinds of completions that were tried, in order."""
        return [c for c in (RIGHT, AGAIN, OTHER, EMPTY, GIVEN) if any(c in t.outcomes for t in self.tried)]

    def outcomes(self, *cases: str) -> list[Outcome]:
        """Return the outcomes of some cases, by default of all."""
        return [t.outcomes[c] for t in self.tried for c in cases or self.cases if c in t.outcomes]

    @property
    def parts(self) -> list[str]:
        """Return the names of parts that any call returned."""
        return sorted({name for o in self.outcomes() for name in o.parts})


def examine(reward: str, data: DataConfig, n: int, completion: str | None, timeout: float) -> Trial:
    """Score its own answer (twice), another record's, an empty and a given completion for each of ``n`` records.

    RewardError, DataError: the reward or the data cannot be loaded, or a verifier cannot read an answer.
    """
    spec, source = _spec(reward), data.source
    with RewardPool(spec, timeout=timeout, wait=False) as pool:
        from tilth.data.prompts import load_source  # while the pool's process starts

        prompts = load_source(data)
        if source not in task_names():
            check_answers(spec, prompts)
        chosen = prompts.spread(n)
        names = [spec] if isinstance(spec, str) else spec
        kinds = [type(builtin(name)) for name in names]
        form = next((form for kind, form in FORMS.items() if kind in kinds), None)
        asked = _completions(chosen, prompts, completion, form)
        pool.ready()
        found = pool.score([(key, chosen[key[0]].text, text, chosen[key[0]].info) for key, text in asked.items()])
    outcomes = dict(zip(asked, found))
    tried = [
        Tried(prompt, {case: outcome for (place, case), outcome in outcomes.items() if place == i})
        for i, prompt in enumerate(chosen)
    ]
    formed = (text for (i, case), text in asked.items() if case == RIGHT and text != chosen[i].answer)
    return Trial(reward, source, len(prompts), tried, next(formed, ""))


def _spec(reward: str) -> str | dict[str, float]:
    """Parse a name, or a recipe's table of names and weights: {gsm8k = 1.0, "regex:####" = 0.1}."""
    if not reward.startswith("{"):
        return reward
    try:
        found: dict[str, float] = tomllib.loads(f"reward = {reward}")["reward"]
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"REWARD={reward!r} is no table of names and weights: {error}", key="REWARD") from None
    return found


FORMS: dict[type, Callable[[str], str]] = {
    Gsm8k: lambda answer: answer if marked_number(answer) is not None else f"#### {answer}",
    MathEquivalence: lambda answer: answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}",
}
"""Verifier -> an answer in the form that it looks for in a completion."""


def _completions(
    chosen: "list[Prompt]", prompts: "PromptSet", given: str | None, form: Callable[[str], str] | None
) -> dict[tuple[int, str], str]:
    """Return what to score: (place, case) -> completion."""
    form = form or str
    asked: dict[tuple[int, str], str] = {}
    neighbours = [prompts[i] for i in prompts.rows[:NEIGHBOURS]]
    for i, prompt in enumerate(chosen):
        if prompt.answer is not None:
            asked[i, RIGHT] = form(prompt.answer)
        others = (p.answer for p in [*chosen[i + 1 :], *chosen[:i], *neighbours])
        other = next((a for a in others if a is not None and a != prompt.answer), None)
        if other is not None:
            asked[i, OTHER] = form(other)
        asked[i, EMPTY] = ""
        if given is not None:
            asked[i, GIVEN] = given
    # The second call comes after all first ones, so that a reward with memory of them is found out.
    return asked | {(i, AGAIN): text for (i, case), text in asked.items() if case == RIGHT}


# ---- verdict ----


def verdict(trial: Trial) -> tuple[str, list[str]]:
    """Return works, doubtful or broken, and the sentences that explain it, the worst first."""
    found = [*_failing(trial), *_telling(trial), *_shape(trial), *_steady(trial), *_meaning(trial), *_speed(trial)]
    worst = max((rank for rank, _ in found), default=0)
    return ("works", "doubtful", "broken")[worst], [text for _, text in sorted(found, key=lambda one: -one[0])]


Sentences = list[tuple[int, str]]  # (0: fine, 1: doubtful, 2: broken; a sentence)


def _failing(trial: Trial) -> Sentences:
    outcomes = trial.outcomes()
    failed = [o for o in outcomes if o.value is None]
    if not failed:
        return [(0, f"None of {len(outcomes)} calls failed.")]
    if len(failed) == len(outcomes):
        return [(2, f"Every one of {len(outcomes)} calls failed.")]
    own = sum(o.value is None for o in trial.outcomes(RIGHT))
    rank = 2 if own and own == len(trial.outcomes(RIGHT)) else 1
    where = f"{own} of them on the right answer" if own else "none of them on the right answer"
    hint = "" if own else "; where a bad answer is meant to earn nothing, return 0"
    return [(rank, f"{len(failed)} of {len(outcomes)} calls failed, {where}: a run leaves such samples out{hint}.")]


def _telling(trial: Trial) -> Sentences:
    """Report how often the right answer earns more."""
    if not trial.outcomes(RIGHT):
        return [(1, "The data has no answers, so the reward of a right one is unknown.")]
    found: Sentences = []
    for case, name in ((OTHER, "another record's"), (EMPTY, "none at all")):
        known = [above for t in trial.tried if (above := t.above(case)) is not None]
        if known:
            few, most = sum(known) < len(known) / 2, sum(known) < 0.9 * len(known)
            count = f"{sum(known)} of {len(known)} records"
            same = sum(t.above(case) is False and t.value(RIGHT) == t.value(case) for t in trial.tried)
            equal = f", as much in {same}" if same else ""
            found.append(
                (2 if few else 1 if most else 0, f"The right answer earns more than {name} in {count}{equal}.")
            )
    values = {o.value for o in trial.outcomes() if o.value is not None}
    if len(values) == 1:
        found.append((2, f"Every call gave {values.pop():.6g}: a reward that never differs teaches nothing."))
    return found


def _shape(trial: Trial) -> Sentences:
    """Report that answers were reformatted before scoring."""
    if not trial.formed:
        return []
    return [(0, f"Bare answers were scored in the form that the reward reads, as in {trial.formed!r}.")]


def _steady(trial: Trial) -> Sentences:
    both = ((t.value(RIGHT), t.value(AGAIN)) for t in trial.tried)
    pairs = [(first, again) for first, again in both if first is not None and again is not None]
    moved = sum(first != again for first, again in pairs)
    if not moved:
        return [(0, "The same answer scored twice earned the same.")] if pairs else []
    return [(1, f"The same answer scored twice earned two different rewards in {moved} of {len(pairs)} records.")]


def _meaning(trial: Trial) -> Sentences:
    """Report what a run will call accuracy."""
    values = {o.value for o in trial.outcomes() if o.value is not None}
    if "correct" in trial.parts:
        return [(0, "Accuracy in a run is the mean of its part 'correct'.")]
    if values <= {0.0, 1.0}:
        return [(0, "It is 0 or 1, so its mean is an accuracy.")] if values else []
    return [(0, "It is not only 0 and 1 and has no part 'correct', so its mean is a reward, not an accuracy.")]


def _speed(trial: Trial) -> Sentences:
    seconds = [o.seconds for o in trial.outcomes() if o.status in ("ok", "invalid", "error")]
    if not any(seconds):
        return []
    first, mean = seconds[0], fmean(seconds[1:] or seconds)  # the first call may include imports
    step = mean * STEP_SAMPLES
    speed = f"{_two_digits(1 / max(mean, 1e-9))} calls a second in one process"
    taken = f"{STEP_SAMPLES} completions take {_two_digits(step)} s"
    late = first > max(FIRST_SECONDS, FIRST_TIMES * mean)
    apart = f" The first call, not counted here, took {_two_digits(first)} s." if late else ""
    if step <= SLOW_SECONDS:
        return [(0, f"{speed}: {taken}.{apart}")]
    return [(1, f"Only {speed}: {taken}; more reward.workers share that.{apart}")]


def _two_digits(value: float) -> str:
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
