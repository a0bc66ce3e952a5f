"""Built-in losses beside the formulas of Tinker's documentation in float64, through the model and its gradients."""

import copy

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.models.tiny import decoder, shape
from tilth.config.schema import LoraConfig
from tilth.core.errors import DataError, NonFiniteError
from tilth.core.layout import Mesh
from tilth.models.attention import PackedContext
from tilth.models.converters import LowRank, converted
from tilth.parallel.dims import ParallelDims
from tilth.serve.tinker.losses import LOSSES, check_data, options_of
from tilth.serve.tinker.wire import Datum, ProvenanceRun
from tilth.serve.tinker.worker import AdamStep, ModelSpec, SharedBase, TrainedModel, score_sequence

LENGTHS = (5, 1, 9)
LORA = ModelSpec(LoraConfig(rank=4), 3)
FULL = ModelSpec(LoraConfig(rank=0), 0)
STEP = AdamStep(1e-2, (0.9, 0.95), 1e-12, 0.0, 0.0)
OPTIONS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.97, "clip_high_threshold": 1.03},
    "stable_reinforce": {"kl_coeff": 0.3},
}


def base(seed=0, **changes):
    model = decoder(shape("qwen3", **changes))
    model.init_weights_(seed)
    return SharedBase(model.config, dict(model.named_parameters())), model


