"""Activations that are recomputed or moved to the host change no bit, and the device is rid of what moved."""

from weakref import ref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.errors import raises
from tests.models import tiny
from tilth.config.load import digest, load_recipe
from tilth.core.errors import RecipeError
from tilth.models.activations import KEPT, HostActivations
from tilth.models.attention import PackedContext
from tilth.models.casts import cast, keep_casts
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder

SHAPES = {
    "dense": {"family": "qwen3", "qk_norm": True},
    "biased": {"family": "qwen2", "num_kv_heads": 1, "qkv_bias": True},
    "experts": {
        "family": "qwen3_moe", "qk_norm": True, "num_experts": 4, "experts_per_token": 2, "expert_size": 32,
        "expert_layers": (0, 1),
    },
}  # fmt: skip


SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
CPU = torch.device("cpu")


class Spied(HostActivations):
    """Keeps what was moved and in which order it came back, and how much of it was back at once."""

    def __init__(self, parameters, ratio=1.0):
        super().__init__(parameters, CPU, least=1)
        self.ratio, self.moved, self.returned, self.at_once = ratio, [], [], 0

    def move(self, tensor, part):
        moved = super().move(tensor, part)
        self.moved.append((ref(moved), moved.host.numel(), tensor.untyped_storage().nbytes(), moved.host.data_ptr()))
        return moved

    def fetch(self, moved):
        if moved.back is None:
            self.returned.append([one() for one, *_ in self.moved].index(moved))
        found = super().fetch(moved)
        self.at_once = max(self.at_once, sum(one() is not None and one().back is not None for one, *_ in self.moved))
        return found


def made(shape, how=False, *, ratio=None, dtype=torch.float32, **more):
    model = Decoder(tiny.shape(**{**SIZE, **SHAPES[shape], **more}), dtype)
    model.init_weights_(0)
    model.checkpointing = how
    if ratio is not None:
        model.offload = Spied(model.parameters(), ratio)
    return model


def loss_of(model, lengths=(9, 200, 30)):
    ids = torch.arange(sum(lengths)) % 30
    hidden = model(ids, PackedContext(list(lengths)))
    return model.logits(hidden).float().logsumexp(-1).square().mean()


def gradients(shape, how=False, **more):
    """Loss and gradients, and the model."""
    model = made(shape, how, **more)
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_gives_the_same_bits(shape, dtype):
    plain, _ = gradients(shape, dtype=dtype)
    for how in KEPT:
        found, _ = gradients(shape, how, dtype=dtype)
        assert all(map(torch.equal, plain, found)), how
    for ratio in (1.0, 0.37):
        found, model = gradients(shape, ratio=ratio, dtype=dtype)
        assert all(map(torch.equal, plain, found)) and model.offload.tensors > 5, ratio
        rows = sum((9, 200, 30))
        for _, moved, whole, _ in model.offload.moved:
            assert abs(moved - ratio * whole) <= max(whole / rows, 1)  # a byte is not divided
        assert model.offload.bytes == sum(moved for _, moved, *_ in model.offload.moved)


def toy(moves, layers, x):
    """Layers that save one tensor each: their exponentials."""
    for number in range(layers):
        with moves(number):
            x = x.exp() * 0.5
    return x.sum()


def test_the_first_rows_move_last_in_first_out_with_one_layer_ahead_and_the_last_one_stays():
    x = torch.linspace(-1, 1, 30).view(10, 3).requires_grad_()
    toy(lambda _: torch.enable_grad(), 6, x).backward()
    plain, x.grad, moving = x.grad, None, Spied([], 0.25)
    loss = toy(moving.begin(10, 6), 6, x)
    assert [size for _, size, *_ in moving.moved] == [2 * 3 * 4] * 5  # 2.5 rows are 2
    assert torch.equal(moving.moved[0][0]().host.view(torch.float32), x.detach().exp()[:2].flatten())
    loss.backward()
    assert moving.returned == [4, 3, 2, 1, 0] and moving.at_once == 1  # beside the one in use
    assert torch.equal(x.grad, plain) and not any(one() for one, *_ in moving.moved)


def test_passes_in_flight_return_each_for_itself_and_what_is_dropped_is_free():
    x, moving = torch.linspace(-1, 1, 30).view(10, 3).requires_grad_(), Spied([], 0.5)
    toy(lambda _: torch.enable_grad(), 4, x).backward()
    plain, x.grad = x.grad, None
    losses = [toy(moving.begin(10, 4), 4, x) for _ in range(3)]
    losses.pop(1)
    assert sum(one() is not None for one, *_ in moving.moved) == 2 * 3
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.allclose(x.grad, 4 * plain) and not any(one() for one, *_ in moving.moved)


class Live(TorchDispatchMode):
    """Bytes of tensors that something refers to, now and at most, but for those on the host."""

    def __init__(self, moving):
        super().__init__()
        self.moving, self.seen, self.peak = moving, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                key = storage._cdata
                self.seen.setdefault(key, (StorageWeakRef(storage), storage.nbytes(), storage.data_ptr()))
        self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self):
        host = {place for *_, place in self.moving.moved} if self.moving else set()
        self.seen = {key: one for key, one in self.seen.items() if not one[0].expired()}
        return sum(size for _, size, place in self.seen.values() if place not in host)


