"""Events of a run from trees of spans written by hand."""

import itertools

import pyarrow as pa

from tilth.analysis.events import from_table
from tilth.trace.writer import EVENTS

EMPTY = {
    "attempt": 1, "detail": "", "seq": -1, "role": "", "place": "", "step": -1, "micro_batch": -1, "tokens": 0,
    "squares": 0, "bytes": 0, "flops": 0.0, "thread": "MainThread",
}  # fmt: skip
INHERITED = ("rank", "thread", "step", "role", "place", "micro_batch")


def s(op, start, end, *inside, **columns):
    """A span from start to end in ns, and the spans inside it; columns as in the schema, ``rank`` at the root."""
    return {"op": op, "start": start, "duration": end - start, "inside": inside, **columns}


def table(*roots):
    """A table of events as a run writes them: children before their parents."""
    rows, ids = [], itertools.count()

    def take(node, parent):
        given = {k: v for k, v in node.items() if k != "inside"}
        inherited = {k: parent[k] for k in INHERITED} if parent else {}
        row = EMPTY | inherited | given
        row |= {
            "id": next(ids),
            "parent": parent["id"] if parent else -1,
            "depth": parent["depth"] + 1 if parent else 0,
        }
        for child in node["inside"]:
            take(child, row)
        rows.append(row)

    for root in roots:
        take(root, None)
    return pa.Table.from_pylist(rows, schema=EVENTS)


def tree(*roots):
    """The same as ``Events``."""
    return from_table(table(*roots))


def two_workers():
    """Two steps: rank 1 generates longer than rank 0; then both learn and meet; a checkpoint after the second step."""
    update = {"detail": "policy.update", "role": "policy", "step": 1}
    meet = {"detail": "0,1", "seq": 0}
    return [
        s("step", 0, 100, s("submit", 0, 2, detail="rollout.generate", seq=1), s("await", 2, 52, seq=1),
          s("submit", 52, 53, detail="policy.update", seq=2), s("await", 53, 95, seq=2), rank=2, step=1),
        s("step", 110, 150, s("evaluate", 112, 140, s("submit", 112, 113, seq=3), s("await", 113, 140, seq=3)),
          rank=2, step=2),
        s("save", 152, 180, s("submit", 152, 153, seq=4), s("await", 153, 180, seq=4), rank=2),
        s("call", 5, 25, s("generate", 5, 24, s("decode", 6, 10)), rank=0, step=1, seq=1, role="rollout"),
        s("call", 5, 50, s("generate", 6, 50, s("gc", 20, 23)), rank=1, step=1, seq=1, role="rollout"),
        s("call", 55, 90, s("update", 55, 90, s("reduce", 60, 80, s("all_reduce", 60, 80, **meet))),
          rank=0, seq=2, **update),
        s("call", 55, 94, s("load", 55, 57), s("update", 57, 94, s("all_reduce", 70, 80, **meet)),
          rank=1, seq=2, **update),
        s("call", 114, 138, s("generate", 114, 138, s("load", 115, 116)), rank=0, step=2, seq=3, role="rollout"),
        s("call", 154, 174, rank=0, seq=4, role="policy"), s("call", 154, 178, rank=1, seq=4, role="policy"),
        s("save.background", 160, 200, s("save.write", 160, 190), rank=0, thread="tilth-save-0"),
        s("call", -20, -10, rank=0, seq=0), s("call", -20, -10, rank=1, seq=0),
    ]  # fmt: skip
