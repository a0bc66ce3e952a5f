"""Records on their way to prompts: filters, transforms, errors by policy, each counted; sources by index."""

import gzip
import json
import pickle

import numpy as np
import pytest

from tests.errors import raises
from tilth.config.load import from_dict
from tilth.config.plugins import forget, load_plugins
from tilth.core.errors import DataError, PluginError, RecipeError
from tilth.core.media import MediaItem
from tilth.data import index, origin
from tilth.data.computed import has_media
from tilth.data.origin import Home
from tilth.data.prompts import PromptSet, load_source
from tilth.data.sources import from_records

CODE = """
import tilth

@tilth.transform("short")
def short(record):
    return len(record["prompt"]) < 3

@tilth.transform("shout")
def shout(record):
    return {**record, "prompt": record["prompt"].upper()}

@tilth.transform("noisy")
def noisy(record, random):
    return {**record, "prompt": record["prompt"] + str(random.integers(10**9))}

@tilth.transform("greedy")
def greedy(record):
    return bool(record.pop("prompt"))

@tilth.transform("half")
def half(record, random):
    return random.random() < 0.5

@tilth.transform("number")
def number(record, random):
    return {"prompt": str(random.random())}

@tilth.transform("none")
def none(record, numbers=None):
    return number(record, numbers)

@tilth.transform("named")
def named(record, rng=0):
    return number(record, rng)

@tilth.transform("rest")
def rest(record, *more):
    return number(record, *more)

@tilth.transform("with_default")
def with_default(record, sign="+", *, times=2):
    return {"prompt": record["prompt"] + times * sign}

@tilth.transform("kinds")
def kinds(record):
    import numpy as np
    return {**record, "array": np.arange(2000), "number": np.float64(0.5), "set": {"b", "a"}, "of": {"in": (1, b"x")}}

@tilth.transform("address")
def address(record):
    return {**record, "it": object()}

@tilth.transform("names")
def names(record):
    return {**record, 1: "one", "answer": "two"}

@tilth.transform("fails")
def fails(record):
    if record["prompt"] == "b":
        raise ValueError("no b")
    return record

@tilth.transform("wrong")
def wrong(record):
    return 3
"""


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    load_plugins([str(file)])
    yield str(file)
    forget([])


def write(path, *records):
    path.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in records))
    return str(path)


def mixed(plugin, *parts):
    recipe = {"plugins": [plugin] if plugin else [], "data": {"mixture": list(parts)}, "reward": {"function": "exact"}}
    return from_dict(recipe).data


@pytest.fixture
def letters(tmp_path):
    return write(tmp_path / "letters.jsonl", *({"prompt": p} for p in ("a", "bb", "ccc", "b", "d")))


def texts(data, **home):
    return [p.text for p in load_source(data, home=Home(**home))]


def test_filter_and_transform(plugin, letters):
    data = mixed(plugin, {"name": "x", "source": letters, "filter": "short", "transform": "shout"})
    prompts = load_source(data)
    assert [p.text for p in prompts] == ["A", "BB", "B", "D"] and [p.index for p in prompts] == [0, 1, 2, 3]
    assert list(prompts.left_out()) == ["source 1: 1 by filter left out"]


def test_random_numbers_are_those_of_seed_source_and_sample(plugin, letters):
    part = {"name": "x", "source": letters, "transform": "noisy"}
    one, again = texts(mixed(plugin, part), seed=1), texts(mixed(plugin, part), seed=1)
    assert one == again and len({text[-9:] for text in one}) == 5
    assert set(one).isdisjoint(texts(mixed(plugin, part), seed=2))
    assert set(one).isdisjoint(texts(mixed(plugin, {**part, "name": "y"}), seed=1))
    few = texts(mixed(plugin, {**part, "filter": "short"}), seed=1)  # the filter moves no sample's numbers
    assert few == [text for text in one if not text.startswith("ccc")]


