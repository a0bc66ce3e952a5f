"""Load a model from a run, one of its checkpoints or a Hugging Face directory; choose its tokenizer."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilth.checkpoint import Checkpoint, open_checkpoint
from tilth.checkpoint.storage import is_url
from tilth.config.roles import ROLES, roles_of
from tilth.config.schema import LoraConfig, Recipe
from tilth.core.errors import DataError, ModelError, RecipeError
from tilth.core.files import make_folder, rename, writing
from tilth.data.columns import Prompt
from tilth.data.prompts import PromptSet
from tilth.data.template import Tools
from tilth.data.tokenizer import Tokenizer, check_vocabulary
from tilth.engines import protocol
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import GenerationEngine
from tilth.envs.process import listed_tools
from tilth.models.config import DecoderConfig
from tilth.models.family import is_known
from tilth.models.hf import check_tensors, load_pretrained, read_config
from tilth.models.hub import fetched
from tilth.models.lora import merge
from tilth.models.peft import load_adapter
from tilth.models.unread import Unread, block, shapes
from tilth.plan.lora import adapter_shapes, blocks_of, has_adapters, is_adapter, pair_of, scale_of
from tilth.plan.shape import parameter_shapes
from tilth.runs.model_refs import EMA, Named, check_pinned, explained, find_checkpoint
from tilth.runs.readers import run_settings
from tilth.runs.tensors import StoredTensors
from tilth.runs.trust import check_trust, load_code

MODEL_FOLDER = "model"
"""Folder of a run with config.json and tokenizer; the weights are in the checkpoints."""


class LoadedModel(NamedTuple):
    """A model with everything needed for generation and further training."""

    config: DecoderConfig
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    source: Path
    """Directory of tokenizer and config."""
    run: Path | None = None
    """Directory of its run."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """Recipe of that run as plain data."""
    step: int | None = None
    """Step of the checkpoint."""

    @property
    def template(self) -> str:
        """Argument for ``make_template``: "model" if the run had a template, which its tokenizer carries; else ""."""
        return "model" if self.settings.get("data", {}).get("template") else ""

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings of the run: ``rollout.stop``."""
        return tuple(self.settings.get("rollout", {}).get("stop", ()))


# ---- by path ----


REWARD_MODEL = "reward_model"


def models() -> dict[str, bool]:
    """Return name -> "is a value model" for the groups of a checkpoint that are weights of a model."""
    held = {name: spec.values for name, spec in ROLES.items() if spec.mesh == "layout" and name != "policy"}
    return {"model": False, EMA: False, **held}


def load_model(spec: str | Path, group: str = "") -> LoadedModel:
    """Return the model of a reference; its tensors are read, one at a time, on access.

    spec: a reference as in ``model_refs.find_checkpoint`` (``RUN``, ``RUN@best``, ``RUN@STEP``, ``RUN@ema``, a
    checkpoint), a Hugging Face directory or an id of its hub. group: group of tensors (``models``); empty: that of the
    reference. ModelError if there is none, naming what there is; CheckpointError if it is damaged.
    """
    spec = fetched(str(spec))
    named = find_checkpoint(spec)
    if named is not None:
        return _from_checkpoint(named._replace(group=group or named.group))
    if group not in ("", "model", REWARD_MODEL):
        raise ModelError(f"{spec!r} is not a checkpoint, so it has no group {group}", key="group")
    config, tensors = load_pretrained(spec, values=group == REWARD_MODEL)
    return LoadedModel(config, tensors, _tokenizer(Path(spec)), Path(spec))


def models_of_roles(recipe: Recipe, load: Callable[[str, str], LoadedModel]) -> dict[str, LoadedModel]:
    """Return key of a path -> its model, for those that roles load. ModelError names the key."""
    found = dict[str, LoadedModel]()
    for spec in roles_of(recipe).values():
        for key, path in spec.paths(recipe).items():
            try:
                found[key] = load(path, spec.group)
            except ModelError as error:
                raise ModelError(f"{key}: {error}", key=key) from error
    return found


def load_drafter(recipe: Recipe, load: Callable[[str, str], LoadedModel]) -> LoadedModel:
    """Load the drafting model. ModelError names the key of its path."""
    try:
        return load(recipe.rollout.draft.path, "")
    except ModelError as error:
        raise ModelError(f"rollout.draft.path: {error}", key="rollout.draft.path") from error


