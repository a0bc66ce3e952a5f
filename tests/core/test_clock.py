"""What happens every second, beside the body of a program."""

import threading
import time

import pytest

from tests.patience import patience
from tilth.core.clock import periodically


def test_a_thread_acts_until_the_body_ends_whatever_ends_it():
    names = []
    with pytest.raises(KeyError), periodically("looks", 0.001, lambda: names.append(threading.current_thread().name)):
        until = time.monotonic() + patience(10)
        while len(names) < 3:
            assert time.monotonic() < until
            time.sleep(0.001)
        raise KeyError("of the body")
    assert set(names) == {"looks"} and "looks" not in {thread.name for thread in threading.enumerate()}
    after = len(names)
    time.sleep(0.01)
    assert len(names) == after
