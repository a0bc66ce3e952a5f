"""Fixtures of all rooms, how many examples hypothesis tries where a test does not say, and what a test must leave."""

import gc
import getpass
import os
import shutil
import signal
import sys
import tempfile
from functools import cache
from importlib.util import find_spec

import pytest
import typer.testing
from hypothesis import settings

from tests import forked
from tests.covering import mark_covered
from tests.examples import warm_up
from tests.pool import pool
from tests.processes import pytest_addoption, pytest_runtestloop
from tests.seconds import pytest_collection_finish, pytest_runtest_makereport, pytest_terminal_summary
from tilth.config.imports import uncollected

__all__ = [
    "pool",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_runtest_makereport",
    "pytest_runtestloop",
    "pytest_terminal_summary",
]

settings.register_profile("quick", max_examples=4, deadline=None)  # a busy machine is no failure
settings.register_profile("long", max_examples=100, deadline=None)
settings.load_profile("quick")
forked.fork_servers_too()
# Of each instruction set its own: torch finds a compiled function by a key without ATEN_CPU_CAPABILITY, but compiles it
# for that one, so that code for vectors fails where there are none.
CACHE = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}{os.environ.get('ATEN_CPU_CAPABILITY', '')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE)  # torch sets it to this, in the midst of a test
for name in ("COLUMNS", "LINES"):  # GNU readline, which pytest imports, sets them
    os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """All that is imported and collected stays: looking for garbage in it would be a fifth of the time."""
    with uncollected():
        found = yield
        if session.config.option.processes:
            forked.load()
            warm_up()
    gc.freeze()
    return found


STATE = pytest.StashKey[str]()


def pytest_configure(config):
    config.stash[STATE] = tempfile.mkdtemp(prefix="tilth-state-")  # an object would remove it in every fork, too
    os.environ["XDG_STATE_HOME"] = config.stash[STATE]  # trust in code of these tests ends with them
    if config.option.processes:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA that has begun before a fork is of no use in it
        forked.start()


def pytest_unconfigure(config):
    if STATE in config.stash:
        shutil.rmtree(config.stash[STATE])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_covered(items)


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


@pytest.fixture(scope="session", autouse=True)
def commands_made_once():
    """The runner of tests makes all commands anew for each call: 10 to 25 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(typer.main.get_command))
        yield


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
    """End Ray with its last test: one of several processes has them all in a row, and idle Ray takes 3 % of a core."""
    yield
    over = item.get_closest_marker("ray") and not (nextitem and nextitem.get_closest_marker("ray"))
    if over and item.config.option.processes and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def hangups():
    """A hang-up ends the processes of this test, even where the tests themselves are to survive one (nohup)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
