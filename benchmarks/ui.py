"""The page of runs (``tilth ui``): how long it takes, what it holds in memory, what it costs a run that is watched.

    python benchmarks/ui.py [--quick] [--json PATH] [--runs N] [--steps N] [--trajectories N]

A folder of runs is made: most of some hundred steps, one of very many steps, one of very many trajectories. A server of
its own answers: the list at once after its start and again, every view of the large runs many times over, and 1 to 5
pages follow a run whose process commits a step every second, half of it spent in matrix products. The cost is the
processor time of the server in a second, and the length of the steps with and without pages. Where there is a
Chromium, it opens the large views, and the memory of a page is what the process that draws it does not share.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from driver import benchmark_parser, write_rows

from tilth.config.load import from_dict
from tilth.data.trajectories import GROUP, conform
from tilth.runs.directory import RunDir

FILE_STEPS = 50
"""Steps of one file of trajectories."""
PAGES = 5


def make_run(root: Path, name: str, steps: int, seed: int) -> Path:
    """Write a run with some 40 metrics in each step."""
    recipe = from_dict({"run": {"dir": str(root), "name": name}, "data": {"source": "addition"}, "seed": seed})
    with RunDir.create(recipe, "addition-grpo") as run:
        run.set_plan({"steps": steps})
        run.end("finished")
    chance = np.random.default_rng(seed)
    values = chance.random((steps, 40)).round(6)
    with open(run.path / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            row = {f"time/part{i}": v for i, v in enumerate(values[step - 1].tolist())}
            row |= {"reward/mean": step / steps, "loss": 1 / step, "entropy": 0.5, "kl_ref": 0.1, "length/mean": 9.0}
            row |= {"accuracy/heldout": step / steps, "reward/heldout": step / steps} if step % 25 == 0 else {}
            file.write(json.dumps({"step": step, "attempt": 1, "phase": "grpo", "seconds": step * 0.5, **row}) + "\n")
    return run.path


def make_trajectories(run: Path, count: int, each: int = 500) -> None:
    """Write ``count`` trajectories of 40 tokens, ``each`` in a step."""
    folder, chance = run / "trajectories", np.random.default_rng(0)
    for first in range(1, count // each + 1, FILE_STEPS):
        steps = range(first, min(first + FILE_STEPS, count // each + 1))
        rows = len(steps) * each
        tokens = chance.integers(0, 1000, rows * 40, dtype=np.int32)
        offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * 40)
        step = np.repeat(np.asarray(steps, np.int32), each)
        table = pa.table(
            {
                "step": step, "id": np.arange(rows) + first * each, "group": np.arange(rows) // 8 + first * each,
                "prompt": np.arange(rows) // 8, "reward": chance.random(rows, dtype=np.float32),
                "prompt_text": pa.array([f"what is {i // 8}?" for i in range(rows)]),
                "text": pa.array([f"it is {i} " * 4 for i in range(rows)]), "prompt_length": np.full(rows, 8, np.int32),
                "length": chance.integers(1, 33, rows, dtype=np.int32), "finish": pa.array(["stop"] * rows),
                "tokens": pa.ListArray.from_arrays(offsets, pa.array(tokens)), "version": step,
                "logprobs": pa.ListArray.from_arrays(offsets, pa.array(-chance.random(rows * 40, dtype=np.float32))),
            }
        )  # fmt: skip
        path = folder / f"steps-{first:06d}-{steps[-1]:06d}.parquet"
        pq.write_table(conform(table), path, compression="zstd", row_group_size=GROUP)


@contextmanager
def served(root: Path) -> Iterator[tuple[str, psutil.Process, float]]:
    """A server; yields its address, its process, and when it was started."""
    command = [sys.executable, "-m", "tilth", "ui", str(root), "--port", "0", "--no-open"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r"http://[^;]*", process.stderr.readline())
        if found is None:
            raise SystemExit(f"the server does not start: {process.stderr.read()[-2000:]}")
        yield found[0].rstrip("/"), psutil.Process(process.pid), began
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def timed(client: httpx.Client, path: str) -> float:
    """Return the seconds of a request that succeeds."""
    began = time.perf_counter()
    answer = client.get(path)
    took = time.perf_counter() - began
    if answer.status_code != 200:
        raise SystemExit(f"{path}: {answer.status_code} {answer.text[:300]}")
    return took


def views(long: str, large: str, steps: int) -> dict[str, str]:
    """Return addresses with a place for a number that differs in each request: the server keeps no answer to it."""
    return {
        "list": "/?n={n}", "list, searched": "/?q=run-0{n}", "run": f"/runs/{long}?n={{n}}",
        "curves": f"/curves.json?run={long}&metric=loss&metric=reward/mean&metric=time/part3&n={{n}}",
        "curves, smoothed": f"/curves.json?run={long}&metric=loss&smooth={{n}}&x=seconds",
        "newest trajectories": f"/runs/{large}/trajectories?n={{n}}",
        "one step": f"/runs/{large}/trajectories?steps={steps}&n={{n}}",
        "all, by reward": f"/runs/{large}/trajectories?steps=0:&reward=0.5{{n}}:&sort=reward",
        "all, by text": f"/runs/{large}/trajectories?steps=0:&text=is+7{{n}}",
        "all, by a text that is nowhere": f"/runs/{large}/trajectories?steps=0:&text=nowhere+{{n}}",
        "group": f"/runs/{large}/group?step=1&group=500&n={{n}}", "compare": f"/compare?run={long}&run={large}&n={{n}}",
        "health": f"/runs/{long}/health?n={{n}}",
    }  # fmt: skip


def measure_views(root: Path, repeats: int, paths: dict[str, str]) -> list[dict[str, Any]]:
    """Time the list after a start, and each view again and again; the most memory of the server."""
    rows: list[dict[str, Any]] = []
    with served(root) as (address, process, began), httpx.Client(base_url=address, timeout=60) as client:
        up = time.perf_counter() - began
        first = timed(client, "/")
        rows.append({"what": "start of the server", "seconds": up})
        rows.append({"what": "list, first time", "seconds": first, "bar": 1.0})
        complete = time.perf_counter()
        while 'data-unread="0"' not in client.get("/").text:
            time.sleep(0.1)
        rows.append({"what": "list, all runs read", "seconds": time.perf_counter() - complete + first})
        most = process.memory_info().rss
        for name, path in paths.items():
            cold, *took = [timed(client, path.format(n=10 + n)) for n in range(repeats + 1)]
            most = max(most, process.memory_info().rss)
            p95 = float(np.quantile(took, 0.95))
            rows.append({"what": name, "first": cold, "median": float(np.median(took)), "p95": p95, "bar": 0.3})
        rows.append({"what": "server", "rss": most, "bar": 500e6})
    return rows


def measure_pages(root: Path, paths: dict[str, str]) -> list[dict[str, Any]]:
    """Open each view in a browser of its own; the most memory of the process that draws it. Empty without a browser."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("no Chromium or no playwright: the memory of pages is not measured", file=sys.stderr)
        return []
    rows = []
    with served(root) as (address, _, _), sync_playwright() as playwright:
        for name, path in paths.items():
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(address + path.format(n=10), timeout=120_000)
            for figure in page.locator("figure.plotted .canvas").all():
                figure.scroll_into_view_if_needed()  # a chart is drawn where it is seen
            page.wait_for_timeout(2000)
            children = psutil.Process().children(recursive=True)
            most = max(one.memory_full_info().uss for one in children if "--type=renderer" in one.cmdline())
            rows.append({"what": f"page in a browser: {name}", "uss": most, "bar": 300e6})
            browser.close()
    return rows


