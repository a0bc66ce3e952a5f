"""Build the roles of a run from its recipe on the workers of a cluster."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from tilth.checkpoint import open_checkpoint
from tilth.checkpoint.storage import is_url
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.open_sets import OPTIMIZERS, optimizer_states
from tilth.config.roles import ROLES, RoleSpec, resolve, roles_of
from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.core.errors import DataError, RecipeError
from tilth.core.layout import Mesh
from tilth.core.memory import Room, host_memory
from tilth.core.random import Stream, stream
from tilth.data.alignment import Translator
from tilth.data.cache import CACHE, CacheEntry
from tilth.data.columns import RecordError, value_of
from tilth.data.computed import has_media
from tilth.data.documents import Corpus
from tilth.data.examples import check_examples, check_prompts, token_lengths
from tilth.data.mixture import Mixture
from tilth.data.order import Order
from tilth.data.pairs import check_pairs
from tilth.data.prompts import Prompt, PromptSet, texts_of
from tilth.data.template import Template, Tools, data_template, template_files
from tilth.data.tokenizer import Tokenizer
from tilth.envs.process import listed_tools, load_environment
from tilth.flows.roles import Roles
from tilth.flows.sampler import Split
from tilth.launch.compilation import choose, possible
from tilth.launch.rewards import is_unscored
from tilth.models import row_product
from tilth.models.config import DecoderConfig
from tilth.models.family import new_config
from tilth.models.hub import fetched
from tilth.plan.fit import MemoryUse, places, remedies, verdict
from tilth.plan.layout import RankPlan, check_shape, place
from tilth.plan.memory import DRAFTER, on_many_machines
from tilth.plan.packing import divide
from tilth.plan.schedule import ranks_held
from tilth.plan.steps import RunPlan, plan_run, supervised_steps
from tilth.plan.working import with_device
from tilth.rewards.process_pool import RewardPool
from tilth.runs.model_refs import find_checkpoint, split_spec
from tilth.runs.models import (
    LoadedModel,
    choose_tokenizer,
    load_beginning,
    load_drafter,
    load_model,
    models_of_roles,
    wants_tokenizer,
)

_WORKERS = "tilth.launch.workers"
_TRIED = 32
"""Prompts of each source that are translated for a teacher before the run."""


class PretrainTexts(NamedTuple):
    """Documents of flow pretrain."""

    train: Sequence[str]
    heldout: Sequence[str]
    parts: tuple[int, ...] = ()
    """Documents to train on of each source, in order; empty: all are of one."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, prompts: PromptSet, holdout: float) -> "PretrainTexts":
        """Make documents of prompts: whole texts, or each prompt followed by its answer."""
        train, held = prompts.split(holdout)
        return cls(texts_of(train), texts_of(held), tuple(map(len, train.parts)), tuple(prompts.left_out()))

    def fingerprint(self) -> str:
        """Return a digest of all documents."""
        found = hashlib.blake2b(digest_size=8)
        for text in (*self.train, "\0heldout\0", *self.heldout):
            found.update(hashlib.blake2b(text.encode(), digest_size=8).digest())
        return found.hexdigest()


Dataset = PromptSet | PretrainTexts
"""Training data of a run: prompts, or whole documents for flow pretrain."""


@dataclass
class RunParts:
    """Parts of a run before it has a directory."""

    recipe: Recipe
    """The recipe with supervised.steps instead of epochs."""
    config: DecoderConfig
    tokenizer: Tokenizer
    train: Split
    heldout: Split
    plan: RunPlan
    roles: Roles
    notes: list[str]
    """Lines to log about the data."""
    adopt: str | None = None
    """Checkpoint whose optimizer state the run begins with."""
    followed: np.ndarray | None = None
    """As of ``followed_teachers``."""


@dataclass
class TrainingData:
    """Tokenised and checked data. longest: tokens of the longest prompt plus what the plan has to add to it."""

    train: Split
    heldout: Split
    longest: int
    given: dict[str, Any]
    """Arguments that roles can ask for, by name."""
    notes: list[str] = field(default_factory=list)


