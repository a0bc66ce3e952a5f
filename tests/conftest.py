"""Fixtures of all rooms."""

from tests.pool import pool

__all__ = ["pool"]
