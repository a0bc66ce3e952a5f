"""config.json in and out: as transformers 4 and 5 write it, and what is refused."""

from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.models.tiny import FAMILIES, ROPES, shape
from tilth.config.errors import RecipeError
from tilth.config.plugins import shipped_families
from tilth.config.schema import ModelConfig
from tilth.core.errors import ModelError
from tilth.models.config import DecoderConfig
from tilth.models.family import family_of, new_config

LOCAL_SCALED = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
}
MINIMAL = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


def test_a_config_does_not_change_with_the_dictionaries_it_was_made_of_or_gave_away() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = shape("llama", rope_scaling=scaling)
    scaling["factor"] = 3.0
    config.to_hf()["rope_scaling"]["factor"] = 4.0
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("name", FAMILIES)
def test_to_hf_and_back(name: str) -> None:
    config = FAMILIES[name]
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_writes_what_we_read(name: str) -> None:
    """Through transformers' own config class and its way of writing (rope_parameters, layer_types, dtype ...)."""
    config = FAMILIES[name]
    theirs = transformers.AutoConfig.for_model(**{k: v for k, v in config.to_hf().items() if k != "architectures"})
    assert DecoderConfig.from_hf(theirs.to_dict()) == config


@settings(max_examples=examples(40), deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3", "mistral"]),
    heads=st.sampled_from([(4, 1), (4, 4), (6, 3)]),
    head_dim=st.sampled_from([8, 20]),
    rope=st.sampled_from(sorted(ROPES)),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    tied=st.booleans(),
    bias=st.booleans(),
    layers=st.sets(st.integers(0, 3)),
)
def test_round_trip_of_any_config(
    family: str,
    heads: tuple[int, int],
    head_dim: int,
    rope: str,
    theta: float,
    tied: bool,
    bias: bool,
    layers: set[int],
) -> None:
    changes: dict[str, Any] = {"rope_scaling": ROPES[rope], "rope_theta": theta, "tie_embeddings": tied}
    changes.update(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, num_layers=4, hidden_size=heads[0] * head_dim
    )
    if family in ("llama", "qwen3"):
        changes.update(qkv_bias=bias, o_bias=bias)
    if family in ("qwen2", "qwen3") and layers:
        changes.update(sliding_window=7, window_layers=tuple(sorted(layers)))
    if family == "mistral":
        changes.update(window_layers=(0, 1, 2, 3))
    config = shape(family, **changes)
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", shipped_families())
def test_each_key_left_out_means_what_it_means_to_transformers(name: str) -> None:
    needed = MINIMAL | {"hidden_size": 256, "num_attention_heads": 128, "num_hidden_layers": 12}
    kind = transformers.CONFIG_MAPPING[family_of(name).hf_type]

    def read_by_transformers(**hf: Any) -> dict[str, Any]:
        return kind(**hf).to_dict()

    whole = read_by_transformers(**needed)
    fixed = {*needed, "architectures", "model_type", "transformers_version"}
    assert len(whole.keys() - fixed) > 10
    for key in sorted(whole.keys() - fixed):
        less = {name: value for name, value in whole.items() if name != key and name not in fixed - needed.keys()}
        theirs = read_by_transformers(**less)
        assert DecoderConfig.from_hf({**less, "model_type": whole["model_type"]}) == DecoderConfig.from_hf(theirs), key
    assert DecoderConfig.from_hf({**needed, "model_type": whole["model_type"]}) == DecoderConfig.from_hf(whole)


