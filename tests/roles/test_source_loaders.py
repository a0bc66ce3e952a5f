"""Loaders of sources as processes: the samples of one process whatever their number, plan and deaths."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.reading import load_pairs
from tests.errors import raises
from tilth.config.schema import DataConfig, MixtureSource
from tilth.core.errors import DataError
from tilth.data import index as kept_index
from tilth.data.examples import tokenised
from tilth.data.origin import Home
from tilth.data.prompts import PromptSet, load_source
from tilth.data.records import Joined
from tilth.data.sources import from_records
from tilth.data.template import data_template, template_names
from tilth.data.tokenizer import Tokenizer
from tilth.process.restarts import RestartPolicy
from tilth.roles import source_loaders
from tilth.roles.loader import PromptLoader
from tilth.roles.source_loader import LoaderSettings, OpenSources, Places
from tilth.roles.source_loaders import SourceLoaders, kept_places

pytestmark = pytest.mark.dist

LETTERS = "".join(map(chr, range(32, 127)))
TOKENIZER = Tokenizer.characters(LETTERS)
CONTEXT = 200
PLAN = [{"few": 1.0, "more": 0.25}, {"more": 0.75}]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def sums(first, count):
    return [{"prompt": f"{first + i}+1=", "answer": str(first + i + 1)} for i in range(count)]


PLANS = [[{"more": 1.0}, {"few": 0.5, "more": 0.1}, {"few": 0.5}], [{"given": 1.0}], [], [{}, {"few": 1.0}], PLAN]


def three_sources(folder, template=""):
    """Two files, of which the second may have a template of its own, and records by value."""
    parts = [
        {"name": "few", "source": write(folder / "few.jsonl", sums(10, 30))},
        {"name": "more", "source": write(folder / "more.jsonl", sums(100, 70)), "template": template},
    ]
    return DataConfig(source="", mixture=tuple(map(MixtureSource.model_validate, parts)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sources without a template, which takes a loader longer to import than everything else."""
    return three_sources(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data):
    files = load_source(data).source
    return PromptSet(Joined((*files.parts, from_records(sums(1000, 20))), held=False))


def sources(whole):
    return dict(zip(("few", "more", "given"), whole.source.parts))


@pytest.fixture(scope="module")
def tokenizer():
    """One that knows the turns of chatml."""
    return Tokenizer.train([LETTERS, "<|im_start|>user\n"], 300)


