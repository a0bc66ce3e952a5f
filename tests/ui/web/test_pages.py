"""The pages: what they show is what the runs wrote, whoever may not ask is refused, bad input is a 4xx."""

import asyncio
import hashlib
import html
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import aclosing
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import quote

import httpx
import pyarrow.parquet as pq
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from typer.testing import CliRunner

from tests.errors import raises
from tests.examples import examples
from tests.patience import patience
from tests.ui.fake import fake_run
from tests.ui.test_report import ATTACK, Page
from tests.ui.web import runs as made
from tests.ui.web.runs import client_of, folder_of_runs
from tilth.cli.main import app
from tilth.cluster.backends.probe import StatusBoard
from tilth.cluster.backends.session_dir import SessionDir
from tilth.core.errors import DataError
from tilth.process.access import AddressError
from tilth.runs.directory import RunDir
from tilth.runs.readers import read_metrics, read_state, read_trajectories, summarise
from tilth.trace import recorder, span
from tilth.ui import format
from tilth.ui.heat import COOL, WARM
from tilth.ui.html import text_of
from tilth.ui.listing import METRICS, measured, rows_of
from tilth.ui.signs import living
from tilth.ui.tokens import COLOURINGS, colour_of
from tilth.ui.web import times, views
from tilth.ui.web.app import PageServer, make_app
from tilth.ui.web.compare import interval, over_seeds, pages_of, settings_of, student
from tilth.ui.web.follow import FollowedRun, News, RunsFolder, UnknownRun
from tilth.ui.web.metric_table import EVALUATED
from tilth.ui.web.views import lines_of

