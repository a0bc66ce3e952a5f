"""One class name has one meaning in the whole package, and docstrings stand alone."""

import ast
import re
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


ODD = re.compile(r"^(Of|What|Whether|Nor|So|As|How|Who|Where|That|Those|To)\b")
SIBLING = re.compile(r"\b(the same of|as above|as there|same as the)\b", re.IGNORECASE)


def odd(text):
    """First lines of docstrings that do not begin with a verb or a noun, or that refer to another one."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    found = [doc for node in nodes if (doc := ast.get_docstring(node))]
    return [doc.splitlines()[0] for doc in found if ODD.search(doc) or SIBLING.search(doc)]


def test_docstrings_say_what_a_thing_is_or_does():
    assert not {str(p.relative_to(SOURCE)): lines for p in SOURCE.rglob("*.py") if (lines := odd(p.read_text()))}


def test_a_docstring_that_does_not_stand_alone_is_seen():
    text = '"""Rows."""\ndef f():\n    """Whether it is."""\nclass A:\n    """Return x, as above."""\n'
    assert odd(text) == ["Whether it is.", "Return x, as above."]
