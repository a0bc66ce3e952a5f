"""Disks and stores do the same through one protocol; past the page cache or not, the bytes are those given."""

import errno
import fcntl
import mmap
import os
import uuid

import pytest

from tests.checkpoint.stores import Throttled
from tests.errors import raises
from tilth.checkpoint import storage as module
from tilth.checkpoint.stages import StageError
from tilth.checkpoint.storage import BLOCK, Local, is_url, join, split, storage_of
from tilth.core.errors import StorageError
from tilth.core.random import stream


@pytest.fixture(params=["disk", "memory", "file", "slow"])
def storage(request, tmp_path):
    Throttled.reset()
    roots = {"disk": tmp_path, "memory": f"memory://{uuid.uuid4().hex}", "file": f"file://{tmp_path}/a"}
    return storage_of(roots.get(request.param, f"slow://{tmp_path}/b"))


def parts(*texts):
    return [memoryview(text) for text in texts]


def aligned(nbytes, salt="x"):
    """Bytes that begin at a block."""
    memory = mmap.mmap(-1, nbytes)
    memory[:] = stream(0, salt).bits(0, nbytes).numpy().astype("uint8").tobytes()
    return memory


def test_what_is_written_is_read(storage):
    storage.begin("step")
    storage.write("step/data", parts(b"one", b"", b"two" * 1000))
    assert storage.read("step/data") == b"one" + b"two" * 1000
    assert storage.size("step/data") == 3003 and storage.names("step") == ["data"] and storage.names() == ["step"]
    with storage.ranges("step/data") as opened:
        into = bytearray(4)
        opened.read_into(1, memoryview(into))
        opened.read_into(3000, memoryview(into)[1:])
        assert into == b"ntwo" and opened.bytes_read == 7
        with pytest.raises(OSError) as caught:
            opened.read_into(3001, memoryview(into))
        assert caught.value.errno == errno.ENODATA