WORK = """
import sys, time, json
import numpy as np
from tilth.config.load import from_dict
from tilth.runs.directory import RunDir
recipe = from_dict({"run": {"dir": sys.argv[1], "name": "live"}, "data": {"source": "addition"}})
a = np.random.default_rng(0).random((700, 700))
took = []
with RunDir.create(recipe, "addition-grpo") as run:
    for step in range(1, int(sys.argv[2]) + 1):
        began = time.perf_counter()
        while time.perf_counter() - began < 0.01: pass
        for _ in range(int(sys.argv[3])): a @ a
        took.append(time.perf_counter() - began)
        time.sleep(max(0.0, 1.0 - took[-1]))
        row = {f"time/{n}": 0.1 for n in ("generate", "update", "score", "publish", "evaluate", "verify")}
        run.commit_step({"step": step, "phase": "grpo", "loss": 1 / step, "reward/mean": 0.5, **row})
print(json.dumps(took))
"""


def follow(address: str, stop: threading.Event) -> None:
    """Be a page as its script is: read the stream of news, with its points and parts, ask for curves without points."""
    metrics = "".join(f"&metric={name}" for name in ("loss", "reward/mean", "time/update", "time/score", "time/verify"))
    with httpx.Client(base_url=address, timeout=30) as client, suppress(httpx.HTTPError):
        seen = 0
        with client.stream("GET", "/events?run=live") as stream:
            for line in stream.iter_lines():
                if stop.is_set():
                    return
                if not line.startswith("data:"):
                    continue
                news = json.loads(line[5:])
                if news.get("points") is None:
                    client.get(f"/curves.json?run=live&x=step&smooth=0{metrics}&since={seen}")
                seen = news.get("step", seen)


