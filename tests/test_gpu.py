"""What CUDA computes is what a CPU computes: engine and trainer, weights, checkpoints, memory, a run. ``make gpu``.

On a pretended device (``tests.gpu_free``) too; ``slow`` are those that ``make test`` does not run there.
"""

import copy
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.checkpoint.test_saver import alone
from tests.config.test_plugins import forget
from tests.engines.reference import CONFIG, LORAS, halves, make_engine, make_model, make_requests
from tests.engines.test_adapters import asked
from tests.flows import tiny
from tests.flows.test_episodes import recipe as episodes
from tests.scripts import SCRIPTS, script
from tests.training.test_engine import batch, reference_loss
from tilth.api import run_recipe
from tilth.checkpoint import Commit, Saver, begin_save, open_checkpoint
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.checksum import checksum
from tilth.core.device import runs_triton
from tilth.engines import engine as engine_module
from tilth.engines import sampling
from tilth.engines.pages import pages_serve
from tilth.engines.request import Request, SamplingParams
from tilth.flows.weight_sync import DEFAULT_MISMATCH
from tilth.models import logprobs as heads
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.runs.readers import read_metrics, read_state
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import packed_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA, PRETENDED = torch.device("cuda"), "tests.gpu_free.device" in sys.modules
SLOW = pytest.mark.slow
FP32, BF16 = pytest.param(torch.float32, marks=SLOW, id="fp32"), pytest.param(torch.bfloat16, id="bf16")
APART = {torch.float32: DEFAULT_MISMATCH["fp32"], torch.bfloat16: DEFAULT_MISMATCH["bf16"]}
"""Largest difference of two log-probs of one token: at a greater one a run stops."""
GROUPED = DecoderConfig(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16,
    qk_norm=True, max_positions=512,
)  # fmt: skip
EXPERTS = replace(
    GROUPED, family="qwen3_moe", num_experts=5, experts_per_token=2, expert_size=24, expert_layers=(1,)
)  # fmt: skip


def sampled(model, **options):
    """Trajectories of all kinds of requests but those with filters, and the engine."""
    kinds = [SamplingParams(max_tokens=40, stop_tokens=(3, 5)), SamplingParams(max_tokens=25, temperature=0.0)]
    engine = make_engine(model, device=CUDA, **options)
    return engine, engine.generate(make_requests(40, longest=90, kinds=kinds))


def rows_of(trajectories):
    tokens = Jagged.of([t.tokens for t in trajectories])
    mask = np.concatenate([np.r_[np.zeros(t.prompt_length), np.ones(t.completion_length)] for t in trajectories])
    return tokens, mask.astype(np.uint8)


@pytest.mark.parametrize(
    ("config", "compile"),
    [
        pytest.param(CONFIG, False, marks=SLOW, id="plain-eager"),
        pytest.param(CONFIG, True, marks=SLOW, id="plain-graphs"),
        pytest.param(GROUPED, False, marks=SLOW, id="grouped-eager"),
        pytest.param(GROUPED, True, marks=SLOW, id="grouped-graphs"),
        pytest.param(EXPERTS, False, marks=SLOW, id="experts-eager"),
    ],
)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_log_probs_of_the_engine_are_those_of_the_trainer(dtype, config, compile):
    model = make_model(config, dtype=dtype).to(CUDA)
    _, found = sampled(model, compile=compile)
    tokens, mask = rows_of(found)
    said = np.concatenate([t.logprobs for t in found])
    apart = np.abs(packed_logprobs(model, tokens, mask, max_tokens=512) - said)[mask == 1]
    assert len(apart) > 600 and apart.max() <= APART[dtype] and apart.mean() <= APART[dtype] / 10


@SLOW
@pytest.mark.parametrize("dtype", APART, ids=str)
def test_scores_are_those_of_a_cpu_in_float64(dtype):
    """Of the same, rounded weights."""
    model = make_model(GROUPED, dtype=dtype)
    _, found = sampled(copy.deepcopy(model).to(CUDA))
    tokens, mask = rows_of(found)
    exact = Decoder(GROUPED, torch.float64)
    exact.load_state_dict({name: p.double() for name, p in model.state_dict().items()}, assign=True)
    wanted = packed_logprobs(exact, tokens, mask, max_tokens=512)
    scored = packed_logprobs(model.to(CUDA), tokens, mask, max_tokens=512)
    assert np.abs(scored - wanted).max() <= APART[dtype]


