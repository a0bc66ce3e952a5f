"""Runs whose data come from loader processes: the bits, the order and the position of runs without."""

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests import forked
from tests.cluster.backends.test_ray import running
from tests.config.test_plugins import forget
from tests.errors import raises
from tests.flows import killed_loaders, tiny
from tests.flows.killed_loaders import WORKERS, loaders_here
from tests.flows.stand_ins import sampler
from tests.flows.test_mixture import recipe
from tests.flows.tiny import write
from tests.roles.test_source_loaders import until
from tilth.config.schema import MixtureSource
from tilth.core.errors import DataError, RecipeError
from tilth.core.random import stream
from tilth.data.mixture import Mixture
from tilth.flows.run import Run
from tilth.launch.loader_plans import read_plans
from tilth.roles.loader import PromptLoader
from tilth.roles.policy import PolicyWorker
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

LOADERS = {"loaders": 2}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def pair_parts(tmp_path):
    chosen = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(30)]
    files = [write(tmp_path / "a.jsonl", chosen[:20]), write(tmp_path / "b.jsonl", chosen[20:])]
    return [{"name": name, "source": file} for name, file in zip("ab", files)]


@pytest.fixture
def taken(monkeypatch):
    """Indices of each call of the loader role that a step makes, in order."""
    found = []
    for name in ("examples", "pairs"):
        method = getattr(PromptLoader, name)

        def noted(self, indices, then=(), method=method):
            found.append((np.asarray(indices).tolist(), np.asarray(then).tolist()))
            return method(self, indices, then)

        vars(noted).update(vars(method))
        monkeypatch.setattr(PromptLoader, name, noted)
    return found


SMALL = {"sft": {"supervised": {"steps": 4}}, "grpo": {"supervised": {"steps": 0}, "algorithm": {"steps": 2}}}


@pytest.mark.dist
@pytest.mark.slow  # a run that loses some is compared with one without loaders, below
@pytest.mark.parametrize("flow", ["sft", "grpo"])
def test_bits_are_those_of_a_run_without_loaders(tmp_path, parts, flow):
    given = {"flow": flow, **SMALL[flow]}
    runs = []
    for number in (0, 2):
        made = recipe(tmp_path / str(number), parts, **given, data={"loaders": number})
        runs.append(tiny.run(made, reward=None if flow == "sft" else tiny.close_enough).directory)
    plain, loaded = runs
    assert tiny.weights(loaded) == tiny.weights(plain)
    assert tiny.same(tiny.numbers(loaded), tiny.numbers(plain))
    assert all(record["loader/stall"] > 0 for record in read_metrics(plain))
    (plan,) = read_plans(loaded)
    assert plan.step == 1 and plan.most == 2 and {name for own in plan.shares for name in own} == {"few", "more"}
    assert not read_plans(plain) and not loaders_here()


@pytest.mark.slow
@pytest.mark.dist
def test_pairs_and_what_comes_next(tmp_path, pair_parts, taken):
    given = {"flow": "dpo", "supervised": {"steps": 3}}
    plain = tiny.run(recipe(tmp_path / "0", pair_parts, **given), reward=None).directory
    assert not any(then for _, then in taken)
    taken.clear()
    loaded = tiny.run(recipe(tmp_path / "1", pair_parts, **given, data=LOADERS), reward=None).directory
    assert tiny.weights(loaded) == tiny.weights(plain)
    steps = [one for one in taken if one[1]]
    assert len(steps) == 3
    assert [then for _, then in steps[:-1]] == [indices for indices, _ in steps[1:]]


# ---- prefetch ----


def test_a_look_ahead_moves_no_position(tmp_path):
    plain, looking = sampler(tmp_path), sampler(tmp_path, data={"loaders": 1})
    for _ in range(3):
        drawn = [one.draw("examples", 4).tolist() for one in (plain, looking)]
        assert drawn[0] == drawn[1] and plain.position() == looking.position()
        then = looking.then()["then"].tolist()
        assert looking.then() == plain.then() == {}
        plain.commit(), looking.commit()
        assert plain.state.drawn == looking.state.drawn
        assert looking.draw("examples", 4).tolist() == then
        looking.rollback()
        assert looking.then() == {} and looking.position() == plain.position()


