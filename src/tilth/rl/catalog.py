"""What there is, and whether a run can have it: names, options and the check before a run starts."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from tilth.core.errors import RecipeError
from tilth.rl import advantages, aggregation, distillation, kl, losses, preference, rollout_correction  # noqa: F401  (they register their entries)
from tilth.rl.registry import Entry, Kind, build, lookup, nearest, registered, require


def names() -> dict[Kind, list[str]]:
    """Every registered name: ``{"advantages": [...], "losses": [...], "aggregations": [...], "kl": [...]}``."""
    return {kind: list(registered(kind)) for kind in get_args(Kind)}


def options(kind: Kind, name: str) -> dict[str, Any]:
    """The options of an entry with their defaults; RecipeError with the nearest name."""
    return {option: field.default for option, field in lookup(kind, name).model_fields.items()}


def check(
    name: str, columns: Iterable[str], options: Mapping[str, Any] | None = None, *, kind: Kind | None = None
) -> Entry:
    """Check before a run starts that an entry can work; returns it, so that its ``scope`` and ``needs`` can be read.

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
        raise RecipeError(f"{name!r} is one of {' and of '.join(kinds)}; say which by kind=", key="kind")
    return kinds[0]
