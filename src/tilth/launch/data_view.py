"""Data of a recipe as a model sees it: tokens, loss mask, lengths, packing, and what would stop the run."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np

from tilth.config.schema import Recipe
from tilth.core.errors import DataError, RecipeError, TilthError
from tilth.core.random import stream
from tilth.data.examples import Encoded, encode_pairs, pairs_of
from tilth.data.mixture import Mixture, MixtureRow
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import Prompt, PromptSet, with_holdout
from tilth.data.template import Example, Template, data_template
from tilth.data.tokenizer import NO_TEXT, Tokenizer
from tilth.envs.process import listed_tools
from tilth.launch.build import (
    PretrainTexts,
    all_lengths,
    check_mixture,
    check_units,
    mixed,
    mixture_draws,
    model_config,
    prompt_checks,
    prompt_lengths,
    tokenised,
)
from tilth.launch.data_balance import BalanceReport, balance_report
from tilth.launch.rewards import chosen_reward, generating
from tilth.models.config import DecoderConfig
from tilth.plan.layout import place
from tilth.plan.packing import micro_batches
from tilth.plan.steps import longest_sequence, supervised_steps
from tilth.rewards.functions import check_answers
from tilth.runs.models import choose_tokenizer, load_model

MOST = 20_000  # most records that are tokenised, spread evenly over a larger source
CHUNK = 256
STEPS = 20  # steps that packing is tried on
Shape = Callable[[], DecoderConfig]


@dataclass(frozen=True)
class Lengths:
    """Distribution of numbers of tokens."""

    rows: int
    least: int
    median: float
    p95: float
    most: int

    @classmethod
    def of(cls, lengths: np.ndarray) -> "Lengths":
        """Summarise lengths: integers [n], n > 0."""
        median, p95 = np.percentile(lengths, [50, 95]).tolist()
        return cls(len(lengths), int(lengths.min()), median, p95, int(lengths.max()))


@dataclass(frozen=True)
class MixtureShare:
    """One source of a mixture. samples: to train on; weight: its share where the run begins; drawn: samples of it in
    the whole run, None if the run would be stopped before its end."""

    source: str
    samples: int
    weight: float
    drawn: int | None


@dataclass(frozen=True)
class PackingReport:
    """Batches of some steps, packed. rows: mean of a step; fill: tokens over room, of a longer row its length; padding:
    its share if rows were padded instead."""

    rows: int
    micro_batches: float
    room: int
    fill: float
    padding: float


@dataclass
class ShownExample:
    """One example. texts: of each token; mask: 1 where the loss is taken, all 0 for a prompt without an answer."""

    index: int
    tokens: list[int]
    texts: list[str]
    mask: list[int]


@dataclass
class View:
    """Findings of ``tilth data show``.

    seen: records (pretrain: pieces) that the figures describe. longer: number of each kind that exceeds its room.
    stable: verdict on the template. packing, balance: of the first supervised steps of a mixture, else of steps in a
    random order. mixture: its sources. problems: would stop the run.
    """

    flow: str
    source: str
    train: int
    heldout: int
    tokenizer: str
    vocabulary: int
    template: str
    stops: list[str]
    context: int
    seen: int
    mixture: list[MixtureShare] = field(default_factory=list)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    longer: dict[str, int] = field(default_factory=dict)
    loss_share: float | None = None
    stable: str = ""
    packing: PackingReport | None = None
    balance: BalanceReport | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    examples: list[ShownExample] = field(default_factory=list)


def look(recipe: Recipe, n: int) -> View:
    """Read, tokenise and count by the functions of a run. TilthError: something cannot be read at all."""
    return _documents(recipe, n) if recipe.flow == "pretrain" else _prompts(recipe, n)


def tokenise(recipe: Recipe) -> tuple[list[MixtureRow], list[str]]:
    """Build what a run of the recipe reads from the cache: records, tokens of documents, lengths of samples.

    Return the table of the mixture, and a line on each source and cache. Raises ``TilthError``.
    """
    prompts = recipe_prompts(recipe)
    loaded = load_model(recipe.model.path) if recipe.model.path else None
    if recipe.flow_spec.learns == "documents":
        texts = PretrainTexts.of(prompts, recipe.data.holdout)
        train, held, pieces = tokenised(recipe, texts, choose_tokenizer(recipe, None, loaded, texts.train))
        notes = [*texts.notes, *(corpus.note for corpus in (train, held) if corpus is not None)]
        return mixed(recipe, pieces, train.lengths).table(), notes
    recipe = with_holdout(recipe, prompts)
    chosen, tokenizer = prompts.split(recipe.data.holdout)[0], choose_tokenizer(recipe, prompts, loaded)
    tools = listed_tools(recipe.rollout.environment)
    template = data_template(recipe.data, tokenizer, tools, prompts.starts)
    prompt_lengths(recipe, chosen, template, tokenizer, tools)
    lengths = all_lengths(recipe, chosen, template, tokenizer, tools, answers=not recipe.flow_spec.samples)
    return mixed(recipe, chosen.parts, lengths).table(), [*prompts.left_out()]


# ---- prompts and conversations ----


def _prompts(recipe: Recipe, n: int) -> View:
    prompts = recipe_prompts(recipe)
    recipe = with_holdout(recipe, prompts)
    train, heldout = prompts.split(recipe.data.holdout)
    loaded = load_model(recipe.model.path) if recipe.model.path else None
    tokenizer = choose_tokenizer(recipe, prompts, loaded)
    template = data_template(recipe.data, tokenizer, listed_tools(recipe.rollout.environment), prompts.starts)
    some = train.spread(MOST)
    view = _view(recipe, tokenizer, len(train), len(heldout), len(some))
    view.template, view.notes = template.name, [*view.notes, *recipe.told, *prompts.left_out()]
    view.stops = [tokenizer.token(i) for i in template.stops]
    if not recipe.data.template:  # a chat template writes every token itself
        view.notes += _left_out(tokenizer)
    asked = np.array([len(ids) for chunk in _chunks(some) for ids in template.prompts(chunk)])
    first = np.zeros(0, np.int64)
    if recipe.data.mixture:
        tools = listed_tools(recipe.rollout.environment)
        order = mixed(recipe, train.parts, *prompt_lengths(recipe, train, template, tokenizer, tools))
        first = _mixture(recipe, view, order)
    generates = generating(recipe)
    turns = bool(recipe.rollout.environment)  # a turn gets what room there is
    room = recipe.model.context - (1 if turns else recipe.rollout.max_tokens) * generates
    view.lengths["prompt"] = Lengths.of(asked)
    view.longer["prompt"] = int((asked > room).sum())
    if view.longer["prompt"] and generates:
        view.problems.append(
            f"{view.longer['prompt']:,} prompts are longer than the {room} tokens that model.context leaves for them"
        )
    pairs, shape = recipe.flow_spec.learns == "pairs", partial(model_config, recipe, loaded, tokenizer)
    if pairs:
        _compared(recipe, view, template, prompts, [p.index for p in some], first, shape)
    else:
        _learnt(recipe, view, template, some, [prompts[i] for i in first], shape)
    view.problems += [text for text in _refused(recipe, prompts, template) if text not in view.problems]
    chosen = train.spread(n)
    if pairs:
        view.examples = [shown for p in chosen for shown in _both(prompts, p.index, template, tokenizer)]
    else:
        view.examples = [_shown(p, template, tokenizer) for p in chosen]
    return view


def _refused(recipe: Recipe, prompts: PromptSet, template: Template) -> Iterator[str]:
    """Yield the complaint of each check that a run makes of all its prompts."""
    counts, longest = [*prompt_checks(recipe, prompts, template, generates=generating(recipe))], list[int]()

    def ranks() -> None:
        if len(longest) == len(counts):
            _check_ranks(recipe, max(longest))

    checks: list[Callable[[], object]] = [*(partial(_append, longest, count) for count in counts), ranks]
    checks.append(lambda: chosen_reward(recipe))
    if reward := recipe.reward.function:
        checks.append(lambda: check_answers(reward, prompts))
    yield from _complaints(checks)


def _append(longest: list[int], count: Callable[[], int]) -> None:
    longest.append(count())


def _complaints(checks: Iterable[Callable[[], object]]) -> Iterator[str]:
    for check in checks:
        try:
            check()
        except TilthError as error:
            yield str(error)


def _check_ranks(recipe: Recipe, longest_prompt: int) -> None:
    """Raise PlanError if the ranks of a unit do not hold the longest sequence. longest_prompt: as of ``plan_run``."""
    meshes = (placed.mesh for placed in place(recipe, generates=generating(recipe)).values())
    check_units(recipe, meshes, longest_sequence(recipe, longest_prompt))


def _mixture(recipe: Recipe, view: View, order: Mixture) -> np.ndarray:
    """Add the sources of a mixture, and what they draw; return the indices of its first supervised steps."""
    recipe = recipe.replaced("supervised", steps=supervised_steps(recipe.supervised, len(order)))
    draws, batch = mixture_draws(recipe), recipe.supervised.batch
    first, counts = np.zeros(0, np.int64), [None] * len(recipe.data.mixture)
    try:
        check_mixture(recipe, order)
        counts = np.sum([order.drawn(one, count) for one, count in draws.items()], axis=0).tolist()
        supervised = next(iter(draws))
        first = order.take(supervised, 0, min(draws[supervised], STEPS * batch))
    except DataError as error:
        view.problems.append(str(error))
    view.mixture = [MixtureShare(row.source, row.samples, row.weight, n) for row, n in zip(order.table(), counts)]
    return first


def _learnt(
    recipe: Recipe,
    view: View,
    template: Template,
    prompts: Sequence[Prompt],
    first: Sequence[Prompt],
    shape: Shape,
) -> None:
    """Add the findings on prompts with answers, which supervised steps learn from. first: those of a mixture's first
    steps."""
    answered = [p for p in prompts if p.answer is not None]
    supervised = recipe.flow == "sft" or bool(recipe.supervised.steps or recipe.supervised.epochs)
    if supervised and len(answered) < len(prompts):
        view.problems.append(f"{len(prompts) - len(answered):,} prompts have no answer, which supervised steps need")
    examples, failed = _examples(template, answered)
    if failed and supervised:
        view.problems.append(f"{len(failed):,} examples cannot be made")
    view.stable = failed[0] if failed else f"prefix-stable on {len(examples):,} examples" if examples else "not tried"
    if view.template == "plain":  # which is as stable as the tokenizer
        view.stable = ""
    if not examples:
        return
    whole, learnt = np.array([(len(e.tokens), int(e.mask.sum())) for e in examples]).T
    view.lengths |= {"loss": Lengths.of(learnt), "example": Lengths.of(whole)}
    view.longer["example"] = int((whole > recipe.model.context).sum())
    if view.longer["example"] and supervised:
        view.problems.append(
            f"{view.longer['example']:,} examples are longer than the context of {recipe.model.context} tokens"
        )
    answers, room = _last(examples), recipe.rollout.max_tokens
    if generating(recipe) and answers.max() > room:
        over = int((answers > room).sum())
        view.notes.append(
            f"{over:,} given answers are longer than rollout.max_tokens = {room} (most: {answers.max():,})"
        )
    view.loss_share = float(learnt.sum() / whole.sum())
    if supervised:
        own, _ = _examples(template, [p for p in first if p.answer is not None])
        known = bool(own) and len(own) == len(first)
        drawn = np.array([len(e.tokens) for e in own]) if known else whole
        _pack(recipe, view, _steps(recipe, drawn[:, None], shuffled=not known), shape)


def _compared(
    recipe: Recipe,
    view: View,
    template: Template,
    prompts: PromptSet,
    indices: list[int],
    first: np.ndarray,
    shape: Shape,
) -> None:
    """Add the findings on both answers of each pair. first: as of ``_learnt``."""
    found, order = list[Encoded](), list[int]()
    for start in range(0, len(indices), CHUNK):
        chunk = indices[start : start + CHUNK]
        try:
            found += encode_pairs(prompts, chunk, template, sys.maxsize)
            order += chunk
        except DataError as error:
            view.problems.append(str(error))
    if not found:
        return
    drawn, known = found, bool(len(first)) and not view.problems
    if known:
        drawn, order = encode_pairs(prompts, first, template, sys.maxsize), first.tolist()
    rest = iter(drawn)
    each = (islice(rest, len(pairs_of(prompts, i))) for i in order)  # neighbours may be draws of one prompt
    samples = [[len(side.tokens) for one in own for side in (one.chosen, one.rejected)] for own in each]
    sides = [e for one in found for e in (one.chosen, one.rejected)]
    whole, learnt = np.array([(len(e.tokens), int(e.mask.sum())) for e in sides]).T
    chosen, rejected = Lengths.of(learnt[::2]), Lengths.of(learnt[1::2])
    view.lengths |= {"chosen": chosen, "rejected": rejected, "example": Lengths.of(whole)}
    view.longer["example"] = int((whole > recipe.model.context).sum())
    view.loss_share = float(learnt.sum() / whole.sum())
    _pack(recipe, view, _steps(recipe, samples, shuffled=not known), shape)
    view.notes.append(f"{len(found):,} pairs of {len(indices):,} prompts; of each pair the chosen answer comes first")


def _both(prompts: PromptSet, index: int, template: Template, tokenizer: Tokenizer) -> list[ShownExample]:
    """Show both answers of a prompt's first pair."""
    first = encode_pairs(prompts, [index], template, sys.maxsize)[0]
    sides = (first.chosen, first.rejected)
    return [_spelled(index, e.tokens.tolist(), e.mask.tolist(), tokenizer) for e in sides]