def lived(ratio, layers=6):
    """Live bytes after the forward pass, and their maximum in the backward pass; and what moved them."""
    model = made("dense", ratio=ratio or None, num_layers=layers)
    live = Live(model.offload)
    with live:
        loss = loss_of(model)
        after, live.peak = live.bytes(), 0
        loss.backward()
    return after, live.peak, model.offload


def test_the_device_is_rid_of_what_moved():
    after, peak, _ = lived(0.0)
    assert after > 1e6
    for ratio in (0.5, 1.0):
        less, lower, moving = lived(ratio)
        layer = moving.bytes / 5
        assert moving.bytes > 0.5 * ratio * after
        assert after - less == pytest.approx(moving.bytes, rel=0.02)
        assert peak - lower > moving.bytes - 2 * layer / ratio


def test_storages_move_once_and_parameters_stay():
    model = Decoder(tiny.shape("qwen3"))
    moving = HostActivations(model.parameters(), CPU, least=1)
    weight, x = next(model.parameters()), torch.ones(8, 4, requires_grad=True)
    with moving.begin(8, 2)(0):
        y = x * 2
        out = (y * y).sum() + (y[:, :4].t() * y.t()).sum() + (weight[0] * weight[0]).sum()
    assert (moving.tensors, moving.bytes) == (1, 8 * 4 * 4)  # y, saved four times
    out.backward()
    assert torch.equal(x.grad, torch.full((8, 4), 16.0))
    with moving.begin(8, 2)(0):
        out = (x * 3).square().sum()
    out.backward()
    assert moving.tensors == 2
    with moving.begin(8, 1)(0):
        (x * 3).square().sum().backward()
    assert moving.tensors == 2


def test_kept_casts_of_weights_stay():
    weight, x = torch.nn.Parameter(torch.randn(8, 4)), torch.ones(8, 8, dtype=torch.bfloat16, requires_grad=True)
    moving = HostActivations([weight], CPU, least=1)
    with keep_casts([weight]):
        for _ in range(2):
            with moving.begin(8, 2)(0):
                y = x * 2
                out = (y @ cast(weight, y.dtype) @ cast(weight, y.dtype).t()).float().sum()
            out.backward()
        assert moving.tensors == 2 * 2  # y, and what the first product gives
    with moving.begin(8, 2)(0):
        (x @ cast(weight, x.dtype)).float().sum().backward()
    assert moving.tensors == 2 * 2 + 2  # x, and a cast of this pass alone


def test_a_storage_that_changed_between_two_saves_moves_twice():
    moving = HostActivations([], CPU, least=1)
    x = torch.ones(4, requires_grad=True)
    with moving.begin(4, 2)(0):
        y = x * 1
        first = (y.detach() * x).sum()
        y = y.detach()
        a = (y * x).sum()
        y.add_(1)
        b = (y * x).sum()
    (first + a + b).backward()
    assert torch.equal(x.grad, torch.full((4,), 4.0))


def test_a_value_model_takes_the_policy_of_its_decoder():
    decoder = Decoder(tiny.shape("qwen3"))
    decoder.init_weights_(0)
    decoder.checkpointing = "selective"
    assert ValueModel(decoder).checkpointing == "selective"


UNLIKE = [
    "flow=ppo",
    "cluster.backend=local",
    "cluster.workers=4",
    "policy.layout={hdp = 2, pp = 2}",
    "critic.layout.hdp=4",
]
"""A critic with all layers on a rank, beside a policy with half of them."""


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["train.offload=1", "train.device=cpu"], "train.offload.device"),
        (["train.offload=auto", "train.device=cpu"], "train.offload.device"),
        (["train.offload=auto", "train.device=cuda", *UNLIKE], "train.offload.auto"),
        (["train.offload=0.5", "train.checkpointing=true"], "train.offload"),
        (["train.offload=1.5"], "train.offload"),
        (["train.offload=most"], "train.offload"),
        (["train.offload_activations=1"], "train.offload_activations"),
        (["train.offload=0.5", "train.offload_activations=true"], "train.offload_activations"),
        (["train.checkpointing=all"], "train.checkpointing"),
    ],
)
def test_what_contradicts_is_refused_by_name(keys, key):
    with raises(RecipeError, key):
        load_recipe("addition-grpo", keys)


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        ([], 0.0),
        (["true"], 1.0),
        (["false"], 0.0),
        (["false", "train.offload=0.5"], 0.5),
        (["false", "train.offload=auto"], "auto"),
    ],
)
def test_recipes_of_earlier_versions_name_all_or_nothing(keys, share):
    given = [f"train.offload_activations={keys[0]}", *keys[1:]] if keys else []
    recipe = load_recipe("addition-grpo", given)
    assert recipe.train.offload == share and digest(recipe) == digest(
        load_recipe("addition-grpo", [f"train.offload={share}"])
    )
