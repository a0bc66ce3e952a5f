"""The pages in headless Chromium: charts are drawn, nothing leaves the machine, no error in the console."""

import shutil
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from tests.patience import patience
from tests.ui.web import runs as made
from tests.ui.web.runs import folder_of_runs

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt install chromium)"),
]


@contextmanager
def served(folder, token=""):
    with made.started(folder, token) as server:
        yield server.address


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_runs(tmp_path_factory.mktemp("browser") / "runs")


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def tab(browser, **options):
    """A page that must neither ask another machine nor log an error."""
    context = browser.new_context(**options)
    page, wrong, asked = context.new_page(), [], []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(urlsplit(request.url).hostname))
    page.set_default_timeout(1000 * patience(20))
    try:
        yield page
    finally:
        context.close()
    assert wrong == [] and {*asked} <= {"127.0.0.1", None, ""}


def until(page, expression):
    """Wait until an expression is true. Playwright's own way needs eval, which the page's policy forbids."""
    late = time.monotonic() + patience(20)
    while not page.evaluate(expression):
        assert time.monotonic() < late, expression
        page.wait_for_timeout(50)


PATHS = {
    "": "table tbody tr", "runs/sums-a-001": "figure.plotted .main-svg",
    "runs/sums-a-001/trajectories": "table.samples",
    "runs/agents/group?step=1&group=7": ".text span", "runs/ranks/time": ".lanes-plot .main-svg",
    "runs/ranks/health": "table.heat", "compare?run=sums-a-001&run=agents": "figure.plotted .main-svg",
}  # fmt: skip


@pytest.mark.parametrize("looks", [{}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}])
@pytest.mark.parametrize("path", PATHS)
def test_every_view_is_drawn(browser, folder, path, looks):
    with served(folder) as address, tab(browser, **looks) as page:
        page.goto(address + path)
        page.locator(PATHS[path].replace(".main-svg", ".canvas")).first.scroll_into_view_if_needed()
        page.wait_for_selector(PATHS[path])
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"


def test_a_curve_grows_within_three_seconds_of_a_commit(browser, tmp_path):
    with made.running(tmp_path) as run, served(tmp_path) as address, tab(browser) as page:
        page.goto(address + "runs/live")
        page.wait_for_selector("figure.plotted .main-svg")
        page.wait_for_timeout(1500)
        count = "document.querySelector('figure.plotted .canvas').data[0].x.length"
        assert page.evaluate(count) == 1
        run.commit_step({"step": 2, "phase": "grpo", "reward/mean": 0.7, "loss": 0.5, "tokens/trained": 100.0})
        began = time.monotonic()
        until(page, f"{count} === 2")
        assert time.monotonic() - began < patience(3)
        assert "step 2" in page.inner_text("#head")
        run.end("finished")
        page.wait_for_selector("#head .state.finished")


def test_a_page_that_follows_a_run_asks_for_nothing(browser, tmp_path):
    """News have the points of its curves and its tiles, so that a page costs the run nothing else."""
    with made.running(tmp_path) as run, served(tmp_path) as address, tab(browser) as page:
        page.goto(address + "runs/live")
        page.wait_for_selector("figure.plotted .main-svg")
        page.wait_for_timeout(1500)
        asked = []
        page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        for step in range(2, 9):
            run.commit_step({"step": step, "phase": "grpo", "reward/mean": 0.7, "loss": 0.5, "tokens/trained": 100.0})
            page.wait_for_timeout(1000)
        until(page, "document.querySelector('figure.plotted .canvas').data[0].x.length === 8")
        until(page, "/Steps\\s*[678]/.test(document.getElementById('tiles').innerText)")
        assert asked.count("/runs/live") == 0 and asked.count("/curves.json") <= patience(2)
        run.end("finished")
        until(page, "/Steps\\s*8/.test(document.getElementById('tiles').innerText)")


def test_a_run_that_is_killed_while_it_is_watched(browser, tmp_path):
    with made.running(tmp_path) as run, served(tmp_path) as address, tab(browser) as page:
        page.goto(address + "runs/live")
        page.wait_for_selector("#head .state.running")
        run.update(pid=1, pid_started=0.0)  # as of a process that has ended
        page.wait_for_selector("#head .state.interrupted")


