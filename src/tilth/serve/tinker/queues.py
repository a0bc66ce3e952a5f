"""Queues of clients: requests in their order, once each, fair among clients, answered from a log after a kill."""

import asyncio
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from tilth.core.errors import DataError, StorageError, TilthError
from tilth.core.files import atomic_write, make_folder, sync, writing
from tilth.engines.client import BREAKS
from tilth.engines.completion import RequestError
from tilth.serve.errors import first_line

_HEAD = struct.Struct("<III")
"""Bytes of the header, bytes of the body, checksum of both."""


class Record(NamedTuple):
    """One entry: a JSON header and a body."""

    head: dict[str, Any]
    body: bytes = b""


class RequestLog:
    """Append-only file of records. A record that was cut off by a kill is dropped when the file is opened.

    Raises StorageError if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        self.records, good = _read(path)
        """Records that were there when it was opened."""
        with writing(path):
            new = not path.exists()
            with open(path, "ab") as file:
                file.truncate(good)
            if new:
                sync(path.parent)
        self.size = good
        """Bytes."""

    def append(self, record: Record, *, durable: bool = True) -> None:
        """Write a record. durable: also under a power cut, when this returns."""
        raw = _raw(record)
        with writing(self.path), open(self.path, "ab") as file:  # anew: a process has fewer descriptors than logs
            file.write(raw)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        self.size += len(raw)

    def replace(self, records: Iterable[Record]) -> None:
        """Replace all records atomically."""
        raw = b"".join(map(_raw, records))
        with atomic_write(self.path) as made:
            made.write_bytes(raw)
        self.size = len(raw)


def _raw(record: Record) -> bytes:
    head = json.dumps(record.head).encode()
    return _HEAD.pack(len(head), len(record.body), zlib.crc32(record.body, zlib.crc32(head))) + head + record.body


def _read(path: Path) -> tuple[list[Record], int]:
    """Return the whole records of a file, and where they end."""
    raw, at, found = path.read_bytes() if path.exists() else b"", 0, list[Record]()
    while at + _HEAD.size <= len(raw):
        head, body, check = _HEAD.unpack_from(raw, at)
        start = at + _HEAD.size
        end = start + head + body
        if end > len(raw) or zlib.crc32(raw[start:end]) != check:
            break
        found.append(Record(json.loads(raw[start : start + head]), raw[start + head : end]))
        at = end
    return found, at


KEPT = 256
"""Answers that are kept on disk when a log begins anew."""
JSON = "application/json"
FRESH = 64 * 2**20
"""Bytes of requests and answers after which a log begins anew, and most bytes of answers that are kept then."""
TOKENS = 2**26
"""Tokens of one client's requests that may wait; a token of a backward pass counts three times."""


class BusyError(TilthError):
    """A client has as many requests in its queue as one may have."""


class StoredAnswer(NamedTuple):
    """Answer to a request: a body of a media type. error: it failed, and the body says why."""

    body: bytes
    media: str = JSON
    error: bool = False

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "StoredAnswer":
        """Return an answer in JSON."""
        return cls(json.dumps(facts).encode())

    @classmethod
    def failure(cls, error: Exception, category: str = "") -> "StoredAnswer":
        """Return the answer to a request that failed. category: whose fault it is, "user" or "server"; "": as the kind
        of the error says."""
        ours = not isinstance(error, TilthError) or isinstance(error, (*BREAKS, RequestError, StorageError))
        category = category or ("server" if ours else "user")
        return cls(json.dumps({"error": first_line(error), "category": category}).encode(), error=True)

    @property
    def undone(self) -> bool:
        """True if the request failed by the server's fault, so that its model is as if it had not been asked for."""
        return self.error and json.loads(self.body)["category"] == "server"