def test_prompts_ahead_are_those_of_the_next_round_or_step(tmp_path):
    one = sampler(tmp_path, data={"loaders": 1})
    seen = []
    one.roles["loader"].encode = lambda asked, then=(): seen.append(np.asarray(then).tolist()) or asked
    one.sample(4)
    one.commit()
    assert len(seen) == 1 and one.draw("prompts", 6).tolist() == seen[0]
    assert one.state.drawn["prompts"] == 6


@pytest.mark.parametrize("at_end", ["stop", "leave", "repeat"])
def test_a_look_over_the_end_of_a_mixture_is_no_error(tmp_path, at_end):
    one = sampler(tmp_path, data={"loaders": 1})
    one.train = Mixture((MixtureSource(name="few", at_end=at_end),), [np.arange(10)], 4)
    drawn = [one.draw("examples", 4).tolist() for _ in range(2)]
    then = one.then()
    assert len({*drawn[0], *drawn[1]}) == 8 and one.position()["examples"] == 8
    if at_end == "repeat":
        assert len(then["then"]) == 4
        return
    assert then == {}
    with pytest.raises(DataError):  # the step that needs them
        one.draw("examples", 4)


# ---- exactly once ----


def order_of(made, steps):
    """Indices of each step of an undisturbed run."""
    from tilth.data.pairs import recipe_prompts
    from tilth.launch.build import mixed

    order = mixed(made, recipe_prompts(made).split(made.data.holdout)[0].parts, None)
    return [order.take(stream(made.seed, "examples"), 16 * step, 16).tolist() for step in range(steps)]


class Kill(tiny.Recorder):
    """Kills loaders after some steps, and stops the run after another one."""

    def __init__(self, kills, stop=None):
        super().__init__()
        self.kills, self.stop, self.killed = kills, stop, 0

    def on_step_end(self, run, step, metrics):
        if step in self.kills:
            for process in loaders_here():
                os.kill(process.pid, signal.SIGKILL)
                self.killed += 1
        if step == self.stop:
            run.stop("the test")


@pytest.mark.dist
def test_each_sample_comes_once_through_kills_a_resume_and_another_number_of_loaders(tmp_path, parts, taken):
    undisturbed = recipe(tmp_path / "a", parts)
    whole = tiny.run(undisturbed, reward=None).directory
    taken.clear()
    kill = Kill({1, 3}, stop=4)
    with raises(Interrupted, "stop"):
        tiny.run(recipe(tmp_path / "b", parts, data={"loaders": 1}), reward=None, name="cut", callbacks=[kill])
    assert kill.killed == 2
    again = Kill({6})
    changed = recipe(tmp_path / "b", parts, data=LOADERS)
    cut = tiny.run(changed, reward=None, name="cut", callbacks=[again], allow=["data.loaders"])
    assert again.killed == 2
    wanted = order_of(undisturbed, 8)
    steps = [indices for indices, _ in taken if indices in wanted]
    assert steps == wanted
    assert tiny.weights(cut.directory) == tiny.weights(whole)
    assert tiny.same(tiny.numbers(cut.directory), tiny.numbers(whole))
    assert [plan.most for plan in read_plans(cut.directory)] == [1, 2]