VIEWS = (
    "/", "/?q=sums&state=finished", "/runs/sums-a-001", "/runs/sums-a-001?q=time&x=seconds&smooth=3",
    "/runs/sums-a-001/trajectories", "/runs/sums-a-001/trajectories?steps=0:&sort=length&down=1",
    "/runs/sums-a-001/group?step=16&group=160", "/runs/sums-a-001/time", "/runs/sums-a-001/health",
    "/runs/agents", "/runs/agents/group?step=1&group=7&by=version", "/runs/agents/time", "/runs/ranks/time",
    "/runs/ranks/health", "/runs/ranks/time?steps=3:6", "/compare?run=sums-a-001&run=agents",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_runs(tmp_path_factory.mktemp("pages") / "runs")


@pytest.fixture(scope="module")
def client(folder):
    return client_of(folder)[0]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine reads no run later than the list is shown."""
    monkeypatch.setattr(views, "PATIENT", patience(20))


def page_of(client, path, status=200):
    answer = client.get(path)
    assert answer.status_code == status, answer.text[:2000]
    return Page(answer.text)


@pytest.mark.parametrize("path", VIEWS)
def test_every_view_is_whole_and_loads_nothing_from_elsewhere(client, path):
    answer = client.get(path)
    page = page_of(client, path)
    assert page.scripts == [] and not re.search(r"https?://|//cdn|@import", answer.text)
    assert not [a for _, a in page.seen for key in a if key.startswith("on")]
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "default-src 'none'" in policy and "unsafe-eval" not in policy
    for link in (a.get("href") or a.get("src") for _, a in page.seen if a.get("href", "").startswith("/static")):
        assert client.get(link).status_code == 200


@pytest.mark.parametrize("path", VIEWS)
def test_every_view_can_be_used_without_a_mouse(client, path):
    """Inputs and what the keyboard reaches have names, and what scrolls sideways is reached by it."""
    answer = client.get(path).text
    page, open_labels = Page(answer), len(re.findall(r"<label>(?:(?!</label>).)*<(?:input|select)", answer))
    inputs = [a for n, a in page.seen if n in ("input", "select") and a.get("type") != "hidden"]
    assert len(inputs) == open_labels + len([a for a in inputs if "aria-label" in a])
    assert all(a.get("aria-label") for _, a in page.seen if "role" in a and a.get("tabindex") == "0")
    assert all(a.get("aria-label") for n, a in page.seen if n == "progress")
    assert [head for head in re.findall("<th([^>]*)></th>", answer) if "aria-label" not in head] == []
    for scrolls in re.findall(r'<div class="scroll"[^>]*>(?:(?!</div>).)*', answer):
        assert "tabindex=" in scrolls.partition(">")[0] or "<a " in scrolls


def test_views_of_a_run_have_titles_of_their_own(client):
    titles = [re.search("<title>(.*?)</title>", client.get(path).text)[1] for path in VIEWS if "?" not in path]
    titles += [re.search("<title>(.*?)</title>", client.get("/compare?run=sums-a-001&run=agents").text)[1]]
    assert len({*titles}) == len(titles) and "Time · ranks · Tilth" in titles


def test_a_refusal_fits_a_phone(client):
    assert 'name="viewport"' in client.get("/runs/none").text and "color-scheme" in client.get("/runs/none").text


def luminance(colour):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, two):
    dark, light = sorted((luminance(one), luminance(two)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_told_from_what_is_behind_it(scheme):
    """The contrast of WCAG 2, level AA, for small text."""
    style = text_of("page.css")
    light, _, dark = style.partition("@media(prefers-color-scheme:dark)")
    found = {}
    for text in (light, dark.partition("}}")[0])[: 1 if scheme == "light" else 2]:
        found |= {name: bytes.fromhex(value) for name, value in re.findall(r"--(\w+):#([0-9a-f]{6})", text)}
        found |= {n: [*map(int, value.split(","))] for n, value in re.findall(r"--(\w+):(\d+,\d+,\d+)", text)}
    text_on = {f"{name} on {back}": contrast(found[name], found[back])
               for name in ("ink", "soft", "leaf", "sky", "clay", "sun", "plum", "teal", "soil")
               for back in ("paper", "card")}  # fmt: skip
    tinted = re.findall(r"\.([\w.]+)\{background:rgba\(var\(--(\w+)\),([\d.]+)\)(?:;\s*color:var\(--(\w+)\))?",
                        style + text_of("web.css").replace(",.down1", "").replace(",.up1", ""))  # fmt: skip
    assert len(tinted) == 17
    for name, tint, share, ink in tinted:
        behind = [float(share) * a + (1 - float(share)) * b for a, b in zip(found[tint], found["card"])]
        text_on[name] = contrast(found[ink or "ink"], behind)
    assert {name: round(value, 2) for name, value in text_on.items() if value < 4.5} == {}


def test_figures_of_a_heat_map_can_be_read_in_the_warmest_cell():
    assert min(contrast(bytes.fromhex("2b261f"), colour) for colour in (COOL, WARM)) > 4.5
    assert "td[style]{color:#2b261f}" in text_of("web.css")


def test_a_page_of_the_list_beyond_the_last_is_the_last(client):
    assert rows_of_page(client, "/?page=2147483647").keys() == rows_of_page(client).keys()


def test_a_page_of_trajectories_beyond_the_last_is_the_last(client):
    path = "/runs/sums-a-001/trajectories?steps=0:"
    last = client.get(f"{path}&page=99999").text
    assert "<tbody>" in last and f"page={2147483646}" not in last
    words = page_of(client, f"{path}&page=99999").words
    assert words == page_of(client, f"{path}&page={int(re.search(r'page ([0-9]+) of', words)[1]) - 1}").words


@pytest.mark.parametrize("steps", ["3:1", "3:3", "-1:4", "x"])
def test_a_range_of_steps_that_is_none_is_refused(client, steps):
    page_of(client, f"/runs/ranks/time?steps={steps}", 422)


def test_assets_are_kept_by_browsers_under_the_hash_of_their_contents(client):
    script = next(a for n, a in page_of(client, "/").seen if n == "script")
    for link in (script["src"], script["data-plotly"]):
        answer = client.get(link)
        assert "immutable" in answer.headers["cache-control"]
        assert hashlib.sha256(answer.content).hexdigest()[:16] in link
    assert client.get("/static/web.js").status_code == 404


def test_the_list_names_what_is_finished_and_what_is_broken(client):
    page = page_of(client, "/")
    assert "sums-a-001" in page.words and "agents" in page.words and "notes" not in page.words.split()
    states = [a["class"] for n, a in page.seen if n == "span" and a.get("class", "").startswith("state ")]
    assert sorted(states) == ["state broken", "state finished", "state finished", "state finished"]
    assert "ranks" not in page_of(client, "/?q=agents").words
    rows = rows_of_page(client)  # of one without an evaluation and rewards, the loss
    assert "loss 0.0833" in rows["ranks"] and "loss" not in rows["sums-a-001"]
    assert "No runs match" in page_of(client, "/?q=nothing-like-this").words


def rows_of_page(client, path="/"):
    """Name -> text of the row of each listed run."""
    text = re.findall(r"<tr>(.*?)</tr>", client.get(path).text.partition("<tbody>")[2])
    return {re.search(r'value="([^"]*)"', row)[1]: re.sub(r"<[^>]*>", " ", row) for row in text}


@pytest.fixture
def counted(monkeypatch):
    """Names of the runs whose rows are computed."""
    found, compute = [], views.row_of_run
    monkeypatch.setattr(views, "row_of_run", lambda run: found.append(run.path.name) or compute(run))
    return found


def test_the_list_computes_rows_anew_where_files_were_written_or_replaced(folder, tmp_path, counted):
    for name in ("ranks", "agents"):
        shutil.copytree(folder / name, tmp_path / name)
    client, metrics = client_of(tmp_path)[0], tmp_path / "ranks" / "metrics.jsonl"
    assert "12" in rows_of_page(client)["ranks"] and rows_of_page(client, "/?q=ranks").keys() == {"ranks"}
    assert sorted(counted) == ["agents", "ranks"]
    text, times = metrics.read_text(), metrics.stat()
    assert '"step": 12' in text
    (tmp_path / "new").write_text(text.replace('"step": 12', '"step": 99'))
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "new").rename(metrics)  # as long, and as old
    assert "99" in rows_of_page(client)["ranks"] and counted[2:] == ["ranks"]
    state = json.loads((tmp_path / "agents" / "run.json").read_text())
    (tmp_path / "agents" / "run.json").write_text(json.dumps(state | {"state": "failed", "error": "a new error"}))
    assert "a new error" in rows_of_page(client)["agents"] and counted[3:] == ["agents"]
    (tmp_path / "agents" / "updates").mkdir(exist_ok=True)
    (tmp_path / "agents" / "updates" / "0001.json").write_text("{")
    assert "broken" in rows_of_page(client)["agents"]
    (tmp_path / "ranks" / "log").symlink_to("/etc/hostname")
    assert "leads out" in rows_of_page(client)["ranks"]
    shutil.rmtree(tmp_path / "ranks")
    assert rows_of_page(client).keys() == {"agents"}


def test_the_list_sees_a_process_that_ended_without_a_word(tmp_path, monkeypatch, counted):
    with made.running(tmp_path) as run:
        client = client_of(tmp_path)[0]
        for _ in range(2):
            read_metrics(run.path)  # waits for what is still to be written
            assert "running" in rows_of_page(client)["live"]
        monkeypatch.setattr("tilth.runs.readers._lives", lambda pid, started: False)
        assert "the command that began it continues it" in page_of(client, "/runs/live").words
        assert "interrupted" in rows_of_page(client)["live"] and counted == ["live", "live"]


@pytest.mark.parametrize("sign", ["heartbeat", "progress", "none"])
def test_a_run_in_a_long_step_gave_its_last_sign_of_life_then(tmp_path, monkeypatch, sign):
    with made.running(tmp_path) as run:
        read_metrics(run.path)
        rows = views.RunList(RunsFolder(tmp_path))
        rows.page("", "", "", 0)
        for name in ("run.json", "metrics.jsonl"):
            os.utime(run.path / name, (1.0, 1.0))
        beats = [{"heartbeat_age": age} for age in (None, 40.0, 3.0)]
        monkeypatch.setattr("tilth.ui.signs.living", lambda state: beats if sign == "heartbeat" else [])
        if sign == "progress":
            (run.path / "progress.json").write_text("{}")
        else:
            (run.path / "progress.json").unlink(missing_ok=True)
        age = rows.page("", "", "", 0)["rows"][0]["age"]
        assert 3.0 <= age < 40 if sign == "heartbeat" else (age < patience(20)) == (sign == "progress")


def test_the_list_reads_the_health_of_a_run_where_it_was_written(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr("tilth.ui.signs.LATE", 1e9)
    monkeypatch.setattr("tilth.ui.signs.living", lambda state: looks.append(state) or [{"heartbeat_age": 1.0}])
    session = tmp_path / "session"
    session.mkdir()
    (session / "health.json").write_text("{}")
    with made.running(tmp_path / "runs") as run:
        state = json.loads((run.path / "run.json").read_text())
        (run.path / "run.json").write_text(json.dumps(state | {"session": str(session)}))
        rows = views.RunList(RunsFolder(tmp_path / "runs"))
        (session / "health.json").unlink()
        rows.page("", "", "", 0)  # before a rank has written any
        looks.clear()
        for count, text in ((1, "{}"), (1, "{}"), (2, "{ }"), (2, "{ }")):
            if not (session / "health.json").exists() or text != (session / "health.json").read_text():
                (session / "health.json").write_text(text)
            rows.page("", "", "", 0)
            assert len(looks) == count
        monkeypatch.setattr("tilth.ui.signs.LATE", 0.5)  # no rank gives a sign, or a stopped controller writes none
        rows.page("", "", "", 0)
        assert len(looks) == 3


def test_the_list_keeps_no_row_that_is_older_than_the_files(tmp_path, monkeypatch):
    """A summary of a running run that was not computed anew, as that takes long, is shown once."""
    monkeypatch.setattr("tilth.ui.web.follow.SHARE", 1e9)
    with made.running(tmp_path) as run:
        runs = RunsFolder(tmp_path)
        rows = views.RunList(runs)
        assert rows.page("", "", "", 0)["rows"][0]["step"] == 1
        run.commit_step({"step": 2, "phase": "grpo", "loss": 0.5})
        read_metrics(run.path)
        assert rows.page("", "", "", 0)["rows"][0]["step"] == 1
        followed = runs.get("live")
        followed._summary = (*followed._summary[:2], 0.0)  # it is due
        assert rows.page("", "", "", 0)["rows"][0]["step"] == 2


def test_metrics_are_read_at_once_and_a_file_as_long_and_as_old_in_their_place_too(tmp_path):
    with made.running(tmp_path) as run:
        followed = RunsFolder(tmp_path).get("live")
        assert len(followed.refresh()) == 1
        run.commit_step({"step": 2, "phase": "grpo", "loss": 0.5})
        read_metrics(run.path)
        assert len(table := followed.refresh()) == 2 and followed.refresh() is table
        file, times = run.path / "metrics.jsonl", (run.path / "metrics.jsonl").stat()
        (tmp_path / "new").write_text(file.read_text().replace('"loss": 0.5', '"loss": 0.7'))
        os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
        (tmp_path / "new").rename(file)
        assert followed.refresh().column("loss").tolist() == [1.0, 0.7]


def test_records_are_kept_of_runs_that_are_watched_alone(tmp_path):
    """Those of all runs of a list would be most of the server's memory."""
    with made.running(tmp_path) as run:
        followed = RunsFolder(tmp_path).get("live")
        assert followed.summary()["steps"] == 1 and not followed._new
        assert followed.look().progress.record["reward/mean"] == 0.5 and not followed._new  # it has had them
        run.commit_step({"step": 2, "phase": "grpo", "loss": 0.25})
        read_metrics(run.path)
        followed.refresh()
        assert [record["loss"] for record in followed._new] == [0.25] == [followed.look().progress.record["loss"]]


def test_a_folder_without_runs_and_one_that_is_none(tmp_path):
    assert "tilth run addition-grpo" in page_of(client_of(tmp_path)[0], "/").words
    with raises(DataError, "RUNS_DIR"):
        RunsFolder(tmp_path / "none")


def test_the_folder_of_a_run_shows_that_run(folder):
    client = client_of(folder / "agents")[0]
    assert "agents" in page_of(client, "/").words and page_of(client, "/runs/agents")


def test_numbers_are_those_of_the_summary(client, folder):
    s = summarise(folder / "sums-a-001")
    words = page_of(client, "/runs/sums-a-001").words
    assert re.search(r"Held-out accuracy \S[^%]* 71.3 % ", words)  # beside its curve
    for want in (f"{100 * s['accuracy_last']:.1f} %", f"{s['tokens_per_second_generate']:,.0f}", "742 MB", "771 MB",
                 "AMD EPYC 7B13", "806,000", f"{s['mismatch_max']:.1e}"):  # fmt: skip
        assert want in words, want
    assert RunsFolder(folder).get("sums-a-001").summary() == s


@pytest.mark.parametrize(("end", "last"), [("interrupted", 404), ("finished", 16)])
def test_progress_is_one_number_on_the_list_the_page_of_a_run_and_in_tilth_show(tmp_path, end, last):
    """Steps of all phases, as they took or are planned: a warm-up of 250 steps ended after 4, and a run may stop."""
    run = fake_run(tmp_path, warmup=4, steps=12, end=end)
    shown, client = CliRunner().invoke(app, ["show", str(run)]).output, client_of(tmp_path)[0]
    page = page_of(client, f"/runs/{run.name}")
    (bar,) = [a for n, a in page.seen if n == "progress"]
    assert f"16 of {last}" in rows_of_page(client)[run.name] and f"16 of {last} in 0:0" in shown
    assert f"step 16 of {last}, GRPO" in page.words and (bar["value"], bar["max"]) == ("16", str(last))
    assert f"Steps 16 of {last}: 4 warm-up, 12 GRPO" in page.words
    assert not re.search("of (at most )?(400|650)", page.words)


def random_records(chance):
    """Records of a run's steps, of which each has some of the metrics; some steps were run again by a later attempt."""
    names = {
        "reward/mean": 1.0, "loss": 9.0, "reward/heldout": 1.0, "accuracy/heldout": 1.0, "loss/heldout": 5.0,
        "tokens_per_second/generate": 1e5, "tokens_per_second/train": 1e4, "mismatch/max": 1e-3, "memory/peak": 1e10,
        "time/step": 20.0, "time/generate": 9.0, "time/update": 9.0,
    }  # fmt: skip
    measured, steps = chance.sample([*names], chance.randrange(len(names) + 1)), chance.randrange(1, 40)
    again = range(chance.randrange(1, steps + 1), steps + 1) if chance.random() < 0.3 else ()
    at = [(step, 1) for step in range(1, steps + 1)] + [(step, 2) for step in again]
    return [
        {"step": step, "attempt": attempt, "phase": "warmup" if step < steps // 3 else "grpo",
         "seconds": step * chance.uniform(0.5, 200.0), "reward/missing": chance.randrange(3), "samples": 8}
        | {name: chance.random() * names[name] for name in measured if chance.random() < 0.7}
        for step, attempt in at
    ]  # fmt: skip


def test_numbers_of_random_runs_are_those_of_tilth_show(tmp_path, monkeypatch):
    with RunDir.create(made.named(tmp_path, "run-00"), "run-00") as run:
        run.set_plan({"steps": 40})
        run.end("finished")
    chance, client, titles = random.Random(0), client_of(tmp_path)[0], set()
    for number in range(50):
        path = tmp_path / f"run-{number:02d}"
        if number:
            shutil.copytree(run.path, path)
        records = random_records(chance)
        made.lines(path / "metrics.jsonl", *records)
        metric = next((m for m in ("reward/heldout", "accuracy/heldout", "loss/heldout") if m in records[-1]), None)
        if metric:
            state = json.loads((path / "run.json").read_text())
            best = {"metric": metric, "step": records[-1]["step"], "value": records[-1][metric] * (number % 3 > 0)}
            (path / "run.json").write_text(json.dumps(state | {"best": best}))
    rows = rows_of_page(client)
    for name, row in rows.items():
        found = CliRunner().invoke(app, ["show", str(tmp_path / name), "--json"])
        s = json.loads(found.stdout)
        text = client.get(f"/runs/{name}").text
        tiles = dict(re.findall(r'<div class="tile[^"]*"><span>([^<]*)</span><b[^>]*>([^<]*)</b>', text))
        rates = {what: s[f"tokens_per_second_{what}"] or 0 for what in ("generate", "train")}
        expected = {
            "Steps": f"{s['steps']:,}", "Time": format.timed(s["seconds"]),
            "Memory, peak": format.size(s["memory_peak"]),
            "Generation": f"{rates['generate']:,.0f}", "Training": f"{rates['train']:,.0f}",
            "Missing rewards": f"{s['rewards_missing']:,}", "Log-prob mismatch": f"{s['mismatch_max'] or 0:.1e}",
        }  # fmt: skip
        if best := s["best"]:
            loss = best["metric"] == "loss/heldout"
            title = "held-out loss" if loss else format.MEASURES.get(best["metric"], "order of pairs")
            shown = f"{best['value']:.4f}" if loss else format.figure(best["metric"], best["value"])
            expected[f"Best {title}"] = shown
        titles |= tiles.keys()
        assert {**expected, **tiles} == expected, name
        key = next((key for key in METRICS if s[key] is not None), None)
        shown = key and measured({"metric": METRICS[key], "value": s[key]})
        assert f"{s['steps']:,}" in row and (not shown or shown in row), name
    assert len(rows) == 50 and len(titles) == 10


# ---- curves ----


def test_how_far_samples_were_behind_and_their_lengths_are_shown(client):
    words = page_of(client, "/runs/agents").words
    assert "versions behind mean 1, at most 2" in words and "0: 75 %, 2: 25 %" in words
    assert "5 ended, 4.5 tokens long; 1 dropped" in words
    assert "versions behind" not in page_of(client, "/runs/ranks").words
    assert "actor stall 25 % admitted 6 finished 5 KV in use at most 50 %" in words


def test_curves_are_the_metrics_along_each_axis(client, folder):
    records = read_metrics(folder / "sums-a-001")
    found = client.get("/curves.json?run=sums-a-001&metric=loss&metric=reward/mean").json()["lines"]
    assert found[0]["y"] == [r["loss"] for r in records] and found[0]["step"] == [r["step"] for r in records]
    assert found[1]["x"] == [r["step"] for r in records if "reward/mean" in r]
    seconds = client.get("/curves.json?run=sums-a-001&metric=loss&x=seconds").json()["lines"][0]
    tokens = client.get("/curves.json?run=sums-a-001&metric=loss&x=tokens").json()["lines"][0]
    assert seconds["x"] == [r["seconds"] for r in records]
    assert tokens["x"][-1] == pytest.approx(sum(r["tokens/trained"] for r in records))
    newer = client.get("/curves.json?run=sums-a-001&metric=loss&since=10").json()["lines"][0]
    assert newer["x"] == [r["step"] for r in records if r["step"] > 10]
    soft = client.get("/curves.json?run=sums-a-001&metric=loss&smooth=2").json()["lines"][0]["y"]
    assert soft[5] == pytest.approx(sum(r["loss"] for r in records[3:6]) / 3)


def test_a_spike_of_a_long_curve_is_kept(tmp_path):
    with RunDir.create(made.named(tmp_path, "long"), "long") as run:
        pass
    made.lines(run.path / "metrics.jsonl", *({"step": i, "loss": 9.0 if i == 7777 else 1.0} for i in range(1, 20_001)))
    found = client_of(tmp_path)[0].get("/curves.json?run=long&metric=loss").json()["lines"][0]
    assert len(found["x"]) < 900 and found["points"] == 20_000
    assert (found["x"][0], found["x"][-1], found["x"][found["y"].index(9.0)]) == (1, 20_000, 7777)


def test_recoveries_are_marks(folder, tmp_path):
    shutil.copytree(folder / "ranks", tmp_path / "ranks")
    one = {
        "time": "2026-01-01T00:00:00+00:00",
        "step": 5,
        "kind": "crash",
        "evidence": "x",
        "lost": 1.0,
        "seconds": 2.0,
    }
    made.lines(tmp_path / "ranks" / "recoveries.jsonl", one)
    client = client_of(tmp_path)[0]
    (mark,) = client.get("/curves.json?run=ranks&metric=loss").json()["marks"]
    assert mark["x"] == 5 and mark["kind"] == "recovery" and "crash" in mark["text"]
    assert "1 failure" in page_of(client, "/runs/ranks/health").words


def test_evaluations_are_marks_on_every_curve_and_not_more_than_can_be_told_apart(tmp_path, monkeypatch):
    with RunDir.create(made.named(tmp_path, "evaluated"), "evaluated") as run:
        pass
    names = [*EVALUATED, "loss"]
    made.lines(run.path / "metrics.jsonl", *({"step": i, "seconds": i / 4, "loss": 1.0, names[i % 5]: 0.5}
                                             for i in range(1, 13)))  # fmt: skip
    client, steps = client_of(tmp_path)[0], [i for i in range(1, 13) if i % 5 != 4]
    for most, kept in ((len(steps), steps), (4, [1, 5, 8, 12])):
        monkeypatch.setattr(views, "MARKS", most)
        for axis, scale in (("step", 1), ("seconds", 4)):
            marks = client.get(f"/curves.json?run=evaluated&metric=loss&x={axis}&smooth={most}").json()["marks"]
            assert [mark["x"] * scale for mark in marks] == kept
            assert {mark["kind"] for mark in marks} == {"evaluation"}


# ---- trajectories ----


def test_a_page_has_so_many_tokens_at_most_whatever_is_asked(client, monkeypatch):
    whole = client.get("/runs/agents/group?step=1&group=7&tokens=50000").text
    monkeypatch.setattr("tilth.ui.web.views.PAGE_TOKENS", 8)
    monkeypatch.setattr("tilth.ui.web.app.SECONDS", 0.0)
    assert len(client.get("/runs/agents/group?step=1&group=7&tokens=50000").text) < len(whole)


def test_the_worst_answers_of_the_newest_step_come_first(client, folder):
    newest = max(row["step"] for row in read_trajectories(folder / "sums-a-001", columns=["step"]).to_pylist())
    page = page_of(client, "/runs/sums-a-001/trajectories")
    rewards = [a["class"] for n, a in page.seen if n == "a" and a.get("class", "").startswith("badge")]
    assert len(rewards) == 32 and rewards == sorted(rewards, key=["badge wrong", "badge right"].index)
    assert f"32 samples of step {newest}" in page.words


def test_samples_that_are_a_part_of_their_step_are_called_that(client, folder):
    mean = format.number(read_metrics(folder / "sums-a-001")[-1]["reward/mean"])
    for query in ("", "?reward=:0.5"):
        words = page_of(client, f"/runs/sums-a-001/trajectories{query}").words
        assert f"32 of the step's 512 samples were kept; its mean reward is {mean}" in words
    words = page_of(client, "/runs/agents/trajectories").words
    assert "4 of the step's 4 samples are on disk; its mean reward is 0.4" in words
    assert "were kept" not in page_of(client, "/runs/sums-a-001/trajectories?steps=0:").words


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run with all that a token can have."""
    return made.agents(tmp_path_factory.mktemp("learned"), "learned", learned=True)


OF_FILE = {
    "logprob": lambda row: row["logprobs"], "mask": lambda row: row["mask"], "advantage": lambda row: row["advantages"],
    "version": lambda row: [row["version"]] * 7,
    "difference": lambda row: [a - b for a, b in zip(row["trainer_logprobs"], row["logprobs"])],
}  # fmt: skip


@pytest.mark.parametrize("by", OF_FILE)
def test_colours_and_numbers_are_those_of_the_file(learned, by):
    (path,) = (learned / "trajectories").glob("*.parquet")
    rows = sorted(pq.read_table(path).to_pylist(), key=lambda r: (r["reward"] is None, -(r["reward"] or 0)))
    page = page_of(client_of(learned)[0], f"/runs/learned/group?step=1&group=7&by={by}")
    shown = [a for n, a in page.seen if n == "span" and "token" in a.get("title", "")]
    wanted = [(r["tokens"][i], OF_FILE[by](r)[i]) for r in rows for i in (2, 3, 5, 6)]
    assert len(shown) == len(wanted) == 16
    for found, (token, value) in zip(shown, wanted):
        assert found["title"] == f"{COLOURINGS[by]} {value:.4g}, token {token}"
        assert found["class"].split()[0] == colour_of(by, value)


def test_the_colour_of_a_number():
    edges = {"logprob": (math.log(0.995), math.log(0.95), math.log(0.6), math.log(0.3), -9.0),
             "difference": (0.0, -1e-5, 1e-5, 0.1, -2.0), "advantage": (0.0, 0.2, -0.2, 0.6, -9.0),
             "version": (0, 1, 7, 8, 17), "mask": (0, 1)}  # fmt: skip
    assert {by: [colour_of(by, value) for value in values] for by, values in edges.items()} == {
        "logprob": ["p0", "p1", "p3", "p4", "p7"], "difference": ["p0", "p1", "p1", "p5", "p7"],
        "advantage": ["z", "up0", "down0", "up1", "down3"], "version": ["v0", "v1", "v7", "v0", "v1"],
        "mask": ["z", "up2"],
    }  # fmt: skip


def test_turns_calls_and_rewards_of_an_episode(client):
    page = page_of(client, "/runs/agents/group?step=1&group=7")
    assert "how many <b>nuts</b>?" in "".join(page.text) and "tool, 1 tokens: ⟨5⟩" in page.words
    assert "reward 0.25" in page.words and "format 0.5" in page.words and "missing" in page.words


@pytest.mark.parametrize("by", ["advantage", "difference"])
def test_a_colouring_that_the_run_did_not_write_falls_back_to_log_probs(client, by):
    usual, page = (page_of(client, f"/runs/agents/group?step=1&group=7{given}") for given in ("", f"&by={by}"))
    titles, wanted = ([a["title"] for n, a in one.seen if "token" in a.get("title", "")] for one in (page, usual))
    assert titles == wanted and titles[0].startswith(COLOURINGS["logprob"])
    links = [a["href"] for n, a in page.seen if "by=" in a.get("href", "")]
    assert links and not [link for link in links if f"by={by}" in link]
    assert f"did not write {COLOURINGS[by]}" in page.words and "probability" in page.words


def test_text_of_models_is_text(tmp_path):
    odd = ATTACK + "\u202egnihton\u202c" + "x" * (1 << 20)
    fake_run(tmp_path, warmup=1, steps=1, hostile=odd)
    client = client_of(tmp_path)[0]
    for path in ("trajectories", "group?step=2&group=20", "trajectories?text=gnihton"):
        answer = client.get(f"/runs/addition-grpo-001/{path}")
        page = Page(answer.text)
        assert answer.status_code == 200 and page.scripts == [] and "img" not in [n for n, _ in page.seen]
        assert len(answer.content) < 1 << 20
    assert ATTACK[:40] in "".join(page.text)


# ---- compare ----


def test_runs_are_compared_by_keys_and_results(tmp_path):
    for name, seed, rate in (("a", 1, 0.001), ("b", 2, 0.001), ("c", 1, 0.5)):
        made_run = fake_run(tmp_path, warmup=2, steps=5, seed=seed)
        made_run.rename(tmp_path / name)
        text = (tmp_path / name / "recipe.toml").read_text()
        text = re.sub(r"(?m)^seed = .*$", f"seed = {seed}", text)
        (tmp_path / name / "recipe.toml").write_text(re.sub(r"(?m)^lr = .*$", f"lr = {rate}", text))
    client = client_of(tmp_path)[0]
    page = page_of(client, "/compare?run=a&run=c")
    rows = re.findall(r"<tr><td><code>([^<]*)</code></td>", client.get("/compare?run=a&run=c").text)
    assert [row for row in rows if row.endswith("lr")] and "seed" not in rows and "0.001" in page.words
    state = json.loads((tmp_path / "c" / "run.json").read_text())
    state["environment"] |= {"cpu": "another", "packages": {"torch": "2.12.0"}}
    (tmp_path / "c" / "run.json").write_text(json.dumps(state))
    _, recipe, machine = re.split("<h3>", client.get("/compare?run=a&run=c&q=loss").text.partition("Curves")[0])
    assert "optimizer.lr" in recipe and "version of" not in recipe and "cpu" not in recipe
    assert "version of torch" in machine and "another" in machine and "optimizer.lr" not in machine
    seeds = page_of(client, "/compare?run=a&run=b&run=c").words
    assert "Over seeds" in seeds and "Over seeds" not in page.words
    lines = client.get("/curves.json?run=a&run=b&metric=loss").json()["lines"]
    assert [line["run"] for line in lines] == ["a", "b"]
    page_of(client, "/compare?run=a", 422)
    page_of(client, "/compare?run=a&run=no", 404)


def test_an_interval_over_seeds_is_students():
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-4))
    assert interval([1.5]) == (1.5, None)
    for degrees, quantile in ((7, 2.365), (8, 2.306), (9, 2.262), (30, 2.042)):
        assert student(degrees) == pytest.approx(quantile, abs=1e-3)


def test_a_sweep_is_a_tag_of_its_runs_and_compares_them_by_settings_the_best_first(tmp_path, monkeypatch):
    for name, seed, rate in (("a", 1, 0.001), ("b", 2, 0.001), ("c", 1, 0.5), ("d", 2, 0.5), ("e", 1, 0.5)):
        fake_run(tmp_path, warmup=2, steps=5 + 5 * (rate < 0.5), seed=seed).rename(tmp_path / name)
        text = re.sub(r"(?m)^seed = .*$", f"seed = {seed}", (tmp_path / name / "recipe.toml").read_text())
        (tmp_path / name / "recipe.toml").write_text(re.sub(r"(?m)^lr = .*$", f"lr = {rate}", text))
        state = json.loads((tmp_path / name / "run.json").read_text()) | {"sweep": "" if name == "e" else "rates"}
        (tmp_path / name / "run.json").write_text(json.dumps(state))
    client, root = client_of(tmp_path)[0], RunsFolder(tmp_path)
    assert "rates (4 runs)" in page_of(client, "/").words
    assert "4 of 5" in page_of(client, "/?tag=rates").words
    words = page_of(client, "/compare?sweep=rates").words
    assert "Over seeds" in words and "rates 4 runs" in words
    found = over_seeds(runs := [root.get(name) for name in root.of_sweep("rates")], [*map(settings_of, runs)])
    assert [row["seeds"] for row in found] == [[1, 2], [1, 2]] and found[0]["final"][0] > found[1]["final"][0]
    assert all([*row["values"]][-1].endswith("lr") for row in found)
    page_of(client, "/compare?sweep=no", 422)
    monkeypatch.setattr("tilth.ui.web.compare.OF_SWEEP", 2)
    for number, (there, gone) in enumerate([("ab", "cd"), ("cd", "ab")]):
        text = client.get(f"/compare?sweep=rates&page={number}").text
        assert all(f'href="/runs/{one}"' in text for one in there)
        assert not any(f'href="/runs/{one}"' in text for one in gone)
        words = page_of(client, f"/compare?sweep=rates&page={number}").words
        assert "rates 4 runs" in words and f"2 runs on page {number + 1}, by their names: 1 2" in words
        assert f'name="page" value="{number}"' in text


def test_seeds_of_a_setting_are_on_one_page_of_a_sweep_whatever_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.compare.OF_SWEEP", 3)
    runs = {f"s-{rate}-seed{seed}": (rate, seed) for seed in (0, 1, 10) for rate in (1, 1.5)}
    runs["s-2-seed0"], runs["s-learning_rate_of_an_earlier_version"] = (2, 0), runs.pop("s-1.5-seed10")
    for name, (rate, seed) in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(f"seed = {seed}\n[optimizer]\nlr = {rate}\n")
        (tmp_path / name / "run.json").write_text(json.dumps({"state": "finished", "digest": "", "sweep": "s"}))
    root = RunsFolder(tmp_path)
    followed = [*map(root.get, root.of_sweep("s"))]
    first, second = ([f"s-{rate}-seed{seed}" for seed in (0, 1, 10)] for rate in (1, 1.5))
    pages = [first, [*second[:2], "s-learning_rate_of_an_earlier_version"], ["s-2-seed0"]]
    assert pages_of("s", followed) == pages
    (tmp_path / "s-2-seed0" / "recipe.toml").write_text("seed =")  # the page with it reports it
    assert pages_of("s", followed) == pages
    monkeypatch.setattr("tilth.ui.web.compare.OF_SWEEP", 2)
    assert [len(page) for page in pages_of("s", followed)] == [2, 1, 2, 2]


PLAIN, DRAWN = {"source": "a.jsonl"}, {"source": "b.jsonl", "transform": "shuffled"}


@pytest.mark.parametrize(
    ("mixture", "first", "second", "rows"),
    [
        (None, "a", "b", 2),
        ([PLAIN, PLAIN], "a, b", "a, c", 2),
        ([PLAIN, DRAWN], "a, b", "a, c", 1),
        ([PLAIN, {**DRAWN, "transform": "", "filter": "some"}], "a, b", "a, c", 1),
        ([DRAWN], "pairs b", "pairs c", 1),
        ([PLAIN, DRAWN], "a, b", "c, b", 2),
        ([DRAWN, PLAIN], "b, a, held out: h", "c, a, held out: h", 1),
        ([DRAWN, PLAIN], "b, a, held out: h", "c, a, held out: i", 2),
        ([PLAIN, DRAWN], "whole", "other", 1),  # of flow pretrain
        ([{"source": "chain"}, DRAWN], "chain of 4 steps, 0.5 flawed, b", "chain of 4 steps, 0.5 flawed, c", 1),
    ],
)
def test_data_that_the_seed_draws_make_no_other_setting_and_changed_data_do(two, mixture, first, second, rows):
    more = {"data.mixture": mixture, "data.heldout": "h.jsonl" if "held out" in first else ""}
    keys = [{"seed": seed, "input data": data, **more} for seed, data in ((1, first), (2, second))]
    assert len(over_seeds(two, keys)) == rows


def test_one_seed_with_two_sets_of_data_is_no_setting(two):
    """They were changed between the runs, whatever the seed draws."""
    keys = [{"seed": 1, "data.mixture": [DRAWN], "input data": data} for data in ("b", "c")]
    assert [row["seeds"] for row in over_seeds(two, keys)] == [[1], [1]]
    assert len(over_seeds(two, [keys[0], keys[0]])) == 1


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two runs with an evaluation."""
    root = tmp_path_factory.mktemp("two")
    return [FollowedRun(fake_run(root, warmup=1, steps=2, seed=seed)) for seed in (1, 2)]


def test_curves_and_their_version_are_of_one_table(tmp_path):
    """A line that is committed between them must be missing from both."""
    with made.running(tmp_path) as run:
        followed = RunsFolder(tmp_path).get("live")
        table = followed.refresh()
        before = table.version
        run.commit_step({"step": 2, "phase": "grpo", "loss": 0.5})
        assert followed.refresh().version != before == table.version
        assert lines_of("live", table, ["loss"], "step", 0, -1.0)[0]["y"] == [1.0]


# ---- time and health ----


def test_a_slow_rank_is_named_with_its_evidence(client):
    words = page_of(client, "/runs/ranks/time").words
    assert "slow: rank 1 costs 0.3" in words and "takes 1.76 times that of its peers" in words
    found = client.get("/runs/ranks/lanes.json?step=3").json()
    assert found["names"] == ["controller", "rank 0", "rank 1"] and len(found["codes"][0]) == 1000
    zoomed = client.get("/runs/ranks/lanes.json?step=3&begin=0.5&end=0.75").json()
    assert zoomed["seconds"] == pytest.approx(0.25) and zoomed["begin"] == pytest.approx(0.5)
    assert "no events" in page_of(client, "/runs/agents/time").words
    page = page_of(client, "/runs/ranks")
    assert "slow: rank 1 costs 0.32 s of each step of 1 s" in page.words
    assert ("a", {"href": "/runs/ranks/time"}) in page.seen
    assert "slow: rank 1 costs 0.32 s" in page_of(client, "/runs/ranks/health").words
    assert not [run for run in ("agents", "sums-a-001") if "slow:" in page_of(client, f"/runs/{run}").words]
    assert "slow: rank 1 costs 0.32 s" in page_of(client, "/runs/ranks/time?steps=2:12").words
    few = page_of(client, "/runs/ranks/time?steps=2:5").words
    assert "slow: rank" not in few and "No rank costs" not in few  # too few steps to tell


def test_a_marked_pace_is_no_slow_rank_where_it_costs_little(tmp_path):
    made.ranks(tmp_path, slow=1.18, name="uneven")
    client = client_of(tmp_path)[0]
    for query in ("", "?steps=1:13"):
        page = client.get(f"/runs/uneven/time{query}").text
        assert "No rank costs 10 % of a step." in page and 'class="clay">1.1' in page


@pytest.mark.parametrize(("query", "name"), [("", "slow_rank"), ("?steps=2:12", "slow_in")])
def test_pictures_are_shown_of_steps_without_a_verdict(folder, monkeypatch, query, name):
    monkeypatch.setattr(times, name, Mock(side_effect=DataError("step 2 was profiled", key="steps.profiled")))
    times._newest_slow.cache_clear()
    words = page_of(client_of(folder)[0], f"/runs/ranks/time{query}").words
    assert "step 2 was profiled" in words and "No rank costs" not in words
    assert "of attempt 1" in words and "Timeline" in words
    times._newest_slow.cache_clear()


def test_requests_at_once_look_for_a_slow_rank_once(folder, monkeypatch):
    looks, gate = [], threading.Barrier(4)

    def look(run):
        looks.append(run)
        time.sleep(0.05)
        return None, -1

    def ask(_):
        gate.wait()
        return times.slow_rank_of(run)

    monkeypatch.setattr(times, "slow_rank", look)
    times._newest_slow.cache_clear()
    run = RunsFolder(folder).get("ranks")
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(ask, range(4))] == [""] * 4
    assert len(looks) == 1
    times._newest_slow.cache_clear()


