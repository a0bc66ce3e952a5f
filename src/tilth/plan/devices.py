"""Device types: rates and sizes of accelerators as their makers publish them, for predictions without a device.

Rates are those of one device in one direction: a link of 900 GB/s both ways together counts as 450. A table of one's
own is a TOML file with the fields of ``DeviceType`` (``tilth layout RECIPE --search --device-type mine.toml``).
"""

import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tilth.config.errors import RecipeError, nearest

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]
STEPS = 16
"""Parts of the nodes that a pool may have, if there are more nodes than that."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DeviceType:
    """One kind of device in nodes of several. FLOP/s, bytes, bytes/s, seconds."""

    name: str
    flops: dict[str, Amount]
    """Peak of dense matrix products by "bf16", "tf32" and "fp32"."""
    memory: int
    memory_bandwidth: Amount
    intra: Amount
    """Between the devices of a node."""
    inter: Amount
    """Between nodes."""
    per_node: Annotated[int, Field(gt=0)]
    source: str
    """Origin of the numbers."""
    attained: Part = 0.65
    """Share of the peak that layers reach, their attention, norms and copies included."""
    links: Part = 0.8
    """Share of memory and link bandwidth that transfers reach."""
    hop: float = 3.4e-6
    """Latency of one message of a collective in a node; NCCL's own constant (``src/graph/tuning.cc``: NVLink, ring)."""
    far: float = 14e-6
    """Latency of one message between nodes; NCCL's own constant (network, ring)."""
    launch: float = 4e-6
    """Least time of one kernel."""
    overlaps: bool = True
    """True: gathers of parameters proceed beside compute."""
    gpu: bool = True

    def rate(self, precision: str, matmul: str = "highest") -> float:
        """Return FLOP/s of layers in a recipe's ``train.precision`` and, for fp32, ``train.matmul``."""
        kind = precision if precision == "bf16" or matmul == "highest" else "tf32"
        return self.attained * self.flops.get(kind, self.flops["fp32"])

    def bandwidth(self, ranks: Iterable[int]) -> float:
        """Return bytes/s of one member's link in a group of ranks, which fill nodes in order.

        The members in a node share the links of their devices to other nodes; groups that cross beside each other
        leave each its own.
        """
        members = Counter(rank // self.per_node for rank in ranks)
        if len(members) == 1:
            return self.links * self.intra
        return self.links * min(self.intra, self.inter * min(members.values()))

    def latency(self, ranks: Iterable[int]) -> float:
        """Return seconds in which a message goes from each member to the next one, around the group but for a step."""
        members = Counter(rank // self.per_node for rank in ranks)
        crossings = len(members) - 1
        return crossings * self.far + (members.total() - 1 - crossings) * self.hop

    def pool_sizes(self, devices: int) -> list[int]:
        """Return the sizes that a pool may have: any within a node, then whole nodes.

        Of more than ``STEPS`` nodes: powers of two, and multiples of a ``STEPS``-th of the nodes, rounded up.
        """
        nodes = devices // self.per_node
        step = -(-nodes // STEPS)
        whole = {2**i for i in range(nodes.bit_length())} | {*range(step, nodes + 1, step), nodes} if nodes else set()
        inside = range(1, min(devices, self.per_node) + 1)
        return [*inside, *sorted(n * self.per_node for n in whole if n > 1)]


_NVIDIA = "NVIDIA data sheets of the SXM part and of its DGX (dense rates; NVLink and network adapters one way)"


def _gpu(
    name: str, bf16: float, tf32: float, fp32: float, gb: int, hbm: float, intra: float, inter: float
) -> DeviceType:
    """Return a GPU in nodes of eight. Rates in TFLOP/s, memory in GB, bandwidths in GB/s."""
    rates = {"bf16": bf16 * 1e12, "tf32": tf32 * 1e12, "fp32": fp32 * 1e12}
    return DeviceType(name, rates, gb * 10**9, hbm * 1e9, intra * 1e9, inter * 1e9, 8, _NVIDIA)


_TYPES = (
    _gpu("a100-40g", 312, 156, 19.5, 40, 1555, 300, 25),
    _gpu("a100-80g", 312, 156, 19.5, 80, 2039, 300, 25),
    _gpu("a800", 312, 156, 19.5, 80, 2039, 200, 25),
    _gpu("h100", 989, 495, 67, 80, 3350, 450, 50),
    _gpu("h800", 989, 495, 67, 80, 3350, 200, 50),
    _gpu("h200", 989, 495, 67, 141, 4800, 450, 50),
    _gpu("b200", 2250, 1125, 75, 180, 8000, 900, 50),
    DeviceType(
        "cpu", {"bf16": 320e9, "tf32": 160e9, "fp32": 80e9}, 12 * 10**9, 15e9, 2e9, 1e9, 1 << 20,
        "one core of an AMD EPYC (Zen 4) with gloo, measured (docs/benchmarks.md)",
        hop=1.2e-3, far=1.2e-3, launch=2e-6, overlaps=False, gpu=False,
    ),
)  # fmt: skip
DEVICES: dict[str, DeviceType] = {kind.name: kind for kind in _TYPES}
"""Name -> device type."""


def device_type(name: str) -> DeviceType:
    """Return a device type by its name or from a TOML file. RecipeError for an unknown name or a damaged file."""
    if not name.endswith(".toml"):
        if name not in DEVICES:
            known = nearest(name, DEVICES)
            raise RecipeError(f"no device type {name!r}; {known}, or give a file NAME.toml", key="device_type")
        return DEVICES[name]
    try:
        return TypeAdapter(DeviceType).validate_python(tomllib.loads(Path(name).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"cannot read device type {name}: {error}", key="device_type.file") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise RecipeError(f"device type {name}: {where}: {first['msg']}", key=f"device_type.{where}") from None
