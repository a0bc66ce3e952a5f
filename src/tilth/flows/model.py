"""Models by path: a run, one of its checkpoints or a Hugging Face directory."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilth.checkpoint import Checkpoint, open_checkpoint
from tilth.checkpoint.storage import is_url
from tilth.config.plugins import load_plugins
from tilth.config.roles import ROLES
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, ModelError
from tilth.core.layout import Box
from tilth.core.target import make_folder, rename, writing
from tilth.data.prompts import PromptSet
from tilth.data.tokenizer import Tokenizer, check_vocabulary
from tilth.models.config import DecoderConfig
from tilth.models.family import is_known
from tilth.models.hf import Unread, check_tensors, load_pretrained, read_config, shapes
from tilth.models.hub import fetched
from tilth.plan.shape import parameter_shapes
from tilth.rollout import protocol
from tilth.rollout.protocol import GenerationEngine
from tilth.runs.model_refs import EMA, Named, explained, find_checkpoint, run_settings

MODEL_FOLDER = "model"
"""Folder of a run with its config.json and tokenizer: the weights are in the checkpoints."""


class LoadedModel(NamedTuple):
    """Everything needed to speak or to go on learning."""

    config: DecoderConfig
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    source: Path
    """Directory that tokenizer and config come from."""
    run: Path | None = None
    """Directory of the run that made it."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """That run's recipe as it stands in its file."""
    step: int | None = None
    """Of the checkpoint."""

    @property
    def template(self) -> str:
        """What makes a prompt of a text as the run did, for ``make_template``: "model" or, as it stands, "".

        Whatever ``data.template`` named, the tokenizer of the run's model folder carries it.
        """
        return "model" if self.settings.get("data", {}).get("template") else ""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that ended the run's completions: ``rollout.stop``."""
        return tuple(self.settings.get("rollout", {}).get("stop", ()))


# ---- by path ----


REWARD_MODEL = "reward_model"


def models() -> dict[str, bool]:
    """Groups of tensors of a checkpoint that are weights of a model -> whether of a value model."""
    held = {name: spec.values for name, spec in ROLES.items() if spec.mesh == "layout" and name != "policy"}
    return {"model": False, EMA: False, **held}


class StoredTensors(Unread):
    """Tensors of a group of a checkpoint, read and checked when they are asked for. CheckpointError: damaged."""

    def __init__(self, checkpoint: Checkpoint, group: str, named: Named) -> None:
        self._checkpoint, self._group, self._named = checkpoint, group, named
        self._names = dict.fromkeys(checkpoint.names(group))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with explained(self._named):
            return self._checkpoint.read(self._group, name)

    def part(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """One block of a tensor; only what is needed of the file is read."""
        box = Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices))
        with explained(self._named):
            return self._checkpoint.read(self._group, name, box)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._checkpoint.entry(self._group, name).shape

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def load_model(spec: str | Path, group: str = "") -> LoadedModel:
    """The model that a text names; its tensors are read, one at a time, when they are used.

    ``RUN``: its newest checkpoint; ``RUN@best``: the best by evaluation; ``RUN@STEP``: the one of a step; ``RUN@ema``:
    the moving average of the weights, from the newest; a checkpoint's own directory; a Hugging Face directory, or an id
    of its hub; for all forms see ``named.find_checkpoint``. group: of the checkpoint's tensors (``models``); empty: as
    the text says.
    ModelError in one line if there is no such thing, with what there is; CheckpointError for a damaged one.
    """
    spec = fetched(str(spec))
    named = find_checkpoint(spec)
    if named is not None:
        return _from_checkpoint(named._replace(group=group or named.group))
    if group not in ("", "model", REWARD_MODEL):
        raise ModelError(f"{spec!r} is no checkpoint, so it has no group {group}", key="group")
    config, tensors = load_pretrained(spec, values=group == REWARD_MODEL)
    return LoadedModel(config, tensors, _tokenizer(Path(spec)), Path(spec))


def load_beginning(recipe: Recipe) -> LoadedModel:
    """The model of ``model.path``: in flow reward_model a reward model goes on, and any other lends its body."""
    spec = recipe.model.path
    named = find_checkpoint(spec) if recipe.flow == "reward_model" else None
    if named is not None and REWARD_MODEL in open_checkpoint(named.path).groups:
        return load_model(spec, REWARD_MODEL)
    return load_model(spec)


def _from_checkpoint(named: Named) -> LoadedModel:
    run = named.run
    if run is None and is_url(named.path):
        raise ModelError(
            f"{named.path} is a checkpoint, but its run's config.json is not beside it; say RUN@STEP", key="run"
        )
    run = run or Path(os.path.normpath(Path(named.path) / ".." / ".."))
    source = run / MODEL_FOLDER
    if not (source / "config.json").is_file():
        raise ModelError(
            f"{named.path} is a checkpoint, but {source / 'config.json'}, which says its shape, is not there",
            key="config.json",
        )
    said, settings = read_config(source), run_settings(run)
    if not is_known(said):
        load_plugins(settings.get("plugins", ()))  # which may declare its family
    config = DecoderConfig.from_hf(said)
    with explained(named):
        checkpoint = open_checkpoint(named.path)
    tensors = _tensors(checkpoint, named)
    wanted_shapes = parameter_shapes(config, value=models()[named.group])
    check_tensors(f"group {named.group} of {named.path}", wanted_shapes, shapes(tensors))
    return LoadedModel(config, tensors, _tokenizer(source), source, run, settings, checkpoint.step)


