"""What can be known to be wrong before a run starts, and what its pages will have to compute."""

from typing import cast

import numpy as np

import tilth.rl as rl
from tilth.config.flows import LOSSES, SHARED_OPTIONS
from tilth.config.plugins import Declaration, declared
from tilth.config.plugins import Kind as Declares
from tilth.config.schema import Algorithm, Recipe
from tilth.core.batch import Batch
from tilth.core.errors import RecipeError, RewardError
from tilth.rl.correction import Rule
from tilth.rl.estimators import Advantage
from tilth.rl.preference import PreferenceLoss
from tilth.rl.registry import Kind, build, nearest
from tilth.roles.objective import aggregation, bypass, entry, options

COLUMNS = {
    "rewards",
    "baselines",
    "groups",
    "counts",
    "mask",
    "lengths",
    "logprobs",
    "old_logprobs",
    "advantages",
    "rollout_logprobs",
    "sum_pi_squared",
    "uniforms",
    "versions",
    "weights",
}
"""Columns that every loop without a critic can make. A critic makes ``values``, a reference ``ref_logprobs``."""
_MADE = {"remax": "greedy answers", "distill": "teacher's log-probs"}
_OF_POLICY = {"logprobs", "old_logprobs", "sum_pi_squared"}
_CHOICE = "token-mean"
"""The aggregation of losses that any other goes with as well."""


def check_algorithm(recipe: Recipe) -> None:
    """Raise RecipeError for an unknown estimator, loss, aggregation or correction, for an option that none of them has,
    and for one that needs what no role makes."""
    if recipe.flow == "pretrain" and recipe.reward.function:
        raise RecipeError("flow=pretrain generates nothing, so nothing is scored; leave reward.function out")
    if recipe.facts.learns == "pairs":
        _check_preference(recipe)
    if not recipe.facts.samples:
        return
    how = recipe.algorithm
    columns = _columns(recipe)
    chosen = _chosen(how)
    _check_declared(recipe)
    _check_critic(recipe, judged="values" in entry("advantages", how.advantage, how).needs)
    _check_options(how, chosen)
    _check_reward(recipe)
    for kind, name in chosen.items():
        found = rl.check(name, columns, options(kind, name, how), kind=kind)
        if isinstance(found, Rule):
            found.fits(rl.loss_entry(how.loss, **options("losses", how.loss, how)))
    rl.check(aggregation(how), columns, kind="aggregations")


def in_scripts(recipe: Recipe) -> dict[str, Declaration]:
    """Key -> what it names, where a script or a notebook declares that: other processes cannot import it."""
    named = {
        "flow": ("flow", recipe.flow),
        "algorithm.advantage": ("advantage", recipe.algorithm.advantage),
        "algorithm.loss": ("policy_loss", recipe.algorithm.loss),
    }
    named |= {f"roles.{name}": ("role", name) for name in recipe.facts.roles}
    found = {key: declared(cast(Declares, kind)).get(name) for key, (kind, name) in named.items()}
    return {key: declaration for key, declaration in found.items() if declaration is not None and not declaration.spec}


def _check_declared(recipe: Recipe) -> None:
    """Workers can import what the recipe names. The training loop runs here, whatever the backend."""
    for key, declaration in in_scripts(recipe).items():
        if key != "flow" and recipe.cluster.backend != "inline":
            raise RecipeError(
                f"{key} = {declaration.name} is declared in {declaration.where}, a script or notebook that the workers "
                f"of cluster.backend = {recipe.cluster.backend} cannot import; move it into a file and name that in "
                'plugins, as in plugins=["mine.py"]'
            )


def _check_preference(recipe: Recipe) -> None:
    """The loss compares what the flow's model says of an answer, and has the options that are set."""
    how = recipe.preference
    found = cast(PreferenceLoss, rl.check(how.loss, {"ref_logprobs"}, how.options, kind="preferences"))
    wanted, right = ("rewards", "bradley_terry") if recipe.facts.value else ("logprobs", "sigmoid")
    if found.compares != wanted:
        raise RecipeError(
            f"preference.loss = {how.loss} compares {found.compares} of answers, and flow={recipe.flow} "
            f"has their {wanted}; use preference.loss={right}"
        )


