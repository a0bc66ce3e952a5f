"""Which checkpoints are there, whether they are intact."""

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.kept import (
    MESH,
    add,
    bare,
    call,
    flip,
    make_run,
    objects,
    own,
    place_of,
    refused,
    said,
    shell,
    upload,
)
from tilth.checkpoint import open_checkpoint
from tilth.checkpoint.directory import complete, discard, quarantine
from tilth.checkpoint.storage import Local
from tilth.cli import ckpt
from tilth.runs import checkpoints


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "one", best=2)


# ---- ls ----


def test_ls_says_what_is_there(run):
    rows = said("ckpt", "ls", run)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["checkpoint"] for row in rows] == [str(run / "checkpoints" / f"step-00000{i}") for i in (2, 4, 6)]
    assert [(row["best"], row["newest"]) for row in rows] == [(True, False), (False, False), (False, True)]
    assert {row["state"] for row in rows} == {"complete"} and {row["run"] for row in rows} == {str(run)}
    assert [row["layout"] for row in rows] == [{"world": 1}, {"world": 4}, {"world": 1}]
    for row in rows:
        checkpoint = open_checkpoint(row["checkpoint"])
        assert row["tensors"] == sum(len(checkpoint.names(group)) for group in checkpoint.groups)
        assert row["bytes"] == sum(file.stat().st_size for file in Path(row["checkpoint"]).iterdir())
        assert row["saved"] == checkpoint.manifest.saved


def test_ls_for_people(run):
    text = call("ckpt", "ls", run).stdout
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith(str(run)) and lines[1][0] == "step"
    assert [line[0] for line in lines[3:]] == ["2", "4", "6"]
    assert "complete, best" in text and "complete, newest" in text and "4 processes" in text and "1 process " in text


def test_ls_of_a_folder_of_runs_has_a_table_for_each(run, tmp_path):
    make_run(tmp_path / "runs" / "two", (8,))
    shell(tmp_path / "runs" / "three")
    (tmp_path / "runs" / "no-run").mkdir()
    rows = said("ckpt", "ls", tmp_path / "runs")
    assert [(Path(row["run"]).name, row["step"]) for row in rows] == [("one", 2), ("one", 4), ("one", 6), ("two", 8)]
    text = call("ckpt", "ls", tmp_path / "runs").stdout
    assert text.count("saved (UTC)") == 2 and "no checkpoint yet (run.save_every)" in text
    assert said("ckpt", "ls", tmp_path / "runs" / "three") == []


def test_ls_of_a_folder_of_checkpoints_and_of_one(run, tmp_path):
    rows = said("ckpt", "ls", run)
    assert said("ckpt", "ls", run / "checkpoints") == rows
    assert said("ckpt", "ls", run / "checkpoints" / "step-000004") == said("ckpt", "ls", f"{run}@4") == [rows[1]]
    shutil.copytree(run / "checkpoints", tmp_path / "elsewhere")
    alone = said("ckpt", "ls", tmp_path / "elsewhere")
    assert [row["run"] for row in alone] == [None] * 3 and [row["bytes"] for row in alone] == [r["bytes"] for r in rows]


def test_ls_of_a_store(run, url):
    upload(run / "checkpoints", url)
    rows = said("ckpt", "ls", url)
    assert [(row["step"], row["checkpoint"]) for row in rows] == [(i, f"{url}/step-00000{i}") for i in (2, 4, 6)]
    assert [{**row, "run": None, "checkpoint": ""} for row in said("ckpt", "ls", run)] == [
        {**row, "checkpoint": ""} for row in rows
    ]


def test_a_run_may_keep_its_checkpoints_elsewhere(run, url, tmp_path):
    away = shell(tmp_path / "away")
    upload(run / "checkpoints", url)
    (away / "run.json").write_text(json.dumps({"state": "finished", "digest": "0", "checkpoints": url}))
    assert [row["checkpoint"] for row in said("ckpt", "ls", away)] == [f"{url}/step-00000{i}" for i in (2, 4, 6)]
    assert [row["run"] for row in said("ckpt", "ls", away)] == [str(away)] * 3
    assert said("ckpt", "verify", f"{away}@4")[0]["intact"]


