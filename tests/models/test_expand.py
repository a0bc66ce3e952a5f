"""An expanded model computes what its source does, in every family, and its copies learn different things."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import tilth
from tests.config.test_plugins import forget
from tests.errors import raises
from tests.examples import examples
from tests.models.tiny import FAMILIES, decoder, shape, tokens
from tests.scripts import script
from tilth.core.errors import ModelError
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder, Layer
from tilth.models.expand import Sizes, expand, expanded_config, source_layers
from tilth.models.families import llama, olmo2, qwen3
from tilth.models.family import families, family_of
from tilth.models.hf import load_pretrained, load_weights, save_pretrained

FIRST = {config.family: name for name, config in reversed(FAMILIES.items())}
DOUBLE = torch.float64


def loaded(config, weights, dtype=torch.float32):
    model = Decoder(config, dtype).to(dtype)
    load_weights(model, weights)
    return model


def logits(model, ids):
    return model.logits(model(ids, PackedContext([len(ids)])))


def weights_of(config, seed=0):
    return {name: p.detach() for name, p in decoder(config, seed=seed).named_parameters()}


def sizes_of(config, hidden=0, layers=0, heads=0, inner=0):
    """Sizes with the inner width added to that of the MLPs and experts that the model has."""
    ffn = config.intermediate_size + inner if inner and config.dense_layers else 0
    return Sizes(hidden, layers, heads, ffn, config.expert_size + inner if inner and config.expert_layers else 0)


def far(config, weights, grown, found, dtype, wanted=None):
    """The greatest difference of the logits of two models, relative to them. wanted: dtype of the first one's."""
    ids = tokens([30], seed=4)
    with torch.no_grad():
        first, other = logits(loaded(config, weights, wanted or dtype), ids), logits(loaded(grown, found, dtype), ids)
    return float((first - other).abs().max() / max(1.0, first.abs().max()))


@st.composite
def cases(draw):
    """A family's model with small widths of any kind, and sizes to grow to."""
    family = draw(st.sampled_from(sorted(FIRST)))
    base = FAMILIES[FIRST[family]]
    group, tied = draw(st.sampled_from([1, 2])), draw(st.booleans())
    group = 1 if family == "deepseek_v3" else group
    kv, width = draw(st.integers(1, 3)), 2 * draw(st.integers(2, 5))
    heads = group * kv
    implied = "head_dim" in family_of(family).implied(base)
    inner = draw(st.integers(9, 30))
    source = replace(
        base, num_heads=heads, num_kv_heads=kv, head_dim=width, tie_embeddings=tied,
        hidden_size=heads * width if implied else draw(st.integers(8, 40)), query_scalar=base.query_scalar,
        intermediate_size=inner if base.dense_layers else base.expert_size,
    )  # fmt: skip
    more = group * draw(st.integers(kv, 3 * kv))
    hidden = more * width if implied else draw(st.integers(source.hidden_size, 3 * source.hidden_size))
    inner = draw(st.integers(0, 40))
    least = 4 if (hidden, more, inner) == (source.hidden_size, heads, 0) else 3
    sizes = sizes_of(source, hidden, draw(st.integers(least, 7)), more, inner)
    return source, sizes, tied and draw(st.booleans()), draw(st.integers(0, 9))


@settings(max_examples=examples(40), deadline=None)
@given(cases())
def test_logits_are_those_of_the_source_for_any_sizes(case):
    config, sizes, untie, seed = case
    weights, grown = weights_of(config, seed), expanded_config(config, sizes, untie=untie)
    found = expand(config, weights, grown, seed)
    assert (grown.hidden_size, grown.num_layers, grown.num_heads) == sizes[:3]
    assert grown.tie_embeddings == (config.tie_embeddings and not untie)
    assert far(config, weights, grown, found, DOUBLE) < 1e-12
    rounding = far(config, weights, config, weights, torch.float32, DOUBLE)  # of the source: few channels amplify it
    assert far(config, weights, grown, found, torch.float32) < max(1e-5, 3 * rounding)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FIRST.values())) for n in FAMILIES]
)
@pytest.mark.parametrize(("hidden", "heads"), [(128, 8), (96, 6)])
def test_every_family_grows_in_all_ways_and_transformers_agrees(name, hidden, heads, tmp_path):
    config, ids = FAMILIES[name], tokens([30])
    weights, grown = weights_of(config), expanded_config(config, sizes_of(config, hidden, 5, heads, 16))
    found = expand(config, weights, grown)
    assert far(config, weights, grown, found, DOUBLE) < 1e-12
    theirs = []
    for folder, own, state in (("small", config, weights), ("large", grown, found)):
        save_pretrained(tmp_path / folder, own, state, dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            theirs.append(model(ids[None]).logits[0])
    assert (theirs[0] - theirs[1]).abs().max() < 1e-5 * max(1.0, float(theirs[0].abs().max()))
    again, tensors = load_pretrained(tmp_path / "large")
    assert again == grown
    assert (logits(loaded(again, tensors), ids) - theirs[0]).abs().max() < 1e-4


def test_the_table_has_all_eleven_families():
    assert {*FIRST} == {*families()} and len(FIRST) == 11


# ---- parts ----


def test_norms_give_zeros_behind_the_copies():
    config = shape("qwen3")
    grown = expanded_config(config, Sizes(hidden=150, layers=4))
    model, seen = loaded(grown, expand(config, weights_of(config), grown), DOUBLE), []
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda module, given, result: seen.append(result))
    logits(model, tokens([9]))
    assert len(seen) == 8
    for x in seen:
        assert not x[:, 128:].any() and (x[:, :64] - x[:, 64:128]).abs().max() < 1e-12 < x[:, :64].abs().max()


