"""The driver of ``make gpu``: what fails is a row, the next part runs, time is kept, nothing is left behind."""

import contextlib
import json
from pathlib import Path

import psutil
import pytest

from tests.scripts import SCRIPTS, benchmarks, script

PRINTS = "import json, sys\nfrom pathlib import Path\n"
WRITES = PRINTS + "Path(sys.argv[sys.argv.index('--json') + 1]).write_text(json.dumps([{'figure_s': 1.5}]))\n"


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """The driver, with a folder of scripts of one's own."""
    made = script("gpu.py")
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(made, "HERE", tmp_path / "benchmarks")
    return made


def part(gpu, text, name="one", limit=60.0, **more):
    (gpu.HERE / f"{name}.py").write_text(text)
    return gpu.Part(name, name, limit, columns=("figure_s",), **more)


def test_rows_of_a_part_have_its_name_and_the_script_its_arguments(gpu):
    text = PRINTS + "Path(sys.argv[-1]).write_text(json.dumps([{'said': sys.argv[1:-1]}]))"
    one = part(gpu, text, arguments="--cases 'groups of 16,x'", quick="--few")
    assert gpu.run(one, "cuda", False, 60) == [
        {"part": "one", "said": ["--cases", "groups of 16,x", "--device", "cuda", "--json"]}
    ]
    assert gpu.run(one, "cpu", True, 60)[0]["said"][:2] == ["--quick", "--few"]


def test_what_fails_is_a_row_beside_those_that_it_wrote(gpu):
    (row, told) = gpu.run(part(gpu, WRITES + "raise OSError('no such kernel')"), "cpu", True, 60)
    assert row == {"part": "one", "figure_s": 1.5}
    assert told["error"] == "exit status 1: OSError: no such kernel" and gpu.failed([row, told])
    assert "wrote no rows" in gpu.run(part(gpu, "pass"), "cpu", True, 60)[0]["error"]
    (row,) = gpu.run(part(gpu, WRITES.replace("]))", "])[:5])")), "cpu", True, 60)
    assert "not whole" in row["error"]


@pytest.mark.slow
def test_what_takes_too_long_ends_with_all_that_it_started(gpu, tmp_path):
    text = WRITES + "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    text += f"Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\ntime.sleep(600)"
    found = gpu.run(part(gpu, text), "cpu", True, 5.0)
    assert found[0] == {"part": "one", "figure_s": 1.5} and "longer than its 5 s" in found[1]["error"]
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(60)


def test_parts_share_the_time_and_what_is_not_reached_is_a_row(gpu):
    now, given = [0.0], []

    def takes(part, limit):
        given.append(limit)
        now[0] += 50.0
        return [{"part": part.name, "error": "no luck"}]

    parts = [gpu.Part(name, name, 60.0) for name in "abcd"]
    kept = []
    rows = gpu.run_all(parts, 135.0, takes, lambda: now[0], lambda rows: kept.append(len(rows)))
    assert (
        kept == [1, 2, 3]
        and given == [60.0, 60.0, 35.0]
        and rows[3]["part"] == "d"
        and "were over" in rows[3]["not_reached"]
    )
    assert gpu.failed(rows) == ["a: no luck", "b: no luck", "c: no luck"]


def test_a_rival_that_fails_is_no_failure_of_the_part(gpu):
    assert gpu.failed([{"part": "training", "contender": "plain", "error": "out of memory"}]) == []


def test_tables_for_people(gpu):
    parts = [gpu.Part("one", "one", 1.0, columns=("case", "figure_s", "bytes")), gpu.Part("two", "two", 1.0)]
    rows = [
        {"part": "machine", "device": "X100", "torch_version": "2.11"},
        {"part": "one", "case": "a|b", "figure_s": 1234.56, "bytes": 1_000_000},
        {"part": "one", "error": "it broke"},
        {"part": "two", "not_reached": "the 25 minutes were over"},
    ]
    text = gpu.markdown(rows, parts)
    assert text.startswith("device X100, torch 2.11\n") and "| a / b | 1,235 | 1,000,000 |" in text
    assert "\nit broke\n" in text and text.endswith("### Two\n\nthe 25 minutes were over\n")


def test_the_report_of_pytest_is_a_row(gpu, tmp_path):
    report = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3" time="2.5"><testcase name="a"/>'
    report += '<testcase name="b"><failure message="apart"/></testcase></testsuite></testsuites>'
    (tmp_path / "report").write_text(report)
    wanted = {"passed": 4, "failed": 2, "skipped": 3, "seconds": 2.5, "failures": "b: apart"}
    assert gpu._tests(tmp_path / "report") == [wanted]


def test_figures_are_kept_before_a_later_part_begins(gpu, monkeypatch, tmp_path):
    """The machine may go at any time."""

    def runs(part, *_):
        if part.name != gpu.PARTS[0].name:
            raise KeyboardInterrupt
        return [{"part": part.name, "passed": 7}]

    monkeypatch.setattr(gpu, "run", runs)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--json", str(tmp_path / "rows.json")])
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert [row["part"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["machine", "tests"]


@pytest.mark.slow
def test_what_takes_too_long_may_still_write_its_rows(gpu):
    text = PRINTS + "import time\ntry: time.sleep(600)\nfinally:\n"
    text += "  Path(sys.argv[sys.argv.index('--json') + 1]).write_text(json.dumps([{'figure_s': 1.5}]))"
    assert gpu.run(part(gpu, text), "cpu", True, 3.0)[0] == {"part": "one", "figure_s": 1.5}


def test_parts_are_scripts_with_columns_that_take_what_they_are_given():
    made = script("gpu.py")
    scripts = {part.script for part in made.PARTS} - {"pytest"}
    assert {f"{name}.py" for name in scripts} <= set(benchmarks()) and len(made.PARTS) == len(
        {p.name for p in made.PARTS}
    )
    for part in made.PARTS:
        text = (SCRIPTS / f"{part.script}.py").read_text() if part.script in scripts else ""
        words = [word for word in f"{part.arguments} {part.quick}".split() if word.startswith("--")]
        assert all(f'"{word}"' in text for word in words) and part.columns
    assert sum(part.limit_s for part in made.PARTS) <= 27 * 60
    assert json.dumps(made.machine("cpu"))


def test_tests_of_a_gpu_are_found_by_their_mark(tmp_path):
    """Without an import of all others, which pytest would leave out."""
    command = script("gpu.py").PARTS[0].command("cuda", False, tmp_path / "report")
    found = {Path(word).name for word in command if word.endswith(".py")}
    assert {"test_gpu.py", "test_pretended.py", "test_saver.py"} <= found and len(found) < 20


def test_a_pretended_device_runs_the_tests_alone(gpu, monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(gpu, "run", lambda part, device, quick, limit: given.append((part.name, device)) or [])
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "pretended"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert given == [("tests", "pretended")]
    assert "tests.gpu_free.device" in gpu.PARTS[0].command("pretended", False, tmp_path / "report")
    assert "tests.gpu_free.device" not in gpu.PARTS[0].command("cuda", False, tmp_path / "report")