def build(
    recipe: Recipe,
    material: Dataset,
    pool: RewardPool | None,
    cluster: Cluster,
    earlier: Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
    compiled: Mapping[str, bool] | None = None,
) -> RunParts:
    """Check data, tokenizer, shape and memory, then make the roles on the workers.

    Raises the errors of the data and of all checks, and ``PlanError`` for a sequence longer than its ranks hold.

    pool: None if nothing is generated. earlier: model folder of the run to resume, with its tokenizer. warn: called
    before anything is allocated if memory may run out. compiled: section -> whether the run to resume began with
    compiled passes.
    """
    loaded = load_beginning(recipe) if recipe.model.path else None
    adopt = _optimizer_of(recipe) if recipe.model.optimizer else None
    tokenizer = _tokenizer(recipe, material, loaded, earlier)
    config = model_config(recipe, loaded, tokenizer)
    others = models_of_roles(recipe, load_model)
    shapes = {key: model.config for key, model in others.items()}
    check_shape(recipe, config, shapes)
    texts = {each.key for each in recipe.teachers if each.aligns}  # they read text, and are checked with the prompts
    for spec in roles_of(recipe).values():
        if spec.mesh == "layout":  # reads tokens; an engine reads text with its own tokenizer
            for key in (key for key in spec.paths(recipe) if key not in texts):
                _check_tokens(recipe, key, others[key], tokenizer)
    if recipe.rollout.draft.path:
        shapes[DRAFTER] = _check_drafter(recipe, config, tokenizer)
    generates = pool is not None or recipe.flow_spec.samples or bool(recipe.reward.model or recipe.rollout.environment)
    followed = None
    if isinstance(material, PretrainTexts):
        data = _documents(recipe, material, tokenizer)
    else:
        data = _prompts(recipe, material, tokenizer, generates=generates)
        followed = followed_teachers(recipe, material)
        for number, each in enumerate(recipe.teachers):
            rows = material.rows if followed is None else np.flatnonzero(followed == number)
            if followed is not None:
                data.notes.append(f"teacher {each.name}: {len(rows):,} prompts")
            if each.aligns:
                own = PromptSet(material.source, rows)
                data.notes.append(_check_teacher(recipe, each.key, others[each.key], own, tokenizer))
    chats = loaded is not None and loaded.tokenizer is not None and bool(loaded.tokenizer.chat_template)
    if chats and not recipe.data.template and recipe.flow_spec.learns != "documents":
        data.notes.append(
            "model.path has a chat template, but data.template is empty: prompts and answers are joined as they stand; "
            "data.template=model writes conversations"
        )
    compiled = compiled or {}
    recipe, eager = possible(recipe, with_device(recipe).train.device, compiled)
    data.notes += eager
    planned = partial(
        plan_run,
        shape=config,
        train_prompts=len(data.train),
        heldout_prompts=len(data.heldout),
        longest_prompt=data.longest,
        generates=generates,
        loaded=shapes,
    )
    plan = planned(with_device(recipe))
    for text in check_fits(with_device(recipe), planned, *rooms(with_device(recipe))):
        warn(text)
    recipe = recipe.replaced("supervised", steps=supervised_steps(recipe.supervised, len(data.train)))
    if recipe.train.compile == "auto":
        choice = choose(with_device(recipe), config, plan, compiled.get("train"))
        recipe = recipe.replaced("train", compile=choice.compiled)
        data.notes.append(f"train.compile = auto: {choice.why}")
    if missing := _kernels_missing(recipe, generates=generates):
        data.notes.append(missing)
    if pool is None and is_unscored(recipe):
        plan = replace(plan, evaluations=0)
        data.notes.append("nothing scores answers, so there are no evaluations; reward.function would")
        if recipe.supervised.steps and recipe.supervised.until < 1:
            why = "is a share of right answers, and nothing scores them; set it to 1, or reward.function"
            message = f"supervised.until = {recipe.supervised.until} {why}"
            raise RecipeError(message, key="supervised.until.unscored")
    check_mixture(recipe, data.train)
    places = place(recipe, generates=generates)
    check_units(recipe, (placed.mesh for placed in places.values()), plan.longest)
    given = {"recipe": rooted(with_device(recipe)), "config": config, "tokenizer": tokenizer, **data.given}
    if pool is not None:
        given["pool"] = pool
    else:
        places.pop("reward", None)  # only a reward model scores
    roles = make_roles(cluster, {role: placed.mesh for role, placed in places.items()}, given)
    return RunParts(
        recipe, config, tokenizer, data.train, data.heldout, plan, roles, [*recipe.told, *data.notes], adopt, followed
    )


