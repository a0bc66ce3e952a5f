"""Predicted working sets against bytes that torch has alive, counted by its profiler, and the engine's own cache."""

import json

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.models.tiny import FAMILIES
from tilth.config.load import load_recipe
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.models.config import DecoderConfig
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.plan import memory
from tilth.plan.kernels import GPU_CHUNK_ELEMENTS
from tilth.plan.memory import judge_need, rollout_need
from tilth.plan.shape import matrices, parameters
from tilth.plan.working import ShardFactors, logits_bytes, scoring, total, training
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import appraise, packed_logprobs

WITHIN = 0.12


def most_alive(work, folder):
    """Bytes that ``work`` had allocated at its peak, of the CPU's allocator, beyond those before it."""
    return int(np.cumsum([size for _, size in allocations(work, folder)]).max())


def allocations(work, folder):
    """Address and bytes (below 0 where they are freed) of what the threads of ``work`` allocate, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    events = [e["args"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("name") == "[memory]"]
    return [(e["Addr"], e["Bytes"]) for e in events]


def recipe_of(rows, *keys):
    base = ["flow=sft", "supervised.steps=1", f"supervised.batch={rows}", "model.context=512", "optimizer.name=adamw"]
    return load_recipe("addition-grpo", [*base, *keys])


def shape(vocab, **more):
    small = {"hidden_size": 32, "intermediate_size": 96, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2}
    return DecoderConfig(vocab, **{**small, "qk_norm": True, "tie_embeddings": True, "max_positions": 512, **more})


EXPERTS = {
    "family": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "expert_size": 32, "expert_layers": (0, 1, 2),
}  # fmt: skip


def decoder(config, recipe):
    model = Decoder(config, torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32)
    model.init_weights_(0)
    model.checkpointing = recipe.train.checkpointing
    return model


def packed(rows, length, vocab):
    tokens = Jagged(np.arange(rows * length) % vocab, np.arange(rows + 1) * length)
    mask = np.ones((rows, length), np.uint8)
    mask[:, 0] = 0
    return tokens, mask.ravel()


def whole(config):
    return ShardFactors(parameters(config), 0, config, matrices(config))


@pytest.mark.parametrize(
    ("vocab", "rows", "length", "keys", "more"),
    [
        (16, 64, 64, [], {}),
        (16, 16, 300, [], {}),
        (16, 64, 64, ["train.checkpointing=true"], {"num_layers": 6}),
        pytest.param(16, 64, 64, ["train.checkpointing=selective"], {"num_layers": 6}, marks=pytest.mark.slow),
        (16, 16, 300, ["train.checkpointing=selective"], {"num_layers": 6}),
        pytest.param(16, 64, 64, ["train.offload=1"], {"num_layers": 6}, marks=pytest.mark.slow),
        (16, 64, 64, ["train.offload=0.5"], {"num_layers": 6}),
        (16, 64, 64, ["train.precision=bf16"], {}),
        (16, 64, 64, [], {"num_heads": 4, "num_kv_heads": 1}),
        (1000, 64, 64, [], {}),
        pytest.param(20_000, 4, 64, [], {}, marks=pytest.mark.slow),
        pytest.param(20_000, 64, 64, [], {}, marks=pytest.mark.slow),  # as the next rows but one thing
        pytest.param(20_000, 64, 64, [], {"tie_embeddings": False}, marks=pytest.mark.slow),
        pytest.param(20_000, 64, 64, ["train.precision=bf16"], {}, marks=pytest.mark.slow),
        pytest.param(20_000, 64, 64, ["train.micro_tokens=1024"], {"tie_embeddings": False}, marks=pytest.mark.slow),
        (20_000, 16, 64, ["train.micro_tokens=512"], {"tie_embeddings": False}),
        (20_000, 2, 16, ["train.micro_tokens=16"], {"hidden_size": 256}),
        pytest.param(150_000, 8, 40, [], {}, marks=pytest.mark.slow),
        pytest.param(150_000, 12, 64, ["train.precision=bf16"], {}, marks=pytest.mark.slow),
        (16, 64, 64, [], EXPERTS),
        (16, 64, 64, ["train.checkpointing=selective"], {**EXPERTS, "num_layers": 3}),
        pytest.param(16, 64, 64, [], {**EXPERTS, "experts_per_token": 3, "expert_size": 48}, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_training(tmp_path, vocab, rows, length, keys, more):
    recipe, config = recipe_of(rows, *keys), shape(vocab, **more)
    how = {"micro_tokens": recipe.train.micro_tokens, "offload": recipe.train.offload}
    engine = TrainEngine(decoder(config, recipe), OptimizerConfig(name="adamw"), total_steps=9, **how)
    tokens, mask = packed(rows, length, vocab)
    loss = negative_log_likelihood(float(mask.sum()))
    alive = most_alive(lambda: engine.update(tokens, mask, {}, loss, entropy=False), tmp_path)
    found = training(recipe, whole(config), length)
    assert total(found) - dict((i.name, i.bytes) for i in found)["slack of the allocator"] == pytest.approx(
        alive, rel=WITHIN
    )


@pytest.mark.parametrize(
    ("vocab", "rows", "temperature"),
    [
        (1000, 100, 1.0),
        (1000, 100, 0.7),
        pytest.param(20_000, 300, 1.0, marks=pytest.mark.slow),
        (20_000, 300, 0.7),
        pytest.param(20_000, 4000, 0.7, marks=pytest.mark.slow),
        pytest.param(150_000, 600, 1.0, marks=pytest.mark.slow),
        pytest.param(20_000, 4000, 1.0, marks=pytest.mark.slow),
        pytest.param(150_000, 600, 0.7, marks=pytest.mark.slow),
    ],
)
def test_logits_of_a_loss(tmp_path, vocab, rows, temperature):
    model = decoder(shape(vocab), recipe_of(1))
    hidden, targets = torch.randn(rows, 32, requires_grad=True), torch.arange(rows)

    def learn():
        found, entropy = model.token_logprobs(hidden, model.head_weight, targets, temperature=temperature)
        (found.sum() + entropy.sum()).backward()

    alive = most_alive(learn, tmp_path) - vocab * 32 * 4
    assert logits_bytes(recipe_of(1), whole(shape(vocab)), rows, temperature, learns=True) == pytest.approx(
        alive, rel=WITHIN
    )


def test_where_a_kernel_computes_the_head_no_logits_are_counted(monkeypatch):
    on_gpu, vocab, rows = ("train.device=cuda", "train.precision=bf16"), 150_000, 8192
    cut = whole(shape(vocab))

    def counted(*keys, learns=True):
        return logits_bytes(recipe_of(1, *keys), cut, rows, 0.7, learns=learns)

    logits, chunk, weight = rows * vocab * 4, 2 * GPU_CHUNK_ELEMENTS, vocab * 32 * 2
    assert chunk < counted(*on_gpu) < chunk + 10 * rows * 4 + rows * 32 * 6 + weight < logits / 4
    assert counted(*on_gpu, learns=False) == 5 * rows * 4 * (147 + 1) + weight
    assert counted("train.device=cuda") > logits / 4  # fp32 has no kernel
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("tilth.core.device.runs_triton", lambda device: False)
    assert counted(*on_gpu) > logits / 4 and counted(*on_gpu, learns=False) > logits / 4


def test_a_critic_has_no_logits(tmp_path):
    recipe, config = recipe_of(64), shape(20_000)
    model = ValueModel(decoder(config, recipe))
    engine = TrainEngine(model, OptimizerConfig(name="adamw"), total_steps=9, micro_tokens=16_384, scorer=appraise)
    tokens, mask = packed(64, 64, 20_000)
    alive = most_alive(
        lambda: engine.update(tokens, mask, {}, lambda micro: (micro.values.square().sum(), {}), entropy=False),
        tmp_path,
    )
    found = training(recipe, whole(config), 64, head=False)
    assert "logits" not in {item.name for item in found if item.bytes}
    assert sum(i.bytes for i in found if not i.name.startswith("slack")) == pytest.approx(alive, rel=WITHIN)


def test_scoring_keeps_no_log_probs(tmp_path):
    recipe, config = recipe_of(32), shape(20_000)
    model = decoder(config, recipe)
    tokens, mask = packed(32, 64, 20_000)
    alive = most_alive(lambda: packed_logprobs(model, tokens, mask, max_tokens=16_384), tmp_path)
    found = {item.name: item.bytes for item in scoring(recipe, whole(config), 64)}
    assert found["logits"] <= alive <= 1.1 * (found["logits"] + found["activations of scoring"])


# ---- the rollout engine ----


def speaking(rows, group, prompt, new, vocab, **keys):
    dotted = [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    fixed = [f"rollout.prompts={rows // group}", f"rollout.group={group}", f"rollout.max_tokens={new}"]
    return load_recipe(
        "addition-grpo", ["model.context=512", "run.eval_prompts=1", "algorithm.drop_flat=false", *fixed, *dotted]
    ), vocab


@pytest.mark.parametrize(
    ("rows", "group", "prompt", "new", "vocab", "keys"),
    [
        (64, 8, 16, 16, 16, {}),
        pytest.param(64, 1, 16, 16, 16, {}, marks=pytest.mark.slow),
        pytest.param(16, 4, 100, 150, 16, {}, marks=pytest.mark.slow),
        (16, 1, 300, 10, 16, {}),
        (16, 4, 16, 16, 16, {"train__precision": "bf16"}),
        pytest.param(32, 4, 16, 4, 20_000, {}, marks=pytest.mark.slow),
        (32, 1, 16, 4, 20_000, {}),
        (32, 4, 16, 4, 20_000, {"rollout__temperature": 0.7, "rollout__top_p": 0.9}),
        (64, 4, 16, 4, 20_000, {"rollout__max_rows": 16}),
    ],
)
def test_a_cache_and_what_a_step_of_the_engine_needs(tmp_path, rows, group, prompt, new, vocab, keys):
    recipe, _ = speaking(rows, group, prompt, new, vocab, **keys)
    config, r = shape(vocab), recipe.rollout
    engine = Engine(
        config,
        EngineOptions(
            dtype=torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32,
            max_rows=r.max_rows,
            kv_tokens=r.max_rows * 512,
            max_length=512,
            step_tokens=r.step_tokens,
        ),
    )
    engine.model.init_weights_(0)
    engine.model.fuse()
    params = SamplingParams(max_tokens=new, temperature=r.temperature, top_p=r.top_p)
    requests = [
        Request(id=i, prompt=(np.arange(prompt) + i // group) % vocab, params=params, group=i // group)
        for i in range(rows)
    ]
    alive = most_alive(lambda: engine.generate(requests), tmp_path)
    need = rollout_need(recipe, ShardFactors(0, 0, config, 0), prompt + new)
    held = {item.name: item.bytes for item in need.held}
    assert held["KV cache"] == pytest.approx(engine.kv_bytes, rel=0.2)
    assert 0.85 * alive <= held["KV cache"] + total(need.generation) <= 1.5 * alive


GPU = ("train.device=cuda", "train.precision=bf16")


@pytest.mark.parametrize(
    ("keys", "sizes", "version", "may"),
    [
        (GPU, {}, "2.13.0", True),
        (GPU, {}, "2.12.1", False),
        (GPU[:1], {}, "2.13.0", False),
        ((*GPU, "rollout.speculate=suffix"), {}, "2.13.0", False),
        (GPU, {"head_dim": 12}, "2.13.0", False),
        (GPU, {"head_dim": 264}, "2.13.0", False),
        (GPU, {"family": "gpt_oss"}, "2.13.0", False),
    ],
    ids=["pages", "torch", "fp32", "drafts", "odd", "wide", "sinks"],
)
def test_a_cache_on_a_gpu_is_the_larger_of_pages_and_slots(monkeypatch, keys, sizes, version, may):
    """Pages are counted where the engine may have them; a judge never drafts."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    recipe = load_recipe("chain-fapo", ["judge.path=x", *keys])
    cut = whole(shape(64, **sizes))
    slots, pages = [], []
    for found, size in ((slots, 0), (pages, 1 << 60)):
        monkeypatch.setattr(memory, "paged_cache", lambda *_, size=size: (size, 0))
        for name, need in (("", rollout_need(recipe, cut, 48)), ("judge's ", judge_need(recipe, cut, 48))):
            found.append({item.name: item.bytes for item in need.held}[f"{name}KV cache"])
    assert min(slots) > 0
    assert [size == 1 << 60 for size in pages] == [may, may or "rollout.speculate=suffix" in keys]


