"""Roles of a run: a mapping of worker groups with typed accessors."""

from collections.abc import Mapping

from tilth.cluster.controller.group import WorkerGroup
from tilth.config.roles import ROLES, Receives
from tilth.core.errors import RecipeError


class _Optional:
    """Descriptor of a role that a run may lack (None)."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, roles: "Roles", owner: type) -> WorkerGroup | None:
        return roles.get(self.name)


class Roles(dict[str, WorkerGroup]):
    """Worker groups of a run by role; ``roles[NAME]`` is a RecipeError for a role that the run does not have."""

    rollout = _Optional()
    reward = _Optional()
    reference = _Optional()
    critic = _Optional()
    reward_model = _Optional()
    judge = _Optional()
    writer = _Optional()

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        loaded: frozenset[str] = frozenset(),
        weight_sync: WorkerGroup | None = None,
    ) -> None:
        """loaded: roles whose weights come from a path; weight_sync: copies the policy's weights to other roles."""
        super().__init__(groups)
        self.loaded, self.weight_sync = loaded, weight_sync

    @property
    def policy(self) -> WorkerGroup:
        """The model that learns; every run has it."""
        return self["policy"]

    def __missing__(self, name: str) -> WorkerGroup:
        raise RecipeError(f"this run has no role {name!r}; it has {', '.join(self)}", key=f"roles.{name}")

    def receiving(self, when: Receives) -> list[str]:
        """Return the roles that receive the policy's weights at the start of a phase, or in each step."""
        return [name for name in self if ROLES[name].receives == when and name not in self.loaded]

    def stateful_roles(self) -> dict[str, WorkerGroup]:
        """Return the roles in a checkpoint: those that train, and copies of the policy from the start of a phase."""
        kept = {name for name in self if ROLES[name].trains}.union(self.receiving("phase"))
        return {name: group for name, group in self.items() if name in kept}
