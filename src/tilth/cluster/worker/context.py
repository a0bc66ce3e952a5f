"""What a role is told about the place where it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tilth.core.batch import Store
from tilth.core.layout import Mesh


@dataclass(frozen=True)
class Context:
    """First argument of every factory: ``function(context, **kwargs)`` makes the role's object of one rank."""

    role: str
    mesh: Mesh
    """Of this role: the axes of ``config.axes``, ranks are global."""
    rank: int
    """This worker's global number."""
    workers: int
    """Number of all workers: the world size of torch.distributed."""
    store: Store
    local_rank: int = 0
    """This worker's number on its machine: which device is its own."""
    init_method: str = ""
    """Where torch.distributed meets; "" if there is one worker."""
    timeout: float = 600.0
    """Seconds that the controller allows a call. Give collectives longer, so that the controller speaks first."""
    roles: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """The role objects that were made in this process before."""
    generation: int = 0
    """How often the role was made before; process groups of two generations are different ones."""
