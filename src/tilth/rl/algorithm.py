"""The algorithm of a run, resolved once from its recipe, and the names and options that there are."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, get_args

from tilth.config.flows import FLOWS, Flow
from tilth.config.schema import AlgorithmConfig, Recipe
from tilth.core.errors import RecipeError
from tilth.rl import advantages, kl, losses, preference  # noqa: F401  (importing them registers their entries)
from tilth.rl.aggregation import Aggregation
from tilth.rl.estimators import Advantage
from tilth.rl.policy_losses import PolicyLoss
from tilth.rl.registry import Entry, Kind, build, lookup, nearest, registered, require
from tilth.rl.rollout_correction import CorrectionRule, Corrector


def names() -> dict[Kind, list[str]]:
    """Return every registered name by kind: ``{"advantages": [...], "losses": [...], ...}``."""
    return {kind: list(registered(kind)) for kind in get_args(Kind)}


def options(kind: Kind, name: str) -> dict[str, Any]:
    """Return the options of an entry with their defaults; RecipeError with the nearest name."""
    return {option: field.default for option, field in lookup(kind, name).model_fields.items()}


def check(
    name: str, columns: Iterable[str], options: Mapping[str, Any] | None = None, *, kind: Kind | None = None
) -> Entry:
    """Check before a run starts that an entry can work; return it, so that its ``scope`` and ``needs`` can be read.

    columns: the names that the flow will pass (``rewards``, ``groups``, ``values``, ``ref_logprobs`` ...).
    kind: needed only where a name is both an advantage and a loss.
    Raises RecipeError: unknown name or option (with the nearest), a value out of range, a missing column.
    """
    entry = build(kind or _kind_of(name), name, options or {}, Entry)
    require(entry, columns)
    return entry


def _kind_of(name: str) -> Kind:
    kinds: list[Kind] = [kind for kind in get_args(Kind) if name in registered(kind)]
    if not kinds:
        every = [known for kind in get_args(Kind) for known in registered(kind)]
        raise RecipeError(f"no algorithm {name!r}{nearest(name, every)}", key="name")
    if len(kinds) > 1:
        raise RecipeError(f"{name!r} is in {' and in '.join(kinds)}; choose one with kind=", key="kind")
    return kinds[0]


OF_POLICY = {"logprobs", "old_logprobs", "sum_pi_squared"}
"""Columns that the policy computes before its updates, where something needs them."""
ROWS = {
    "rewards", "groups", "counts", "mask", "lengths", "advantages", "rollout_logprobs", "uniforms", "versions",
    "weights",
}  # fmt: skip
"""Columns that every loop has."""
E = TypeVar("E", bound=Entry)


@dataclass(frozen=True)
class Algorithm:
    """Estimator, loss, aggregation and correction with their options, each built once.

    keys: section [algorithm] of the recipe; norm_length: fixed length of Dr.GRPO's aggregation. Pickling sends these
    three only, and the receiver builds the entries: an entry made of a user's function cannot be pickled by name.
    """

    keys: AlgorithmConfig
    norm_length: int = 1
    flow: Flow = FLOWS["grpo"]

    @classmethod
    def of(cls, recipe: Recipe) -> "Algorithm":
        """The algorithm of a recipe."""
        return cls(recipe.algorithm, recipe.rollout.max_tokens, recipe.flow_spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.keys, self.norm_length, self.flow)

    def updated(self, **keys: Any) -> "Algorithm":
        """Return this algorithm with other values of some keys."""
        return replace(self, keys=self.keys.model_copy(update=keys)) if keys else self

    def options(self, kind: Kind, name: str) -> dict[str, Any]:
        """Return the keys of [algorithm], and of its ``options``, that are options of this entry."""
        known = lookup(kind, name).model_fields
        own = {key: getattr(self.keys, key) for key in known if key in AlgorithmConfig.model_fields}
        own |= {key: value for key, value in self.keys.options.items() if key in known}
        if kind == "losses" and self.keys.kl_in == "reward":
            own["kl_coef"] = 0.0  # it is in the reward already
        return own

    def _entry(self, kind: Kind, name: str, known: type[E]) -> E:
        return build(kind, name, self.options(kind, name), known)

    @cached_property
    def estimator(self) -> Advantage:
        """Estimator of advantages."""
        return self._entry("advantages", self.keys.advantage, Advantage)

    @cached_property
    def loss(self) -> PolicyLoss:
        """The policy loss."""
        return self._entry("losses", self.keys.loss, PolicyLoss)

    @cached_property
    def aggregation(self) -> Aggregation:
        """Aggregation of token losses: the recipe's, or else the one that the loss was published with."""
        name = self.keys.aggregation or self.loss.aggregation
        fixed = "norm_length" in lookup("aggregations", name).model_fields
        return build("aggregations", name, {"norm_length": self.norm_length} if fixed else {}, Aggregation)

    @cached_property
    def correction(self) -> CorrectionRule | None:
        """Correction for a rollout engine that differs from the trainer; None: no correction."""
        return self._entry("corrections", self.keys.correction, CorrectionRule) if self.keys.correction else None

    @property
    def chosen(self) -> dict[Kind, Entry]:
        """Entries that take options of the recipe."""
        found: dict[Kind, Entry] = {"advantages": self.estimator, "losses": self.loss}
        return found | ({} if self.correction is None else {"corrections": self.correction})

    @property
    def bypass(self) -> bool:
        """True if the ratio is taken to the engine's policy, not to the trainer's before the update."""
        return isinstance(self.correction, Corrector) and self.correction.bypass

    @property
    def ratio_to(self) -> str:
        """Column of the log-probs in the denominator of the ratio."""
        return "rollout_logprobs" if self.bypass else "old_logprobs"

    @property
    def kl_in_reward(self) -> bool:
        """True if a KL penalty goes into the reward."""
        return bool(self.keys.kl_coef) and self.keys.kl_in == "reward"

    @property
    def drops_flat(self) -> bool:
        """True if groups with equal rewards are dropped: the recipe asks for it, and they have no gradient at all."""
        keys = self.keys
        terms = keys.kl_coef or keys.entropy_coef or keys.entropy_target or keys.nll_coef
        wanted = "drop_flat" in self.flow.reads and keys.drop_flat
        return wanted and not terms and not self.estimator.flat_teaches

    @property
    def parts(self) -> set[str]:
        """Columns ``part/NAME`` of the reward that the estimator needs."""
        return {name for name in self.estimator.needs if name.startswith("part/")}

    @property
    def available(self) -> set[str]:
        """Columns that the training loop can compute, and parts of the reward, which are known at run time only."""
        made = ROWS | OF_POLICY | self.parts | ({"values"} if self.flow.critic else set())
        made |= {"ref_logprobs"} if self.flow.reference or self.keys.kl_coef else set()
        made |= {"chunk_tokens"} if self.flow.reference else set()
        return made | ({"baselines"} if self.flow.own_loop or not self.flow.critic else set())

    @property
    def computed(self) -> set[str]:
        """Columns that the training loop must compute: ``baselines`` (rewards of greedy answers), and the policy's
        ``logprobs`` and ``sum_pi_squared`` before its updates, if something needs them."""
        keys, needs = self.keys, set(self.estimator.needs)
        several = keys.epochs * keys.minibatches > 1 or self.flow.own_loop  # a user's loop may update several times
        corrected = self.correction is not None and "old_logprobs" in self.correction.needs
        found = needs & OF_POLICY
        if found or corrected or self.kl_in_reward or (several and not self.bypass):
            found.add("logprobs")
        return found | (needs & {"baselines"})