def test_older_steps_are_read_by_range(client):
    words = page_of(client, "/runs/ranks/time?steps=3:6").words
    assert "Steps 3 to 5 of attempt 1" in words
    assert "Steps 7 to 8 of attempt 1" in page_of(client, "/runs/ranks/time?steps=7:9").words
    assert "has no events of steps 400:402" in page_of(client, "/runs/ranks/time?steps=400:402").words


def test_the_last_step_of_a_file_of_events_is_in_its_metadata(tmp_path, monkeypatch):
    with recorder.to(tmp_path, interval=60):
        for number in (3, 12, 7):
            with span("step", step=number):
                pass
    (path,) = tmp_path.glob("*.parquet")
    read = Mock(wraps=pq.read_table)
    monkeypatch.setattr(pq, "read_table", read)
    assert times._last_step(path) == 12 and not read.called
    pq.write_table(pq.read_table(path), path, write_statistics=False)  # as earlier versions wrote it
    assert times._last_step(path) == 12 and read.call_count == 2


def test_a_torn_last_file_of_a_process_is_left_out(folder, tmp_path):
    shutil.copytree(folder / "ranks", tmp_path / "ranks")
    (tmp_path / "ranks" / "events" / "attempt-1-rank-0-000003.parquet").write_bytes(b"PAR1 torn")
    client = client_of(tmp_path)[0]
    assert "of attempt 1" in page_of(client, "/runs/ranks/time?steps=10:14").words
    assert client.get("/runs/ranks/lanes.json?step=12").status_code == 200


