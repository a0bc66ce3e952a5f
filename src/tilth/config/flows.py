"""Table of flows: the properties of each training loop, known without a model. Imports no torch.

A flow has its own defaults for some keys, which a recipe overrides; so ``flow=dapo`` alone is DAPO as published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Learns = Literal["experience", "answers", "documents", "pairs"]
_Keys = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Flow:
    """Properties of one training loop.

    learns: from its own scored samples (experience), or from given answers, whole documents or pairs of answers.
    critic: a value model learns beside the policy. reference: it always needs another model. value: it trains a value
    model, which generates nothing. judge: a frozen model reads its answers. reads: the keys of ``OPTIONAL`` that its
    loop reads. own: section -> key -> its default. roles: roles of plugins that it calls. own_loop: a plugin declares
    it.
    """

    title: str
    learns: Learns = "experience"
    critic: bool = False
    reference: bool = False
    value: bool = False
    judge: bool = False
    reads: frozenset[str] = frozenset()
    own: _Keys = field(default_factory=dict)
    roles: frozenset[str] = frozenset()
    own_loop: bool = False

    @property
    def rows(self) -> int:
        """Sequences per item of given data."""
        return 2 if self.learns == "pairs" else 1

    @property
    def samples(self) -> bool:
        """True if it learns from experience."""
        return self.learns == "experience"


_PARTS = frozenset({"minibatches", "epochs"})
_GROUPS = frozenset({"drop_flat"})
_SHAPED = frozenset({"refill", "overlong_buffer", "overlong_penalty", "overlong_filter"})
SHARED_OPTIONS = ("clip_low", "clip_high", "dual_clip", "gamma", "lam")
"""Keys of [algorithm] that only estimators and losses read, as options."""
OPTIONAL = _PARTS | _GROUPS | _SHAPED
"""Keys of [algorithm] that only some of the flows that sample read."""
_DAPO = {"clip_high": 0.28, "refill": 10, "overlong_buffer": 0.2}
FLOWS: dict[str, Flow] = {
    "grpo": Flow("GRPO", reads=_PARTS | _GROUPS),
    "rloo": Flow("RLOO", own={"algorithm": {"advantage": "rloo", "loss": "reinforce", "kl_in": "reward"}}),
    "reinforce_pp": Flow(
        "REINFORCE++", reads=_PARTS, own={"algorithm": {"advantage": "reinforce_pp", "kl_in": "reward"}}
    ),
    "remax": Flow(
        "ReMax",
        own={"algorithm": {"advantage": "remax", "loss": "reinforce", "kl_in": "reward"}, "rollout": {"group": 1}},
    ),
    "dapo": Flow("DAPO", reads=OPTIONAL, own={"algorithm": _DAPO}),
    "ppo": Flow("PPO", critic=True, reads=_PARTS, own={"algorithm": {"advantage": "gae"}}),
    "vapo": Flow(
        "VAPO",
        critic=True,
        reads=_PARTS,
        own={
            "algorithm": {"advantage": "vapo", "clip_high": 0.28, "lam": 0.95, "nll_coef": 0.1},
            "critic": {"steps": 50},
        },
    ),
    "distill": Flow(
        "distillation", reference=True, reads=_PARTS, own={"algorithm": {"advantage": "distill", "loss": "reinforce"}}
    ),
    "sft": Flow("fine-tuning", "answers"),
    "pretrain": Flow("pre-training", "documents"),
    "dpo": Flow("DPO", "pairs", reference=True, own={"preference": {"loss": "sigmoid"}}),
    "reward_model": Flow("reward model", "pairs", value=True, own={"preference": {"loss": "bradley_terry"}}),
    "fapo": Flow("FAPO", judge=True, reads=OPTIONAL, own={"algorithm": {**_DAPO, "refill": 0}}),
}

_NOTHING_TO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
LOSSES: dict[str, Mapping[str, Any]] = {
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "geo_mean": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"clip_low": 1.0, "clip_high": 0.2},
    **dict.fromkeys(("reinforce", "gpg", "sapo", "dro", "dppo_tv", "dppo_kl", "kl_cov"), _NOTHING_TO_CLIP),
}
"""Published clips of policy losses that differ from PPO's or have none. The recipe overrides them; they override the
flow's clips, which are for PPO's loss."""


REFERENCE_FREE = ("simpo",)
"""Preference losses on log-probs without a reference."""


ADVANTAGES: dict[str, Mapping[str, Any]] = {"reinforce_pp_baseline": {"kl": "k2", "kl_in": "loss"}}
"""Estimators published with their own KL penalty. The recipe overrides it; it overrides the flow's."""


BEHIND = "decoupled_token_is"
"""Default correction of samples that may be of earlier versions of the policy."""


def own_defaults(flow: str, algorithm: Any, rollout: Any = None) -> _Keys:
    """Return the defaults of a flow, with the clips of the loss and the penalty of the estimator that the recipe names.

    A penalty in the reward defaults to k1: the means of k1 and k3 are both the KL, but only k1 has its gradient.
    Samples that are behind (``rollout.staleness``) are corrected.
    """
    own, chosen = FLOWS[flow].own, algorithm if isinstance(algorithm, Mapping) else {}
    found = dict(own.get("algorithm", {}))
    for table, key in ((LOSSES, "loss"), (ADVANTAGES, "advantage")):
        published = table.get(str(chosen.get(key, found.get(key))), {})
        found = {**found, **published} if key in chosen else {**published, **found}
    if {**found, **chosen}.get("kl_in") == "reward":
        found.setdefault("kl", "k1")
    if FLOWS[flow].samples and isinstance(rollout, Mapping) and rollout.get("staleness"):
        found.setdefault("correction", BEHIND)
    return {**own, "algorithm": found} if found else own


def below(data: Mapping[str, Any], own: _Keys) -> dict[str, Any]:
    """Merge a recipe's data over a flow's own defaults."""
    merged = dict(data)
    for section, keys in own.items():
        merged[section] = {**keys, **merged.get(section, {})}
    return merged
