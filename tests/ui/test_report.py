"""The report: true to the run, safe whatever the run holds, one file, at every stage of a run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest
from markupsafe import Markup

from tests.roles.test_experience import trajectory
from tests.ui.fake import PLAN, fake_run, recipe
from tilth.cluster.backends.inline import InlineStore
from tilth.core.errors import DataError, StorageError
from tilth.data.prompts import PromptSet
from tilth.data.tokenizer import Tokenizer
from tilth.roles.experience import to_batch
from tilth.roles.trajectory_writer import TrajectoryWriter
from tilth.runs.directory import RunDir
from tilth.runs.readers import read_metrics, read_trajectories, summarise
from tilth.ui.html import embed, render, text_of
from tilth.ui.report import workers_of, write_report
from tilth.ui.result import headline
from tilth.ui.samples import TOKENS, groups_of, moments_of
from tilth.ui.tokens import BOUNDS, turns

VOID = {"meta", "br", "link", "img", "input"}
ATTACK = '</code><script>alert(1)</script><img src=x onerror="alert(2)">'


class Page(HTMLParser):
    """Checks that elements close in order; collects text, elements and the embedded numbers."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.text, self.scripts = [], [], [], []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, name, attributes):
        self.seen.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name, (name, self.getpos())

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)

    @property
    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = fake_run(tmp_path_factory.mktemp("report"), warmup=60, steps=100)
    text = write_report(run).read_text()
    return run, text, Page(text)


def test_it_tells_what_the_summary_says(finished):
    run, _, page = finished
    s = summarise(run)
    assert run / "report.html" == write_report(run)
    for want in (
        f"{100 * s['accuracy_first']:.1f} % in 60 steps of warm\u2011up, then rose to",
        f"{100 * s['accuracy_last']:.1f} % in 100 steps of GRPO",
        f"{s['tokens_per_second_generate']:,.0f}", f"{s['tokens_per_second_train']:,.0f}", "742 MB",
        "771 MB predicted", f"{s['mismatch_max']:.1e}", "AMD EPYC 7B13", "806k parameters", "tokens per step 8,704",
        "torch 2.13.0", "decode", "backward", "generate", "interpreter and libraries", "digits = 3",
    ):  # fmt: skip
        assert want in page.words, want


def test_the_numbers_behind_the_curves_are_those_of_the_run(finished):
    run, _, page = finished
    figures = [a for n, a in page.seen if n == "figure" and "chart" in a["class"].split()]
    data = json.loads(page.scripts[0])
    assert len(figures) == len(data) >= 10
    accuracy = [(r["step"], r["accuracy/heldout"]) for r in read_metrics(run) if "accuracy/heldout" in r]
    assert list(zip(data[0]["lines"][0]["x"], data[0]["lines"][0]["y"])) == [
        (s, pytest.approx(a, rel=1e-4)) for s, a in accuracy
    ]


def test_one_file_without_outside_references(finished):
    _, text, page = finished
    assert len(text) < 600_000
    assert not re.search(r"https?:|//cdn|@import|url\(", text)
    assert not [a for n, a in page.seen if n in ("link", "img", "iframe") or "src" in a or "href" in a]


