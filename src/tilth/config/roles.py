"""The roles there are, one ``RoleSpec`` each, in the order in which they are placed and made. Imports no torch.

What a run knows of a role without asking its workers is derived from this table: where it stands, the memory it needs,
what is checked of its keys, what a checkpoint holds of it and when weights are sent to it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tilth.config.errors import PluginError

if TYPE_CHECKING:
    from tilth.config.schema import Recipe

MeshKind = Literal["layout", "copies", "one"]
Receives = Literal["", "phase", "step"]


@dataclass(frozen=True)
class RoleSpec:
    """One role of a run."""

    name: str
    worker: str | Callable[..., Any]
    """Makes the role's object in a worker: ``worker(context, ...)`` with what it asks for by name (``flows.build``). A
    class, or "module:function"."""
    when: "Callable[[Recipe], bool]"
    """Whether a run of this recipe has it."""
    mesh: MeshKind = "one"
    """Over its pool by a dp x fsdp x tp layout of its own; as whole copies, dp alone; or the pool's first worker."""
    memory: str | Callable[..., Any] | None = None
    """(recipe, ``plan.working.Cut``, longest) -> ``plan.memory.Need`` of one rank; None, of one worker alone: nothing
    that counts."""
    section: "Callable[[Recipe], str] | None" = None
    """The role whose pool it shares; None: it has a section of its own."""
    trains: bool = False
    """It has gradients, and a checkpoint holds its state."""
    loads: str = ""
    """The key that may name a model which it loads, and which never changes."""
    receives: Receives = ""
    """When it takes over the policy's weights: where a phase begins (once, if it trains), or each time they change."""
    generates: bool = False
    """It is there only where something is generated."""
    values: bool = False
    """Its model is a value model: no output head, one number for each token."""
    label: str = ""
    """What messages call it."""
    less: str = "train.micro_tokens"
    """The key that makes it need less memory."""

    def __post_init__(self) -> None:
        if self.mesh != "one" and self.memory is None:
            raise PluginError(
                f"role {self.name!r}: mesh={self.mesh!r} without memory: nobody can say whether it fits; give a "
                "function (recipe, cut, longest) -> tilth.plan.memory.Need"
            )
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))

    @property
    def key(self) -> str:
        """Its section of a recipe."""
        return self.name if self.name in SHIPPED_ROLES else f"roles.{self.name}"

    @property
    def group(self) -> str:
        """The group of a checkpoint that the model of ``loads`` is in; empty: the policy's, or as its path says."""
        return self.name if self.values else ""

    def placed_by(self, recipe: "Recipe") -> Any:
        """The section with its pool and layout."""
        return recipe.section(self.section(recipe) if self.section else self.key)

    def path(self, recipe: "Recipe") -> str:
        """The model that it loads; empty: none."""
        section, _, name = self.loads.rpartition(".")
        return str(getattr(recipe.section(section), name)) if name else ""


def _generated(recipe: "Recipe") -> bool:
    return recipe.flow_spec.learns != "documents"


def _rated(recipe: "Recipe") -> bool:
    return recipe.flow_spec.samples and bool(recipe.reward.model)


def _home(recipe: "Recipe") -> str:
    """Loader and writer are where the reward is, since they share the prompts."""
    return "reward" if _generated(recipe) else "policy"


def _shipped(name: str, when: "Callable[[Recipe], bool]", mesh: MeshKind = "one", **facts: Any) -> RoleSpec:
    """A role whose factory and memory function are called after it."""
    memory = None if mesh == "one" else f"tilth.plan.memory:{name}_need"
    return RoleSpec(name, f"tilth.flows.workers:{name}", when, mesh, memory, **facts)


_ENGINE: dict[str, Any] = {"mesh": "copies", "less": "rollout.max_rows"}
_SHIPPED = (
    _shipped("policy", lambda r: True, "layout", trains=True, label="trainer"),
    _shipped("reference", lambda r: r.refers, "layout", loads="reference.path", receives="phase"),
    _shipped("critic", lambda r: r.flow_spec.critic, "layout", trains=True, receives="phase", values=True),
    _shipped("reward_model", _rated, "layout", loads="reward.model", values=True),
    _shipped("judge", lambda r: r.flow_spec.judge, **_ENGINE, loads="judge.path"),
    _shipped("rollout", _generated, **_ENGINE, receives="step", generates=True, label="rollout engine"),
    _shipped("loader", lambda r: True, section=_home, less="supervised.batch or rollout.prompts"),
    _shipped("reward", _generated, generates=True, less="reward.workers"),
    _shipped("writer", lambda r: r.flow_spec.samples, section=_home, generates=True, less="rollout.prompts"),
)
ROLES: dict[str, RoleSpec] = {spec.name: spec for spec in _SHIPPED}
SHIPPED_ROLES = frozenset(ROLES)


def roles_of(recipe: "Recipe", *, generates: bool = True) -> dict[str, RoleSpec]:
    """The roles of a run of this recipe, in order. generates: whether it generates anything."""
    return {name: spec for name, spec in ROLES.items() if spec.when(recipe) and (generates or not spec.generates)}


def resolve(named: str | Callable[..., Any]) -> Callable[..., Any]:
    """What "module:name" names; a function or class is itself."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