def replaced(recipe: Recipe) -> list[str]:
    """Lines on what the recipe has in the place of its flow's own estimator and loss, and of the loss's own options."""
    if not recipe.facts.samples:
        return []
    own = {"loss": "ppo_clip", **recipe.facts.own.get("algorithm", {})}
    chosen = {key: getattr(recipe.algorithm, key) for key in ("advantage", "loss") if key in own}
    told = [f"{key} = {name} instead of {own[key]}" for key, name in chosen.items() if name != own[key]]
    lines = [f"flow {recipe.flow} with {' and '.join(told)}, as the recipe says"] if told else []
    return lines + unpublished(recipe.algorithm)


def unpublished(how: Algorithm) -> list[str]:
    """A line on aggregation and clips other than the loss was published with, where these are part of what it is.

    PPO's own are choices of each algorithm: token-mean is DAPO's, seq-mean-token-mean GRPO's.
    """
    published = rl.loss_entry(how.loss)
    own = {key: getattr(published, key) for key in LOSSES.get(how.loss, {}) if hasattr(published, key)}
    if published.aggregation != _CHOICE:
        own["aggregation"] = published.aggregation
    used = {key: getattr(how, key) for key in own} | {"aggregation": aggregation(how)}
    told = [f"{key} = {used[key]} instead of {value}" for key, value in own.items() if used[key] != value]
    return [f"loss {how.loss} with {' and '.join(told)}: not as published"] if told else []


def drops_flat(recipe: Recipe) -> bool:
    """Whether groups with equal rewards are left out: where the recipe says so and they have no gradient at all."""
    how = recipe.algorithm
    terms = how.kl_coef or how.entropy_coef or how.entropy_target or how.nll_coef
    wanted = "drop_flat" in recipe.facts.reads and how.drop_flat
    return wanted and not terms and not estimator(how).flat_teaches


def estimator(how: Algorithm) -> Advantage:
    """What the recipe makes advantages with, with its options."""
    return build("advantages", how.advantage, options("advantages", how.advantage, how), Advantage)


def _check_reward(recipe: Recipe) -> None:
    """What is added to the reward reaches the policy, and does not become noise on the way."""
    how, found, name = recipe.algorithm, estimator(recipe.algorithm), recipe.algorithm.advantage
    in_reward = bool(how.kl_coef) and how.kl_in == "reward"
    if in_reward and found.relative_to_spread:
        raise RecipeError(
            f"algorithm.kl_in=reward with advantage={name}: in a group of equal rewards the smallest penalty would "
            "count as much as right and wrong; use kl_in=loss, or an estimator that is not divided by the spread"
        )
    added = {
        "algorithm.kl_in=reward": in_reward,
        "algorithm.overlong_buffer": bool(how.overlong_buffer),
        "judge.penalty": recipe.facts.judge and bool(recipe.judge.penalty),
    }
    lost = [key for key, given in added.items() if given and not found.reads_reward]
    if lost:
        raise RecipeError(f"{lost[0]} changes the reward, which advantage={name} never reads; leave it out")


def columns_needed(recipe: Recipe) -> set[str]:
    """Columns that a loop has to compute: the policy's log-probs before its updates (``logprobs``, and
    ``sum_pi_squared``) where something needs them, and ``baselines``, the rewards of greedy answers."""
    how = recipe.algorithm
    needs = set(entry("advantages", how.advantage, how).needs)
    return _logprobs_needed(recipe, needs & _OF_POLICY) | (needs & {"baselines"})


