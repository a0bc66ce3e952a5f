"""The result of ``tilth.train`` in a notebook."""

from html.parser import HTMLParser

from tests.ui.fake import fake_run
from tests.ui.test_report import Page
from tilth.runs.readers import summarise
from tilth.ui.result import RunResult, outcome


class Shown(HTMLParser):
    """Text, and attributes by element, of what a notebook inserts in its page."""

    def __init__(self, text):
        super().__init__()
        self.words, self.found = "", {}
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.found[name] = dict(attributes)

    def handle_data(self, data):
        self.words += data


def result_of(run):
    return RunResult(run, summarise(run))


def test_a_notebook_shows_the_figures_the_curve_and_the_report(tmp_path):
    result = result_of(fake_run(tmp_path, warmup=20, steps=20))
    shown = Shown(result._repr_html_())
    assert all(line in shown.words for line in outcome(result.summary)) and "after GRPO (20 steps" in shown.words
    assert shown.found["a"]["href"] == str(result.report) and "script" not in shown.found
    curve = Page(shown.found["iframe"]["srcdoc"].removeprefix("<!DOCTYPE html>"))
    assert "Held-out accuracy" in curve.words and f"{100 * result.accuracy:.3g} %" in curve.words
    (line,) = [a["d"] for name, a in curve.seen if name == "path" and a["class"] == "line leaf"]
    assert line.count("L") + 1 == sum(c in "hv" for a in [p for n, p in curve.seen if n == "path"
                                      and p["class"] == "dots leaf"] for c in a["d"])  # fmt: skip


def test_what_is_shown_is_escaped_and_the_text_is_short(tmp_path):
    folder = tmp_path / '<b onclick="x">'
    folder.mkdir()
    result = result_of(fake_run(folder, warmup=0, steps=2))
    shown = Shown(result._repr_html_())
    assert set(shown.found) == {"div", "pre", "iframe", "p", "a"} and set(shown.found["a"]) == {"href", "target"}
    assert repr(result) == f"RunResult(directory={result.directory!r})"


def test_a_run_without_a_step_has_no_curve(tmp_path):
    result = result_of(fake_run(tmp_path, warmup=0, steps=0))
    assert "No step has been committed yet." in Shown(result._repr_html_()).words
