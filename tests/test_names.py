"""One class name has one meaning in the whole package."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tilth"


def twice(files: dict[str, str]) -> dict[str, list[str]]:
    """Class name -> the files that define it, where there are several."""
    found = defaultdict(list)
    for file, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(file)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_one_class_name_has_one_meaning():
    assert not twice({str(p.relative_to(SOURCE)): p.read_text() for p in SOURCE.rglob("*.py")})


def test_a_second_meaning_is_seen():
    assert twice({"a.py": "class A: ...", "b.py": "def f():\n    class A: ..."}) == {"A": ["a.py", "b.py"]}
