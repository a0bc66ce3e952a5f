"""Check an algorithm before a run starts: unknown names, unused options, missing roles."""

from functools import partial
from typing import cast

import tilth.rl as rl
from tilth.config.checks import Refusals, refuse
from tilth.config.flows import LOSSES, SHARED_OPTIONS
from tilth.config.plugins import Declaration, declared
from tilth.config.plugins import Kind as Declares
from tilth.config.schema import AlgorithmConfig, Recipe
from tilth.core.errors import RecipeError
from tilth.rl.algorithm import Algorithm
from tilth.rl.preference import PreferenceLoss
from tilth.rl.registry import Kind, lookup, nearest, require
from tilth.rl.rollout_correction import CorrectionRule

_MADE = {"values": "critic", "baselines": "greedy answers", "ref_logprobs": "teacher's log-probs"}
"""Columns that a flow makes only for its default estimator -> name in messages."""
_CHOICE = "token-mean"
"""Aggregation of losses that do not require one."""


def check_algorithm(recipe: Recipe) -> None:
    """Raise RecipeError for an unknown estimator, loss, aggregation or correction, an option that none of them has, or
    a column that no role computes."""
    refuse(recipe, _unscored, _imported, _preference)
    if not recipe.flow_spec.samples:
        return
    algorithm = Algorithm.of(recipe)
    refuse(recipe, *(partial(rule, algorithm) for rule in (_made, _options, _reward, _mixed)), _partial)
    for entry in (*algorithm.chosen.values(), algorithm.aggregation):
        require(entry, algorithm.available)
    if isinstance(algorithm.correction, CorrectionRule):
        algorithm.correction.fits(algorithm.loss)


def _unscored(recipe: Recipe) -> Refusals:
    if recipe.flow == "pretrain" and recipe.reward.function:
        yield "reward.function", "has no use in flow = pretrain, which generates nothing to score; leave it out"


def in_scripts(recipe: Recipe) -> dict[str, Declaration]:
    """Return key -> declaration for names that a script or notebook declares, which workers cannot import."""
    named = {
        "flow": ("flow", recipe.flow),
        "model.family": ("family", recipe.model.family),
        "algorithm.advantage": ("advantage", recipe.algorithm.advantage),
        "algorithm.loss": ("policy_loss", recipe.algorithm.loss),
        "optimizer.name": ("optimizer", recipe.optimizer.name),
        "rollout.engine": ("engine", recipe.rollout.engine),
    }
    named |= {f"roles.{name}": ("role", name) for name in recipe.flow_spec.roles}
    found = {key: declared(cast(Declares, kind)).get(name) for key, (kind, name) in named.items()}
    return {key: declaration for key, declaration in found.items() if declaration is not None and not declaration.spec}


def _imported(recipe: Recipe) -> Refusals:
    """Check that workers can import what is declared; the training loop runs in this process."""
    for key, declaration in in_scripts(recipe).items():
        if key != "flow" and recipe.cluster.backend != "inline":
            message = (
                f"{key} = {declaration.name} is declared in {declaration.where}, a script or notebook that the workers "
                f"of cluster.backend = {recipe.cluster.backend} cannot import; move it into a file and name that in "
                'plugins, as in plugins=["mine.py"]'
            )
            yield RecipeError(message, key=key)


def _preference(recipe: Recipe) -> Refusals:
    """Check that the loss compares outputs that the flow's model has, and has the options that are set."""
    if recipe.flow_spec.learns != "pairs":
        return
    how = recipe.preference
    found = cast(PreferenceLoss, rl.check(how.loss, {"ref_logprobs"}, how.options, kind="preferences"))
    wanted, right = ("rewards", "bradley_terry") if recipe.flow_spec.value else ("logprobs", "sigmoid")
    if found.compares != wanted:
        why = f"compares {found.compares} of answers, and flow = {recipe.flow} has their {wanted}; use {right}"
        yield "preference.loss", why


def replaced(recipe: Recipe) -> list[str]:
    """Return log lines on an estimator, a loss or options of a loss other than the flow's defaults."""
    if not recipe.flow_spec.samples:
        return []
    own = {"loss": "ppo_clip", **recipe.flow_spec.own.get("algorithm", {})}
    chosen = {key: getattr(recipe.algorithm, key) for key in ("advantage", "loss") if key in own}
    changed = [f"{key} = {name} instead of {own[key]}" for key, name in chosen.items() if name != own[key]]
    lines = [f"flow {recipe.flow} with {' and '.join(changed)}"] if changed else []
    return lines + unpublished(Algorithm.of(recipe))


def unused(recipe: Recipe) -> list[str]:
    """Return a log line on keys with a value of their own that the flow does not read."""
    flow, chosen = recipe.flow_spec, recipe.algorithm.model_fields_set
    read = {
        "algorithm": flow.samples,
        "critic": flow.critic,
        "judge": flow.judge or recipe.grades,
        "preference": flow.learns == "pairs",
    }
    found = []
    for name in (name for name, used in read.items() if not used):
        section = recipe.section(name)
        fields = type(section).model_fields
        found += [f"{name}.{key}" for key in fields if getattr(section, key) != fields[key].default]
    if flow.samples and not recipe.refers:
        found += [f"algorithm.{key}" for key in ("kl", "kl_in") if key in chosen]
    return [f"flow {recipe.flow} does not use {', '.join(found)}"] if found else []


