"""The time as runs write it."""

from datetime import UTC, datetime


def utc_now(timespec: str = "milliseconds") -> str:
    """Return the time as ISO 8601 in UTC, such as 2026-01-31T12:00:00.000Z. timespec: that of ``isoformat``."""
    return datetime.now(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
