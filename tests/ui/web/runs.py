"""Folders of runs for the tests of the page, and a client of it."""

import json
import threading
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from starlette.testclient import TestClient

from tests.analysis.tree import s, table
from tests.ui.fake import fake_run
from tilth.config.load import from_dict
from tilth.data.trajectories import COLUMNS
from tilth.runs.directory import RunDir
from tilth.runs.readers import read_metrics
from tilth.ui.web.app import PageServer, make_app


def client_of(folder, token="", host="127.0.0.1"):
    app, path = make_app(folder, token)
    return TestClient(app, base_url=f"http://{host}", raise_server_exceptions=True), path


@contextmanager
def started(folder, token=""):
    """A server of the pages in a thread of its own."""
    server = PageServer(folder, "127.0.0.1", 0, token)
    thread = threading.Thread(target=server.run_here, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)


def named(root, name):
    return from_dict({"run": {"dir": str(root), "name": name}, "data": {"source": "addition"}})


def folder_of_runs(root):
    """A finished run, one of several turns, one of two ranks of which one is slow, a broken one, and a folder that is
    none."""
    fake_run(root, warmup=4, steps=12).rename(root / "sums-a-001")
    agents(root)
    ranks(root)
    (root / "torn").mkdir()
    (root / "torn" / "run.json").write_text("{")
    (root / "notes").mkdir()
    return root


def agents(root, name="agents", learned=False):
    """A run whose episodes have turns: a tool call, an observation, an answer. learned: with what the trainer
    computed of each token."""
    with RunDir.create(named(root, name), name) as run:
        rows = []
        for i in range(4):
            rows.append(
                {
                    "step": 1, "id": i, "group": 7, "prompt": 3, "prompt_text": "how many <b>nuts</b>?",
                    "text": '<tool_call>{"name": "shelf", "arguments": {}}</tool_call>four', "answer": "4",
                    "tokens": [1, 2, 3, 4, 5, 6, 7], "mask": [0, 0, 1, 1, 0, 1, 1], "prompt_length": 2, "length": 4,
                    "segments": [{"role": "user", "start": 0}, {"role": "assistant", "start": 2},
                                 {"role": "tool", "start": 4}, {"role": "assistant", "start": 5}],
                    "reward": [0.0, 0.25, 1.0, None][i], "parts": [("format", 0.5)], "turn_rewards": [0.25, 0.75],
                    "finish": "stop", "logprobs": [0.0, 0.0, -0.01, -0.2, 0.0, -2.5, -5.0], "version": i,
                }
            )  # fmt: skip
            if learned:
                rows[-1]["advantages"] = [0.0, 0.0, i - 1.5, 0.25, 0.0, -0.5 * i, 3.0]
                rows[-1]["trainer_logprobs"] = [0.0, 0.0, -0.01, -0.2 - 1e-5, 0.0, -2.5 + 0.3 * i, -7.0]
        run.trajectories.add(pa.Table.from_pylist(rows, schema=COLUMNS))
        behind = {"staleness/mean": 1.0, "staleness/max": 2.0, "staleness/tokens/0": 9.0, "staleness/tokens/2": 3.0}
        ends = {"samples": 4.0, "samples/finished": 5.0, "length/finished": 4.5, "samples/dropped": 1.0}
        ends |= {"samples/admitted": 6.0, "fully_async/trainer/idle_ratio": 0.25, "kv_cache_usage/max": 0.5}
        run.commit_step({"step": 1, "phase": "grpo", "reward/mean": 0.4, **behind, **ends})
        run.end("finished")
        return run.path


def ranks(root, steps=12, slow=1.8, name="ranks"):
    """A run of two ranks and a controller, in which rank 1 takes ``slow`` times as long for the same work."""
    with RunDir.create(named(root, name), name) as run:
        roots = []
        for step in range(1, steps + 1):
            at, begin = (step - 1) * 10**9, step * 2
            for rank, took in ((0, 0.4), (1, 0.4 * slow)):
                inside = s("update", at + 10**7, at + int((0.01 + took) * 1e9), s("forward", at + 10**7, at + 2 * 10**7,
                           micro_batch=0, tokens=64))  # fmt: skip
                roots.append(s("call", at + 10**7, at + int((0.02 + took) * 1e9), inside, rank=rank, step=step,
                               seq=begin, role="policy", place=f"dp={rank}", detail="policy.update"))  # fmt: skip
            roots.append(s("step", at, at + 10**9, s("submit", at, at + 10**6, detail="policy.update", seq=begin),
                           s("await", at + 10**6, at + 9 * 10**8, seq=begin), rank=2, step=step))  # fmt: skip
            run.commit_step({"step": step, "phase": "grpo", "loss": 1.0 / step, "time/step": 1.0})
        for rank in range(3):
            for number, part in enumerate((range(1, 6), range(6, steps + 1)), 1):
                mine = [root for root in roots if root["rank"] == rank and root["step"] in part]
                path = run.events / f"attempt-1-rank-{rank}-{number:06d}.parquet"
                known = ["step"] if number > 1 else False  # as ``trace.writer`` and its earlier versions wrote
                pq.write_table(table(*mine), path, write_statistics=known)
        run.note_finding({"step": 9, "kind": "slow", "ranks": [1], "evidence": "rank 1 costs 0.3 s", "details": {}})
        run.end("finished")
        return run.path


@contextmanager
def running(root, name="live"):
    """A run that this process writes, one step of it committed."""
    with RunDir.create(named(root, name), name) as run:
        run.commit_step({"step": 1, "phase": "grpo", "reward/mean": 0.5, "loss": 1.0, "tokens/trained": 100.0})
        read_metrics(run.path)  # waits for what is still to be written
        yield run


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