def unpublished(algorithm: Algorithm) -> list[str]:
    """Return a log line on an aggregation or clips other than in the loss's paper, if the loss requires them.

    PPO's clip loss does not: DAPO uses token-mean, GRPO seq-mean-token-mean.
    """
    keys, published = algorithm.keys, type(algorithm.loss)()
    own = {key: getattr(published, key) for key in LOSSES.get(keys.loss, {}) if hasattr(published, key)}
    if published.aggregation != _CHOICE:
        own["aggregation"] = published.aggregation
    used = {key: getattr(keys, key) for key in own} | {"aggregation": algorithm.aggregation.entry_name}
    changed = [f"{key} = {used[key]} instead of {value}" for key, value in own.items() if used[key] != value]
    return [f"loss {keys.loss} with {' and '.join(changed)}: not as published"] if changed else []


def _partial(recipe: Recipe) -> Refusals:
    """Check that completions that go on in the next step work: their tokens are of several versions of the policy."""
    r, algo, with_partial = recipe.rollout, recipe.algorithm, f"with rollout.partial = {recipe.rollout.partial}"
    if not r.partial:
        return
    if r.partial >= r.max_tokens * (r.turns if r.environment else 1):
        turns = " in rollout.turns turns" * bool(r.environment)
        yield "rollout.max_tokens", f"{with_partial} is not above it{turns}; use more than {r.partial}"
    if algo.correction in ("", "none"):
        why = "does not weigh tokens of earlier versions; use decoupled_token_is, or another of tilth.rl.names()"
        yield "algorithm.correction", f"{with_partial} {why}"
    if algo.refill:
        yield "algorithm.refill", f"{with_partial} samples again until groups are finished; use 0"
    if recipe.train.routing == "replay":
        yield "train.routing", f"{with_partial} needs the experts of earlier versions; use own"


def _mixed(algorithm: Algorithm, recipe: Recipe) -> Refusals:
    """Check that no moments over a batch are taken over any number of versions of the policy."""
    if recipe.rollout.staleness == "free" and algorithm.estimator.whitens:
        unless = ", or whiten=false in algorithm.options" * ("whiten" in type(algorithm.estimator).model_fields)
        why = (
            "whitens over the batch as over samples of one policy, and rollout.staleness = free mixes any number of "
            f"versions; use a bound, as in rollout.staleness=1{unless}"
        )
        yield "algorithm.advantage.staleness", why


def _reward(algorithm: Algorithm, recipe: Recipe) -> Refusals:
    """Check that terms added to the reward reach the policy, and are not amplified to noise."""
    keys, found = algorithm.keys, algorithm.estimator
    if algorithm.kl_in_reward and found.relative_to_spread:
        why = (
            "does not go with algorithm.kl_in = reward: in a group of equal rewards the smallest penalty would count "
            "as much as right and wrong; use kl_in=loss, or an estimator that is not divided by the spread"
        )
        yield "algorithm.advantage.relative_to_spread", why
    added = {
        "algorithm.kl_in": algorithm.kl_in_reward,
        "algorithm.overlong_buffer": bool(keys.overlong_buffer),
        "judge.rubric": recipe.grades,
        "judge.penalty": recipe.flow_spec.judge and bool(recipe.judge.penalty),
    }
    for key in (key for key, given in added.items() if given and not found.reads_reward):
        yield key, f"changes the reward, which advantage={keys.advantage} never reads; leave it out"


def _options(algorithm: Algorithm, recipe: Recipe) -> Refusals:
    """Check that something chosen has each option; name its owner or the nearest option."""
    keys, chosen = algorithm.keys, algorithm.chosen
    known = {option for entry in chosen.values() for option in type(entry).model_fields}
    have = " and ".join(entry.entry_name for entry in chosen.values())
    first_class = AlgorithmConfig.model_fields
    for key in keys.options:
        if key in first_class:
            yield f"algorithm.options.{key}", f"is a key of its own: algorithm.{key}"
        if key not in known:
            yield f"algorithm.options.{key}", f": {have} {_whose(key, known - set(first_class))}"
    for key in SHARED_OPTIONS:
        value, own = getattr(keys, key), algorithm.flow.own.get("algorithm", {})
        unsaid = key not in keys.model_fields_set and value in (first_class[key].default, own.get(key))
        if key not in known and not unsaid:
            yield f"algorithm.{key}", f": {have} {_whose(key, set())}"


def _whose(key: str, known: set[str]) -> str:
    """Name the entries that have an option, or the nearest option."""
    kinds: tuple[Kind, ...] = ("advantages", "losses", "corrections")
    owners = [name for kind in kinds for name in rl.names()[kind] if key in lookup(kind, name).model_fields]
    if owners:
        return f"have no such option; it is one of {', '.join(owners)}"
    return f"have no such option{nearest(key, known)}"


def _made(algorithm: Algorithm, recipe: Recipe) -> Refusals:
    """Check that critic, greedy answers and teacher are there if and only if the estimator needs them."""
    flow, needs = recipe.flow_spec, set(algorithm.estimator.needs)
    if "values" in needs and not flow.critic:
        message = f"algorithm.advantage = {algorithm.keys.advantage} needs a critic, which flow = {recipe.flow} lacks"
        yield RecipeError(f"{message}; set flow=ppo", key="flow.critic")
    usual = flow.own.get("algorithm", {}).get("advantage", "grpo")
    own = set() if flow.own_loop else set(algorithm.updated(advantage=usual, options={}).estimator.needs) & set(_MADE)
    for column in (own | ({"values"} if flow.critic else set())) - needs:
        right = usual if column in own else "gae"
        why = f"does not use the {_MADE[column]} that flow = {recipe.flow} makes; use {right}, or flow=grpo"
        yield f"algorithm.advantage.{column}", why
