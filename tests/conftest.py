"""Fixtures of all rooms, and how many examples hypothesis tries where a test does not say."""

from hypothesis import settings

from tests.pool import pool

__all__ = ["pool"]

settings.register_profile("quick", max_examples=50, deadline=None)  # a busy machine is no failure
settings.register_profile("long", max_examples=100, deadline=None)
settings.load_profile("quick")
