"""Saving in one process, which waits until everything is on disk."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tilth.checkpoint.image import Group
from tilth.checkpoint.saver import Saver, abandon_save, begin_save, check_json, commit_save
from tilth.checkpoint.storage import Location
from tilth.core.layout import Layout, Mesh

Groups = Mapping[str, Mapping[str, Tensor]]


def save(root: Location, step: int, groups: Groups, objects: Mapping[str, Any], layout: Mesh | None = None) -> Any:
    """Write ``root/step-000100`` with one safetensors file per group of tensors and ``manifest.json``; its path or URL.

    Returns when everything is on disk. Leftovers of crashed saves under ``root`` are removed first, so one process at
    a time may write there. A checkpoint of the same step is replaced. ``layout`` is the mesh of the writers (default:
    one process). StorageError if writing fails (disk full, read-only, no permission): nothing of the attempt remains
    and what was there before is intact. CheckpointError, before anything is written, if something cannot be stored.
    """
    check_json(objects, "objects")
    single = {
        name: Group(tensors, {n: Layout.single(tuple(t.shape)) for n, t in tensors.items()})
        for name, tensors in groups.items()
    }
    saver = Saver()
    saver.prepare(single, 0)
    folder = begin_save(root, step)
    try:
        reports = saver.write(folder, single, 0)
    except BaseException:
        abandon_save(folder)
        raise
    return commit_save(folder, root, step, reports, objects, layout, {name: (0,) for name in groups})
