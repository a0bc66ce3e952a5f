"""Fixtures of all rooms, how many examples hypothesis tries where a test does not say, and who runs what of ``-n``."""

import gc
import getpass
import json
import os
import signal
import sys
import tempfile
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests import forked
from tests.covering import mark_covered
from tests.pool import pool
from tests.seconds import pytest_collection_finish, pytest_runtest_makereport, pytest_terminal_summary
from tilth.config.imports import uncollected

__all__ = ["pool", "pytest_collection_finish", "pytest_runtest_makereport", "pytest_terminal_summary"]

settings.register_profile("quick", max_examples=6, deadline=None)  # a busy machine is no failure
settings.register_profile("long", max_examples=100, deadline=None)
settings.load_profile("quick")
forked.fork_servers_too()
CACHE = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE)  # torch sets it to this, in the midst of a test
for name in ("COLUMNS", "LINES"):  # GNU readline, which pytest imports, sets them for the processes of -n
    os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All that is imported and collected stays: looking for garbage in it would be a fifth of the time."""
    with uncollected():
        found = yield
    gc.freeze()
    return found


GROUPS = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.stash[GROUPS] = tempfile.TemporaryDirectory(prefix="tilth-groups-")
        os.environ["XDG_STATE_HOME"] = (
            f"{config.stash[GROUPS].name}/state"  # trust in code of these tests ends with them
        )
    elif all(Path(path).is_dir() for path in config.args):
        config.args = apart(config.args, config.workerinput)


def apart(folders, process):
    """Files in an order of each process's own: what one has compiled the others find, in place of all doing all."""
    files = [str(file) for folder in folders for file in sorted(Path(folder).rglob("test_*.py"))]
    first = len(files) * int(process["workerid"].removeprefix("gw")) // process["workercount"]
    return files[first:] + files[:first]


def pytest_unconfigure(config):
    if GROUPS in config.stash:
        config.stash[GROUPS].cleanup()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Say where a process of ``-n`` writes the groups of its tests.

    xdist's own way, an addition to the id of a test, is lost without a word with pytest 9.2.
    """
    node.workerinput["groups"] = f"{node.config.stash[GROUPS].name}/{node.gateway.id}.json"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process of ``-n`` runs whole files, so that a module's fixtures are made once, but all tests of one group."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        @cached_property
        def _groups(self):
            return json.loads(min(Path(config.stash[GROUPS].name).iterdir()).read_text())

        def _split_scope(self, nodeid):
            return self._groups.get(nodeid, nodeid.split("::")[0])

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """One process of ``-n`` alone starts Ray, and one the pool. They, and files that start others, come first, so that
    none is left to the end; every process has the same order."""
    mark_covered(items)
    if not hasattr(config, "workerinput"):
        return
    starting = {item.path for item in items if item.get_closest_marker("dist")}

    def order(item):
        if item.get_closest_marker("ray"):
            return 0
        return 1 if item.get_closest_marker("dist") and "pool" in item.fixturenames else 2 + (item.path not in starting)

    items.sort(key=lambda item: (order(item), str(item.path)))
    groups = {item.nodeid: ("ray", "pool")[order(item)] for item in items if order(item) < 2}
    Path(config.workerinput["groups"]).write_text(json.dumps(groups))


OTHERS = ("PYTEST_CURRENT_TEST", forked.PLACE, "KINETO_LOG_LEVEL")
"""Variables that change with each test, or with the first one that forks or profiles."""

HANDLED = [getattr(signal, f"SIG{name}") for name in "INT TERM HUP ALRM VTALRM CHLD IO USR1 USR2".split()]


def surroundings(torch):
    """All of this process that a test finds and that the next one must find again. torch: None: it is not imported."""
    found = {f"environment {name}": value for name, value in os.environ.items() if name not in OTHERS}
    found |= {number: signal.getsignal(number) for number in HANDLED}
    found["working directory"] = os.getcwd()
    if torch is not None:
        found["threads"], found["precision"] = torch.get_num_threads(), torch.get_float32_matmul_precision()
        found["dtype"], found["deterministic"] = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return found


@pytest.fixture(autouse=True)
def unchanged():
    """A test that leaves the process other than it was fails, in place of a later one."""
    torch = sys.modules.get("torch")
    before = surroundings(torch)
    yield
    after = surroundings(torch)
    new = after.keys() - before.keys()  # of libraries, which set variables where they are imported for the first time
    each = [(what, before.get(what), after.get(what)) for what in {**before, **after} if what not in new]
    assert not [one for one in each if one[1] != one[2]], "what the test has left, before and after"
    assert not [what for what in new if "TILTH" in what]


@pytest.fixture(scope="session")
def ray_here():
    """One Ray for all tests that need one: starting it takes seconds. A fleet without an address joins it."""
    if find_spec("ray") is None:  # not importorskip: how Ray listens is settled when it is imported
        pytest.skip("Ray is not installed (pip install '.[ray]')")
    from tilth.cluster.backends.ray_connect import connect, import_ray

    before = dict(os.environ)
    ray = import_ray()
    assert connect(ray, 8, "")  # room for two fleets at a time
    yield ray
    ray.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """End Ray with its last test: a process of ``-n`` has them all in a row, and idle Ray takes 3 % of a core."""
    yield
    over = item.get_closest_marker("ray") and not (nextitem and nextitem.get_closest_marker("ray"))
    if over and hasattr(item.config, "workerinput") and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def hangups():
    """A hang-up ends the processes of this test, even where the tests themselves are to survive one (nohup)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
