"""Output of children: bounded, the newest of it kept, none lost."""

import os

import pytest

from tilth.process import output
from tilth.process.output import OutputFile, Prints


@pytest.mark.parametrize("held", [True, False])
def test_its_size_is_bounded_and_the_newest_is_kept(tmp_path, monkeypatch, held):
    monkeypatch.setattr(output, "LIMIT", 1 << 20)
    monkeypatch.setattr(output, "HELD", 1 << 18)
    path, made, line = tmp_path / "a.log", Prints(), b"x" * 1023 + b"\n"
    if not held:
        made.to(path)
    for _ in range(5000):
        os.write(made.writer, line)
    os.write(made.writer, b"the end\n")
    if held:
        os.write(made.writer, b"")
        made._writer, writer = -1, made._writer  # all of it has come before the file is known
        os.close(writer)
        made._thread.join()
        made.to(path)
    made.close()
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert max(sizes) <= 1 << (18 if held else 20) and len(sizes) == (1 if held else 2)
    kept = b"".join(file.read_bytes() for file in sorted(tmp_path.iterdir(), reverse=True))  # a new one may begin there
    assert kept.endswith(line + b"the end\n") and path.read_bytes().endswith(b"the end\n")


def test_what_cannot_be_written_is_not_lost(tmp_path, capfd):
    made = Prints()
    made.to(tmp_path / "nowhere" / "a.log")
    os.write(made.writer, b"hello\n")
    made.close()
    made.close()
    assert capfd.readouterr().err == "hello\n"


def test_the_end_of_a_file_without_a_name():
    file = OutputFile()
    assert file.tail(2) == ""
    os.write(file.fileno(), b"x" * (1 << 20) + b"\none\ntwo \xff\nthree\n")
    assert file.tail(2) == "two \N{REPLACEMENT CHARACTER}\nthree"
    assert len(file.tail(9)) < output.TAIL
