"""Operations: each span of the source is declared, with a kind; and no declaration is left over."""

import ast
from pathlib import Path
from typing import get_args

import pytest

import tilth
from tilth.config.code import parse
from tilth.plan.pipeline import Direction
from tilth.trace.ops import OPS, PHASES, kind

SOURCE = Path(tilth.__file__).parent
PASSED_ON = {"op", "name", "direction"}
"""Arguments of functions that hand a name on: the names themselves stand where these are called."""


def named(node: ast.AST) -> list[str]:
    """Names of operations in an expression; a family where a part of it is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        return [f"{node.values[0].value}*"]
    if isinstance(node, ast.IfExp):
        return named(node.body) + named(node.orelse)
    name = getattr(node, "id", getattr(node, "attr", ""))
    return [] if name.removeprefix("_") in PASSED_ON else [f"? {ast.dump(node)}"]


def spans(source: str) -> list[str]:
    """What the calls of ``span``, ``traced`` and their like name first."""
    called = {"span", "traced", "communication", "on_rows", "_traced", "Collective"}
    if not any(f"{name}(" in source for name in called):
        return []
    calls = [n for n in ast.walk(parse(source)) if isinstance(n, ast.Call) and n.args]
    names = [(getattr(c.func, "id", getattr(c.func, "attr", "")), c) for c in calls]
    return [name for called_as, call in names if called_as in called for name in named(call.args[0])]


def test_every_span_of_the_source_is_declared():
    files = [p for p in SOURCE.rglob("*.py") if p.parent.name != "trace"]
    wrong = [(p.name, n) for p in files for n in spans(p.read_text()) if n not in OPS and not kind_or_none(n)]
    assert not wrong


def kind_or_none(name: str) -> str | None:
    try:
        return kind(name)
    except KeyError:
        return None


def test_a_span_that_is_not_declared_would_be_seen():
    assert spans('with span("generte", step=1): pass') == ["generte"]
    assert kind_or_none("generte") is None
    assert spans('with span("a" if x else "b"), self._traced(f"save.{n}"): pass') == ["a", "b", "save.*"]
    assert spans("span(table[i])")[0].startswith("?")


def test_kinds():
    assert {OPS[name].kind for name in PHASES} == {"phase"}
    assert (kind("update"), kind("save.wait"), kind("save.write")) == ("phase", "wait", "storage")
    with pytest.raises(KeyError):
        kind("generte")
    assert all(op.text for op in OPS.values())


def test_every_pass_of_a_pipeline_is_declared():
    assert {kind(direction) for direction in get_args(Direction)} == {"compute"}
