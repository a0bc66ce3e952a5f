"""Origin of a source's records, and the way of each to a prompt: filter, transform, policy for errors."""

import difflib
import hashlib
import inspect
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tilth.config.plugins import call_declared, code_digest, declared, task_names
from tilth.config.schema import DataConfig, MixtureSource
from tilth.config.tasks import task_of
from tilth.core.errors import DataError, PluginError
from tilth.data.cache import CACHE, CacheEntry
from tilth.data.columns import Columns, PlainPrompts, Prompt, record_key
from tilth.data.computed import Source
from tilth.data.formats import is_source, missing, source_files, tried_records
from tilth.data.given import Given, RandomAccess, is_random_access, nothing_in, placed
from tilth.data.records import described

Key = Literal["source", "heldout"]
RecordsByValue = Mapping[Key, Given]
"""Records that take the place of ``data.source`` or ``data.heldout``."""
NOTHING: RecordsByValue = {}
ARGUMENTS = {"source": "data", "heldout": "heldout"}
"""Names of these arguments of ``tilth.train``."""
Make = Callable[[Any, str, int], Prompt | None]
"""(record, its place, number of the prompt) -> prompt, pair or document."""
_FORMAT = "tilth records 6"
_PLACES = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
_RANDOM = "random", "rng", "generator"
"""Names of a function's second place that get random numbers whatever their default is."""
_TOGETHER = 1 << 16
"""Characters of prompts that are indexed together."""


@dataclass
class Material:
    """Records of a source on their way to prompts."""

    records: Iterable[tuple[str, Any]]
    """(place, record, or the error of one that cannot be read)."""
    random: RandomAccess | None = None
    """Their source, if it reads them by index."""
    name: str = ""
    left: Counter[str] = field(default_factory=Counter)
    """Reason -> records left out; "first: ..." is the first error, with 0."""
    samples: "array[int]" = field(default_factory=lambda: array("q"))
    """Number of the record of each prompt."""


@dataclass(frozen=True)
class Home:
    """Folder in which a run keeps the index of its data, and the seed of its transforms."""

    runs: str = ""
    """``run.dir``; empty: nothing is kept, and prompts stay in memory."""
    seed: int = 0


@dataclass(frozen=True)
class RecordOrigin:
    """One source: a file, a task or records by value, and the keys that are about it."""

    key: str
    """Its key: ``data.source``, ``data.heldout`` or ``data.mixture.NAME``."""
    part: MixtureSource
    data: DataConfig = field(default_factory=DataConfig)
    columns: Columns = field(default_factory=dict)
    brought: tuple[Any, ...] = ()
    """The records by value, if they are."""
    argument: str = "data"
    """Name of records by value, for errors."""
    home: Home = Home()

    @property
    def name(self) -> str:
        """The task or the files."""
        return self.part.source

    @property
    def is_task(self) -> bool:
        """True if it names a task."""
        return not self.brought and self.name in task_names()

    def material(self) -> "Source | Material":
        """Return prompts that a task computes, or records. Raises ``DataError``."""
        given, name = self.brought[0] if self.brought else None, self.argument
        if self.is_task:
            given, name = task_of(self.name).make_prompts(self.data), f"task {self.name}"
            if hasattr(given, "fingerprint"):
                computed: Source = given
                return computed
        elif not self.brought:
            check_source(self.key, self.name)
            return Material(tried_records(self.name))
        return Material(placed(given, name), given if is_random_access(given) else None, name)

    def prompts(
        self, material: "Material", make: Make, together: PlainPrompts | None = None
    ) -> Iterator[Prompt | PlainPrompts]:
        """Yield what ``make`` makes of each record (None: nothing) behind filter and transform, numbered in order.

        Records that the filter leaves out, or an error where ``on_error`` is skip, are counted in ``material.left``.
        together: holds, empty at first, those that it takes, unless filter or transform stands before the prompt.
        """
        if self.part.filter or self.part.transform:
            together = None
        for sample, (where, record) in enumerate(material.records):
            if together is not None and together.add(record, where, len(material.samples)):
                material.samples.append(sample)
                if together.size > _TOGETHER:
                    yield together
                    together = together.next()
                continue
            try:
                if isinstance(record, DataError):
                    raise record
                if self.part.filter and not self._call("filter", record, where, sample):
                    material.left["filter"] += 1
                    continue
                found = self.prompt(record, where, sample, make, len(material.samples))
            except (DataError, PluginError) as error:
                if self.data.mixture:  # whose sources have columns of their own
                    error.args = (str(error).replace("data.columns.", f"{self.key}.columns."),)
                if self.part.on_error == "stop":
                    raise
                material.left["errors"] += 1
                material.left.setdefault(f"first: {error}", 0)
                continue
            if found is not None:
                if together:
                    yield together
                    together = together.next()
                material.samples.append(sample)
                yield found
        if together:
            yield together

    def prompt(self, record: Any, where: str, sample: int, make: Make, number: int) -> Prompt | None:
        """Return what ``make`` makes of one record behind the transform."""
        if self.part.transform:
            record = self._call("transform", record, where, sample)
        return make(record, where, number)

    @cached_property
    def _takes_random(self) -> dict[str, bool]:
        """True for each of its functions that takes random numbers beside a record: whose second place has no default
        or None, is one of ``_RANDOM``, or is ``*args``."""
        functions = {
            name: declared("transform")[name].value for name in (self.part.filter, self.part.transform) if name
        }
        found = {}
        for name, own in functions.items():
            places = [p for p in inspect.signature(own).parameters.values() if p.kind in _PLACES]
            second = places[1] if len(places) > 1 else None
            found[name] = second is not None and (
                second.default is second.empty or second.default is None or second.name in _RANDOM
            )
        return found

    def _call(self, use: Literal["filter", "transform"], record: Any, where: str, sample: int) -> Any:
        """Call a plugin's transform, whose random numbers depend on seed, source and sample alone; those of a filter
        are others than those that a transform behind it takes, which would else see what the filter chose by."""
        name: str = getattr(self.part, use)
        declaration = declared("transform")[name]
        given = [_owned(record) if use == "filter" or self.brought or self.is_task else record]
        if self._takes_random[name]:
            apart = " filter" if use == "filter" and self._takes_random.get(self.part.transform) else ""
            words = f"{self.home.seed} {self.part.name} {sample}{apart}".encode()
            key = int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "little")
            given.append(np.random.Generator(np.random.Philox(key=key)))
        try:
            found = call_declared(declaration, *given)
        except PluginError as error:
            skips = f"; {self.key}.on_error=skip leaves such records out" * (self.part.on_error == "stop")
            raise PluginError(f"{where}: {self.key}.{use}: {error}{skips}", key=f"{self.key}.{use}") from error
        if not isinstance(found, (bool, np.bool_) if use == "filter" else Mapping):
            wanted, title = "True or False" if use == "filter" else "a record", f"{self.key}.{use}: {declaration.title}"
            message = f"{where}: {title} returned a {type(found).__name__}, not {wanted}"
            raise DataError(message, key=record_key(where, name))
        return found

    def entry(self, kind: str) -> CacheEntry | None:
        """Return the place of its index and prompts; None for what is no file, or has no home.

        kind: which items its records become. Another content, time or size of a file, or other code, is another place.
        """
        if not self.home.runs or self.is_task or self.brought:
            return None
        code = [code_digest(declared("transform")[name]) for name in (self.part.filter, self.part.transform) if name]
        template = self.part.template or self.data.template if kind == "read_documents" else ""
        beside = [name for name in (template, self.data.tokenizer if template else "") if name]
        files = [*source_files(self.name), *(file for name in beside for file in _files(Path(name)))]
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        part = self.part.model_dump(include={"filter", "transform", "on_error"}) | {"template": template}
        seeded = [self.home.seed, self.part.name] if self.part.filter or self.part.transform else []
        how = json.dumps(
            [_FORMAT, kind, states, code, sorted(self.columns.items()), part, seeded, self.data.deduplicate]
        )
        digest = hashlib.blake2b(how.encode(), digest_size=10).hexdigest()
        return CacheEntry(Path(self.home.runs) / CACHE / f"records-{digest}", "records.arrow")

    def nothing(self, left: Mapping[str, int], *, documents: bool = False) -> DataError:
        """Return the error for a source without an item."""
        why = f": {described(left)}" if left else ""
        if self.brought and not left:
            return nothing_in(self.brought[0], self.argument)
        if documents:
            return DataError(f"{self.key} = {self.name!r} has no documents{why}", key=f"{self.key}.documents")
        return DataError(f"{self.key} = {self.name!r} is empty{why}", key=os.path.basename(self.name))