def _examples(template: Template, prompts: Sequence[Prompt]) -> tuple[list[Example], list[str]]:
    """Return the examples, and the errors of those that cannot be made."""
    found: list[Example] = []
    failed: list[str] = []
    for chunk in _chunks(prompts):
        try:
            found += template.examples(chunk)
        except DataError:
            for prompt in chunk:
                try:
                    found += template.examples([prompt])
                except DataError as error:
                    failed.append(str(error))
    return found, failed


def _last(examples: Sequence[Example]) -> np.ndarray:
    """Return the number of tokens of each last turn, which the model has to write: int [n]."""
    return np.array([int(np.argmin(e.mask[::-1])) if not e.mask.all() else len(e.mask) for e in examples])


def _shown(prompt: Prompt, template: Template, tokenizer: Tokenizer) -> ShownExample:
    made = _examples(template, [prompt])[0] if prompt.answer is not None else []
    ids = made[0].tokens.tolist() if made else template.prompts([prompt])[0]
    return _spelled(prompt.index, ids, made[0].mask.tolist() if made else [0] * len(ids), tokenizer)


# ---- documents ----


def _documents(recipe: Recipe, n: int) -> View:
    texts = PretrainTexts.of(recipe_prompts(recipe), recipe.data.holdout)
    loaded = load_model(recipe.model.path) if recipe.model.path else None
    tokenizer = choose_tokenizer(recipe, None, loaded, texts.train)
    corpus, _, by_source = tokenised(recipe, texts, tokenizer)
    view = _view(recipe, tokenizer, len(texts.train), len(texts.heldout), len(corpus))
    view.problems += _complaints([lambda: _check_ranks(recipe, 0)])
    view.notes += texts.notes
    view.stops = [tokenizer.token(tokenizer.eos_id)]
    view.lengths["piece"] = Lengths.of(corpus.lengths)
    view.loss_share = 1 - len(corpus) / corpus.tokens_in_all
    first = _mixture(recipe, view, mixed(recipe, by_source, corpus.lengths)) if recipe.data.mixture else np.zeros(0)
    drawn = corpus.lengths[first] if len(first) else corpus.lengths
    shape = partial(model_config, recipe, loaded, tokenizer)
    _pack(recipe, view, _steps(recipe, drawn[:, None], shuffled=not len(first)), shape)
    full = float((corpus.lengths == recipe.model.context).mean())
    view.notes += [
        f"{len(corpus):,} pieces, {full:.0%} of them as long as the context",
        f"{corpus.bytes / corpus.tokens_in_all:.2f} bytes a token",
        corpus.note,
        *_left_out(tokenizer),
    ]
    chosen = np.linspace(0, len(corpus) - 1, min(n, len(corpus))).astype(int)
    pieces = corpus.tokens(chosen)
    for i, index in enumerate(chosen.tolist()):
        ids = pieces.row(i).tolist()
        view.examples.append(_spelled(index, ids, [0, *[1] * (len(ids) - 1)], tokenizer))
    return view


