"""What ``tilth show`` prints of a run's directory."""

import json

import pytest
from typer.testing import CliRunner

from tilth.cli.main import app
from tilth.cli.show import table
from tilth.config.load import load_recipe
from tilth.runs.directory import RunDir, summarise
from tilth.runs.metrics import GENERATION

KEYS = (
    "state",
    "steps",
    "seconds",
    "accuracy_first",
    "accuracy_last",
    "tokens_per_second_generate",
    "tokens_per_second_train",
    "balance_spread",
    "balance_idle",
    "padding",
    "mismatch_max",
    "rewards_missing",
)


@pytest.fixture
def run(tmp_path):
    recipe = load_recipe("addition-grpo", [f"run.dir={tmp_path}"])
    with RunDir.create(recipe, "addition-grpo") as directory:
        directory.commit_step({"step": 1, "phase": "grpo", "accuracy/heldout": 0.25, "reward/missing": 2})
        directory.commit_step({"step": 2, "phase": "grpo", "accuracy/heldout": 0.75, "mismatch/max": 2e-6})
        directory.end("finished")
    return directory.path


def show(*arguments):
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_the_promised_keys(run):
    found = json.loads(show(run, "--json"))
    assert found == json.loads(json.dumps(summarise(run))) and set(KEYS) <= set(found)
    assert (found["state"], found["steps"], found["accuracy_first"], found["accuracy_last"]) == (
        "finished",
        2,
        0.25,
        0.75,
    )


def test_best_parts_and_losses(tmp_path):
    recipe = load_recipe("addition-grpo", [f"run.dir={tmp_path}"])
    with RunDir.create(recipe, "addition-grpo") as directory:
        first = {"loss/heldout": 7.5, "bits_per_byte/heldout": 4.0, "reward/heldout/part/format": 0.5}
        directory.commit_step({"step": 1, "phase": "sft", **first})
        last = {"loss/heldout": 2.25, "bits_per_byte/heldout": 1.5, "reward/heldout/part/correct": 0.125}
        directory.commit_step({"step": 2, "phase": "sft", **last})
        directory.end("finished", best={"step": 2, "metric": "loss/heldout", "value": 2.25})
    lines = dict(line.split("  ", 1) for line in show(directory.path).splitlines())
    found = {name: value.strip() for name, value in lines.items()}
    assert found["held-out loss"] == "7.5000 -> 2.2500 nats per token, 1.500 bits per byte"
    assert found["reward's parts"] == "format 0.5, correct 0.125"
    assert found["best"] == "at step 2: held-out loss 2.2500 nats per token"


def test_table(run):
    lines = dict(line.split("  ", 1) for line in show(run).splitlines())
    found = {name: value.strip() for name, value in lines.items()}
    assert found["state"] == "finished" and found["steps"].startswith("2 in 0:0")
    assert found["held-out accuracy"] == "75.0 % after 2 steps of GRPO"  # the first was after a step
    assert found["rewards missing"].startswith("2, ") and "2e-06" in found["log-prob mismatch"]
    assert "generation" not in found and "versions behind" not in found  # nothing was measured


def test_samples_that_are_behind_and_their_lengths(tmp_path):
    recipe = load_recipe("addition-grpo", [f"run.dir={tmp_path}"])
    ends = {"samples/finished": 8.0, "samples/consumed": 6.0, "length/consumed": 10.0, "samples": 6.0}
    steps = [
        {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/tokens/0": 60.0, "length/finished": 10.0}
        | {"samples/admitted": 14.0, "kv_cache_usage/mean": 0.1, "kv_cache_usage/max": 0.75},
        {"staleness/mean": 9.0, "staleness/max": 12.0, "staleness/tokens/1": 30.0, "staleness/tokens/12": 10.0}
        | {"length/finished": 20.0, "samples/dropped": 2.0, "length/dropped": 50.0, "samples/admitted": 4.0}
        | {"kv_cache_usage/mean": 0.3, "kv_cache_usage/max": 0.5, "fully_async/trainer/idle_ratio": 0.25}
        | {"mixture/books": 3.0, "mixture/web": 5.0}
        | {"fully_async/buffer/age_seconds": 2.5, "draft/acceptance": 0.5, "samples/moved": 3.0},
    ]
    with RunDir.create(recipe, "addition-grpo") as directory:
        for number, more in enumerate(steps, 1):
            directory.commit_step({"step": number, "phase": "grpo", **ends, **more})
        directory.end("finished")
    lines = dict(line.split("  ", 1) for line in show(directory.path).splitlines())
    assert lines["versions behind"].strip() == "mean 4.5, at most 12"
    assert lines["tokens by them"].strip() == "0: 60 %, 1: 30 %, 8 and more: 10 %"
    said = "16 ended, 15.0 tokens long; 12 learned from, 10.0 tokens long; 2 dropped"
    assert lines["samples"].strip() == said and lines["samples by source"].strip() == "books 3, web 5"
    figures = {"actor stall": "25 %", "age in the buffer": "2.5 s", "admitted": "18", "finished": "16", "moved": "3"}
    figures |= {"drafts accepted": "50 %", "KV in use": "20 %", "KV in use at most": "75 %"}
    assert {name: value.strip() for name, value in lines.items() if name in GENERATION.values()} == figures
    assert json.loads(show(directory.path, "--json"))["generation"]["kv_cache_usage/max"] == 0.75
    found = json.loads(show(directory.path, "--json"))["behind"]
    assert found["tokens"] == {"0": 60, "1": 30, "12": 10} and found == summarise(directory.path)["behind"]


def test_a_directory_that_is_no_run(tmp_path):
    result = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert result.exit_code == 2 and "is not a run" in result.stderr


def test_a_failed_run_says_why(run):
    state = {**summarise(run), "state": "failed", "error": "StorageError: disk full"}
    assert dict(table(state))["state"] == "failed: StorageError: disk full"


def test_rates_and_memory():
    summary = dict.fromkeys(KEYS) | {
        "run": "r",
        "recipe": "x",
        "state": "running",
        "steps": 3,
        "seconds": 10.0,
        "rewards_missing": 0,
        "tokens_per_second_generate": 12345.6,
        "tokens_generated": 1000,
        "memory_peak": 2 * 10**9,
        "memory_predicted": 10**9,
    }
    lines = dict(table(summary))
    assert lines["generation"] == "12,346 tokens/s, 1,000 tokens" and lines["memory"] == "peak 2 GB, predicted 1 GB"
    assert "held-out accuracy" not in lines
