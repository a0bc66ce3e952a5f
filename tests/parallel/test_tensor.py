"""Tensor parallelism against the model on one device: loss and every gradient, and what is seen if a sum is missing."""

import pytest
import torch
from torch import nn

from tests.errors import raises
from tests.models.tiny import shape
from tests.parallel.divided import SMALL
from tilth.core.errors import ModelError
from tilth.core.layout import Mesh
from tilth.models.attention import DropoutContext, PackedContext
from tilth.models.decoder import Decoder
from tilth.models.logprobs import token_logprobs
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.parallel.tensor import _narrowed, apply_tensor, check_tensor

HERE = "tests.parallel.divided:"


def worst(results: list[dict[str, float]]) -> tuple[float, str]:
    return max((far, f"{name} on rank {rank}") for rank, found in enumerate(results) for name, far in found.items())


FAMILIES = {
    "qwen3": {},
    "qwen2": {},
    "mistral": {"sliding_window": 3, "window_layers": (0,)},
    "llama": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen3_moe": {"expert_layers": (1,)},
    "olmo3": {"sliding_window": 3, "window_layers": (0,)},
    "gemma3": {"sliding_window": 3, "window_layers": (0,)},
    "gpt_oss": {"sliding_window": 3, "window_layers": (0,), "expert_layers": (0, 1)},
    "deepseek_v3": {"expert_layers": (1,)},
}


@pytest.mark.dist
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_one_device(pool, family, sp):
    found = pool.run(2, HERE + "compare", tp=2, sp=sp, family=family, changes=FAMILIES[family])
    assert worst(found) < (1e-11, "")


CASES = {
    "value model": {"value": True},
    "trees": {"trees": True},
    "trees of a value model": {"trees": True, "value": True},
    "checkpointing": {"checkpointing": True},
    "checkpointing with dropout": {"checkpointing": True, "changes": {"dropout": 0.4}},
    "dropout": {"changes": {"dropout": 0.4}},
    "dropout of a value model": {"changes": {"dropout": 0.4}, "value": True},
    "padded for parity": {"parity": True, "changes": {"dropout": 0.4}},
    "one token": {"lengths": (2,)},
    "untied": {"changes": {"tie_embeddings": False}},
    "odd vocabulary": {"changes": {"vocab_size": 13}},
    "tied, with biases": {"family": "llama", "changes": {**FAMILIES["llama"], "tie_embeddings": True}},
    "one key head": {"changes": {"num_kv_heads": 1}},
    "as many key heads": {"changes": {"num_kv_heads": 4}},
    "experts, recomputed": {"family": "mixtral", "changes": {"expert_layers": (0, 1)}, "checkpointing": True},
    "experts, trees": {"family": "qwen3_moe", "changes": {"expert_layers": (1,)}, "trees": True},
}


@pytest.mark.dist
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_whatever_a_training_engine_does_with_it(pool, case, sp):
    assert worst(pool.run(2, HERE + "compare", tp=2, sp=sp, **CASES[case])) < (1e-11, "")


@pytest.mark.dist
@pytest.mark.parametrize("sp", [False, True])
def test_fp32_differs_by_rounding(pool, sp):
    found = worst(pool.run(2, HERE + "compare", tp=2, sp=sp, dtype="float32"))
    assert (1e-9, "") < found < (2e-5, ""), "one bit of it at least: the sums have another order"


FOUR = {
    "norms over all heads, two key heads": {"family": "olmo2"},
    "sinks": {"family": "gpt_oss", "changes": {"window_layers": (0,), "expert_layers": (0, 1)}},
    "one key head": {"changes": {"num_kv_heads": 1}},
    "two key heads": {"family": "qwen2", "changes": {"num_kv_heads": 2, "vocab_size": 33, "tie_embeddings": False}},
    "as many key heads": {"changes": {"num_kv_heads": 4, "vocab_size": 13}},
    "a rank without tokens of the vocabulary": {"changes": {"vocab_size": 3}},
    "more ranks than tokens": {"lengths": (2,)},
    "more ranks than tokens, dropout": {"lengths": (2, 3), "changes": {"dropout": 0.5}},
    "value model": {"value": True, "trees": True},
    "all at once": {
        "family": "llama",
        "changes": {**FAMILIES["llama"], "num_kv_heads": 2, "vocab_size": 33, "dropout": 0.3},
        "checkpointing": True,
        "parity": True,
    },
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FOUR if name != "two key heads"]


