"""The column (g): what a loss gets where a recipe names it and nothing else, against the papers and verl's recipes."""

from tests.rl.conformance.cell import Gap, NotApplicable, Subject
from tilth import rl
from tilth.config.flows import FLOWS
from tilth.config.load import from_dict
from tilth.launch.checks import unpublished
from tilth.rl.algorithm import Algorithm

TOKENS, ROWS = "token-mean", "seq-mean-token-mean"
PPO = {"clip_low": 0.2, "clip_high": 0.2}
LOSSES: dict[str, tuple[str, dict[str, float]]] = {
    "ppo_clip": (TOKENS, PPO | {"dual_clip": 0.0}),  # DAPO 2503.14476; verl: dual clip 3
    "reinforce": (TOKENS, {"cap": 0.0}),
    "gpg": (TOKENS, {}),  # GPG 2504.02546
    "cispo": (TOKENS, {"clip_low": 1.0, "clip_high": 0.2, "cap": 0.0}),  # MiniMax-M1, eq. 4; verl's recipe: low 10
    "sapo": (ROWS, {"tau_pos": 1.0, "tau_neg": 1.05}),  # SAPO 2511.20347, eq. 5; verl: always by rows
    "dro": (TOKENS, {"beta": 0.05}),
    "dppo_tv": (TOKENS, {"tv_low": 0.15, "tv_high": 0.15, "cap": 20.0}),  # DPPO 2602.04879
    "dppo_kl": (TOKENS, {"kl_low": 0.05, "kl_high": 0.05, "cap": 20.0}),
    "clip_cov": (TOKENS, PPO | {"cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0}),  # 2505.22617
    "kl_cov": (TOKENS, {"cov_share": 2e-4, "cov_coef": 1.0}),
    "gspo": (
        ROWS,
        {"clip_low": 3e-4, "clip_high": 4e-4},
    ),  # GSPO 2507.18071, eq. 5 and section 5.1; verl: always by rows
    "geo_mean": (ROWS, {"clip_low": 0.4, "clip_high": 0.4}),  # GMPO 2507.20673, eq. 4; verl: always by rows
}
"""Aggregation, and every option of its own."""
OF_FLOW = ("ppo_clip", "clip_cov")
"""They take PPO's clips, of which a flow may have its own (DAPO's clip-higher)."""


def check_published(subject: Subject) -> Gap:
    """Aggregation and options in every flow that samples, and that leaving them is told."""
    if subject.kind != "losses":
        raise NotApplicable("the defaults of policy losses are compared")
    gap, name = Gap(0.0), subject.name
    gap.true(name in LOSSES, f"no published defaults of {name}")
    how_many, wanted = LOSSES.get(name, ("", {}))
    for flow in (name for name, facts in FLOWS.items() if facts.samples):
        own = {k: v for k, v in FLOWS[flow].own.get("algorithm", {}).items() if name in OF_FLOW and k in wanted}
        how = Algorithm.of(from_dict(_recipe(flow, {"loss": name})))
        found = {k: v or 0.0 for k, v in (_defaults(name) | how.options("losses", name)).items()}
        used = how.aggregation.entry_name
        gap.true(used == how_many, f"aggregation in flow {flow}: {used}")
        for option in found.keys() - {"kl", "kl_coef"}:
            gap.see(found[option], (wanted | own).get(option, float("nan")), f"{option} in flow {flow}")
        gap.true(not unpublished(how), f"told of nothing in flow {flow}")
    for other in {TOKENS, ROWS} - {how_many}:
        how = Algorithm.of(from_dict(_recipe("grpo", {"loss": name, "aggregation": other})))
        gap.true(bool(unpublished(how)) == (how_many == ROWS), f"told of aggregation {other}")
    return gap


def _recipe(flow: str, algorithm: dict[str, str]) -> dict[str, object]:
    given = {"reference": {"path": "x"}} if flow == "distill" else {}
    given |= {"judge": {"path": "x"}} if flow == "fapo" else {}
    return {"flow": flow, "algorithm": algorithm, **given}


def _defaults(name: str) -> dict[str, float]:
    return {k: v for k, v in rl.loss_entry(name).model_dump().items() if not isinstance(v, str)}
