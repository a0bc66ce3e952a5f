"""Runs the tiny recipe in a folder and dies by SIGKILL at a call of a function: ``FOLDER POINT CALL [FLOW]``."""

import os
import signal
import sys
import threading
from pathlib import Path

from tilth.config.imports import end_uncollected, uncollected

with uncollected():
    from tests.flows import tiny
    from tilth.checkpoint.directory import Attempt
    from tilth.checkpoint.storage import Local
    from tilth.engines.engine import Engine
    from tilth.roles.critic import CriticWorker
    from tilth.roles.policy import PolicyWorker
    from tilth.runs.directory import RunDir
    from tilth.training.optim import Optimizers

PPO = {
    "flow": "ppo",
    "algorithm": {"advantage": "gae", "steps": 4, "minibatches": 2, "epochs": 2, "lam": 0.9},
    "critic": {"steps": 3, "lr": 5e-3},
}
EPISODES = {
    "algorithm": {"steps": 20},
    "model": {"context": 32},
    "rollout": {"environment": f"{Path(__file__).parents[1] / 'envs' / 'talkers.py'}:Sums", "turns": 4,
                "stop": ["0", "2", "4", "+", "="]},
    "train": {"parity": True},
}  # fmt: skip
"""Parity: an answer may come sooner or later, and no number may depend on it."""
BEHIND = {
    "supervised": {"steps": 0},
    "model": {"context": 48},
    "rollout": {"staleness": 2, "max_tokens": 40, "group": 2, "max_rows": 16},
    "run": {"save_every": 2},
}
BOTH = EPISODES | BEHIND | {"model": {"context": 80}, "algorithm": {"steps": 6}}
BOTH["rollout"] = EPISODES["rollout"] | BEHIND["rollout"] | {"max_tokens": 16, "prompts": 4}
BESIDE = BEHIND | {
    "algorithm": {"steps": 24},
    "cluster": {"backend": "local", "pools": {"train": 1, "rollout": 2}},
    "rollout": BEHIND["rollout"] | {"pool": "rollout", "layout": {"dp": 2}},
    "run": {"save_every": 1},
    "train": {"parity": True},
}
FLOWS = {
    "grpo": {}, "ppo": PPO, "episodes": EPISODES, "behind": BEHIND, "episodes behind": BOTH, "behind beside": BESIDE
}  # fmt: skip
POINTS = {
    "generating": (Engine, "poll"),
    "training": (Optimizers, "step"),
    "publishing": (Engine, "update_weights"),
    "advantages": (PolicyWorker, "advantages"),
    "critic": (CriticWorker, "update"),
    "committing": (RunDir, "commit_step"),
    "flushing": (RunDir, "flush"),
    "writing": (Local, "write"),
    "renaming": (Attempt, "publish"),
}


def die_at(point: str, call: int) -> None:
    """Replace the function by one whose ``call``-th call kills this process half way: before it returns."""
    owner, name = POINTS[point]
    whole, calls, lock = getattr(owner, name), [0], threading.Lock()  # files are written by several threads

    def dies(*args, **kwargs):
        with lock:
            calls[0] += 1
            mine = calls[0]
        result = whole(*args, **kwargs) if mine % 2 else None  # before the work on even calls, after it on odd ones
        if mine == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result if mine % 2 else whole(*args, **kwargs)

    for attribute in ("__tilth_transfer__",):
        if hasattr(whole, attribute):
            setattr(dies, attribute, getattr(whole, attribute))
    setattr(owner, name, dies)


def main() -> None:
    folder, point, call = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if point != "none":
        die_at(point, call)
    flow = sys.argv[4] if len(sys.argv) > 4 else "grpo"
    if flow in tiny.SUPERVISED:
        tiny.SUPERVISED[flow](Path(folder))
    else:
        tiny.run(tiny.recipe(Path(folder), **FLOWS[flow]))


if __name__ == "__main__":
    end_uncollected()
    main()