@pytest.mark.dist
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("case", ["two key heads", *SLOW])
def test_four_ranks(pool, case, sp):
    assert worst(pool.run(4, HERE + "compare", tp=4, sp=sp, **FOUR[case])) < (1e-11, "")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("forget", "sp", "case"),
    [
        ("q_norm", False, {}),
        ("k_norm", True, {}),
        ("input_layernorm", True, {}),
        ("model.norm", True, {}),
        ("o_proj.bias", True, {"family": "llama", "changes": FAMILIES["llama"]}),
        ("k_proj", False, {"changes": {"num_kv_heads": 1}}),
        ("v_proj", True, {"changes": {"num_kv_heads": 1}}),
        ("mlp.gate.weight", True, {"family": "qwen3_moe", "changes": {"expert_layers": (1,)}}),
    ],
)
def test_a_sum_that_is_forgotten_is_seen(pool, forget, sp, case):
    """The same comparison sees each partial gradient that is not added up, and nothing else goes wrong with it."""
    for found in pool.run(2, HERE + "compare", tp=2, sp=sp, forget=forget, **case):
        wrong = {name for name, distance in found.items() if distance > 1e-6}
        assert wrong and all(forget in name for name in wrong)


BROKEN = {
    "gradients of what goes into a block": (False, ("tensor.copy_in", "same"), {}),
    "sums of what blocks give": (False, ("tensor.reduce_out", "same"), {}),
    "sums of embeddings": (False, ("vocabulary.reduce_out", "same"), {}),
    "gradients of what goes into the head": (False, ("vocabulary.add_up_", "same"), {}),
    "a value head counted by every rank": (True, ("tensor.gather_copies", "everyone"), {"value": True}),
    "dropout masks of other tokens": (True, ("tensor._narrowed", "first"), {"changes": {"dropout": 0.4}}),
}


@pytest.mark.dist
@pytest.mark.parametrize("case", BROKEN)
def test_a_collective_that_is_left_out_is_seen(pool, case):
    sp, instead, options = BROKEN[case]
    assert worst(pool.run(2, HERE + "compare", tp=2, sp=sp, instead=instead, **options)) > (1e-3, "")
    assert worst(pool.run(2, HERE + "compare", tp=2, sp=sp, **options)) < (1e-11, "")


@pytest.mark.dist
@pytest.mark.parametrize("sp", [False, True])
def test_bf16_differs_by_its_rounding(pool, sp):
    found = pool.run(2, HERE + "compare", tp=2, sp=sp, dtype="bfloat16")
    assert worst(found) < (0.06, "")


@pytest.mark.dist
@pytest.mark.parametrize(("vocab", "tokens"), [(97, 20), (13, 1), (1, 9), (2, 0)])
@pytest.mark.parametrize(("temperature", "chunk", "keep"), [(1.0, None, True), (0.3, 8, True), (2.5, 8, False)])
def test_divided_head(pool, vocab, tokens, temperature, chunk, keep):
    case = {"vocab": vocab, "tokens": tokens, "temperature": temperature, "chunk": chunk, "keep": keep}
    assert worst(pool.run(2, HERE + "head", tp=2, **case)) < (1e-12, "")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("vocab", [13, 33, 3, 5])
def test_divided_head_on_four_ranks(pool, vocab):
    case = {"vocab": vocab, "tokens": 19, "temperature": 0.7, "chunk": None, "keep": True}
    assert worst(pool.run(4, HERE + "head", tp=4, **case)) < (1e-12, "")


@pytest.mark.dist
def test_collectives_are_as_few_as_published(pool):
    """Three layers: an all-reduce for each of two blocks and for the embedding; two for the log-probs."""
    for found in pool.run(2, HERE + "sent", tp=2, sp=False):
        assert (found["forward"], found["head"], found["backward"]) == (7, 2, 7)
        assert found["largest"] <= 200 * 49, "half of the vocabulary at most, for 200 tokens"
    for found in pool.run(2, HERE + "sent", tp=2, sp=True):  # a gather and a scatter instead, and the last gather
        assert (found["forward"], found["head"], found["backward"]) == (14, 2, 14)


