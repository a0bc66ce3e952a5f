"""The roles of a run, built from its recipe on the workers of a cluster."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilth.checkpoint import open_checkpoint
from tilth.checkpoint.storage import is_url
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.open_sets import OPTIMIZERS
from tilth.config.roles import ROLES, RoleSpec, resolve, roles_of
from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.core.errors import DataError, RecipeError
from tilth.core.layout import Mesh
from tilth.data.documents import Corpus
from tilth.data.examples import check_examples, check_prompts
from tilth.data.order import Order
from tilth.data.pairs import check_pairs
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.flows.fitting import check_fits, resolved, rooms
from tilth.flows.model import LoadedModel, choose_tokenizer, load_beginning, load_model
from tilth.flows.roles import Roles
from tilth.flows.sampler import Split
from tilth.models.config import DecoderConfig
from tilth.models.family import new_config
from tilth.models.hub import fetched
from tilth.plan.layout import check_shape, place
from tilth.plan.packing import divide
from tilth.plan.steps import RunPlan, plan_run, supervised_steps
from tilth.rewards.process_pool import RewardPool
from tilth.runs.model_refs import find_checkpoint, split_spec

_WORKERS = "tilth.flows.workers"
CACHE = ".cache"
"""Folder in run.dir of what can be made again: tokenised documents."""


class PretrainTexts(NamedTuple):
    """Documents of flow pretrain."""

    train: Sequence[str]
    heldout: Sequence[str]

    @classmethod
    def of(cls, prompts: PromptSet, holdout: float) -> "PretrainTexts":
        """Prompts, each with its answer as it stands, as documents."""
        return cls(*([p.text + (p.answer or "") for p in side] for side in prompts.split(holdout)))

    def fingerprint(self) -> str:
        """Tells these documents from any others."""
        found = hashlib.blake2b(digest_size=8)
        for text in (*self.train, "\0heldout\0", *self.heldout):
            found.update(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return found.hexdigest()


Dataset = PromptSet | PretrainTexts
"""What a run learns from: prompts, or whole documents for flow pretrain."""


@dataclass
class RunParts:
    """What a run is made of, before it has a directory."""

    recipe: Recipe
    """With supervised.steps instead of epochs."""
    config: DecoderConfig
    tokenizer: Tokenizer
    train: Split
    heldout: Split
    plan: RunPlan
    roles: Roles
    notes: list[str]
    """What is to be told of the data."""
    adopt: str | None = None
    """The checkpoint whose optimizer state the run begins with."""


@dataclass
class TrainingData:
    """What is learned, tokenised and checked. longest: tokens of the longest prompt, or such that the plan is right."""

    train: Split
    heldout: Split
    longest: int
    given: dict[str, Any]
    """What roles can ask for of it, by name."""
    notes: list[str] = field(default_factory=list)


def build(
    recipe: Recipe,
    material: Dataset,
    pool: RewardPool | None,
    cluster: Cluster,
    earlier: Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> RunParts:
    """Model, engines and roles on the workers. All that can be wrong with data, tokenizer, shape or memory is found
    before.

    pool: None where nothing is generated. earlier: model folder of the run that is to go on, with its tokenizer. warn:
    is told before anything is allocated that the memory may not do.
    """
    loaded = load_beginning(recipe) if recipe.model.path else None
    adopt = _optimizer_of(recipe) if recipe.model.optimizer else None
    tokenizer = _tokenizer(recipe, material, loaded, earlier)
    config = _config(recipe, loaded, tokenizer)
    check_shape(recipe, config)
    others = loaded_models(recipe)
    for role, model in others.items():
        if ROLES[role].mesh == "layout":  # it reads tokens; an engine reads text, with a tokenizer of its own
            _check_tokens(recipe, ROLES[role].loads, model, tokenizer)
    generates = pool is not None or bool(recipe.reward.model)
    if isinstance(material, PretrainTexts):
        lesson = _documents(recipe, material, tokenizer)
    else:
        lesson = _prompts(recipe, material, tokenizer, generates=generates)
    planned = partial(
        plan_run,
        shape=config,
        train_prompts=len(lesson.train),
        heldout_prompts=len(lesson.heldout),
        longest_prompt=lesson.longest,
        generates=generates,
        loaded={role: model.config for role, model in others.items()},
    )
    plan = planned(resolved(recipe))
    for text in check_fits(resolved(recipe), planned, *rooms(resolved(recipe))):
        warn(text)
    recipe = _counted(recipe, len(lesson.train))
    places = place(recipe, generates=generates)
    given = {"recipe": rooted(recipe), "config": config, "tokenizer": tokenizer, **lesson.given}
    if pool is not None:
        given["pool"] = pool
    else:
        places.pop("reward", None)  # a model alone scores
    roles = make_roles(cluster, {role: placed.mesh for role, placed in places.items()}, given)
    return RunParts(recipe, config, tokenizer, lesson.train, lesson.heldout, plan, roles, lesson.notes, adopt)


def loaded_models(recipe: Recipe) -> dict[str, LoadedModel]:
    """Role -> its model, of those that have one of their own by a path."""
    wanted = {role: (spec.path(recipe), spec.group) for role, spec in roles_of(recipe).items()}
    return {role: load_model(path, group) for role, (path, group) in wanted.items() if path}


def make_roles(cluster: Cluster, meshes: Mapping[str, Mesh], given: Mapping[str, Any]) -> Roles:
    """Worker groups of a run, made one after the other, each with what its worker asks for by name; and the role
    ``weight_sync`` on every worker that holds the policy or receives its weights."""
    recipe: Recipe = given["recipe"]
    made = dict[str, WorkerGroup]()
    for role, mesh in meshes.items():
        spec = ROLES[role]
        if isinstance(spec.worker, str):
            factory, kwargs = spec.worker, _asked_for(spec, given)
        else:  # the recipe brings the plugins
            factory, kwargs = f"{_WORKERS}:brought", {"recipe": recipe, "given": _asked_for(spec, given)}
        made[role] = cluster.group(role, factory, kwargs, mesh=mesh, divide=divide_batch)
    loaded = frozenset(role for role in made if ROLES[role].path(recipe))
    targets = {role: mesh for role, mesh in meshes.items() if ROLES[role].receives and role not in loaded}
    if not targets:
        return Roles(made, loaded)
    source = meshes["policy"]
    ranks = tuple(sorted({rank for mesh in (source, *targets.values()) for rank in mesh.ranks}))
    kwargs = {"recipe": recipe, "config": given["config"], "source": source, "targets": targets}
    weight_sync = cluster.group(
        "weight_sync", f"{_WORKERS}:weight_sync", kwargs, mesh=Mesh(("to",), (len(ranks),), ranks)
    )
    return Roles(made, loaded, weight_sync)


def _asked_for(spec: RoleSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker is given of what there is. RecipeError names what there is not."""
    _, *asked = inspect.signature(resolve(spec.worker)).parameters.values()
    wanted = [p for p in asked if p.kind is not p.KEYWORD_ONLY]
    missing = [p.name for p in wanted if p.name not in given and p.default is p.empty]
    if missing:
        raise RecipeError(
            f"role {spec.name} asks for {missing[0]!r}; in this flow there is {', '.join(given)}",
            key=f"roles.{spec.name}.{missing[0]}",
        )
    return {p.name: given[p.name] for p in wanted if p.name in given}


