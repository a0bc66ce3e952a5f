"""Costs of ``train.balance = "cost"``: of a file, of a profile of the model, or fitted on the run's own first steps.

The run's ``costs.jsonl`` has the costs and the first step that follows them before that step begins, so that a resume,
or a step that runs again, places rows as they were. Costs place rows; which rows a batch has does not depend on them.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tilth.cluster.controller.balance import ROLE, PassTime
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.checks import learners
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, StorageError
from tilth.core.files import make_folder, writing
from tilth.flows.callbacks import Callback, RunView
from tilth.launch.build import RunParts
from tilth.models.config import DecoderConfig
from tilth.plan.cost_fit import error, fit_compute
from tilth.plan.costs import LEARN, Compute, Costs, Error, as_dict, load_costs, save_costs
from tilth.plan.offload import OffloadLimits
from tilth.plan.working import with_device
from tilth.runs.costs import COSTS, CostFit, measured_file, read_costs, read_rates, record_costs, record_rates

ENOUGH = 50
"""Steps of a run after which its costs are fitted on it."""
LIMIT = 15.0
"""Seconds within which a profile expects to end its last micro-batch."""
TRIES = 3
"""Times that a profile measures a micro-batch: the shortest counts, since other programs only make it longer."""
SHORTEST = 32
"""Tokens of the shortest sequences of a profile, and of its smallest micro-batch."""
FEWEST = 4
"""Micro-batches that a profile has in any case."""
FILE, PROFILE, CACHED, OWN = "cluster.costs", "a profile of the model", "the profile of an earlier run", "this run"


class CostFits(Callback):
    """Chooses the costs of a run at its beginning, and fits them on its own steps once there are ``ENOUGH``."""

    def __init__(self, parts: RunParts, cluster: Cluster) -> None:
        self._parts, self._balance = parts, cluster.balance

    def on_run_start(self, run: RunView) -> None:
        """Follow the costs on record; without any those of a file, the cache or a profile. DataError: a file lacks the
        policy's passes."""
        self._follow_rates(run)
        if self._balance.by != "cost":
            return
        recipe, folder = self._parts.recipe, run.directory.path
        fits = read_costs(folder)
        if recipe.cluster.costs:
            costs = load_costs(recipe.cluster.costs)
            if not fits or as_dict(fits[-1].costs) != as_dict(costs):
                fits.append(CostFit(run.state.step + 1, FILE, costs))
                record_costs(folder, fits[-1])
        elif not fits:
            source, costs = self._first(run)
            fits.append(CostFit(run.state.step + 1, source, costs))
            record_costs(folder, fits[-1])
        for number, fit in enumerate(fits):
            if all(later.step > fit.step for later in fits[number + 1 :]):  # else replaced before it began
                self._balance.use(fit.step, fit.costs)
        run.say(described(fits[-1]))
        self._balance.collects = not recipe.cluster.costs and all(fit.source != OWN for fit in fits)

    def _follow_rates(self, run: RunView) -> None:
        """Place rows of all roles by one set of rates: those on record, else those that the policy has measured."""
        recipe, folder = self._parts.recipe, run.directory.path
        if recipe.train.offload != "auto" or all(layout.hdp == 1 for layout in learners(recipe).values()):
            return
        limits = next(how.limits for how in self._parts.roles.policy.methods.values() if how.limits is not None)
        assert isinstance(limits.offload, OffloadLimits)  # train.offload is auto
        rates = read_rates(folder)
        if rates is None:
            rates = limits.offload.rates
            record_rates(folder, rates)
        self._balance.offload = limits.offload._replace(rates=rates)

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Fit the costs on the steps so far, if they are enough; keep those before if these predict no better."""
        times = self._balance.times
        if not self._balance.collects or len({one.step for one in times}) < ENOUGH:
            return
        found = CostFit(step + 1, OWN, better(read_costs(run.directory.path)[-1].costs, times))
        try:
            record_costs(run.directory.path, found)
        except StorageError as trouble:  # costs that are not on record are not followed; the next step tries again
            run.say(f"costs of this run are not followed yet: {trouble}")
            return
        self._balance.use(found.step, found.costs)
        self._balance.collects = False
        times.clear()
        run.say(described(found))

    def _first(self, run: RunView) -> tuple[str, Costs]:
        """Return the costs of this model, device and precision from the cache, or from a profile, with their source."""
        path = cached(self._parts.recipe, self._parts.config)
        if path.exists():
            try:
                return CACHED, load_costs(path)
            except DataError as damage:
                run.say(f"{damage}; the model is profiled again")
        costs = profile(self._parts.roles.policy, self._parts.recipe)
        try:
            with writing(path):
                make_folder(path.parent)
            save_costs(costs, path)
        except StorageError as trouble:
            run.say(f"the next run profiles the model again: {trouble}")
        return PROFILE, costs


def described(fit: CostFit) -> str:
    """Describe costs in a line, with their error."""
    terms = fit.costs.learning(ROLE)
    token, square, fixed = (sum(getattr(c, name) for c in terms) for name in ("per_token", "per_square", "fixed"))
    errors = [c.error for c in terms]
    how = "of steps that were not fitted" if all(e.held_out for e in errors) else "of the fitted micro-batches"
    return (
        f"train.balance = cost: from step {fit.step} on by {fit.source}: {1e6 * token:.3g} us a token, "
        f"{1e9 * square:.3g} ns a squared token, {1e3 * fixed:.3g} ms a micro-batch; error "
        f"{max(e.median for e in errors):.1%} (p90 {max(e.p90 for e in errors):.1%}) {how}; {COSTS} has all of it"
    )


def cached(recipe: Recipe, config: DecoderConfig) -> Path:
    """Return the file of a model's costs on this machine in the folder of runs; other costs have another name."""
    recipe = with_device(recipe)
    return measured_file(
        recipe.run.dir,
        "costs",
        config,
        train=recipe.train.model_dump(exclude={"balance"}),
        policy=recipe.policy.model_dump(),
        workers=[recipe.cluster.workers, dict(recipe.cluster.pools)],
        ring=recipe.policy.layout.hdp > 1,
    )


