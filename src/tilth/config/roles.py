"""Table of all roles, one ``RoleSpec`` each, in the order in which they are placed and created. Imports no torch.

Derived from this table, without asking a worker: a role's placement, its memory, the checks of its keys, its part of a
checkpoint and when it receives weights.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tilth.config.errors import PluginError
from tilth.config.imports import uncollected

if TYPE_CHECKING:
    from tilth.config.schema import Recipe

MeshKind = Literal["layout", "engines", "copies", "one"]
Receives = Literal["", "phase", "step"]


@dataclass(frozen=True)
class RoleSpec:
    """One role of a run."""

    name: str
    worker: str | Callable[..., Any]
    """Creates the role's object in a worker: ``worker(context, ...)`` with further arguments by name
    (``launch.build``). A class, or "module:function"."""
    when: "Callable[[Recipe], bool]"
    """True if a run of this recipe has the role."""
    mesh: MeshKind = "one"
    """layout: over its pool by its own layout; engines: side by side along dp, each over the ranks along tp; copies: a
    whole copy on each worker; one: on the pool's first worker."""
    memory: str | Callable[..., Any] | None = None
    """(recipe, ``plan.working.Cut``, longest) -> ``plan.memory.Need`` of one rank; None: a negligible need, for
    mesh "one" only."""
    section: "Callable[[Recipe], str] | None" = None
    """Returns the role whose pool it shares; None: it has its own section."""
    trains: bool = False
    """True: it has gradients, and a checkpoint holds its state."""
    loads: tuple[str, ...] = ()
    """Keys of the frozen models that it loads: with a path, or a table of models by name, each with a ``path``."""
    receives: Receives = ""
    """When it receives the policy's weights: at the start of a phase (once, if it trains), or after each step."""
    generates: bool = False
    """True: only runs that generate have it."""
    values: bool = False
    """True: its model is a value model, with one number per token instead of an output head."""
    label: str = ""
    """Its name in messages."""
    less: str = "train.micro_tokens"
    """Keys that reduce its memory."""

    def __post_init__(self) -> None:
        if self.mesh not in get_args(MeshKind):
            known = ", ".join(map(repr, get_args(MeshKind)))
            raise PluginError(
                f"role {self.name!r}: mesh={self.mesh!r} is not one of {known}", key=f"role.{self.name}.mesh"
            )
        if self.mesh != "one" and self.memory is None:
            raise PluginError(
                f"role {self.name!r}: mesh={self.mesh!r} without memory: its size cannot be predicted; give a "
                "function (recipe, cut, longest) -> tilth.plan.memory.Need",
                key=f"role.{self.name}.memory",
            )
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))

    @property
    def key(self) -> str:
        """The role's section of a recipe."""
        return self.name if self.name in SHIPPED_ROLES else f"roles.{self.name}"

    @property
    def group(self) -> str:
        """Group of a checkpoint that holds the model of ``loads``; empty: the policy's, or as the path says."""
        return self.name if self.values else ""

    def placed_by(self, recipe: "Recipe") -> Any:
        """Return the section with the role's pool and layout."""
        return recipe.section(self.section(recipe) if self.section else self.key)

    def paths(self, recipe: "Recipe") -> dict[str, str]:
        """Return key -> path of each model that it loads."""
        found = dict[str, str]()
        for key in self.loads:
            section, _, name = key.rpartition(".")
            value = getattr(recipe.section(section), name)
            named = {f"{key}.{each}.path": one.path for each, one in value.items()} if isinstance(value, dict) else {}
            found |= named or {key: str(value or "")}
        return {key: path for key, path in found.items() if path}


def _generated(recipe: "Recipe") -> bool:
    return recipe.flow_spec.learns != "documents"


def _home(recipe: "Recipe") -> str:
    """Place loader and writer beside the reward, since they share the prompts."""
    return "reward" if _generated(recipe) else "policy"


def _shipped(name: str, when: "Callable[[Recipe], bool]", mesh: MeshKind = "one", **facts: Any) -> RoleSpec:
    """Return a role whose factory and memory function have its name."""
    memory = None if mesh == "one" else f"tilth.plan.memory:{name}_need"
    return RoleSpec(name, f"tilth.launch.workers:{name}", when, mesh, memory, **facts)


_ENGINE: dict[str, Any] = {"mesh": "engines", "less": "rollout.max_rows"}
_SHIPPED = (
    _shipped("policy", lambda r: True, "layout", trains=True, label="trainer"),
    _shipped(
        "reference",
        lambda r: r.refers,
        "layout",
        loads=("reference.path", "reference.teachers"),
        receives="phase",
    ),
    _shipped("critic", lambda r: r.flow_spec.critic, "layout", trains=True, receives="phase", values=True),
    _shipped(
        "reward_model",
        lambda r: r.flow_spec.samples and bool(r.reward.model),
        "layout",
        loads=("reward.model",),
        values=True,
    ),
    _shipped("judge", lambda r: r.flow_spec.judge or r.grades, **_ENGINE, loads=("judge.path",)),
    _shipped("rollout", _generated, **_ENGINE, receives="step", generates=True, label="rollout engine"),
    _shipped("loader", lambda r: True, section=_home, less="supervised.batch or rollout.prompts"),
    _shipped("reward", _generated, generates=True, less="reward.workers"),
    _shipped("writer", lambda r: r.flow_spec.samples, section=_home, generates=True, less="rollout.prompts"),
)
ROLES: dict[str, RoleSpec] = {spec.name: spec for spec in _SHIPPED}
SHIPPED_ROLES = frozenset(ROLES)


def roles_of(recipe: "Recipe", *, generates: bool = True) -> dict[str, RoleSpec]:
    """Return the roles of a run of this recipe, in order. generates: False leaves out roles that need generation."""
    return {name: spec for name, spec in ROLES.items() if spec.when(recipe) and (generates or not spec.generates)}


def resolve(named: str | Callable[..., Any]) -> Callable[..., Any]:
    """Import "module:name"; return a function or class unchanged."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    with uncollected():
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
