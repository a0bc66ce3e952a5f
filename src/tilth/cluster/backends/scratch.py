"""Scratch folder of one node: files of snapshots that other nodes ask for, and copies of theirs."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from tilth.core.errors import StorageError

PIECE = 32 * 2**20
"""Bytes that travel at once."""
Read = Callable[[str, int], tuple[np.ndarray, int, int]]
"""(file, offset) -> bytes from there on, their checksum, size of the file: ``Scratch.read`` of another node."""


class Scratch:
    """Folder under the same path on every node. Names are relative to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str, offset: int) -> tuple[np.ndarray, int, int]:
        """Return up to ``PIECE`` bytes of a file from an offset, their checksum, and the file's size."""
        path = self.folder / name
        size = path.stat().st_size
        data = np.fromfile(path, np.uint8, max(0, min(PIECE, size - offset)), offset=offset)
        return data, xxhash.xxh3_64_intdigest(data.data), size

    def listing(self, folder: str) -> dict[str, tuple[int, int]] | None:
        """Return name -> (size, time of the last change in ns) of the files of a folder; None if there is none."""
        if not (self.folder / folder).is_dir():
            return None
        found = sorted((self.folder / folder).glob("[!.]*"))
        return {path.name: ((stat := path.stat()).st_size, stat.st_mtime_ns) for path in found}

    def fetch(self, name: str, read: Read) -> int:
        """Copy a file of another node; return its bytes. It is there in one piece or not at all.

        StorageError without room, and for bytes that differ on the way.
        """
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, offset, size = path.with_name(f".{path.name}.part"), 0, -1
        try:
            with open(temporary, "wb") as file:
                while offset != size:
                    data, wanted, size = read(name, offset)
                    if xxhash.xxh3_64_intdigest(data.data) != wanted or (not len(data) and offset < size):
                        raise StorageError(f"{name}: bytes from {offset} on changed on the way", key="snapshot")
                    file.write(data.data)
                    offset += len(data)
            os.replace(temporary, path)
        except OSError as error:
            raise StorageError(f"no copy of {name}: {error.strerror or error}", key="snapshot") from error
        finally:
            temporary.unlink(missing_ok=True)
        return offset

    def mirror(self, folder: str, listing: Mapping[str, tuple[int, int]] | None, read: Read) -> int:
        """Make a folder equal to another node's: fetch what is new or has changed, remove the rest; return bytes. It
        stays as it is if the other node has none."""
        if listing is None:
            return 0
        ours, nbytes = self.listing(folder) or {}, 0
        for name, (size, changed) in listing.items():
            if ours.get(name) != (size, changed):
                nbytes += self.fetch(f"{folder}/{name}", read)
                os.utime(self.folder / folder / name, ns=(changed, changed))
        for name in ours.keys() - listing.keys():
            (self.folder / folder / name).unlink(missing_ok=True)
        return nbytes

    def make(self, folder: str, files: Mapping[str, bytes], links: Mapping[str, str]) -> None:
        """Make a folder anew: files with these bytes, and links to files of the scratch folder."""
        place = self.folder / folder
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for name, data in files.items():
            (place / name).write_bytes(data)
        for name, target in links.items():
            os.link(self.folder / target, place / name)

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.folder / folder, ignore_errors=True)
