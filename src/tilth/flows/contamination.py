"""Find held-out prompts that the model of ``model.path`` was trained on."""

from pathlib import Path

from tilth.config.plugins import task_names
from tilth.config.schema import Recipe
from tilth.core.errors import TilthError
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import PromptSet
from tilth.runs.model_refs import split_spec
from tilth.runs.trust import load_recipe_of

_MOST = 2**28
"""Largest file, in bytes, that is read again for this check."""


def count_seen(recipe: Recipe, heldout: PromptSet) -> list[str]:
    """Return a log line with the number of such prompts; [] if ``model.path`` names no run or there are none.

    Only that run's data is compared, not those of the runs before it. A line reports data that cannot be compared.
    """
    folder = Path(split_spec(recipe.model.path)[0])
    if not recipe.model.path or not len(heldout) or not (folder / "recipe.toml").is_file():
        return []
    try:
        earlier = load_recipe_of(folder)
        sources = [part.source for part in earlier.data.sources]
        if not all(sources):
            return [f"not compared with what {folder} was trained on: tilth.train was given its data"]
        for source in sources:
            if not _readable(source):
                return [f"not compared with what {folder} was trained on: {source} is no file of this size"]
        count = heldout.common(recipe_prompts(earlier).split(earlier.data.holdout)[0])
    except TilthError as error:
        return [f"not compared with what {folder} was trained on: {error}"]
    line = f"{count} of {len(heldout)} held-out prompts are among what {folder} was trained on; hold the same data out"
    return [line] if count else []


def _readable(source: str) -> bool:
    path = Path(source)
    return source in task_names() or not path.exists() or (path.is_file() and path.stat().st_size <= _MOST)