def worked(folder: Path, steps: int, products: int, act: Callable[[], Any]) -> list[float]:
    """Run the steps in a process of its own; ``act`` is called once its run is there."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORK, str(folder), str(steps), str(products)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while not (folder / "live" / "run.json").exists():
            time.sleep(0.05)
        act()
        found: list[float] = json.loads(process.communicate()[0])
    return found[2:]


def measure_cost(steps: int) -> list[dict[str, Any]]:
    """Measure the share of a core of a server whose pages follow a run of steps of a second."""
    rows = []
    for pages in (0, 1, PAGES):
        with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (address, process, _):
            stop = threading.Event()
            watch = Watch(address, process, pages, stop)
            took = worked(Path(folder), steps, 12, watch.begin)
            used = (sum(process.cpu_times()[:2]) - watch.before) / (time.monotonic() - watch.began)
            stop.set()
            rows.append({"what": f"{pages} pages watch", "work": float(np.median(took)), "share": used, "bar": 0.005})
    return rows


class Watch:
    """Pages that begin to follow a run. began, before: when they had begun, and the server's processor time by then."""

    def __init__(self, address: str, process: psutil.Process, pages: int, stop: threading.Event) -> None:
        self.address, self.process, self.pages, self.stop = address, process, pages, stop
        self.began, self.before = 0.0, 0.0

    def begin(self) -> None:
        for _ in range(self.pages):
            threading.Thread(target=follow, args=(self.address, self.stop), daemon=True).start()
        time.sleep(2)  # what a page costs once is not the cost of a step
        self.began, self.before = time.monotonic(), sum(self.process.cpu_times()[:2])


def main() -> None:
    parser = benchmark_parser(__doc__, "few and short runs")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000, help="of the longest run")
    parser.add_argument("--trajectories", type=int, default=1_000_000, help="of the largest run")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.steps, options.trajectories = 12, 2_000, 20_000
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number in range(options.runs - 2):
            make_run(root, f"run-{number:03d}", 60 if options.quick else 300, number)
        make_run(root, "long", options.steps, 1)
        make_trajectories(make_run(root, "large", options.trajectories // 500, 2), options.trajectories)
        paths = views("long", "large", options.trajectories // 1000)
        rows += measure_views(root, 5 if options.quick else 40, paths)
        rows += measure_pages(root, {name: path for name, path in paths.items() if ".json" not in path})
        write_rows(options.json, rows)
    rows += measure_cost(8 if options.quick else 40)
    write_rows(options.json, rows)
    for row in rows:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
