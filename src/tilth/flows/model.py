"""Models by path: a run's newest checkpoint or a Hugging Face directory, and new ones from a recipe's shape."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tilth.checkpoint import latest, open_checkpoint
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, ModelError
from tilth.data.prompts import PromptSet
from tilth.data.tokenizer import Tokenizer
from tilth.flows.files import writing
from tilth.models.config import DecoderConfig
from tilth.models.hf import load_pretrained, read_config
from tilth.plan.shape import new_shape

MODEL_FOLDER = "model"
"""Folder of a run with its config.json and tokenizer: the weights are in the checkpoints."""


class LoadedModel(NamedTuple):
    """Everything needed to speak or to go on learning."""

    config: DecoderConfig
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    source: Path
    """Directory that tokenizer and config come from."""


def load_model(path: str | Path) -> LoadedModel:
    """The model of a run (its newest checkpoint) or of a Hugging Face directory. ModelError if it is neither."""
    folder = Path(path)
    if (folder / "run.json").is_file():
        return _from_run(folder)
    config, tensors = load_pretrained(folder)
    return LoadedModel(config, tensors, _tokenizer(folder), folder)


def _from_run(folder: Path) -> LoadedModel:
    newest = latest(folder / "checkpoints")
    if newest is None:
        raise ModelError(f"run {folder} has no checkpoint yet; let it reach its first save (run.save_every)")
    checkpoint = open_checkpoint(newest)
    tensors = {name: checkpoint.read("model", name) for name in checkpoint.names("model")}
    source = folder / MODEL_FOLDER
    return LoadedModel(DecoderConfig.from_hf(read_config(source)), tensors, _tokenizer(source), source)


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None


def choose_tokenizer(recipe: Recipe, prompts: PromptSet, loaded: LoadedModel | None) -> Tokenizer:
    """The recipe's own, else the model's, else one token per character of the data."""
    if recipe.data.tokenizer:
        return Tokenizer.load(recipe.data.tokenizer)
    if loaded is not None:
        if loaded.tokenizer is None:
            raise DataError(f"{loaded.source} has no tokenizer.json; name one with data.tokenizer")
        return loaded.tokenizer
    return Tokenizer.characters(prompts.alphabet())


def new_config(recipe: Recipe, vocab_size: int) -> DecoderConfig:
    """The shape that a recipe's ``[model]`` asks for."""
    m, shape = recipe.model, new_shape(recipe.model, vocab_size)
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        family=m.family,
        rope_theta=m.rope_theta,
        qk_norm=shape.qk_norm,
        qkv_bias=shape.qkv_bias,
        tie_embeddings=m.tied,
        max_positions=m.context,
        dropout=m.dropout,
    )


def save_shape(folder: Path, config: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Write config.json and tokenizer files to a run's model folder."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
        tokenizer.save(folder)