def test_a_judge_that_grades_in_parity_mode_keeps_whole_keys_and_values():
    """Where a family has latents, the engine's cache holds those outside of parity mode."""
    grading = ["flow=grpo", "reference.path=", "judge.path=x", 'judge.rubric="{completion}"', "train.parity=true"]
    cut = whole(FAMILIES["deepseek-v3"])

    def cache(*keys):
        held = judge_need(load_recipe("addition-grpo", [*grading, *keys]), cut, 48).held
        return next(item.bytes for item in held if item.name == "judge's KV cache")

    assert cache() > cache("train.parity=false", "train.device=cuda")
    assert cache() == cache("train.parity=false")
    assert cache() > cache('judge.rubric=""', "flow=fapo")


def test_a_judge_counts(tmp_path):
    """Its weights and its cache, by its own shape and not the policy's."""
    recipe = load_recipe("chain-fapo", ["judge.path=x", "judge.max_tokens=32", "rollout.prompts=4", "rollout.group=4"])
    config = shape(64, num_layers=2)
    need = judge_need(recipe, whole(config), 48)
    engine = Engine(config, EngineOptions(max_rows=recipe.rollout.max_rows))
    engine.model.init_weights_(0)
    engine.model.fuse()
    params = SamplingParams(max_tokens=32, temperature=0.0)
    asked = [Request(id=i, prompt=(np.arange(96) + i) % 64, params=params) for i in range(16)]
    alive = most_alive(lambda: engine.generate(asked), tmp_path)
    held = {item.name: item.bytes for item in need.held}
    assert held["judge's weights"] == 4 * parameters(config)
    assert held["judge's KV cache"] == pytest.approx(engine.kv_bytes, rel=0.35)
    assert 0.7 * alive <= held["judge's KV cache"] + total(need.generation) <= 1.5 * alive