# ---- shared ----


def _view(recipe: Recipe, tokenizer: Tokenizer, train: int, heldout: int, seen: int) -> View:
    named = recipe.data.tokenizer or (f"that of {recipe.model.path}" if recipe.model.path else "characters")
    source = ", ".join(part.source for part in recipe.data.sources)
    return View(
        flow=recipe.flow, source=source, train=train, heldout=heldout, tokenizer=named,
        vocabulary=tokenizer.vocab_size, template="none", stops=[], context=recipe.model.context, seen=seen,
    )  # fmt: skip


def _left_out(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a note on the token that the tokenizer would append, if any."""
    if tokenizer.appended:
        ends = " ".join(map(tokenizer.token, tokenizer.appended))
        yield (
            f"the tokenizer puts {ends} behind every text; it is left out: a prompt has no end, and an example or a "
            f"document ends once, by {tokenizer.token(tokenizer.eos_id)}"
        )


def _chunks(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    return (prompts[at : at + CHUNK] for at in range(0, len(prompts), CHUNK))


def _steps(recipe: Recipe, samples: np.ndarray | list[list[int]], *, shuffled: bool) -> list[np.ndarray]:
    """Return the lengths of the rows of some steps, int64 [rows] each. samples: lengths of the rows of each sample, as
    they are drawn, unless they are to be shuffled."""
    batch, order = min(recipe.supervised.batch, len(samples)), np.arange(len(samples))
    if shuffled:
        order = np.asarray(stream(recipe.seed, "data show").permutation(len(samples)))
    ends = range(batch, min(len(order), batch * STEPS) + 1, batch)
    return [np.concatenate([samples[i] for i in order[end - batch : end]]) for end in ends]


def _pack(recipe: Recipe, view: View, steps: Sequence[np.ndarray], shape: Shape) -> None:
    """Pack the batches of some steps with the trainer's function, and predict what they cost."""
    if recipe.data.packing == "none":
        return
    room = recipe.train.micro_tokens
    sizes = [int(step[rows].sum()) for step in steps for rows in micro_batches(step, room)]
    made, tokens, rooms = len(sizes), sum(sizes), sum(max(size, room) for size in sizes)
    padded = sum(len(step) * int(step.max()) for step in steps)
    rows = round(sum(map(len, steps)) / len(steps))
    view.packing = PackingReport(rows, made / len(steps), room, tokens / rooms, 1 - tokens / padded)
    try:
        view.balance = balance_report(recipe, shape(), steps)
    except RecipeError as error:  # a device without published rates; or what stops the run for another reason
        view.notes.append(f"no balance is predicted: {error}")


def _spelled(index: int, ids: list[int], mask: list[int], tokenizer: Tokenizer) -> ShownExample:
    texts = [tokenizer.decode([i], special=True) for i in ids]
    whole = [text if NO_TEXT not in text else tokenizer.token(i) for text, i in zip(texts, ids)]  # part of a character
    return ShownExample(index, ids, whole, mask)