class KillOfAWorker(tiny.Recorder):
    """Kills a loader of a worker behind step 3."""

    def on_step_end(self, run, step, metrics):
        if step == 3:
            backend = run.policy._dispatch.backend
            found = [one for rank in range(2) for one in loaders_here(backend.probe(rank).pid, recursive=True)]
            self.loaders = [process.pid for process in found]
            os.kill(self.loaders[0], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.dist
def test_loaders_below_workers_of_ray_give_the_samples_of_local_ones(tmp_path, parts, ray_here, monkeypatch):
    consumed, whole = [], Run._given

    def given(self, kind, count):
        for batch in whole(self, kind, count):
            consumed.append(batch["prompt"].tolist())
            yield batch

    monkeypatch.setattr(Run, "_given", given)
    runs = []
    for backend in ("local", "ray"):
        workers = {**WORKERS, "cluster": {"backend": backend, "workers": 2}}
        made = recipe(tmp_path / backend, parts, **workers, data={"loaders": 2, "shadows": 1})
        kill = KillOfAWorker()
        runs.append(tiny.run(made, reward=None, callbacks=[kill]).directory)
        assert len(kill.loaders) == 4
        until(lambda kill=kill: not any(map(running, kill.loaders)))
    local, ray = runs
    assert consumed == 2 * order_of(made, 8)
    assert tiny.weights(ray) == tiny.weights(local)
    assert tiny.same(tiny.numbers(ray), tiny.numbers(local))


# ---- refused by name ----


def test_loaders_that_have_no_use(tmp_path, parts):
    with raises(RecipeError, "data.loaders"):
        tiny.recipe(tmp_path, flow="pretrain", data={"loaders": 1})
    with raises(RecipeError, "data.shadows"):
        recipe(tmp_path, parts, data={"shadows": 1})


LONG = [{"prompt": "+".join("12345678"[: a % 8 + 2]) + "=", "answer": str(a)} for a in range(40)]


@pytest.fixture
def killed(tmp_path, parts, monkeypatch):
    """Folder of a run over three sources, the third with samples that are longer than a rank takes."""
    monkeypatch.setattr(PolicyWorker, "sft_step", PolicyWorker.sft_step)  # the plugin is imported here too
    folder = tmp_path / "killed"
    folder.mkdir()
    parts.append({"name": "long", "source": write(folder / "long.jsonl", LONG)})
    (folder / "parts.json").write_text(json.dumps(parts))
    yield folder
    forget()


def check_once(folder, steps):
    """Each step that began had the samples of an undisturbed run, in order, and ranks have learned from each once."""
    wanted, learned = order_of(killed_loaders.made(folder, {}), steps), {}
    for step, ids, own in killed_loaders.consumed(folder):
        assert ids == wanted[step - 1], step
        learned[step] = own  # of the last attempt
    assert {step: sorted(own) for step, own in learned.items()} == {
        step: sorted(ids) for step, ids in enumerate(wanted, 1)
    }


def learned_as(one, other):
    """Runs on other ranks: their losses, and the samples of each source."""
    records = [read_metrics(directory) for directory in (one, other)]
    few, more = ([{k: v for k, v in r.items() if k.startswith("mixture/")} for r in own] for own in records)
    assert few == more
    assert [r["loss"] for r in records[0]] == pytest.approx([r["loss"] for r in records[1]], rel=1e-3)


@pytest.mark.dist
def test_each_sample_comes_once_on_other_ranks_and_whatever_is_killed(killed):
    """A worker, a loader, and then the controller, which ends here by itself."""
    kill, stop = killed_loaders.Kill(killed, ["loader", "", "worker", ""]), Kill((), stop=2)
    with killed_loaders.begins_noted(killed):
        with raises(Interrupted, "stop"):
            made = killed_loaders.made(killed, {}, steps=4, loaders=1)
            tiny.run(made, reward=None, callbacks=[kill, stop])
        made = killed_loaders.made(killed, {"hdp": 2}, steps=4, loaders=2)
        tiny.run(made, reward=None, callbacks=[kill], allow=["data.loaders", "cluster", "policy"])
    assert [one["what"] for one in killed_loaders.noted(killed / "killed.jsonl")] == ["loader", "worker"]
    check_once(killed, 4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("balance", "seed"), [("", 2), ("none", 1), ("tokens", 2), ("cost", 3)])
def test_each_sample_comes_once_whatever_is_killed(tmp_path, killed, balance, seed):
    """Loaders, workers and the controller, at random, each new controller with another number of loaders; with a
    balance also of ranks."""
    command = [*forked.python(), "-m", "tests.flows.killed_loaders", str(killed), str(seed)]
    for attempt in range(killed_loaders.STEPS):
        how = [str(attempt), *filter(None, [balance])]
        ended = subprocess.run([*command, *how], cwd=ROOT, capture_output=True, text=True, timeout=600)
        if ended.returncode != -signal.SIGKILL:
            break
    assert ended.returncode == 0, ended.stderr
    counts = Counter(one["what"] for one in killed_loaders.noted(killed / "killed.jsonl"))
    assert counts.total() >= 20 and min(counts[what] for what in ("loader", "worker", "controller")) >= 1
    assert not balance or attempt >= len(killed_loaders.LAYOUTS)
    check_once(killed, killed_loaders.STEPS)
    shutil.copy(killed / "parts.json", tmp_path)
    (found,) = killed.glob("*-001")
    if balance:
        undisturbed = tiny.run(killed_loaders.made(tmp_path, {}, "none"), reward=None).directory
        return learned_as(found, undisturbed)
    undisturbed = tiny.run(killed_loaders.made(tmp_path, {"fsdp": 2}), reward=None).directory
    assert tiny.weights(found) == tiny.weights(undisturbed)
    assert tiny.same(tiny.numbers(found), tiny.numbers(undisturbed))
