"""Import and export of Hugging Face directories, compatible with transformers and vLLM."""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilth.core.errors import ModelError, StorageError
from tilth.core.names import name_problem
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.family import is_known
from tilth.models.hub import missing
from tilth.models.unread import Unread, shapes
from tilth.plan.packing import portions
from tilth.plan.shape import Fused, hf_experts, hf_fused, hf_names, parameter_shapes

if TYPE_CHECKING:
    from tilth.data.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", CHAT_TEMPLATE,
)  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LOGITS, _VALUES = "ForCausalLM", "ForTokenClassification"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_EXPERTS = 1 << 16
"""Experts that any model may have: one tensor of a layer may hold all of its own."""
_STORED = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class LazyTensors(Unread):
    """Tensors of a directory by name, read on access. dtype: cast to it; None: as stored."""

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, str],
        dtype: torch.dtype | None = None,
        stored: Mapping[str, str] | None = None,
        stacks: Mapping[str, tuple[str, ...]] | None = None,
        fused: Mapping[str, Fused] | None = None,
    ) -> None:
        """files: name of a tensor -> its file; stored: name -> its name in the file, if different.

        stacks: name -> names of the tensors that it stacks; they are no tensors of their own. fused: name -> the tensor
        of another layout that holds it.
        """
        self._directory, self._dtype, self._all = directory, dtype, dict(files)
        self._stored, self._stacks, self._fused = dict(stored or {}), dict(stacks or {}), dict(fused or {})
        inside = {name for names in self._stacks.values() for name in names}
        self._files = {name: file for name, file in self._all.items() if name not in inside}
        self._files |= {name: self._all[names[0]] for name, names in self._stacks.items()}
        self._open: dict[str, tuple[Any, frozenset[str]]] = {}
        super().__init__(self._files)

    def part(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        if name not in self._stacks:
            return self._read(name, slices)
        some, *inner = slices or (slice(None),)
        found = [self._read(one, tuple(inner)) for one in self._stacks[name][some]]
        return torch.stack(found) if found else self._read(self._stacks[name][0], tuple(inner))[None][:0]

    def _read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        if name in self._fused:
            return self._cut(name, slices)
        file, stored = self._file(name), self._stored.get(name, name)
        try:
            found: Tensor = file.get_slice(stored)[slices] if slices else file.get_tensor(stored)
        except SafetensorError as error:
            message = f"{self._directory / self._all[name]}: cannot read tensor {name}: {error}"
            raise ModelError(message, key=name) from error
        return found if self._dtype is None else found.to(self._dtype)

    def _cut(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Return a block of a tensor that is a part of a fused one."""
        fused, sizes = self._fused[name], self.shape(name)
        ranges = [
            range(size)[some] for size, some in zip(sizes, (*slices, *[slice(None)] * (len(sizes) - len(slices))))
        ]
        if fused.transposed:
            ranges[-2:] = ranges[:-3:-1]
        every = len(fused.parts)
        *outer, last = (slice(r.start, r.stop) for r in ranges)
        found = self._file(name).get_slice(fused.name)[(*outer, slice(last.start * every, last.stop * every))]
        found = found[..., fused.parts.index(name) :: every]
        found = (found.transpose(-1, -2) if fused.transposed else found).contiguous()
        return found if self._dtype is None else found.to(self._dtype)

    @property
    def files(self) -> Mapping[str, str]:
        """File of each tensor by name; of a stack, that of its first tensor."""
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._fused:
            return self._fused[name].part(self._header(name).get_shape())
        names = self._stacks.get(name, (name,))
        found = [tuple(self._header(one).get_shape()) for one in names]
        for one, shape in zip(names, found):
            if shape != found[0]:
                message = (
                    f"{self._directory}: experts differ in shape: {one} is {list(shape)}, {names[0]} {list(found[0])}"
                )
                raise ModelError(message, key=f"{one}.shape")
        return (len(names), *found[0]) if name in self._stacks else found[0]

    def check_dtypes(self) -> None:
        """Raise ModelError for the first tensor that is stored as codes of a quantisation."""
        for name in self:
            for one in self._stacks.get(name, (name,)):
                kind, good = self._header(one).get_dtype(), tuple(_STORED.values())
                if kind not in good:
                    message = f"{self._directory / self._all[one]}: {one} is stored as {kind}; it must be one of "
                    raise ModelError(f"{message}{', '.join(good)}: convert quantised weights first", key=f"{one}.dtype")

    def without(self, name: str) -> "LazyTensors":
        """Return all tensors but one, which is no stack."""
        files = {k: f for k, f in self._all.items() if k != name}
        return LazyTensors(self._directory, files, self._dtype, self._stored, self._stacks, self._fused)

    def of_family(self, config: DecoderConfig, further: int = 0) -> "LazyTensors":
        """Return these tensors under the names of a family, with experts stacked. ModelError: an expert is missing.

        further: layers behind the model's, which predict further tokens, and which are left out.
        """
        self._check_counts(config)
        stored, last = hf_names(config), config.num_layers
        own = {there: name for name, there in stored.items()}
        behind = tuple(f"model.layers.{last + i}." for i in range(further))
        files = {own.get(name, name): file for name, file in self._all.items() if not name.startswith(behind)}
        stacks = hf_experts(config)
        for names in stacks.values():
            missing = [name for name in names if name not in files]
            if missing and len(missing) < len(names):
                message = f"{self._directory}: tensors do not match the config; missing: {_some(missing)}"
                raise ModelError(message, key=f"{missing[0]}.missing")
        there = {name: names for name, names in stacks.items() if names[0] in files}
        fused = {name: one for name, one in hf_fused(config).items() if one.name in self._all}
        inside = {one.name for one in fused.values()}
        files = {name: file for name, file in files.items() if name not in inside}
        files |= {name: self._all[one.name] for name, one in fused.items()}
        return LazyTensors(self._directory, files, self._dtype, stored, there, fused)

    def _check_counts(self, config: DecoderConfig) -> None:
        """Raise ModelError for more layers and experts than there can be, before each of them gets a name."""
        layers, experts = config.num_layers, max(config.num_experts, 1)
        if layers * experts > (most := max(len(self._all), _EXPERTS)):
            message = f"{self._directory}: config.json has {layers} layers of {experts} experts, with {len(self._all)}"
            key = "num_layers" if layers > experts else "num_experts"
            raise ModelError(f"{message} tensors; at most {most} experts can be", key=f"config.json.{key}")

    def _file(self, name: str) -> Any:
        file = self._all[name]
        if file not in self._open:
            handle = _open_file(self._directory / file)
            self._open[file] = handle, frozenset(handle.keys())
        handle, names = self._open[file]
        if self._there(name) not in names:
            message = f"{self._directory / INDEX} says that tensor {name} is in {file}, and it is not"
            raise ModelError(message, key=f"{file}.{name}")
        return handle

    def _there(self, name: str) -> str:
        """Return the name of a tensor in its file, or of the fused one that holds it."""
        return self._fused[name].name if name in self._fused else self._stored.get(name, name)

    def _header(self, name: str) -> Any:
        """Return shape and dtype of a tensor in its file, or of the fused one that holds it, unread."""
        return self._file(name).get_slice(self._there(name))


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return ``config.json`` of a directory. Raises ModelError if there is none or it is not JSON."""
    folder = Path(directory)
    if not folder.is_dir():
        raise missing(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{str(folder)!r} is not a model directory: it has no config.json", key="config.json")
    return _read_json(folder / "config.json")


def _further(hf: Mapping[str, Any]) -> int:
    """Return the number of layers that predict further tokens, which a directory may hold behind the others."""
    return int(hf.get("num_nextn_predict_layers") or 0)


def load_pretrained(
    directory: str | os.PathLike[str], dtype: torch.dtype | None = None, *, values: bool = False
) -> tuple[DecoderConfig, LazyTensors]:
    """Return config and tensors (read on access) of a Hugging Face directory, checked against each other.

    dtype: of the tensors; None: as stored. values: the directory is a value model of ``save_pretrained``. Raises
    ModelError in one line for a missing directory or file, an unsupported architecture or rope type, missing, extra or
    mis-shaped tensors, other dtypes than of floats, a corrupt file.
    """
    hf = read_config(directory)
    if values:
        hf = {**hf, "architectures": [str(a).replace(_VALUES, _LOGITS) for a in hf.get("architectures") or []]}
    config = DecoderConfig.from_hf(hf)
    tensors = _tensors(Path(directory), dtype).of_family(config, _further(hf))
    if config.tie_embeddings and _HEAD in tensors and _EMBEDDING in tensors:
        if not torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
            message = f"{directory}: config.json ties {_HEAD} to {_EMBEDDING}, but their values differ"
            raise ModelError(message, key=_HEAD)
        tensors = tensors.without(_HEAD)
    check_tensors(
        str(directory), parameter_shapes(config, value=values), {name: tensors.shape(name) for name in tensors}
    )
    tensors.check_dtypes()
    return config, tensors


def load_weights(model: Decoder, tensors: Mapping[str, Tensor], source: str = "state") -> None:
    """Copy tensors into the model's parameters, cast to their dtype. Raises ModelError with the names that do not
    fit."""
    own = dict(model.named_parameters())
    check_tensors(source, {k: tuple(p.shape) for k, p in own.items()}, shapes(tensors))
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def open_tensors(directory: str | os.PathLike[str]) -> LazyTensors:
    """Return the tensors of a Hugging Face directory of any architecture, with Tilth's names for a known family.

    A head that config.json ties to the embedding is left out if its values are equal. Raises ModelError without
    tensors.
    """
    folder = Path(directory)
    hf = read_config(folder)
    tied, tensors = bool(hf.get("tie_word_embeddings")), _tensors(folder, None)
    if is_known(hf):
        tensors = tensors.of_family(DecoderConfig.from_hf(hf), _further(hf))
    doubled = tied and _HEAD in tensors and _EMBEDDING in tensors
    return tensors.without(_HEAD) if doubled and torch.equal(tensors[_HEAD], tensors[_EMBEDDING]) else tensors


def check_tensors(source: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError if names or shapes differ, with the first few of each kind."""
    problems = {
        "missing": [name for name in wanted if name not in found],
        "extra": [name for name in found if name not in wanted],
        "mis-shaped": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
    }
    wrong = {kind: names for kind, names in problems.items() if names}
    if wrong:
        kind, names = next(iter(wrong.items()))
        key = f"{names[0].partition(' ')[0]}.{'shape' if kind == 'mis-shaped' else kind}"
        message = "; ".join(f"{kind}: {_some(names)}" for kind, names in wrong.items())
        raise ModelError(f"{source}: tensors do not match the config; {message}", key=key)


def save_pretrained(
    directory: str | os.PathLike[str],
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    source: str | os.PathLike[str] | None = None,
    tokenizer: "Tokenizer | None" = None,
    chat_template: str | None = None,
    generation: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, int | list[int]] | None = None,
    shard_bytes: int = 5 * 10**9,
    values: bool = False,
) -> None:
    """Write a directory that ``AutoModelForCausalLM.from_pretrained`` and vLLM load.

    state: parameter name -> tensor, read one at a time. dtype: of the file; None: as in ``state``. shard_bytes: larger
    weights are split into files with an index. values: write a value model for ``AutoModelForTokenClassification`` with
    one label. Tokenizer files come from ``tokenizer`` or else ``source`` (the directory the model was loaded from),
    which also gives special token ids and generation_config.json; ``token_ids`` (bos_token_id, ...), ``generation`` and
    ``chat_template`` (Jinja) override. config.json is written last, so an interrupted export is no model directory.
    Raises ModelError if the state does not fit the config, StorageError if writing fails.
    """
    check_tensors("export", parameter_shapes(config, value=values), shapes(state))
    hf, out = _of_values(config) if values else config.to_hf(), Path(directory)
    inherited = {} if source is None else _read_json(Path(source) / "config.json")
    ids = {**{k: inherited[k] for k in _TOKEN_IDS if inherited.get(k) is not None}, **(token_ids or {})}
    kept = dtype or next(iter(state.values())).dtype
    if kept not in _STORED:
        message = f"a model of {kept} cannot be exported; one of {', '.join(map(str, _STORED))} can"
        raise ModelError(message, key="dtype")
    try:
        _clear(out)
        _write_weights(out, state, kept, shard_bytes, {**hf_names(config), **hf_experts(config), **hf_fused(config)})
        _write_tokenizer(out, source, tokenizer, chat_template)
        _write_generation(out, source, {**ids, **(generation or {})})
        _write_json(out / "config.json", {**hf, **ids, "torch_dtype": str(kept).removeprefix("torch.")})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write model to {str(out)!r}: {error}", key=out.name) from error


def _clear(out: Path) -> None:
    """Create the folder and remove an earlier export, whose weights a reader would prefer to new shards."""
    out.mkdir(parents=True, exist_ok=True)
    for old in [out / "config.json", out / GENERATION, out / INDEX, *out.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)


def _of_values(config: DecoderConfig) -> dict[str, Any]:
    """Return config.json of a value model: a token classifier with one label."""
    hf = config.to_hf()
    kind = str(hf["architectures"][0]).replace(_LOGITS, _VALUES)
    labels = {"num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}}
    return hf | {"architectures": [kind], "classifier_dropout": 0.0, "tie_word_embeddings": True, **labels}


Stored = Mapping[str, str | tuple[str, ...] | Fused]
"""Name of a tensor -> its name in a file, if different; of a stack, the names of its tensors; or what it is fused
into."""


def _entries(name: str, shape: Sequence[int], stored: Stored) -> list[tuple[str, Sequence[int]]]:
    """Return names and shapes of the tensors in a file that hold a tensor."""
    there = stored.get(name, name)
    if isinstance(there, Fused):  # with the first of its parts
        return [(there.name, there.shape(shape))] if there.parts[0] == name else []
    return [(there, shape)] if isinstance(there, str) else [(one, shape[1:]) for one in there]


def _write_weights(
    out: Path, state: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int, stored: Stored
) -> None:
    """Write weights, in several files with an index if they are large."""
    known = shapes(state)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in known.items()}
    shards = [*portions(sizes, sizes.__getitem__, shard_bytes)]
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_file(out / file, {name: known[name] for name in names}, state, dtype, stored)
        entries = [there for name in names for there, _ in _entries(name, known[name], stored)]
        weight_map.update(dict.fromkeys(entries, file))
    if len(shards) > 1:
        _write_json(out / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _write_file(
    path: Path, known: Mapping[str, Sequence[int]], state: Mapping[str, Tensor], dtype: torch.dtype, stored: Stored
) -> None:
    """Write a safetensors file tensor by tensor; the library needs the whole file in memory."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in known.items():
        for there, own in _entries(name, shape, stored):  # stacked tensors lie one after another
            start, end = end, end + math.prod(own) * dtype.itemsize
            table[there] = {"dtype": _STORED[dtype], "shape": list(own), "data_offsets": [start, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in known:
            if _entries(name, known[name], stored):
                values = _values(name, state, stored.get(name), dtype)
                file.write(values.view(-1).view(torch.uint8).numpy().data)


def stored_tensors(config: DecoderConfig, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that files of this family hold, each as soon as the weights that it is made of have come."""
    stored: Stored = {**hf_names(config), **hf_experts(config), **hf_fused(config)}
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        there = stored.get(name, name)
        if isinstance(there, str):
            yield there, tensor
        elif isinstance(there, tuple):
            yield from zip(there, tensor)
        else:
            waiting[name] = tensor
            if all(part in waiting for part in there.parts):
                yield there.name, _values(name, waiting, there, tensor.dtype)
                waiting = {name: tensor for name, tensor in waiting.items() if name not in there.parts}


def _values(
    name: str, state: Mapping[str, Tensor], there: str | tuple[str, ...] | Fused | None, dtype: torch.dtype
) -> Tensor:
    """Return what a file holds of a tensor, contiguous."""
    if not isinstance(there, Fused):
        return state[name].detach().to("cpu", dtype).contiguous()
    parts = [state[part].detach().to("cpu", dtype) for part in there.parts]
    return torch.stack([part.transpose(-1, -2) if there.transposed else part for part in parts], -1).flatten(-2)


def _write_tokenizer(
    out: Path, source: str | os.PathLike[str] | None, tokenizer: "Tokenizer | None", chat_template: str | None
) -> None:
    if source is not None:
        for name in TOKENIZER_FILES if tokenizer is None else (CHAT_TEMPLATE,):
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, out / name)
    if tokenizer is not None:
        tokenizer.save(out)
    if chat_template is not None:
        (out / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")


def _write_generation(out: Path, source: str | os.PathLike[str] | None, own: Mapping[str, Any]) -> None:
    """Write the settings of the source, or else of the tokenizer, overridden by ``own``."""
    folders = [out] if source is None else [Path(source), out]
    found = next((f / GENERATION for f in folders if (f / GENERATION).is_file()), None)
    inherited = {} if found is None else _read_json(found)
    if inherited or own:
        _write_json(out / GENERATION, {**inherited, **own})


def _tensors(folder: Path, dtype: torch.dtype | None) -> LazyTensors:
    """Return the tensors of model.safetensors, or of the shards in the index."""
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{folder / INDEX} has no weight_map", key=f"{INDEX}.weight_map")
        for name, file in weight_map.items():
            if problem := name_problem(file, folders=True):
                message = f"{folder / INDEX}: file of tensor {name}: {problem}"
                raise ModelError(message, key=f"{INDEX}.weight_map.{name}")
        files = weight_map
    elif (folder / WEIGHTS).is_file():
        files = dict.fromkeys(_open_file(folder / WEIGHTS).keys(), WEIGHTS)
    else:
        message = f"{str(folder)!r} has neither {WEIGHTS} nor {INDEX}; other formats of weights are not read"
        raise ModelError(message, key=WEIGHTS)
    # Old Llama checkpoints hold this constant of the rotary embedding.
    return LazyTensors(folder, {k: f for k, f in files.items() if not k.endswith("rotary_emb.inv_freq")}, dtype)


def _open_file(file: Path) -> Any:
    if file.exists() and not file.is_file():  # opening a pipe would block
        raise ModelError(f"{file} is not a file", key=f"{file.name}.type")
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing", key=file.name) from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is corrupt or not a safetensors file: {error}", key=f"{file.name}.header") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}", key=f"{file.name}.content") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; it must hold an object", key=f"{file.name}.type")
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
