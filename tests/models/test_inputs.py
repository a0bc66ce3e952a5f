"""The input of a model: positions of tokens along the axes of rotary embedding."""

import pytest
import torch

from tests.errors import raises
from tests.models.tiny import decoder, reference, shape, tokens
from tilth.core.errors import ModelError
from tilth.models.attention import PackedContext
from tilth.models.inputs import ModelInput

PLACES = torch.tensor([0, 1, 5, 6, 7, 20, 3])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_positions_of_the_input_rotate_as_in_transformers(family: str) -> None:
    model, ids = decoder(shape(family, sliding_window=None, window_layers=())), tokens([7])
    found = model.logits(model(ModelInput(ids, PLACES[:, None]), PackedContext([7])))
    expected = reference(model)(ids[None], position_ids=PLACES[None]).logits[0]
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(found, model.logits(model(ids, PackedContext([7]))), atol=1e-2)


@torch.no_grad()
def test_without_positions_tokens_have_their_places_in_their_sequences() -> None:
    model, ids, ctx = decoder(shape("llama")), tokens([3, 4]), PackedContext([3, 4])
    places = torch.tensor([0, 1, 2, 0, 1, 2, 3])[:, None]
    assert torch.equal(model(ModelInput(ids, places), ctx), model(ModelInput(ids), ctx))


@pytest.mark.parametrize("positions", [torch.zeros(7, 3), torch.zeros(6, 1), torch.zeros(7)])
def test_positions_that_do_not_fit_are_refused(positions: torch.Tensor) -> None:
    with raises(ModelError, "positions"):
        decoder(shape("llama"))(ModelInput(tokens([7]), positions.long()), PackedContext([7]))
