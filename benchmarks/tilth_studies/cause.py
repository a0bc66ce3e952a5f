"""Name the likely cause of a slow job, with its evidence (arXiv 2505.05713, sections 5 and 6).

Shares are of the time lost, (T - T_mended) / (T - T_ideal). They need not add up to 1: causes overlap.
"""

import numpy as np

from tilth.analysis.whatif import Cause, Finding, Place, medians
from tilth_studies.straggler_format import Trace
from tilth_studies.whatif import LOCAL, TraceModel, WhatIf, replaced

STRAGGLING = 1.1
"""S from which the study calls a job straggling."""
MOST = 0.5
"""Share of the loss from which something is a cause."""
ALIKE, SPREAD = 0.95, 0.1
"""Within a worker: least correlation of forward with backward times, and least coefficient of variation of forwards,
that indicate unequal sequences. (The paper has 0.9 and no second test, which also fires for nearly even times.)"""
PAUSE, CALM = 1.5, 1.25
"""A forward this many times its worker's median in the step, whose backward stays below the second, held a pause."""


def diagnose(model: TraceModel, found: WhatIf) -> Cause:
    """Name why a job is slow."""
    alike, spread = alikeness(model.trace)
    pauses, count = paused(model)
    held = replaced(model, pauses, found.replayed, found.ideal)
    evidence = {
        "model_error": found.error, "waste": found.waste, "forward_backward_correlation": alike,
        "forward_variation": spread, "pauses_per_step": count / len(found.steps), "share_pauses": held.share,
        "share_communication": found.m_c.share, "share_workers": found.m_w.share, "share_last_stage": found.m_s.share,
        "share_worst_stage": found.m_p.share, "share_within_stages": found.m_l.share,
    }  # fmt: skip
    if found.slowdown < STRAGGLING:
        return Cause(f"no straggler: S is {found.slowdown:.3f}, below {STRAGGLING}", (), evidence)
    findings = _findings(model.trace, found, evidence)
    kind = max(found.by_optype, key=lambda name: found.by_optype[name].mean)
    text = "; ".join(f.text for f in findings) or f"no single cause; {kind} is slowed most"
    return Cause(text, tuple(findings), evidence)


def _findings(trace: Trace, found: WhatIf, evidence: dict[str, float]) -> list[Finding]:
    if evidence["share_pauses"] >= MOST:
        return [_pauses(evidence)]
    if found.m_c.share >= MOST:
        return [_communication(found)]
    lengths = evidence["forward_backward_correlation"] >= ALIKE and evidence["forward_variation"] > SPREAD
    workers = found.m_w.share >= MOST and not (trace.dp == 1 and found.worst[0][1] == trace.stages - 1 > 0)
    findings = [_workers(found)] if workers else []
    if lengths:
        findings.append(_lengths(found, evidence))
    if found.m_p.share >= MOST and not workers:
        findings.append(_stage(found))
    return sorted(findings, key=lambda f: -f.share)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} % of the loss"


def _workers(found: WhatIf) -> Finding:
    named = sorted(found.worst, key=lambda w: -found.exact[w[1], w[0]])
    top = found.exact[named[0][1], named[0][0]]
    named = [w for w in named if found.exact[w[1], w[0]] - 1 >= 0.5 * (top - 1)]
    where: tuple[Place, ...] = tuple({"dp": d, "stage": p, "rank": int(found.workers[p, d])} for d, p in named)
    names = ", ".join(f"dp {w['dp']} stage {w['stage']} (rank {w['rank']})" for w in where[:3])
    more = f" and {len(where) - 3} more" if len(where) > 3 else ""
    text = (
        f"slow worker: {names}{more}; the worst alone makes a step {top:.2f} times the ideal; mended, "
        f"{_percent(found.m_w.share)} goes"
    )
    return Finding("slow-worker", found.m_w.share, text, where)


def _stage(found: WhatIf) -> Finding:
    stage = max(found.by_stage, key=lambda p: found.by_stage[p].mean)
    last = " (the last)" if stage == len(found.by_stage) - 1 else ""
    text = (
        f"stage imbalance: stage {stage}{last} alone makes a step {found.by_stage[stage].mean:.2f} times the ideal; "
        f"{_percent(found.m_p.share)} goes with it"
    )
    return Finding("stage-imbalance", found.m_p.share, text, ({"stage": stage},))


def _lengths(found: WhatIf, evidence: dict[str, float]) -> Finding:
    text = (
        f"unequal sequences: within a worker forwards vary by {100 * evidence['forward_variation']:.0f} % and their "
        f"backwards with them (r = {evidence['forward_backward_correlation']:.3f}); even micro-batches on each stage "
        f"would save {_percent(found.m_l.share)}"
    )
    return Finding("sequence-lengths", found.m_l.share, text)


def _pauses(evidence: dict[str, float]) -> Finding:
    text = (
        f"garbage collection or another pause of the host: {evidence['pauses_per_step']:.1f} forwards a step take more "
        f"than {PAUSE} times their worker's median while their backwards do not; {_percent(evidence['share_pauses'])}"
    )
    return Finding("garbage-collection", evidence["share_pauses"], text)


def _communication(found: WhatIf) -> Finding:
    wires = {n: s for n, s in found.by_optype.items() if n not in LOCAL}
    kind = max(wires, key=lambda name: wires[name].mean)
    text = (
        f"communication: without its outliers {_percent(found.m_c.share)} would go; most of it is {kind}, alone "
        f"{wires[kind].mean:.2f} times the ideal"
    )
    return Finding("communication", found.m_c.share, text, ({"optype": kind},))


def _halves(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """int64 [k] each: forwards and the backwards of the same micro-batch, chunk and stage."""
    (forward, a), (backward, b) = (
        (ops, (trace.stage[ops] * (int(trace.chunk.max()) + 1) + trace.chunk[ops]) * (int(trace.micro_batch.max()) + 2)
         + trace.micro_batch[ops])
        for ops in (np.flatnonzero(trace.named(name)) for name in ("forward-compute", "backward-compute"))
    )  # fmt: skip
    _, i, j = np.intersect1d(a, b, return_indices=True)
    return forward[i], backward[j]


def alikeness(trace: Trace) -> tuple[float, float]:
    """Return ``medians`` of forward and backward times of each worker, since pooled stages differ for other reasons."""
    forward, backward = _halves(trace)
    return medians(
        [
            tuple(trace.duration[ops[trace.stage[forward] == stage], :, dp].ravel() for ops in (forward, backward))
            for stage in range(trace.stages)
            for dp in range(trace.dp)
        ]
    )


def paused(model: TraceModel) -> tuple[np.ndarray, int]:
    """Set forwards that held a pause to their worker's median in the step; count them.

    Return durations float64 [n, s, d] in the order of the schedule. Pauses of Python delay forwards only: backwards are
    launched by C++.
    """
    place = np.empty(len(model.optype), np.int64)
    place[model.schedule.order] = np.arange(len(place))
    forward, backward = (place[ops] for ops in _halves(model.trace))
    even, count = model.real.copy(), 0
    for stage in range(model.trace.stages):
        mine = model.stage[forward] == stage
        f, b = model.real[forward[mine]], model.real[backward[mine]]
        if not len(f):
            continue
        usual = np.median(f, axis=0)
        held = (f > PAUSE * usual) & (b < CALM * np.median(b, axis=0))
        even[forward[mine]] = np.where(held, usual, f)
        count += int(held.sum())
    return even, count