def _kernels_missing(recipe: Recipe, *, generates: bool) -> str:
    """Return a sentence if workers of this machine use kernels for CPUs and cannot build them; one in this process
    says so itself."""
    used = recipe.train.precision == "fp32" and (generates or recipe.train.parity)
    if recipe.cluster.backend == "inline" or on_many_machines(recipe) or not used:
        return ""
    return row_product.missing() if with_device(recipe).train.device == "cpu" else ""


def check_units(recipe: Recipe, meshes: Iterable[Mesh], longest: int) -> None:
    """Raise PlanError if the ranks that divide a sequence of ``longest`` tokens do not hold it together."""
    for units in (mesh.units for mesh in meshes):
        if units > 1:
            ranks_held(np.array([longest]), recipe.train.micro_tokens, units)


def make_roles(cluster: Cluster, meshes: Mapping[str, Mesh], given: Mapping[str, Any]) -> Roles:
    """Make the worker groups one after the other, each with the arguments that its worker asks for by name.

    The role ``weight_sync`` stands on every worker that holds the policy or receives its weights.
    """
    recipe: Recipe = given["recipe"]
    made = dict[str, WorkerGroup]()
    for role, mesh in meshes.items():
        spec = ROLES[role]
        if isinstance(spec.worker, str):
            factory, kwargs = spec.worker, _asked_for(spec, given)
        else:  # unpickling the recipe imports the plugins
            factory, kwargs = f"{_WORKERS}:plugin_role", {"recipe": recipe, "given": _asked_for(spec, given)}
        made[role] = cluster.group(role, factory, kwargs, mesh=mesh, divide=divide_batch)
    loaded = frozenset(role for role in made if ROLES[role].paths(recipe))
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
    """Return the arguments that a worker asks for; RecipeError for one that the flow does not have."""
    _, *asked = inspect.signature(resolve(spec.worker)).parameters.values()
    wanted = [p for p in asked if p.kind is not p.KEYWORD_ONLY]
    missing = [p.name for p in wanted if p.name not in given and p.default is p.empty]
    if missing:
        raise RecipeError(
            f"role {spec.name} asks for {missing[0]!r}; this flow has {', '.join(given)}",
            key=f"roles.{spec.name}.{missing[0]}",
        )
    return {p.name: given[p.name] for p in wanted if p.name in given}


def _optimizer_of(recipe: Recipe) -> str:
    """Return the checkpoint of ``model.path``; RecipeError unless it has the state of the recipe's optimizer."""
    named = find_checkpoint(recipe.model.path)
    if named is None:
        raise RecipeError(
            f"model.optimizer = true, but model.path = {recipe.model.path} is no run, so it has no optimizer state",
            key="model.optimizer",
        )
    kinds = {name.partition(".")[0] for name in open_checkpoint(named.path).names("optimizer")} - {"step"}
    if kinds != optimizer_states(recipe.optimizer.name):
        stored = " or ".join(name for name in OPTIMIZERS if optimizer_states(name) == kinds) or "another"
        raise RecipeError(
            f"model.optimizer = true, but optimizer.name = {recipe.optimizer.name} and that of {named} is {stored}",
            key="optimizer.name",
        )
    return str(Path(named.path).resolve() if isinstance(named.path, Path) else named.path)


