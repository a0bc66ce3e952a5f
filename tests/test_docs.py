"""The pages of the packages are true: their examples run and print what they say, their links lead somewhere."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
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


@pytest.mark.parametrize("page", [DOCS / "design.md", DOCS / "metrics.md", *PAGES], ids=lambda page: page.stem)
def test_links_to_files_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / link).exists(), f"{page.name}: {link}"
