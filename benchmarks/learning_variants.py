"""What is compared: for each variant its keys, and the parent that it is compared with.

Every step makes 256 samples (or keeps as many), in four optimizer steps of 64; flows that take one step a batch by
their definition (RLOO, ReMax) make batches of 64. So each optimizer step of every variant sees 64 samples, and clipping
has something to do where the method clips. No variant has a KL penalty. Where a published method leaves no doubt its
own choice holds: samples a prompt, aggregation, clip range, lambda.
"""

from dataclasses import dataclass, field
from typing import Any

from tilth.config.flows import FLOWS

SAMPLES, UPDATES, GROUP = 256, 4, 8
LAM = 0.95
"""Lambda of PPO, and of VAPO where it does not go by the length (both papers)."""
ALPHA = 1.0
"""VAPO's alpha: lambda 0.75 for the shortest right answers (4 tokens) and 0.96 for the longest. The paper's 0.05 is for
hundreds of tokens; here it would be one-step everywhere."""
VALUE_STEPS = 4
"""Batches of value pre-training: 16 optimizer steps of the critic (50 in the paper, of runs a hundred times longer)."""

Keys = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """parent: title of the variant that it is compared with; empty: nobody's."""

    title: str
    keys: Keys = field(default_factory=dict)
    parent: str = ""

    @property
    def slug(self) -> str:
        """The title as a file's name and for ``--only``."""
        return self.title.lower().replace("reinforce++", "reinforce_pp").replace(" ", "_")


def grouped(size: int, samples: int = SAMPLES) -> Keys:
    """Batches of so many samples, ``size`` for each prompt."""
    return {"rollout.prompts": samples // size, "rollout.group": size}


def at_once(size: int) -> Keys:
    """One optimizer step a batch, on as many samples as an optimizer step of the others; evaluated as often."""
    return grouped(size, SAMPLES // UPDATES) | {"algorithm.minibatches": 1}


SAMPLE_MEAN = {"algorithm.aggregation": "seq-mean-token-mean"}
_VAPO = {
    "flow": "vapo",
    **grouped(GROUP),
    "critic.steps": VALUE_STEPS,
    "algorithm.lam": LAM,
    "algorithm.options": {"alpha": ALPHA},
}
_DAPO = {"flow": "dapo", **grouped(GROUP), "run.eval_every": 2}  # a step of it is about two of the others


def _without(parent: Variant, part: str, **changes: Any) -> Variant:
    """An ablation; ``__`` in a key stands for its dot."""
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return Variant(f"{parent.title} without {part}", parent.keys | keys, parent.title)


GRPO = Variant("GRPO", {"flow": "grpo", **grouped(GROUP), **SAMPLE_MEAN})
DAPO = Variant("DAPO", _DAPO, GRPO.title)
VAPO = Variant("VAPO", _VAPO, GRPO.title)
VARIANTS = (
    GRPO,
    DAPO,
    _without(DAPO, "clip-higher", algorithm__clip_high=0.2),
    _without(DAPO, "token mean", **SAMPLE_MEAN),
    _without(DAPO, "dynamic sampling", algorithm__refill=0, run__eval_every=4),
    _without(DAPO, "overlong shaping", algorithm__overlong_buffer=0.0),
    Variant("PPO", {"flow": "ppo", **grouped(1), "algorithm.lam": LAM}, GRPO.title),
    VAPO,
    _without(VAPO, "value pre-training", critic__steps=0),
    _without(VAPO, "decoupled GAE", algorithm__options={"alpha": ALPHA, "value_lam": LAM}),
    _without(VAPO, "length-adaptive GAE", algorithm__options={"adaptive": False}),
    _without(VAPO, "clip-higher", algorithm__clip_high=0.2),
    _without(VAPO, "token mean", **SAMPLE_MEAN),
    _without(VAPO, "positive NLL", algorithm__nll_coef=0.0),
    _without(VAPO, "group sampling", **grouped(1)),
    Variant("RLOO", {"flow": "rloo", **at_once(GROUP)}, GRPO.title),
    Variant("REINFORCE++", {"flow": "reinforce_pp", **grouped(1)}, GRPO.title),
    Variant(
        "REINFORCE++ baseline",
        {"flow": "reinforce_pp", **grouped(GROUP), "algorithm.advantage": "reinforce_pp_baseline"},
        GRPO.title,
    ),
    Variant("ReMax", {"flow": "remax", **at_once(1)}, GRPO.title),
)
QUICK = ("GRPO", "DAPO", "DAPO without dynamic sampling", "VAPO", "ReMax")
"""One of each kind: what --quick runs."""


def chosen(words: list[str]) -> list[Variant]:
    """Variants by slug or by the first word of it, in the table's order, with the parents that they are compared with.

    Raises SystemExit naming a word that is no variant."""
    known = {variant.slug: variant for variant in VARIANTS}
    for word in words:
        if word not in known:
            raise SystemExit(f"--only {word}: no such variant; there are {', '.join(known)}")
    wanted = {known[word].title for word in words} | {known[word].parent for word in words}
    return [variant for variant in VARIANTS if variant.title in wanted]


def keys_of(variant: Variant, lr: float) -> Keys:
    """All keys of a variant's runs but their seed, their data and their model.

    Groups without a gradient stay in the mean, as published; only dynamic sampling leaves them out.
    """
    common = {
        "algorithm.steps": 10**5,
        "algorithm.minibatches": UPDATES,
        "optimizer.lr": lr,
        "critic.lr": 2 * lr,
        "run.eval_every": 4,
    }
    keys = common | variant.keys
    if "drop_flat" in FLOWS[variant.keys["flow"]].reads:
        keys["algorithm.drop_flat"] = False
    if keys["algorithm.minibatches"] == 1:
        keys["run.eval_every"] *= UPDATES // (2 if variant.keys["flow"] == "remax" else 1)
    return keys
