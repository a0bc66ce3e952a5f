"""Resident memory stays flat, however many steps a run has."""

import json
import os
import statistics
import subprocess
import sys

import pytest

from tests.flows import tiny

STEPS, SETTLED = 2000, 300
MOST = 20e6
"""Bytes that a run may grow by after it has settled."""


@pytest.mark.slow
def test_resident_memory_is_flat_over_two_thousand_steps(tmp_path):
    """Every step updates (flat groups are kept), evaluates, saves and writes now and then, as a long run does."""
    resident = []
    made = tiny.recipe(
        tmp_path,
        supervised={"steps": 0},
        algorithm={"steps": STEPS, "drop_flat": False, "kl_coef": 0.01},
        optimizer={"lr": 1e-4},
        run={"eval_every": 100, "save_every": 50},
    )
    tiny.run(made, callbacks=[tiny.Recorder(at_step=lambda r: resident.append(r["memory/rss"]))])
    assert len(resident) == STEPS
    curve = [round(statistics.median(resident[i : i + 100]) / 1e6, 1) for i in range(0, STEPS, 100)]
    settled = statistics.median(resident[SETTLED - 100 : SETTLED])
    assert statistics.median(resident[-100:]) - settled < MOST, f"MB by hundreds of steps: {curve}"
    assert max(resident[SETTLED:]) - settled < MOST, f"MB by hundreds of steps: {curve}"


# ---- what is predicted, and what a process has taken when it is over ----

WITHIN = 0.2
MEASURED = """
import json, sys
from tilth.api import run_recipe
from tilth.config.load import load_recipe
from tilth.runs.metrics import resident
keys = json.loads(sys.argv[1])
result = run_recipe(load_recipe("addition-grpo", keys), name="measured", callbacks=[])
plan = json.loads((result.directory / "run.json").read_text())["plan"]
print(json.dumps([resident()[1], plan["memory_peak"], plan["memory"]]))
"""
SAMPLED = [
    "algorithm.steps=3", "supervised.steps=0", "rollout.prompts=8", "rollout.group=8", "rollout.max_tokens=16",
    "reward.function=exact",
]  # fmt: skip
TALKS = """
import tilth

class Talks(tilth.Environment):
    def reset(self, info):
        self.heard = 0
        return [{"role": "user", "content": "?"}]

    def step(self, message):
        self.heard += len(message["content"])
        return [{"role": "user", "content": "?"}], False

    def reward(self):
        return self.heard % 3
"""
"""Never ends, so that episodes of an untrained policy are as long as the context, and no two share their tokens."""
EPISODES = [
    "algorithm.steps=3", "supervised.steps=0", "rollout.turns=64", "rollout.prompts=16", "rollout.group=8",
    "rollout.max_tokens=64", "rollout.stop=['a','e','i','o','n','t',' ']", "data.source=word_game",
    "data.template=chatml", "data.tokenizer=bpe:400", "model.context=144",
]  # fmt: skip
GIVEN = ["supervised.steps=3", "supervised.batch=64"]


def words(folder, vocab, prompt, pairs):
    """A tokenizer of so many words, and data whose sequences are all equally long."""
    names = [f"w{i}" for i in range(vocab - 2)]
    known = {"<unk>": 0, "<eos>": 1} | {name: i + 2 for i, name in enumerate(names)}
    added = [{"id": i, "content": name, "special": True, "normalized": False, "single_word": False, "lstrip": False,
              "rstrip": False} for i, name in enumerate(("<unk>", "<eos>"))]  # fmt: skip
    model = {"type": "WordLevel", "vocab": known, "unk_token": "<unk>"}
    whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))

    def text(first, count):
        return " ".join(names[(first * 31 + i) % len(names)] for i in range(count))

    rows = [{"prompt": text(i, prompt), "answer": f" {text(7 * i + 1, 32 - prompt)}"} for i in range(300)]
    if pairs:
        rows = [r | {"chosen": r["answer"], "rejected": f" {text(i + 400, 32 - prompt)}"} for i, r in enumerate(rows)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"data.source={folder / 'data.jsonl'}", f"data.tokenizer={folder / 'tokenizer.json'}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "vocab", "keys"),
    [
        ("sft", 1000, GIVEN),
        ("sft", 150_000, GIVEN),
        ("sft", 32_000, [*GIVEN, "train.precision=bf16"]),
        ("sft", 32_000, [*GIVEN, "optimizer.name=adamw", "model.tied=false"]),
        ("sft", 8000, [*GIVEN, "train.checkpointing=true", "model.layers=8", "supervised.batch=128"]),
        ("dpo", 20_000, GIVEN),
        ("grpo", 1000, [*SAMPLED, "rollout.prompts=64", "model.hidden=256"]),
        ("grpo", 150_000, SAMPLED),
        ("grpo", 50_000, [*SAMPLED, "algorithm.kl_coef=0.1", "rollout.temperature=0.8", "rollout.top_p=0.9"]),
        ("ppo", 20_000, [*SAMPLED, "algorithm.advantage=gae"]),
        ("grpo", 0, EPISODES),
    ],
)
def test_a_process_takes_what_was_predicted(tmp_path, flow, vocab, keys):
    flat = ["algorithm.drop_flat=false"] if flow == "grpo" else []
    own = [
        f"flow={flow}",
        f"run.dir={tmp_path / 'runs'}",
        "model.context=64",
        "run.eval_prompts=16",
        "run.save_every=1",
    ]
    (tmp_path / "talks.py").write_text(TALKS)
    plays = [f"rollout.environment={tmp_path / 'talks.py'}:Talks"]
    data = words(tmp_path, vocab, 16 if flow in ("grpo", "ppo") else 1, pairs=flow == "dpo") if vocab else plays
    asked = [*own, *data, *flat, *keys]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", MEASURED, json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured, predicted, items = json.loads(done.stdout.splitlines()[-1])
    assert predicted == pytest.approx(measured, rel=WITHIN), items
