"""Work that a call does, counted: a bound that no load of the machine moves."""

import sys
from collections.abc import Callable
from typing import Any


def work_of(call: Callable[[], Any]) -> int:
    """Lines of Python, calls and returns that a call runs in this thread."""
    count = 0

    def see(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += 1
        return see

    before = sys.gettrace()
    sys.settrace(see)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
