"""Keys of TRL and verl and their names in Tilth, for error messages: docs/from-trl-and-verl.md as data."""

import tomllib
from pathlib import Path

LIBRARIES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Library -> its key (a pattern) -> keys of Tilth; "" if there is none."""
