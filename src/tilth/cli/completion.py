"""Completions at a tab: recipes, keys, runs. Imports nothing heavy at start."""

from pathlib import Path

SHIPPED = Path(__file__).parent.parent / "recipes"


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes; nothing for a path, so that the shell offers files."""
    return [name for name in sorted(p.stem for p in SHIPPED.glob("*.toml")) if name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Keys to set, as ``rollout.group=``."""
    return [f"{name}=" for name in keys(incomplete)]


def keys(incomplete: str) -> list[str]:
    from tilth.config.keys import all_names

    return [name for name in all_names() if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Folders of runs in the folder that was typed, or in ``runs``."""
    folder = incomplete.rpartition("/")[0] if "/" in incomplete else "runs"
    found = sorted(path.parent for path in Path(folder or "/").glob("*/run.json"))
    return [str(path) for path in found if str(path).startswith(incomplete)]