def test_growing_twice_is_growing_once():
    config = shape("gemma3")
    weights = weights_of(config)
    middle = expanded_config(config, Sizes(100, 4, 6, 110))
    half = expand(config, weights, middle)
    last = expanded_config(middle, Sizes(230, 7, 8, 300))
    assert far(config, weights, last, expand(middle, half, last), DOUBLE) < 1e-12
    assert math.isclose(last.rms_norm_eps, config.rms_norm_eps * 64 / 100 * 200 / 230)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_each_token_goes_on_through_its_own_experts_which_alone_grow(family):
    config = shape(family)
    weights, grown = weights_of(config), expanded_config(config, Sizes(expert_ffn=31))
    found = expand(config, weights, grown)
    changed = {name.split(".mlp.")[-1] for name in weights if not torch.equal(found[name].float(), weights[name])}
    wide = {f"{part}_proj.weight" for part in ("gate", "up", "down")} | {"gate_proj.bias", "up_proj.bias"}
    assert changed and {name.rpartition("experts.")[2] for name in changed} <= wide
    assert grown.num_experts == config.num_experts and far(config, weights, grown, found, DOUBLE) < 1e-12


def test_sinks_go_with_their_heads():
    config = shape("gpt_oss")
    weights, grown = weights_of(config), expanded_config(config, Sizes(heads=10))
    sinks, name = expand(config, weights, grown)["model.layers.1.self_attn.sinks"], "model.layers.1.self_attn.sinks"
    assert torch.equal(sinks.float(), weights[name][[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]])


def test_latents_stay_and_are_not_scaled():
    """Their norms have an eps of their own."""
    config = shape("deepseek_v3")
    weights, grown = weights_of(config), expanded_config(config, Sizes(hidden=100, heads=7))
    found = expand(config, weights, grown)
    for part in ("q_a_proj", "kv_a_proj_with_mqa"):
        name = f"model.layers.0.self_attn.{part}.weight"
        assert torch.equal(found[name][:, :64].float(), weights[name]) and found[name][:, 64:].std() > 0.01
    assert (grown.q_lora_rank, grown.kv_lora_rank) == (config.q_lora_rank, config.kv_lora_rank)


def test_inserted_layers_follow_their_source_with_its_kind_and_add_nothing():
    assert source_layers(3, 7) == [0, 0, 0, 1, 1, 2, 2] and source_layers(2, 4) == [0, 0, 1, 1]
    config = shape("deepseek_v3")
    grown = expanded_config(config, Sizes(layers=7))
    assert grown.expert_layers == (3, 4, 5, 6) and grown.dense_layers == (0, 1, 2)
    assert expanded_config(shape("gemma3"), Sizes(layers=7)).window_layers == (0, 1, 2, 5, 6)
    found = expand(config, weights_of(config), grown)
    zero = {i for i in range(7) if not found[f"model.layers.{i}.self_attn.o_proj.weight"].any()}
    assert zero == {1, 2, 4, 6}
    config = shape("olmo2")  # a norm of zeros would have a gradient of 1 / sqrt(eps): its weight is 0 instead
    found = expand(config, weights_of(config), expanded_config(config, Sizes(layers=6)))
    assert found["model.layers.1.self_attn.o_proj.weight"].any()
    assert not found["model.layers.1.post_attention_layernorm.weight"].any()


# ---- learning ----


def stepped(grown, found):
    """The weights after one step of AdamW."""
    model, ids = loaded(grown, found, DOUBLE), tokens([24])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.nn.functional.cross_entropy(logits(model, ids)[:-1], ids[1:]).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def apart(before, after):
    """How differently two copies moved in a step, for copies of rows of an expanded model of twice the sizes."""
    moved = {name: after[name] - before[name] for name in before}
    layer = "model.layers.0."
    rows = {f"{layer}self_attn.{n}_proj.weight": 0 for n in "qkv"} | {
        f"{layer}mlp.{n}_proj.weight": 0 for n in ("gate", "up", "down")
    }
    rows |= {f"{layer}self_attn.o_proj.weight": 0, "model.embed_tokens.weight": 1}
    halves = {name: moved[name].chunk(2, dim) for name, dim in rows.items()}
    return {name: float((one - two).abs().max() / one.abs().max()) for name, (one, two) in halves.items()}


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma3"])
def test_copies_part_after_one_step_and_equal_ones_never_do(family):
    config = shape(family, intermediate_size=48)
    grown = expanded_config(config, Sizes(128, 0, 8, 96))
    weights = weights_of(config)
    found = {seed: expand(config, weights, grown, seed) for seed in (0, None)}
    assert min(apart(found[0], stepped(grown, found[0])).values()) > 0.01
    assert max(apart(found[None], stepped(grown, found[None])).values()) < 1e-6