def data(loss, vocabulary, seed=0):
    rng = np.random.default_rng(seed)

    def column(name, n):
        if name == "logprobs":
            return (-4.5 + 0.4 * rng.standard_normal(n)).astype(np.float32)
        if name == "sequence_ratio_mask":
            return (np.arange(n) >= n // 3).astype(np.float32)
        return rng.standard_normal(n).astype(np.float32)

    ids = lambda n: rng.integers(0, vocabulary, n)  # noqa: E731
    made = []
    for n in LENGTHS:
        columns = {name: column(name, n) for name in LOSSES[loss].needs}
        runs = ProvenanceRun(False, "s/1/0", 0, n // 3), ProvenanceRun(True, "s/1/0", 0, n - n // 3)
        made.append(Datum(ids(n), {"target_tokens": ids(n), **columns}, targets=runs))
    return made


def documented(loss, p, columns, options):
    """The pseudo code of the documentation, and that of the docstring of ``stable_reinforce``, by one sequence."""
    if loss == "cross_entropy":
        return -(p * columns["weights"]).sum()
    q, a = columns["logprobs"], columns["advantages"]
    ratio = torch.exp(p - q)
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    clipped = torch.clamp(ratio, low, high)
    if loss == "importance_sampling":
        return -(ratio * a).sum()
    if loss == "gspo":
        chosen = columns["sequence_ratio_mask"] != 0
        mean = (p.detach() - q)[chosen].mean()
        ratio = torch.exp(mean + p - p.detach())
        return -torch.min(ratio * a, torch.clamp(ratio, low, high) * a).sum()
    if loss == "stable_reinforce":
        at = len(p) // 3
        weight = ratio.detach().clamp(max=2.0)
        return (-weight * a * p + options["kl_coeff"] / 2 * (p - q) ** 2)[at:].sum()
    if loss == "ppo":
        return -torch.min(ratio * a, clipped * a).sum()
    if loss == "cispo":
        return -(clipped.detach() * p * a).sum()
    return -(p * a - 0.5 * options.get("beta", 0.05) * (p - q) ** 2).sum()


def oracle(model, trained, loss, rows, options):
    """Loss, log-probs and gradients in float64."""
    spec = trained.spec.lora
    wide = copy.deepcopy(model).double()
    wide.dtype = torch.float64
    if spec.rank:
        wide = converted(wide, [LowRank(spec)]).double()
    wide.load_state_dict({**wide.state_dict(), **{n: t.double() for n, t in trained.weights().items()}})
    total, found = 0.0, []
    for row in rows:
        hidden = wide(torch.from_numpy(row.tokens), PackedContext([len(row.tokens)]))
        p = torch.log_softmax(wide.logits(hidden), -1)
        p = p.gather(1, torch.from_numpy(row.columns["target_tokens"])[:, None]).squeeze(1)
        columns = {n: torch.from_numpy(c).double() for n, c in row.columns.items() if n != "target_tokens"}
        total = total + documented(loss, p, columns, options)
        found.append(p.detach().numpy())
    total.backward()
    return total.item(), found, {n: q.grad for n, q in wide.named_parameters() if q.grad is not None}


@pytest.mark.parametrize("spec", [LORA, pytest.param(FULL, marks=pytest.mark.slow)], ids=["lora", "full"])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_logprobs_and_gradients_are_those_of_the_documentation_in_float64(loss, spec):
    shared, model = base()
    trained, options = TrainedModel(shared, spec), OPTIONS.get(loss, {})
    first = data("cross_entropy", model.config.vocab_size)
    trained.forward_backward(first, "cross_entropy", {}, forward_only=False)
    trained.step(STEP)  # B is no longer zero
    rows = data(loss, model.config.vocab_size, seed=1)
    total, logprobs, grads = oracle(model, trained, loss, rows, options)
    for forward_only in (True, False):
        found, metrics = trained.forward_backward(rows, loss, options, forward_only=forward_only)
        assert metrics["loss:sum"] == pytest.approx(total, rel=1e-4, abs=1e-4)
        for mine, right in zip(found, logprobs):
            np.testing.assert_allclose(mine, right, atol=3e-5)
    for name, grad in trained.gradients.items():
        scale = max(grads[name].abs().max().item(), 1e-3)
        torch.testing.assert_close(grad.double(), grads[name], rtol=2e-3, atol=3e-4 * scale)


def test_several_targets_for_a_token_are_cross_entropy_with_their_weights_in_float64():
    shared, model = base()
    trained, rng = TrainedModel(shared, FULL), np.random.default_rng(5)
    rows = []
    for n in LENGTHS:
        columns = {"target_tokens": rng.integers(0, 50, (n, 3)), "weights": rng.random((n, 3)).astype(np.float32)}
        rows.append(Datum(rng.integers(0, 50, n), columns))
    check_data("cross_entropy", rows, 50, 32)
    wide = copy.deepcopy(model).double()
    wide.dtype, total = torch.float64, 0.0
    found, metrics = trained.forward_backward(rows, "cross_entropy", {}, forward_only=False)
    for row, mine in zip(rows, found):
        p = torch.log_softmax(wide.logits(wide(torch.from_numpy(row.tokens), PackedContext([len(row.tokens)]))), -1)
        p = p.gather(1, torch.from_numpy(row.columns["target_tokens"]))
        total = total - (p * torch.from_numpy(row.columns["weights"])).sum()
        np.testing.assert_allclose(mine, p.detach().numpy(), atol=3e-5)
    total.backward()
    assert metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in wide.named_parameters():
        torch.testing.assert_close(trained.gradients[name].double(), parameter.grad, rtol=2e-3, atol=1e-4)
    rows[1].columns["weights"] = rows[1].columns["weights"][:, :2]
    with raises(DataError, "data[1].loss_fn_inputs.weights.shape"):
        check_data("cross_entropy", rows, 50, 32)


def test_gradients_of_several_requests_add_up_and_a_step_is_torch_adamw():
    shared, model = base()
    rows = data("cross_entropy", model.config.vocab_size)
    apart, together = TrainedModel(shared, LORA), TrainedModel(shared, LORA)
    for row in rows:
        apart.forward_backward([row], "cross_entropy", {}, forward_only=False)
    together.forward_backward(rows, "cross_entropy", {}, forward_only=False)
    for name, grad in together.gradients.items():
        torch.testing.assert_close(apart.gradients[name], grad, rtol=1e-4, atol=1e-5)
    mine = {n: p for n, p in together.engine.optimizers.parameters.items()}
    twins = {n: torch.nn.Parameter(p.detach().clone()) for n, p in mine.items()}
    for name, twin in twins.items():
        twin.grad = together.gradients[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(twins.values(), 0.5)
    torch.optim.AdamW(twins.values(), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1).step()
    metrics = together.step(AdamStep(0.1, (0.8, 0.9), 1e-6, 0.1, 0.5))
    assert metrics["grad_norm:mean"] == pytest.approx(norm.item(), rel=1e-6)
    for name, twin in twins.items():
        torch.testing.assert_close(mine[name].detach(), twin.detach(), rtol=1e-5, atol=1e-6)


def test_clients_share_one_base_and_none_moves_another():
    shared, model = base()
    before = {n: p.clone() for n, p in shared.model.parameters.items()}
    one, other = TrainedModel(shared, LORA), TrainedModel(shared, ModelSpec(LoraConfig(rank=2), 5))
    rows = data("cross_entropy", model.config.vocab_size)
    still, _ = other.forward_backward(rows, "cross_entropy", {}, forward_only=True)
    one.forward_backward(rows, "cross_entropy", {}, forward_only=False)
    one.step(STEP)
    again, _ = other.forward_backward(rows, "cross_entropy", {}, forward_only=True)
    assert all(np.array_equal(a, b) for a, b in zip(still, again))
    assert all(torch.equal(before[n], p) for n, p in shared.model.parameters.items())
    pointers = {n: p.data_ptr() for n, p in shared.model.parameters.items()}
    assert all(p.data_ptr() == pointers[n] for n, p in one.sharded.parameters.items() if n in pointers)


@pytest.mark.dist
@pytest.mark.parametrize("axis", ["fsdp", pytest.param("tp", marks=pytest.mark.slow)])
def test_ranks_that_divide_a_base_share_their_parts_with_clients_and_have_the_state_of_one(pool, axis):
    shared, model = base(vocab_size=48)
    wanted = two_requests(TrainedModel(shared, LORA), [data("ppo", 48)] * 2)
    found = pool.run(2, "tests.serve.tinker.test_losses:divided", axis=axis)
    assert all(same and size < 0.75 * sum(p.numel() for p in model.parameters()) for same, size, _ in found)
    assert found[0][2].keys() == wanted.keys()
    assert all(name.startswith("optimizer/step.") for name in found[1][2])
    for name, tensor in found[0][2].items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-4, atol=1e-5)


def divided(rank, axis):
    """True if a client's parts are the base's; their elements; the client's state, of a model that took it over."""
    grid = ParallelDims.of(Mesh.of({axis: 2}), rank)
    model = base(vocab_size=48)[1]  # of an odd number of rows torch pads the last part, which then is a copy
    shared = SharedBase(model.config, dict(model.named_parameters()), grid=grid)
    one, other, rows = TrainedModel(shared, LORA, grid), TrainedModel(shared, LORA, grid), data("ppo", 48)
    part = slice(rank, None, 2) if axis == "fsdp" else slice(None)
    own = two_requests(one, [rows[part], [] if rank and axis == "fsdp" else rows])
    mine, theirs = one.sharded.parameters, shared.model.parameters
    same = all(mine[n].data_ptr() == p.data_ptr() for n, p in theirs.items())
    every = [own]
    torch.distributed.broadcast_object_list(every, 0, grid.group(axis))
    other.restore(every[0].items(), steps=1)
    again = other.state()
    return (
        same and all(torch.equal(own[n], t) for n, t in again.items()),
        sum(p.numel() for p in theirs.values()),
        again,
    )


def two_requests(trained, requests):
    """The state after a step and a request more."""
    trained.forward_backward(requests[0], "ppo", {}, forward_only=False)
    trained.step(AdamStep(1e-2, (0.9, 0.95), 1e-3, 0.0, 1.0))
    trained.forward_backward(requests[1], "ppo", {}, forward_only=False)
    return trained.state()


def test_a_restored_state_goes_on_bit_for_bit_with_its_gradients():
    shared, model = base()
    rows = data("ppo", model.config.vocab_size)
    one, other = TrainedModel(shared, LORA), TrainedModel(shared, ModelSpec(LORA.lora, 77))
    for _ in range(2):
        one.forward_backward(rows, "ppo", {}, forward_only=False)
        one.step(STEP)
    one.forward_backward(rows[:1], "ppo", {}, forward_only=False)
    other.restore([(name, tensor.clone()) for name, tensor in one.state().items()], steps=2)
    for trained in (one, other):
        trained.forward_backward(rows[1:], "ppo", {}, forward_only=False)
        trained.step(STEP)
    mine, theirs = one.state(), other.state()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def test_scores_of_a_sequence_are_those_of_the_forward_pass():
    shared, model = base()
    trained = TrainedModel(shared, LORA)
    tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, 12)
    row = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(11, np.float32)})
    (wanted,), _ = trained.forward_backward([row], "cross_entropy", {}, forward_only=True)
    found = score_sequence(trained.sharded, tokens, topk=3, targets=tokens[1:, None])
    assert np.isnan(found.own[0])
    np.testing.assert_allclose(found.own[1:], wanted, atol=2e-6)
    np.testing.assert_array_equal(found.targets[:, 0], found.own[1:])
    assert (found.topk.logprobs[1:, 0] >= found.own[1:]).all() and (np.diff(found.topk.logprobs[1:]) <= 0).all()


