"""Files that are named to be written: whole or not at all, through links, and never in the place of a device."""

import errno
import os
import stat
from pathlib import Path

import pytest

from tests.errors import raises
from tilth.core.errors import StorageError
from tilth.core.files import atomic_write, make_folder, rename, sync


def write(path, text="new"):
    with atomic_write(path) as temporary:
        temporary.write_text(text)


def test_a_new_file_and_one_in_the_place_of_another(tmp_path):
    for text in ("one", "two"):
        write(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text() == text and os.listdir(tmp_path) == ["a.json"]


def test_through_links_the_file_is_written_and_the_links_stay(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "target.json").write_text("old")
    (tmp_path / "link.json").symlink_to("far/target.json")
    (tmp_path / "second.json").symlink_to("link.json")
    (tmp_path / "dangling.json").symlink_to("far/new.json")
    write(tmp_path / "second.json")
    write(tmp_path / "dangling.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "second.json").is_symlink()
    assert (tmp_path / "far" / "target.json").read_text() == (tmp_path / "far" / "new.json").read_text() == "new"
    assert sorted(os.listdir(tmp_path / "far")) == ["new.json", "target.json"]


def test_a_link_that_is_not_followed_is_replaced_and_its_target_stays(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with atomic_write(link, follow=False) as temporary:
        temporary.write_text("new")
    assert not link.is_symlink() and (link.read_text(), target.read_text()) == ("new", "old")


def test_what_is_no_regular_file_stays_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "folder", "null"):
        with raises(StorageError, f"{name}.type"):
            write(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / "null").is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(os.listdir(tmp_path)) == ["folder", "null", "pipe"]


def test_what_cannot_be_is_named(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none" / "x", tmp_path / "a", tmp_path / "file" / "x"):
        with raises(StorageError, path.name):
            write(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("else")])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    (tmp_path / "a").write_text("old")
    with pytest.raises((StorageError, KeyError)) as raised, atomic_write(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise error
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]
    assert isinstance(error, KeyError) or "a: No space left on device" in str(raised.value)


def test_a_disk_that_refuses_to_clean_up_too_is_one_line(tmp_path, monkeypatch):
    """A read-only one says so of names that are not there, too."""

    def refuses(self, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "unlink", refuses)
    with raises(StorageError, "out.txt"):
        with atomic_write(tmp_path / "out.txt"):
            raise OSError(errno.EROFS, "Read-only file system")


# ---- durable ----


@pytest.fixture
def done(monkeypatch, tmp_path):
    """What was synchronised and renamed, in order."""
    found = []

    def name(path):
        return str(Path(path).relative_to(tmp_path))

    def fsync(descriptor, whole=os.fsync):
        found.append(("sync", name(os.readlink(f"/proc/self/fd/{descriptor}"))))
        whole(descriptor)

    def replace(made, final, whole=os.replace):
        found.append(("rename", name(made), name(final)))
        whole(made, final)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return found


def test_the_bytes_are_durable_before_the_name_and_the_name_at_the_end(tmp_path, done):
    write(tmp_path / "a.json")
    assert done == [("sync", ".a.json.tmp"), ("rename", ".a.json.tmp", "a.json"), ("sync", ".")]
    done.clear()
    (tmp_path / "made").mkdir()
    (tmp_path / "in").mkdir()
    rename(tmp_path / "made", tmp_path / "in" / "final")
    assert done == [("sync", "made"), ("rename", "made", "in/final"), ("sync", "in")]
    done.clear()
    rename(tmp_path / "a.json", tmp_path / "b.json", durable=False)
    assert done == [("rename", "a.json", "b.json")]


def test_every_folder_that_is_made_is_durable_in_the_one_above(tmp_path, done):
    make_folder(tmp_path / "a" / "b" / "c")
    assert done == [("sync", "."), ("sync", "a"), ("sync", "a/b")] and (tmp_path / "a" / "b" / "c").is_dir()
    make_folder(tmp_path / "a" / "b")
    assert len(done) == 3
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "a" / "b", exist_ok=False)
    with pytest.raises(OSError):
        make_folder(Path("/dev/null/x"))


def test_a_link_that_leads_nowhere_is_renamed_too(tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    rename(tmp_path / "link", tmp_path / "other")
    assert (tmp_path / "other").is_symlink()


def test_a_file_system_that_cannot_synchronise_folders_is_no_error_and_a_broken_disk_is(tmp_path, monkeypatch):
    def refuses(number):
        def fsync(descriptor):
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refuses(errno.EINVAL))
    sync(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        sync(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", refuses(errno.EIO))
    with pytest.raises(OSError):
        sync(tmp_path)
