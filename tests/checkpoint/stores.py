"""Stores for the tests: one that counts, waits and fails."""

import threading
import time
from typing import ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Throttled(LocalFileSystem):
    """Files on this disk behind ``slow://``: requests are counted, bytes take time, and the n-th PUT fails."""

    protocol = "slow"
    cachable = False
    bytes_per_second = float("inf")
    fail_at = -1
    requests: ClassVar[dict[str, int]] = {}
    read: int = 0
    written: int = 0
    lock = threading.Lock()

    @classmethod
    def reset(cls, bytes_per_second=float("inf"), fail_at=-1):
        """Forget what was counted."""
        cls.bytes_per_second, cls.fail_at = bytes_per_second, fail_at
        cls.requests, cls.read, cls.written = {}, 0, 0

    @classmethod
    def request(cls, kind, nbytes=0):
        """One request that moves this many bytes."""
        with cls.lock:
            cls.requests[kind] = count = cls.requests.get(kind, 0) + 1
            cls.read += nbytes if kind == "get" else 0
            cls.written += nbytes if kind == "put" else 0
        if kind == "put" and count - 1 == cls.fail_at:
            raise RuntimeError("SlowDown: please reduce your request rate")
        time.sleep(nbytes / cls.bytes_per_second)

    def _strip(self, path):
        return self._strip_protocol(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        found = super().cat_file(path, start, end, **kwargs)
        self.request("get", len(found))
        return found

    def pipe_file(self, path, value, **kwargs):
        self.request("put", len(value))
        return super().pipe_file(path, value, **kwargs)

    def ls(self, path, **kwargs):
        self.request("list")
        return super().ls(path, **kwargs)

    def _open(self, path, mode="rb", **kwargs):
        opened = super()._open(path, mode, **kwargs)
        if "w" in mode:
            real = opened.f.write

            class Counting:
                def write(self, data):
                    Throttled.request("put", len(data))
                    return real(data)

                def __getattr__(self, name):
                    return getattr(opened_file, name)

            opened_file, opened.f = opened.f, Counting()
        return opened


fsspec.register_implementation("slow", Throttled, clobber=True)