def test_old_and_new_spelling_of_rope() -> None:
    old = {"model_type": "llama", **MINIMAL, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {
        "model_type": "llama",
        **MINIMAL,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    }
    assert DecoderConfig.from_hf(old) == DecoderConfig.from_hf(new)
    assert DecoderConfig.from_hf(old).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    plain = {"model_type": "llama", **MINIMAL, "rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}
    assert DecoderConfig.from_hf(plain).rope_scaling is None and DecoderConfig.from_hf(plain).rope_theta == 7e3


def test_old_qwen_windows_begin_at_max_window_layers() -> None:
    hf = {"model_type": "qwen2", **MINIMAL, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    hf["num_key_value_heads"] = 8
    config = DecoderConfig.from_hf(hf)
    assert [config.window(i) for i in range(4)] == [None, None, None, 9]
    assert DecoderConfig.from_hf({**hf, "use_sliding_window": False}).window_layers == ()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "config.json.architectures"),
        ({"model_type": "gpt2"}, "config.json.architectures"),
        ({"model_type": None}, "config.json.architectures"),
        ({"hidden_size": None}, "config.json.hidden_size"),
        ({"num_hidden_layers": "many"}, "config.json.num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"hidden_size": 65}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window"),
        ({"model_type": "olmo3", "rope_parameters": LOCAL_SCALED}, "rope_parameters.sliding_attention"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias"),
        ({"model_type": "gpt_oss", "rope_scaling": None}, "rope_scaling"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 2}, "num_kv_heads"),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 0}, "kv_lora_rank"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 8, "v_head_dim": 300}, "value_dim"),
    ],
)
def test_what_is_refused_in_one_line(change: dict[str, Any], key: str) -> None:
    with raises(ModelError, key) as caught:
        DecoderConfig.from_hf({"model_type": "llama", **MINIMAL, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("name", shipped_families())
def test_quantised_weights_are_refused_in_every_family(name: str, key: str) -> None:
    hf = {"model_type": family_of(name).hf_type, **MINIMAL, "num_attention_heads": 128, "hidden_size": 256}
    with raises(ModelError, key):
        DecoderConfig.from_hf({**hf, key: {"quant_method": "fp8"}})


@pytest.mark.parametrize(
    "hf",
    [
        {"model_type": "deepseek_v3", "num_key_value_heads": 8, "first_k_dense_replace": 9},
        {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1, 2, 3]},
        {"model_type": "qwen3_moe", "decoder_sparse_step": 5},
    ],
)
def test_without_a_layer_of_experts_a_model_is_dense(hf: dict[str, Any]) -> None:
    config = DecoderConfig.from_hf({**MINIMAL, **hf})
    assert (config.num_experts, config.expert_layers, config.dense_layers) == (0, (), (0, 1, 2, 3))
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("llama", {"qk_norm": True}, "qk_norm"),
        ("qwen3_moe", {"sliding_window": 5, "window_layers": (0,)}, "window_layers"),
        ("llama", {"sliding_window": 5, "window_layers": (0,)}, "sliding_window"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias"),
        ("qwen2", {"head_dim": 32}, "head_dim"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("mistral", {"window_layers": (0, 2)}, "window_layers"),
        ("llama", {"scale_embeddings": True}, "scale_embeddings"),
        ("llama", {"query_scalar": 40}, "query_scalar"),
        ("qwen3", {"wide_qk_norm": True}, "wide_qk_norm"),
        ("mistral", {"window_rope_theta": 1e3}, "window_rope_theta"),
        ("olmo3", {"window_rope_theta": 1e3}, "window_rope_theta"),
        ("olmo2", {"head_dim": 24}, "head_dim"),
        ("gpt_oss", {"qkv_bias": False}, "qkv_bias"),
        ("deepseek_v3", {"expert_layers": (0, 2)}, "expert_layers"),
        ("deepseek_v3", {"router_correction": False}, "router_correction"),
    ],
)
def test_a_shape_that_its_family_cannot_say_is_not_written(family: str, change: dict[str, Any], key: str) -> None:
    with raises(ModelError, key):
        shape(family, **change).to_hf()


@pytest.mark.parametrize(
    "change", [{"dropout": 1.0}, {"sliding_window": 0}, {"window_layers": (0,)}, {"family": "gpt"}, {"vocab_size": 0}]
)
def test_impossible_shapes(change: dict[str, Any]) -> None:
    with raises(ModelError, next(iter(change))):
        shape(**{"family": "llama", **change})


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen3", {"experts": 4}),
        ("mixtral", {"shared_experts": 1}),
        ("gpt_oss", {"dense_layers": 1}),
        ("qwen3_moe", {"dense_layers": 4, "layers": 4}),
        ("deepseek_v3", {"experts_per_token": 3, "experts": 2}),
        ("deepseek_v3", {"kv_heads": 2, "heads": 4}),
    ],
)
def test_a_new_model_names_the_key_that_its_family_does_not_take(family: str, change: dict[str, int]) -> None:
    with raises(RecipeError, f"model.{next(iter(change))}"):
        new_config(ModelConfig(family=family, **change), 14)


def test_patterns_of_windows_that_a_config_leaves_out() -> None:
    """Published directories name a period, or nothing; the base of local layers has a key of its own."""
    gemma = {"model_type": "gemma3_text", **MINIMAL, "num_hidden_layers": 7, "sliding_window": 9}
    config = DecoderConfig.from_hf(gemma)
    assert config.window_layers == (0, 1, 2, 3, 4, 6) and config.tie_embeddings and config.head_dim == 256
    assert (config.rope_theta, config.window_rope_theta, config.query_scalar) == (1e6, 1e4, 256)
    assert DecoderConfig.from_hf({**gemma, "sliding_window_pattern": 2}).window_layers == (0, 2, 4, 6)
    assert DecoderConfig.from_hf({**gemma, "rope_local_base_freq": 7e3}).window_rope_theta == 7e3
    assert DecoderConfig.from_hf({"model_type": "olmo3", **MINIMAL}).window_layers == (0, 1, 2)
    found = DecoderConfig.from_hf({"model_type": "gpt_oss", **MINIMAL})
    assert found.window_layers == (0, 2) and found.sliding_window == 128 and found.rope_scaling["truncate"] is False
