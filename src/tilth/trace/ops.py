"""The operations that spans may name, each declared once: its kind, and the meaning of ``detail`` and ``seq``.

Readers use kinds and never guess from names; ``tests/trace/test_ops.py`` checks that each span of the source is here.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

Kind = Literal["step", "phase", "compute", "communication", "call", "wait", "storage", "data", "pause", "frame"]
"""step: a whole step of the controller. phase: a part of it, see PHASES. communication: between ranks; its time is the
wait for the last of them, and the transfer. call: a worker executes a call of the controller. wait: idle, for others.
pause: garbage collection. frame: contains other operations, and has no work of its own."""
COLLECTIVE = "detail: ranks of the group, as 0,1; seq: its number among the communications of that group"


@dataclass(frozen=True, slots=True)
class Op:
    """An operation; a name that ends in ``.*`` is a family."""

    name: str
    kind: Kind
    text: str


_DECLARED = (
    Op("step", "step", "one step of the flow, from its first draw until it is committed"),
    Op("generate", "phase", "the engines sample completions"),
    Op("score", "phase", "rewards are computed"),
    Op("judge", "phase", "a model judges completions"),
    Op("values", "phase", "the critic computes values"),
    Op("reference", "phase", "log-probs of the reference"),
    Op("logprobs", "phase", "log-probs of the policy before its update"),
    Op("advantages", "phase", "advantages from rewards"),
    Op("critic", "phase", "the critic is updated"),
    Op("update", "phase", "the policy is updated"),
    Op("publish", "phase", "weights go from the policy to its copies"),
    Op("pull", "phase", "an engine takes the weights that were published last, and compares them"),
    Op("pack", "phase", "what has changed of the weights is packed for relays of other nodes"),
    Op("unpack", "phase", "it is written into the relay of this node"),
    Op("verify", "phase", "the copies are compared with the policy"),
    Op("evaluate", "phase", "held-out data is evaluated"),
    Op("save", "phase", "the part of a checkpoint that blocks the run"),
    Op("forward", "compute", "forward pass and loss of a micro-batch"),
    Op("backward", "compute", "backward pass of a micro-batch"),
    Op("weight", "compute", "gradients of matrices that a backward pass has left"),
    Op("infer", "compute", "forward pass of a micro-batch without a gradient"),
    Op("padding", "compute", "an empty micro-batch, since another rank has more"),
    Op("reduce", "frame", "gradients are summed over ranks"),
    Op("optimizer", "compute", "clipping and the optimizer's step"),
    Op("prefill", "compute", "prompts go into the cache"),
    Op("place", "compute", "rows of the cache are assigned"),
    Op("decode", "compute", "one token of each row"),
    Op("sample", "compute", "the tokens are chosen"),
    Op("all_reduce", "communication", COLLECTIVE),
    Op("all_gather", "communication", COLLECTIVE),
    Op("reduce_scatter", "communication", COLLECTIVE),
    Op("all_to_all", "communication", COLLECTIVE),
    Op("exchange", "communication", f"a tensor to one rank and one from another; {COLLECTIVE}"),
    Op("broadcast", "communication", COLLECTIVE),
    Op("send", "communication", "to one peer; detail: from and to, as 0>1; seq: its number among those"),
    Op("receive", "communication", "from one peer; detail and seq: as of its send"),
    Op("call", "call", "a worker executes a call; detail: role.method; seq: its number in the controller"),
    Op("plan", "frame", "the controller plans the micro-batches of a call; detail: role.method"),
    Op("submit", "frame", "the controller sends a call to its workers; detail, seq: as of the call"),
    Op("await", "wait", "the controller waits for the answers of a call; detail, seq: as of the call"),
    Op("snapshot", "phase", "the copy of the state in memory, from which a run goes on after a failure"),
    Op("snapshot.copies", "phase", "the snapshot before is on its way to other nodes still"),
    Op("checksums", "compute", "checksums of copies that must be equal"),
    Op("stall", "wait", "the loop waits for samples that were begun ahead"),
    Op("save.wait", "wait", "for the checkpoint before, which is still being written"),
    Op("save.background", "frame", "a checkpoint is written beside the training"),
    Op("save.*", "storage", "a stage of a checkpoint"),
    Op("load", "data", "rows of the data become tokens"),
    Op("payload.*", "data", "a column goes to the store of payload, or comes from it: put, get"),
    Op("profile", "frame", "torch's profiler starts, or stops and writes; detail: begin, end"),
    Op("gc", "pause", "garbage collection by Python; detail: generation"),
)  # fmt: skip
OPS = {op.name: op for op in _DECLARED}
PHASES = frozenset(op.name for op in _DECLARED if op.kind == "phase")
"""The parts of a step. Time inside nested ones (generating within ``evaluate``) belongs to the outermost, so that the
phases of a step never overlap."""

ON_DEVICE = frozenset(op.name for op in _DECLARED if op.kind in ("compute", "communication"))
"""Operations that a GPU executes, if there is one."""


def declared(name: str) -> Op | None:
    """Return the declaration of an operation; None without one."""
    return OPS.get(name) or OPS.get(f"{name.partition('.')[0]}.*")


def kind(name: str) -> Kind:
    """Return the kind of an operation. KeyError names the nearest one for an undeclared operation."""
    found = declared(name)
    if found is None:
        near = difflib.get_close_matches(name, OPS, 1)
        raise KeyError(f"operation {name!r} is not declared in trace/ops.py" + (f"; near: {near[0]}" if near else ""))
    return found.kind