def load_beginning(recipe: Recipe) -> LoadedModel:
    """Return the model of ``model.path``; in flow reward_model a reward model with its head if it is one.

    With the adapter of ``model.adapter``: merged into the weights, or beside them where the policy learns adapters,
    which must be of the same kind (RecipeError).
    """
    spec = recipe.model.path
    named = find_checkpoint(spec) if recipe.flow == "reward_model" else None
    whole = named is not None and REWARD_MODEL in open_checkpoint(named.path).groups
    loaded = load_model(spec, REWARD_MODEL) if whole else load_model(spec)
    if not recipe.model.adapter:
        return loaded
    adapter, lora = load_adapter(recipe.model.adapter, loaded.config), recipe.policy.lora
    both = WithAdapter(loaded.tensors, adapter.tensors)
    if not lora.rank:
        return loaded._replace(tensors=MergedTensors(both, adapter.lora))
    for key in ("rank", "alpha", "rslora"):
        own, theirs = getattr(lora, key), getattr(adapter.lora, key)
        if own != theirs:
            message = (
                f"policy.lora.{key} = {own}, but the adapter in {recipe.model.adapter} has {theirs}: set it to that"
            )
            raise RecipeError(f"{message}, or policy.lora.rank = 0 to merge it", key=f"policy.lora.{key}")
    if adapter_shapes(loaded.config, lora).keys() != adapter.tensors.keys():
        message = f"policy.lora.targets = {list(lora.targets)}, but the adapter in {recipe.model.adapter} changes"
        message = f"{message} {list(adapter.lora.targets)}: name these"
        raise RecipeError(message, key="policy.lora.targets")
    return loaded._replace(tensors=both)


def _from_checkpoint(named: Named) -> LoadedModel:
    run = named.run
    if run is None and is_url(named.path):
        message = f"{named.path} is a checkpoint, but its run's config.json is not beside it; use RUN@STEP"
        raise ModelError(message, key="run")
    run = run or Path(os.path.normpath(Path(named.path) / ".." / ".."))
    source = run / MODEL_FOLDER
    if not (source / "config.json").is_file():
        message = f"{named.path} is a checkpoint, but {source / 'config.json'} with its shape does not exist"
        raise ModelError(message, key="config.json")
    fields, settings = read_config(source), run_settings(run)
    if not is_known(fields):
        load_code(run, settings)  # a plugin may declare the family
    config = DecoderConfig.from_hf(fields)
    with explained(named):
        checkpoint = open_checkpoint(named.path)
    stored = _tensors(checkpoint, named)
    wanted_shapes = parameter_shapes(config, value=models()[named.group])
    tensors = _merged(_with_base(stored, checkpoint, named, wanted_shapes), settings, named.group)
    check_tensors(f"group {named.group} of {named.path}", wanted_shapes, shapes(tensors))
    return LoadedModel(config, tensors, _tokenizer(source), source, run, settings, checkpoint.step)


def _tensors(checkpoint: Checkpoint, named: Named) -> StoredTensors:
    if named.group == EMA and EMA not in checkpoint.groups:
        message = f"{named.path} has no moving average of the weights; train with train.ema = 0.999 to get one"
        raise ModelError(message, key="train.ema")
    if named.group not in models() or named.group not in checkpoint.groups:
        there = ", ".join(name for name in checkpoint.groups if name in models()) or "none"
        hint = ": it is a reward model, for reward.model" if there == REWARD_MODEL else ""
        message = f"{named.path} has no weights in a group {named.group}; weights are in: {there}{hint}"
        raise ModelError(message, key=named.group)
    return StoredTensors(checkpoint, named.group, named)


