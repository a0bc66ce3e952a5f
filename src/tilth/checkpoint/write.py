"""Save a checkpoint from one process, which waits until everything is on disk."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilth.checkpoint.saver import Saver, abandon_save, begin_save, check_objects, commit_save
from tilth.checkpoint.snapshot import Group, check_tensor
from tilth.checkpoint.storage import Location
from tilth.core.errors import CheckpointError
from tilth.core.layout import Layout, Mesh

Groups = Mapping[str, Mapping[str, Tensor]]


def save(root: Location, step: int, groups: Groups, objects: Mapping[str, Any], layout: Mesh | None = None) -> Any:
    """Write ``root/step-000100``: one safetensors file per group and ``manifest.json``. Return its path or URL.

    Returns when everything is on disk. Removes leftovers of crashed saves under ``root`` first, so only one process at
    a time may write there. Replaces a checkpoint of the same step. layout: the mesh of the writers (default: one
    process). StorageError if writing fails: nothing of the attempt remains and earlier checkpoints are intact.
    CheckpointError, before anything is written, if something cannot be stored.
    """
    check_objects(objects)
    _check_mapping("groups", groups, "groups")
    single = {name: _whole_group(name, tensors) for name, tensors in groups.items()}
    saver = Saver()
    saver.prepare(single, 0)
    folder = begin_save(root, step)
    try:
        reports = saver.write(folder, single, 0)
    except BaseException:
        abandon_save(folder)
        raise
    return commit_save(folder, reports, objects, layout, dict.fromkeys(groups, (0,)))


def _whole_group(name: str, tensors: Mapping[str, Tensor]) -> Group:
    """Return the group of one process, which holds whole tensors."""
    _check_mapping(f"groups.{name}", tensors, "tensors")
    layouts = {}
    for tensor, values in tensors.items():
        check_tensor(name, tensor, values)
        layouts[tensor] = Layout.single(tuple(values.shape))
    return Group(tensors, layouts)


def _check_mapping(name: str, value: Any, of: str) -> None:
    if not isinstance(value, Mapping):
        message = f"{name} is a {type(value).__name__}; it must be a mapping of names to {of}"
        raise CheckpointError(message, key=name)