@SLOW
def test_activations_on_the_host_change_no_gradient_and_leave_the_device():
    config, found = replace(GROUPED, num_layers=6), []
    tokens, mask = batch((400, 300, 500, 200))
    for share in (0.0, 0.5, 1.0):
        engine = TrainEngine(
            make_model(config).requires_grad_(True).to(CUDA),
            OptimizerConfig(lr=1e-3),
            total_steps=9,
            micro_tokens=700,
            offload=share,
        )
        losses = []
        for _ in range(2):  # the second step finds the allocator's memory as the first one has left it
            torch.cuda.reset_peak_memory_stats()
            losses.append(engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum()))).loss)
        found.append((losses, torch.cuda.max_memory_allocated(), engine.model.offload))
    for losses, peak, moved in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6) and moved.bytes > 1 << 20 and peak < found[0][1]
    assert found[2][1] < found[1][1]


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=SLOW)], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_training_step_is_that_of_a_cpu_in_float64(dtype, compile):
    config = DecoderConfig(
        vocab_size=11, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True
    )
    tokens, mask = batch(lengths=(40, 17, 33, 5, 64, 21))
    exact, made = Decoder(config, torch.float64).double(), Decoder(config, dtype)
    made.init_weights_(0)
    exact.load_state_dict({name: p.double() for name, p in made.state_dict().items()})
    engine = TrainEngine(
        made.to(CUDA), OptimizerConfig(lr=0.01, clip_norm=0.0), total_steps=10, micro_tokens=80, compile=compile
    )
    done = engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    loss = reference_loss(exact, tokens, mask)
    loss.backward()
    norm = float(torch.cat([p.grad.flatten() for p in exact.parameters()]).norm())
    rel = 1e-5 if dtype == torch.float32 else 2e-2
    assert (done.loss, done.grad_norm) == (pytest.approx(loss.item(), rel=rel), pytest.approx(norm, rel=10 * rel))
    groups = [{"params": [p for p in exact.parameters() if (p.ndim > 1) == matrices]} for matrices in (True, False)]
    torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0).step()
    # Adam's first step is lr times the sign of each gradient, so in bf16 the smallest gradients may differ by 2 lr.
    moved = torch.cat(
        [(a.detach().cpu() - b.detach()).abs().flatten() for a, b in zip(made.parameters(), exact.parameters())]
    )
    assert moved.mean() < (1e-5 if dtype == torch.float32 else 1e-3) and moved.max() <= 0.0201


@pytest.mark.parametrize("shared", [pytest.param(False, marks=SLOW), True], ids=["apart", "shared"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_of_samples_of_a_prompt_are_those_of_a_cpu_in_float64(dtype, shared):
    """Computed once for all of them, as a tree, or apart; with windows too."""
    config = replace(GROUPED, sliding_window=12, window_layers=(1,))
    rng = np.random.default_rng(0)
    prompts, ends = rng.integers(0, 100, (3, 20)), (5, 17, 9)
    tokens = Jagged.of([np.append(prompt, rng.integers(0, 100, n)) for prompt in prompts for n in ends])
    mask = np.concatenate([np.arange(20 + n) >= 20 for _ in prompts for n in ends]).astype(np.uint8)
    if not shared:
        tokens = Jagged(np.where(mask, tokens.values, rng.integers(0, 100, len(mask))), tokens.offsets)
    made = make_model(config, dtype=torch.float32, scale=2.0)
    exact = Decoder(config, torch.float64).double()
    exact.load_state_dict({name: p.double() for name, p in made.state_dict().items()})
    made.dtype = dtype
    norms = []
    for model in (made.requires_grad_(True).to(CUDA), exact):
        engine = TrainEngine(model, OptimizerConfig(lr=0.01), total_steps=9, micro_tokens=150)
        norms.append(engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum()))))
    assert norms[0].computed == norms[1].computed and (norms[0].computed < len(mask)) == shared
    rel = 1e-5 if dtype == torch.float32 else 2e-2
    assert norms[0].loss == pytest.approx(norms[1].loss, rel=rel)
    assert norms[0].grad_norm == pytest.approx(norms[1].grad_norm, rel=10 * rel)


LONG = SamplingParams(max_tokens=14)