def profile(policy: WorkerGroup, recipe: Recipe) -> Costs:
    """Measure the passes of the policy on all of its ranks together: short and long sequences, few and many tokens.

    State and position of the role stay.
    """
    times, began, last = list[PassTime](), time.monotonic(), 0.0
    for number, lengths in enumerate(micro_batches(recipe)):
        if number >= FEWEST and time.monotonic() - began + 4 * last > LIMIT:
            break
        started = time.monotonic()
        tries = [policy.time_passes(lengths) for _ in range(TRIES)]
        last = time.monotonic() - started
        amounts = float(sum(lengths)), float(sum(n * n for n in lengths))
        times += [PassTime(rank, number, *amounts, min(took)) for rank, took in enumerate(zip(*tries))]
    ring, units = 0.0, recipe.policy.layout.hdp
    if units > 1:  # seconds of a token's way around all ranks that make units, of the longest sequence that they take
        longest = min(recipe.model.context, units * recipe.train.micro_tokens)
        ring = min(max(policy.time_ring(longest)) for _ in range(TRIES)) / longest
    about = {"source": PROFILE, "seconds": round(time.monotonic() - began, 3)}
    return Costs((fitted(times),), (), (), about, ring)


def micro_batches(recipe: Recipe) -> Iterator[list[int]]:
    """Yield the lengths of a profile's micro-batches: 4 times the tokens, or sequences 4 times as long, as those
    before, up to ``train.micro_tokens`` and the context."""
    most = recipe.train.micro_tokens
    longest = min(recipe.model.context, most)
    for tokens in grown(most):
        for length in grown(min(longest, tokens)):
            yield [length] * (tokens // length)


def grown(most: int) -> list[int]:
    """Return ``SHORTEST``, 4 times it, 16 times ..., and the most."""
    return [n for n in (SHORTEST * 4**i for i in range(16)) if n < most] + [most]


def fitted(times: list[PassTime]) -> Compute:
    """Fit the cost of a micro-batch of the policy."""
    rank, step, tokens, squares, seconds = (np.array(column) for column in zip(*times))
    return fit_compute(LEARN, ROLE, tokens, squares, seconds, rank, step)


def better(now: Costs, times: list[PassTime]) -> Costs:
    """Return the costs that predict a run's own times better: those that it follows, or those fitted on the times.

    Either has the error on these times, which it was not fitted on.
    """
    fresh, held = fitted(times), measured_error(now, times)
    about = {"source": OWN, "steps": len({one.step for one in times})}
    if fresh.error.median <= held.median:
        return Costs((fresh,), (), (), about, now.ring)
    return replace(now, compute=tuple(replace(c, error=held) for c in now.compute), about={**now.about, **about})


def measured_error(costs: Costs, times: list[PassTime]) -> Error:
    """Return the error of costs on measured micro-batches that they were not fitted on."""
    terms = costs.learning(ROLE)
    law = np.array([[c.per_token, c.per_square, c.fixed] for c in terms]).sum(0)
    features = np.array([[one.tokens, one.squares, 1.0] for one in times])
    return error(features, np.array([one.seconds for one in times]), law, held_out=True)
