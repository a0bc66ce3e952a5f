"""Router, experts and their dispatch, beside brute force and transformers' own DeepSeek router."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.errors import raises
from tests.models.tiny import FAMILIES, decoder, lively_, shape, tokens
from tilth.config.schema import ModelConfig
from tilth.core.errors import ModelError, RecipeError
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.family import new_config
from tilth.models.hf import load_pretrained, save_pretrained
from tilth.models.moe import ExpertContext, MoE, Router, Routing, RunExperts, dispatch_here
from tilth.models.steady import steady
from tilth.plan.shape import hf_experts, matrices, parameter_shapes, parameters, token_flops

MIXTRAL, QWEN = FAMILIES["mixtral"], FAMILIES["qwen3-moe"]


def block(config: DecoderConfig) -> MoE:
    found = decoder(config).model.layers[config.expert_layers[0]].mlp
    assert isinstance(found, MoE)
    return found


def brute_force(moe: MoE, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    config, rows = moe.gate.config, []
    for token in x:
        scores = F.softmax(moe.gate.weight @ token, -1)
        best = sorted(range(config.num_experts), key=lambda e: -scores[e].item())[: config.experts_per_token]
        total = sum(scores[e] for e in best) if config.renormalise else 1.0
        row = torch.zeros_like(token)
        for e in best:
            gate, up, down = (
                part.weight[e] for part in (moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj)
            )
            row = row + scores[e] / total * (down @ (F.silu(gate @ token) * (up @ token)))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("config", [MIXTRAL, QWEN], ids=["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("count", [0, 1, 23])
def test_a_block_equals_brute_force_forward_and_backward(config: DecoderConfig, count: int) -> None:
    moe = block(config).double()
    x = torch.randn(count, 64, dtype=torch.float64, requires_grad=True)
    found = moe(x, None)
    if not count:
        found.sum().backward()
        assert found.shape == (0, 64)
        assert all(p.grad is not None for p in moe.experts.parameters())
        return
    wanted, probe = brute_force(moe, x), torch.randn(count, 64, dtype=torch.float64)
    assert (found - wanted).abs().max() < 1e-12
    ours = torch.autograd.grad((found * probe).sum(), [x, *moe.parameters()], materialize_grads=True)
    theirs = torch.autograd.grad((wanted * probe).sum(), [x, *moe.parameters()], materialize_grads=True)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(ours, theirs))


def test_experts_without_tokens_cost_nothing_and_change_nothing() -> None:
    moe, x = block(MIXTRAL), torch.randn(1, 64)
    assert torch.equal(moe(x.expand(9, 64).contiguous(), None)[3], moe(x.repeat(9, 1), None)[0])


@pytest.mark.parametrize("groups", [1, 4])
def test_sigmoid_groups_correction_and_scale_equal_deepseek(groups: int) -> None:
    # Here, as it takes a second, in every process of the tests: all of them import this file.
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = shape(
        "qwen3_moe", num_experts=16, experts_per_token=4, router_score="sigmoid", renormalise=True, routed_scale=2.5,
        expert_groups=groups, groups_per_token=(groups + 1) // 2, router_correction=True,
    )  # fmt: skip
    other = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=64, n_routed_experts=16, num_experts_per_tok=4, n_group=groups, topk_group=(groups + 1) // 2,
            norm_topk_prob=True, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    ours, x = Router(config), torch.randn(50, 64)
    ours.weight, ours.correction = torch.nn.Parameter(torch.randn(16, 64)), torch.nn.Parameter(torch.randn(16) * 0.3)
    with torch.no_grad():
        other.weight.copy_(ours.weight)
        other.e_score_correction_bias.copy_(ours.correction)
    _, weights, chosen = other(x)
    scores = ours.scores(ours.logits(x))
    found = ours.choose(scores)
    assert torch.equal(found.sort(-1)[0], chosen.sort(-1)[0])
    mine = torch.zeros(50, 16).scatter(1, found, ours.weigh(scores, found))
    assert (mine - torch.zeros(50, 16).scatter(1, chosen, weights)).abs().max() < 1e-6
    plain = Router(replace(config, router_correction=False))
    plain.weight = ours.weight
    assert not torch.equal(plain.choose(scores).sort(-1)[0], found.sort(-1)[0])


def test_a_dispatch_of_another_module_replaces_the_local_one() -> None:
    """The seam: it is given tokens, choice and the experts held here, and may call them in any division."""
    calls = []

    def one_by_one(x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
        calls.append(experts)
        return torch.cat(
            [
                dispatch_here(x[i : i + 1], Routing(*(r[i : i + 1] for r in routing)), run, experts)
                for i in range(len(x))
            ]
        )

    model, ids = decoder(QWEN), tokens([12])
    plain = model(ids, PackedContext([12]))
    other = model(ids, PackedContext([12], experts=ExpertContext(one_by_one)))
    assert (plain - other).abs().max() < 1e-5
    assert calls == [5, 5]


def test_choices_are_noted_and_followed() -> None:
    model, ids = decoder(QWEN), tokens([12])
    noted = ExpertContext(record=True)
    plain = model(ids, PackedContext([12], experts=noted))
    assert sorted(noted.chosen) == [0, 2]
    own = torch.stack([noted.chosen[i] for i in (0, 2)], 1)
    assert own.shape == (12, 2, 3)
    again = model(ids, PackedContext([12], experts=ExpertContext(replay=own)))
    assert torch.equal(again, plain)
    partly = own.clone()
    partly[5:] = -1
    assert torch.equal(model(ids, PackedContext([12], experts=ExpertContext(replay=partly))), plain)
    other = ExpertContext(replay=(own + 1) % 5, record=True)
    moved = model(ids, PackedContext([12], experts=other))
    assert not torch.equal(moved, plain)
    assert torch.equal(
        other.chosen[0], own[:, 0]
    )  # the router's own choice in the first layer is noted, not the replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_equals_a_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of experts without rows; torch runs the kernel on a CPU too, where the loop is the faster one."""
    moe, x, found = decoder(MIXTRAL, dtype).model.layers[0].mlp, torch.randn(3, 64).to(dtype), []
    for grouped in (False, True):
        monkeypatch.setattr("tilth.models.moe.grouped_matmul_serves", lambda rows, grouped=grouped: grouped)
        moe.zero_grad()
        y = moe(x, None)
        (y * torch.linspace(-1, 1, 64)).sum().backward()
        found.append([y, *(p.grad for p in moe.parameters())])
    assert all((a - b).abs().max() <= 1e-2 * a.abs().max() for a, b in zip(*found))


