"""One class name has one meaning in the package, docstrings stand alone, no file is long, and no loop looks often."""

import re
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tilth"
CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)
MOST = 900
"""Lines of the longest file."""


def source() -> dict[str, str]:
    """File of the package -> its text."""
    return {str(p.relative_to(SOURCE)): p.read_text() for p in SOURCE.rglob("*.py")}


def twice(files: dict[str, str]) -> dict[str, list[str]]:
    """Class name -> the files that define it, where there are several."""
    found = defaultdict(list)
    for file, text in files.items():
        for name in CLASS.findall(text):
            found[name].append(file)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_one_class_name_has_one_meaning():
    assert not twice(source())


def test_a_second_meaning_is_seen():
    assert twice({"a.py": "class A: ...", "b.py": "def f():\n    class A: ..."}) == {"A": ["a.py", "b.py"]}


DOCSTRING = re.compile(r'(?:\A|:(?: +#[^\n]*)?\n)\s*r?"""(.*?)"""', re.DOTALL)
ODD = re.compile(r"^(Of|What|Whether|Nor|So|As|How|Who|Where|That|Those|To)\b")
SIBLING = re.compile(r"\b(the same of|as above|as there|same as the)\b", re.IGNORECASE)


def odd(text):
    """First lines of docstrings that do not begin with a verb or a noun, or that refer to another one."""
    found = DOCSTRING.findall(text)
    return [doc.splitlines()[0] for doc in found if ODD.search(doc) or SIBLING.search(doc)]


def test_docstrings_say_what_a_thing_is_or_does():
    assert not {file: lines for file, text in source().items() if (lines := odd(text))}


def test_a_docstring_that_does_not_stand_alone_is_seen():
    text = '"""Rows."""\ndef f():\n    """Whether it is."""\nclass A:\n    """Return x, as above."""\n'
    assert odd(text) == ["Whether it is.", "Return x, as above."]


def long(files):
    """Files of more than MOST lines, with their number."""
    return {file: lines for file, text in files.items() if (lines := text.count("\n")) > MOST}


def test_no_file_is_long():
    assert not long(source())


def test_a_long_file_is_seen():
    assert long({"a.py": "\n" * MOST, "b.py": "\n" * (MOST + 1)}) == {"b.py": MOST + 1}


SLEEP = re.compile(r"\bsleep\((\w+|[\d.e-]+)\)")
SHORTEST = 0.05
"""Seconds between two looks: shorter ones take time of a core that other processes share."""


def hasty(text):
    """Sleeps shorter than SHORTEST, of a number or of a constant of the file."""
    known = {name: re.search(rf"^{name} = ([\d.e-]+)", text, re.MULTILINE) for name in SLEEP.findall(text)}
    seconds = {name: name if name[0].isdigit() else found and found[1] for name, found in known.items()}
    return [name for name, value in seconds.items() if value is not None and float(value) < SHORTEST]


def test_nothing_looks_again_and_again_within_50_ms():
    assert not {file: found for file, text in source().items() if (found := hasty(text))}


def test_a_hasty_look_is_seen():
    assert hasty("while True:\n    time.sleep(0.01)") == ["0.01"]
    assert hasty("EVERY = 0.02\nasyncio.sleep(EVERY)") == ["EVERY"]
    assert not hasty("EVERY = 0.25\nsleep(EVERY)\nengine.sleep()\nsleep(0.05)\nsleep(action.wait)")