def test_warnings_of_a_run_without_ranks_are_among_its_verdicts(tmp_path):
    with made.running(tmp_path) as run:
        for step in (1, 1200):
            run.warn(step, "every reward was <0>")
        read_metrics(run.path)
        words = page_of(client := client_of(tmp_path)[0], "/runs/live/health").words
    assert "step 1,200 · warning: every reward was <0>" in words and "No warning" not in words
    assert "After step 1; 1,200: every reward was <0>." in page_of(client, "/runs/live").words


def test_the_steps_of_a_running_run_are_those_of_its_head(tmp_path, monkeypatch):
    """They come with each news, the other tiles and what depends on the summary now and then."""
    monkeypatch.setattr("tilth.ui.web.follow.SHARE", 1e9)
    with made.running(tmp_path) as run:
        followed = RunsFolder(tmp_path).get("live")
        assert followed.summary()["steps"] == 1
        run.commit_step({"step": 2, "phase": "grpo", "loss": 0.5, "phase_step": 1, "phase_steps": 9})
        read_metrics(run.path)
        assert (followed.summary()["steps"], views.standing(followed)["s"]["steps"]) == (1, 2)
        assert 'id="done">2</b>' in views.tiles(followed)


def test_health_has_a_heat_map_and_the_verdicts(client):
    page = page_of(client, "/runs/ranks/health")
    cells = [a["style"] for n, a in page.seen if n == "td" and "style" in a]
    assert cells and len(set(cells)) > 1 and "warning: slow" in page.words and "dp=1" in page.words