def test_recomputed_layers_give_the_same_gradients() -> None:
    model, ids, found = decoder(QWEN), tokens([12]), []
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        model.zero_grad()
        model(ids, PackedContext([12])).square().sum().backward()
        found.append([p.grad.clone() for p in model.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_in_steady_mode_an_expert_gives_a_row_the_same_bits_in_any_company() -> None:
    moe = block(MIXTRAL)
    x = torch.randn(200, 64)
    with steady():
        whole = moe(x, ExpertContext(parity=True))
        for rows in (1, 5, 40, 199):
            assert torch.equal(whole[:rows], moe(x[:rows].contiguous(), ExpertContext(parity=True)))


def test_shapes_parameters_and_flops_of_experts() -> None:
    config = shape("qwen3_moe", num_experts=6, experts_per_token=2, expert_size=24, expert_layers=(1, 2))
    shapes = parameter_shapes(config)
    assert shapes["model.layers.1.mlp.experts.down_proj.weight"] == (6, 64, 24)
    assert "model.layers.0.mlp.gate_proj.weight" in shapes and "model.layers.0.mlp.gate.weight" not in shapes
    assert parameters(config) == sum(p.numel() for p in Decoder(config).parameters())
    one = 3 * 64 * 24
    assert matrices(config) - matrices(config, active=True) == 2 * (
        4 * one - 6 * 64
    )  # routers count where they compute
    assert parameters(config) - parameters(config, active=True) == 2 * 4 * one
    dense = shape("qwen3", head_dim=0)
    attention = matrices(dense) - 3 * 3 * 64 * 96
    wanted = 2 * (attention + 3 * 64 * 96 + 2 * (2 * one + 6 * 64) + 97 * 64)
    assert token_flops(config, 0).forward == wanted


def test_an_export_has_one_tensor_for_each_expert(tmp_path: Path) -> None:
    model = decoder(MIXTRAL)
    save_pretrained(tmp_path, MIXTRAL, model.state_dict())
    file = load_file(tmp_path / "model.safetensors")
    stack = model.state_dict()["model.layers.1.mlp.experts.up_proj.weight"]
    names = hf_experts(MIXTRAL)["model.layers.1.mlp.experts.up_proj.weight"]
    assert names[3] == "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    assert all(torch.equal(file[name], own) for name, own in zip(names, stack, strict=True))
    _, found = load_pretrained(tmp_path)
    part = found.part("model.layers.1.mlp.experts.up_proj.weight", (slice(1, 3), slice(4, 9)))
    assert torch.equal(part, stack[1:3, 4:9])
    assert found.part("model.layers.1.mlp.experts.up_proj.weight", (slice(2, 2), slice(4, 9))).shape == (0, 5, 64)


@pytest.mark.parametrize("wrong", ["missing", "extra", "shape"])
def test_experts_that_do_not_fit_are_named(wrong: str, tmp_path: Path) -> None:
    model = decoder(QWEN)
    save_pretrained(tmp_path, QWEN, model.state_dict())
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.3.up_proj.weight"
    other = name.replace("3", "5")
    if wrong == "missing":
        del tensors[name]
    else:
        tensors[name if wrong == "shape" else other] = torch.zeros(24, 63)
    save_file(tensors, tmp_path / "model.safetensors")
    key = {"missing": f"{name}.missing", "extra": f"{other}.extra", "shape": f"{name}.shape"}[wrong]
    with raises(ModelError, key=key):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("experts_per_token", {"experts_per_token": 6}),
        ("expert_size", {"expert_size": 0}),
        ("expert_layers", {"expert_layers": (0, 3)}),
        ("expert_layers", {"expert_layers": ()}),
        ("num_experts", {"num_experts": 0}),
        ("expert_groups", {"expert_groups": 2}),
        ("groups_per_token", {"expert_groups": 5, "groups_per_token": 2}),
    ],
)
def test_impossible_shapes_are_named(key: str, changes: dict[str, object]) -> None:
    with raises(ModelError, key=key):
        shape("qwen3_moe", **changes)