class MergedTensors(Unread):
    """Weights with the change by their adapters, which are no tensors of their own."""

    def __init__(self, tensors: Unread, lora: LoraConfig) -> None:
        """lora: of the adapters."""
        super().__init__(name for name in tensors if not is_adapter(name))
        self._tensors, self.lora, self._scale = tensors, lora, scale_of(lora)

    def part(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        found, (a, b) = self._tensors.part(name, slices), pair_of(name)
        if a not in self._tensors:
            return found
        of_a, of_b = blocks_of(slices, self.lora.rank) if slices else ((), ())
        return merge(found, self._tensors.part(a, of_a), self._tensors.part(b, of_b), self._scale)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def adapters(self) -> dict[str, Tensor]:
        """Return the adapters' own tensors, read."""
        return {name: self._tensors[name] for name in self._tensors if is_adapter(name)}


class WithAdapter(Unread):
    """Weights of a model, and the adapters beside them."""

    def __init__(self, tensors: Mapping[str, Tensor], more: Mapping[str, Tensor], names: Collection[str] = ()) -> None:
        """names: weights to take of ``tensors``; empty: all."""
        base = shapes(tensors)
        self._shapes = {name: base[name] for name in names or base} | shapes(more)
        super().__init__(self._shapes)
        self._tensors, self._more = tensors, more

    def part(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return block(self._more if name in self._more else self._tensors, name, slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def _with_base(stored: StoredTensors, checkpoint: Checkpoint, named: Named, wanted: Collection[str]) -> Unread:
    """Return the tensors of a checkpoint with those of the model whose adapters it holds. ModelError if that is gone,
    or another one now."""
    lacks = [name for name in wanted if name not in stored]
    base = checkpoint.objects.get("base")
    if base is None or not lacks or not has_adapters(stored):
        return stored
    check_pinned(base, str(named))
    begun = load_model(base["path"], base["group"]).tensors
    return WithAdapter(begun, stored, [name for name in lacks if name in begun])


def _merged(tensors: Unread, settings: Mapping[str, Any], group: str) -> Unread:
    """Return the tensors of a group with the adapters of its role merged in, if it has some."""
    if not has_adapters(tensors):
        return tensors
    section = settings.get("critic" if group == "critic" else "policy", {})
    return MergedTensors(tensors, LoraConfig.model_validate(section["lora"], strict=False))


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None


def wants_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """Return the model's tokenizer; DataError if it has none, or one with more tokens than the model."""
    if loaded.tokenizer is None:
        message = f"model {str(loaded.source)!r} has no tokenizer.json, so it cannot read text"
        raise DataError(message, key="tokenizer.json")
    check_vocabulary(loaded.tokenizer, loaded.config.vocab_size, loaded.tokenizer, f"model {str(loaded.source)!r}")
    return loaded.tokenizer


def make_engine(loaded: LoadedModel, options: EngineOptions) -> GenerationEngine:
    """Return an engine with these weights, of the run's kind or native: bf16 on a GPU or if the run was, else fp32."""
    gpu = torch.cuda.is_available()
    half = gpu or loaded.settings.get("train", {}).get("precision") == "bf16"
    section = loaded.settings.get("rollout", {})
    if section.get("engine", "native") != "native" and loaded.run is not None:
        check_trust(loaded.run, loaded.settings)
    options = replace(
        options,
        tokenizer=loaded.tokenizer,
        device="cuda" if gpu else "cpu",
        dtype=torch.bfloat16 if half else torch.float32,
        python=section.get("python", ""),
        arguments=section.get("options", {}),
    )
    name, plugins = section.get("engine", "native"), loaded.settings.get("plugins", ())
    engine = protocol.make_engine(name, loaded.config, options, plugins=plugins)
    engine.update_weights(loaded.tensors.items(), version=0)  # one at a time
    return engine


# ---- the tokenizer ----


def choose_tokenizer(
    recipe: Recipe, prompts: PromptSet | None, loaded: LoadedModel | None, texts: Iterable[str] | None = None
) -> Tokenizer:
    """Return the tokenizer of ``data.tokenizer``, else the model's, else one with a token per character of the data.

    A new tokenizer (``characters``, ``bpe:SIZE``) is made of ``texts``, the documents of flow pretrain, or of prompts
    with their answers. DataError if it does not fit the model.
    """
    name = recipe.data.tokenizer
    if loaded is not None and name.startswith("bpe:"):
        raise DataError(
            f"data.tokenizer = {name} makes new tokens, which the model of model.path = {recipe.model.path} does not "
            "have; data.tokenizer= (empty) keeps the model's tokenizer",
            key="data.tokenizer.bpe",
        )
    if not name and loaded is not None:
        if loaded.tokenizer is None:
            message = f"{loaded.source} has no tokenizer.json; name one with data.tokenizer"
            raise DataError(message, key="data.tokenizer")
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
        message = f"data.tokenizer = {name!r} has no number of tokens; use for example bpe:4096"
        raise DataError(message, key="data.tokenizer.size")
    return int(size)


def _alphabet(prompts: PromptSet | None, texts: Iterable[str] | None) -> str:
    if texts is None:
        return prompts.alphabet() if prompts is not None else ""
    return "".join(sorted(set().union(*map(set, texts))))


def _texts(recipe: Recipe, prompts: PromptSet | None, texts: Iterable[str] | None) -> Iterable[str]:
    """Return the texts that a new tokenizer is trained on; held-out data is not among them."""
    if texts is not None or prompts is None:
        return texts or ()
    train, _ = prompts.split(recipe.data.holdout)
    tools = listed_tools(recipe.rollout.environment)
    return (_whole(p, p.tools or tools, named=bool(recipe.data.template)) for p in train)


def _whole(prompt: Prompt, tools: Tools, *, named: bool) -> str:
    """Return all that is said in a prompt and its answer. named: with roles and tools, as chat templates write them."""
    turns = list(prompt.messages)
    last = turns.pop() if turns and turns[-1]["role"] == "assistant" else {"role": "assistant"}
    turns += [{**last, "content": prompt.answer or ""}] if turns else []
    if named and turns:
        listed = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        return "".join(f"{text}\n" for text in (*listed, *(f"{turn['role']}\n{_said(turn)}" for turn in turns)))
    return "\n\n".join(map(_said, turns)) if turns else f"{prompt.text}{prompt.answer or ''}"


def _said(turn: Mapping[str, Any]) -> str:
    calls = (json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ()))
    return "\n".join([turn["content"], *calls])


# ---- the model folder of a run ----


def save_shape(folder: Path, config: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Write config.json and tokenizer files, chat template included, to a run's model folder, each atomically."""
    made = folder.with_name(f".{folder.name}.tmp")
    with writing(folder):
        make_folder(folder)
        made.mkdir(exist_ok=True)
        (made / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
        tokenizer.save(made)
        for file in made.iterdir():
            rename(file, folder / file.name)
        made.rmdir()
