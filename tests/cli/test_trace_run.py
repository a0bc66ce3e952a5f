"""``tilth trace RUN``: a group whose first word may be a run, what a person reads, JSON, bad input in one line."""

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import tilth
from tests.analysis.tree import s, table, two_workers
from tilth.analysis.recent import dropped, recent
from tilth.cli.main import app
from tilth.config.load import load_recipe
from tilth.runs.directory import RunDir
from tilth.ui.report import write_report

KEYS = [
    "run", "state", "attempt", "steps", "seconds", "step", "parts", "roles", "ranks", "communication", "controller",
    "rates", "predicted", "profiled", "events", "dropped", "gain", "notes",
]  # fmt: skip


def call(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def said(*arguments):
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def keep(folder, *roots, part=1, lost=0):
    """Write events as a run does: a file a rank."""
    events = table(*roots)
    for rank in set(events["rank"].to_pylist()):
        mine = events.filter([r == rank for r in events["rank"].to_pylist()])
        mine = mine.replace_schema_metadata({"dropped": str(lost)})
        pq.write_table(mine, folder / f"attempt-1-rank-{rank}-{part:06d}.parquet")


def make(root, *roots, records=()):
    with RunDir.create(load_recipe("addition-grpo", [f"run.dir={root}"]), "addition-grpo") as directory:
        for record in records:
            directory.commit_step({"phase": "grpo", **record})
        if roots:
            keep(directory.events, *roots)
        directory.end("finished")
    return directory.path


RECORDS = [
    {"step": 1, "tokens/generated": 30.0, "tokens_per_second/generate": 300.0, "time/generate": 0.1,
     "tokens/trained": 50.0, "tokens_per_second/train": 100.0, "time/update": 0.5, "mfu": 0.4},
    {"step": 2, "tokens/generated": 10.0, "tokens_per_second/generate": 20.0, "time/generate": 0.5, "time/update": 0.5},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make(tmp_path_factory.mktemp("runs"), *two_workers(), records=RECORDS)


def test_json(run):
    found = json.loads(said(run, "--json"))
    assert list(found) == KEYS
    assert (found["state"], found["attempt"], found["events"], found["dropped"]) == ("finished", 1, 35, 0)
    assert found["steps"] == {"first": 1, "last": 2, "count": 2} and found["step"]["longest_at"] == 1
    assert found["seconds"] == pytest.approx(180e-9) and found["step"]["median"] == pytest.approx(90e-9)
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1)
    assert found["parts"]["generate"]["seconds"] == pytest.approx(30e-9)
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    assert found["ranks"][1]["parts"]["gc"] == pytest.approx(3e-9) and found["ranks"][0]["pace"] < 1
    assert found["ranks"][1]["communication"]["others_waited"] == pytest.approx(10e-9)
    assert found["roles"]["policy"] == pytest.approx({"0": 35e-9, "1": 53e-9})
    assert found["communication"]["by_op"] == pytest.approx({"all_reduce": 15e-9})
    assert found["controller"]["rank"] == 2


def test_rates_are_those_of_the_chosen_steps(run):
    rates = json.loads(said(run, "--json"))["rates"]
    assert rates["generate"] == pytest.approx(40 / 0.6) and rates["generated_overall"] == pytest.approx(40 / 180e-9)
    assert rates["mfu"] == 0.4 and rates["mfu_overall"] == pytest.approx(0.4 * 0.5 / 180e-9)
    rates = json.loads(said(run, "--json", "--steps", "2"))["rates"]
    assert rates["generate"] == pytest.approx(20) and rates["train"] is None and rates["mfu_overall"] is None


def test_the_order_of_words_is_free(run):
    assert said("--json", run) == said(run, "--json") == said("RUN", run, "--json")


def test_what_a_person_reads(run):
    text = said(run)
    labels = [line[:15].strip() for line in text.splitlines() if line[:15].strip()]
    assert labels[:7] == ["steps", "where", "roles", "rank 0", "rank 1", "communication", "controller"]
    assert labels[7:] in (["rates", "trace"], ["rates", "gain", "cause", "trace"])
    whole = " ".join(text.split())
    assert "1 to 2, attempt 1, finished" in whole and "step 1 the longest" in whole
    assert "update 12 %" in whole and "waiting for the controller 27 %" in whole
    assert "rank 1 busy 53 %, communication 5.6 %, gc 1.7 %, waits for ranks 13 %" in whole
    assert "others waited for it 5.6 %" in whole and "35 events, none dropped" in whole
    assert "exposed 8.3 % (waiting for the last rank 2.8 %, transfer 5.6 %), hidden 0 %, most in all_reduce" in whole
    assert max(map(len, text.splitlines())) <= 100


def test_one_step_and_inline(tmp_path):
    inline = make(tmp_path, s("step", 0, 50, s("generate", 10, 40), rank=0, step=3))
    found = json.loads(said(inline, "--json"))
    assert found["controller"] is found["gain"] is None and found["rates"]["mfu"] is None
    text = said(inline)
    assert "generate 60 %, other 40 %" in text and "rank" not in text and "median" not in text


def test_of_a_run_that_goes_on_only_what_all_ranks_have_told(tmp_path):
    """Rank 1 has not written its part of step 2 yet: its time would look as if it waited."""
    with RunDir.create(load_recipe("addition-grpo", [f"run.dir={tmp_path}"]), "addition-grpo") as directory:
        keep(directory.events, *[root for root in two_workers() if root["rank"] != 1 or root["start"] < 100])
        found = json.loads(said(directory.path, "--json"))
        assert found["state"] == "running" and found["steps"]["last"] == 1 and "so far" in said(directory.path)
        assert json.loads(said(directory.path, "--json", "--steps", "2"))["steps"]["first"] == 2
        assert "A typical step" in write_report(directory.path).read_text()
    assert json.loads(said(directory.path, "--json"))["steps"]["last"] == 2


def test_many_ranks_in_few_lines(tmp_path):
    calls = [s("call", 0, 10 + r, rank=r, step=1, seq=r) for r in range(12)]
    text = said(make(tmp_path, s("step", 0, 50, rank=12, step=1), *calls))
    assert [line.split()[1] for line in text.splitlines() if line.startswith("rank ")] == ["11", "10", "1", "0"]
    assert "and 8 ranks between these" in text


def test_an_events_folder_will_do(run):
    found = json.loads(said(run / "events", "--json"))
    assert found["state"] is None and found["events"] == 35 and found["rates"]["generate"] is None


@pytest.mark.parametrize(
    "steps, message",
    [("7:9", "no events of steps 7:9; its steps are 1 to 2"), ("9:7", "'9:7'"), ("a", "'a'"), ("1:1", "'1:1'")],
)
def test_bad_steps(run, steps, message):
    result = call(run, "--steps", steps)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_bad_runs(tmp_path, run):
    for path, message in (
        (tmp_path / "no", "nor is it a command of tilth trace"),
        (make(tmp_path / "a"), "has no events yet"),
        (make(tmp_path / "b", s("call", 0, 5, rank=0, seq=1)), "no step has ended yet"),
    ):
        result = call(path)
        assert result.exit_code == 2 and result.stdout == ""
        assert message in result.stderr and str(path) in result.stderr and result.stderr.count("\n") == 1
    assert call("--no-such-thing", run).exit_code == 2


def test_the_group_s_commands_stay(run):
    text = said("--help")
    assert all(f"\n  {name} " in text for name in ("RUN", "whatif"))
    assert call("whatif", run.parent / "no").stderr == f"error: no trace at {run.parent / 'no'}\n"


@pytest.mark.slow
def test_no_torch(run):
    code = (
        "import sys; from typer.testing import CliRunner; from tilth.cli.main import app; "
        f"r = CliRunner().invoke(app, ['trace', {str(run)!r}]); print(r.exit_code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "False"]


# ---- real runs ----


def trained(root, **sections):
    return tilth.train(
        data=[{"prompt": f"{a}+{b}="} for a in range(5) for b in range(5)],
        reward=lambda prompt, completion, info: float(len(completion)),
        model={"hidden": 16, "layers": 1, "heads": 2, "context": 16},
        rollout={"prompts": 4, "group": 4, "max_tokens": 4},
        algorithm={"steps": 3},
        train={"threads": 1},
        run={"dir": str(root)},
        **sections,
    ).directory


def test_an_inline_run(tmp_path):
    run = trained(tmp_path)
    found = json.loads(said(run, "--json"))
    assert found["steps"] == {"first": 1, "last": 3, "count": 3} and found["controller"] is None
    assert {"generate", "score", "update", "publish", "other"} <= set(found["parts"])
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1)
    assert not {"waiting for ranks", "waiting for the controller"} & set(found["parts"])
    assert found["rates"]["generate"] > found["rates"]["generated_overall"] > 0
    text = write_report(run).read_text()
    assert "A typical step" in text and text.count('class="lane"') in (1, 2) and len(text) < 200_000
    look = json.loads(CliRunner().invoke(app, ["top", str(run), "--json"]).stdout)
    assert look["recent"]["last"] == 3 and look["state"] == "finished"


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_of_two_workers(tmp_path):
    run = trained(tmp_path, cluster={"backend": "local", "workers": 2})
    found = json.loads(said(run, "--json"))
    assert [r["rank"] for r in found["ranks"]] == [0, 1] and found["controller"]["rank"] == 2
    for rank in found["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(found["seconds"])
    assert found["communication"]["transfer"] > 0 and found["gain"]["slowdown"] >= 1
    assert found["parts"]["waiting for the controller"]["share"] < 1
    text = write_report(run).read_text()
    assert text.count(">controller</span>") >= 1 and "<th>waited for</th>" in text


# ---- the newest files alone ----


def steps_of(first, last, shift=0):
    """A controller's steps and a call of each in rank 0, 100 ns each."""
    for k in range(first, last):
        yield s("step", 100 * k + shift, 100 * k + 90 + shift, rank=1, step=k)
        yield s("call", 100 * k + 10, 100 * k + 80, rank=0, step=k, seq=k)


def test_recent_reads_the_newest_files_only(tmp_path):
    for part in range(1, 6):
        keep(tmp_path, *steps_of(10 * part, 10 * part + 10), part=part, lost=part)
    events, steps = recent(tmp_path)
    assert steps == range(51, 60) and len(events) == 20 and dropped(tmp_path) == 2 * 5


def test_recent_goes_back_until_the_ranks_share_a_step(tmp_path):
    everything = [list(steps_of(k, k + 1)) for k in range(4)]
    for k, (step, _) in enumerate(everything):
        keep(tmp_path, step, part=k + 1)
    for k, (_, a_call) in enumerate(everything[:3]):
        keep(tmp_path, a_call, part=k + 1)
    _, steps = recent(tmp_path)
    assert steps == range(0, 3)


def test_recent_of_torn_foreign_and_no_files(tmp_path):
    assert recent(tmp_path / "none") == (None, range(0)) and dropped(tmp_path / "none") == 0
    keep(tmp_path, *steps_of(1, 5), lost=3)
    (tmp_path / "attempt-1-rank-0-000002.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / "notes.txt").write_text("x")
    events, steps = recent(tmp_path)
    assert len(events) == 8 and len(steps) and dropped(tmp_path) == 6
    (tmp_path / "attempt-2-rank-0-000001.parquet").write_bytes(b"")
    assert recent(tmp_path)[0] is None and dropped(tmp_path, 1) == 6


def test_the_report_and_trace_agree_on_the_longest_step(tmp_path):
    took = [40, 200, 50, 60, 70]  # the longest in a phase before the last one
    begins = [sum(took[:i]) for i in range(5)]
    roots = [
        s("step", a, a + d, s("update", a, a + d), rank=0, step=i + 1) for i, (a, d) in enumerate(zip(begins, took))
    ]
    records = [{"step": i + 1, "phase": "warmup" if i < 3 else "grpo", "time/step": 1.0} for i in range(5)]
    run = make(tmp_path, *roots, records=records)
    assert json.loads(said(run, "--json"))["step"]["longest_at"] == 2
    assert "The longest step</strong><small>step 2<" in write_report(run).read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("RUN", "--help"), ("weight_sync", "loader", "S:")), (("whatif", "--help"), ("S:", "M_W:", "M_S:"))],
)
def test_help_explains_the_words_of_the_first_screen(arguments, words):
    text = said(*arguments)
    assert all(word in text for word in words)