def test_a_step_without_a_gradient_and_one_that_is_not_finite_are_refused():
    shared, model = base()
    trained = TrainedModel(shared, LORA)
    with raises(DataError, "optim_step.gradient"):
        trained.step(STEP)
    before = {n: t.clone() for n, t in trained.weights().items()}
    rows = data("dro", model.config.vocab_size)
    trained.forward_backward(rows, "dro", {"beta": 3e38}, forward_only=False)
    with raises(NonFiniteError, "grad_norm.step"):
        trained.step(STEP)
    assert all(torch.equal(before[n], t) for n, t in trained.weights().items())
    assert not trained.gradients


def changed(**columns):
    row = data("ppo", 50)[0]
    return [Datum(row.tokens, {**row.columns, **columns})]


TOKENS5, NUMBERS5 = np.arange(5), np.zeros(5, np.float32)


@pytest.mark.parametrize(
    "rows, key",
    [
        ([], "data"),
        (data("cross_entropy", 50), "data[0].loss_fn_inputs"),
        (changed(mask=NUMBERS5), "data[0].loss_fn_inputs"),
        (changed(advantages=np.zeros(4, np.float32)), "data[0].loss_fn_inputs.advantages.shape"),
        (changed(target_tokens=np.zeros((5, 2), np.int64)), "data[0].loss_fn_inputs.target_tokens.shape"),
        (changed(target_tokens=NUMBERS5), "data[0].loss_fn_inputs.target_tokens.dtype"),
        (changed(logprobs=TOKENS5), "data[0].loss_fn_inputs.logprobs.dtype"),
        (changed(logprobs=np.full(5, np.nan, np.float32)), "data[0].loss_fn_inputs.logprobs.finite"),
        (changed(target_tokens=TOKENS5 + 46), "data[0].loss_fn_inputs.target_tokens.vocabulary"),
        ([Datum(np.zeros(0, np.int64), {})], "data[0].model_input.length"),
        ([Datum(np.zeros(33, np.int64), {})], "data[0].model_input.length"),
    ],
)
def test_a_loss_with_wrong_columns_is_refused_by_the_column(rows, key):
    with raises(DataError, key):
        check_data("ppo", rows, 50, 32)
    check_data("ppo", data("ppo", 50), 50, 32)