def test_new_channels_and_inserted_layers_learn():
    config = shape("qwen3")
    grown = expanded_config(config, Sizes(100, 6))
    found = expand(config, weights_of(config), grown)
    after = stepped(grown, found)
    moved = {name: (after[name] - found[name]).abs() for name in found}
    assert moved["model.embed_tokens.weight"][:, 64:].max() > 1e-4
    assert moved["model.layers.0.self_attn.o_proj.weight"][64:].min() > 1e-5
    assert moved["model.layers.1.mlp.down_proj.weight"].min() > 1e-5  # of an inserted one


# ---- refused ----


@pytest.mark.parametrize(
    ("name", "sizes", "key", "right"),
    [
        ("qwen3", Sizes(hidden=63), "hidden", "64 or more"),
        ("qwen3", Sizes(layers=2), "layers", "3 or more"),
        ("qwen3", Sizes(heads=2), "heads", "4 or more"),
        ("qwen3", Sizes(heads=7), "heads", "a multiple of 2"),
        ("qwen3", Sizes(ffn=95), "ffn", "96 or more"),
        ("qwen3", Sizes(expert_ffn=95), "expert_ffn", "no layer has experts"),
        ("mixtral", Sizes(ffn=95), "ffn", "expert_ffn widens experts"),
        ("deepseek-v3", Sizes(expert_ffn=23), "expert_ffn", "24 or more"),
        ("qwen2", Sizes(hidden=100), "hidden", "as hidden 128 with heads 8"),
        ("olmo2", Sizes(heads=6), "hidden", "as hidden 96 with heads 6"),
        ("qwen3", Sizes(), "hidden", "give a greater one of hidden, layers"),
        ("qwen3", Sizes(64, 3, 4, 96), "hidden", "give a greater one of hidden, layers"),
    ],
)
def test_what_would_lose_something_is_refused_by_key_with_what_would_work(name, sizes, key, right):
    with raises(ModelError, key) as caught:
        expanded_config(FAMILIES[name], sizes)
    assert right in str(caught.value)


def test_an_output_head_of_its_own_is_not_untied():
    with raises(ModelError, "untie"):
        expanded_config(shape("llama"), Sizes(hidden=128), untie=True)


class Doubled(Layer):
    """Reads the mean of its channels, which no row says."""

    def enter(self, x, tables):
        return super().enter(x + x.mean(-1, keepdim=True), tables)


@pytest.mark.parametrize("row", ["model.norm.weight", "model.layers.*.mlp.up_proj.weight"])
def test_a_row_without_spaces_is_refused_by_name(row):
    table = tuple(r._replace(reads="") if r.name == row else r for r in llama.FAMILY.table)
    tilth.family("unsaid")(lambda: replace(llama.FAMILY, table=table))
    config = shape("unsaid")
    try:
        with raises(ModelError, row) as caught:
            expand(config, weights_of(config), expanded_config(config, Sizes(hidden=80)))
        assert "reads" in str(caught.value)
    finally:
        forget()


def test_a_layer_that_does_more_than_its_rows_say_is_found_out():
    tilth.family("mean")(lambda: replace(qwen3.FAMILY, layer=Doubled))
    config = shape("mean")
    try:
        with raises(ModelError, "logits"):
            expand(config, weights_of(config), expanded_config(config, Sizes(hidden=80)))
    finally:
        forget()


def test_wrong_rows_are_found_out():
    """Those of OLMo 2 without a word on the norms behind its blocks: an inserted layer would add something."""
    table = tuple(r._replace(reads="residual") if "post_" in r.name else r for r in olmo2.FAMILY.table)
    tilth.family("unbehind")(lambda: replace(olmo2.FAMILY, table=table))
    config = shape("unbehind", qk_norm=True, wide_qk_norm=True)
    try:
        with raises(ModelError, "logits"):
            expand(config, weights_of(config), expanded_config(config, Sizes(layers=5)))
    finally:
        forget()


# ---- the benchmark ----


def test_what_it_is_compared_with_begins_with_equal_logits_too():
    made = script("expand.py")
    config, sizes = made.SHAPES["quick"]
    weights, grown = weights_of(config), expanded_config(config, sizes)
    padded, found = made.padded(config, weights, grown, 0)
    assert far(config, weights, padded, found, DOUBLE) < 1e-12
    assert far(config, weights, grown, expand(config, weights, grown, None), DOUBLE) < 1e-12
    assert replace(padded, rms_norm_eps=0.0) == replace(grown, rms_norm_eps=0.0)


def test_compute_until_a_loss_is_interpolated():
    reached = script("expand.py").reached
    curve = [(0.0, 4.0), (10.0, 3.0), (20.0, 3.5), (30.0, 2.5)]
    assert reached(curve, 3.5) == 5.0 and reached(curve, 2.75) == 27.5
    assert reached(curve, 4.0) == reached(curve, 5.0) == 0.0 and reached(curve, 2.4) is None