def test_a_filter_decides_and_changes_nothing(plugin, letters):
    """Neither the record nor the random numbers of the transform behind it."""
    part = {"name": "x", "source": letters, "transform": "noisy"}
    assert texts(mixed(plugin, {**part, "filter": "greedy"})) == texts(mixed(plugin, part))
    halves = texts(mixed(plugin, {"name": "x", "source": letters, "filter": "half", "transform": "number"}))
    assert len(halves) < 5 and any(float(text) >= 0.5 for text in halves)  # what the filter saw of them was less


def test_a_filter_alone_keeps_the_numbers_of_seed_source_and_sample(plugin, letters):
    part = {"name": "x", "source": letters}
    numbers = [float(text) for text in texts(mixed(plugin, {**part, "transform": "number"}))]
    wanted = [text for text, at in zip(texts(mixed(plugin, part)), numbers, strict=True) if at < 0.5]
    assert texts(mixed(plugin, {**part, "filter": "half"})) == wanted
    shouted = texts(mixed(plugin, {**part, "filter": "half", "transform": "shout"}))
    assert shouted == [text.upper() for text in wanted]


def test_a_list_of_numbers_is_copied_in_one_pass(monkeypatch):
    calls, owned = [], origin._owned
    monkeypatch.setattr(origin, "_owned", lambda value: calls.append(value) or owned(value))
    given = {"ids": list(range(4000)), "turns": [{"said": [1]}]}
    found = origin._owned(given)
    assert found == given and len(calls) < 10
    assert found["ids"] is not given["ids"] and found["turns"][0]["said"] is not given["turns"][0]["said"]


@pytest.mark.parametrize("name", ["none", "named", "rest"])
def test_a_second_place_for_random_numbers_gets_them(plugin, letters, name):
    given, wanted = ({"name": "x", "source": letters, "transform": one} for one in (name, "number"))
    assert texts(mixed(plugin, given)) == texts(mixed(plugin, wanted))


def test_a_default_of_a_function_is_no_place_of_random_numbers(plugin, letters):
    assert texts(mixed(plugin, {"name": "x", "source": letters, "transform": "with_default"}))[0] == "a++"


def test_what_a_transform_returns_is_plain_and_whole(plugin, letters):
    info = load_source(mixed(plugin, {"name": "x", "source": letters, "transform": "kinds"}))[0].info
    assert info == {"array": list(range(2000)), "number": 0.5, "set": ["a", "b"], "of": {"in": [1, "eA=="]}}
    assert type(info["number"]) is float
    for name, key in (("address", "letters.jsonl:1.type.object"), ("names", "letters.jsonl:1.names")):
        with raises(DataError, key):
            load_source(mixed(plugin, {"name": "x", "source": letters, "transform": name})).fingerprint()


@pytest.mark.parametrize("always_stored", [False, True])
def test_errors_stop_or_are_counted(plugin, letters, tmp_path, monkeypatch, always_stored):
    if always_stored:
        monkeypatch.setattr(index, "IN_MEMORY", 0)
    part = {"name": "x", "source": letters, "transform": "fails"}
    with raises(PluginError, "data.mixture.x.transform"):
        load_source(mixed(plugin, part))
    for _ in range(2):  # the second time from the entry
        prompts = load_source(mixed(plugin, {**part, "on_error": "skip"}), home=Home(str(tmp_path)))
        assert [p.text for p in prompts] == ["a", "bb", "ccc", "d"]
        (line,) = prompts.left_out()
        first = f"{letters}:4: data.mixture.x.transform: transform 'fails' (mine.py:"
        assert line.startswith(f"source 1: 1 by errors left out (first: {first}") and "no b" in line


