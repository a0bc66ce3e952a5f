"""Where tensors to be shown or compared come from: a checkpoint, or a directory of Hugging Face."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tilth.checkpoint import Checkpoint, open_checkpoint
from tilth.core.errors import ModelError
from tilth.core.layout import Box, Shape
from tilth.runs.model_refs import EMA, Named, explained, find_checkpoint

MODEL = "model"


class TensorSource(Protocol):
    """Tensors by group and name, read by boxes."""

    name: str
    """For people."""
    objects: Mapping[str, Any] | None
    """What was saved beside the tensors; None where there is no such thing."""

    def groups(self) -> list[str]:
        """Names of the groups of tensors."""
        ...

    def names(self, group: str) -> list[str]:
        """Names of the tensors of a group."""
        ...

    def kind(self, group: str, name: str) -> tuple[Shape, torch.dtype]:
        """Shape and dtype of a tensor, without reading it."""
        ...

    def read(self, group: str, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        ...


class StoredSource:
    """A checkpoint."""

    def __init__(self, named: Named, checkpoint: Checkpoint) -> None:
        self.named, self.checkpoint = named, checkpoint
        self.name = str(checkpoint.path)
        self.objects: Mapping[str, Any] | None = checkpoint.objects
        if named.group not in checkpoint.groups:
            there = ", ".join(checkpoint.groups) or "none"
            raise ModelError(
                f"{checkpoint.path} has no group {named.group}; its groups are: {there}", key=f"group.{named.group}"
            )

    def groups(self) -> list[str]:
        """As in ``TensorSource``; of ``RUN@ema`` the average is the model."""
        return self.checkpoint.groups if self.named.group != EMA else [MODEL]

    def names(self, group: str) -> list[str]:
        """As in ``TensorSource``."""
        return self.checkpoint.names(self._own(group))

    def kind(self, group: str, name: str) -> tuple[Shape, torch.dtype]:
        """As in ``TensorSource``."""
        entry = self.checkpoint.entry(self._own(group), name)
        return entry.shape, entry.torch_dtype

    def read(self, group: str, name: str, box: Box) -> Tensor:
        """As in ``TensorSource``. CheckpointError where it is damaged."""
        with explained(self.named):
            return self.checkpoint.read(self._own(group), name, box)

    def _own(self, group: str) -> str:
        return EMA if self.named.group == EMA else group


class DirectorySource:
    """A directory of Hugging Face: one group, ``model``."""

    objects: Mapping[str, Any] | None = None

    def __init__(self, directory: Path) -> None:
        from tilth.models.hf import open_tensors

        self.name, self.tensors = str(directory), open_tensors(directory)

    def groups(self) -> list[str]:
        """As in ``TensorSource``."""
        return [MODEL]

    def names(self, group: str) -> list[str]:
        """As in ``TensorSource``."""
        return list(self.tensors)

    def kind(self, group: str, name: str) -> tuple[Shape, torch.dtype]:
        """As in ``TensorSource``."""
        shape = self.tensors.shape(name)
        return shape, self.tensors.part(name, tuple(slice(0, 0) for _ in shape)).dtype

    def read(self, group: str, name: str, box: Box) -> Tensor:
        """As in ``TensorSource``. ModelError where a file is damaged."""
        return self.tensors.part(name, box.slices)


def open_source(spec: str) -> TensorSource:
    """What a text names: any checkpoint, or a directory of Hugging Face. ModelError, CheckpointError."""
    named = find_checkpoint(spec)
    if named is None:
        return DirectorySource(Path(spec))
    with explained(named):
        return StoredSource(named, open_checkpoint(named.path))


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def flattened(value: Any, place: str = "") -> dict[str, Any]:
    """JSON as dotted key -> value; lists and empty objects are values."""
    if not isinstance(value, Mapping) or not value:
        return {place: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flattened(item, f"{place}.{key}" if place else str(key))
    return found
