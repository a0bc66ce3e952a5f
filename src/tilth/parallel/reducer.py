"""The sum of gradients over ranks, as one object that another may replace: one that sends less than it is given."""

from collections.abc import Mapping

from torch import Tensor

from tilth.core.errors import CheckpointError
from tilth.parallel.comm import Collective, Group, all_reduce, reduce_scatter


class GradientReducer:
    """Sum of gradients over ranks, exact but for rounding. Every rank of a model has one, of the same class.

    A subclass may send less and keep what it leaves out as its ``state``. ``key`` names a sum: the same in each step,
    with the same number of elements.
    """

    tolerance = 0.0
    """Largest relative error of an element that is sent, beyond the epsilon of its dtype. The checks of sums allow for
    it, and see no error that is smaller."""

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group, key: str) -> None:
        """Fill ``out`` [n] with this rank's part of the sum of every rank's contiguous ``whole`` [n * ranks]."""
        reduce_scatter(out, whole, group)

    def all_reduce(self, x: Tensor, group: Group, key: str) -> Collective:
        """Start to sum contiguous x [n] over the group in place; the same bits on every rank."""
        return all_reduce(x, group)

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors that the next step depends on, by name."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over the ``state`` of a checkpoint; empty before the first sum. CheckpointError if it does not fit."""
        if state:
            message = f"a checkpoint has {next(iter(state))} of a reducer of gradients, and {type(self).__name__} keeps"
            raise CheckpointError(f"{message} nothing; train on with the reducer that it was saved with", key="reducer")


EXACT = GradientReducer()