def test_pictures_of_the_newest_steps_are_made_anew_where_events_or_clocks_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.app.SECONDS", 0.0)
    run, other = made.ranks(tmp_path / "runs"), made.ranks(tmp_path / "others", slow=1.0)
    client, compute, read = client_of(tmp_path / "runs")[0], times.account, []
    monkeypatch.setattr(times, "account", lambda *given: read.append(1) or compute(*given))
    for view in ("time", "health", "time", "health"):
        assert "slow: rank 1" in page_of(client, f"/runs/ranks/{view}").words
    assert len(read) == 1
    rounds = run / "events" / "attempt-1-clocks.jsonl"
    with open(rounds, "ab") as file:
        file.write(b"\n")
    page_of(client, "/runs/ranks/time")
    assert len(read) == 2
    for file in (other / "events").glob("*.parquet"):
        file.rename(run / "events" / file.name)
    for view in ("time", "health"):
        assert "slow: rank 1" not in page_of(client, f"/runs/ranks/{view}").words


@pytest.mark.slow
def test_what_if_is_answered_by_a_process_of_its_own(client):
    assert "rank 1" in page_of(client, "/runs/ranks/whatif?first=3&last=10").words


# ---- news ----


def read_event(event):
    (line,) = (line for line in event.decode().splitlines() if line.startswith("data: "))
    return json.loads(line.removeprefix("data: "))


