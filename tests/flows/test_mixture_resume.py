"""Mixtures with filters, transforms, broken records and ends: the draws of an undisturbed run, through stops, errors in
the middle of a step, other numbers of loaders and other ranks."""

import json
import random
from collections import defaultdict

import pytest

from tests.flows import tiny
from tests.flows.test_mixture import recipe
from tilth.checkpoint import latest, open_checkpoint
from tilth.config.plugins import forget
from tilth.flows.sampler import Sampler
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

CODE = """
import tilth

@tilth.transform("most")
def most(record, random):
    return bool(random.random() < 0.8)

@tilth.transform("longer")
def longer(record, random):
    if record["answer"] == "7":
        raise ValueError("no sevens")
    return {**record, "prompt": f"{random.integers(10)}+0+" + record["prompt"]}
"""
STEPS = 9
WORKERS = [
    {"cluster": {"backend": "inline", "workers": 1}, "policy": {"layout": {}}},
    {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"dp": 2}}},
    {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"fsdp": 2}}},
]


@pytest.fixture
def drawn(monkeypatch):
    """Samples of each draw of a step: (stream, position, indices)."""
    found, draw = [], Sampler.draw

    def noted(self, source, count):
        start, indices = self.position().get(source, 0), draw(self, source, count)
        found.append((source, start, indices.tolist()))
        return indices

    monkeypatch.setattr(Sampler, "draw", noted)
    yield found
    forget([])


class Cut(tiny.Recorder):
    """Stops the run behind a step, or falls behind it or in the middle of it."""

    def __init__(self, step, how):
        super().__init__()
        self.step, self.how = step, how

    def on_update(self, run, step, metrics):
        if (self.step, self.how) == (step, "within"):
            raise Interrupted("within a step")

    def on_step_end(self, run, step, metrics):
        if step == self.step and self.how == "stop":
            run.stop("the test")
        if step == self.step and self.how == "behind":
            raise Interrupted("behind a step")


def mixed(folder, rng, few, more):
    """Two sources with broken lines between their records, each with functions, a schedule and an end of its own."""
    parts = []
    for name, records in (("few", few), ("more", more)):
        lines = [json.dumps(one) for one in records]
        for _ in range(3):
            lines.insert(rng.randrange(len(lines)), rng.choice(["{", '{"prompt": 3}', '{"x": "y"}']))
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(lines) + "\n")
        part = {"name": name, "source": str(file), "on_error": "skip", "weight": rng.choice([0.5, 1.0, 3.0])}
        part |= {"filter": rng.choice(["", "most"]), "transform": rng.choice(["", "longer"])}
        if rng.random() < 0.7:
            part |= {"schedule": {"0": 1.0, "2": rng.choice([0.1, 2.0])}, "schedule_by": "steps"}
        if rng.random() < 0.5:
            part |= {"schedule": {"0": 1.0, "100": rng.choice([0.1, 2.0])}, "schedule_by": "tokens"}
        parts.append(part | {"at_end": rng.choice(["leave", "repeat"] if name == "few" else ["stop", "repeat"])})
    return parts


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("seed", range(8))
def test_draws_are_those_of_an_undisturbed_run(tmp_path, drawn, seed):
    rng = random.Random(seed)
    plugin = tmp_path / "once.py"
    plugin.write_text(CODE)
    flow = ["sft", "grpo", "pretrain", "dpo"][seed % 4]
    sides = {"chosen": "7", "rejected": "8"} if flow == "dpo" else {}
    few = [{"prompt": f"{a}+1=", "answer": str(a + 1)} | sides for a in range(9)]
    more = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} | sides for a in range(10) for b in range(2, 10)]
    parts = mixed(tmp_path, rng, few, more)
    lengths = {"supervised": {"steps": STEPS, "batch": 4}}
    if flow == "grpo":
        lengths = {"supervised": {"steps": 0}, "algorithm": {"steps": STEPS}, "rollout": {"prompts": 4}}
    tokenizer = {"tokenizer": "bpe:300"} if flow == "pretrain" else {}
    reward = tiny.close_enough if flow == "grpo" else None

    def made(name, workers=WORKERS[0], **data):
        folder = tmp_path / name
        sections = {"plugins": [str(plugin)], "flow": flow, **lengths, **workers}
        run = {"dir": str(folder), "save_every": 2}
        return recipe(folder, parts, **sections, run=run, data={**tokenizer, **data})

    whole = tiny.run(made("whole"), reward=reward).directory
    order = defaultdict(list)
    for source, start, indices in drawn:
        assert start == len(order[source])
        order[source] += indices
    drawn.clear()
    same = seed < 4  # the ranks, and so the bits
    allow, step, loaders = ["data.loaders", "data.shadows", "cluster", "policy"], 0, flow != "pretrain"
    while True:
        step += rng.randint(1, 4)
        cut = Cut(step, rng.choice(["stop", "within", "behind"]))
        how = {"loaders": rng.choice([0, 1, 2])} if loaders else {}
        how |= {"shadows": rng.choice([0, 1])} if how.get("loaders") else {}
        here = made("cut", WORKERS[0] if same else rng.choice(WORKERS), **how)
        try:
            directory = tiny.run(here, reward=reward, name="cut", callbacks=[cut], allow=allow).directory
            break
        except Interrupted:
            continue
    assert drawn and all(indices == order[source][start : start + len(indices)] for source, start, indices in drawn)
    steps = {source: max(start + len(indices) for one, start, indices in drawn if one == source) for source in order}
    assert steps == {source: len(indices) for source, indices in order.items()}
    assert open_checkpoint(latest(directory / "checkpoints")).objects["progress"]["drawn"].items() >= steps.items()
    counts = [
        [{k: v for k, v in r.items() if k.startswith("mixture/")} for r in read_metrics(one)]
        for one in (whole, directory)
    ]
    assert counts[0] == counts[1]
    if same:
        assert tiny.weights(directory) == tiny.weights(whole)
        assert tiny.same(tiny.numbers(directory), tiny.numbers(whole))
    elif flow != "grpo":
        losses = [[r["loss"] for r in read_metrics(one)] for one in (whole, directory)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
