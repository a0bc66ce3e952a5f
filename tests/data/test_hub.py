"""A dataset of the hub by its name, from a real server that speaks what a download takes of the hub's protocol."""

import hashlib
import json
import pickle
import threading
from http.server import ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from tests.data.reading import read_records
from tests.errors import raises
from tests.flows.test_hub import COMMIT, Hub, close
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError
from tilth.data.formats import is_source
from tilth.data.hub import dataset_files
from tilth.data.prompts import load_source

REVISION = "refs%2Fconvert%2Fparquet"


class Datasets(Hub):
    """Serves the files of ``folder`` as the dataset org/sums, as the hub converts it."""

    def do_GET(self):
        files = {str(p.relative_to(self.folder)): p.read_bytes() for p in self.folder.rglob("*.parquet")}
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/org/sums/tree/"):
            said = [{"type": "file", "path": n, "size": len(data), "oid": "0" * 40} for n, data in files.items()]
            self.answer(json.dumps(said).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/api/datasets/org/sums/revision/{REVISION}"):
            said = {"id": "org/sums", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.answer(json.dumps(said).encode(), {"Content-Type": "application/json"})
        elif (name := path.removeprefix(f"/datasets/org/sums/resolve/{COMMIT}/")) in files:
            tag = hashlib.sha256(files[name]).hexdigest()
            self.answer(files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"'})
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "served"
    for config, split, first in (("easy", "train", 0), ("easy", "test", 100), ("hard", "train", 1000)):
        (folder / config / split).mkdir(parents=True)
        for part in (0, 1):
            rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(first + 5 * part, first + 5 * part + 5)]
            pq.write_table(pa.Table.from_pylist(rows), folder / config / split / f"{part:04d}.parquet")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Datasets,), {"folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    files = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, place)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "ENDPOINT", place)
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", place, raising=False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", place)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    dataset_files.cache_clear()
    yield server
    close(server)
    dataset_files.cache_clear()


def test_a_name_is_a_source_of_which_one_split_is_fetched(hub, tmp_path):
    assert is_source("hf:org/sums/easy")
    prompts = load_source(DataConfig(source="hf:org/sums/easy"))
    assert len(prompts) == 10 and (prompts[7].text, prompts[7].answer) == ("7+1=", "8")
    fetched = {str(path.relative_to(path.parents[2])) for path in (tmp_path / "home").rglob("*.parquet")}
    assert fetched == {"easy/train/0000.parquet", "easy/train/0001.parquet"}
    assert [row["answer"] for _, row in read_records("hf:org/sums/easy/test")][:2] == ["101", "102"]


def test_what_is_cached_needs_no_network(hub, monkeypatch):
    before = dataset_files("hf:org/sums/hard/train")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    dataset_files.cache_clear()
    assert dataset_files("hf:org/sums/hard") == before
    dataset_files.cache_clear()
    with raises(DataError, "hf:org/sums/easy"):  # none of it is in the cache
        dataset_files("hf:org/sums/easy")


def test_a_part_of_a_dataset_is_never_taken_for_the_whole(hub, monkeypatch, tmp_path):
    one, other = dataset_files("hf:org/sums/hard")
    other.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    dataset_files.cache_clear()
    with raises(DataError, "hf:org/sums/hard"):
        dataset_files("hf:org/sums/hard")
    (listing,) = (tmp_path / "tilth").iterdir()
    listing.unlink()  # a download that was broken off has left none
    with raises(DataError, "hf:org/sums/hard"):
        dataset_files("hf:org/sums/hard")
    assert one.exists()


def test_another_process_reads_it_by_its_name(hub, monkeypatch):
    prompts = load_source(DataConfig(source="hf:org/sums/hard"))
    monkeypatch.chdir("/")
    again = pickle.loads(pickle.dumps(prompts))
    assert [again[i].text for i in range(len(again))] == [prompts[i].text for i in range(len(prompts))]


def test_without_it_an_error_says_how_to_get_it(hub):
    with raises(DataError, "hf:org/other") as caught:
        dataset_files("hf:org/other")
    assert "hf download org/other --repo-type dataset" in str(caught.value)


def test_a_hub_that_does_not_answer_is_named_likewise(hub):
    close(hub)
    with raises(DataError, "hf:org/sums") as caught:
        dataset_files("hf:org/sums")
    assert "hf download org/sums --repo-type dataset" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "right"),
    [("hf:org/sums", ".config", "easy, hard"), ("hf:org/sums/medium", ".config", "easy, hard"),
     ("hf:org/sums/easy/dev", ".split", "test, train"), ("hf:sums", "", "hf:ORG/NAME"),
     ("hf:org/sums/easy/train/x", "", "hf:ORG/NAME"), ("hf:org//easy", "", "hf:ORG/NAME")],
)  # fmt: skip
def test_a_wrong_name_names_what_there_is(hub, name, key, right):
    with raises(DataError, f"{name}{key}") as caught:
        dataset_files(name)
    assert right in str(caught.value)
