"""The pages of the packages are true: their examples run and print what they say, their links lead somewhere."""

import re
from pathlib import Path

import pytest

from tilth.config.axes import AXES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "packages").glob("*.md"))
SAID = re.compile(r"^\s*print\(.*\)  # (.*)$", re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_package_prints_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert examples
    for example in examples:
        exec(compile(example, page.name, "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.splitlines() == SAID.findall(example)


def test_every_package_has_a_page_and_the_design_links_it():
    source = DOCS.parent / "src" / "tilth"
    packages = {p.parent.name for p in source.glob("*/__init__.py")} - {"cli"}
    assert packages <= {page.stem for page in PAGES}
    design = (DOCS / "design.md").read_text()
    assert all(f"(packages/{page.name})" in design for page in PAGES)


EVERY_PAGE = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}#{anchor}"


def missing_files(text: str, folder: Path = DOCS) -> list[str]:
    """Names of Python files in backticks that are neither in a source folder, by their whole path, nor linked."""
    places = (ROOT, ROOT / "src" / "tilth", ROOT / "tests", ROOT / "benchmarks")
    linked = {
        name
        for name, link in re.findall(r"\[`([\w./*-]+\.py)`\]\(([^)#]+)\)", text)
        if (folder / link).name == Path(name).name
    }
    named = set(re.findall(r"`([\w./*-]+/[\w.*-]+\.py|test_\w+\.py)`", text)) - linked
    return sorted(name for name in named if not any(any(place.glob(name)) for place in places))


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page):
    assert not missing_files(page.read_text(), page.parent)


def test_a_file_that_is_not_there_is_seen():
    assert (
        missing_files("`rl/losses.py`, `analysis/run_*.py`, `tests/test_docs.py`, `benchmarks/train.py`, `mine.py`")
        == []
    )
    assert missing_files("`rl/no.py`, `test_no.py`, [`rl/other.py`](../src/tilth/rl/losses.py)") == [
        "rl/no.py",
        "rl/other.py",
        "test_no.py",
    ]


SECTIONS = re.findall(r"^## \d\. .*?\[`([\w/.]+)`\].*?\n(.*?)(?=^## )", (DOCS / "reading.md").read_text(), re.M | re.S)


@pytest.mark.parametrize(("file", "section"), SECTIONS, ids=[file for file, _ in SECTIONS])
def test_what_to_look_for_in_a_file_is_in_it(file, section):
    source = (ROOT / "src" / "tilth" / file).read_text()
    names = set(re.findall(r"(?<!\[)`(\w+)`", section))
    assert names and not [name for name in names if not re.search(rf"\b{name}\b", source)]


LEVELS = {
    "CPU": ("tests/",),
    "pretended GPU": ("tests/test_gpu.py", "tests/gpu_free/test_pretended.py"),
    "1,024 ranks": ("tests/rehearsal/",),
    "interpreted": ("tests/models/kernels/interpreted",),
    "compiled": ("tests/models/kernels/test_kernels.py",),
}
"""Level of the README's table -> files whose tests can show it."""
CLAIMS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*::[^|]*) \|$", (ROOT / "README.md").read_text(), re.M)


def unshown(levels: str, shown: str) -> list[str]:
    """Levels that no test of a row can show, and tests that do not exist."""
    tests = re.findall(r"`([\w/.]+)::(\w+)`", shown)
    missing = [f"{file}::{name}" for file, name in tests if f"def {name}(" not in _text(ROOT / file)]
    files = [file for file, _ in tests]
    claimed = re.split(r", (?!\d)", levels)  # "1,024 ranks" is one
    return missing + [level for level in claimed if not any(f.startswith(LEVELS.get(level, ())) for f in files)]


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


@pytest.mark.parametrize(("path", "levels", "shown"), CLAIMS, ids=[path for path, *_ in CLAIMS])
def test_a_row_of_where_it_has_run_has_a_test_of_its_level(path, levels, shown):
    assert not unshown(levels, shown)


def test_every_axis_has_a_row_and_a_claim_without_a_test_is_seen():
    assert set(AXES) <= set(re.findall(r"`(\w+)`", " ".join(path for path, *_ in CLAIMS)))
    here = "`tests/test_docs.py::test_links_lead_somewhere`"
    assert unshown("CPU", here) == []
    assert unshown("CPU, measured", here) == ["measured"] and unshown("pretended GPU", here) == ["pretended GPU"]
    assert unshown("CPU", "`tests/test_docs.py::test_no`, `tests/no.py::test_no`") == [
        "tests/test_docs.py::test_no",
        "tests/no.py::test_no",
    ]
