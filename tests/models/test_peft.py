"""Adapters in the format of PEFT, and PEFT as an independent reader of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.errors import raises
from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.converters import LowRank, converted
from tilth.models.decoder import Decoder
from tilth.models.hf import load_weights, save_pretrained
from tilth.models.peft import CONFIG, TENSORS, load_adapter, save_adapter
from tilth.plan.lora import is_adapter, scale_of

IDS = torch.arange(3, 11)


def made_by_peft(folder, **kind):
    """A model without experts, and an adapter of this kind that PEFT has moved from its beginning and written."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 19}
    model = Decoder(DecoderConfig(family="llama", **sizes))
    model.init_weights_(0)
    save_pretrained(folder / "base", model.config, {name: p.detach() for name, p in model.named_parameters()})

    def plain():
        return transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")

    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], **kind)
    other = peft.get_peft_model(plain(), lora)
    with torch.no_grad():
        for name, half in other.named_parameters():
            if "lora_" in name:
                half += torch.randn_like(half) / 4
    other.save_pretrained(folder / "adapter")
    return model, peft.PeftModel.from_pretrained(plain(), folder / "adapter"), folder / "adapter"


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica"])
def test_beginnings_that_leave_the_base_alone_have_the_logits_of_peft(tmp_path, init):
    model, other, folder = made_by_peft(tmp_path, init_lora_weights=init)
    found = load_adapter(folder, model.config)
    own = converted(Decoder(model.config), [LowRank(found.lora)])
    load_weights(own, dict(model.named_parameters()) | dict(found.tensors))
    ours = own.logits(own(IDS, PackedContext([8])))
    torch.testing.assert_close(ours, other(IDS[None]).logits[0], rtol=1e-4, atol=1e-5)
    plain = model.logits(model(IDS, PackedContext([8])))
    assert not torch.allclose(ours, plain, rtol=1e-2)


@pytest.mark.parametrize(
    "kind", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"alora_invocation_tokens": [3, 8]}]
)
def test_adapters_that_mean_more_than_their_matrices_are_refused(tmp_path, kind):
    """As PEFT writes them: with the names and shapes of plain ones."""
    model, _, folder = made_by_peft(tmp_path, **kind)
    with raises(ModelError, f"{CONFIG}.{next(iter(kind))}"):
        load_adapter(folder, model.config)


@pytest.mark.parametrize(
    "key, value",
    [
        *(("init_lora_weights", init) for init in ("pissa_niter_4", "corda", "loftq", "lora_ga")),
        *(("use_dora", True), ("lora_bias", True), ("bias", "all"), ("fan_in_fan_out", True), ("use_qalora", True)),
        *(("rank_pattern", {"q_proj": 3}), ("alpha_pattern", {"q_proj": 3}), ("layer_replication", [[0, 1]])),
        *(("trainable_token_indices", [1]), ("kasa_config", {"beta": 0.1}), ("arrow_config", {"top_k": 1})),
        ("a_later_variant", "yes"),
    ],
)
def test_keys_that_are_not_known_to_be_harmless_are_refused(tmp_path, key, value):
    config, lora, _, _, adapters = with_experts("qwen3_moe")
    save_adapter(tmp_path, config, lora, adapters, "x")
    found = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(found | dict.fromkeys([key]) | {"later": {}, "auto_mapping": {"a": 1}}))
    load_adapter(tmp_path, config)
    (tmp_path / CONFIG).write_text(json.dumps(found | {key: value}))
    with raises(ModelError, f"{CONFIG}.{key}"):
        load_adapter(tmp_path, config)


def test_a_directory_without_a_tensor_is_named(tmp_path):
    config, lora, _, _, _ = with_experts("qwen3_moe")
    save_adapter(tmp_path, config, lora, {}, "x")
    with raises(ModelError, f"{TENSORS}.empty"):
        load_adapter(tmp_path, config)


