"""Models for the commands that speak: random weights far from uniform, so that a wrong token is seen."""

from pathlib import Path

import torch

from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained

TEXTS = [
    "user system assistant\n",
    "How are you? I am well, and so are they. ",
    "0123456789+=",
    "what is it? 12+34=46 ",
] * 3


def decoder(tokenizer: Tokenizer, *, context: int = 256, seed: int = 0, scale: float = 8.0) -> Decoder:
    config = DecoderConfig(tokenizer.vocab_size, 32, 64, 2, 2, qk_norm=True, tie_embeddings=True, max_positions=context)
    model = Decoder(config)
    model.init_weights_(seed)
    for p in model.parameters():
        if p.ndim == 2:
            p.data *= scale
    return model.requires_grad_(False)


def directory(
    folder: Path, *, template: str = "", context: int = 256, tokenizer: Tokenizer | None = None, seed: int = 0
):
    """A Hugging Face directory, with this chat template if one is named."""
    made = tokenizer or Tokenizer.train(TEXTS, 300)
    if template:
        make_template(template, made)
    model = decoder(made, context=context, seed=seed)
    save_pretrained(folder, model.config, dict(model.named_parameters()), tokenizer=made)
    return model, made


def greedy(model: Decoder, ids: list[int], count: int, stops: tuple[int, ...]) -> list[int]:
    """Token by token, the whole sequence forward for each: no engine, no cache."""
    ids, found = list(ids), []
    while len(found) < count and (not found or found[-1] not in stops):
        hidden = model(torch.tensor(ids), PackedContext(torch.tensor([len(ids)])))
        found.append(int(model.logits(hidden[-1:])[0].argmax()))
        ids.append(found[-1])
    return found