@pytest.mark.parametrize(
    ("offset", "stride", "nbytes", "rows"),
    [(3, 7, 3, 900), (0, 512, 512, 9), (1, 4097, 4095, 20), (5, 5000, 4096, 17), (2, 9000, 5000, 4), (90000, 9, 9, 1)],
)
def test_rows_are_ranges_one_after_another(storage, offset, stride, nbytes, rows):
    data = bytes(aligned(100_000))
    storage.begin("step")
    storage.write("step/data", [memoryview(data)])
    into = bytearray(rows * nbytes)
    with storage.ranges("step/data") as opened:
        for count in (rows, (rows + 1) // 2):  # the second time what is there is used again
            opened.read_rows(offset, stride, nbytes, memoryview(into)[: count * nbytes])
        assert opened.bytes_read == (rows + (rows + 1) // 2) * nbytes
        wanted = [data[at : at + nbytes] for at in range(offset, offset + rows * stride, stride)]
        assert into == b"".join(wanted)
        with pytest.raises(OSError) as caught:
            opened.read_rows(100_000 - (rows - 1) * stride - nbytes + 1, stride, nbytes, memoryview(into))
        assert caught.value.errno == errno.ENODATA


def test_what_is_not_there(storage):
    assert storage.names() == [] == storage.names("none") and storage.size("none") is None
    storage.remove("none")
    storage.begin("a")
    storage.put("a/file", b"x")
    assert storage.size("a") is None and storage.names("a") == ["file"]
    with pytest.raises(FileNotFoundError) as caught:
        storage.read("none")
    assert caught.value.strerror == "No such file or directory"
    with pytest.raises(FileNotFoundError), storage.ranges("none") as opened:
        opened.read_into(0, memoryview(bytearray(1)))


def test_a_small_file_is_replaced_as_a_whole(storage):
    storage.begin("a/b")
    for text in (b"first", b"second", b""):
        storage.put("a/b/file", text)
        assert storage.read("a/b/file") == text and storage.names("a/b") == ["file"]


def test_a_file_gets_its_name_and_goes(storage):
    storage.begin("a")
    storage.begin("b/deep")
    storage.put("a/made", b"x")
    storage.put("b/old", b"old")
    storage.publish("a/made", "b/old")
    assert storage.read("b/old") == b"x" and storage.names("a") == []
    storage.put("b/deep/er", b"")
    storage.remove("b/old")
    assert storage.names("b") == ["deep"]
    storage.remove("b")
    assert "b" not in storage.names()


def test_of_a_link_only_the_link_goes(tmp_path):
    """To a folder, to a file, to nothing; also links inside a folder."""
    root, away = tmp_path / "root", tmp_path / "away"
    (root / "folder").mkdir(parents=True)
    away.mkdir()
    (away / "file").write_text("kept")
    for place in (root, root / "folder"):
        for name in ("", "file", "none"):
            (place / f"link-{name}").symlink_to(away / name)
    for name in [*sorted(os.listdir(root))]:
        Local(root).remove(name)
    assert os.listdir(root) == [] and (away / "file").read_text() == "kept"


def test_names_of_places(tmp_path):
    for root in (tmp_path, "s3://bucket/run", "memory://run"):
        assert split(join(root, "step-000001")) == (root, "step-000001")
    assert join("s3://bucket/run/", "x") == "s3://bucket/run/x" and split("s3://b/r/x/") == ("s3://b/r", "x")
    assert not is_url("runs/x") and not is_url(tmp_path) and is_url("gs://x")


@pytest.mark.parametrize("url, reason", [("s3://bucket/x", "s3fs"), ("nonsense://x", "Protocol not known: nonsense")])
def test_a_store_without_a_client(url, reason):
    with raises(StorageError, "root") as caught:
        storage_of(url)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


# ---- past the page cache ----


@pytest.fixture
def modes(monkeypatch):
    """Whether each write went past the page cache."""
    real, found = os.write, []

    def write(descriptor, data):
        found.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    return found


def past_the_cache(tmp_path):
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no writes past the page cache")


SIZES = [5 << 20, (5 << 20) + 1, (4 << 20) + BLOCK - 1]


@pytest.mark.parametrize("nbytes", SIZES)
def test_large_files_go_past_the_page_cache_but_for_their_end(tmp_path, modes, nbytes):
    past_the_cache(tmp_path)
    data = aligned(nbytes)
    Local(tmp_path).write("x", [memoryview(data)])
    assert (tmp_path / "x").read_bytes() == data[:]
    assert modes == [True] if nbytes % BLOCK == 0 else [True, False]


def test_small_files_and_odd_memory_go_through_it(tmp_path, modes):
    data = aligned((8 << 20) + BLOCK)
    Local(tmp_path).write("small", [memoryview(data)[: 1 << 20]])
    Local(tmp_path).write("odd", [memoryview(data)[1:]])
    Local(tmp_path).write("later", [memoryview(data)[: 5 << 20], memoryview(data)[7:]])
    assert (tmp_path / "odd").read_bytes() == data[1:]
    assert (tmp_path / "later").read_bytes() == data[: 5 << 20] + data[7:]
    assert not any(modes[:2])


def test_a_file_system_that_refuses_it(tmp_path, monkeypatch, modes):
    """When it is asked for, or only when it is done."""
    data, real = aligned(5 << 20), fcntl.fcntl

    def refuses(descriptor, what, flags=0):
        if what == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, what, flags)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuses)
        Local(tmp_path).write("asked", [memoryview(data)])
    written = os.write

    def late(descriptor, part):
        if real(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(descriptor, part)

    monkeypatch.setattr(os, "write", late)
    Local(tmp_path).write("done", [memoryview(data)])
    assert (tmp_path / "asked").read_bytes() == (tmp_path / "done").read_bytes() == data[:]
    assert not any(modes)


def test_writes_that_are_cut_short_go_on(tmp_path, monkeypatch):
    data, real = aligned((4 << 20) + 11), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, part: real(descriptor, part[: max(1, len(part) // 3)]))
    Local(tmp_path).write("x", [memoryview(data)])
    assert (tmp_path / "x").read_bytes() == data[:]


# ---- errors ----


def test_a_file_is_never_written_over(tmp_path):
    Local(tmp_path).write("x", parts(b"old"))
    with raises(StageError, "save.write") as caught:
        Local(tmp_path).write("x", parts(b"new"))
    assert (caught.value.path, caught.value.reason) == (str(tmp_path / "x"), "File exists")
    assert caught.value.stage == "write" and (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize("call, stage", [("write", "write"), ("fsync", "sync")])
def test_the_stage_that_fails_is_named_with_the_file(tmp_path, monkeypatch, call, stage):
    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with raises(StageError, f"save.{stage}") as caught:
        Local(tmp_path).write("x", parts(b"data"))
    error = caught.value
    assert (error.stage, error.path, error.reason) == (stage, str(tmp_path / "x"), "Input/output error")


def test_what_a_client_raises_in_its_own_words(tmp_path):
    Throttled.reset(fail_at=1)
    storage = storage_of(f"slow://{tmp_path}/b")
    with raises(StageError, "save.write") as caught:
        storage.write("x", parts(b"one", b"two"))
    assert caught.value.reason.startswith("RuntimeError: SlowDown: please reduce")
    storage.write("x", parts(b"one", b"two"))
    assert storage.read("x") == b"onetwo"


def test_one_range_is_one_request(tmp_path):
    storage = storage_of(f"slow://{tmp_path}/b")
    storage.write("x", parts(bytes(range(100))))
    Throttled.reset()
    with storage.ranges("x") as opened:
        opened.read_into(10, memoryview(bytearray(20)))
    assert Throttled.requests == {"get": 1} and Throttled.read == 20 == opened.bytes_read
    assert storage.gap == module._REMOTE_GAP and Local(tmp_path).gap == 0
