"""Which held-out prompts the model that a run begins with was trained on."""

from pathlib import Path

from tilth.config.load import load_recipe
from tilth.config.plugins import task_names
from tilth.config.schema import Recipe
from tilth.core.errors import TilthError
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import PromptSet, load_documents
from tilth.runs.model_refs import split_spec

_MOST = 2**28
"""Bytes of a file that is read again for this."""


def seen_before(recipe: Recipe, heldout: PromptSet) -> list[str]:
    """The line that is told of it; none where ``model.path`` names no run or nothing held out was trained on.

    Only the run itself is looked at, not those that it began with in turn. Data that cannot be read again soon is said.
    """
    folder = Path(split_spec(recipe.model.path)[0])
    if not recipe.model.path or not len(heldout) or not (folder / "recipe.toml").is_file():
        return []
    try:
        earlier = load_recipe(str(folder / "recipe.toml"))
        if not earlier.data.source:
            return [f"not compared with what {folder} was trained on: tilth.train was given its data"]
        if not _readable(earlier.data.source):
            return [f"not compared with what {folder} was trained on: {earlier.data.source} is no file of this size"]
        count = _common(earlier, heldout)
    except TilthError as error:
        return [f"not compared with what {folder} was trained on: {error}"]
    told = f"{count} of {len(heldout)} held-out prompts are among what {folder} was trained on; hold the same data out"
    return [told] if count else []


def _readable(source: str) -> bool:
    path = Path(source)
    return source in task_names() or not path.exists() or (path.is_file() and path.stat().st_size <= _MOST)


def _common(earlier: Recipe, heldout: PromptSet) -> int:
    if earlier.flow == "pretrain" and earlier.data.source not in task_names():
        known = {one.key for one in load_documents(earlier.data)[0]}
        return sum(prompt.key in known for prompt in heldout)
    train, _ = recipe_prompts(earlier).split(earlier.data.holdout)
    return heldout.common(train)