@dataclass
class Operation:
    """One request of a client. cost: tokens that it computes."""

    seq: int
    kind: str
    body: bytes
    digest: str
    request: Any = None
    """The body, read; None: not yet."""
    cost: int = 1
    answer: asyncio.Future[StoredAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def record(self) -> Record:
        """Return the record of its acceptance."""
        return Record({"op": self.kind, "seq": self.seq, "cost": self.cost}, self.body)


class RequestQueue:
    """Requests of one client by number, and their answers.

    log: None of what ends with its server.
    """

    def __init__(self, name: str, log: RequestLog, *, ordered: bool = True, most: int = 1024) -> None:
        """ordered: requests run in the order of their numbers, without a gap. most: requests that wait."""
        self.name, self.log, self.ordered, self.most = name, log, ordered, most
        self.operations = dict[int, Operation]()
        """By number; of those with an answer the newest is the last."""
        self.next = 1
        """Number of the request that runs next, if they are ordered."""
        self.spent = 0
        """Tokens computed for this client since the server began."""
        self.fresh = 0
        """Bytes of requests and answers since its state was last written."""
        self._waiting = self._tokens = 0
        """Requests that wait, and their tokens."""
        self._recover()

    def _recover(self) -> None:
        for record in self.log.records:
            if "op" in record.head:
                operation = _operation(int(record.head["seq"]), str(record.head["op"]), record.body)
                operation.cost = int(record.head.get("cost", 1))
                self._add(operation)
            else:
                head, seq = record.head, int(record.head["seq"])
                if seq not in self.operations:
                    self._add(_operation(seq, "", b"", head["digest"]))
                self._answer(self.operations[seq], StoredAnswer(record.body, head["media"], head["error"]))
        self.log.records = []

    def _add(self, operation: Operation) -> None:
        self.operations[operation.seq] = operation
        self._waiting += 1
        self._tokens += operation.cost

    def _answer(self, operation: Operation, answer: StoredAnswer) -> None:
        operation.answer.set_result(answer)
        self.operations[operation.seq] = self.operations.pop(operation.seq)
        self._waiting -= 1
        self._tokens -= operation.cost

    def accept(self, seq: int, kind: str, body: bytes, request: Any, cost: int) -> Operation:
        """Return the operation of this number: a new one, on disk, or the one there is. DataError: another request has
        the number; BusyError: too many wait."""
        digest = _digest(kind, body)
        held = self.operations.get(seq)
        if held is not None:
            if held.digest != digest:
                message = f"request {seq} of {self.name} was another one: two clients with one name, or a client that"
                raise DataError(f"{message} reuses numbers", key="seq_id.reused")
            return held
        if self.ordered and seq < self.next:
            message = f"request {seq} of {self.name} is over and its answer no longer kept; the next is {self.next}"
            raise DataError(message, key="seq_id.past")
        if self._waiting >= self.most or self._tokens >= TOKENS:
            message = f"{self._waiting} requests of {self.name} wait, with {self._tokens} tokens; one client may have"
            raise BusyError(f"{message} {self.most} and {TOKENS}: ask again later", key="service.queue")
        if self.ordered and seq >= self.next + self.most:
            message = f"request {seq} of {self.name} comes too early: the next is {self.next}, and {self.most} may wait"
            raise BusyError(message, key="seq_id.early")
        operation = Operation(seq, kind, body, digest, request, cost)
        self.log.append(operation.record())
        self.fresh += len(body)
        self._add(operation)
        return operation

    def ready(self) -> Operation | None:
        """Return the request that runs next, if it is there."""
        found = self.operations.get(self.next)
        return found if found is not None and not found.answer.done() else None

    def finish(self, operation: Operation, answer: StoredAnswer) -> None:
        """Keep an answer and give it to who waits."""
        self.spent += operation.cost
        if self.ordered:
            self.next = operation.seq + 1
        if not operation.answer.done():
            self._answer(operation, answer)
            self.log.append(_done(operation, answer), durable=False)
            self.fresh += len(answer.body)

    def shorten(self) -> None:
        """Begin the log anew: newest answers, and requests that are not answered. Its client's state is on disk."""
        done = [operation for operation in reversed(self.operations.values()) if operation.answer.done()]
        sizes = accumulate(len(operation.answer.result().body) for operation in done)
        for at, (operation, size) in enumerate(zip(done, sizes, strict=True)):
            if at and (at >= KEPT or size > FRESH):
                del self.operations[operation.seq]
        self.log.replace(self._records())
        self.fresh = 0

    def _records(self) -> Iterator[Record]:
        for operation in self.operations.values():
            if operation.answer.done():
                operation.body, operation.request = b"", None
                yield _done(operation, operation.answer.result())
            else:
                yield operation.record()


def _digest(kind: str, body: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()


def _operation(seq: int, kind: str, body: bytes, digest: str = "") -> Operation:
    return Operation(seq, kind, body, digest or _digest(kind, body))


def _done(operation: Operation, answer: StoredAnswer) -> Record:
    head = {"seq": operation.seq, "media": answer.media, "error": answer.error, "digest": operation.digest}
    return Record(head, answer.body)


def next_of(queues: Iterable[RequestQueue]) -> RequestQueue | None:
    """Return the queue whose request runs next: of those with one that is ready, the client with fewest tokens."""
    ready = [queue for queue in queues if queue.ready() is not None]
    return min(ready, key=lambda queue: (queue.spent, queue.name), default=None)