def test_ls_of_a_store_of_several_runs(run, url, tmp_path):
    upload(run / "checkpoints", f"{url}/one-1a2b")
    upload(make_run(tmp_path / "two", (8,)) / "checkpoints", f"{url}/two-3c4d")
    rows = said("ckpt", "ls", url)
    assert [row["checkpoint"] for row in rows] == [
        *(f"{url}/one-1a2b/step-00000{i}" for i in (2, 4, 6)),
        f"{url}/two-3c4d/step-000008",
    ]
    assert [row["newest"] for row in rows] == [False, False, True, True]
    shutil.copytree(run / "checkpoints", tmp_path / "shared" / "one-1a2b")
    (tmp_path / "shared" / "notes.txt").write_text("")
    assert [row["step"] for row in said("ckpt", "ls", tmp_path / "shared")] == [2, 4, 6]


def test_ls_tells_what_is_no_checkpoint(run):
    root = run / "checkpoints"
    quarantine(root / "step-000002", "tensor model/x is corrupt")
    (root / "step-000004" / "model.000.safetensors").unlink()
    shutil.copytree(root / "step-000006", root / "step-000006.replaced")
    (root / "step-000008.tmp-abc").mkdir()
    (root / "step-000008.tmp-abc" / "model.safetensors").write_bytes(b"1234")
    (root / "notes.txt").write_text("")
    rows = {Path(row["checkpoint"]).name: row for row in said("ckpt", "ls", run)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "step-000002.damaged": "damaged",
        "step-000004": "damaged",
        "step-000006": "complete",
        "step-000006.replaced": "replaced",
        "step-000008.tmp-abc": "unfinished",
    }
    assert rows["step-000002.damaged"]["reason"] == "tensor model/x is corrupt"
    assert rows["step-000004"]["reason"] == "file model.000.safetensors is missing"
    assert rows["step-000008.tmp-abc"]["bytes"] == 4 and rows["step-000008.tmp-abc"]["tensors"] is None
    assert not any(row["best"] for row in rows.values())
    assert "file model.000.safetensors is" in " ".join(call("ckpt", "ls", run).stdout.split())


def test_ls_reads_no_data(run, monkeypatch):
    monkeypatch.setattr(Local, "ranges", None)
    assert len(said("ckpt", "ls", run)) == 3
    assert said("ckpt", "show", run, "--boxes")["step"] == 6


def calls(function):
    """Return what a function returns, and the number of calls, of Python's and of C's, that it takes."""
    count = itertools.count()
    sys.setprofile(lambda frame, event, _: next(count) if event in ("call", "c_call") else None)
    try:
        found = function()
    finally:
        sys.setprofile(None)
    return found, next(count)


