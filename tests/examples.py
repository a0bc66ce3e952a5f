"""How many examples hypothesis tries where the default of a profile is too few or too many."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def examples(long: int) -> int:
    """Return ``long`` in the profile "long", a twenty-fifth in "quick", but not fewer than its default."""
    default = settings.default.max_examples
    return min(long, max(default, long * default // 100))


@settings(max_examples=100, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(), st.text())
def warm_up(number: int, text: str) -> None:
    """Let hypothesis read its tables and the constants of all modules, seconds at the first time in a fresh clone."""
