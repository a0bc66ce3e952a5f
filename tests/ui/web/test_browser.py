"""The pages in headless Chromium: charts are drawn, nothing leaves the machine, no error in the console.

One browser and one server have all of them; a test waits for what it is to see, and adds its runs under its own names.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.patience import patience
from tests.ui.web import runs as made
from tests.ui.web.runs import folder_of_runs

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
INJECT = Path(__file__).parents[3] / "benchmarks" / "causes_inject"
PATIENT = 60
"""Seconds, on a quiet machine, until what a test waits for is late."""
LIMIT = 240
"""Seconds of a page, on a quiet machine: an evaluation would wait for ever for a script in an endless loop."""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt install chromium)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_runs(tmp_path_factory.mktemp("browser") / "runs")


@pytest.fixture(scope="module")
def site(folder):
    with made.started(folder) as server:
        yield server.address


def launch(chromium, path):
    """Start a browser; where it does not start, the test is skipped with its reason."""
    try:
        return chromium.launch(
            executable_path=path, chromium_sandbox=os.getuid() != 0, timeout=1000 * patience(PATIENT),
            args=["--disable-dev-shm-usage", "--disable-gpu", "--disable-software-rasterizer"],
        )  # fmt: skip
    except api.Error as error:
        said = [line for line in str(error).splitlines() if "[err]" in line] or [str(error)]
        pytest.skip(f"{path} does not start: {said[-1].strip()[:300]}")


def test_a_browser_that_does_not_start_skips_its_tests_with_the_reason(browser, tmp_path):
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no libnss3.so >&2; exit 127\n")
    broken.chmod(0o755)
    with pytest.raises(pytest.skip.Exception) as skipped:
        launch(browser.browser_type, broken)
    assert "libnss3" in str(skipped.value)


@pytest.fixture(scope="module")
def browser():
    """A browser of which no process remains."""
    before = {*psutil.Process().children(recursive=True)}
    with api.sync_playwright() as playwright:
        launched = launch(playwright.chromium, CHROMIUM)
        yield launched
        started = {*psutil.Process().children(recursive=True)} - before
        launched.close()
    assert len(started) > 1
    late = time.monotonic() + patience(PATIENT)
    while any(map(lives, started)):
        assert time.monotonic() < late, started
        time.sleep(0.05)


def lives(process):
    """True unless a process has ended, also where nobody waits for an orphan, as in a container."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_renderers():
    """Kill the processes in which the browser runs pages."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "--type=renderer" in process.cmdline():
                process.kill()


@contextmanager
def tab(browser, limit=LIMIT, **options):
    """A page that must neither ask another machine nor log an error; after ``limit`` seconds it crashes."""
    timer = threading.Timer(patience(limit), kill_renderers)
    timer.start()
    context = browser.new_context(**options)
    page, wrong, asked = context.new_page(), [], []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(urlsplit(request.url).hostname))
    page.set_default_timeout(1000 * patience(PATIENT))
    try:
        yield page
    finally:
        timer.cancel()
        context.close()
    assert wrong == [] and {*asked} <= {"127.0.0.1", None, ""}


def test_a_page_whose_script_does_not_end_crashes_at_its_limit(browser, site):
    with pytest.raises(api.Error) as ended, tab(browser, limit=3) as page:
        page.goto(site)
        page.evaluate("() => { for (;;) {} }")
    assert "crashed" in str(ended.value)


def until(page, expression, seconds=PATIENT):
    """Wait until an expression is true. Playwright's own way needs eval, which the page's policy forbids."""
    late = time.monotonic() + patience(seconds)
    while not page.evaluate(expression):
        assert time.monotonic() < late, expression
        page.wait_for_timeout(50)


DRAWN = "figure.plotted[data-drawn] .main-svg"
STREAMS = "stream && stream.readyState === EventSource.OPEN"
FRAMES = "new Promise(done => {requestAnimationFrame(() => requestAnimationFrame(done)); setTimeout(done, 60000)})"
SLOW = pytest.mark.slow
RUN = "runs/sums-a-001"
"""Its page is drawn where the keyboard is tried: that of a chart takes seconds of processor time to begin."""
PATHS = {
    "": "table tbody tr", RUN: DRAWN,
    "runs/sums-a-001/trajectories": "table.samples",
    "runs/agents/group?step=1&group=7": ".text span", "runs/ranks/time": ".lanes-plot[data-bound] .main-svg",
    "runs/ranks/health": "table.heat", "compare?run=sums-a-001&run=agents": "table.keys-table",
}  # fmt: skip


@pytest.mark.parametrize("looks", [{}, {"color_scheme": "dark"}, {"viewport": {"width": 390, "height": 800}}])
@pytest.mark.parametrize("path", [pytest.param(path, marks=SLOW) if path == RUN else path for path in PATHS])
def test_every_view_is_drawn(browser, site, path, looks):
    with tab(browser, **looks) as page:
        page.goto(site + path)
        page.locator(PATHS[path].partition("[data")[0]).first.scroll_into_view_if_needed()
        page.wait_for_selector(PATHS[path])
        page.evaluate(FRAMES)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it is wider than the window"


def commit(run, step, **more):
    values = {"reward/mean": 0.7, "loss": 0.5, "tokens/trained": 100.0}
    run.commit_step({"step": step, "phase": "grpo", **values, **more})


@pytest.mark.parametrize("seconds", [PATIENT, pytest.param(3, marks=SLOW)])
def test_a_curve_grows_with_a_commit_until_the_run_is_killed(browser, site, folder, seconds):
    name = f"grows-{seconds}"
    with made.running(folder, name) as run, tab(browser) as page:
        page.goto(site + f"runs/{name}")
        page.wait_for_selector(DRAWN)
        until(page, STREAMS)
        count = "document.querySelector('figure.plotted .canvas').data[0].x.length"
        assert page.evaluate(count) == 1
        commit(run, 2, entropy=1.0)
        until(page, f"{count} === 2", seconds)
        page.wait_for_selector("#head .lede:has-text('step 2')")
        page.wait_for_selector("figure.plotted:has-text('Entropy')")  # whose metric is new
        assert page.locator("#head .state.running").count()
        run.update(pid=1, pid_started=0.0)  # as of a process that has ended
        page.wait_for_selector("#head .state.interrupted")


@SLOW
def test_a_page_that_follows_a_run_asks_for_nothing(browser, site, folder):
    """News have the points of its curves and its tiles, so that a page costs the run nothing else."""
    with made.running(folder, "asks") as run, tab(browser) as page:
        page.goto(site + "runs/asks")
        page.wait_for_selector(DRAWN)
        until(page, STREAMS)
        page.wait_for_timeout(1500)
        asked = []
        page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        for step in range(2, 9):
            commit(run, step)
            page.wait_for_timeout(1000)
        until(page, "document.querySelector('figure.plotted .canvas').data[0].x.length === 8")
        until(page, "/Steps\\s*[678]/.test(document.getElementById('tiles').innerText)")
        assert asked.count("/runs/asks") == 0 and asked.count("/curves.json") <= patience(2)
        run.end("finished")
        page.wait_for_selector("#head .state.finished")
        until(page, "/Steps\\s*8/.test(document.getElementById('tiles').innerText)")


@SLOW
@pytest.mark.parametrize("kind", ["runs", "was-killed"])
def test_every_view_of_a_run_that_is_not_finished_is_drawn(browser, site, folder, kind):
    with made.running(folder, kind) as run, tab(browser) as page:
        if kind == "was-killed":
            run.update(pid=1, pid_started=0.0)
        for path in (f"runs/{kind}", f"runs/{kind}/trajectories", f"runs/{kind}/time", f"runs/{kind}/health",
                     f"compare?run={kind}&run=agents"):  # fmt: skip
            page.goto(site + path)
            page.wait_for_selector("main h2")
            if "figure" in page.content():
                page.wait_for_selector(DRAWN)
            page.evaluate(FRAMES)


@SLOW
def test_a_page_that_was_opened_before_the_first_step_and_its_events_shows_them(browser, site, folder):
    with made.RunDir.create(made.named(folder, "first"), "first") as run, tab(browser) as page, tab(browser) as other:
        page.goto(site + "runs/first")
        other.goto(site + "runs/first/time")
        page.wait_for_selector("text=No step has been committed yet")
        shutil.copytree(folder / "ranks" / "events", run.events, dirs_exist_ok=True)
        for step in range(1, 13):
            commit(run, step)
        page.wait_for_selector(DRAWN)
        other.wait_for_selector(".lanes-plot[data-bound] .main-svg")


@SLOW
def test_a_click_on_a_point_leads_to_the_samples_of_its_step(browser, site):
    with tab(browser) as page:
        page.goto(site + "runs/sums-a-001?q=reward/mean")
        page.wait_for_selector(DRAWN)
        box = page.locator("figure.plotted .nsewdrag").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
        until(page, "document.querySelector('figure.plotted .canvas')._hoverdata")
        page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
        page.wait_for_url("**/trajectories?steps=16")


def test_the_keyboard_is_enough(browser, site):
    with tab(browser) as page:
        page.goto(site)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.locator("td.name a", has_text="sums-a-001").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(DRAWN)
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


@SLOW
def test_a_touch_on_a_token_shows_its_number(browser, site):
    with tab(browser, has_touch=True, viewport={"width": 390, "height": 800}) as page:
        page.goto(site + "runs/agents/group?step=1&group=7")
        token = page.locator(".text span[title]").first
        token.tap()
        assert page.inner_text("#tip") == token.get_attribute("title")
        page.locator("h2").tap()
        assert page.inner_text("#tip") == ""


@SLOW
def test_what_a_newcomer_looks_for_is_two_or_three_clicks_from_the_list(browser, site):
    with tab(browser) as page:
        page.goto(site)
        page.locator("td.name a", has_text="sums-a-001").click()
        page.locator("a", has_text="worst answers of the newest step").click()
        page.wait_for_selector("table.samples tbody .badge")
        page.locator("nav a", has_text="runs").click()
        page.locator("td.name a", has_text="ranks").click()
        page.locator("#head a", has_text="1 warning").click()
        page.wait_for_selector("#health .lede:has-text('slow: rank 1 costs')")
        page.goto(site)
        for name in ("sums-a-001", "agents"):
            page.locator(f"input[value={name}]").check()
        page.locator("button", has_text="compare").click()
        page.wait_for_selector("table.keys-table")


CAUSE = {"kind": "slow", "rank": 1, "factor": 3.0, "sleep": [0.02, 0.0], "window": -1000}
"""A rank whose passes take 3 times as long, from the second step on."""
KEYS = ("supervised.steps=16", "supervised.batch=8", "algorithm.steps=1", "rollout.prompts=2", "rollout.group=2",
        "model.hidden=16", "model.layers=1", "model.heads=2", "run.eval_prompts=2", "train.threads=1",
        "cluster.backend=local", "cluster.workers=2")  # fmt: skip


@SLOW
def test_the_slow_one_of_two_local_workers_is_two_clicks_from_the_list(browser, site, folder):
    env = {**os.environ, "CAUSE": json.dumps(CAUSE), "PYTHONPATH": str(INJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tilth", "run", "addition-grpo", f"run.dir={folder}", "run.name=two-workers"]
    done = subprocess.run([*command, *KEYS], env=env, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr[-2000:]
    with tab(browser) as page:
        page.goto(site)
        page.locator("td.name a", has_text="two-workers").click()
        page.wait_for_selector("#slow-rank:has-text('slow: rank 1 costs')")
        page.locator("#slow-rank a").click()
        page.wait_for_selector("#slow .lede:has-text('slow: rank 1 costs')")
        (slow,) = page.locator("td.clay").all()
        assert slow.locator("xpath=..").locator("td").first.inner_text() == "1"


@SLOW
def test_a_timeline_is_read_with_more_detail_where_it_is_zoomed(browser, site):
    with tab(browser) as page:
        page.goto(site + "runs/ranks/time")
        page.wait_for_selector(".lanes-plot[data-bound] .main-svg")
        with page.expect_request(lambda request: "begin=0.5" in request.url):
            page.evaluate(
                "Plotly.relayout(document.querySelector('.lanes-plot .canvas'), {'xaxis.range': [0.5, 0.75]})"
            )
        page.locator(".lanes-plot .canvas").focus()
        with page.expect_request(lambda request: "lanes.json" in request.url and "begin=0.45" in request.url):
            page.keyboard.press("ArrowLeft")


@SLOW
def test_a_token_by_the_printed_address(browser, folder):
    with made.started(folder, token="a secret") as server, tab(browser) as page:
        page.goto(server.address)
        page.wait_for_selector("table tbody tr")
        assert page.url.endswith("/") and "key" not in page.url


@SLOW
def test_without_the_script_every_view_has_its_tables(browser, site):
    with tab(browser, java_script_enabled=False) as page:
        for path in PATHS:
            page.goto(site + path)
            assert page.locator("table, .text, .plots").count()
