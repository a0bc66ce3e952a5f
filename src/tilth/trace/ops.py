"""Every operation that a span may name, declared once: its kind, and what ``detail`` and ``seq`` say of it.

The readers go by kinds, never by guesses from names; ``tests/trace/test_ops.py`` finds each span of the source here.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

Kind = Literal["step", "phase", "compute", "communication", "call", "wait", "storage", "data", "pause", "frame"]
"""step: the controller's whole step. phase: a part of it, see PHASES. communication: ranks meet in it, and its time is
waiting for the last of them and the transfer. call: a worker executes what the controller asked. wait: for others,
nothing is done. pause: what nobody asked for, garbage collection. frame: holds others, no work of its own."""
COLLECTIVE = "detail: ranks of the group, as 0,1; seq: its number among the communications of that group"


@dataclass(frozen=True, slots=True)
class Op:
    """An operation; a name that ends in ``.*`` is a family."""

    name: str
    kind: Kind
    text: str


_DECLARED = (
    Op("step", "step", "one step of the flow, from its first draw until it is committed"),
    Op("generate", "phase", "the engines write completions"),
    Op("score", "phase", "rewards are given"),
    Op("judge", "phase", "a model judges completions"),
    Op("values", "phase", "the critic says what it expects"),
    Op("reference", "phase", "log-probs of the reference"),
    Op("logprobs", "phase", "log-probs of the policy before its update"),
    Op("advantages", "phase", "advantages from rewards"),
    Op("critic", "phase", "the critic learns"),
    Op("update", "phase", "the policy learns"),
    Op("publish", "phase", "weights go from the policy to its copies"),
    Op("verify", "phase", "the copies are compared with the policy"),
    Op("evaluate", "phase", "what is held out is measured"),
    Op("save", "phase", "a checkpoint is begun; what of it stops the run"),
    Op("forward", "compute", "forward pass and loss of a micro-batch"),
    Op("backward", "compute", "backward pass of a micro-batch"),
    Op("infer", "compute", "forward pass of a micro-batch that nothing is learned from"),
    Op("padding", "compute", "an empty micro-batch, for another rank has more"),
    Op("reduce", "frame", "gradients become those of all ranks"),
    Op("optimizer", "compute", "clipping and the optimizer's step"),
    Op("prefill", "compute", "prompts go into the cache"),
    Op("place", "compute", "rows of the cache are given away"),
    Op("decode", "compute", "one token of each row"),
    Op("sample", "compute", "the tokens are chosen"),
    Op("all_reduce", "communication", COLLECTIVE),
    Op("all_gather", "communication", COLLECTIVE),
    Op("reduce_scatter", "communication", COLLECTIVE),
    Op("broadcast", "communication", COLLECTIVE),
    Op("send", "communication", "to one peer; detail: from and to, as 0>1; seq: its number among those"),
    Op("receive", "communication", "from one peer; detail and seq: as of its send"),
    Op("call", "call", "a worker executes a call; detail: role.method; seq: its number in the controller"),
    Op("submit", "frame", "the controller sends a call to its workers; detail, seq: as of the call"),
    Op("await", "wait", "the controller waits for the answers of a call; detail, seq: as of the call"),
    Op("save.wait", "wait", "for the checkpoint before, which is still being written"),
    Op("save.background", "frame", "a checkpoint is written beside the training"),
    Op("save.*", "storage", "a stage of a checkpoint"),
    Op("load", "data", "rows of the data become tokens"),
    Op("payload.*", "data", "a column goes to the store of payload, or comes from it: put, get"),
    Op("profile", "frame", "torch's profiler begins, or ends and writes what it saw; detail: begin, end"),
    Op("gc", "pause", "garbage collection by Python; detail: generation"),
)  # fmt: skip
OPS = {op.name: op for op in _DECLARED}
PHASES = frozenset(op.name for op in _DECLARED if op.kind == "phase")
"""Operations that a step consists of. Time inside several of them (generating within ``evaluate``) belongs to the
outermost, so that the phases of a step never overlap."""

ON_DEVICE = frozenset(op.name for op in _DECLARED if op.kind in ("compute", "communication"))
"""Operations whose work a GPU does, where there is one."""


def kind(name: str) -> Kind:
    """The kind of an operation; KeyError with the nearest name for one that is not declared."""
    found = OPS.get(name) or OPS.get(f"{name.partition('.')[0]}.*")
    if found is None:
        near = difflib.get_close_matches(name, OPS, 1)
        raise KeyError(f"operation {name!r} is not declared in trace/ops.py" + (f"; near: {near[0]}" if near else ""))
    return found.kind