def test_work_to_open_a_checkpoint_is_linear_in_its_tensors(tmp_path):
    taken = {}
    for tensors in (80, 800):
        folder = tmp_path / f"{tensors}" / "checkpoints"
        add(folder, 2, whole={"model": {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(tensors)}})
        checkpoint, taken[tensors] = calls(lambda: open_checkpoint(folder / "step-000002"))
        assert len(checkpoint.names("model")) == said("ckpt", "ls", folder)[0]["tensors"] == tensors
    assert taken[800] < 11 * taken[80]


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_where_there_is_nothing(command, tmp_path):
    assert "is neither a run nor a checkpoint" in refused("ckpt", command, tmp_path)
    assert "nowhere" in refused("ckpt", command, tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "file" in refused("ckpt", command, tmp_path / "file")


def test_a_store_that_is_not_there():
    assert "is neither a run nor a checkpoint" in refused("ckpt", "ls", "memory://never-was")
    assert "nosuch://x" in refused("ckpt", "ls", "nosuch://x")
    assert "nosuch://x" in refused("ckpt", "show", "nosuch://x@5")


def test_a_step_without_a_manifest_is_damaged_on_a_disk(run):
    place = bare(run, 6)
    row = said("ckpt", "ls", run)[-1]
    assert (row["checkpoint"], row["state"], row["reason"]) == (str(place), "damaged", "manifest.json is missing")
    assert not row["newest"] and said("ckpt", "ls", place) == [row] and row["run"] == str(run)
    assert "damaged: manifest.json is missing" in " ".join(call("ckpt", "ls", run).stdout.split())


def test_in_a_store_it_is_a_save_under_way(run, url):
    bare(run, 6)
    upload(run / "checkpoints", url)
    assert [row["state"] for row in said("ckpt", "ls", url)] == ["complete", "complete", "unfinished"]
    assert [row["step"] for row in said("ckpt", "verify", url, "--all")] == [2, 4]
    assert "is neither a run nor a checkpoint" in refused("ckpt", "verify", f"{url}/step-000006")


@pytest.mark.parametrize("where", ["run", "root"])
def test_the_reason_does_not_repeat_the_place(where, run):
    """The row says where; also what a run that went on from an older one put aside, under the name that it had."""
    root = run / "checkpoints"
    for step in (2, 6):
        manifest = place_of(run, step) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"step": ', b'"step":  '))
    quarantine(place_of(run, 4), f"checkpoint {place_of(run, 4).resolve()}: tensor model/x is corrupt")
    rows = said("ckpt", "ls", {"run": run, "root": root}[where])
    assert [row["reason"] for row in rows] == [
        "manifest.json is corrupt: its checksum does not match its contents",
        "tensor model/x is corrupt",
        "manifest.json is corrupt: its checksum does not match its contents",
    ]
    assert not any(row["best"] for row in rows)  # 2 is marked
    assert said("ckpt", "verify", run)[0]["problems"] == [rows[-1]["reason"]]


def test_what_another_run_made_is_said(run):
    own(run, "first", "abc")
    assert said("ckpt", "verify", run, "--all") and call("ckpt", "verify", run).exit_code == 0
    alien = add(run / "checkpoints", 8, said=objects(8) | {"digest": "other"})
    found = said("ckpt", "verify", run, "--all")
    line = "is not of this run: it was made by one of other work (digest other)"
    assert [(row["intact"], row["own"], row["problems"]) for row in found] == [
        *[(True, True, [])] * 3,
        (True, False, [line]),
    ]
    for where in (run, f"{run}@8", alien):
        result = call("ckpt", "verify", where)
        assert result.exit_code == 1 and line in result.stdout and f"{alien}: intact" in result.stdout
    assert f"the newest intact one is {place_of(run, 6)}" in call("ckpt", "verify", run, "--all").stdout
    row = said("ckpt", "ls", run)[-1]
    assert (row["state"], row["reason"]) == ("complete", line)
    name = flip(alien)
    result = said("ckpt", "verify", run)[0]
    assert result["problems"] == [f"tensor model/{name} is corrupt in file model.safetensors", line]


def test_a_run_that_says_nothing_of_its_works_has_no_strangers(run):
    own(run)
    assert call("ckpt", "verify", run).exit_code == 0 and not any(r["reason"] for r in said("ckpt", "ls", run))


# ---- verify ----


def test_verify_names_a_step_without_a_manifest(run):
    for step, options in ((4, ["--all"]), (6, [])):
        place = bare(run, step)
        for words in ([run, *options], [place], [run / "checkpoints", *options]):
            found = [row for row in said("ckpt", "verify", *words) if not row["intact"]]
            assert [(row["checkpoint"], row["problems"]) for row in found] == [
                (str(place), ["manifest.json is missing"])
            ]
            assert call("ckpt", "verify", *words).exit_code == 1
    assert f"the newest intact one is {place_of(run, 2)}" in call("ckpt", "verify", run, "--all").stdout
    bare(run, 2)
    assert len(said("ckpt", "verify", run, "--all")) == 3 and call("ckpt", "verify", run).exit_code == 1


@pytest.mark.parametrize("how", ["removed", "put aside"])
def test_verify_while_a_run_removes_some(how, run, monkeypatch):
    """What goes between the listing and the reading is no damage; it says which."""

    def taken(path):
        if path.name == "step-000004":
            discard(path) if how == "removed" else quarantine(path, "x")
        return open_checkpoint(path)

    monkeypatch.setattr(checkpoints, "open_checkpoint", taken)
    result = call("ckpt", "verify", run, "--all")
    assert result.exit_code == 0 and f"{place_of(run, 4)}: passed over, it was removed" in result.stdout
    assert [row["step"] for row in said("ckpt", "verify", run, "--all")] == [2, 6]


def test_the_one_that_goes_while_it_is_read(run, monkeypatch):
    """After its manifest was read; with it there is nothing that was looked at."""

    def opened(path):
        checkpoint = open_checkpoint(path)
        discard(path)
        return checkpoint

    monkeypatch.setattr(checkpoints, "open_checkpoint", opened)
    result = call("ckpt", "verify", f"{run}@4", "--json")
    assert result.exit_code == 2 and not result.stdout and "step-000004: passed over" in result.stderr
    assert "there is no complete checkpoint in" in result.stderr


def test_a_manifest_that_goes_while_it_is_read_is_damage(run, monkeypatch):
    def opened(path):
        (path / "manifest.json").unlink(missing_ok=True)
        return open_checkpoint(path)

    monkeypatch.setattr(checkpoints, "open_checkpoint", opened)
    assert said("ckpt", "verify", run)[0]["problems"] == ["manifest.json is missing"]


def test_what_was_put_aside_and_is_named_is_damaged(run):
    name = flip(place_of(run, 4))
    found = said("ckpt", "verify", quarantine(place_of(run, 4), "x"))
    assert found[0]["problems"] == [f"tensor model/{name} is corrupt in file model.000.safetensors"]


def test_what_is_intact(run):
    rows = said("ckpt", "verify", run, "--all")
    assert [(row["step"], row["intact"], row["problems"]) for row in rows] == [(i, True, []) for i in (2, 4, 6)]
    for row in rows:
        assert row["bytes"] >= sum(f.stat().st_size for f in Path(row["checkpoint"]).glob("*.safetensors"))
    result = call("ckpt", "verify", run)
    assert result.exit_code == 0 and result.stdout.startswith(f"{run}/checkpoints/step-000006: intact, ")


def test_only_the_newest_is_looked_at_unless_all_are_asked_for(run):
    name = flip(run / "checkpoints" / "step-000004")
    assert call("ckpt", "verify", run).exit_code == 0
    result = call("ckpt", "verify", run, "--all")
    assert result.exit_code == 1 and f"tensor model/{name} is corrupt in file model.000.safetensors" in result.stdout
    assert "the newest intact one is" in result.stdout and "step-000006; 'tilth run ... --fallback'" in result.stdout
    assert (
        call("ckpt", "verify", f"{run}@4").exit_code
        == call("ckpt", "verify", run / "checkpoints/step-000004").exit_code
    )
    assert call("ckpt", "verify", f"{run}@4").exit_code == 1 and call("ckpt", "verify", f"{run}@2").exit_code == 0


def test_every_damage_is_named(run):
    newest = run / "checkpoints" / "step-000006"
    tensor = flip(newest, "model"), flip(newest, "optimizer")
    data = (newest / "ema.safetensors").read_bytes()
    (newest / "ema.safetensors").write_bytes(data[:-1])
    (newest / "critic.safetensors").unlink()
    found = said("ckpt", "verify", run)[0]
    assert not found["intact"] and found["problems"] == [
        f"file ema.safetensors has {len(data) - 1} bytes, expected {len(data)}",
        "file critic.safetensors is missing",
    ]  # such a checkpoint is not opened
    (newest / "ema.safetensors").write_bytes(data)
    shutil.copy(run / "checkpoints" / "step-000002" / "critic.safetensors", newest)
    problems = said("ckpt", "verify", run)[0]["problems"]
    assert f"tensor model/{tensor[0]} is corrupt in file model.safetensors" in problems
    assert f"tensor optimizer/{tensor[1]} is corrupt in file optimizer.safetensors" in problems
    assert any(p.startswith("tensor critic/") for p in problems) and not any("ema" in p for p in problems)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run with one checkpoint, of four processes."""
    return make_run(tmp_path_factory.mktemp("bits") / "run", (4,))


@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(data=st.data())
def test_a_bit_anywhere_is_found_and_never_a_surprise(data, four):
    """A bit of any byte of any file: verify says that it is damaged, no other command has more to say than a line."""
    file = data.draw(st.sampled_from(sorted(place_of(four, 4).iterdir())))
    whole = file.read_bytes()
    raw = bytearray(whole)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    try:
        assert call("ckpt", "verify", four).exit_code == 1
        for command in ("ls", "show", "diff", "export"):
            second = {"diff": [four], "export": [four / "out"]}.get(command, [])
            result = call("ckpt", command, four, *second)
            assert result.exception is None or isinstance(result.exception, SystemExit), (file, command)
            assert result.exit_code in (0, 2) and result.stderr.count("\n") == (result.exit_code == 2)
    finally:
        file.write_bytes(whole)
        shutil.rmtree(four / "out", ignore_errors=True)


def test_ls_while_a_run_removes_some(run, monkeypatch):
    """Between looking at the folder and at a checkpoint it goes: then there is none, rather than a damaged one."""

    def removed(path):
        if path.name == "step-000002" and path.exists():
            shutil.rmtree(path)
        return open_checkpoint(path)

    monkeypatch.setattr(checkpoints, "open_checkpoint", removed)
    assert [(row["step"], row["state"]) for row in said("ckpt", "ls", run)] == [(4, "complete"), (6, "complete")]


def test_a_manifest_that_is_none(run):
    manifest = run / "checkpoints" / "step-000006" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 6', b'"step": 7'))
    result = call("ckpt", "verify", run)
    assert result.exit_code == 1 and "manifest.json is corrupt" in result.stdout
    assert said("ckpt", "ls", run)[-1]["state"] == "damaged"


def test_verify_in_a_store(run, url):
    flip(run / "checkpoints" / "step-000002")
    upload(run / "checkpoints", url)
    assert [row["intact"] for row in said("ckpt", "verify", url, "--all")] == [False, True, True]
    assert said("ckpt", "verify", f"{url}/step-000002")[0]["problems"]


def test_a_run_without_a_checkpoint_cannot_be_verified(tmp_path):
    assert "there is no complete checkpoint in" in refused("ckpt", "verify", shell(tmp_path / "run"))


def test_a_terminal_gets_a_bar(run, capsys, monkeypatch):
    """Of a terminal that is asked for; what is piped has none."""
    with ckpt.bar() as told:
        told("x", 1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    seen = []
    with ckpt.bar() as told:
        place = checkpoints.places(str(run))[0]
        verdict = checkpoints.examine(place, complete(run / "checkpoints")[-1], lambda *a: (seen.append(a), told(*a)))
    assert verdict.intact and seen[-1][0] == "step-000006" and seen[-1][1] == seen[-1][2] > 0


# ---- damage, elsewhere ----


READERS = {
    "generate": ["generate", "RUN", "1+2"],
    "chat": ["chat", "RUN"],
    "eval": ["eval", "RUN", "DATA", "--reward", "exact", "--max-tokens", "2", "--template", ""],
    "export": ["export", "RUN", "OUT"],
    "ckpt export": ["ckpt", "export", "RUN", "OUT"],
}


OFTEN = ("generate", "ckpt export")
READ = [pytest.param(words, id=n, marks=[pytest.mark.slow] * (n not in OFTEN)) for n, words in READERS.items()]


@pytest.mark.parametrize("command", READ)
def test_who_reads_what_is_damaged_is_told_what_to_do(command, run, tmp_path):
    name = flip(run / "checkpoints" / "step-000006")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    given = {"RUN": run, "DATA": tmp_path / "data.jsonl", "OUT": tmp_path / "out"}
    error = refused(*(given.get(word, word) for word in command))
    assert f"tensor model/{name} is corrupt in file model.safetensors" in error
    assert f"'tilth ckpt verify {run}@6' lists all damage" in error and f"the one before it is {run}@4" in error
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_oldest_has_none_before_it(run):
    flip(run / "checkpoints" / "step-000002")
    assert "there is none before it" in refused("generate", f"{run}@2", "1+2")
    (run / "checkpoints" / "step-000004" / "model.000.safetensors").unlink()
    error = refused("ckpt", "show", f"{run}@4")
    assert "file model.000.safetensors is missing" in error and f"the one before it is {run}@2" in error


# ---- the commands themselves ----


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "export", "prune"])
def test_help_names_the_keys(command):
    text = call("ckpt", command, "--help").stdout
    assert "Keys of --json:" in " ".join(text.split())


def test_the_mesh_of_the_writers_is_named():
    assert ckpt.mesh_text(dict(zip(MESH.names, MESH.sizes))) == "fsdp 2 x tp 2"
    assert ckpt.mesh_text({"dp": 1, "fsdp": 1, "tp": 1}) == "1 process" and ckpt.mesh_text(None) == "–"
