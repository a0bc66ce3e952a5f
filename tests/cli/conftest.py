"""What several tests of commands want."""

import uuid
from functools import cache

import fsspec
import pytest
import typer


@pytest.fixture(scope="package", autouse=True)
def commands_made_once():
    """The runner of tests makes all commands anew for each call: 10 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def url():
    """A place in a store that is the test's own."""
    place = f"memory://{uuid.uuid4().hex}"
    yield place
    fsspec.filesystem("memory").rm(place, recursive=True)
