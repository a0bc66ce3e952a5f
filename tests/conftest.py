"""Fixtures of all rooms, how many examples hypothesis tries where a test does not say, and who runs what of ``-n``."""

import gc
import os
import signal

import pytest
from hypothesis import settings

from tests.pool import pool
from tilth.config.imports import uncollected

__all__ = ["pool"]

settings.register_profile("quick", max_examples=50, deadline=None)  # a busy machine is no failure
settings.register_profile("long", max_examples=100, deadline=None)
settings.load_profile("quick")
for name in ("COLUMNS", "LINES"):  # GNU readline, which pytest imports, sets them for the processes of -n
    os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All that is imported and collected stays: looking for garbage in it would be a fifth of the time."""
    with uncollected():
        found = yield
    gc.freeze()
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process of ``-n`` runs whole files, so that a module's fixtures are made once, but all tests of one group."""
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            scope = super()._split_scope(nodeid)
            return nodeid.split("::")[0] if scope == nodeid else scope

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """One process of ``-n`` alone starts Ray, and one the pool. They, and files that start others, come first, so that
    none is left to the end."""
    if not hasattr(config, "workerinput"):
        return
    starting = {item.path for item in items if item.get_closest_marker("dist")}

    def order(item):
        if item.get_closest_marker("ray"):
            return 0
        return 1 if item.get_closest_marker("dist") and "pool" in item.fixturenames else 2 + (item.path not in starting)

    items.sort(key=order)
    for item in items:
        if order(item) < 2:
            item.add_marker(pytest.mark.xdist_group(("ray", "pool")[order(item)]))


@pytest.fixture
def hangups():
    """A hang-up ends the processes of this test, even where the tests themselves are to survive one (nohup)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