def test_a_transform_that_returns_something_else(plugin, letters):
    with raises(DataError, "letters.jsonl:1.wrong"):
        load_source(mixed(plugin, {"name": "x", "source": letters, "transform": "wrong"}))
    with raises(DataError, "letters.jsonl:1.shout"):
        load_source(mixed(plugin, {"name": "x", "source": letters, "filter": "shout"}))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_records_that_cannot_be_read_are_counted_and_those_behind_them_read(tmp_path, kind):
    content = {
        "jsonl": b'{"prompt": "a"}\n{"prompt"\n\xff\n[1]\n{"prompt": ""}\n{"x": 1}\n{"prompt": "b"}\n',
        "json": b'[{"prompt": "a"}, 3, {"prompt": 4}, {"prompt": ""}, null, {"x": 1}, {"prompt": "b"}]',
        "csv": b"prompt,n\na,1\nx\ny,1,2\n,1\nz,1,2,3\nw\nb,2\n",
    }[kind]
    (tmp_path / f"d.{kind}").write_bytes(content)
    part = {"name": "x", "source": str(tmp_path / f"d.{kind}")}
    with raises(DataError, {"jsonl": "d.jsonl:2.json", "json": "d.json item 2.type", "csv": "d.csv:3.values"}[kind]):
        load_source(mixed("", part))
    prompts = load_source(mixed("", {**part, "on_error": "skip"}))
    assert [p.text for p in prompts] == ["a", "b"] and next(prompts.left_out()).startswith("source 1: 5 by errors")


def test_a_source_of_errors_alone_is_empty(tmp_path):
    file = write(tmp_path / "d.jsonl", "{\n", "[\n")
    with raises(DataError, "d.jsonl") as caught:
        load_source(mixed("", {"name": "x", "source": file, "on_error": "skip"}))
    assert "2 by errors left out" in str(caught.value) and "d.jsonl:1" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("d.jsonl", b"", "d.jsonl"),
        ("d.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99)[:-9], "d.jsonl.gz"),
        ("d.jsonl.gz", gzip.compress(b" " * (1 << 27)), "d.jsonl.gz.size"),
        ("d.txt", b"\xff\xfe", "d.txt:1.utf8"),
        ("d.parquet", b"PAR1", "d.parquet"),
        ("d.what", b"x", "d.what.format"),
    ],
    ids=["empty", "truncated", "bomb", "utf8", "parquet", "unknown"],
)
def test_a_file_that_cannot_be_read_stops_whatever_the_policy(tmp_path, name, content, key):
    """Its records cannot be counted, so that none is left out."""
    (tmp_path / name).write_bytes(content)
    with raises(DataError, key):
        load_source(
            mixed("", {"name": "x", "source": str(tmp_path / name), "on_error": "skip", "columns": {"prompt": "text"}})
        )


def test_a_missing_file_names_its_source(letters):
    with raises(DataError, "data.mixture.web"):
        load_source(mixed("", {"name": "code", "source": letters}, {"name": "web", "source": letters[:-1]}))


def test_errors_of_a_source_have_its_own_keys(tmp_path):
    file = write(tmp_path / "d.jsonl", {"question": "a"})
    with raises(DataError, "d.jsonl:1.prompt.missing") as caught:
        load_source(mixed("", {"name": "web", "source": file}))
    assert "try data.mixture.web.columns.prompt=question" in str(caught.value)
    with raises(DataError, "d.jsonl") as caught:
        load_source(mixed("", {"name": "web", "source": file, "on_error": "skip"}))
    assert "data.mixture.web = " in str(caught.value)
    assert "try data.mixture.web.columns.prompt=question" in str(caught.value)


def test_records_are_transformed_anew_when_a_module_beside_the_plugin_changes(tmp_path, letters, monkeypatch):
    monkeypatch.setattr(index, "IN_MEMORY", 0)
    file = tmp_path / "with_helper.py"
    file.write_text(
        "import tilth, mark_of_mine\n@tilth.transform('marked')\n"
        "def marked(record):\n    return {'prompt': record['prompt'] + mark_of_mine.MARK}\n"
    )
    found = []
    for mark in ("!", "??", "??"):  # of another size: Python compares it, and seconds, with its bytecode
        (tmp_path / "mark_of_mine.py").write_text(f"MARK = {mark!r}\n")
        forget([str(file)])
        part = {"name": "x", "source": letters, "transform": "marked"}
        found.append((texts(mixed(str(file), part), runs=str(tmp_path))[0], len([*tmp_path.rglob("records.arrow")])))
    forget([])
    assert found == [("a!", 1), ("a??", 2), ("a??", 2)]


# ---- sources by index ----


