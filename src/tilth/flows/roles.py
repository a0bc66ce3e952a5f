"""The roles of a run: a mapping of worker groups, and what the table of roles says of those that are there."""

from collections.abc import Mapping

from tilth.cluster.controller.group import WorkerGroup
from tilth.config.roles import ROLES, Receives
from tilth.core.errors import RecipeError


class _Optional:
    """A role by its attribute; None in a run without it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, roles: "Roles", owner: type) -> WorkerGroup | None:
        return roles.get(self.name)


class Roles(dict[str, WorkerGroup]):
    """The worker groups of a run, by role. RecipeError for ``roles[NAME]`` that the run does not have."""

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
        """loaded: those whose weights come from a path; weight_sync: carries the policy's to its copies."""
        super().__init__(groups)
        self.loaded, self.weight_sync = loaded, weight_sync

    @property
    def policy(self) -> WorkerGroup:
        """The model that learns, which every run has."""
        return self["policy"]

    def __missing__(self, name: str) -> WorkerGroup:
        raise RecipeError(f"this run has no role {name!r}; there is {', '.join(self)}", key=f"roles.{name}")

    def receiving(self, when: Receives) -> list[str]:
        """Those that take over the policy's weights where a phase begins, or in each step."""
        return [name for name in self if ROLES[name].receives == when and name not in self.loaded]

    def keepers(self) -> dict[str, WorkerGroup]:
        """Those with a state that a checkpoint holds: what trains, and copies of the policy as a phase began."""
        kept = {name for name in self if ROLES[name].trains}.union(self.receiving("phase"))
        return {name: group for name, group in self.items() if name in kept}
