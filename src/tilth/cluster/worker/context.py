"""Context of a role: where it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tilth.core.batch import Store
from tilth.core.layout import Mesh


@dataclass(frozen=True)
class Context:
    """First argument of every factory: ``function(context, **kwargs)`` returns the role's object on one rank."""

    role: str
    mesh: Mesh
    """Mesh of this role: axes of ``config.axes`` over global ranks."""
    rank: int
    """Global rank of this worker."""
    workers: int
    """World size of torch.distributed."""
    store: Store
    local_rank: int = 0
    """Rank on this machine, which selects the device."""
    init_method: str = ""
    """``init_method`` of torch.distributed; "" with one worker."""
    timeout: float = 600.0
    """Seconds that the controller allows a call. Allow collectives more, so that the controller reports first."""
    roles: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Roles made earlier in this process."""
    generation: int = 0
    """Number of earlier constructions of this role; each generation has process groups of its own."""
    folder: str = ""
    """Folder of the session, which all workers of this node share, in memory where there is room; "" inline."""
