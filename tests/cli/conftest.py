"""What several tests of commands want."""

import uuid

import fsspec
import pytest


@pytest.fixture
def url():
    """A place in a store that is the test's own."""
    place = f"memory://{uuid.uuid4().hex}"
    yield place
    fsspec.filesystem("memory").rm(place, recursive=True)