def test_only_its_own_script_may_run(finished):
    _, _, page = finished
    policy = next(a["content"] for n, a in page.seen if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert page.scripts[1] == text_of("page.js") and len(page.scripts) == 2


def test_tokens_carry_their_numbers_and_colours(finished):
    _, _, page = finished
    tokens = [a for n, a in page.seen if n == "span" and "data-l" in a]
    assert len(tokens) > 100
    for token in tokens:
        p = np.exp(float(token["data-l"]))
        assert token["class"].split()[0] == f"p{sum(p < b for b in BOUNDS)}"
    assert "<eos>" in page.words and "answer" in page.words


def test_what_a_policy_writes_is_text(tmp_path):
    run = fake_run(tmp_path, warmup=5, steps=30, hostile=ATTACK)
    (run / "model" / "tokenizer.json").unlink()
    (run / "recipe.toml").write_text(ATTACK)
    state = json.loads((run / "run.json").read_text())
    for key in ("cpu", "platform"):
        state["environment"][key] = ATTACK
    state |= {"error": ATTACK, "plan": {"note": ATTACK, "memory": {ATTACK: 5}}}
    (run / "run.json").write_text(json.dumps(state))
    page = Page(write_report(run).read_text())
    assert len(page.scripts) == 2 and not [n for n, _ in page.seen if n == "img"]
    assert ATTACK in "".join(page.text)


def test_missing_rewards_are_shown_with_their_reasons(tmp_path):
    page = Page(write_report(fake_run(tmp_path, warmup=0, steps=10, missing=2)).read_text())
    assert "20 samples had no reward and were left out of the loss." in page.words
    assert "timeout 10 took longer than 10 s" in page.words
    assert [a for n, a in page.seen if "missing" in a.get("class", "")] or "Missing rewards" in page.words


@pytest.mark.parametrize("steps", [(0, 0), (1, 0), (0, 1), (30, 2)])
def test_a_run_at_every_stage(tmp_path, steps):
    page = Page(write_report(fake_run(tmp_path, warmup=steps[0], steps=steps[1], end=None)).read_text())
    assert "interrupted" in page.words or "running" in page.words
    assert ("No step has been committed yet" in page.words) == (sum(steps) == 0)


def test_a_run_that_has_only_just_begun(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        assert "No step has been committed yet" in Page(write_report(run.path).read_text()).words
    with pytest.raises(DataError):
        write_report(tmp_path)


def test_a_torn_trace_and_a_tokenizer_that_is_gone(tmp_path):
    run = fake_run(tmp_path, warmup=3, steps=5)
    part = next((run / "events").iterdir())
    part.rename(part.with_name("attempt-1-rank-0-000002.parquet"))
    part.write_bytes(b"torn")
    (run / "model" / "tokenizer.json").unlink()
    page = Page(write_report(run).read_text())
    assert "The trace cannot be read" in page.words and "000001.parquet is truncated" in page.words
    assert "⟨" in page.words


def test_long_completions_are_cut(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        n = 6_000
        row = {"step": 1, "id": 0, "group": 0, "prompt_text": "x" * n, "text": "y" * n, "tokens": [1] * n,
               "prompt_length": 10, "logprobs": [-0.1] * n, "finish": "length", "reward": 0.5}  # fmt: skip
        run.trajectories.add(pa.Table.from_pylist([row | {"id": i, "group": i // 8} for i in range(64)]))
        run.commit_step({"step": 1, "phase": "grpo", "reward/mean": 0.5})
        run.flush()
        text = write_report(run.path).read_text()
    assert len(text) < 300_000
    assert f"{n - 10 - TOKENS:,} more tokens" in text and "cut off" in text


def test_a_broken_call_is_shown_where_its_mark_is_a_special_token(tmp_path):
    """Written as the role writes the episodes of a step: its text without special tokens would be empty."""
    made = Tokenizer.characters('{"name:}')
    made._core.add_special_tokens(["<tool_call>"])
    store, call = InlineStore(), made.special()["<tool_call>"]
    one = trajectory(0, [2, 3], [call, call, made.eos_id], "", 0.0)
    with RunDir.create(recipe(tmp_path), "t") as run:
        made.save(run.path / "model")
        writer = TrajectoryWriter(PromptSet.of(["a", "b"] * 4), store, made)
        writer.files = run.trajectories
        writer.add(to_batch([one], store), 1)
        run.commit_step({"step": 1, "phase": "grpo", "reward/mean": 0.0})
        run.flush()
        page = Page(write_report(run.path).read_text())
    (row,) = read_trajectories(run.path).to_pylist()
    assert row["text"] == f"<tool_call><tool_call>{made.decode([made.eos_id], special=True)}"
    assert page.words.count("<tool_call>") == 2


def test_a_disk_that_is_full_keeps_the_old_report(tmp_path, monkeypatch):
    import os

    run = fake_run(tmp_path, warmup=0, steps=2)
    before = write_report(run).read_text()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError):
        write_report(run)
    assert (run / "report.html").read_text() == before


# ---- sentences ----


def ended(*phases, metric="accuracy/heldout"):
    names = ("phase", "steps", "first", "last")
    told = [dict(zip(names, phase)) | {"metric": metric, "seconds": 1.0} for phase in phases]
    return {"phases": told, "steps": sum(p["steps"] for p in told), "seconds": 65}


@pytest.mark.parametrize(
    ("summary", "want"),
    [(ended(("grpo", 10, 0.612, 0.971)), "Held-out accuracy rose from 61.2 % to 97.1 % in 10 steps of GRPO."),
     (ended(("grpo", 1, 0.9, 0.5)), "Held-out accuracy fell from 90.0 % to 50.0 % in 1 step of GRPO."),
     (ended(("grpo", 10, 0.5, 0.5)), "Held-out accuracy stayed at 50.0 % in 10 steps of GRPO."),
     (ended(("warmup", 85, None, 0.576), ("grpo", 250, 0.576, 0.98)),
      "Held-out accuracy reached 57.6 % in 85 steps of warm\u2011up, then rose to 98.0 % in 250 steps of GRPO."),
     (ended(("grpo", 10, -0.5, 0.25), metric="reward/heldout"),
      "Held-out mean reward rose from -0.5 to 0.25 in 10 steps of GRPO."),
     ({"steps": 10, "seconds": 65}, "Trained for 10 steps, 1:05 min.")],
)  # fmt: skip
def test_headline(summary, want):
    assert re.sub("<[^>]*>", "", headline(summary)) == want


def judged(*changes, **more):
    summary = ended(("warmup", 85, None, 0.576), ("grpo", 250, 0.576, 0.6))
    for phase, change in zip(summary["phases"], changes):
        phase |= {"range": (phase["last"] - 0.05, phase["last"] + 0.05), "prompts": 300.0, "change": change} | more
    return summary


def test_a_change_within_its_interval_is_not_said_to_be_one():
    unclear, clear = headline(judged(None, (-0.01, 0.06))), headline(judged(None, (0.01, 0.06)))
    said, known = (re.sub("<[^>]*>", "", text) for text in (unclear, clear))
    assert said == (
        "Held-out accuracy reached 57.6 % (53 to 63 %) in 85 steps of warm\u2011up, then went to 60.0 % (55 to 65 %) "
        "in 250 steps of GRPO, no change that 300 prompts can show."
    )
    assert "then rose to 60.0 % (55 to 65 %) in 250 steps of GRPO." in known
    assert "<b>60.0 %</b>" in clear and "<b>60.0 %</b>" not in unclear  # the colour of success


def test_nothing_learned_is_no_success(tmp_path):
    assert '<b class="from">0.0 %</b>' in headline(ended(("grpo", 10, 0.0, 0.0)))
    with RunDir.create(recipe(tmp_path), "demo") as run:
        run.commit_step({"step": 3, "phase": "grpo", "accuracy/heldout": 0.0, "reward/heldout": 0.0})
        run.update(best={"step": 3, "metric": "accuracy/heldout", "value": 0.0})
        page = write_report(run.path).read_text()
    assert "<span>Best accuracy</span><b>0.0 %</b>" in page and '<b class="none">0 %</b>' in page


def test_intervals_are_around_the_curve_and_beside_the_best(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        for step, value in ((1, 0.5), (5, 0.6)):
            ends = {"reward/heldout/low": value - 0.1, "reward/heldout/high": value + 0.1}
            run.commit_step({"step": step, "phase": "grpo", "accuracy/heldout": value, "reward/heldout": value} | ends)
        run.update(best={"step": 5, "metric": "accuracy/heldout", "value": 0.6})
        page = write_report(run.path).read_text()
    assert ("Best accuracy", "60.0 %", "50 to 70 %, held out, at step 5") in tiles(page)
    assert 'd="M0.0 160.0L1000.0 120.0L1000.0 200.0L0.0 240.0Z"' in page  # of 400: 0.6, 0.7, 0.5, 0.4


def tiles(page):
    return re.findall(r'<div class="tile[^"]*"><span>(.*?)</span><b[^>]*>(.*?)</b><small>(.*?)</small>', page)


def test_tiles_say_what_their_numbers_are_of(finished):
    _, text, _ = finished
    found = {name: (value, note) for name, value, note in tiles(text)}
    assert found["Steps"] == ("160", "of 160: 60 warm-up, 100 GRPO")
    assert found["Memory, peak"] == ("742 MB", "771 MB predicted") and found["Missing rewards"][0] == "0"
    assert {"Time", "Generation", "Training", "Log-prob mismatch"} <= set(found)


@pytest.mark.parametrize(
    "best, tile",
    [
        (("accuracy/heldout", 0.979), ("Best accuracy", "97.9 %", "held out, at step 1,330")),
        (("reward/heldout", 0.5), ("Best mean reward", "0.5", "held out, at step 1,330")),
        (("accuracy/pairs", 0.75), ("Best order of pairs", "75.0 %", "held out, at step 1,330")),
        (("loss/heldout", 3.2), ("Best held-out loss", "3.2000", "nats a token, at step 1,330")),
    ],
)
def test_the_best_evaluation_is_a_tile(tmp_path, best, tile):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        run.commit_step({"step": 1, "phase": "sft", "loss": 1.0})
        run.update(best={"step": 1330, "metric": best[0], "value": best[1]})
        found = tiles(write_report(run.path).read_text())
    assert tile in found and "Missing rewards" not in dict((name, value) for name, value, _ in found)


def test_a_reward_is_never_called_accuracy(tmp_path):
    with RunDir.create(recipe(tmp_path), "demo") as run:
        for step, value in ((1, 0.25), (5, 0.5), (9, 0.75)):
            parts = {"reward/heldout/part/brevity": -value}
            run.commit_step({"step": step, "phase": "grpo", "reward/heldout": value, "reward/mean": value, **parts})
            run.commit_step({"step": step + 1, "phase": "grpo", "reward/mean": value})
        text = write_report(run.path).read_text()
    page = Page(text)
    shown = text[text.index("<main>") :].split("<summary>Recipe")[0]
    assert "accuracy" not in shown.lower() and not re.search(r"\d %", shown)
    assert "Held-out mean reward rose from 0.25 to 0.75 in 10 steps of GRPO" in page.words and "brevity" in page.words


def test_every_part_of_the_time_has_a_colour_of_its_own(finished):
    from tilth.trace.ops import PHASES
    from tilth.ui.timeline import HUES, hues

    style = text_of("page.css")

    assert len(set(HUES)) == len(HUES)
    for hue in HUES:
        assert len(re.findall(rf"--{hue}:#[0-9a-f]{{6}}", style)) == 2 and f".{hue}{{color:var(--{hue})}}" in style
    for scheme in zip(*(re.findall(rf"--{hue}:(#[0-9a-f]{{6}})", style) for hue in HUES)):
        assert len(set(scheme)) == len(HUES)  # light, and dark
    found = hues((*sorted(PHASES)[:11], "communication", "gc", "data", "profile", "other"))
    assert len(set(found.values())) == len(found)


def test_headline_of_a_run_on_text():
    text = {"phases": [], "steps": 10, "seconds": 65}
    text |= {"loss_heldout_first": 7.5, "loss_heldout_last": 2.25, "bits_per_byte": 1.5}
    said = "Held-out loss went from 7.500 to 2.250 nats per token (1.500 bits per byte) in 10 steps, 1:05 min."
    assert re.sub("<[^>]*>", "", headline(text)) == said
    assert "bits" not in headline(text | {"bits_per_byte": None})


# ---- samples ----


def test_moments_are_spread_over_the_run(tmp_path):
    run = fake_run(tmp_path, warmup=10, steps=100)
    assert moments_of(run) == [11, 36, 60, 85, 110]
    assert moments_of(tmp_path) == []


def test_groups_that_disagree_come_first_and_show_each_kind():
    def row(group, reward):
        return {"id": 0, "group": group, "reward": reward}

    rows = [row(1, 1.0)] * 8 + [row(2, 1.0)] * 7 + [row(2, 0.0)] + [row(3, None)] * 2 + [row(3, 0.0)] * 6
    groups = groups_of(rows)
    assert [g[0]["group"] for g in groups] == [2, 3]
    assert [[r["reward"] for r in g] for g in groups] == [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, None, None]]


def test_plan_is_complete():
    assert set(PLAN["memory"]) and PLAN["memory_peak"] > sum(PLAN["memory"].values()) * 0.5


# ---- markup ----


def test_only_markup_is_not_escaped():
    said = render("bar.html", parts=[("<i>", 0.5, '"<', Markup("<u>x</u>"))])
    assert 'class="&#34;&lt;"' in said and 'title="&lt;i&gt;"' in said and '<span class="k"><u>x</u></span>' in said
    with pytest.raises(LookupError):
        render("bar.html")


def test_embedded_numbers_cannot_end_the_script():
    assert "<" not in embed(["</script>"]) and json.loads(embed(["</script>&"])) == ["</script>&"]
    with pytest.raises(ValueError):
        embed(float("nan"))


def test_turns_of_an_episode_are_folded():
    row = {
        "prompt_length": 2,
        "tokens": [1, 2, 3, 4, 5, 6], "logprobs": [0.0, 0.0, -1.0, 0.0, 0.0, -2.0],
        "segments": [{"role": "user", "start": 0}, {"role": "assistant", "start": 2}, {"role": "tool", "start": 3},
                     {"role": "assistant", "start": 5}],
    }  # fmt: skip
    found = turns(row, lambda ids: [f"<{i}>" for i in ids], 4)
    assert [(turn["role"], turn["text"], len(turn["tokens"])) for turn in found] == [
        ("assistant", "", 1), ("tool", "<4><5>", 0), ("assistant", "", 1),
    ]  # fmt: skip
    assert len(turns(row, lambda ids: [f"<{i}>" for i in ids], 2)) == 2
    said = {4: "<|im_start|>tool\n42", 5: " <b><|im_end|>\n<|im_start|>assistant\n"}
    assert turns(row, lambda ids: [said.get(i, "") for i in ids], 4)[1]["brief"] == "42 <b>"


def test_the_report_has_each_worker_that_was_watched():
    rows = [{"rank": 0, "memory": 2.0**30, "cores": 0.5}, {"rank": 1, "memory": 2.0**29, "cores": 0.25}]
    (first, _), (second, text) = workers_of({"workers": rows})
    assert (first, second) == ("rank 0", "rank 1") and "0.25 cores" in text
    assert workers_of({}) == []
