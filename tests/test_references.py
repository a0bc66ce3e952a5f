"""Arrows by string: what tables name as "module:name" is there, so that a move that forgets one is seen."""

import re
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

from tilth.config.roles import ROLES

SOURCE = Path(__file__).parents[1] / "src" / "tilth"
REFERENCE = re.compile(r"""(["'])(tilth(?:_studies)?(?:\.\w+)+:\w+(?:\.\w+)*)\1""")


def references(source: str) -> set[str]:
    """Return the constants of a source that name something in a module of Tilth."""
    return {text for _, text in REFERENCE.findall(source)}


def written() -> list[str]:
    """Return those of all files, and those that roles derive from their names."""
    found = {text for path in SOURCE.rglob("*.py") for text in references(path.read_text())}
    roles = {text for spec in ROLES.values() for text in (spec.worker, spec.memory) if text}
    return sorted(found | roles)


def resolved(reference: str) -> object:
    module, _, name = reference.partition(":")
    return reduce(getattr, name.split("."), import_module(module))


@pytest.mark.parametrize("reference", written())
def test_what_a_table_names_is_there(reference):
    assert callable(resolved(reference))


def test_a_name_that_is_not_there_is_seen():
    (wrong,) = references('TABLE = {"engine": "tilth.engines.engine:Engin"}')
    with pytest.raises(AttributeError):
        resolved(wrong)
    assert {"tilth.launch.workers:policy", "tilth.plan.memory:policy_need", "tilth.engines.vllm:VLLM"} <= set(written())
