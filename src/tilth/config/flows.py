"""The flows there are and what is known of each without a model. Imports no torch.

A flow has defaults of its own for some keys, below what a recipe says; so ``flow=dapo`` alone is DAPO as published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Learns = Literal["experience", "answers", "documents", "pairs"]
_Keys = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Flow:
    """learns: from samples of its own that are scored, or from given answers, whole documents, or pairs of answers.

    critic: whether a value model learns beside the policy. reference: whether another model is always needed.
    value: whether what it trains is a value model, which says nothing. judge: whether a frozen model reads its
    answers. reads: those of the keys ``OPTIONAL`` that its page goes by. own: section -> key -> default in this flow.
    roles: those of a plugin that it calls.
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

    @property
    def rows(self) -> int:
        """Sequences of one item of given data."""
        return 2 if self.learns == "pairs" else 1

    @property
    def samples(self) -> bool:
        """Whether it learns from experience."""
        return self.learns == "experience"


_PARTS = frozenset({"minibatches", "epochs"})
_GROUPS = frozenset({"drop_flat"})
_SHAPED = frozenset({"refill", "overlong_buffer", "overlong_penalty", "overlong_filter"})
SHARED_OPTIONS = ("clip_low", "clip_high", "dual_clip", "gamma", "lam")
"""Keys of [algorithm] that are options of estimators and losses and of nothing else."""
OPTIONAL = _PARTS | _GROUPS | _SHAPED
"""Keys of [algorithm] that some pages of flows that sample go by and others do not."""
_DAPO = {"clip_high": 0.28, "refill": 10, "overlong_buffer": 0.2}
FLOWS: dict[str, Flow] = {
    "grpo": Flow("GRPO", reads=_PARTS | _GROUPS),
    "rloo": Flow("RLOO", own={"algorithm": {"advantage": "rloo", "loss": "reinforce", "kl_in": "reward"}}),
    "reinforce_pp": Flow(
        "REINFORCE++", reads=_PARTS, own={"algorithm": {"advantage": "reinforce_pp", "kl_in": "reward"}}
    ),
    "remax": Flow(
        "ReMax",
        own={
            "algorithm": {"advantage": "remax", "loss": "reinforce", "kl_in": "reward"},
            "rollout": {"group": 1},
        },
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
"""Clips of policy losses that were published with others than PPO's, or have none: below what a recipe says, above what
its flow says for PPO's loss."""


REFERENCE_FREE = ("simpo",)
"""Preference losses of log-probs that need no reference."""


ADVANTAGES: dict[str, Mapping[str, Any]] = {"reinforce_pp_baseline": {"kl": "k2", "kl_in": "loss"}}
"""Estimators that were published with a KL penalty of their own: below what a recipe says, above its flow's."""


def own_defaults(flow: str, algorithm: Any) -> _Keys:
    """A flow's own defaults, with the clips of the policy loss and the penalty of the estimator that the recipe's
    section ``algorithm`` names. In the reward the penalty is k1, whose mean is the KL: that of k3 is one there too,
    but the gradient that comes of it is not."""
    own, said = FLOWS[flow].own, algorithm if isinstance(algorithm, Mapping) else {}
    found = dict(own.get("algorithm", {}))
    for table, key in ((LOSSES, "loss"), (ADVANTAGES, "advantage")):
        found |= table.get(str(said.get(key)), {})
    if {**found, **said}.get("kl_in") == "reward":
        found.setdefault("kl", "k1")
    return {**own, "algorithm": found} if found else own


def below(data: Mapping[str, Any], own: _Keys) -> dict[str, Any]:
    """A recipe's data with a flow's own defaults below what it says."""
    merged = dict(data)
    for section, keys in own.items():
        merged[section] = {**keys, **merged.get(section, {})}
    return merged
