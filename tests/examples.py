"""How many examples hypothesis tries where the default of a profile is too few or too many."""

from hypothesis import settings


def examples(long: int) -> int:
    """Return ``long`` in the profile "long", a sixteenth in "quick", but not fewer than its default."""
    default = settings.default.max_examples
    return min(long, max(default, long * default // 100))
