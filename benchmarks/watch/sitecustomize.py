"""Python imports a module of this name when it starts. ``resume_exact.py`` puts this one before its runs: in each
of their processes a thread says a thousand times a second, in the file ``$WATCH/PID``, what the process is doing."""

import os
import re
import sys
import threading
import time
from types import CodeType, FrameType

PHASES = (
    ("saving", r"flows/run\.py save|/tilth/checkpoint/"),
    ("publishing", r"flows/run\.py sync_weights|roles/weight_sync\.py|engines/engine\.py update_weights"),
    ("evaluating", r"flows/heldout\.py (evaluate|measure)$"),
    ("generating", r"flows/sampler\.py generate_and_score|roles/rollout\.py|engines/engine\.py"),
    ("training", r"flows/step_log\.py flush|training/engine\.py|roles/(policy|critic)\.py"),
    ("in a step", r"flows/(run|sampler|policy_gradient|actor_critic|supervised)\.py"),
)
"""A phase, and the file and function that stand for it. Of those on a thread's stack the first in this order counts."""
NONE = len(PHASES)
IDLE = re.compile(r"/(threading|queue|selectors|socket)\.py$")
WIDTH = 64
_known: dict[CodeType, int] = {}


def place(code: CodeType) -> int:
    """Which of PHASES a function belongs to, NONE for most."""
    if code not in _known:
        where = f"{code.co_filename} {code.co_name}"
        _known[code] = next((i for i, (_, frames) in enumerate(PHASES) if re.search(frames, where)), NONE)
    return _known[code]


def phase(frame: FrameType | None) -> int:
    """The phase of a thread by its innermost frame."""
    found = NONE
    while frame is not None:
        found, frame = min(found, place(frame.f_code)), frame.f_back
    return found


def describe(main: int) -> str:
    """What the main thread is in, and whether another one is at work on a checkpoint and not waiting for one."""
    frames = sys._current_frames()
    first = phase(frames.pop(main, None))
    said = PHASES[first][0] if first < NONE else "starting or ending"
    behind = any(phase(f) == 0 and not IDLE.search(f.f_code.co_filename) for f in frames.values())
    return f"{said}, saving behind" if behind and first else said


def watch(path: str) -> None:
    """Keep the file up to date for as long as the process lives."""
    main, before = threading.main_thread().ident or 0, ""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    while True:
        said = describe(main)
        if said != before:
            os.pwrite(descriptor, said.ljust(WIDTH).encode(), 0)
            before = said
        time.sleep(0.001)


def begin() -> None:
    """Start the thread. A forked process, the controller under its supervisor and workers, has none of its own."""
    threading.Thread(target=watch, args=(f"{os.environ['WATCH']}/{os.getpid()}",), daemon=True).start()


if "WATCH" in os.environ:
    begin()
    os.register_at_fork(after_in_child=begin)
