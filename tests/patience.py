"""How long a test waits for what other processes do."""

import os


def patience(seconds):
    """Seconds here and now that are so many on a quiet machine: more where more processes want to run than can."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