def news_of(folder, name, act, count, *, each=False):
    """The first ``count`` news of a run, read by two pages at once; ``act`` is called after the first one, or after
    each but the last."""

    async def read():
        runs = RunsFolder(folder)
        news = News(runs, lambda name, look: name, {"tiles": lambda run: "tiles"})
        async with aclosing(news.of(name)) as one, aclosing(news.of(name)) as two:
            found = []
            for number in range(count):
                pair = await asyncio.wait_for(asyncio.gather(anext(one), anext(two)), patience(20))
                assert pair[0] == pair[1] and len(news._tasks) == 1
                found.append(read_event(pair[0]))
                if not number or (each and number < count - 1):
                    act()
        assert not news._tasks
        return found

    return asyncio.run(read())


def test_a_step_and_the_end_of_a_run_are_news(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.EVERY", 0.05)
    monkeypatch.setattr("tilth.ui.web.follow.FRESH", 0.0)
    with made.running(tmp_path) as run:
        first, second = news_of(tmp_path, "live", lambda: run.commit_step({"step": 2, "phase": "grpo", "loss": 0.5}), 2)
        assert (first["step"], second["step"]) == (1, 2) and second["state"] == "running"
        assert second["before"] == first["version"] and second["points"] == [read_metrics(run.path)[-1]]
        assert (first["metrics"], second["metrics"]) == (3, 3)  # reward, loss, tokens
        assert second["version"][1] > first["version"][1] and first["version"][0] == second["version"][0]
        _, ended = news_of(tmp_path, "live", lambda: run.end("finished"), 2)
        assert ended["state"] == "finished"


def test_news_have_the_points_of_added_steps_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.FRESH", 0.0)
    news, before = News(RunsFolder(tmp_path), lambda name, look: name, {}), None

    def points():
        nonlocal before
        steps = [record["step"] for record in read_metrics(run.path)]  # waits for what is still to be written
        before, event = news._look("live", before)
        found = read_event(event)
        assert found["step"] == steps[-1]
        return found.get("points") and [point["step"] for point in found["points"]]

    with made.running(tmp_path) as run:
        for step in (2, 3, 4):
            run.commit_step({"step": step, "phase": "grpo", "loss": 1.0})
        assert points() is None
        run.rewind(2)
        run.commit_step({"step": 3, "phase": "grpo", "loss": 2.0})
        assert points() is None  # pages draw the curve again, without the steps that were dropped
        run.commit_step({"step": 4, "phase": "grpo", "loss": 2.0})
        assert points() == [4]
        with open(run.path / "metrics.jsonl", "a") as file:  # as a later attempt from step 3 on writes it
            file.write("".join(json.dumps({"step": step, "attempt": 2, "loss": 3.0}) + "\n" for step in (4, 5)))
        assert points() is None
        run.commit_step({"step": 6, "phase": "grpo", "loss": 3.0})
        assert points() == [6]


def test_news_have_the_tiles_at_first_at_the_end_and_now_and_then(tmp_path):
    news, before = (
        News(RunsFolder(tmp_path), lambda name, look: "head", {"tiles": lambda run: f"tiles of {run.state()}"}),
        None,
    )

    def parts():
        nonlocal before
        read_metrics(run.path)
        before, event = news._look("live", before)
        return read_event(event)["parts"]

    with made.running(tmp_path) as run:
        assert "'running'" in parts()["tiles"]
        run.commit_step({"step": 2, "phase": "grpo", "loss": 0.5})
        assert parts() == {"head": "head"}
        news._parts["live"] = ({}, news._parts["live"][1])  # they are due
        run.commit_step({"step": 3, "phase": "grpo", "loss": 0.5})
        assert parts().keys() == {"head", "tiles"}
        run.end("finished")
        assert "'finished'" in parts()["tiles"]


def test_a_page_that_comes_later_has_the_parts_that_others_were_sent(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.EVERY", 60.0)

    async def read():
        news = News(RunsFolder(tmp_path), lambda name, look: "head", {"tiles": lambda run: "tiles"})
        async with aclosing(news.of("live")) as one, aclosing(news.of("live")) as two:
            first = read_event(await asyncio.wait_for(anext(one), patience(20)))
            assert read_event(await asyncio.wait_for(anext(two), patience(20)))["parts"] == first["parts"]
        assert not news._parts and not news._pages

    with made.running(tmp_path):
        asyncio.run(read())


def test_looks_that_cost_more_are_rarer_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.EVERY", 1e-3)
    news, costs, pauses, sleep = News(RunsFolder(tmp_path), None, {}), iter((0.0, 4e-6, 1.0)), [], asyncio.sleep

    async def slept(seconds):
        pauses.append(seconds)
        await sleep(0)

    async def read():
        async with aclosing(news.of("live")) as page:
            for _ in range(4):
                await asyncio.wait_for(anext(page), patience(20))

    monkeypatch.setattr(news, "_timed_look", lambda name, before: (object(), b"x", next(costs, 0.0)))
    monkeypatch.setattr(asyncio, "sleep", slept)
    asyncio.run(read())
    assert pauses[:3] == [1e-3, pytest.approx(1.6e-3), 2e-3]


def test_a_run_that_is_removed_while_it_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.EVERY", 0.05)
    monkeypatch.setattr("tilth.ui.web.app.SECONDS", 0.0)
    with made.running(tmp_path):
        pass
    client = client_of(tmp_path)[0]
    page_of(client, "/runs/live")
    _, gone = news_of(tmp_path, "live", lambda: shutil.rmtree(tmp_path / "live"), 2)
    assert "live" in gone["gone"]
    page_of(client, "/runs/live", 404)


def lacks_its_process(run):
    return {"state": "running", "host": os.uname().nodename, "digest": "0"}


DAMAGED = {
    "pid": lacks_its_process, "ended": lambda state: state | {"ended": "noon"},
    "attempts": lambda state: state | {"attempts": [{}]}, "plan": lambda state: state | {"plan": [1]},
    "best": lambda state: state | {"best": 3}, "environment": lambda state: state | {"environment": "x"},
}  # fmt: skip


@pytest.fixture(scope="module")
def damaged(folder, tmp_path_factory):
    """Runs of which each has one file with values that nothing writes, and a whole one."""
    root = tmp_path_factory.mktemp("damaged")
    for name, change in DAMAGED.items():
        shutil.copytree(folder / "ranks", root / name)
        file = root / name / "run.json"
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
    shutil.copytree(folder / "ranks", root / "update")
    (root / "update" / "updates").mkdir(exist_ok=True)
    (root / "update" / "updates" / "0001.json").write_text('{"change":')
    shutil.copytree(folder / "ranks", root / "whole")
    return root


def test_a_damaged_run_is_listed_as_broken(damaged):
    page = page_of(client_of(damaged)[0], "/")
    states = [a["class"] for n, a in page.seen if n == "span" and a.get("class", "").startswith("state ")]
    assert sorted(states) == ["state broken"] * (len(DAMAGED) + 1) + ["state finished"]
    assert {row["state"] for row in rows_of(damaged)} >= {"unreadable", "finished"}


@pytest.mark.parametrize("name", [*DAMAGED, "update"])
def test_the_page_of_a_damaged_run_says_so(damaged, name):
    client = client_of(damaged)[0]
    assert name in page_of(client, f"/runs/{name}", 422).words
    for path in (f"/runs/{name}/health", f"/compare?run=whole&run={name}", f"/curves.json?run={name}&metric=loss"):
        assert client.get(path).status_code in (200, 422)


def test_damage_is_news_and_so_is_what_follows(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.EVERY", 0.05)
    monkeypatch.setattr("tilth.ui.web.follow.FRESH", 0.0)
    with made.running(tmp_path) as run:
        whole = (run.path / "run.json").read_text()
        acts = [lambda: (run.path / "run.json").write_text(json.dumps(lacks_its_process(run)))]
        acts += [lambda: (run.path / "run.json").write_text(whole)]
        first, damage, after = news_of(tmp_path, "live", lambda: acts.pop(0)(), 3, each=True)
        assert first["state"] == after["state"] == "running" and "live" in damage["gone"]


def test_a_line_whose_time_is_no_number_is_left_out(tmp_path):
    with made.running(tmp_path) as run:
        pass
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "phase": "grpo", "seconds": "abc"}\n')
    assert "1 lines of metrics.jsonl" in page_of(client_of(tmp_path)[0], "/runs/live").words


def test_pages_that_ask_for_the_same_at_once_share_an_answer(folder, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.app.SECONDS", 60.0)
    asked = []
    monkeypatch.setattr("tilth.ui.web.app.marks_of", lambda run, axis: asked.append(axis) or [])
    client = client_of(folder)[0]
    first, second = (client.get("/curves.json?run=ranks&metric=loss") for _ in range(2))
    assert first.json() == second.json() and asked == ["step"]
    client.get("/curves.json?run=ranks&metric=loss&x=tokens")
    assert asked == ["step", "tokens"]


def test_a_request_that_fails_leaves_no_lock(folder, monkeypatch):
    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr("tilth.ui.web.app.marks_of", fail)
    pages, _ = make_app(folder)
    answer = TestClient(pages, "http://127.0.0.1", False).get("/curves.json?run=ranks&metric=loss")
    assert answer.status_code == 500 and not pages._locks


def test_a_run_that_is_read_does_not_hold_up_others(folder, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.KEPT", -1)
    runs = RunsFolder(folder)
    with ThreadPoolExecutor(1) as other, runs.get("ranks").lock:
        found = other.submit(runs.get, "agents")
        wait([found], patience(5))
        done = found.done()
    assert done


# ---- who may ask ----


@pytest.mark.parametrize(
    ("fetch", "status"),
    [(("cross-site", "no-cors", "image"), 403), (("cross-site", "navigate", "iframe"), 403),
     (("cross-site", "navigate", "document"), 200), (("same-origin", "cors", "empty"), 200)],
)  # fmt: skip
def test_images_of_other_sites_are_not_answered_without_a_token(client, fetch, status):
    headers = dict(zip(("sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"), fetch))
    assert client.get("/runs/agents", headers=headers).status_code == status


def test_without_a_token_it_answers_this_machine_alone(folder):
    client = client_of(folder)[0]
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/", headers={"origin": "http://127.0.0.1:8600"}).status_code == 200
    assert client_of(folder, host="localhost")[0].get("/").status_code == 200


def test_a_token_is_needed_by_header_or_by_the_cookie_of_one_visit(folder):
    client, path = client_of(folder, "a secret", "10.1.2.3")
    assert client.get("/").status_code == client.get("/events").status_code == 401
    assert client.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/", headers={"authorization": "Bearer a secret"}).status_code == 200
    assert client.get("/enter?key=wrong").status_code == 401 and client.get("/").status_code == 401
    assert client.head(path, follow_redirects=False).status_code == 405  # as a preview of a link asks
    entered = client.get(path, follow_redirects=False)
    assert entered.status_code == 303 and "HttpOnly" in entered.headers["set-cookie"]
    assert "a secret" not in entered.headers["set-cookie"] and client.get("/").status_code == 200
    assert client.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    client.cookies.clear()
    assert client.get(path).status_code == 401  # it was good once


def test_two_servers_of_a_host_and_a_later_one_have_their_own_cookies(folder):
    cookies = []
    for address in ("10.1.2.3:8600", "10.1.2.3:8601", "10.1.2.3:8600"):
        client, path = client_of(folder, "a secret", address)
        cookies += [client.get(path, follow_redirects=False).headers["set-cookie"].partition(";")[0].partition("=")]
        assert client.get("/").status_code == 200
    (one, _, first), (two, _, _), (again, _, later) = cookies
    assert one == again != two and first != later
    client, _ = client_of(folder, "a secret", "10.1.2.3:8600")
    assert client.get("/", headers={"cookie": f"{one}={first}"}).status_code == 401


def test_beyond_this_machine_it_does_not_start_without_a_token(folder):
    with raises(AddressError, "--token"):
        PageServer(folder, "0.0.0.0", 0, "")
    with socket.create_server(("127.0.0.1", 0)) as other, raises(AddressError, "--port"):
        PageServer(folder, "127.0.0.1", other.getsockname()[1], "")
    one, two = (PageServer(folder, "127.0.0.1", 0, "") for _ in range(2))
    assert one.address != two.address
    one.listener.close(), two.listener.close()


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_answered(client, method):
    assert client.request(method, "/runs/sums-a-001").status_code == 405


def contents(folder):
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_no_route_changes_a_file(client, folder):
    before = contents(folder)
    for path in VIEWS:
        client.get(path)
    assert contents(folder) == before


def test_links_that_lead_out_are_not_followed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.app.SECONDS", 0.0)
    root = tmp_path / "runs"
    shutil.copytree(folder / "agents", root / "agents")
    (root / "away").symlink_to(folder / "ranks")
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    client = client_of(root)[0]
    page_of(client, "/runs/away", 404)
    (root / "agents" / "updates").mkdir(exist_ok=True)
    for name in ("agents/log.txt", "agents/trajectories/steps-000009-000009.parquet", "agents/updates/0001.json"):
        link = root / name
        link.unlink(missing_ok=True)
        link.symlink_to(secret)
        assert "a secret" not in client.get("/runs/agents").text and client.get("/runs/agents").status_code == 422
        link.unlink()
    for name in ("..%2fagents", "agents%2f..", "/etc", "agents%00"):
        assert client.get(f"/runs/{name}").status_code == 404
    with raises(UnknownRun, "run"):
        RunsFolder(root).get("../runs/agents")


def test_a_link_inside_the_folder_whose_target_becomes_a_link_out_is_not_followed(folder, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(folder / "agents", root / "agents")
    (root / "log").write_text("of this folder")
    (root / "agents" / "log.txt").unlink(missing_ok=True)
    (root / "agents" / "log.txt").symlink_to(root / "log")
    runs = RunsFolder(root)
    assert runs.get("agents")
    (root / "log").unlink()
    (root / "log").symlink_to(folder / "agents" / "run.json")
    with raises(DataError, "run.link"):
        runs.get("agents")


def test_health_is_read_from_session_folders_alone(tmp_path):
    rows = [{"rank": 0, "pid": os.getpid()}]
    session = SessionDir.create()
    try:
        for place, count in ((tmp_path / f"tilth-{os.getuid()}-elsewhere", 0), (session.path, 1)):
            place.mkdir(exist_ok=True)
            (place / "health.json").write_text(json.dumps({"ranks": rows}))
            StatusBoard.create(place / "board", 1).close()
            with made.running(tmp_path, f"run-{count}") as run:
                run.update(session=str(place))
                assert len(living(read_state(run.path))) == count
    finally:
        session.remove()


def test_the_nodes_of_ranks_are_shown_where_there_are_several(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.app.SECONDS", 0.0)
    shutil.copytree(folder / "ranks", tmp_path / "ranks")
    rows = [{"rank": rank, "pid": 9, "state": "idle", "heartbeat_age": 0.1, "progress_age": None} for rank in (0, 1)]
    monkeypatch.setattr(times, "living", lambda state: rows)
    client = client_of(tmp_path)[0]
    assert "node" not in page_of(client, "/runs/ranks/health").words.split()
    for path in (tmp_path / "ranks" / "events").glob("*.parquet"):
        events, rank = pq.read_table(path), int(path.name.split("-")[3])
        pq.write_table(events.replace_schema_metadata({**(events.schema.metadata or {}), "host": f"<n{rank}>"}), path)
    (tmp_path / "ranks" / "events" / "attempt-1-rank-1-000003.parquet").write_bytes(b"torn")
    text = client.get("/runs/ranks/health").text
    for rank in (0, 1):
        assert text.count(f"<td>{rank}</td><td>&lt;n{rank}&gt;</td>") == 2  # of workers, and of the heat map


words = st.text(st.characters(codec="utf-8"), max_size=12)
odd = st.one_of(
    words,
    st.sampled_from(["-1", "nan", "inf", "1e999", "0:", ":", "9" * 30, "a:b", "\x00", "../..", "%", "mask", "1"]),
)  # fmt: skip
places = st.sampled_from(
    ["/", "/events/x", "/curves.json", "/compare", "/enter", "/static/x", "/runs/", "/runs/agents", "/runs/ranks/time",
     "/runs/agents/trajectories", "/runs/agents/group", "/runs/ranks/health", "/runs/ranks/lanes.json",
     "/runs/torn", "/runs/agents/x"]
)  # fmt: skip
NAMES = ("q", "x", "smooth", "since", "run", "metric", "steps", "reward", "length", "finish", "prompt", "text", "sort",
         "down", "page", "step", "group", "id", "tokens", "by", "begin", "end", "key", "tag", "state")  # fmt: skip


@settings(max_examples=examples(3_000), deadline=None)
@given(places, st.dictionaries(st.sampled_from(NAMES), odd, max_size=4), words)
def test_odd_requests_are_answered_without_a_traceback(client, path, query, more):
    for answer in (client.get(path, params=query), client.get(f"/runs/{quote(more, safe='')}")):
        assert answer.status_code in (200, 404, 422), (path, query, answer.text[:500])
        assert "Traceback" not in answer.text


def streamed(server, path, act):
    """The events of a stream to its end, which httpx requires to be a whole one; ``act`` is called after the first."""
    with httpx.stream("GET", f"{server.address}{path}", timeout=patience(20)) as stream:
        found = []
        for line in stream.iter_lines():
            found.append(line)
            if line.startswith("data:") and act:
                act()
                act = None
    return found


@pytest.mark.parametrize("forced", [False, True])
def test_a_server_that_ends_ends_its_streams(folder, monkeypatch, forced):
    monkeypatch.setattr("tilth.ui.web.app.TICK", 0.02)
    with made.started(folder) as server:

        def end():
            server.should_exit, server.force_exit = True, forced

        assert streamed(server, "events?run=ranks", end)[0] == "event: news"


def test_the_end_of_another_server_of_the_process_is_none_of_a_stream(folder, monkeypatch):
    monkeypatch.setattr("tilth.ui.web.follow.PING", 0.02)
    monkeypatch.setattr("tilth.ui.web.follow.EVERY", 0.01)
    with made.started(folder) as server:
        uvicorn.Server(uvicorn.Config(lambda: None)).handle_exit(signal.SIGTERM, None)
        with httpx.stream("GET", f"{server.address}events", timeout=patience(20)) as stream:
            pings = (line for line in stream.iter_lines() if line == ": ping")
            assert [next(pings) for _ in range(3)]


def test_a_reader_that_fails_is_logged_with_its_run_and_pages_ask_again(folder, monkeypatch, caplog):
    monkeypatch.setattr("tilth.ui.web.follow.EVERY", 0.02)
    caplog.set_level(logging.ERROR, "uvicorn.error")
    with made.started(folder) as server, monkeypatch.context() as broken:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)  # as caplog needs
        failing = Mock(side_effect=MemoryError("no room"))
        assert streamed(server, "events?run=ranks", lambda: broken.setattr(FollowedRun, "look", failing))
        assert "'ranks'" in caplog.text and "MemoryError: no room" in caplog.text
        broken.undo()
        with httpx.stream("GET", f"{server.address}events?run=ranks", timeout=patience(20)) as stream:
            assert "event: news" in stream.iter_lines()


# ---- the pictures ----


def test_each_of_the_six_views_has_a_picture_that_the_docs_show():
    docs = Path(__file__).parents[3] / "docs"
    shown = set(re.findall(r"\.\./(ui-\w+\.png)", (docs / "packages" / "ui.md").read_text()))
    assert shown == {f"ui-{view}.png" for view in ("runs", "run", "group", "compare", "time", "health")}
    assert max((docs / name).stat().st_size for name in shown) < 150_000


# ---- the command ----


def test_without_the_extra_it_says_what_to_install(monkeypatch, folder):
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    found = CliRunner().invoke(app, ["ui", str(folder), "--no-open"])
    assert found.exit_code == 2 and "pip install '.[ui]'" in found.output


def test_the_address_is_printed_and_a_signal_ends_it(monkeypatch, folder):
    monkeypatch.setattr(PageServer, "run_here", lambda self: self.listener.close())
    found = CliRunner().invoke(app, ["ui", str(folder), "--port", "0", "--no-open", "--token", "x"])
    assert found.exit_code == 0 and re.search(r"http://127\.0\.0\.1:\d+/enter\?key=\S+;", html.unescape(found.output))
    assert CliRunner().invoke(app, ["ui", str(folder / "none")]).exit_code == 2
