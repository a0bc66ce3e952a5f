"""All algorithms side by side, as resolved. ``python -m tilth.rl.overview``: the table of docs/algorithms.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilth.config.flows import FLOWS, OPTIONAL
from tilth.config.load import check_flows, from_dict
from tilth.config.plugins import declared
from tilth.config.schema import Recipe
from tilth.rl.algorithm import Algorithm, names
from tilth.rl.registry import DECLARED_AS, Kind

COLUMNS = ("baseline", "loss", "aggregation", "KL", "clip", "filters", "critic")
"""Columns of the table in docs/algorithms.md."""
_KEYS = ("kl", "kl_in", "kl_coef", "entropy_coef", "nll_coef", *sorted(OPTIONAL))


def overview(flows: Sequence[str] = (), keys: Mapping[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return, for each flow, its algorithm by plain keys; null where there is none. flows: these only, in this order.

    keys: of a recipe, as nested dictionaries, applied to every flow; plugins among them are imported. Raises
    RecipeError: an unknown flow, a wrong key.
    """
    check_flows(flows, keys or {})
    return {flow: _facts(from_dict({**(keys or {}), "flow": flow}, complete=False)) for flow in flows or FLOWS}


def _facts(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved algorithm of a recipe by plain keys."""
    flow, keys = recipe.flow_spec, recipe.algorithm
    found: dict[str, Any] = {"title": flow.title, "learns": flow.learns, "critic": flow.critic, "judge": flow.judge}
    found |= {"reference": recipe.refers, "advantage": None, "loss": "likelihood", "aggregation": None}
    found |= {"group": None, "gamma": None, "lam": None, "critic_steps": None}
    found |= {"clip_low": None, "clip_high": None, "dual_clip": None, "correction": None, **dict.fromkeys(_KEYS)}
    if not flow.samples:
        return found | ({"loss": recipe.preference.loss} if flow.learns == "pairs" else {})
    algorithm = Algorithm.of(recipe)
    clips = {name: getattr(algorithm.loss, name, None) for name in ("clip_low", "clip_high", "dual_clip")}
    own = {key: getattr(keys, key) for key in _KEYS if key not in OPTIONAL or key in flow.reads}
    named = {"advantage": keys.advantage, "loss": keys.loss, "aggregation": algorithm.aggregation.entry_name}
    own |= {"group": recipe.rollout.group}
    if flow.critic:
        own |= {"gamma": keys.gamma, "lam": keys.lam, "critic_steps": recipe.critic.steps}
    return found | named | clips | own | {"correction": keys.correction or None, "drop_flat": algorithm.drops_flat}


def row(facts: Mapping[str, Any]) -> dict[str, str]:
    """Format an algorithm by the columns of the table; empty: none."""
    f = facts
    off = "" if f["kl_coef"] else ", off"
    clip = "" if f["clip_low"] is None else f"{f['clip_low']:g}, {f['clip_high']:g}"
    filters = {
        "flat": f["drop_flat"] and not f["refill"],
        f"mixed ({f['refill']} rounds)": f["refill"],
        f"overlong {f['overlong_buffer']}": f["overlong_buffer"],
        "cut": f["overlong_filter"],
        "judge": f["judge"],
    }
    return {
        "baseline": f["advantage"] or "",
        "loss": f["loss"] + (f" + {f['nll_coef']:g} likelihood" if f["nll_coef"] else ""),
        "aggregation": f["aggregation"] or "",
        "KL": f"{f['kl']} in {f['kl_in']}{off}" if f["kl"] else "reference" if f["reference"] else "",
        "clip": clip + (f", dual {f['dual_clip']:g}" if f["dual_clip"] else ""),
        "filters": ", ".join(name for name, given in filters.items() if given),
        "critic": "yes" if f["critic"] else "",
    }


def entries() -> dict[Kind, list[str]]:
    """Return every name that a key of [algorithm] accepts, by kind; names of plugins with their file and line."""
    found = {}
    for kind, known in names().items():
        own = declared(DECLARED_AS[kind]) if kind in DECLARED_AS else {}
        found[kind] = [f"{name} ({own[name].where})" if name in own else name for name in known]
    return found


def reference() -> str:
    """Return the table as Markdown."""
    rows = [[f"`{flow}`", *row(facts).values()] for flow, facts in overview().items()]
    lines = [["flow", *COLUMNS], ["---"] * (1 + len(COLUMNS)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(reference(), end="")
