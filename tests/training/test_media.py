"""Media among the columns of a pass: packing, micro-batches and company change nothing."""

import numpy as np
import pytest
import torch

from tests.errors import raises
from tests.models.seeing import NAME, config, declared, image
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import DataError
from tilth.core.layout import Mesh
from tilth.core.media import MEDIA, MediaItem, check_media, media_keys, pack_media, unpack_media
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import packed_logprobs


@pytest.fixture(autouse=True)
def _declared():
    with declared():
        yield


def model():
    made = Decoder(config())
    made.init_weights_(3)
    return made


def batch(rows=6):
    """Samples of one prompt, as far as its tokens tell; every third is text."""
    tokens = Jagged.of([np.array([1, 2, 1, 2, 3, 4, 5 + i]) for i in range(rows)])
    media = np.empty(rows, object)
    for i in range(rows):
        media[i] = pack_media(() if i % 3 == 2 else (image(i % 4, i, i % 2),))
    return tokens, np.tile(np.array([0] * 5 + [1] * 2, np.uint8), rows), media


@pytest.mark.parametrize("most", [7, 14, 64])
def test_log_probs_are_those_of_each_sequence_alone(most):
    made, (tokens, mask, media) = model(), batch()
    found = packed_logprobs(made, tokens, mask, max_tokens=most, columns={MEDIA: media})
    for i in range(6):
        own = {} if i % 3 == 2 else {MEDIA: media[i : i + 1]}
        alone = packed_logprobs(made, tokens.take(np.array([i])), mask[:7], max_tokens=64, columns=own)
        assert np.abs(alone - found[7 * i : 7 * i + 7]).max() < 1e-5
    text = packed_logprobs(made, tokens, mask, max_tokens=most)
    same = np.abs(text - found).reshape(6, 7)[:, 5:].max(1) < 1e-5
    assert same.tolist() == [False, False, True, False, False, True]


def test_gradients_do_not_depend_on_micro_batches():
    found = []
    for most in (7, 64):
        tokens, mask, media = batch()
        engine = TrainEngine(model(), OptimizerConfig(lr=1e-3), total_steps=9, micro_tokens=most)
        engine.accumulate(tokens, mask, {MEDIA: media}, negative_log_likelihood(mask.sum()))
        found.append({name: p.grad for name, p in engine.model.named_parameters()})
    assert found[0][NAME].abs().max() > 1e-5
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


def gradients(rank, ranks):
    """Gradients of replicas, the last of which has texts alone."""
    with declared():
        sharded = shard(lambda: Decoder(config()), ParallelDims.of(Mesh(("dp",), (ranks,)), rank))
        sharded.init_(3)
        (tokens, mask, media), rows = batch(), np.array([[0, 1, 3, 4], [2, 5]][rank] if ranks > 1 else range(6))
        engine = TrainEngine(sharded, OptimizerConfig(lr=1e-3), total_steps=9, micro_tokens=14)
        own = {} if rank else {MEDIA: media[rows]}
        engine.accumulate(tokens.take(rows), mask[: 7 * len(rows)], own, negative_log_likelihood(mask.sum()))
        return {name: grad.clone() for name, grad in engine.gradients().items()}


@pytest.mark.dist
def test_a_replica_without_images_has_its_part_in_the_encoder_s_gradient(pool):
    whole, parts = gradients(0, 1), pool.run(2, "tests.training.test_media:gradients", ranks=2)
    assert whole[NAME].abs().max() > 1e-5
    assert all(torch.allclose(part[name], whole[name], atol=1e-6) for part in parts for name in whole)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_of_texts_leaves_the_encoder_as_it_is(name):
    tokens, mask, _ = batch()
    section = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.0)
    engine = TrainEngine(model(), section, total_steps=9, micro_tokens=64, watch=("layer_norms",))
    before = engine.model.get_parameter(NAME).clone()
    assert not engine.update(tokens, mask, {}, negative_log_likelihood(mask.sum())).skipped
    assert torch.equal(engine.model.get_parameter(NAME), before)


def test_an_item_beyond_its_sequence_is_refused():
    tokens, mask, media = batch()
    media[4] = pack_media((image(1, 1, 4),))
    with raises(DataError, "media.0"):
        packed_logprobs(model(), tokens, mask, max_tokens=64, columns={MEDIA: media})


def test_packed_items_come_back():
    items = (image(1, 1), MediaItem("ear", 7, 2, b"\0{}]"), image(3, 2, 9))
    assert unpack_media(pack_media(items)) == items and unpack_media(pack_media(())) == ()
    check_media(items, 13, "these")


def test_keys_tell_items_by_all_that_they_are():
    tokens, one = np.arange(8), MediaItem("eye", 2, 4, b"1")
    others = [(), (one._replace(encoder="ear"),), (one._replace(length=3),), (one._replace(data=b"2"),)]
    keys = [media_keys(tokens, items) for items in ((one,), *others)]
    assert keys[0].tolist()[:2] == [0, 1] and (keys[0][2:6] < 0).all() and len(set(keys[0].tolist())) == 8
    assert all((keys[0] != other)[2:5].all() for other in keys[1:])
    assert media_keys(tokens, ()) is tokens