def test_a_sequence_without_a_ratio_is_refused():
    rows = data("gspo", 50)
    check_data("gspo", rows, 50, 32)
    rows[1].columns["sequence_ratio_mask"][:] = 0
    with raises(DataError, "data[1].loss_fn_inputs.sequence_ratio_mask.empty"):
        check_data("gspo", rows, 50, 32)


@pytest.mark.parametrize("loss", ["gspo", "stable_reinforce"])
def test_where_the_model_is_the_one_that_sampled_the_gradient_is_that_of_reinforce(loss):
    shared, model = base()
    trained, twin = TrainedModel(shared, FULL), TrainedModel(shared, FULL)
    rows = data(loss, model.config.vocab_size)
    found, _ = trained.forward_backward(rows, loss, {}, forward_only=True)
    for row, logprobs in zip(rows, found):
        row.columns["logprobs"][:] = logprobs
        row.columns["advantages"][: len(logprobs) // 3] = 0
    trained.forward_backward(rows, loss, {}, forward_only=False)
    plain = [
        Datum(r.tokens, {"target_tokens": r.columns["target_tokens"], "weights": r.columns["advantages"]}) for r in rows
    ]
    twin.forward_backward(plain, "cross_entropy", {}, forward_only=False)
    for name, grad in twin.gradients.items():
        torch.testing.assert_close(trained.gradients[name], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "loss, options, key",
    [
        ("gspo", {"epsilon": 0.1}, "loss_fn_config.epsilon"),
        ("custom", {}, "loss_fn.refused"),
        ("pro", {}, "loss_fn"),
        ("ppo", {"beta": 1.0}, "loss_fn_config.beta"),
        ("dro", {"beta": "much"}, "loss_fn_config.beta.type"),
    ],
)
def test_losses_and_options_that_are_not_there_are_refused(loss, options, key):
    with raises(DataError, key):
        options_of(loss, options)
    assert options_of("dro", {"beta": 1}) == {"beta": 1.0}