def test_a_new_model_of_a_recipe() -> None:
    keys = {"hidden": 32, "heads": 2, "layers": 3, "ffn": 48}
    found = new_config(ModelConfig(family="qwen3_moe", experts=4, dense_layers=1, **keys), 50)
    assert (found.num_experts, found.experts_per_token, found.expert_size, found.expert_layers) == (4, 2, 24, (1, 2))
    found = new_config(ModelConfig(family="mixtral", expert_ffn=40, **keys), 50)
    assert (found.num_experts, found.expert_size, found.intermediate_size) == (8, 40, 40)
    assert found.to_hf()["intermediate_size"] == 40
    lively_(Decoder(found))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("qwen3", "experts", 4), ("mixtral", "dense_layers", 1), ("qwen3_moe", "shared_experts", 1)],
)
def test_keys_that_a_family_does_not_have_are_named(family: str, key: str, value: int) -> None:
    with raises(RecipeError, key=f"model.{key}"):
        new_config(ModelConfig(family=family, **{key: value}), 50)


@pytest.mark.slow
def test_the_layers_around_experts_compile() -> None:
    model, ids = decoder(QWEN), tokens([12])
    plain = model(ids, PackedContext([12]))
    model.compile(backend="eager")
    assert all(torch.equal(model(ids[:n], PackedContext([n])), plain[:n]) or n < 12 for n in (12, 7, 12))
    assert (model(ids[:7], PackedContext([7])) - plain[:7]).abs().max() < 1e-5
