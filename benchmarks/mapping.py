"""Search placements for the jobs of HybridFlow's evaluation (arXiv 2409.19256, section 8.3), whose shape is published.

PPO with policy, reference, critic, reward model and engines of one size each, 1,024 prompts and answers of 1,024
tokens, 8 updates a batch, on machines of eight A100-80GB with 200 Gb/s between machines. Published: sharing all
devices is fastest on 16 to 64 GPUs, splitting them on 96 to 128. Rates are those of ``tilth.plan.devices``; nothing
is fitted.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from driver import benchmark_parser, write_rows

from tilth.config.load import from_dict
from tilth.config.schema import LayoutConfig
from tilth.models.family import new_config
from tilth.plan.devices import DEVICES
from tilth.plan.mapping import MappingProblem, Option, RoleMapping, search
from tilth.plan.search import STAGES, SearchInput

MODELS = {
    "7B": {"hidden": 4096, "layers": 32, "heads": 32, "ffn": 11_008},
    "13B": {"hidden": 5120, "layers": 40, "heads": 40, "ffn": 13_824},
    "34B": {"hidden": 8192, "layers": 48, "heads": 64, "kv_heads": 8, "ffn": 22_016},
    "70B": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28_672},
}
GPUS = (16, 32, 64, 96, 128)
PUBLISHED = {gpus: "shared" if gpus <= 64 else "split" for gpus in GPUS}
MACHINE = replace(DEVICES["a100-80g"], inter=25e9 / 8)
"""200 Gb/s for a machine of eight."""


def asked(model: str, gpus: int) -> SearchInput:
    """Return the search for one of the models."""
    recipe = from_dict({
        "flow": "ppo",
        "model": {"family": "llama", "context": 2048, "tied": False, **MODELS[model]},
        "algorithm": {"kl_coef": 0.1, "minibatches": 8},
        "rollout": {"prompts": 1024, "group": 1, "max_tokens": 1024},
        "reward": {"model": "one of the same size"},
        "train": {"precision": "bf16", "device": "cuda", "micro_tokens": 8192, "checkpointing": True},
        "optimizer": {"name": "adamw"},
        "cluster": {"backend": "ray"},
    })  # fmt: skip
    shape = new_config(recipe.model, 32_000)
    return SearchInput(recipe, shape, 2048, MACHINE, gpus, loaded={"reward.model": shape})


def published_layouts(layout: LayoutConfig) -> bool:
    """True for the paper's layouts: pipelines (1F1B), replicas and tensor parallelism."""
    return layout.fsdp * layout.cp * layout.ep == 1 and layout.pp_schedule == "1f1b"


LAYOUTS: dict[str, Callable[[LayoutConfig], bool]] = {"all": lambda layout: True, "published": published_layouts}


def row(model: str, gpus: int, layouts: str, problem: MappingProblem) -> dict[str, Any]:
    """Return the fastest mapping of any placement, and of the placement in which all roles share all devices."""
    started = time.process_time()
    found = search(problem)
    took = time.process_time() - started
    shared = [RoleMapping((pool,)) for pool in replace(problem, found={}).choices(problem.roles)]
    together = min(shared, key=lambda mapping: mapping.total, default=None)
    if not found:
        return {"model": model, "gpus": gpus, "layouts": layouts, "fits": False, "cpu_seconds": took}
    best, split = found[0], next((mapping for mapping in found if len(mapping.pools) > 1), None)
    return {
        "model": model, "gpus": gpus, "layouts": layouts, "fits": True,
        "found": "shared" if len(best.pools) == 1 else "split", "published": PUBLISHED.get(gpus, ""),
        "seconds": best.total, "shared": together and dict(zip(STAGES, together.seconds)),
        "split": split and dict(zip(STAGES, split.seconds)), "cpu_seconds": took,
        "pools": [{"devices": p.devices, "roles": p.roles} for p in (split.pools if split else ())],
        "plans": {r: _plan(o) for p in best.pools for r, o in zip(p.roles, p.options)},
    }  # fmt: skip


def _plan(option: Option) -> dict[str, Any]:
    """Return the entries of a layout that differ from 1 and from the defaults, and the engine's sequences."""
    sizes = {name: value for name, value in option.layout.model_dump(exclude_defaults=True).items() if value != 1}
    return sizes | ({"max_rows": option.rows} if option.rows else {})


def line(found: dict[str, Any]) -> str:
    """Return a row as text."""
    start = f"{found['model']:>4} {found['gpus']:4} GPUs, {found['layouts']} layouts"
    if not found["fits"]:
        return f"{start}: does not fit"
    parts = []
    for name in ("shared", "split"):
        stages = found[name]
        each = " + ".join(f"{stages[stage]:.1f}" for stage in STAGES) if stages else ""
        parts.append(f"{name} {sum(stages.values()):.1f} s ({each})" if stages else f"{name}: does not fit")
    pools = "; ".join(f"{' + '.join(p['roles'])} on {p['devices']}" for p in found["pools"])
    shape = f"{found['found']} (published {found['published']})"
    return f"{start}: {shape}; {', '.join(parts)} [{pools}] {found['cpu_seconds']:.0f} s CPU"


def main() -> None:
    """Print and write the rows."""
    parser = benchmark_parser(__doc__, "7B on 16 and 32 GPUs")
    parser.add_argument("--models", default=",".join(MODELS), help="as in 7B,70B")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="all, or those that the paper has: published")
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)), help="as in 16,128")
    chosen = parser.parse_args()
    models = ["7B"] if chosen.quick else chosen.models.split(",")
    sizes = [16, 32] if chosen.quick else [int(gpus) for gpus in chosen.gpus.split(",")]
    rows = []
    for model in models:
        for gpus in sizes:
            for layouts in chosen.layouts.split(","):
                given = replace(asked(model, gpus), tried=LAYOUTS[layouts])
                rows.append(row(model, gpus, layouts, given.problem))
                print(line(rows[-1]), flush=True)
                write_rows(chosen.json, rows)


if __name__ == "__main__":
    main()