def _tensors(checkpoint: Checkpoint, named: Named) -> StoredTensors:
    if named.group == EMA and EMA not in checkpoint.groups:
        raise ModelError(
            f"{named.path} has no moving average of the weights; train.ema = 0.999 would keep one", key="train.ema"
        )
    if named.group not in models() or named.group not in checkpoint.groups:
        there = ", ".join(name for name in checkpoint.groups if name in models()) or "none"
        hint = ": it is a reward model, for reward.model" if there == REWARD_MODEL else ""
        raise ModelError(
            f"{named.path} has no weights in a group {named.group}; weights are in: {there}{hint}", key=named.group
        )
    return StoredTensors(checkpoint, named.group, named)


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None


def wants_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """The model's tokenizer; DataError if it has none, so that it cannot read a text, or one of too many tokens."""
    if loaded.tokenizer is None:
        raise DataError(
            f"model {str(loaded.source)!r} has no tokenizer.json, so it cannot read a text", key="tokenizer.json"
        )
    check_vocabulary(loaded.tokenizer, loaded.config.vocab_size, loaded.tokenizer, f"model {str(loaded.source)!r}")
    return loaded.tokenizer


def make_engine(loaded: LoadedModel, *, seed: int, max_rows: int, max_length: int) -> GenerationEngine:
    """The engine of the model's run, or the native one, with these weights: on a GPU in bf16, on a CPU in the run's
    precision, or else fp32."""
    gpu = torch.cuda.is_available()
    half = gpu or loaded.settings.get("train", {}).get("precision") == "bf16"
    engine = protocol.make_engine(
        loaded.settings.get("rollout", {}).get("engine", "native"),
        loaded.config,
        plugins=loaded.settings.get("plugins", ()),
        tokenizer=loaded.tokenizer,
        device="cuda" if gpu else "cpu",
        dtype=torch.bfloat16 if half else torch.float32,
        seed=seed,
        max_rows=max_rows,
        max_length=max_length,
    )
    engine.update_weights(loaded.tensors.items(), version=0)  # one after another: they were compared with the config
    return engine


# ---- the tokenizer ----


def choose_tokenizer(
    recipe: Recipe, prompts: PromptSet | None, loaded: LoadedModel | None, texts: Iterable[str] | None = None
) -> Tokenizer:
    """The recipe's own (``data.tokenizer``), else the model's, else one token per character of the data.

    texts: documents to learn from, of flow pretrain; otherwise those are the prompts with their answers. A new
    tokenizer (``characters``, ``bpe:SIZE``) is made of them. DataError where it does not fit the model.
    """
    name = recipe.data.tokenizer
    if loaded is not None and name.startswith("bpe:"):
        raise DataError(
            f"data.tokenizer = {name} would be new to the model of model.path = {recipe.model.path}; "
            "data.tokenizer= (empty) keeps the model's own",
            key="data.tokenizer.bpe",
        )
    if not name and loaded is not None:
        if loaded.tokenizer is None:
            raise DataError(
                f"{loaded.source} has no tokenizer.json; name one with data.tokenizer", key="data.tokenizer"
            )
        found = loaded.tokenizer
    elif name in ("", "characters"):
        found = Tokenizer.characters(_alphabet(prompts, texts))
    elif name.startswith("bpe:"):
        found = Tokenizer.train(_texts(recipe, prompts, texts), _bpe_size(name))
    else:
        found = Tokenizer.load(name)
    if loaded is not None:
        check_vocabulary(found, loaded.config.vocab_size, loaded.tokenizer, f"model.path = {recipe.model.path}")
    return found


def _bpe_size(name: str) -> int:
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or not int(size):
        raise DataError(
            f"data.tokenizer = {name!r} names no number of tokens; write as in bpe:4096", key="data.tokenizer.size"
        )
    return int(size)


def _alphabet(prompts: PromptSet | None, texts: Iterable[str] | None) -> str:
    if texts is None:
        return prompts.alphabet() if prompts is not None else ""
    return "".join(sorted(set().union(*map(set, texts))))


def _texts(recipe: Recipe, prompts: PromptSet | None, texts: Iterable[str] | None) -> Iterable[str]:
    """What a new tokenizer learns its merges from: never from what is held out."""
    if texts is not None or prompts is None:
        return texts or ()
    train, _ = prompts.split(recipe.data.holdout)
    return (f"{p.text}{p.answer or ''}" for p in train)


# ---- a run's own ----


def save_shape(folder: Path, config: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Write config.json and tokenizer files, chat template included, to a run's model folder, each as a whole."""
    made = folder.with_name(f".{folder.name}.tmp")
    with writing(folder):
        make_folder(folder)
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
        tokenizer.save(made)
        for file in made.iterdir():
            rename(file, folder / file.name)
        made.rmdir()