class Lines:
    """A source with __len__ and __getitem__ alone, as Grain's and torch's."""

    def __init__(self, size, broken=(), times=10**9):
        self.size, self.broken, self.times, self.asked = size, broken, times, []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.asked.append(i)
        if i in self.broken and self.asked.count(i) <= self.times:
            raise OSError("the disk is on fire")
        return {"prompt": f"p{i}", "answer": str(i)}


def test_a_source_by_index_is_read_on_demand():
    lines = Lines(5)
    prompts = PromptSet.of(lines)
    assert [p.text for p in prompts] == [f"p{i}" for i in range(5)] and prompts.source.on_demand
    assert prompts.fingerprint() == PromptSet.of([lines[i] for i in range(5)]).fingerprint()
    lines.asked.clear()
    assert prompts[3].answer == "3" and lines.asked == [3]
    assert pickle.loads(pickle.dumps(prompts))[4] == prompts[4]


def test_media_of_a_source_by_index_are_told_and_read():
    item = MediaItem("eye", 0, 1, b"1")

    class Pictures(Lines):
        def __getitem__(self, i):
            return {"prompt": f"p{i}", "media": [item]}

    prompts = PromptSet.of(Pictures(3))
    assert has_media(prompts.source) and prompts[1].media == (item,) and not has_media(PromptSet.of(Lines(3)).source)
    assert has_media(pickle.loads(pickle.dumps(PromptSet.of([Pictures(3)[0]]))).source)


@pytest.mark.parametrize("many", [False, True])
def test_media_that_a_transform_returns_are_told_or_refused(tmp_path, letters, monkeypatch, many):
    monkeypatch.setattr(index, "IN_MEMORY", 0 if many else index.IN_MEMORY)
    file = tmp_path / "paints.py"
    file.write_text(
        "import tilth\nfrom tilth.core.media import MediaItem\n@tilth.transform('paints')\n"
        "def paints(record):\n    return {**record, 'media': [MediaItem('eye', 0, 1, b'1')]}\n"
    )
    load_plugins([str(file)])
    try:
        data = mixed(str(file), {"name": "x", "source": letters, "transform": "paints"})
        if many:
            with raises(DataError, "letters.jsonl:1.media"):
                load_source(data, home=Home(str(tmp_path)))
        else:
            assert has_media(load_source(data, home=Home(str(tmp_path))).source)
    finally:
        forget([])


def test_a_source_that_raises():
    with raises(DataError, "record 3.read") as caught:
        from_records(Lines(5, [2]))
    assert "the disk is on fire" in str(caught.value) and isinstance(caught.value.__cause__, OSError)
    prompts, lines = PromptSet.of(once := Lines(5, [2], times=0)), once
    lines.times = 10**9  # it fails later
    with raises(DataError, "record 3.read"):
        prompts[2]
    lines.size = 1
    assert prompts[1].text == "p1"


TASK = """
import tilth
from tilth.config.tasks import Task

class Lines:
    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 2:
            raise OSError("the disk is on fire")
        return {"prompt": f"p{i}", "answer": str(i)}

@tilth.task("lines")
def lines():
    return Task(Lines, lambda prompt, completion, info: 1.0)

@tilth.transform("even")
def even(record):
    return int(record["answer"]) % 2 == 0
"""


def test_a_plugins_source_by_index_in_a_mixture(tmp_path, letters):
    (tmp_path / "lines.py").write_text(TASK)
    load_plugins([str(tmp_path / "lines.py")])
    try:
        part = {"name": "x", "source": "lines", "filter": "even", "on_error": "skip"}
        data = mixed(str(tmp_path / "lines.py"), {"name": "l", "source": letters}, part)
        prompts = load_source(data)
        assert [p.text for p in prompts][5:] == ["p0", "p4"] and prompts[6].index == 6
        assert list(prompts.left_out()) == [
            "source 2: 3 by filter, 1 by errors left out (first: task lines record 3: its source raised OSError: the "
            "disk is on fire at lines.py:11)"
        ]
    finally:
        forget([])


# ---- several sources ----