@pytest.mark.dist
def test_checkpointing_repeats_them(pool):
    for found in pool.run(2, HERE + "sent", tp=2, sp=False, checkpointing=True):
        assert (found["forward"], found["backward"]) == (7, 7 + 3), "the last sum of a layer is not needed again"


@pytest.mark.dist
@pytest.mark.parametrize("sp", [False, True])
def test_micro_batches_without_tokens_pass(pool, sp):
    assert pool.run(2, HERE + "nothing", tp=2, sp=sp) == [{}, {}]


@pytest.mark.parametrize(
    ("changes", "tp", "wrong"),
    [
        ({"num_heads": 6, "num_kv_heads": 3, "intermediate_size": 36}, 4, "model.heads = 6"),
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 96}, 6, "model.kv_heads = 4"),
        ({"num_heads": 4, "intermediate_size": 34}, 4, "model.ffn = 34"),
    ],
)
def test_shapes_that_do_not_divide(changes, tp, wrong):
    config = shape("llama", **{**SMALL, **changes})
    with raises(ModelError, "layout.tp") as caught:
        apply_tensor(Decoder(config), ParallelDims.of(Mesh(("tp",), (tp,)), 0), False)
    assert wrong in str(caught.value)
    check_tensor(config, 1)


def add(model: nn.Module, name: str) -> None:
    """Give a model a parameter of this name, and the modules that it is in."""
    path, _, leaf = name.rpartition(".")
    for part in path.split("."):
        if not hasattr(model, part):
            setattr(model, part, nn.Module())
        model = getattr(model, part)
    setattr(model, leaf, nn.Parameter(torch.ones(8, 24)))


UNKNOWN = [
    "model.layers.1.mlp.router.weight",
    "model.layers.0.mlp.norm.weight",
    "model.layers.0.self_attn.sinks",
    "model.layers.0.self_attn.q_proj.lora_A",
    "model.pre_norm.weight",
    "gain",
]


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_a_parameter_without_a_rule_is_refused_by_name(name, tp, sp):
    def build() -> Decoder:
        model = Decoder(shape("qwen3", **SMALL))
        add(model, name)
        return model

    grid = ParallelDims.of(Mesh(("dp", "fsdp", "tp"), (1, 1, tp)), 0)
    with pytest.raises(ModelError) as caught:
        shard(build, grid, sp=sp)
    assert name in str(caught.value)
    with pytest.raises(ModelError) as caught:
        build().init_weights_(0)
    assert name in str(caught.value)


@pytest.mark.parametrize("rows", [1, 5, 8, 13])
def test_dropout_masks_of_own_tokens_are_pieces_of_the_whole_mask(rows):
    """Bit-equal, whatever the number of tokens; fillers are kept."""

    class Rank:
        def __init__(self, at: int) -> None:
            self.rank, self.size = (lambda: at), (lambda: 4)

    dropout = DropoutContext(5, 2, torch.arange(rows) * 7)
    ctx = PackedContext([rows], dropout=dropout)
    x = torch.rand(rows, 6) + 1
    chunk = -(-rows // 4)
    padded = torch.cat([x, torch.ones(4 * chunk - rows, 6)])
    parts = []
    for at in range(4):
        narrow = _narrowed(ctx, Rank(at))
        parts.append(narrow.dropout.apply(padded[at * chunk : (at + 1) * chunk], 0.5, 1, "mlp"))
        assert narrow is not ctx and narrow._masks is ctx._masks
    assert ctx.dropout is dropout
    whole = torch.cat(parts)
    assert torch.equal(whole[:rows], dropout.apply(x, 0.5, 1, "mlp")) and (whole[rows:] == 1).all()


def test_one_rank_changes_nothing():
    model = Decoder(shape("qwen3"))
    before = dict(model.named_parameters())
    plan = apply_tensor(model, ParallelDims.alone(), True)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert plan.partial == () and set(plan.placements) == set(before)
    assert model.token_logprobs is token_logprobs
