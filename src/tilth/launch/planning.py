"""Shape and sequences of a recipe before anything starts, and its pools and layouts by the mapping search."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tilth.config.schema import Recipe
from tilth.core.errors import RecipeError
from tilth.core.memory import host_memory
from tilth.data.documents import piece_lengths
from tilth.data.examples import check_examples, encode_pairs
from tilth.data.pairs import check_pairs, recipe_prompts
from tilth.data.prompts import PromptSet
from tilth.data.records import wholes_of
from tilth.data.template import data_template
from tilth.data.tokenizer import Tokenizer
from tilth.launch.build import Dataset, PretrainTexts
from tilth.launch.rewards import generating
from tilth.models.config import DecoderConfig
from tilth.models.family import new_config
from tilth.models.hf import read_config
from tilth.models.hub import fetched
from tilth.plan.costs import load_costs
from tilth.plan.devices import DEVICES, DeviceType, device_type
from tilth.plan.memory import DRAFTER
from tilth.plan.search import SearchInput, SearchResult, find_mapping
from tilth.plan.shape import DecoderShape
from tilth.plan.working import with_device
from tilth.runs.models import LoadedModel, choose_tokenizer, load_drafter, load_model, models_of_roles
from tilth.training.rate import measured_flops, memory_bandwidth

MOST = 20_000  # most prompts that are tokenised to find the longest, spread evenly over a larger source
SAMPLED = 2048
"""Most documents, or prompts, whose lengths the search knows."""
_PATIENCE = timedelta(minutes=1)
HERE = "here"
"""Device type of this machine, measured."""


def described(recipe: Recipe, given: Dataset | None = None) -> tuple[DecoderShape, int, str]:
    """Return shape, longest sequence, and where the vocabulary comes from. A loaded model has its own.

    given: the data, if the recipe does not name them.
    """
    loaded = described_model(recipe.model.path) if recipe.model.path else None
    name, context = recipe.data.tokenizer, recipe.model.context
    if loaded is None and name.startswith("bpe:") and name[4:].isdecimal():
        return new_config(recipe.model, int(name[4:])), context, f"{name}, at most: it is trained when the run begins"
    if recipe.flow == "pretrain":
        if loaded is not None:
            return loaded.config, context, str(loaded.source)
        named = given if isinstance(given, PretrainTexts) else None
        texts = named or PretrainTexts.of(recipe_prompts(recipe), recipe.data.holdout)
        tokenizer = choose_tokenizer(recipe, None, None, texts.train)
        return new_config(recipe.model, tokenizer.vocab_size), context, name or "characters of the data"
    prompts = given if isinstance(given, PromptSet) else recipe_prompts(recipe)
    tokenizer = choose_tokenizer(recipe, prompts, loaded)
    longest = context  # given answers may have any length
    if recipe.flow_spec.samples and not recipe.rollout.environment:  # an episode may be as long as the context
        template, some = data_template(recipe.data, tokenizer, (), prompts.starts), prompts.subset(MOST)
        lengths = (len(ids) for ids in template.prompts([some[i] for i in range(len(some))]))
        longest = min(context, max(lengths, default=0) + recipe.rollout.max_tokens)
    if loaded is not None:
        return loaded.config, longest, str(loaded.source)
    return new_config(recipe.model, tokenizer.vocab_size), longest, name or "characters of the data"


def described_model(spec: str, group: str = "") -> LoadedModel:
    """Load a model by path; of a Hugging Face directory only config.json and tokenizer."""
    folder = Path(fetched(spec, weights=False))
    if not (folder / "config.json").is_file():
        return load_model(spec, group)
    tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
    return LoadedModel(DecoderConfig.from_hf(read_config(folder)), {}, tokenizer, folder)


def described_models(recipe: Recipe) -> dict[str, DecoderConfig]:
    """Return key of a path -> shape of its model, for roles that load some; and that of the drafting model."""
    found = {key: one.config for key, one in models_of_roles(recipe, described_model).items()}
    return found | {DRAFTER: load_drafter(recipe, described_model).config} if recipe.rollout.draft.path else found


# ---- the mapping search ----


def searched(
    recipe: Recipe, kind: DeviceType, devices: int, given: Dataset | None = None, *, whole: bool = False
) -> SearchResult:
    """Search pools and layouts for a recipe on devices of one type. RecipeError if nothing fits.

    given: the data, if the recipe does not name them. whole: no device may be left over.
    """
    shape, longest, _ = described(recipe, given)
    loaded: dict[str, DecoderShape] = dict(described_models(recipe))
    costs = load_costs(recipe.cluster.costs) if recipe.cluster.costs else None
    how: dict[str, Any] = {"costs": costs, "lengths": sequence_lengths(recipe, given)}
    return find_mapping(SearchInput(recipe, shape, longest, kind, devices, generating(recipe), loaded, whole, **how))


def sequence_lengths(recipe: Recipe, given: Dataset | None = None) -> np.ndarray | None:
    """Return the tokens of some of the sequences that a flow learns from, int64 [n], in the order of their data, the
    longest text among them; None if there are none.

    Where a rank does not hold one of given answers or pairs, the longest sequence of all, which the run's own check
    finds before it starts, comes last if it is longer. What a policy samples is taken at its longest, an episode as
    long as the context. A tokenizer that the run trains is trained on these texts alone here. Raises ``DataError`` for
    a prompt that makes no sequence.
    """
    loaded = described_model(recipe.model.path) if recipe.model.path else None
    trained, context = recipe.data.tokenizer.startswith("bpe:"), recipe.model.context
    if recipe.flow_spec.learns == "documents":
        named = given if isinstance(given, PretrainTexts) else None
        texts = (named or PretrainTexts.of(recipe_prompts(recipe), recipe.data.holdout)).train
        documents = [texts[i] for i in _places(len(texts)).tolist()]
        tokenizer = choose_tokenizer(recipe, None, loaded, documents if trained else texts)
        found = piece_lengths(documents, tokenizer, context, recipe.data.packing)
        return found if len(found) else None
    prompts = given if isinstance(given, PromptSet) else recipe_prompts(recipe)
    longest = np.argsort(wholes_of(prompts.source)[prompts.rows], kind="stable")[-1:]
    some = PromptSet(prompts.source, prompts.rows[np.union1d(_places(len(prompts)), longest)])
    tokenizer = choose_tokenizer(recipe, some if trained else prompts, loaded)
    template = data_template(recipe.data, tokenizer, (), prompts.starts)
    if recipe.flow_spec.learns == "pairs":
        sides = [side for pair in encode_pairs(some, some.rows, template, context) for side in pair[2:]]
        lengths, check = [len(side.tokens) for side in sides], check_pairs
    elif recipe.flow_spec.learns == "answers":
        answered = [p for p in some if p.answer is not None]
        lengths, check = [len(e.tokens) for e in template.examples(answered)] if answered else [], check_examples
    elif recipe.rollout.environment:
        return np.full(len(some), context)
    else:
        asked = np.array([len(ids) for ids in template.prompts(list(some))], np.int64)
        sampled = np.repeat(np.minimum(asked + recipe.rollout.max_tokens, context), recipe.rollout.group)
        warm = bool(recipe.supervised.steps or recipe.supervised.epochs)
        answers = [p for p in some if warm and p.answer is not None]
        most = max((len(e.tokens) for e in template.examples(answers)), default=0)
        if most > recipe.train.micro_tokens:  # all ranks may be too few for one, and the run refuses that
            most = check_examples(prompts.split(recipe.data.holdout)[0], template, context)
        return np.append(sampled, most) if most > max(recipe.train.micro_tokens, sampled.max()) else sampled
    most = max(lengths, default=0)
    if len(some) < len(prompts) and most > recipe.train.micro_tokens:
        exact = check(prompts, template, context)  # all ranks may be too few for it, and the run refuses that
        lengths += [exact] * (exact > most)
    return np.array(lengths, np.int64) if lengths else None


def _places(count: int) -> np.ndarray:
    """Return places of at most ``SAMPLED`` of ``count`` items, at equal distances, ascending: int64."""
    return np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int64)


def with_found_layouts(recipe: Recipe, given: Dataset | None = None) -> tuple[Recipe, str]:
    """Return the recipe of a run with pools and layouts for all of its workers, and a line on what was found.

    Published constants decide, so that the same command finds the same again and continues its run.
    """
    n = recipe.cluster.workers
    found = searched(recipe, published(with_device(recipe), n), n, given, whole=True)
    return found.recipe, f"cluster.search: {summary(found)}"


def summary(found: SearchResult) -> str:
    """Describe the mapping that was found in one line."""
    pools = sorted(found.best.pools, key=lambda pool: -pool.devices)
    text = "; ".join(f"{' + '.join(pool.roles)} on {pool.devices}" for pool in pools)
    return f"{text}: {found.best.total:.3g} s a step predicted for type {found.given.device.name}"


def published(recipe: Recipe, devices: int) -> DeviceType:
    """Return the type of this machine's devices by name, with their memory. RecipeError if it is unknown."""
    if not recipe.train.device.startswith("cuda"):
        return replace(DEVICES["cpu"], memory=host_memory().total // devices)
    if not torch.cuda.is_available():
        raise RecipeError("cluster.search: this machine has no GPU to search layouts for", key="cluster.search.device")
    title = torch.cuda.get_device_name(0)
    known = [kind for kind in DEVICES.values() if kind.gpu and kind.name.split("-")[0] in title.lower()]
    total = torch.cuda.get_device_properties(0).total_memory
    if not known:
        message = f"cluster.search: {title!r} is none of {', '.join(DEVICES)}; set pools and layouts instead"
        raise RecipeError(message, key="cluster.search.device")
    nearest = min(known, key=lambda kind: abs(math.log(kind.memory / total)))
    return replace(nearest, memory=total)


def chosen_device(name: str, recipe: Recipe, devices: int) -> DeviceType:
    """Return a device type by name or file; "here": that of this machine, its rates measured by a short profile.

    Measured are matrix products and copies, and on a CPU sums of gloo over two ranks; links of GPUs are published.
    """
    if name != HERE:
        return device_type(name)
    recipe = with_device(recipe)
    device = torch.device("cuda" if recipe.train.device.startswith("cuda") else "cpu")
    base = published(recipe, devices)
    peak = measured_flops(device, torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32)
    kinds = dict.fromkeys(base.flops, peak)
    rate = memory_bandwidth(device)
    measured, links = "matrix products and copies", dict[str, Any]()
    if not base.gpu:
        measured = "matrix products, copies and gloo"
        hop, moved = _gloo_seconds(1, 20), _gloo_seconds(_MOVED, 4)
        speed = _MOVED * 4 / max(moved - hop, 1e-9) / base.links  # of two ranks each sends as much as the sum has
        links = {"hop": hop, "far": hop, "intra": speed, "inter": speed}
    source = f"{measured} measured on this machine{'' if links else '; links published'}"
    return replace(base, name=HERE, flops=kinds, memory_bandwidth=rate, source=source, **links)


_MOVED = 1 << 21


def _gloo_seconds(elements: int, repeats: int) -> float:
    """Measure the sum of fp32 elements over two ranks of gloo, which are threads: the best of a few."""
    store = dist.HashStore()

    def rank(i: int) -> float:
        group: Any = dist.ProcessGroupGloo(store, i, 2, _PATIENCE)  # types of torch lack its methods
        numbers, seconds = torch.ones(elements), list[float]()
        for _ in range(repeats):
            started = time.perf_counter()
            group.allreduce([numbers]).wait()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(rank, (0, 1)))
