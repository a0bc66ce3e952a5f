"""Keys of policy.comm: what compression cannot do is refused before a run."""

import pytest

from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tilth.config.errors import RecipeError
from tilth.config.load import load_recipe
from tilth.config.open_sets import COMPRESSORS, LOCAL_METHODS

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


LOCAL = "policy.comm.local"
APART = [*ON, f"{LOCAL}=average", "flow=sft"]
ALONE = {
    "every alone": ([*ON, "policy.comm.every=2"], "policy.comm.every.unused"),
    "no period": ([*APART, "policy.comm.every=0"], "policy.comm.every"),
    "unknown": ([*ON, f"{LOCAL}=averages"], LOCAL),
    "an option of another": ([*APART, "policy.comm.options.changes=4"], "policy.comm.options.changes"),
    "a type": ([*APART, f"{LOCAL}=cser", "policy.comm.options.changes=many"], "policy.comm.options.changes.type"),
    "smallest of whole models": ([*APART, "policy.comm.smallest=1"], "policy.comm.smallest.unused"),
    "compressed gradients": ([*APART, f"{NAME}=topk"], "policy.comm.gradients.local"),
    "compressed weights": (
        [*APART, "policy.comm.weights=difference4", "policy.layout.zero=1"],
        "policy.comm.weights.local",
    ),
    "samples": ([*ON, f"{LOCAL}=average"], f"{LOCAL}.flow"),
    "pairs": ([*APART, "flow=dpo"], f"{LOCAL}.flow"),
    "adapters": ([*APART, "model.path=x", "policy.lora.rank=2"], f"{LOCAL}.lora"),
    "an average": ([*APART, "train.ema=0.9"], "train.ema.local"),
    "noise": ([*APART, 'train.watch=["noise_scale"]'], "train.watch.local"),
    "another optimizer": ([*APART, f"{LOCAL}=adaalter"], f"{LOCAL}.optimizer"),
    "shards": ([*APART, "policy.layout={fsdp=2, zero=3}"], f"{LOCAL}.zero"),
    "gathered shards": ([*APART, "policy.layout={fsdp=2, zero=2}"], f"{LOCAL}.zero"),
    "divided updates": ([*APART, "policy.layout.zero=1"], f"{LOCAL}.zero"),
    "context": ([*APART, "policy.layout.cp=2"], f"{LOCAL}.cp"),
    "units": ([*APART, "policy.layout.hdp=2"], f"{LOCAL}.hdp"),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_local_methods_cannot_do(what):
    overrides, key = ALONE[what]
    with raises(RecipeError, key):
        load_recipe("addition-grpo", overrides)


@pytest.mark.parametrize("name", LOCAL_METHODS)
@pytest.mark.parametrize(
    ("flow", "workers", "layout"),
    [("sft", 2, "dp=2"), ("pretrain", 4, "dp=2, tp=2"), ("sft", 2, "tp=2"), ("sft", 1, "dp=1")],
)
def test_where_local_methods_work(name, flow, workers, layout):
    keys = [ON[0], f"cluster.workers={workers}", f"{LOCAL}={name}", f"flow={flow}", f"policy.layout={{{layout}}}"]
    keys += ["optimizer.name=adaalter"] * (name == "adaalter")
    recipe = load_recipe("addition-grpo", [*keys, "data.source=text.jsonl", "policy.comm.every=8"])
    assert not recipe.policy.comm.exact and recipe.policy.comm.every == 8


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