def _owned(value: Any) -> Any:
    """Copy the dictionaries and lists of a record that is read again, behind a filter, in the next epoch or by the next
    run: a function that changes what it is given would change that too."""
    if isinstance(value, dict):
        return {key: _owned(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    nested = any(issubclass(kind, (dict, list)) for kind in set(map(type, value)))
    return list(map(_owned, value)) if nested else list(value)  # of numbers: four times as fast


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path] if path.is_file() else []


def origins(data: DataConfig, brought: RecordsByValue = NOTHING, home: Home = Home()) -> list[RecordOrigin]:
    """Return the sources to train on, then the one of ``data.heldout`` if there is one."""
    found = []
    for part in data.sources:
        given = (brought["source"],) if "source" in brought else ()
        key = f"data.mixture.{part.name}" if data.mixture else "data.source"
        found.append(RecordOrigin(key, part, data, part.columns or data.columns, given, ARGUMENTS["source"], home))
    if apart(data, brought):
        given = (brought["heldout"],) if "heldout" in brought else ()
        part = MixtureSource(name="heldout", source=data.heldout, template=data.template)
        found.append(RecordOrigin("data.heldout", part, data, data.columns, given, ARGUMENTS["heldout"], home))
    return found


def apart(data: DataConfig, brought: RecordsByValue) -> bool:
    """True if held-out data has a separate source."""
    return bool(data.heldout) or "heldout" in brought


def check_sources(data: DataConfig) -> None:
    """Raise ``DataError`` for a source that is neither a task nor files."""
    for origin in origins(data):
        if not origin.is_task:
            check_source(origin.key, origin.name)


def check_source(key: str, name: str) -> None:
    """Raise ``DataError`` unless this value of a key is a source of files."""
    if is_source(name):
        return
    if not name:
        message = f"{key} is empty; name a task or a file (what tilth.train is given is not in its recipe)"
        raise DataError(message, key=f"{key}.empty")
    near = difflib.get_close_matches(name, task_names(), 1)
    hint = f"; did you mean the task {near[0]}?" if near else missing(name) or f"; tasks are {', '.join(task_names())}"
    message = f"{key} = {name!r} is neither a task nor a file {os.path.abspath(name)}{hint}"
    raise DataError(message, key=key)