def _optimizer_of(recipe: Recipe) -> str:
    """The checkpoint of ``model.path``; RecipeError unless it holds the state of an optimizer as the recipe has it."""
    named = find_checkpoint(recipe.model.path)
    if named is None:
        raise RecipeError(
            f"model.optimizer = true, but model.path = {recipe.model.path} is no run: it has none",
            key="model.optimizer",
        )
    kinds = {name.partition(".")[0] for name in open_checkpoint(named.path).names("optimizer")} - {"step"}
    wanted = {*OPTIMIZERS[recipe.optimizer.name], *(OPTIMIZERS["adamw"] if recipe.optimizer.name == "muon" else ())}
    if kinds != wanted:
        stored = "muon" if "momentum_buffer" in kinds else "adamw" if "exp_avg_sq" in kinds else "another"
        raise RecipeError(
            f"model.optimizer = true, but optimizer.name = {recipe.optimizer.name} and that of {named} is {stored}",
            key="optimizer.name",
        )
    return str(Path(named.path).resolve() if isinstance(named.path, Path) else named.path)


def _check_tokens(recipe: Recipe, key: str, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """RecipeError unless the model of this key reads the very tokens that the policy writes."""
    other, ours = loaded.tokenizer, tokenizer.vocab_size
    theirs = other.vocab_size if other is not None else loaded.config.vocab_size
    pairs = [(i, other.token(i), tokenizer.token(i)) for i in range(min(theirs, ours))] if other is not None else []
    found = [f"token {i} is {a!r} there and {b!r} here" for i, a, b in pairs if a != b]
    found += [f"{theirs} there and {ours} here"] if theirs < ours else []
    if found:
        raise RecipeError(
            f"{key} = {loaded.run or loaded.source} has other tokens than the policy ({found[0]}): it cannot judge "
            "them; both need the same tokenizer",
            key=f"{key}.tokenizer",
        )
    if recipe.model.context > loaded.config.max_positions:
        raise RecipeError(
            f"model.context = {recipe.model.context} is more than the {loaded.config.max_positions} positions of "
            f"{key} = {loaded.run or loaded.source}",
            key=f"{key}.context",
        )


def rooted(recipe: Recipe) -> Recipe:
    """With whole paths where workers read files: their working directory may be another one."""
    for key in ("model.path", *(spec.loads for spec in ROLES.values() if spec.loads)):
        name, _, last = key.rpartition(".")
        if path := getattr(recipe.section(name), last):
            folder, which = split_spec(fetched(path))
            whole = folder if is_url(folder) else Path(folder).resolve()
            recipe = recipe.replaced(name, **{last: f"{whole}@{which}" if which else str(whole)})
    template = Path(recipe.data.template)
    if recipe.data.template and template.is_file():
        recipe = recipe.replaced("data", template=str(template.resolve()))
    return recipe


def divide_batch(batch: Batch, parts: int) -> list[np.ndarray]:
    """Rows of a batch for so many workers: balanced by tokens where lengths are known, groups together if that pays."""
    lengths, groups = batch.rows.get("length"), batch.rows.get("group")
    if lengths is None and groups is None:
        return np.array_split(np.arange(len(batch), dtype=np.int64), parts)
    return divide(lengths, groups, parts)


def _counted(recipe: Recipe, examples: int) -> Recipe:
    """The recipe with as many supervised steps as its epochs take."""
    return recipe.replaced("supervised", steps=supervised_steps(recipe.supervised, examples))


def _tokenizer(recipe: Recipe, material: Dataset, loaded: LoadedModel | None, earlier: Path | None) -> Tokenizer:
    if earlier is not None and loaded is None and recipe.data.tokenizer.startswith("bpe:"):
        return Tokenizer.load(earlier)  # trained once, when the run began
    if isinstance(material, PretrainTexts):
        return choose_tokenizer(recipe, None, loaded, material.train)
    return choose_tokenizer(recipe, material, loaded)


def _documents(recipe: Recipe, texts: PretrainTexts, tokenizer: Tokenizer) -> TrainingData:
    context, folder = recipe.model.context, Path(recipe.run.dir) / CACHE
    train = Corpus.build(texts.train, tokenizer, context, folder)
    heldout = Corpus.build(texts.heldout, tokenizer, context, folder) if texts.heldout else None
    mine, theirs = (Order(np.arange(0 if corpus is None else len(corpus))) for corpus in (train, heldout))
    return TrainingData(mine, theirs, context, {"train": train, "heldout": heldout}, notes=[f"documents: {train.note}"])


def _prompts(recipe: Recipe, prompts: PromptSet, tokenizer: Tokenizer, *, generates: bool) -> TrainingData:
    train, heldout = prompts.split(recipe.data.holdout)
    template = make_template(recipe.data.template, tokenizer)
    context, room = recipe.model.context, recipe.rollout.max_tokens
    longest = check_prompts(prompts, template, context - room) if generates else 0
    if recipe.flow == "sft":  # what is held out is read too
        longest = max(longest, check_examples(prompts, template, context) - room)
    elif recipe.flow_spec.learns == "pairs":
        longest = max(longest, check_pairs(prompts, template, context) - room)
    elif recipe.supervised.steps or recipe.supervised.epochs:
        check_examples(train, template, context)
    if recipe.data.holdout and not recipe.data.heldout and not len(heldout):
        raise DataError(
            f"data.holdout={recipe.data.holdout} of {len(prompts)} prompts leaves none to evaluate on; "
            f"set a larger data.holdout, data.heldout=FILE, or data.holdout=0 for no evaluation",
            key="data.holdout",
        )
    told = f"{prompts.copies} prompts are in data.heldout too, word for word, and are left out of training"
    return TrainingData(train, heldout, longest, {"prompts": prompts}, [told] if prompts.copies else [])


def _config(recipe: Recipe, loaded: LoadedModel | None, tokenizer: Tokenizer) -> DecoderConfig:
    """A loaded model keeps its own shape; the recipe's context must fit it, and its dropout holds."""
    if loaded is None:
        return new_config(recipe.model, tokenizer.vocab_size)
    if recipe.model.context > loaded.config.max_positions:
        raise RecipeError(
            f"model.context = {recipe.model.context} is more than the {loaded.config.max_positions} positions "
            f"of model.path = {recipe.model.path}",
            key="model.context",
        )
    return replace(loaded.config, dropout=recipe.model.dropout)
