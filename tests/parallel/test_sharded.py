from dataclasses import replace

import pytest
import torch

from tests.errors import raises
from tests.parallel.layouts import (
    CONFIG,
    MOE,
    Case,
    batch,
    build,
    copied,
    engine_of,
    loss_of,
    rows_of,
    spread,
    train,
    weights,
)
from tilth.core.errors import ModelError
from tilth.core.layout import Box, Layout
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.models.hf import load_pretrained, save_pretrained
from tilth.parallel import sharded as room
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.training.packed import packed_logprobs

pytestmark = pytest.mark.dist
HERE = "tests.parallel.test_sharded:"
PAIRS = [Case(dp=2), Case(fsdp=2), Case(fsdp=2, tied=False), Case(fsdp=2, value=True), Case(tp=2, tied=False)]
PAIRS += [Case(fsdp=2, experts=True), Case(tp=2, experts=True)]
FOURS = [Case(fsdp=4), Case(dp=2, fsdp=2)]
MORE = [
    Case(fsdp=4, zero=2, value=True),
    Case(dp=2, fsdp=2, zero=2, tied=False),
    Case(dp=4),
    Case(fsdp=2, tp=2),
    Case(fsdp=2, tp=2, sp=True, tied=False),
    Case(dp=2, tp=2, zero=2),
    Case(tp=4, sp=True),
]
ALL = [*PAIRS, *FOURS, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_initial_weights_are_those_of_one_device_bit_for_bit_and_no_rank_holds_more_than_its_share(pool, case):
    one = build(case.alone)
    one.init_weights_(3)
    expected = {name: p.detach() for name, p in one.named_parameters()}
    found = pool.run(case.ranks, HERE + "initial", case=case)
    total = sum(t.numel() for t in expected.values())
    for rank, (whole, local, layouts) in enumerate(found):
        assert equal(whole, expected), rank
        for name, layout in layouts.items():
            pieces = [expected[name][box.slices] for box in layout.boxes(rank)]
            assert equal({name: local[name]}, {name: pieces[0] if pieces else local[name][:0]}), (rank, name)
        if case.dp * case.tp == 1:
            assert sum(t.numel() for t in local.values()) < total / case.fsdp + CONFIG.hidden_size * len(local)
    if case.dp == case.tp == 1:
        assert sum(t.numel() for _, local, _ in found for t in local.values()) == total


def initial(rank, case):
    sharded = spread(case, rank)
    sharded.init_(3)
    whole = sharded.assemble(list(sharded.parameters))
    return copied(whole), copied({n: p.detach() for n, p in sharded.parameters.items()}), sharded.layouts


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_what_is_loaded_lies_in_the_boxes_and_one_tensor_can_be_taken(pool, case, tmp_path):
    config = replace(MOE if case.experts else CONFIG, tie_embeddings=case.tied)
    save_pretrained(tmp_path, config, weights(replace(case, value=False)))
    expected = {n: t.float() for n, t in weights(replace(case, value=False)).items()}
    if case.value:
        expected = {n: t for n, t in expected.items() if not n.startswith("lm_head")}
        expected |= {"score.weight": torch.zeros(1, CONFIG.hidden_size), "score.bias": torch.zeros(1)}
    for loaded, taken in pool.run(2, HERE + "loads", case=case, directory=str(tmp_path)):
        assert equal(loaded, expected)
        assert (taken == 7).all() and taken.shape == (CONFIG.vocab_size, CONFIG.hidden_size)


def loads(rank, case, directory):
    sharded = spread(case, rank)
    sharded.load_(load_pretrained(directory)[1])
    loaded = copied(sharded.assemble(list(sharded.parameters)))
    name = "model.embed_tokens.weight"
    sharded.load_full(name, torch.full(sharded.layouts[name].shape, 7.0))
    return loaded, sharded.assemble([name])[name]


@pytest.mark.parametrize("zero", [2, 3])
def test_a_change_of_local_parameters_is_seen_by_the_next_forward_pass(pool, zero):
    """The root group stays gathered after scoring: an in-place change must not meet the old copy."""
    case = Case(fsdp=2, zero=zero)
    first, second = (expected_logprobs(scale) for scale in (1.0, 1.25))
    for got in pool.run(2, HERE + "scores_twice", case=case):
        torch.testing.assert_close(got["first"], first, rtol=1e-4, atol=1e-5)
        for way in ("changed", "loaded"):
            torch.testing.assert_close(got[way], second, rtol=1e-4, atol=1e-5)
        assert (got["stale"] - second).abs().max() > 0.01, "the copy that stays gathered would be a trap"


def expected_logprobs(scale):
    model = build(Case())
    model.load_state_dict({n: t * scale for n, t in weights(Case()).items()})
    return torch.from_numpy(packed_logprobs(model, *batch(), max_tokens=1000))


def scores_twice(rank, case):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    tokens, mask = batch()

    def score():
        return torch.from_numpy(packed_logprobs(sharded, tokens, mask, max_tokens=1000))

    found = {"first": score()}
    with torch.no_grad():
        for p in sharded.parameters.values():
            p.mul_(1.25)
    found["changed"] = score()
    sharded.load_({n: t * 1.25 for n, t in weights(case).items()})
    found["loaded"] = score()
    sharded.load_(weights(case))
    with torch.no_grad():
        sharded.forward(*sharded.blank_input())  # gathers, and without a reshard ...
        for p in sharded.parameters.values():
            p.mul_(1.25)
        plain, room.ShardedModel.reshard = room.ShardedModel.reshard, lambda self: None
        try:
            found["stale"] = score()
        finally:
            room.ShardedModel.reshard = plain
    return found


@pytest.mark.parametrize("case", [Case(fsdp=2), Case(fsdp=2, zero=2, value=True)], ids=str)
def test_local_parameters_share_their_storage_with_the_model(pool, case):
    assert all(pool.run(2, HERE + "shares_storage", case=case))


def shares_storage(rank, case):
    sharded = spread(case, rank)
    sharded.init_(0)
    sharded.nothing(sharded.forward(*sharded.blank_input())).backward()
    sharded.gradients.reduce()
    own = dict(sharded.model.named_parameters())
    same = [own[n].to_local().data_ptr() == p.data_ptr() or not p.numel() for n, p in sharded.parameters.items()]
    plain = [type(p) is torch.nn.Parameter and type(p.grad) is torch.Tensor for p in sharded.parameters.values()]
    zero = [p.grad.shape == p.shape and not p.grad.any() for p in sharded.parameters.values()]
    return all(same) and all(plain) and all(zero)


@pytest.mark.parametrize("case", [*PAIRS, *FOURS, pytest.param(MORE[3], marks=pytest.mark.slow)], ids=str)
def test_the_norm_counts_each_element_once(pool, case):
    whole = weights(case)
    expected = {name: float(t.float().double().square().sum()) for name, t in whole.items()}
    for squares, norm in pool.run(case.ranks, HERE + "norms", case=case):
        assert squares == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(sum(expected.values()) ** 0.5, rel=1e-6)


def norms(rank, case):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    ordered = {name: sharded.parameters[name].detach() for name in weights(case)}
    names, (squares, again) = sharded.squares(ordered, {n: p.norm() for n, p in ordered.items()})
    assert torch.allclose(squares, again, rtol=1e-6)  # a norm stands for its part
    return dict(zip(names, squares.tolist(), strict=True)), sharded.norm(ordered)


@pytest.mark.parametrize("case", [Case(fsdp=2), Case(fsdp=2, value=True), Case(dp=2, fsdp=2)], ids=str)
def test_bytes_of_parameters_gradients_and_optimizer_state_are_a_share(pool, case):
    whole = sum(p.numel() for p in build(case).parameters()) * 4
    rows = sum(p.shape[1:].numel() for p in build(case).parameters()) * 4  # of one row of each parameter, at most
    for got in pool.run(case.ranks, "tests.parallel.layouts:bytes_held", case=case):
        share = whole / case.fsdp
        for kind, most in (("parameters", share), ("gradients", share), ("state", 2 * share)):
            assert most - 2 * rows <= got[kind] <= most + 2 * rows, kind
        assert got["storage"] == got["model"] <= share + rows  # padding of uneven shards at most


def test_alone_is_the_model_itself():
    model = build(Case())
    one = ShardedModel.alone(model)
    assert one.model is model and ShardedModel.of(one) is one
    assert all(one.parameters[n] is p for n, p in model.named_parameters())
    assert one.boxes("model.norm.weight") == [Box((0,), (20,))]
    assert one.sync_micro_batch_count(5) == 5 and one.sync_micro_batch_count(0) == 0
    assert one.assemble(["model.norm.weight"])["model.norm.weight"].data_ptr() == model.model.norm.weight.data_ptr()


def test_alone_initialises_as_the_decoder_does():
    a, b = build(Case()), build(Case())
    a.init_weights_(5)
    ShardedModel.alone(b).init_(5)
    assert equal(a.state_dict(), b.state_dict())


def test_a_value_model_initialises_with_a_head_of_zero():
    a, decoder = build(Case(value=True)), build(Case())
    a.init_weights_(5)
    decoder.init_weights_(5)
    assert equal(a.state_dict(), ValueModel(decoder).state_dict())


@pytest.mark.parametrize(
    "change, wrong",
    [
        ({"model.norm.weight": None}, "missing: model.norm.weight"),
        ({"model.what": torch.zeros(2)}, "extra: model.what"),
        ({"model.norm.weight": torch.zeros(3)}, "model.norm.weight [3] instead of [20]"),
    ],
)
def test_what_does_not_fit_is_named(change, wrong):
    tensors = {n: t for n, t in {**weights(Case()), **change}.items() if t is not None}
    with pytest.raises(ModelError) as caught:
        ShardedModel.alone(build(Case())).load_(tensors)
    assert wrong in str(caught.value)


def test_a_decoders_head_is_no_part_of_a_value_model_that_begins_from_it():
    critic = ShardedModel.alone(build(Case(value=True)))
    critic.init_(0)
    critic.load_({**weights(Case(tied=False))})
    assert not critic.parameters["score.weight"].any() and torch.equal(
        critic.parameters["model.norm.weight"].detach(), weights(Case())["model.norm.weight"].float()
    )
    with pytest.raises(ModelError) as caught:
        critic.load_({n: t for n, t in weights(Case(value=True)).items() if n != "score.bias"})
    assert "score.bias" in str(caught.value)


def test_a_layout_that_is_not_the_models_is_refused():
    model = build(Case())
    layouts = {n: Layout.single(p.shape) for n, p in model.named_parameters()}
    layouts["model.norm.weight"] = Layout.single((19,))
    with raises(ModelError, "model.norm.weight.layout"):
        ShardedModel([model], ParallelDims.alone(), layouts)


def test_heads_that_do_not_divide_are_refused(pool):
    for said in pool.run(2, HERE + "three_heads"):
        assert "model.heads = 3" in said and "tp=2" in said


def three_heads(rank):
    from tilth.core.layout import Mesh

    config = replace(CONFIG, num_heads=3, num_kv_heads=3)
    try:
        shard(lambda: Decoder(config), ParallelDims.of(Mesh(("tp",), (2,)), rank))
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("case", [Case(fsdp=2, double=True), Case(dp=2, double=True)], ids=str)
def test_an_average_instead_of_a_sum_would_be_seen(pool, case):
    one = train(0, case.alone)
    for averaged in pool.run(2, HERE + "averages", case=case):
        assert averaged == pytest.approx(one["results"][0].grad_norm / 2, rel=1e-9)


def averages(rank, case):
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    for module in sharded._fsdp:
        module.set_gradient_divide_factor(2.0)
    if not sharded._fsdp:
        finish = sharded.gradients.reduce

        def averaging():
            finish()
            for p in sharded.parameters.values():
                p.grad /= 2

        sharded.gradients.reduce = averaging
    tokens, mask, starts = rows_of(case, sharded)
    return engine_of(case, sharded).update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts).grad_norm