def test_a_click_on_a_point_leads_to_the_samples_of_its_step(browser, folder):
    with served(folder) as address, tab(browser) as page:
        page.goto(address + "runs/sums-a-001?q=reward/mean")
        page.wait_for_selector("figure.plotted .main-svg")
        box = page.locator("figure.plotted .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
        page.wait_for_timeout(200)
        page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
        page.wait_for_url("**/trajectories?steps=16")


def test_the_keyboard_is_enough(browser, folder):
    with served(folder) as address, tab(browser) as page:
        page.goto(address)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.locator("a", has_text="sums-a-001").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("figure.plotted .main-svg")
        canvas = page.locator("figure.plotted .canvas").first
        canvas.focus()
        page.keyboard.press("+")
        low, high = canvas.evaluate("one => one.layout.xaxis.range")
        page.keyboard.press("0")
        until(page, "document.querySelector('figure.plotted .canvas').layout.xaxis.autorange")
        whole = "one => one.layout.xaxis.range[1] - one.layout.xaxis.range[0]"
        assert high - low < canvas.evaluate(whole)
        before = canvas.evaluate(whole)
        page.keyboard.press("Control++")  # as the browser itself zooms
        assert canvas.evaluate(whole) == before
        last = canvas.evaluate("one => one.data[0].customdata.at(-1)")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/trajectories?steps={last}")


def test_a_touch_on_a_token_shows_its_number(browser, folder):
    with served(folder) as address, tab(browser, has_touch=True, viewport={"width": 390, "height": 800}) as page:
        page.goto(address + "runs/agents/group?step=1&group=7")
        token = page.locator(".text span[title]").first
        token.tap()
        assert page.inner_text("#tip") == token.get_attribute("title")
        page.locator("h2").tap()
        assert page.inner_text("#tip") == ""


def test_what_a_newcomer_looks_for_is_two_or_three_clicks_from_the_list(browser, folder):
    with served(folder) as address, tab(browser) as page:
        page.goto(address)
        page.locator("td.name a", has_text="sums-a-001").click()
        page.locator("a", has_text="worst answers of the newest step").click()
        page.wait_for_selector("table.samples tbody .badge")
        page.locator("nav a", has_text="runs").click()
        page.locator("td.name a", has_text="ranks").click()
        page.locator("#head a", has_text="1 warning").click()
        page.wait_for_selector("#health .lede:has-text('slow: rank 1 takes')")
        page.locator("nav a", has_text="Time").click()
        page.wait_for_selector("#slow .lede:has-text('slow: rank 1 takes')")
        page.goto(address)
        for name in ("sums-a-001", "agents"):
            page.locator(f"input[value={name}]").check()
        page.locator("button", has_text="compare").click()
        page.wait_for_selector("table.keys-table")


def test_a_timeline_is_read_with_more_detail_where_it_is_zoomed(browser, folder):
    with served(folder) as address, tab(browser) as page:
        page.goto(address + "runs/ranks/time")
        page.wait_for_selector(".lanes-plot .main-svg")
        with page.expect_request(lambda request: "begin=0.5" in request.url):
            page.evaluate(
                "Plotly.relayout(document.querySelector('.lanes-plot .canvas'), {'xaxis.range': [0.5, 0.75]})"
            )
        page.locator(".lanes-plot .canvas").focus()
        with page.expect_request(lambda request: "lanes.json" in request.url and "begin=0.45" in request.url):
            page.keyboard.press("ArrowLeft")


def test_a_token_by_the_printed_address(browser, folder):
    with served(folder, token="a secret") as address, tab(browser) as page:
        page.goto(address)
        page.wait_for_selector("table tbody tr")
        assert page.url.endswith("/") and "key" not in page.url


def test_without_the_script_every_view_has_its_tables(browser, folder):
    with served(folder) as address, tab(browser, java_script_enabled=False) as page:
        for path in PATHS:
            page.goto(address + path)
            assert page.locator("table, .text, .plots").count()
