"""The input of a model: positions along the axes of rotary embedding, and media that encoders read."""

from dataclasses import replace

import pytest
import torch

import tilth
from tests.config.test_plugins import forget
from tests.errors import raises
from tests.models.seeing import NAME, config, declared, image
from tests.models.tiny import decoder, reference, shape, tokens
from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError, PluginError, RecipeError
from tilth.core.layout import Mesh
from tilth.core.media import MediaItem
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.families.llama import FAMILY
from tilth.models.inputs import ModelInput, place_media
from tilth.plan.layout import layouts
from tilth.plan.lora import adapter_rows
from tilth.plan.shape import matrices, parameters
from tilth.training.optim import layer_of

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


# -- media -----------------------------------------------------------------------------------------------------------


def seen(places: list[tuple[int, int]], first: int = 0, end: int = 99) -> tuple[ModelInput, list[MediaItem]]:
    """Twelve tokens with images at these (start, digit)."""
    items = [image(digit, digit, start) for start, digit in places]
    ids = torch.arange(12) % 7 + 1
    return ModelInput(ids, media=place_media([(tuple(items), first, end, 0)], torch.device("cpu"))), items


def parts(items: list[MediaItem]) -> torch.Tensor:
    """Parts of images as their encoder sees them, [items * 4, 16]."""
    return torch.cat([torch.frombuffer(bytearray(i.data), dtype=torch.uint8).view(4, 16) for i in items]) / 255 - 0.5


def spelt(model: Decoder, given: ModelInput, items: list[MediaItem]) -> tuple[Decoder, torch.Tensor]:
    """The same body without encoders, which has each part of each image as a token of its own, and such ids."""
    own = parts(items) @ model.encoders["patches"].proj.weight.T
    words = torch.cat([model.model.embed_tokens.weight, own]).detach()
    text = Decoder(replace(model.config, family="llama", vocab_size=len(words)))
    text.model.load_state_dict({**model.model.state_dict(), "embed_tokens.weight": words})
    ids = given.ids.clone()
    for number, item in enumerate(items):
        ids[item.start : item.start + 4] = model.config.vocab_size + 4 * number + torch.arange(4)
    return text, ids


def test_embeddings_of_images_stand_at_their_positions_and_learn() -> None:
    with declared():
        model, ctx = decoder(config()), PackedContext([9, 3])
        given, items = seen([(5, 2), (0, 1)])
        text, ids = spelt(model, given, items)
        found = model(given, ctx)
        assert torch.allclose(found, text(ids, ctx), atol=1e-6)
        found.square().sum().backward()
        text(ids, ctx).square().sum().backward()
    expected = text.model.embed_tokens.weight.grad
    assert torch.allclose(model.get_parameter(NAME).grad, expected[24:].T @ parts(items), atol=1e-4)
    assert torch.allclose(model.model.embed_tokens.weight.grad, expected[:24], atol=1e-4)


@torch.no_grad()
def test_a_pass_over_some_positions_has_the_part_of_an_image_that_lies_there() -> None:
    with declared():
        model = decoder(config())
        whole, _ = seen([(3, 1)])
        part, _ = seen([(3, 1)], first=5, end=12)
        assert part.media[0].places.tolist() == [-1, -1, 0, 1]
        given = ModelInput(whole.ids[5:], media=part.media)
        x = model._with_media(model.embed(given.ids), given.media, parity=False)
        assert torch.equal(x, model._with_media(model.embed(whole.ids), whole.media, parity=False)[5:])
        assert seen([(3, 1)], first=7)[0].media == ()


@torch.no_grad()
def test_texts_have_the_bits_of_the_family_without_encoders() -> None:
    with declared():
        model = decoder(config())
        text = Decoder(replace(model.config, family="llama"))
        text.load_state_dict({name: p for name, p in model.state_dict().items() if name != NAME})
        ids, ctx = torch.arange(9), PackedContext([4, 5])
        assert torch.equal(model(ids, ctx), text(ids, ctx))


def test_media_that_a_model_cannot_read_are_refused() -> None:
    given, _ = seen([(3, 1)])
    with raises(ModelError, "media.encoder"):
        decoder(shape("llama"))(given, PackedContext([12]))
    short = given.media[0]._replace(counts=[3], places=given.media[0].places[:3])
    with declared(), raises(ModelError, "encoders.patches"):
        decoder(config())(ModelInput(given.ids, media=(short,)), PackedContext([12]))


def test_declarations_that_do_not_fit_are_named() -> None:
    tilth.family("blind")(lambda: replace(FAMILY, encoders=("eye",)))
    with raises(ModelError, "encoder"):
        Decoder(config(family="blind"))
    tilth.encoder("eye")(lambda: FAMILY)
    with raises(PluginError, "encoder.eye"):
        Decoder(config(family="blind"))
    forget()


def test_rows_of_an_encoder_count_as_parameters_and_not_for_each_token() -> None:
    with declared():
        own, text = config(), config(family="llama")
        assert parameters(own) - parameters(text) == 32 * 16
        assert matrices(own) == matrices(text) and layer_of(NAME) == "patches"
        with pytest.raises(RecipeError):
            adapter_rows(own.table, LoraConfig(rank=2, targets=("proj",)))


@pytest.mark.parametrize("axis", ["pp", "fsdp", "ep", "hdp", "cp", "tp"])
def test_layouts_that_divide_a_model_with_encoders_are_refused(axis: str) -> None:
    with declared():
        assert layouts(config(), Mesh.of({"dp": 2}, range(2)))[NAME].shape == (32, 16)
        with raises(ModelError, f"layout.{axis}.encoders"):
            layouts(config(), Mesh.of({axis: 2}, range(2)))
