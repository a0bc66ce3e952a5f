"""Events of a run from trees of spans written by hand."""

import itertools

import pyarrow as pa

from tilth.trace.events import from_table
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
