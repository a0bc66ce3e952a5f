"""The same weights in transformers give the same logits and gradients, for every family and rope scaling."""

import pytest
import torch

from tests.models.tiny import FAMILIES, ROPES, decoder, gradients, reference, shape, tokens
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder

LENGTHS = [5, 33, 1, 20, 5]


def reference_logits(other: torch.nn.Module, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([other(x[None]).logits[0] for x in ids.split(lengths)])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(name: str) -> None:
    model = decoder(FAMILIES[name])
    other = reference(model)
    ids = tokens(LENGTHS)
    logits = model.logits(model(ids, PackedContext(LENGTHS)))
    expected = reference_logits(other, ids, LENGTHS)
    assert expected.std() > 0.3
    assert (logits - expected).abs().max() <= 1e-5
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits.log_softmax(-1) * probe).sum().backward()
    (expected.log_softmax(-1) * probe).sum().backward()
    theirs = gradients(other)
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert parameter_name not in theirs and "correction" in parameter_name
            continue
        grad = theirs[parameter_name]
        assert (parameter.grad - grad).abs().max() <= 1e-4 * grad.abs().max(), parameter_name


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-yarn", "mistral"])
def test_beyond_the_trained_positions(name: str) -> None:
    """dynamic scaling grows its base with the sequence: each one by its own length, whatever is packed beside it."""
    model = decoder(FAMILIES[name])
    lengths = [90, 7, 129, 64, 65]
    ids = tokens(lengths)
    logits = model.logits(model(ids, PackedContext(lengths)))
    expected = torch.cat([reference(model)(x[None]).logits[0] for x in ids.split(lengths)])
    assert (logits - expected).abs().max() <= 1e-5


def test_every_scaling_changes_the_result() -> None:
    """So that the rows above cannot pass by ignoring the scaling."""
    ids, lengths = tokens([70]), [70]
    results = []
    for rope in ROPES.values():
        model = decoder(shape("llama", rope_scaling=rope))
        results.append(model.logits(model(ids, PackedContext(lengths))))
    for i, one in enumerate(results):
        assert all((one - two).abs().max() > 1e-2 for two in results[:i])


@pytest.mark.parametrize("name", ["llama-none", "qwen2", "qwen3", "mistral", "olmo2", "olmo3", "gemma3"])
def test_bf16_stays_as_near_as_transformers_in_bf16(name: str) -> None:
    model = decoder(FAMILIES[name])
    ids = tokens(LENGTHS)
    other = reference(model)
    with torch.no_grad():
        exact = reference_logits(other, ids, LENGTHS)
        theirs = reference_logits(other.to(torch.bfloat16), ids, LENGTHS).float()
        low = Decoder(model.config, torch.bfloat16)
        low.load_state_dict(model.state_dict())
        ours = low.logits(low(ids, PackedContext(LENGTHS)))
    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()