def _check_tokens(recipe: Recipe, key: str, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """Raise RecipeError unless the model of this key has the policy's tokens and context."""
    other, ours = loaded.tokenizer, tokenizer.vocab_size
    theirs = other.vocab_size if other is not None else loaded.config.vocab_size
    pairs = [(i, other.token(i), tokenizer.token(i)) for i in range(min(theirs, ours))] if other is not None else []
    found = [f"token {i} is {a!r} there and {b!r} here" for i, a, b in pairs if a != b]
    found += [f"{theirs} there and {ours} here"] if theirs < ours else []
    if found:
        teaches = recipe.teaches and key in (each.key for each in recipe.teachers)
        hint = f", or {'its' if recipe.aligns else 'algorithm.options.'} align=characters" * teaches
        raise RecipeError(
            f"{key} = {loaded.run or loaded.source} has other tokens than the policy ({found[0]}); both need the same "
            f"tokenizer{hint}",
            key=f"{key}.tokenizer",
        )
    _check_context(recipe, loaded.config, f"{key} = {loaded.run or loaded.source}", key=f"{key}.context")


def followed_teachers(recipe: Recipe, prompts: PromptSet) -> np.ndarray | None:
    """Return the number of the teacher that each prompt of the source follows, int16 [source], -1 for one that is not
    trained on; None without ``reference.teachers``.

    Raises DataError for a record whose field names no teacher, RecipeError for a teacher that no prompt follows.
    """
    table, field = recipe.reference.teachers, recipe.reference.field
    if not table:
        return None
    train, _ = prompts.split(recipe.data.holdout)
    owner = {source: number for number, one in enumerate(table.values()) for source in one.sources}
    found = np.full(len(prompts.source), -1, np.int16)
    if field:
        found[train.rows] = [_by_field(prompt, field, owner) for prompt in train]
    else:
        for part, rows in zip(recipe.data.sources, train.parts):
            found[rows] = owner[part.name]
    for number in (number for number in range(len(table)) if not (found == number).any()):
        key = f"reference.teachers.{list(table)[number]}.sources"
        message = f"{key} = {list(list(table.values())[number].sources)}: no prompt to train on follows this teacher"
        raise RecipeError(f"{message}; leave it out", key=f"{key}.empty")
    return found


def _by_field(prompt: Prompt, field: str, owner: Mapping[str, int]) -> int:
    """Return the number of the teacher that a field of a prompt's record names; DataError if none has it."""
    try:
        value = str(value_of(prompt.info, "reference.field", field, prompt.name))
    except RecordError as error:
        raise DataError(str(error), key="reference.field") from None
    if value not in owner:
        message = f"{prompt.name}: {field} = {value!r}, and no teacher of reference.teachers has it in its sources"
        raise DataError(f"{message}, which are {', '.join(owner)}", key=f"reference.field.{value}")
    return owner[value]


def _check_teacher(recipe: Recipe, key: str, loaded: LoadedModel, prompts: PromptSet, tokenizer: Tokenizer) -> str:
    """Return a log line on the share of the prompts' tokens over which a teacher with other tokens can be compared.

    Raises RecipeError for a shorter context, or if nothing can be compared; DataError without a tokenizer, or for a
    prompt that has no tokens there.
    """
    named = f"{key} = {loaded.run or loaded.source}"
    _check_context(recipe, loaded.config, named, key=f"{key}.context")
    translator = Translator(tokenizer, wants_tokenizer(loaded), loaded.config.max_positions)
    template = data_template(recipe.data, tokenizer, starts=prompts.starts)
    tried = [prompt for rows in prompts.parts for prompt in PromptSet(prompts.source, rows).spread(_TRIED)]
    aligned = count = written = 0
    for ids in (np.array(ids, np.int64) for ids in template.prompts(tried)):
        written += len(translator.translate(ids, np.zeros(len(ids), np.uint8)).tokens)
        found = translator.translate(ids, (np.arange(len(ids)) > 0).astype(np.uint8))
        aligned, count = aligned + sum(chunk.end - chunk.start for chunk in found.chunks), count + len(ids) - 1
    if count and not aligned:
        raise RecipeError(
            f"{named} has a tokenizer that keeps the characters of none of {len(tried)} prompts, so nothing can be "
            "aligned; use a teacher whose tokenizer keeps texts as they are",
            key=f"{key}.tokenizer",
        )
    sizes = f"{len(tried)} prompts are {written} tokens there and {count + len(tried)} here"
    return f"align = characters: {sizes}, of which {aligned / max(1, count):.1%} can be aligned"


def _check_drafter(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer) -> DecoderConfig:
    """Return the shape of the drafting model. RecipeError unless it has the policy's vocabulary and context."""
    key, path = "rollout.draft.path", recipe.rollout.draft.path
    drafter = load_drafter(recipe, load_model)
    if drafter.config.vocab_size != config.vocab_size:
        theirs = f"a vocabulary of {drafter.config.vocab_size} tokens, and the policy one of {config.vocab_size}"
        raise RecipeError(f"{key} = {path} has {theirs}; both need the same", key=f"{key}.vocab_size")
    _check_tokens(recipe, key, drafter, tokenizer)
    return drafter.config


def _check_context(recipe: Recipe, config: DecoderConfig, model: str, *, key: str) -> None:
    """Raise RecipeError if a model has fewer positions than the recipe's context."""
    if recipe.model.context > config.max_positions:
        raise RecipeError(
            f"model.context = {recipe.model.context} is more than the {config.max_positions} positions of {model}",
            key=key,
        )


def rooted(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths of files that workers read from other working directories."""
    for key in ("model.path", *(key for spec in ROLES.values() for key in spec.loads)):
        name, _, last = key.rpartition(".")
        found = getattr(recipe.section(name), last)
        if isinstance(found, dict):
            each = {which: one.model_copy(update={"path": _rooted(one.path)}) for which, one in found.items()}
            recipe = recipe.replaced(name, **{last: each})
        elif found:
            recipe = recipe.replaced(name, **{last: _rooted(found)})
    if draft := recipe.rollout.draft.path:
        update = {"path": _rooted(draft)}
        recipe = recipe.replaced("rollout", draft=recipe.rollout.draft.model_copy(update=update))
    if recipe.model.adapter:
        recipe = recipe.replaced("model", adapter=str(Path(recipe.model.adapter).resolve()))
    template, mixture = _absolute(recipe.data.template), []
    for part in recipe.data.mixture:
        mixture.append(part.model_copy(update={"template": _absolute(part.template)}))
    return recipe.replaced("data", template=template, mixture=tuple(mixture))


def _rooted(path: str) -> str:
    """Return the reference of a model with the absolute path of its folder."""
    folder, which = split_spec(fetched(path))
    whole = folder if is_url(folder) else Path(folder).resolve()
    return f"{whole}@{which}" if which else str(whole)


def _absolute(template: str) -> str:
    """Return a template with the absolute path of its file, if it is one."""
    return str(Path(template).resolve()) if template and Path(template).is_file() else template


def divide_batch(batch: Batch, parts: int) -> list[np.ndarray]:
    """Deal rows of a batch to ``parts`` workers: balanced by tokens if lengths are known, groups kept together."""
    lengths, groups = batch.rows.get("length"), batch.rows.get("group")
    if lengths is None and groups is None:
        return np.array_split(np.arange(len(batch), dtype=np.int64), parts)
    return divide(lengths, groups, parts)


def _tokenizer(recipe: Recipe, material: Dataset, loaded: LoadedModel | None, earlier: Path | None) -> Tokenizer:
    if earlier is not None and loaded is None and recipe.data.tokenizer.startswith("bpe:"):
        return Tokenizer.load(earlier)  # trained once, when the run began
    if isinstance(material, PretrainTexts):
        return choose_tokenizer(recipe, None, loaded, material.train)
    return choose_tokenizer(recipe, material, loaded)


def _documents(recipe: Recipe, texts: PretrainTexts, tokenizer: Tokenizer) -> TrainingData:
    train, heldout, pieces = tokenised(recipe, texts, tokenizer)
    mine = mixed(recipe, pieces, train.lengths) if recipe.data.mixture else Order(np.arange(len(train)))
    theirs = Order(np.arange(0 if heldout is None else len(heldout)))
    given = {"train": train, "heldout": heldout}
    return TrainingData(mine, theirs, recipe.model.context, given, [f"documents: {train.note}", *texts.notes])


def tokenised(
    recipe: Recipe, texts: PretrainTexts, tokenizer: Tokenizer
) -> tuple[Corpus, Corpus | None, list[np.ndarray]]:
    """Return the pieces of documents to train on, those held out, and the indices of the former by source."""

    def cut(some: Sequence[str]) -> Corpus:
        folder = Path(recipe.run.dir) / CACHE
        return Corpus.build(some, tokenizer, recipe.model.context, folder, recipe.data.packing)

    borders = np.cumsum([0, *(texts.parts or [len(texts.train)])]).tolist()
    corpora = [cut(texts.train[a:b]) for a, b in pairwise(borders) if b > a]
    found = corpora[0] if len(corpora) == 1 else Corpus.joined(corpora)
    sizes = iter(map(len, corpora))
    ends = np.cumsum([next(sizes) if b > a else 0 for a, b in pairwise(borders)])
    return found, cut(texts.heldout) if texts.heldout else None, np.split(np.arange(len(found)), ends[:-1])


def mixed(
    recipe: Recipe, rows: Sequence[np.ndarray], lengths: np.ndarray | None, answered: np.ndarray | None = None
) -> Mixture:
    """Return the order of a recipe's mixture. rows, lengths: as of ``Mixture``; answered: lengths in a warm-up."""
    prompts = {stream(recipe.seed, "prompts"): recipe.rollout.prompts}
    others = {} if answered is None else {stream(recipe.seed, "examples"): answered}
    return Mixture(recipe.data.sources, rows, recipe.supervised.batch, prompts, lengths, others)


def mixture_draws(recipe: Recipe) -> dict[Stream, int]:
    """Return the samples that a run draws from each stream of its mixture; of prompts at least, as rounds may refill a
    batch. The recipe has supervised.steps instead of epochs."""
    kind = {"answers": "examples", "experience": "examples"}.get(recipe.flow_spec.learns, recipe.flow_spec.learns)
    draws = {stream(recipe.seed, kind): recipe.supervised.steps * recipe.supervised.batch}
    if recipe.flow_spec.samples:
        draws[stream(recipe.seed, "prompts")] = recipe.algorithm.steps * recipe.rollout.prompts
    return draws


def check_mixture(recipe: Recipe, train: Split) -> None:
    """Raise DataError for a source, or a schedule, that ends before the run does. recipe: as of ``mixture_draws``."""
    if isinstance(train, Mixture):
        for order, count in mixture_draws(recipe).items():
            train.check(order, count)


def _prompts(recipe: Recipe, prompts: PromptSet, tokenizer: Tokenizer, *, generates: bool) -> TrainingData:
    train, heldout = prompts.split(recipe.data.holdout)
    tools = listed_tools(recipe.rollout.environment)
    template = data_template(recipe.data, tokenizer, tools, prompts.starts)
    longest = max(check() for check in prompt_checks(recipe, prompts, template, generates=generates))
    order: Split = train
    if recipe.data.mixture:
        order = mixed(recipe, train.parts, *prompt_lengths(recipe, train, template, tokenizer, tools))
    notes = [*prompts.left_out(), *_short(recipe, len(train))]
    return TrainingData(order, heldout, longest, {"prompts": prompts, "tools": tools}, notes)


def _short(recipe: Recipe, examples: int) -> Iterator[str]:
    """Say where few examples make another run than the keys say."""
    w, warm = recipe.supervised, recipe.optimizer.warmup_steps
    steps = supervised_steps(w, examples)
    if steps and w.batch > examples:
        each = f"each step learns from every one {w.batch / examples:.1f} times; supervised.batch={examples} does once"
        yield f"supervised.batch = {w.batch} and {examples} examples: {each}"
    if 0 < steps < warm:
        why = f"the rate ends at {steps / warm:.0%} of its peak; set optimizer.warmup_steps=0"
        yield f"optimizer.warmup_steps = {warm} and supervised.steps = {steps}: {why}"


def prompt_lengths(
    recipe: Recipe, train: PromptSet, template: Template, tokenizer: Tokenizer, tools: Tools
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the tokens of each sample by index, which a schedule by tokens needs: as the flow draws it, and with its
    answer, for the warm-up of a flow that draws prompts. None where nothing needs them."""
    if not any(part.schedule and part.schedule_by == "tokens" for part in recipe.data.mixture):
        return None, None
    warm = recipe.flow_spec.samples and (recipe.supervised.steps or recipe.supervised.epochs)
    drawn = [False, True] if warm else [not recipe.flow_spec.samples]
    found = [all_lengths(recipe, train, template, tokenizer, tools, answers=answers) for answers in drawn]
    return found[0], found[1] if warm else None


def all_lengths(
    recipe: Recipe, train: PromptSet, template: Template, tokenizer: Tokenizer, tools: Tools, *, answers: bool
) -> np.ndarray:
    """Return the tokens of each sample by index, kept beside the token cache. tools: those that the template lists;
    answers: with them."""
    data = recipe.data
    names = [data.template, tokenizer.chat_template, *(part.template for part in data.mixture)]
    words = f"{train.fingerprint()} {tokenizer.fingerprint()} {names} {template_files(data)} {answers} {tools}".encode()
    digest = hashlib.blake2b(words + train.rows.tobytes(), digest_size=10).hexdigest()
    entry = CacheEntry(Path(recipe.run.dir) / CACHE / f"lengths-{digest}", "lengths.npy")
    return token_lengths(train, template, entry, answers=answers)


def prompt_checks(
    recipe: Recipe, prompts: PromptSet, template: Template, *, generates: bool
) -> Iterator[Callable[[], int]]:
    """Yield the checks that a run makes of all its prompts before it starts.

    Each returns the most tokens in front of a completion that it allows for, or raises DataError.
    """
    train, heldout = prompts.split(recipe.data.holdout)
    context, room = recipe.model.context, recipe.rollout.max_tokens
    others = recipe.reward.model or recipe.judge.path or recipe.aligns
    if has_media(prompts.source) and (others or recipe.rollout.environment or recipe.flow_spec.learns == "pairs"):
        message = "the data has media, which episodes, pairs, reward models, judges and align = characters leave out"
        raise DataError(f"{message}; use another flow or reward", key="data.media")
    if recipe.rollout.environment:
        yield lambda: _check_episodes(recipe, template)
    elif generates:
        yield lambda: check_prompts(prompts, template, context - room)
    if recipe.flow == "sft":  # held-out answers are evaluated too
        yield lambda: check_examples(prompts, template, context) - room
    elif recipe.flow_spec.learns == "pairs":
        yield lambda: check_pairs(prompts, template, context) - room
    elif recipe.supervised.steps or recipe.supervised.epochs:
        yield lambda: _check_warm_up(recipe, train, template)
    yield lambda: _check_holdout(recipe, len(prompts), len(heldout)) - room


def _check_warm_up(recipe: Recipe, train: PromptSet, template: Template) -> int:
    """Check given answers, which may be longer than completions: that the policy's ranks hold them."""
    longest = check_examples(train, template, recipe.model.context)
    check_units(recipe, [place(recipe, generates=False)["policy"].mesh], longest)
    return 0


def _check_episodes(recipe: Recipe, template: Template) -> int:
    """Raise TemplateError for tools that the template does not list. An episode may be as long as the context."""
    if load_environment(recipe.rollout.environment).lists_tools():
        template.check_tools()
    return recipe.model.context - recipe.rollout.max_tokens


def _check_holdout(recipe: Recipe, count: int, heldout: int) -> int:
    if recipe.data.holdout and not recipe.data.heldout and not heldout:
        raise DataError(
            f"data.holdout={recipe.data.holdout} of {count} prompts leaves none to evaluate on; "
            f"set a larger data.holdout, data.heldout=FILE, or data.holdout=0 for no evaluation",
            key="data.holdout",
        )
    return 0


def model_config(recipe: Recipe, loaded: LoadedModel | None, tokenizer: Tokenizer) -> DecoderConfig:
    """Return the shape of a new model, or of the loaded one with the recipe's dropout."""
    if loaded is None:
        return new_config(recipe.model, tokenizer.vocab_size)
    _check_context(recipe, loaded.config, f"model.path = {recipe.model.path}", key="model.context")
    return replace(loaded.config, dropout=recipe.model.dropout)


# ---- the memory of this machine, compared with the plan ----

Planner = Callable[[Recipe], RunPlan]


def check_fits(recipe: Recipe, planned: Planner, host: Room | None, gpus: Sequence[Room] = ()) -> list[str]:
    """Return warnings for a run that may not fit, with keys that would help.

    RecipeError if weights, gradients and optimizer states alone need more memory than there is.
    """
    plan = planned(recipe)

    def workers(other: Recipe) -> Sequence[RankPlan]:
        return (plan if other is recipe else planned(other)).workers

    refused, warnings = judged(recipe, plan.longest, workers, host, gpus)
    if refused:
        raise RecipeError(refused, key="memory")
    return warnings


def judged(
    recipe: Recipe,
    longest: int,
    workers: Callable[[Recipe], Sequence[RankPlan]],
    host: Room | None,
    gpus: Sequence[Room],
) -> tuple[str, list[str]]:
    """Return why a recipe cannot run here, or "", and warnings; workers: predicts the ranks of a recipe."""

    def uses(other: Recipe) -> list[MemoryUse]:
        return places(other, workers(other), host, gpus)

    return verdict(uses(recipe), lambda place: remedies(recipe, longest, place, uses))


def rooms(recipe: Recipe) -> tuple[Room | None, list[Room]]:
    """Return the memory of this machine, None if the workers are on others, and of each worker's GPU.

    Memory of this process and its children counts as free, since the plan includes it.
    """
    host = host_memory()
    return None if on_many_machines(recipe) else host._replace(free=min(host.total, host.free + _ours())), _gpus(recipe)


def _ours() -> int:
    """Return the private memory of this process and its children in bytes."""
    me, found = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            info = process.memory_info()
            found += info.rss - getattr(info, "shared", 0)
    return found


def _gpus(recipe: Recipe) -> list[Room]:
    """Return free memory of the GPU of an inline run, else total memory of all GPUs, which opens no CUDA context."""
    if not recipe.train.device.startswith("cuda") or not torch.cuda.is_available():
        return []
    chosen = torch.device(recipe.train.device).index
    if recipe.cluster.backend == "inline":
        free, total = torch.cuda.mem_get_info(chosen or 0)
        return [Room(total, free, f"GPU {chosen or 0}")]
    every = range(torch.cuda.device_count()) if chosen is None else [chosen]
    sizes = [(i, torch.cuda.get_device_properties(i).total_memory) for i in every]
    return [Room(size, size, f"GPU {i}") for i, size in sizes]