@pytest.fixture
def loaders(data, whole, tokenizer):
    made = []

    def make(plan, **how):
        made.append(
            SourceLoaders(sources(whole), LoaderSettings(template_names(data), tokenizer, CONTEXT), plan, **how)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def turns(tmp_path_factory):
    """Sources one of which has a template."""
    return three_sources(tmp_path_factory.mktemp("turns"), "chatml")


@pytest.fixture(scope="module")
def shared(turns, whole, tokenizer):
    """Two loaders for the tests that lose none, of the sources with a template."""
    made = SourceLoaders(sources(whole), LoaderSettings(template_names(turns), tokenizer, CONTEXT), PLAN)
    yield made
    made.close()


def here(kind, data, whole, tokenizer, indices):
    template = data_template(data, tokenizer, (), whole.starts)
    return tokenised(kind, whole, indices, template, CONTEXT)


def same(mine, other):
    assert len(mine) == len(other)
    for one, two in zip(mine, other):
        for a, b in zip((*one.rows, *one.masks), (*two.rows, *two.masks), strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
        assert one.margins == two.margins


def until(true, seconds=30.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["examples", "prompts", "begins", "episodes"])
def test_samples_are_those_that_the_role_makes(shared, turns, whole, tokenizer, kind):
    """Of any number of loaders, in the order that is asked for, one twice, and from a source outside of the plan."""
    indices = [*np.random.default_rng(0).permutation(120).tolist(), 3, 119]
    same(shared.take(kind, indices), here(kind, turns, whole, tokenizer, indices))
    assert shared.stalled > 0
    assert set(shared.costs()) == {"few", "more", "given"} and all(cost > 0 for cost in shared.costs().values())


def test_pairs(tmp_path, tokenizer):
    records = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no", "margin": i} for i in (1, 2, 2, 3)]
    records[2]["chosen"] = "certainly"
    data = DataConfig(source=write(tmp_path / "a.jsonl", records))
    prompts = load_pairs(data)
    made = SourceLoaders(
        {"source": prompts.source}, LoaderSettings(template_names(data), tokenizer, 50), [{"source": 1.0}]
    )
    found = made.take("pairs", [1, 0, 2])
    made.close()
    same(found, tokenised("pairs", prompts, [1, 0, 2], data_template(data, tokenizer), 50))
    assert [one.margins for one in found] == [(2.0, 2.0), (1.0,), (3.0,)]


def test_what_was_asked_for_has_come_before_it_is_taken(shared):
    shared.ask("examples", range(64))
    until(lambda: len(shared._come) == 64)
    before = shared.stalled
    shared.take("examples", range(64))
    assert shared.stalled - before < 0.5


def test_no_more_is_ahead_than_may_be_and_what_is_not_asked_for_again_is_forgotten(
    shared, turns, whole, tokenizer, monkeypatch
):
    made = shared
    monkeypatch.setattr(made, "_ahead", 10)
    made.ask("examples", range(64))
    until(lambda: len(made._come) == 10)
    made.ask("examples", range(60, 64))
    until(lambda: len(made._come) == 4)
    assert {key[1] for key in made._come} == set(range(60, 64))
    same(made.take("examples", range(64)), here("examples", turns, whole, tokenizer, range(64)))
    assert not made._come and not made._open


def test_a_plan_changes_who_loads_and_no_sample(loaders, data, whole, tokenizer):
    made = loaders(PLAN)
    for number, plan in enumerate(PLANS):
        indices = np.random.default_rng(number).permutation(120)[:50].tolist()
        made.ask("examples", indices)
        made.follow(plan)
        same(made.take("examples", indices), here("examples", data, whole, tokenizer, indices))
    made.follow([{"few": 1.0}])
    until(lambda: len(made.pids()) == 1)


# ---- losses ----


def test_a_lost_loader_has_a_successor_that_makes_what_was_open(loaders, data, whole, tokenizer):
    made = loaders([{"few": 1.0, "more": 1.0}])
    made.take("examples", [0, 40])
    before = made.pids()
    made.ask("examples", range(100))
    for pid in before:
        kill(pid)
    same(made.take("examples", range(100)), here("examples", data, whole, tokenizer, range(100)))
    assert not set(before) & set(made.pids())


def test_a_shadow_takes_over_and_another_takes_its_place(loaders, data, whole, tokenizer):
    made = loaders([{"few": 1.0}], shadows=1)
    (place,) = made._places
    until(lambda: len(made.pids()) == 2 and not any(child.starting for child in place.team))
    first, shadow = made.pids()
    kill(first)
    same(made.take("examples", range(30)), here("examples", data, whole, tokenizer, range(30)))
    until(lambda: len(made.pids()) == 2)
    assert made.pids()[0] == shadow and first not in made.pids()


def test_a_silent_loader_is_lost(loaders, data, whole, tokenizer):
    made = loaders([{"few": 1.0}], silence=0.5)
    made.take("examples", [0])
    (pid,) = made.pids()
    os.kill(pid, signal.SIGSTOP)
    same(made.take("examples", [1]), here("examples", data, whole, tokenizer, [1]))
    assert pid not in made.pids()


class Slow(Joined):
    """A source that takes its time for each sample."""

    def prompt(self, index):
        time.sleep(0.25)
        return super().prompt(index)


def test_a_slow_loader_that_goes_on_is_not_lost(tmp_path):
    data = DataConfig(source=write(tmp_path / "a.jsonl", sums(0, 8)))
    slow = Slow((load_source(data).source,), held=False)
    made = SourceLoaders(
        {"source": slow}, LoaderSettings(template_names(data), TOKENIZER, 50), [{"source": 1.0}], silence=1.0
    )
    made.ask("examples", range(8))
    until(made.pids)
    before = made.pids()
    assert len(made.take("examples", range(8))) == 8 and made.pids() == before
    made.close()


@pytest.fixture
def few_restarts(monkeypatch):
    """A loader is replaced once in a row, in place of three times: each takes a second of a processor to start."""
    monkeypatch.setattr(source_loaders, "RESTARTS", RestartPolicy(fruitless=1))


def test_a_loader_that_is_lost_again_and_again_is_named(loaders):
    made = loaders([{"few": 1.0}])
    killed = set()

    def killing():
        while len(killed) < 4:
            for pid in set(made.pids()) - killed:
                kill(pid)
                killed.add(pid)
            time.sleep(0.01)

    thread = threading.Thread(target=killing)
    thread.start()
    with raises(DataError, "data.loaders.lost"):
        made.take("examples", [0])
    thread.join()
    assert len(killed) == 4


def test_a_loader_that_is_lost_while_no_sample_is_asked_starts_again_with_the_next(loaders, data, whole, tokenizer):
    """And the loss does not count."""
    made = loaders([{"few": 1.0}])
    same(made.take("examples", [1]), here("examples", data, whole, tokenizer, [1]))
    kill(made.pids()[0])
    while made.pids():
        time.sleep(0.005)
    assert not made._places[0].lost[True]
    same(made.take("examples", [0]), here("examples", data, whole, tokenizer, [0]))


def test_losses_with_samples_in_between_are_not_in_a_row(loaders, data, whole, tokenizer, few_restarts):
    """Also where the shadow has not opened its sources before it takes over."""
    made = loaders([{"few": 1.0}], shadows=1)
    for index in range(3):
        same(made.take("examples", [index]), here("examples", data, whole, tokenizer, [index]))
        if index < 2:
            kill(made.pids()[0])


def test_a_shadow_that_is_lost_again_and_again_is_named(loaders, few_restarts):
    made = loaders([{"few": 1.0}], shadows=1)
    made.take("examples", [0])
    killed = set()
    while len(killed) < 2:
        for pid in set(made.pids()[1:]) - killed:
            kill(pid)
            killed.add(pid)
        time.sleep(0.005)
    until(lambda: made._failed is not None)
    with raises(DataError, "data.shadows.lost"):
        made.take("examples", [1])


def test_a_loader_that_is_ready_shows_that_its_shadow_can_be(loaders):
    """One that was lost while the other one took over was the last of its row."""
    made = loaders([{"few": 1.0}])
    made.take("examples", [0])
    place = made._places[0]
    place.lost[False] = 1
    made.follow([{"few": 1.0, "more": 1.0}])
    until(lambda: not place.lost[False])


def test_loaders_end_with_their_owner(data, whole, tokenizer):
    made = SourceLoaders(sources(whole), LoaderSettings(template_names(data), tokenizer, CONTEXT), [{"few": 1.0}])
    made.take("examples", [0])
    (pid,) = made.pids()
    owner = PromptLoader(whole, None, CONTEXT, None, loaders=made)
    del made, owner
    until(lambda: not os.path.exists(f"/proc/{pid}"))


# ---- errors ----


def test_errors_are_those_of_the_role_and_come_when_their_sample_is_taken(turns, whole, tokenizer):
    made = SourceLoaders(sources(whole), LoaderSettings(template_names(turns), tokenizer, 12), [{"more": 1.0}])
    made.ask("examples", [40, 0, 1])
    found = made.take("examples", [0, 1])
    with pytest.raises(DataError) as mine:
        made.take("examples", [0, 40])
    with pytest.raises(DataError) as other:
        tokenised("examples", whole, [0, 40], data_template(turns, tokenizer, (), whole.starts), 12)
    assert (mine.value.key, str(mine.value)) == (other.value.key, str(other.value))
    same(made.take("examples", [0, 1]), found)
    made.close()
    with raises(DataError, "data.loaders.closed"):
        made.take("examples", [0])


def test_a_source_that_has_changed_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    data = DataConfig(source=write(file, sums(0, 5)))
    made = load_source(data)
    write(file, sums(1, 5))
    one = SourceLoaders({"source": made.source}, LoaderSettings(template_names(data), TOKENIZER, 50), [{"source": 1.0}])
    with raises(DataError, "a.jsonl.fingerprint"):
        one.take("examples", [0])
    one.close()


def test_a_source_is_opened_when_its_first_sample_is_due_and_once(tmp_path):
    file = tmp_path / "a.jsonl"
    good, bad = from_records(sums(0, 3)), load_source(DataConfig(source=write(file, sums(0, 5)))).source
    sent = {0: pickle.dumps(good), 1: pickle.dumps(bad)}
    write(file, sums(1, 5))
    told = list[str]()
    opened = OpenSources(Places(np.array([0, 3, 8]), media=False), told.append)
    opened.keep(sent)
    assert told == [] and opened.prompt(2).text == "2+1=" and told == ["opening", "opened"]
    for _ in range(2):
        with raises(DataError, "a.jsonl.fingerprint"):
            opened.prompt(3)
        assert told == ["opening", "opened"] * 2
    opened.keep({0: b""})
    assert opened.prompt(1).text == "1+1=" and told == ["opening", "opened"] * 2


@pytest.mark.parametrize("kept", ["in memory", "in the cache"])
def test_a_loader_imports_what_makes_samples_and_nothing_that_reads_files(tmp_path, monkeypatch, kept):
    if kept == "in the cache":
        monkeypatch.setattr(kept_index, "IN_MEMORY", 0)
    made = load_source(DataConfig(source=write(tmp_path / "a.jsonl", sums(0, 5))), home=Home(str(tmp_path))).source
    (tmp_path / "sent").write_bytes(pickle.dumps(made))
    unused = ("torch", "transformers", "pydantic", "pyarrow", "tilth.config.plugins", "tilth.data.formats")
    line = "import pickle, sys, tilth.roles.source_loader; pickle.load(open(sys.argv[1], 'rb')).prompt(0); "
    line += f"sys.exit(str([n for n in {unused} if n in sys.modules] or ''))"
    found = subprocess.run([sys.executable, "-c", line, str(tmp_path / "sent")], stderr=subprocess.PIPE, text=True)
    assert found.stderr.strip() == ""


# ---- places ----

SETS = st.lists(st.frozensets(st.integers(0, 9), max_size=4), max_size=6)


@given(SETS, SETS)
def test_places_are_those_of_the_plan_and_what_is_open_stays(wanted, now):
    found = kept_places(wanted, now)
    assert sorted(map(sorted, found)) == sorted(map(sorted, wanted))
    first = [len(one & held) for one, held in zip(found, now)]
    assert not first or first[0] == max(len(one & now[0]) for one in wanted)


@given(SETS)
def test_the_same_plan_again_moves_nothing(wanted):
    assert kept_places(wanted[::-1], wanted) == list(map(set, wanted))


def test_limits_are_stated():
    assert source_loaders.SILENCE == 60 and source_loaders.RESTARTS.again(fruitless=3)
    assert not source_loaders.RESTARTS.again(fruitless=4)
