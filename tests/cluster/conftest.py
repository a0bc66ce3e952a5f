import os
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def ray_here():
    """One Ray for all tests that need one: starting it takes seconds. A fleet without an address joins it."""
    if find_spec("ray") is None:  # not importorskip: how Ray listens is settled when it is imported
        pytest.skip("Ray is not installed (pip install '.[ray]')")
    from tilth.cluster.backends.ray import connect, import_ray

    before = dict(os.environ)
    ray = import_ray()
    assert connect(ray, 8, "")  # room for two fleets at a time
    yield ray
    ray.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
