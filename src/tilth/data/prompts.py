"""The prompts and documents that a recipe names, as one set."""

from collections.abc import Sequence
from typing import overload

import numpy as np

from tilth.config.schema import DataConfig, Recipe
from tilth.data.columns import Prompt
from tilth.data.origin import NOTHING, Home, Key, RecordsByValue, apart, origins
from tilth.data.records import Joined, PromptSet, Records, first_of_equals, parts_of
from tilth.data.sources import Read, read_prompts

__all__ = ["Key", "Prompt", "PromptSet", "RecordsByValue", "load_source"]


def with_holdout(recipe: Recipe, prompts: PromptSet) -> Recipe:
    """Return the recipe with a share that holds prompts out, where its own holds none out and nobody has set it."""
    data, tried = recipe.data, [step / 10 for step in range(1, 10)]
    if apart(data, {}) or isinstance(prompts.source, Joined) or not data.holdout or "holdout" in data.model_fields_set:
        return recipe
    hashes = prompts.source.hashes[prompts.rows]
    counts = {share: int((hashes < np.uint64(round(share * 2**32))).sum()) for share in (data.holdout, *tried)}
    share = next((share for share, count in counts.items() if 0 < count < len(prompts)), data.holdout)
    if share == data.holdout:
        return recipe
    line = f"data.holdout = {share}, not {data.holdout}, which holds out none of {len(prompts)} prompts"
    return recipe.replaced("data", holdout=share).telling(line)


def load_source(
    data: DataConfig, brought: RecordsByValue = NOTHING, read: Read = read_prompts, home: Home | None = None
) -> PromptSet:
    """Load the sources of a recipe's ``[data]``, followed by that of ``data.heldout``. Raises ``DataError``.

    read: reads one of them; by default as prompts with answers. home: where their index is kept.
    """
    parts = [read(origin) for origin in origins(data, brought, home or Home())]
    held = apart(data, brought)
    source = Joined(parts, held) if len(parts) > 1 else parts[0]
    if not data.deduplicate:
        return PromptSet(source)
    rows = np.flatnonzero(first_of_equals(source))
    return PromptSet(source, rows, len(source) - len(rows))


def texts_of(prompts: PromptSet) -> Sequence[str]:
    """Return the document of each prompt: a list, or read on demand if the prompts are."""
    if any(isinstance(part, Records) and part.on_demand for part in parts_of(prompts.source)):
        return Texts(prompts)
    return [prompt.document for prompt in prompts]


class Texts(Sequence[str]):
    """Documents of prompts, read on demand."""

    def __init__(self, prompts: PromptSet) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Texts": ...
    def __getitem__(self, index: int | slice) -> "str | Texts":
        if isinstance(index, slice):
            return Texts(PromptSet(self._prompts.source, self._prompts.rows[index]))
        return self._prompts[self._prompts.rows[index]].document
