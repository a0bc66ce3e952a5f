"""Phases of a run: an optional warm-up, an optional stretch in which the critic learns alone, and the flow itself."""

from tilth.config.flows import FLOWS

WARMUP = "warmup"
VALUES = "values"
"""The phase in which the critic alone learns, before that of a flow with a critic."""


def is_supervised(phase: str) -> bool:
    """True for a phase that learns from given data: a supervised flow, or the warm-up of another flow."""
    return phase == WARMUP or (phase in FLOWS and not FLOWS[phase].samples)