def long_requests(count=8):
    """Prompts of one to three pages, some shared by samples, some that begin like others."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, n) for n in (250, 512, 600, 17)]
    prompts.append(np.append(prompts[2][:530], rng.integers(0, 100, 9)))
    return [Request(i, prompts[i % 5], replace(LONG, temperature=i % 2), group=i) for i in range(count)]


def distances(found, wanted):
    """Share of tokens before the first one that differs, and the greatest difference of their log-probs."""
    seen, apart = [], []
    for a, b in zip(found, wanted, strict=True):
        same = np.append(a.tokens != b.tokens, True).argmax()
        seen.append((same - a.prompt_length) / a.completion_length)
        apart.append(np.abs(a.logprobs - b.logprobs)[:same].max())
    return np.mean(seen), max(apart)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=SLOW)], ids=["eager", "graphs"])
@pytest.mark.parametrize("windows", [False, pytest.param(True, marks=SLOW)], ids=["full", "windows"])
def test_pages_give_what_slots_give(monkeypatch, compile, windows):
    """With sequences that end, are preempted and share the beginnings of others."""
    config = replace(GROUPED, sliding_window=40, window_layers=(1,)) if windows else GROUPED
    if not pages_serve(config, torch.bfloat16, CUDA):
        pytest.skip("no pages with this torch or on this device")
    model, said = make_model(replace(config, max_positions=1024), dtype=torch.bfloat16).to(CUDA), []
    options = {"compile": compile, "max_length": 1024, "max_rows": 6}
    for paged in (True, False):
        if not paged:
            monkeypatch.setattr(engine_module, "pages_serve", lambda *_: False)
        engine = make_engine(model, device=CUDA, kv_tokens=2816 if paged else 0, **options)
        said.append(engine.generate(long_requests()))
        counts = engine.stats()
        assert engine._paged == paged and (counts.preemptions > 0) == paged and counts.cached_tokens > 0
    alike, apart = distances(*said)
    assert alike > 0.5 and apart <= APART[torch.bfloat16]
    if PRETENDED:  # both kernels are one there
        assert alike == 1 and apart == 0


def test_a_sequence_goes_on_in_another_engine_with_its_kv():
    """From pages to pages, and from the slots of a CPU; nothing but its newest token is computed."""
    model = make_model(GROUPED, dtype=torch.bfloat16)
    requests = [replace(r, params=SamplingParams(max_tokens=16, temperature=0.0)) for r in long_requests(1)]
    wanted = make_engine(copy.deepcopy(model).to(CUDA), device=CUDA, max_length=512).generate(requests)
    for source in ("cuda", "cpu"):
        first, second = (
            make_engine(copy.deepcopy(model).to(where), device=where, max_length=512) for where in (source, "cuda")
        )
        first.submit(requests)
        for _ in range(8):
            first.poll()
        begun, kv = first.export(requests[0].id)
        assert kv.tokens.size == len(begun.tokens) - 1 and begun.completion_length > 3 and not first.pending
        second.resume(begun, requests[0].params, kv=kv)
        found = []
        while second.pending:
            found += second.poll()
        assert second.stats().prefilled_tokens == 1
        tokens, mask = rows_of(found)
        apart = np.abs(packed_logprobs(second.model, tokens, mask, max_tokens=512) - found[0].logprobs)[mask == 1]
        assert apart.max() <= APART[torch.bfloat16]
        if PRETENDED:  # elsewhere a pass over one row may round otherwise
            assert source == "cpu" or found[0].tokens.tolist() == wanted[0].tokens.tolist()


@SLOW
def test_adapters_of_requests_are_those_of_a_cpu():
    said = []
    for device in ("cpu", "cuda"):
        engine = make_engine(make_model(GROUPED), device=device)
        for name, lora in LORAS.items():
            engine.load_adapter(name, lora, halves(name, GROUPED))
        said.append([t.tokens.tolist() for t in engine.generate(asked("", *LORAS))])
    assert np.mean([a == b for a, b in zip(*said)]) > 0.9


@SLOW
@pytest.mark.parametrize("dtype", APART, ids=str)
def test_the_engine_generates_with_the_weights_that_the_trainer_has(dtype):
    model, other = (make_model(GROUPED, seed=seed).to(CUDA) for seed in (0, 1))
    requests = make_requests(12, kinds=[SamplingParams(max_tokens=30, temperature=0.0)])
    engine = make_engine(model, device=CUDA, dtype=dtype, compile=True)
    before = [t.tokens.tolist() for t in engine.generate(requests)]
    engine.update_weights(other.named_parameters(), version=2)  # fp32, whatever the engine's dtype: as a run publishes
    assert {name: checksum(p) for name, p in engine.named_parameters()} == {
        name: checksum(p.detach().to(dtype).cpu()) for name, p in other.named_parameters()
    }
    after = [t.tokens.tolist() for t in engine.generate(requests)]
    wanted = [t.tokens.tolist() for t in make_engine(other, device=CUDA, dtype=dtype, compile=True).generate(requests)]
    assert after != before and np.mean([a == b for a, b in zip(after, wanted)]) > 0.9


def test_a_checkpoint_goes_from_one_device_to_the_other_and_back(tmp_path):
    model = make_model(GROUPED, dtype=torch.bfloat16).to(CUDA)
    tensors = {name: p.detach() for name, p in model.named_parameters()} | {"step": torch.tensor(7.0, device=CUDA)}
    kept = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    folder, save = begin_save(tmp_path, 1), Saver()
    save.start(folder, {"model": alone(tensors)}, 0)
    for tensor in tensors.values():
        tensor.mul_(2)
    checkpoint = open_checkpoint(Commit(folder, {"model": (0,)}, {}).wait(60))
    for device in ("cuda", "cpu"):
        into = {name: torch.zeros_like(tensor, device=device) for name, tensor in tensors.items()}
        checkpoint.restore("model", into)
        assert all(torch.equal(into[name].cpu(), kept[name]) for name in kept)


@pytest.mark.skipif(PRETENDED, reason="kernels of a CPU have other buffers")
@SLOW
@pytest.mark.parametrize("what", ["training", "generation"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_predicted_memory_is_that_of_the_allocator(monkeypatch, what, dtype):
    monkeypatch.syspath_prepend(SCRIPTS)
    row = script("memory.py").row(what, "50M", dtype, "cuda", quick=False)
    assert 0.8 <= row["predicted_over_peak"] <= 1.6, row


@SLOW
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_run_learns_as_on_a_cpu(tmp_path, precision, compile):
    """Every step compares the engine's log-probs with the trainer's, and their weights; the first losses are equal."""
    made = {}
    for device in ("cpu", "cuda"):
        train = {"device": device, "precision": precision, "compile": compile and device == "cuda"}
        recipe = tiny.recipe(tmp_path / device, train=train, rollout={"compile": train["compile"]})
        made[device] = tiny.run(recipe).directory
    assert read_state(made["cuda"])["state"] == "finished"
    ours, theirs = (read_metrics(made[device]) for device in ("cuda", "cpu"))
    assert len(ours) == len(theirs) and all(np.isfinite(record["loss"]) for record in ours)
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-4 if precision == "fp32" else 2e-2)
    assert ours[-1]["phase"] == "grpo" and ours[-1]["tokens/generated"] > 0


@SLOW
def test_a_run_of_episodes_learns_as_on_a_cpu(tmp_path):
    losses = []
    for device in ("cpu", "cuda"):
        made = episodes(tmp_path / device, train={"device": device})
        losses.append([record["loss"] for record in read_metrics(tiny.run(made, reward=None).directory)])
        forget()
    assert len(losses[1]) == 5 and losses[1] == pytest.approx(losses[0], rel=1e-2)


@SLOW
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    more = {"train": {"device": "cuda"}, "run": {"name": "it"}}
    tiny.run(tiny.recipe(tmp_path, algorithm={"steps": 3}, **more))
    longer = tiny.recipe(tmp_path, algorithm={"steps": 6}, **more)
    again = run_recipe(longer, name="tiny", reward=tiny.close_enough, allow=["algorithm.steps"])
    assert [record["step"] for record in read_metrics(again.directory)] == list(range(1, 13))
    assert len(read_state(again.directory)["attempts"]) == 2


@pytest.fixture
def plain(monkeypatch):
    """Return a context in which the plain functions compute what kernels in Triton do; skip where these do not run."""
    if not runs_triton(CUDA):
        pytest.skip("kernels in Triton do not run here")

    @contextmanager
    def without():
        with monkeypatch.context() as patch:
            for module in (heads, sampling):
                patch.setattr(module, "chosen", lambda name, x: None)
            yield

    return without


@pytest.mark.parametrize("d", [96, 128])
def test_the_kernel_of_the_output_head_has_its_reference_s_values(d, plain):
    generator = torch.Generator().manual_seed(d)
    hidden, weight = (torch.randn(n, d, generator=generator).to(CUDA) for n in (300, 5000))
    hidden, targets = hidden.bfloat16(), torch.randint(5000, (300,), generator=generator).to(CUDA)

    def found():
        given = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values = heads.token_logprobs(*given, targets, 3.0)
        return [*values, *torch.autograd.grad(sum(x.sum() for x in values), given)]

    ours, again = found(), found()
    assert all(torch.equal(a, b) for a, b in zip(ours, again))
    alone = heads.token_logprobs(hidden[7:20], weight, targets[7:20], 3.0)
    assert all(torch.equal(a[7:20], b) for a, b in zip(ours, alone))
    with plain():
        wanted = found()
    assert all((a - b).abs().max() < 0.1 for a, b in zip(ours[:2], wanted))
    assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(ours[2:], wanted[2:]))


def test_the_kernel_of_the_sampler_draws_as_its_reference(plain):
    params = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=40, top_p=0.9, min_p=0.01)]
    params = [*params, SamplingParams(top_p=0.5), SamplingParams(temperature=1.7, top_k=5)] * 20
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(100, 5001, generator=generator) * 3, torch.rand(100, generator=generator)
    given = logits.to(CUDA), uniform.to(CUDA), sampling.Rules.of(params, CUDA)
    ours = sampling.choose(*given).on_host()
    with plain():
        wanted = sampling.choose(*given).on_host()
    alike = ours[0] == wanted[0]
    assert alike.mean() > 0.97  # but at a token's edge
    assert all(np.allclose(a[alike], b[alike], atol=1e-4) for a, b in zip(ours[1:], wanted[1:]))