def test_columns_and_indices_of_several_sources(tmp_path, letters):
    other = write(tmp_path / "o.jsonl", {"q": "x"}, {"q": "y"})
    held = write(tmp_path / "h.jsonl", {"prompt": "y"}, {"prompt": "new"})
    data = mixed("", {"name": "l", "source": letters}, {"name": "o", "source": other, "columns": {"prompt": "q"}})
    prompts = load_source(data.model_copy(update={"heldout": held}))
    assert [p.text for p in prompts] == ["a", "bb", "ccc", "b", "d", "x", "y", "y", "new"]
    assert [p.index for p in prompts] == list(range(9)) and prompts.starts == [0, 5, 7]
    train, unseen = prompts.split(0.1)
    assert unseen.rows.tolist() == [7, 8] and prompts.copies == 1
    assert [rows.tolist() for rows in train.parts] == [[0, 1, 2, 3, 4], [5]]
    assert load_source(data).fingerprint() == ", ".join(
        load_source(mixed("", {"name": n, "source": s, "columns": c})).fingerprint()
        for n, s, c in (("a", letters, {}), ("b", other, {"prompt": "q"}))
    )


def test_a_mixture_of_one_is_the_source(letters):
    one = load_source(mixed("", {"name": "l", "source": letters}))
    plain = load_source(from_dict({"data": {"source": letters}, "reward": {"function": "exact"}}).data)
    assert list(one) == list(plain) and one.fingerprint() == plain.fingerprint()
    assert np.array_equal(one.split(0.3)[0].rows, plain.split(0.3)[0].rows)


# ---- recipes ----

ONE = {"name": "a", "source": "x.jsonl"}


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"mixture": [ONE, {**ONE, "source": "y.jsonl"}]}, "data.mixture.1.name.twice"),
        ({"mixture": [ONE], "source": "addition"}, "data.source"),
        ({"mixture": [{**ONE, "name": ""}]}, "data.mixture.0.name"),
        ({"mixture": [{**ONE, "name": "a/b"}]}, "data.mixture.0.name"),
        ({"mixture": [{**ONE, "source": ""}]}, "data.mixture.0.source"),
        ({"mixture": [{**ONE, "weight": 0.0}]}, "data.mixture.weight"),
        ({"mixture": [{**ONE, "schedule": {"0": 0.0, "5": 1.0}}]}, "data.mixture.weight"),
        ({"mixture": [{**ONE, "weight": -1.0}]}, "data.mixture.0.weight"),
        ({"mixture": [{**ONE, "weight": 1e308}, {**ONE, "name": "b", "weight": 1e308}]}, "data.mixture.weight.large"),
        ({"mixture": [{**ONE, "schedule": {"5": 1.0}}]}, "data.mixture.0.schedule"),
        ({"mixture": [{**ONE, "schedule": {"x": 1.0}}]}, "data.mixture.0.schedule.x"),
        ({"mixture": [{**ONE, "wieght": 1.0}]}, "data.mixture.0.wieght"),
        ({"mixture": [{**ONE, "filter": "none"}]}, "data.mixture.0.filter"),
        ({"mixture": [{**ONE, "at_end": "stay"}]}, "data.mixture.0.at_end"),
        ({"mixture": [{"name": "t", "source": "addition", "columns": {"prompt": "q"}}]}, "data.mixture.0.columns"),
        ({"mixture": "x.jsonl"}, "data.mixture"),
        ({"packing": "concat"}, "data.packing"),
    ],
)
def test_mistakes_in_a_mixture(data, key):
    with raises(RecipeError, key) as caught:
        from_dict({"data": data, "reward": {"function": "exact"}})
    assert "\n" not in str(caught.value)


CRITIC = {"flow": "ppo", "critic": {"layout": {"hdp": 2}}}


@pytest.mark.parametrize("more", [{"policy": {"layout": {"hdp": 2}}}, CRITIC, {"train": {"offload": "auto"}}])
def test_samples_that_are_alone_fill_no_rank(more):
    with raises(RecipeError, "data.packing"):
        from_dict({"data": {"packing": "none"}, "reward": {"function": "exact"}, **more})


def test_episodes_have_one_template():
    with raises(RecipeError, "data.mixture.0.template"):
        from_dict({"data": {"mixture": [{**ONE, "template": "chatml"}]}, "rollout": {"environment": "x.py:E"}})