def _logprobs_needed(recipe: Recipe, wanted: set[str]) -> set[str]:
    how = recipe.algorithm
    several = how.epochs * how.minibatches > 1 or recipe.flow in declared("flow")  # who knows what that does
    again = several and not bypass(how)
    corrected = bool(how.correction) and not rl.bypasses(how.correction, **options("corrections", how.correction, how))
    if again or corrected or (how.kl_coef and how.kl_in == "reward"):
        wanted.add("logprobs")
    return wanted | {"logprobs"} if wanted else wanted


def check_parts(recipe: Recipe, scored: Batch) -> None:
    """RewardError if the estimator wants a part that the reward does not return."""
    parts = {name for name in scored.rows if name.startswith("part/")}
    wanted = _parts(recipe) - parts if recipe.facts.samples else set()
    if wanted and not np.isnan(scored["reward"]).all():
        have = ", ".join(sorted(name.removeprefix("part/") for name in parts)) or "none"
        raise RewardError(
            f"algorithm.advantage={recipe.algorithm.advantage} wants the part {min(wanted).removeprefix('part/')!r} of "
            f"the reward, which returns these parts: {have}"
        )


def _parts(recipe: Recipe) -> set[str]:
    """Columns ``part/NAME`` of the reward that the estimator cannot work without."""
    how = recipe.algorithm
    return {name for name in entry("advantages", how.advantage, how).needs if name.startswith("part/")}


def _columns(recipe: Recipe) -> set[str]:
    found = COLUMNS | ({"values"} if recipe.facts.critic else set()) | ({"ref_logprobs"} if recipe.refers else set())
    return found | _parts(recipe)  # whether they are there is known when the reward has been called


def _chosen(how: Algorithm) -> dict[Kind, str]:
    found = {"advantages": how.advantage, "losses": how.loss, "corrections": how.correction}
    return {cast(Kind, kind): name for kind, name in found.items() if name}


def _check_options(how: Algorithm, chosen: dict[Kind, str]) -> None:
    """Each option is one of what was chosen; otherwise whose it is, or the nearest."""
    known = {key for kind, name in chosen.items() for key in rl.options(kind, name)}
    first_class = set(Algorithm.model_fields)
    for key in how.options:
        if key in first_class:
            raise RecipeError(f"algorithm.options has {key}, which is a key of its own: algorithm.{key}")
        if key not in known:
            raise RecipeError(f"algorithm.options.{key}: {_whose(key, chosen, known - first_class)}")
    for key in SHARED_OPTIONS:
        value = getattr(how, key)
        if value != Algorithm.model_fields[key].default and key not in known:
            raise RecipeError(f"algorithm.{key} = {value}: {_whose(key, chosen, set())}")


def _whose(key: str, chosen: dict[Kind, str], known: set[str]) -> str:
    """Who has an option that nothing chosen has."""
    kinds: tuple[Kind, ...] = ("advantages", "losses", "corrections")
    owners = [name for kind in kinds for name in rl.names()[kind] if key in rl.options(kind, name)]
    have = " and ".join(chosen.values())
    if owners:
        return f"{have} have no such option; it is one of {', '.join(owners)}"
    return f"{have} have no such option{nearest(key, known)}"


def _check_critic(recipe: Recipe, *, judged: bool) -> None:
    """A critic is there if and only if the estimator asks for its values; so are greedy answers and a teacher."""
    name = recipe.algorithm.advantage
    if judged and not recipe.facts.critic:
        raise RecipeError(f"algorithm.advantage={name} needs a critic, which flow={recipe.flow} has not; set flow=ppo")
    wanted = {"remax": "baselines", "distill": "ref_logprobs"}.get(recipe.flow)
    if wanted and wanted not in entry("advantages", name, recipe.algorithm).needs:
        raise RecipeError(
            f"algorithm.advantage={name} never looks at the {_MADE[recipe.flow]} that flow={recipe.flow} makes; "
            f"use algorithm.advantage={recipe.flow}, or flow=grpo"
        )
    if not judged and recipe.facts.critic:
        raise RecipeError(
            f"algorithm.advantage={name} never looks at the critic that flow={recipe.flow} trains; "
            "use algorithm.advantage=gae or vapo, or flow=grpo"
        )
