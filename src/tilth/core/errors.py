"""Errors for users. Each message names, in one line, the key, its value and what would work."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilth.config.errors import ArgumentError, AxisError, PluginError, RecipeError, TilthError

__all__ = ["ArgumentError", "AxisError", "CallTimeout", "CheckpointError", "DataError", "LogprobMismatch"]
__all__ += ["LossMaskError", "ModelError", "NonFiniteError", "OutOfMemory", "PayloadLeak", "PluginError"]
__all__ += ["RecipeError", "ReplicaMismatch", "RewardError", "ScheduleError", "StaleGeneration", "StorageError"]
__all__ += ["TilthError", "TokenCountError", "TokenDivisionError"]
__all__ += ["TokenIdentityError", "TrajectoryError", "WeightMismatch", "WorkerError", "WorkerLost", "parsing"]


class DataError(TilthError):
    """An unreadable, empty or ill-formed dataset or tokenizer, or a prompt that does not fit the context."""


class ModelError(TilthError):
    """A model directory that is missing or does not match the architecture it claims."""


class RewardError(TilthError):
    """A reward function cannot be loaded or called at all (a single failing call is a missing reward)."""


class ScheduleError(TilthError):
    """A schedule of micro-batches is unknown, or its passes cannot run in its order."""


class CheckpointError(TilthError):
    """A checkpoint that is missing, incomplete, corrupt or of another shape; names the file and the tensor."""


class StorageError(TilthError):
    """A write failed (disk full, read-only, ...); earlier commits are intact."""


class NonFiniteError(TilthError):
    """The loss or the gradient norm is not finite, and ``guard.on_nan`` or the steps before it forbid to skip it."""


class OutOfMemory(TilthError):
    """Memory ran out; names role, rank, method, the bytes wanted and free. What was committed is intact.

    key: ``ROLE.METHOD`` of the call (``policy.update``).
    """

    role = ""
    """Role of the call; "" if unknown."""


class WeightMismatch(TilthError):
    """A tensor of the rollout engine differs from the trainer's after a weight sync."""


class ReplicaMismatch(TilthError):
    """Copies of a tensor on different workers, which must be equal bit for bit, differ at the end of a step; or a
    tensor or a payload column has changed although nothing wrote to it."""


class LogprobMismatch(TilthError):
    """Log-probs of trainer and rollout engine differ by more than the configured bound."""


class LossMaskError(TilthError):
    """The loss mask selects the first token of a sequence, which nothing predicts."""


class TokenCountError(TilthError):
    """A token was trained on twice or never, or the parts of a loss do not add up to its denominator."""


class PlanError(TilthError):
    """The plan of a batch is not one of the rows that came with it."""


class TokenDivisionError(TilthError):
    """The tokens that all ranks have computed in an update are not those of the batch."""


class PayloadLeak(TilthError):
    """Payload that nothing can use any more was not released by its owner."""


class TrajectoryError(TilthError):
    """Parts of an episode contradict each other: lengths, segments, mask, version spans."""


class TokenIdentityError(TilthError):
    """The token ids to train on are not exactly those of the rollout engine, or of the run that is replayed."""


class WorkerError(TilthError):
    """A role raised an exception that is no TilthError; names role, rank and method, then the worker's traceback.

    key: ``ROLE.METHOD`` of the call (``policy.update``); ``cluster.METHOD`` for a call of the cluster itself.
    """

    collective = ""
    """"broken" or "timeout" if a collective raised it: another rank may be the cause, which failed or did not join."""


class WorkerLost(TilthError):
    """A worker process died; names role, rank, method and signal, then the tail of its log.

    key: ``ROLE.METHOD`` of the lost call; ``cluster.start`` before the first one.
    """


class StaleGeneration(TilthError):
    """A call on a role, or its answer, from before the role was made again. key: ``ROLE.METHOD`` of the call."""


class CallTimeout(TilthError):
    """A call exceeded its limit; names role, rank and method, then what every rank does, with its stack.

    key: ``ROLE.METHOD`` of the late call; of the first one if several are late.
    """

    probes: Sequence[Any] = ()
    """State of each worker at the limit (``cluster.backends.base.Probe``)."""
    since: Mapping[int, float] = MappingProxyType({})
    """When each busy worker last got on with its work, in monotonic seconds."""


@contextmanager
def parsing(path: Path | str) -> Iterator[None]:
    """Raise DataError where the body meets values of a file, or of a run's files, that nothing here writes: keys are
    missing, or values have other types."""
    try:
        yield
    except TilthError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise DataError(f"{path} cannot be read: {reason}", key=f"{Path(path).name}.content") from error