def with_experts(family, targets=("*_proj",), rslora=False, **more):
    """A model of experts whose adapters change something: its parameters without them, and the adapters."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    sizes |= {"num_experts": 3, "experts_per_token": 2, "expert_size": 8, "expert_layers": (0,), **more}
    config = DecoderConfig(vocab_size=19, head_dim=8, family=family, **sizes)
    lora = LoraConfig(rank=4, alpha=8.0, targets=targets, rslora=rslora)
    model = converted(Decoder(config), [LowRank(lora)])
    model.init_weights_(0)
    own = {name: p.detach() for name, p in model.named_parameters()}
    adapters = {name: torch.randn_like(own.pop(name)) / 4 for name in [*own] if is_adapter(name)}
    load_weights(model, own | adapters)
    return config, lora, model, own, adapters


@pytest.mark.parametrize(
    "family, more",
    [
        ("qwen3_moe", {"qk_norm": True}),
        ("mixtral", {"intermediate_size": 8}),
        ("mixtral", {"intermediate_size": 8, "rslora": True}),
        ("mixtral", {"intermediate_size": 8, "rslora": True, "targets": ("o_proj", "down_proj")}),
    ],
)
def test_peft_stacks_adapters_of_experts_and_has_the_logits(tmp_path, family, more):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    config, lora, model, own, adapters = with_experts(family, **more)
    save_pretrained(tmp_path / "base", config, own)
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", config, lora, adapters, "x")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    other = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    ids = torch.arange(3, 11)
    ours = model.logits(model(ids, PackedContext([8])))
    torch.testing.assert_close(ours, other(ids[None]).logits[0], rtol=1e-4, atol=1e-5)
    with other.disable_adapter():
        assert not torch.allclose(ours, other(ids[None]).logits[0], rtol=1e-2)
    found = load_adapter(tmp_path / "adapter", config)
    assert found.tensors.keys() == adapters.keys()
    assert all(torch.equal(found.tensors[name], adapters[name]) for name in adapters)
    assert found.lora.rank == lora.rank and scale_of(found.lora) == pytest.approx(scale_of(lora), rel=1e-12)


@pytest.mark.parametrize(
    "family, which, more",
    [
        ("qwen3_moe", ("gate_up_proj",), {"qk_norm": True}),
        ("mixtral", ("gate_up_proj", "down_proj"), {"intermediate_size": 8}),
        ("gpt_oss", ("down_proj", "gate_up_proj"), {"intermediate_size": 8, "qkv_bias": True, "o_bias": True}),
        ("mixtral", ("down_proj",), {"intermediate_size": 8, "modules": []}),
    ],
)
def test_adapters_of_parameters_have_the_logits_of_peft(tmp_path, family, which, more):
    """Stacks of experts that PEFT names as ``target_parameters``, gate and up as one matrix."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    modules, more = more.get("modules", ["q_proj"]), {name: value for name, value in more.items() if name != "modules"}
    config, _, _, own, _ = with_experts(family, **more)
    save_pretrained(tmp_path / "base", config, own)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    names = [f"mlp.experts.{name}" for name in which]
    other = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=modules, target_parameters=names))
    for name, half in other.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(half, std=0.3)
    other.save_pretrained(tmp_path / "adapter")
    found = load_adapter(tmp_path / "adapter", config)
    model = converted(Decoder(config), [LowRank(found.lora)])
    load_weights(model, own | dict(found.tensors))
    ids = torch.arange(3, 11)
    ours = model.logits(model(ids, PackedContext([8])))
    torch.testing.assert_close(ours, other(ids[None]).logits[0], rtol=1e-4, atol=1e-5)
    stored = load_file(tmp_path / "adapter" / TENSORS)
    name = next(name for name in stored if "experts" in name)
    save_file(stored | {name: stored[name][1:]}, tmp_path / "adapter" / TENSORS)
    with raises(ModelError, "model.layers.0.mlp.experts.parameters"):
        load_adapter(tmp_path / "adapter", config)


@pytest.mark.parametrize(
    "family, more, key",
    [
        ("gpt_oss", {}, "model.layers.0.mlp.experts.gate_proj.lora.A.peft"),
        ("qwen3_moe", {"targets": ("gate_proj",)}, "peft.experts.parts"),
        ("mixtral", {"targets": ("gate_proj", "up_proj", "o_proj")}, "peft.experts.parts"),
        ("qwen3_moe", {"num_layers": 2}, "peft.experts.shared"),
    ],
)
def test_experts_that_peft_cannot_adapt_are_refused(tmp_path, family, more, key):
    config, lora, _, _, adapters = with_experts(family, **more)
    with raises(ModelError, key):
        save_adapter(tmp_path, config, lora, adapters, "x")


def test_an_adapter_that_lacks_an_expert_is_named(tmp_path):
    config, lora, _, _, adapters = with_experts("qwen3_moe")
    save_adapter(tmp_path, config, lora, adapters, "x")
    stored = load_file(tmp_path / TENSORS)
    del stored["base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_B.weight"]
    save_file(stored, tmp_path / TENSORS)
    with raises(ModelError, "model.layers.0.mlp.experts.up_proj.lora.B.experts"):
        load_adapter(tmp_path, config)
