"""Sources with filters, transforms and broken records: the samples of a slow pass by hand, however they are kept."""

import hashlib
import json
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.config.plugins import forget, load_plugins
from tilth.config.schema import DataConfig, MixtureSource
from tilth.core.errors import DataError, PluginError
from tilth.data import index
from tilth.data.origin import Home, RecordOrigin
from tilth.data.sources import read_prompts

CODE = """
import tilth

@tilth.transform("short")
def short(record):
    return len(record["prompt"]) < 3

@tilth.transform("lucky")
def lucky(record, random):
    return bool(random.random() < 0.5)

@tilth.transform("noisy")
def noisy(record, random):
    return {**record, "prompt": record["prompt"] + str(random.integers(10**9))}

@tilth.transform("careful")
def careful(record):
    return picky(record) is record

@tilth.transform("picky")
def picky(record):
    if "b" in record["prompt"]:
        raise ValueError("no b")
    return record

@tilth.transform("in_place")
def in_place(record, random):
    record["prompt"] += str(random.integers(10))
    record["tags"].append("seen")
    return record
"""
FUNCTIONS: dict = {}


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory):
    file = tmp_path_factory.mktemp("plugin") / "once.py"
    file.write_text(CODE)
    load_plugins([str(file)])
    exec(CODE.replace("import tilth", "").replace("@tilth", "#"), FUNCTIONS)
    yield
    forget([])


class ByIndex:
    """Records by index, the same objects each time; an error in place of one that is broken."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        if self.records[index] is None:
            raise OSError("broken")
        return self.records[index]


def by_hand(records, part, seed):
    """Text and info of each prompt, one record at a time."""
    found = []
    apart = " filter" if part.transform in ("noisy", "in_place") else ""  # which take random numbers too
    for sample, record in enumerate(records):

        def call(name, given, use="", sample=sample):
            words = f"{seed} {part.name} {sample}{use}".encode()
            key = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little")
            function = FUNCTIONS[name]
            more = [np.random.Generator(np.random.Philox(key=key))] * (function.__code__.co_argcount - 1)
            return function(given, *more)

        if record is None:
            continue
        record = json.loads(json.dumps(record))
        try:
            if part.filter and not call(part.filter, json.loads(json.dumps(record)), apart):
                continue
            record = call(part.transform, record) if part.transform else record
        except ValueError:
            continue
        if record["prompt"]:
            found.append((record["prompt"], {name: value for name, value in record.items() if name != "prompt"}))
    return found


def origin(part, data, folder, given=()):
    return RecordOrigin("data.mixture.x", part, data, {}, given, home=Home(str(folder), 5))


PROMPTS = st.sampled_from(["", "a", "bb", "ccc", "ab", "\u00e9"])
RECORDS = st.lists(
    st.none() | st.fixed_dictionaries({"prompt": PROMPTS, "tags": st.just(["x"]).map(list)}), min_size=1, max_size=12
)


@settings(max_examples=examples(100), deadline=None)
@given(
    records=RECORDS,
    keep=st.sampled_from(["", "short", "lucky", "careful"]),
    change=st.sampled_from(["", "noisy", "picky", "in_place"]),
    kept=st.sampled_from(["memory", "file", "values", "index"]),
)
def test_samples_are_those_of_a_pass_by_hand_at_each_start_and_in_each_epoch(
    tmp_path_factory, records, keep, change, kept
):
    folder = tmp_path_factory.mktemp("once")
    file = folder / "d.jsonl"
    file.write_text("".join("{\n" if one is None else json.dumps(one) + "\n" for one in records))
    part = MixtureSource(name="x", source=str(file), filter=keep, transform=change, on_error="skip")
    expected = by_hand(records, part, 5)
    given = {"values": [one or {} for one in records], "index": ByIndex(records)}.get(kept)
    brought = () if given is None else (given,)
    found = []
    with patch.object(index, "IN_MEMORY", 0 if kept == "file" else 1 << 18):
        for _ in range(2):
            try:
                found.append(read_prompts(origin(part, DataConfig(), folder, brought)))
            except DataError:
                assert not expected
                return
    for source in (*found, found[0]):
        prompts = [source.prompt(i) for i in range(len(source))]
        assert [(p.text, p.info) for p in prompts] == expected
        assert [p.index for p in prompts] == list(range(len(expected)))
    assert found[0].fingerprint() == found[1].fingerprint()
    stops = origin(part.model_copy(update={"on_error": "stop"}), DataConfig(), folder, brought)
    if len(expected) < len(records) and not (keep or change):
        with pytest.raises((DataError, PluginError)):
            read_prompts(stops)
