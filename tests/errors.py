"""What tests ask of errors: their type and key. Their sentences stand in one file per package, ``errors.txt``.

python -m tests.errors      write these files again, after a sentence was changed on purpose
"""

import ast
import re
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import pytest

from tilth.config.code import parse

SOURCE = Path(__file__).parents[1] / "src" / "tilth"
TESTS = Path(__file__).parent
CLASS = re.compile(r"^ *class (\w+)\(([^)]*)\):", re.MULTILINE)


@contextmanager
def raises(kind, key):
    """Expect an error of this class, or of one derived from it, with exactly this key."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.key == key, f"{caught.value!r} has the key {caught.value.key!r}"


@lru_cache(maxsize=1)
def statements(tree):
    """All nodes of a tree but for expressions, which are most of it."""
    found = [tree]
    for node in found:
        found += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return found


@cache
def kinds(source):
    """Names of the classes of errors that carry a key."""
    bases = {"TilthError", "ArgumentError"}
    classes = [found for path in source.rglob("*.py") for found in CLASS.findall(path.read_text())]
    while True:
        more = {name for name, given in classes if bases & set(re.split(r"[\s,]+", given))}
        if more <= bases:
            return bases
        bases |= more


def packages():
    """Packages, and modules beside them."""
    return [p.stem for p in sorted(SOURCE.iterdir()) if p.suffix == ".py" or (p / "__init__.py").is_file()]


@cache
def found(path):
    """(file, line, class, key or None, sentence) of every error that the code of a package makes, in order."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    rows = []
    for file in files:
        text = file.read_text()
        if "Refusals" in text or any(kind in text for kind in kinds(SOURCE)):
            tree = parse(text)
            where = file.relative_to(SOURCE).as_posix()
            made = sorted([*calls(tree), *refusals(tree)], key=lambda row: (row[0].lineno, row[0].col_offset))
            rows += [
                (
                    where,
                    node.lineno,
                    kind,
                    key and template(key),
                    template(assigned(tree, sentence)) if sentence else "",
                )
                for node, kind, key, sentence in made
            ]
    return rows


def calls(tree):
    """(node, class, key, sentence) of each call of a class of errors, or of a function of the file that returns one of
    (..., key, why)."""
    known = kinds(SOURCE)
    functions = [node for node in statements(tree) if isinstance(node, ast.FunctionDef)]
    makers = {f.name: (getattr(f.returns, "id", ""), [a.arg for a in f.args.args]) for f in functions}
    makers = {f: (kind, names) for f, (kind, names) in makers.items() if kind in known and names[-2:] == ["key", "why"]}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        func = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "at" else call.func
        name = func.id if isinstance(func, ast.Name) else getattr(func, "attr", "")
        if name in known:
            key = next((word.value for word in call.keywords if word.arg == "key"), None)
            yield call, name, key, call.args[0] if call.args else None
        elif name in makers and len(call.args) == len(makers[name][1]):
            yield call, makers[name][0], *call.args[-2:]


def refusals(tree):
    """(node, class, key, sentence) of each pair that a rule for recipes yields, which ``refuse`` makes an error of."""
    for function in statements(tree):
        if isinstance(function, ast.FunctionDef) and getattr(function.returns, "id", "") == "Refusals":
            for node in ast.walk(function):
                if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                    yield node, "RecipeError", *node.value.elts


def assigned(tree, node):
    """The expression that a local name was last given before this line; any other expression is itself."""
    if not isinstance(node, ast.Name):
        return node
    functions = [
        f for f in statements(tree) if isinstance(f, ast.FunctionDef) and f.lineno <= node.lineno <= f.end_lineno
    ]
    inner = max(functions, key=lambda f: f.lineno, default=tree)
    values = [
        other.value
        for other in ast.walk(inner)
        if isinstance(other, ast.Assign) and other.lineno < node.lineno
        if any(isinstance(target, ast.Name) and target.id == node.id for target in other.targets)
    ]
    return max(values, key=lambda value: value.lineno, default=node)


def template(node):
    """The text of an expression, with what is computed in braces."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) for value in values)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return template(left) + template(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"({template(body)} | {template(orelse)})"
    return "{" + ast.unparse(node) + "}"


def page(path):
    """The sentences of a package: class, key and sentence in one line each, under the name of the file."""
    lines, last = [], ""
    for file, _, kind, key, sentence in found(path):
        if file != last:
            lines += ["", f"# {file}"] if lines else [f"# {file}"]
            last = file
        lines.append(f"{kind} [{key}] {sentence}".replace("\n", "\\n"))
    return "\n".join(lines) + "\n"


def snapshot(path):
    """The file that holds the sentences of a package."""
    return (TESTS / path.stem if path.is_dir() else TESTS) / (
        "errors.txt" if path.is_dir() else f"errors_{path.stem}.txt"
    )


if __name__ == "__main__":
    for name in packages():
        path = SOURCE / name if (SOURCE / name).is_dir() else SOURCE / f"{name}.py"
        if not found(path):
            snapshot(path).unlink(missing_ok=True)
        elif all(row[3] for row in found(path)):
            snapshot(path).write_text(page(path))
        else:
            print(f"{name}: {sum(not row[3] for row in found(path))} errors have no key; its sentences are not written")
