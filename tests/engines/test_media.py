"""Requests with media: chunks, company, preemption and resumption change nothing; what cannot be read is refused."""

import numpy as np
import pytest

from tests.engines.reference import make_engine, make_model, naive
from tests.errors import raises
from tests.models.seeing import config, declared, image
from tilth.core.batch import Jagged
from tilth.core.errors import DataError
from tilth.core.media import MEDIA, pack_media
from tilth.engines.protocol import EngineError
from tilth.engines.request import Request, SamplingParams
from tilth.engines.vllm import VLLM
from tilth.training.packed import packed_logprobs

PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture(autouse=True)
def _declared():
    with declared():
        yield


def requests(count=6):
    """Prompts of equal tokens, whose images lie at several places; the first two are samples of one prompt."""
    found = []
    for i in range(count):
        at = max(0, i - 1)
        items = (image(at % 4, at, 2 + at), image(1, 9, 12 + at))
        found.append(Request(i, [1 + n % 5 for n in range(20)], PARAMS, media=items))
    return found


def packed(model, found, parity=False):
    """Log-probs of trajectories by one forward pass."""
    media = np.empty(len(found), object)
    for i, t in enumerate(found):
        media[i] = pack_media(t.media)
    mask, how = np.concatenate([t.mask for t in found]), {"max_tokens": 64, "parity": parity}
    return packed_logprobs(model, Jagged.of([t.tokens for t in found]), mask, columns={MEDIA: media}, **how)


@pytest.mark.parametrize(
    "options",
    [{"parity": True}, {"step_tokens": 3}, {"block_size": 4, "max_rows": 3}, {"kv_tokens": 64, "block_size": 4}],
)
def test_images_mean_in_any_chunks_and_company_what_they_mean_in_training(options):
    model = make_model(config())
    found = make_engine(model, **options).generate(requests())
    apart = packed(model, found, "parity" in options) - np.concatenate([t.logprobs for t in found])
    assert np.abs(apart).max() < (1e-9 if "parity" in options else 1e-4)
    text = [naive(model, Request(r.id, r.prompt, PARAMS))[1][-6:] for r in requests()]
    assert all(np.abs(np.array(raw) - t.logprobs[-6:]).max() > 1e-2 for raw, t in zip(text, found))


def test_a_trajectory_goes_on_with_its_images():
    model = make_model(config())
    (whole,) = make_engine(model).generate(requests(1))
    engine = make_engine(model)
    engine.submit(requests(1))
    for _ in range(3):
        engine.poll()
    part = engine.abort(0)
    assert 0 < part.completion_length < 6 and part.media == whole.media
    engine.resume(part, PARAMS)
    again = [t for _ in range(12) for t in engine.poll()]
    assert again[0].tokens.tolist() == whole.tokens.tolist()
    assert np.allclose(again[0].logprobs, whole.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    "items", [(image(1, 1, 17),), (image(1, 1, 3), image(1, 1, 5)), (image(1, 1)._replace(data=b""),)]
)
def test_items_without_data_or_a_place_of_their_own_are_refused(items):
    engine = make_engine(make_model(config()))
    with raises(DataError, f"media.{len(items) - 1}"):
        engine.submit([Request(0, [1] * 20, PARAMS, media=items)])
    assert engine.pending == 0


def test_engines_refuse_media_that_they_cannot_read():
    with raises(DataError, "request.media.encoder"):
        make_engine(make_model()).submit(requests(1))
    with raises(EngineError, "request.media.engine"):
        VLLM.check_served(object.__new__(VLLM), requests(1))
