"""Losses of routers, their correction, replay and metrics, beside one graph of the whole step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.tiny import FAMILIES, decoder, shape
from tests.training.cutting import micros
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.moe import ExpertContext, MoE
from tilth.parallel.sharded import ShardedModel
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.experts import ExpertOptions, correct_
from tilth.training.packed import model_input

QWEN = replace(FAMILIES["qwen3-moe"], renormalise=True)
LENGTHS = [9, 4, 12, 7, 5, 3]


def batch(shared: bool = False) -> tuple[Jagged, np.ndarray]:
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 97, n) for n in LENGTHS]
    if shared:
        prompt = rng.integers(0, 97, 10)
        rows = [np.append(prompt, rng.integers(0, 97, n)) for n in LENGTHS]
    mask = np.concatenate([np.arange(len(r)) >= (10 if shared else 1) for r in rows])
    return Jagged.of(rows), mask.astype(np.uint8)


def double(config=QWEN) -> Decoder:
    return decoder(config, torch.float64).double()


def gradients_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    clip = engine.optimizers.clip

    def keeping(*args):
        found.update({n: p.grad.clone() for n, p in engine.optimizers.parameters.items() if p.grad is not None})
        return clip(*args)

    engine.optimizers.clip = keeping
    return found


def one_graph(model: Decoder, tokens: Jagged, mask: np.ndarray, balance: float, z: float) -> dict[str, torch.Tensor]:
    """Gradients of the likelihood and both terms, written as their papers have them, with all sequences at once."""
    seen: list[torch.Tensor] = []
    blocks = [m for m in model.modules() if isinstance(m, MoE)]
    hooks = [b.register_forward_pre_hook(lambda b, args: seen.append(b.gate.logits(args[0]))) for b in blocks]
    ids = torch.from_numpy(tokens.values)
    hidden = model(ids, PackedContext(tokens.lengths))
    for hook in hooks:
        hook.remove()
    chosen = torch.from_numpy(np.flatnonzero(mask))
    logp, _ = model.token_logprobs(hidden[chosen - 1], model.head_weight, ids[chosen])
    loss = -logp.sum() / mask.sum()
    for logits in seen:
        p, experts = logits.softmax(-1), logits.shape[1]
        top = p.topk(QWEN.experts_per_token, -1)[1]
        share = torch.bincount(top.flatten(), minlength=experts).double() / top.numel()
        loss = loss + balance * experts * (share * p.mean(0)).sum() + z * logits.logsumexp(-1).square().mean()
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("shared", "micro_tokens"), [(False, 1000), (False, 12), (True, 40)])
def test_both_losses_are_those_of_one_graph(shared: bool, micro_tokens: int, checkpointing: bool) -> None:
    """Also in micro-batches and in trees, where a shared prompt counts once for each of its samples."""
    tokens, mask = batch(shared)
    model = double()
    wanted = one_graph(model, tokens, mask, 0.2, 0.05)
    model.checkpointing = checkpointing
    engine = TrainEngine(
        model, OptimizerConfig(clip_norm=0.0), total_steps=1, micro_tokens=micro_tokens,
        experts=ExpertOptions(balance=0.2, z=0.05),
    )  # fmt: skip
    found = gradients_of(engine)
    done = engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    assert max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items()) < 1e-10
    assert float(done.metrics["experts/balance_loss"]) > 2 * 0.2 * 0.99  # two layers, and 1 is even
    assert 1 <= float(done.metrics["experts/load_max"]) <= 5
    assert 0 < float(done.metrics["experts/entropy"]) <= 1 and float(done.metrics["experts/dropped"]) == 0


def test_shares_of_a_part_of_the_step_would_be_seen() -> None:
    tokens, mask = batch()
    ends = []
    for micro_tokens, whole in ((1000, True), (12, True), (12, False)):
        model = double()
        engine = TrainEngine(
            model, OptimizerConfig(), total_steps=1, micro_tokens=micro_tokens, experts=ExpertOptions(balance=0.5)
        )
        if not whole:  # counts of the first micro-batch alone
            count = engine._count_loads
            engine._count_loads = lambda step, begin, _, count=count: count(step, begin, 1)
        engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
        ends.append(model.model.layers[0].mlp.gate.weight.detach().clone())
    assert (ends[1] - ends[0]).abs().max() < 1e-9 < 1e-7 < (ends[2] - ends[0]).abs().max()


def test_the_loss_of_balance_evens_the_loads() -> None:
    tokens, mask = batch()
    found = []
    for balance in (0.0, 2.0):
        model = Decoder(QWEN)
        model.init_weights_(1)
        engine = TrainEngine(
            model, OptimizerConfig(lr=3e-3), total_steps=30, micro_tokens=100, experts=ExpertOptions(balance)
        )
        steps = [engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum()))) for _ in range(30)]
        found.append(float(steps[-1].metrics["experts/entropy"]))
    assert found[1] > max(found[0], 0.95)


def loads_of(model: Decoder, tokens: Jagged, mask: np.ndarray, **options) -> torch.Tensor:
    ((_, micro),) = micros(tokens, mask, {}, 1000, torch.device("cpu"))
    x, ctx = model_input(micro)
    ctx.experts = ExpertContext(weights=torch.ones(len(x.ids), dtype=torch.float64), **options)
    with torch.no_grad():
        model(x, ctx)
    return torch.stack([ctx.experts.loads[i] for i in range(2)])


def test_replayed_choices_are_followed_and_flips_are_counted() -> None:
    tokens, mask = batch()
    model = double()
    recorded = torch.zeros(len(mask), 2, 3, dtype=torch.int64) + torch.arange(3)
    assert (loads_of(model, tokens, mask, replay=recorded) == len(mask) * torch.tensor([1.0, 1, 1, 0, 0])).all()
    own = ExpertContext(record=True)
    with torch.no_grad():
        model(torch.from_numpy(tokens.values), PackedContext(tokens.lengths, experts=own))
    theirs = torch.stack([own.chosen[0], own.chosen[2]], 1)
    theirs[3, 1, 0] = next(e for e in range(5) if e not in theirs[3, 1])
    theirs[7:9] = -1  # not known
    for replay in (False, True):
        engine = TrainEngine(
            double(), OptimizerConfig(), total_steps=1, micro_tokens=16, experts=ExpertOptions(replay=replay)
        )
        done = engine.update(tokens, mask, {}, negative_log_likelihood(1.0), routing=theirs.numpy())
        assert float(done.metrics["experts/flips"]) == pytest.approx(1 / ((len(mask) - 2) * 2 * 3))


def test_flips_of_a_shared_prompt_count_in_each_of_its_samples() -> None:
    tokens, mask = batch(shared=True)
    recorded = np.tile(
        np.random.default_rng(2).permuted(np.tile(np.arange(5), (100, 1)), axis=1)[:, None, :3], (1, 2, 1)
    )
    recorded = np.concatenate([recorded[np.where(np.arange(n) < 10, np.arange(n), 10 + n)] for n in tokens.lengths])
    found = []
    for shares in (False, True):
        engine = TrainEngine(double(), OptimizerConfig(), total_steps=1, micro_tokens=1000)
        engine.limits = replace(engine.limits, share=shares)
        done = engine.update(tokens, mask, {}, negative_log_likelihood(1.0), routing=recorded)
        assert (done.computed < len(mask)) == shares
        flips = done.metrics["experts/flips"]
        found.append((flips.total, flips.count))
    assert found[0] == found[1] and 0 < found[0][0] < found[0][1] == 6 * len(mask)


def test_the_correction_moves_towards_equal_loads() -> None:
    class Model(torch.nn.Module):
        config = shape("qwen3_moe", num_experts=4, experts_per_token=1, expert_layers=(1, 2), router_correction=True)

    sharded = ShardedModel.__new__(ShardedModel)
    names = [f"model.layers.{i}.mlp.gate.correction" for i in (1, 2)]
    sharded.model = Model()
    sharded.parameters = {name: torch.nn.Parameter(torch.zeros(4)) for name in names}
    sharded.boxes = lambda name: [_whole()]
    correct_(sharded, torch.tensor([[10.0, 0, 5, 5], [8, 4, 4, 4]]), 0.25)
    assert sharded.parameters[names[0]].tolist() == [-0.25, 0.25, 0, 0]
    assert sharded.parameters[names[1]].tolist() == [-0.25, 0.25, 0.25, 0.25]


def _whole():
    from tilth.core.layout import Box

    return Box.whole((4,))
