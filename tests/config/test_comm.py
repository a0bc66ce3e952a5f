"""Keys of policy.comm: what compression cannot do is refused before a run."""

import pytest

from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tilth.config.errors import RecipeError
from tilth.config.load import load_recipe
from tilth.config.open_sets import COMPRESSORS

ON = ["cluster.backend=local", "cluster.workers=2"]
NAME = "policy.comm.gradients"

REFUSED = {
    "two_way alone": ([*ON, "policy.comm.two_way=true"], "policy.comm.two_way.unused"),
    "smallest alone": ([*ON, "policy.comm.smallest=1"], "policy.comm.smallest.unused"),
    "unknown": ([*ON, f"{NAME}=topkk"], NAME),
    "an option of another": ([*ON, f"{NAME}=topk", "policy.comm.options.bits=4"], "policy.comm.options.bits"),
    "a type": ([*ON, f"{NAME}=topk", "policy.comm.options.share=many"], "policy.comm.options.share.type"),
    "one rank": ([f"{NAME}=topk"], f"{NAME}.ranks"),
    "tp": ([*ON, f"{NAME}=topk", "policy.layout.tp=2"], f"{NAME}.ranks"),
    "shards": ([*ON, f"{NAME}=topk", "policy.layout.fsdp=2"], f"{NAME}.zero"),
    "two ways to shards": (
        [*ON, f"{NAME}=topk", "policy.layout={fsdp=2, zero=2}", "policy.comm.two_way=true"],
        "policy.comm.two_way.zero",
    ),
    "two ways to parts": (
        [*ON, f"{NAME}=topk", "policy.layout.zero=1", "policy.comm.two_way=true"],
        "policy.comm.two_way.zero",
    ),
    "two ways in two levels": ([*ON, f"{NAME}=sdp4bit", "policy.comm.two_way=true"], "policy.comm.two_way.levels"),
    "nodes alone": ([*ON, "policy.comm.node_size=2"], "policy.comm.node_size.unused"),
    "nodes of another": ([*ON, f"{NAME}=topk", "policy.comm.node_size=2"], "policy.comm.node_size"),
    "nodes that do not divide": ([*ON, f"{NAME}=sdp4bit", "policy.comm.node_size=3"], "policy.comm.node_size"),
    "changes of weights": ([*ON, "policy.comm.weights=difference4"], "policy.comm.weights.zero"),
    "changes of one rank's": (["policy.comm.weights=difference4", "policy.layout.zero=1"], "policy.comm.weights.ranks"),
    "adapters": ([*ON, f"{NAME}=topk", "model.path=x", "policy.lora.rank=2"], f"{NAME}.lora"),
    "deferred": (
        [
            "cluster.backend=local",
            "cluster.workers=4",
            f"{NAME}=topk",
            "policy.layout={fsdp=2, zero=2, pp=2, pp_schedule='zero-bubble'}",
        ],
        f"{NAME}.pp_schedule",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_compression_cannot_do(what):
    overrides, key = REFUSED[what]
    with raises(RecipeError, key):
        load_recipe("addition-grpo", overrides)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("layout", ["dp=2", "dp=2, zero=1", "fsdp=2, zero=1", "fsdp=2, zero=2"])
def test_where_it_works(name, layout):
    recipe = load_recipe("addition-grpo", [*ON, f"{NAME}={name}", f"policy.layout={{{layout}}}"])
    assert recipe.policy.comm.feedback and recipe.policy.comm.smallest == 65_536
