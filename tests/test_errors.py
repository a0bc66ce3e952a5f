"""Every error has a key, and the sentences of a package stand in one file that a change of wording shows in."""

import pickle

import pytest

from tests.errors import SOURCE, TESTS, found, packages, page, raises, snapshot
from tilth.core.errors import ArgumentError, DataError, TilthError


def path_of(name):
    return SOURCE / name if (SOURCE / name).is_dir() else SOURCE / f"{name}.py"


@pytest.mark.parametrize("name", packages())
def test_errors_have_a_key_and_the_sentences_are_those_of_the_snapshot(name):
    path = path_of(name)
    assert not [f"{file}:{line}" for file, line, _, key, _ in found(path) if not key]
    held = snapshot(path).read_text() if snapshot(path).is_file() else ""
    assert (page(path) if found(path) else "") == held, "after a wanted change: python -m tests.errors"


def test_few_tests_match_a_sentence():
    """Those left are errors of Python, of other libraries, or of a test's own code."""
    texts = [path.read_text() for path in TESTS.rglob("*.py") if path.name != "test_errors.py"]
    assert sum(text.count("match=") for text in texts) < 20


def test_an_error_without_a_key_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.errors.SOURCE", tmp_path)
    (tmp_path / "a.py").write_text(
        "class OddError(TilthError): ...\nraise OddError(f'x = {x!r}: ' + y)\nraise OddError('z', key=f'{a}.b')\n"
    )
    rows = found(tmp_path / "a.py")
    assert rows == [("a.py", 2, "OddError", None, "x = {x}: {y}"), ("a.py", 3, "OddError", "{a}.b", "z")]


def test_a_sentence_in_a_variable_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.errors.SOURCE", tmp_path)
    (tmp_path / "a.py").write_text("def f(x):\n    text = f'no {x}'\n    raise TilthError(text, key='a')\n")
    assert found(tmp_path / "a.py") == [("a.py", 3, "TilthError", "a", "no {x}")]


def test_refusals_of_rules_and_errors_of_makers_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.errors.SOURCE", tmp_path)
    (tmp_path / "a.py").write_text(
        "class OddError(TilthError): ...\n"
        "def rule(recipe) -> Refusals:\n    why = f'is {x}'\n    yield 'a.b', why\n"
        "def made(it, key: str, why: str) -> OddError:\n    return OddError(why, key=key)\n"
        "raise made(1, 'c', 'is wrong')\n"
    )
    rows = [(line, kind, key, sentence) for _, line, kind, key, sentence in found(tmp_path / "a.py")]
    assert (4, "RecipeError", "a.b", "is {x}") in rows and (7, "OddError", "c", "is wrong") in rows


def test_another_key_is_a_failure():
    with pytest.raises(AssertionError), raises(TilthError, "data.source"):
        raise DataError("text", key="data.heldout")


@pytest.mark.parametrize("kind", [DataError, ArgumentError])
def test_a_key_survives_a_pickle(kind):
    again = pickle.loads(pickle.dumps(kind("text", key="a.b")))
    assert (type(again), str(again), again.key) == (kind, "text", "a.b")
