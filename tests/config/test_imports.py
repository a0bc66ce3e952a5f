"""Imports without garbage collections, collections as before afterwards, and none at the end of a process."""

import ast
import gc
import subprocess
import sys

import pytest

from tilth.config.code import parse
from tilth.config.imports import uncollected
from tilth.config.roles import resolve


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_put_off_and_are_as_before_afterwards(enabled):
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ImportError), uncollected():
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


def test_a_module_that_is_named_is_imported_without_them(tmp_path, monkeypatch):
    (tmp_path / "looks_at_gc.py").write_text("import gc\nDURING = gc.isenabled()\ndef found(): return DURING\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "looks_at_gc", raising=False)
    assert gc.isenabled() and not resolve("looks_at_gc:found")()


class Parses:
    """Garbage that parses at another depth when it is collected, as a traceback does that is formatted then."""

    def __init__(self):
        self.knot = self

    def __del__(self, depth=9):
        self.__del__(depth - 1) if depth else ast.parse("x = 1")


def test_a_parse_is_not_disturbed_by_those_of_finalizers():
    garbage = [Parses() for _ in range(3)]
    del garbage
    assert len(parse("x = f(y, z[1])\n" * 1000).body) == 1000 and gc.isenabled()
    gc.collect()


ENDS = """
import atexit, gc, weakref
from tilth.config.imports import end_uncollected
class Knot:
    def __init__(self): self.knot = self
    def __del__(self): print("collected", flush=True)
weakref.finalize(Knot(), print, "finalized", flush=True)
atexit.register(print, "at exit", flush=True)
KNOT = Knot()
CALL
"""


@pytest.mark.parametrize("call", ["", "end_uncollected()"])
def test_a_process_ends_without_collections_but_not_without_what_its_owners_asked_for(call):
    ran = subprocess.run([sys.executable, "-c", ENDS.replace("CALL", call)], capture_output=True, text=True, check=True)
    said = ran.stdout.split("\n")
    assert "at exit" in said and "finalized" in said
    assert ("collected" in said) == (not call)
