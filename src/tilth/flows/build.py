"""The roles of a run, built from its recipe on the workers of a cluster."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilth.checkpoint import open_checkpoint
from tilth.checkpoint.storage import is_url
from tilth.cluster.cluster import Cluster
from tilth.cluster.group import WorkerGroup
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
from tilth.flows.model import REWARD_MODEL, LoadedModel, choose_tokenizer, load_beginning, load_model
from tilth.flows.named import find_checkpoint, split_spec
from tilth.flows.run import Roles, Split
from tilth.models.config import DecoderConfig
from tilth.models.family import new_config
from tilth.models.hub import fetched
from tilth.plan.layout import check_shape, place
from tilth.plan.packing import divide
from tilth.plan.steps import RunPlan, plan_run, supervised_steps
from tilth.roles.reward_pool import RewardPool

_WORKERS = "tilth.flows.workers"
CACHE = ".cache"
"""Folder in run.dir of what can be made again: tokenised documents."""


class Texts(NamedTuple):
    """Documents of flow pretrain."""

    train: Sequence[str]
    heldout: Sequence[str]

    @classmethod
    def of(cls, prompts: PromptSet, holdout: float) -> "Texts":
        """Prompts, each with its answer as it stands, as documents."""
        return cls(*([p.text + (p.answer or "") for p in side] for side in prompts.split(holdout)))

    def fingerprint(self) -> str:
        """Tells these documents from any others."""
        found = hashlib.blake2b(digest_size=8)
        for text in (*self.train, "\0heldout\0", *self.heldout):
            found.update(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return found.hexdigest()


Material = PromptSet | Texts
"""What a run learns from: prompts, or whole documents for flow pretrain."""


@dataclass
class Parts:
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
class Lesson:
    """What is learned, tokenised and checked. longest: tokens of the longest prompt, or such that the plan is right."""

    train: Split
    heldout: Split
    longest: int
    recorder: str
    """The factory of its recorder, and what that is given."""
    given: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def build(
    recipe: Recipe,
    material: Material,
    pool: RewardPool | None,
    cluster: Cluster,
    earlier: Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Parts:
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
    for role, key in (("reference", "reference.path"), (REWARD_MODEL, "reward.model")):
        if role in others:
            _check_tokens(recipe, key, others[role], tokenizer)
    generates = pool is not None or bool(recipe.reward.model)
    if isinstance(material, Texts):
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
    team = Team(cluster, recipe, config)
    team.learners()
    team.make("recorder", lesson.recorder, **lesson.given)
    if generates:
        team.speakers(tokenizer, material, pool)
    roles = team.roles()
    return Parts(recipe, config, tokenizer, lesson.train, lesson.heldout, plan, roles, lesson.notes, adopt)


def loaded_models(recipe: Recipe) -> dict[str, LoadedModel]:
    """Role -> its model, of those that have one of their own by a path."""
    found = {}
    if recipe.refers and recipe.reference.path:
        found["reference"] = load_model(recipe.reference.path)
    if recipe.reward.model:
        found[REWARD_MODEL] = load_model(recipe.reward.model, REWARD_MODEL)
    if recipe.facts.judge:
        found["judge"] = load_model(recipe.judge.path)
    return found


class Team:
    """The worker groups of a run, made one after the other: a factory finds those before it in its process."""

    def __init__(self, cluster: Cluster, recipe: Recipe, config: DecoderConfig) -> None:
        self.cluster = cluster
        self.places = place(recipe)
        self.model: dict[str, Any] = {"recipe": rooted(recipe), "config": config}
        self.made: dict[str, WorkerGroup] = {}

    def make(self, role: str, factory: str = "", **given: Any) -> None:
        """One role on the workers that the recipe gives it; ``factory`` of flows.workers, by default of its name."""
        where = f"{_WORKERS}:{factory or role}"
        self.made[role] = self.cluster.group(role, where, given, mesh=self.places[role].mesh, divide=divide_batch)

    def learners(self) -> None:
        """The policy and what is begun as its copy."""
        for role in ("policy", "reference", "critic"):
            if role in self.places:
                learns = role == "policy" and self.model["recipe"].flow == "reward_model"
                self.make(role, "preferring" if learns else "", **self.model)

    def speakers(self, tokenizer: Tokenizer, prompts: Material, pool: RewardPool | None) -> None:
        """Who generates and who scores: a function, a reward model, or both."""
        self.make("rollout", **self.model, tokenizer=tokenizer, prompts=prompts)
        if pool is not None:
            self.make("reward", pool=pool, prompts=prompts)
        if REWARD_MODEL in self.places:
            self.make(REWARD_MODEL, recipe=self.model["recipe"])
        if "judge" in self.places:
            self.make("judge", recipe=self.model["recipe"], prompts=prompts)

    def roles(self) -> Roles:
        """All of them, with a relay on every worker that holds the policy or a copy of it."""
        source = self.places["policy"].mesh
        loaded = ("reference",) if self.model["recipe"].reference.path else ()
        copies = [role for role in ("rollout", "reference", "critic") if role in self.made and role not in loaded]
        targets = {role: self.places[role].mesh for role in copies}
        if targets:
            ranks = tuple(sorted({rank for mesh in (source, *targets.values()) for rank in mesh.ranks}))
            given = {**self.model, "source": source, "targets": targets}
            mesh = Mesh(("to",), (len(ranks),), ranks)
            self.made["relay"] = self.cluster.group("relay", f"{_WORKERS}:relay", given, mesh=mesh)
        return Roles(**self.made, loaded=loaded)


def _optimizer_of(recipe: Recipe) -> str:
    """The checkpoint of ``model.path``; RecipeError unless it holds the state of an optimizer as the recipe has it."""
    named = find_checkpoint(recipe.model.path)
    if named is None:
        raise RecipeError(f"model.optimizer = true, but model.path = {recipe.model.path} is no run: it has none")
    kinds = {name.partition(".")[0] for name in open_checkpoint(named.path).names("optimizer")}
    stored = "muon" if "momentum_buffer" in kinds else "adamw"
    if stored != recipe.optimizer.name:
        raise RecipeError(
            f"model.optimizer = true, but optimizer.name = {recipe.optimizer.name} and that of {named} is {stored}"
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
            "them; both need the same tokenizer"
        )
    if recipe.model.context > loaded.config.max_positions:
        raise RecipeError(
            f"model.context = {recipe.model.context} is more than the {loaded.config.max_positions} positions of "
            f"{key} = {loaded.run or loaded.source}"
        )


def rooted(recipe: Recipe) -> Recipe:
    """With whole paths where workers read files: their working directory may be another one."""
    changed: dict[str, Any] = {}
    for name, key in (("model", "path"), ("reference", "path"), ("reward", "model"), ("judge", "path")):
        section = getattr(recipe, name)
        if path := getattr(section, key):
            folder, which = split_spec(fetched(path))
            whole = folder if is_url(folder) else Path(folder).resolve()
            changed[name] = section.model_copy(update={key: f"{whole}@{which}" if which else str(whole)})
    template = Path(recipe.data.template)
    if recipe.data.template and template.is_file():
        changed["data"] = recipe.data.model_copy(update={"template": str(template.resolve())})
    return recipe.model_copy(update=changed)


def divide_batch(batch: Batch, parts: int) -> list[np.ndarray]:
    """Rows of a batch for so many workers: balanced by tokens where lengths are known, groups together if that pays."""
    lengths, groups = batch.rows.get("length"), batch.rows.get("group")
    if lengths is None and groups is None:
        return np.array_split(np.arange(len(batch), dtype=np.int64), parts)
    return divide(lengths, groups, parts)


def _counted(recipe: Recipe, examples: int) -> Recipe:
    """The recipe with as many supervised steps as its epochs take."""
    steps = supervised_steps(recipe.supervised, examples)
    return recipe.model_copy(update={"supervised": recipe.supervised.model_copy(update={"steps": steps})})


def _tokenizer(recipe: Recipe, material: Material, loaded: LoadedModel | None, earlier: Path | None) -> Tokenizer:
    if earlier is not None and loaded is None and recipe.data.tokenizer.startswith("bpe:"):
        return Tokenizer.load(earlier)  # trained once, when the run began
    if isinstance(material, Texts):
        return choose_tokenizer(recipe, None, loaded, material.train)
    return choose_tokenizer(recipe, material, loaded)


def _documents(recipe: Recipe, texts: Texts, tokenizer: Tokenizer) -> Lesson:
    context, folder = recipe.model.context, Path(recipe.run.dir) / CACHE
    train = Corpus.build(texts.train, tokenizer, context, folder)
    heldout = Corpus.build(texts.heldout, tokenizer, context, folder) if texts.heldout else None
    mine, theirs = (Order(np.arange(0 if corpus is None else len(corpus))) for corpus in (train, heldout))
    given = {"train": train, "heldout": heldout, "tokenizer": tokenizer}
    return Lesson(mine, theirs, context, "documents", given, notes=[f"documents: {train.note}"])


def _prompts(recipe: Recipe, prompts: PromptSet, tokenizer: Tokenizer, *, generates: bool) -> Lesson:
    train, heldout = prompts.split(recipe.data.holdout)
    template = make_template(recipe.data.template, tokenizer)
    context, room = recipe.model.context, recipe.rollout.max_tokens
    longest = check_prompts(prompts, template, context - room) if generates else 0
    if recipe.flow == "sft":  # what is held out is read too
        longest = max(longest, check_examples(prompts, template, context) - room)
    elif recipe.facts.learns == "pairs":
        longest = max(longest, check_pairs(prompts, template, context) - room)
    elif recipe.supervised.steps or recipe.supervised.epochs:
        check_examples(train, template, context)
    if recipe.data.holdout and not recipe.data.heldout and not len(heldout):
        raise DataError(
            f"data.holdout={recipe.data.holdout} of {len(prompts)} prompts leaves none to evaluate on; "
            f"set a larger data.holdout, data.heldout=FILE, or data.holdout=0 for no evaluation"
        )
    told = f"{prompts.copies} prompts are in data.heldout too, word for word, and are left out of training"
    given = {"recipe": rooted(recipe), "tokenizer": tokenizer, "prompts": prompts}
    who = "pair_recorder" if recipe.facts.learns == "pairs" else "recorder"
    return Lesson(train, heldout, longest, who, given, [told] if prompts.copies else [])


def _config(recipe: Recipe, loaded: LoadedModel | None, tokenizer: Tokenizer) -> DecoderConfig:
    """A loaded model keeps its own shape; the recipe's context must fit it, and its dropout holds."""
    if loaded is None:
        return new_config(recipe.model, tokenizer.vocab_size)
    if recipe.model.context > loaded.config.max_positions:
        raise RecipeError(
            f"model.context = {recipe.model.context} is more than the {loaded.config.max_positions} positions "
            f"of model.path = {recipe.model.path}"
        )
    return replace(loaded.config, dropout=recipe.model.dropout)
