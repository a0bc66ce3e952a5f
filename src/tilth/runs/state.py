"""Where a run is: the controller's state between two steps."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """The controller's whole state between two steps: all that a checkpoint must hold besides tensors."""

    step: int = 0
    phase: str = ""
    phase_step: int = 0
    finished: list[str] = field(default_factory=list)
    optimizer_steps: int = 0
    version: int = 0
    accuracy_first: float | None = None
    accuracy_last: float | None = None
    """Accuracy, or the mean reward where an answer is not just right or wrong."""
    heldout: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation."""
    graded: bool = False
    """Whether an answer has been neither right (1) nor wrong (0), so that no mean is an accuracy."""
    best: dict[str, Any] | None = None
    """The best evaluation so far: step, metric, value."""
    drawn: dict[str, int] = field(default_factory=dict)
    """How far each stream of the data has been read: prompts, examples or documents; and samples, which have numbers
    of their own."""
    flat: dict[str, float] = field(default_factory=dict)
    """Steps in a row that taught nothing (``hopeless.counted``)."""
    weights: dict[str, float] = field(default_factory=dict)
    """Key of [algorithm] -> what it has become, for weights that are adapted; and what they follow from."""
