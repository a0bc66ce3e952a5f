"""Hugging Face directories: read and written so that transformers and vLLM load what Tilth trains, and the reverse."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilth.core.errors import ModelError, StorageError
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class SavesTokenizer(Protocol):
    """A tokenizer that writes its own files."""

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and what belongs to it."""
        ...


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of a directory by name, read from their file when asked for. dtype: cast to it; None: as stored."""

    def __init__(self, directory: Path, files: Mapping[str, str], dtype: torch.dtype | None = None) -> None:
        self._directory, self._files, self._dtype = directory, dict(files), dtype
        self._open: dict[str, tuple[Any, frozenset[str]]] = {}

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor = self._file(name).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self._directory / self._files[name]}: cannot read tensor {name}: {error}") from error
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def without(self, name: str) -> "LazyTensors":
        """The same tensors but this one."""
        return LazyTensors(self._directory, {k: f for k, f in self._files.items() if k != name}, self._dtype)

    def _file(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            handle = _open_file(self._directory / file)
            self._open[file] = handle, frozenset(handle.keys())
        handle, names = self._open[file]
        if name not in names:
            raise ModelError(f"{self._directory / INDEX} says that tensor {name} is in {file}, and it is not")
        return handle


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """``config.json`` of a directory as it stands. Raises ModelError if there is none or it is not JSON."""
    folder = Path(directory)
    if not folder.is_dir():
        raise ModelError(f"no model directory {str(folder)!r}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{str(folder)!r} is not a model directory: it has no config.json")
    return _read_json(folder / "config.json")


def load_pretrained(
    directory: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> tuple[DecoderConfig, LazyTensors]:
    """Config and tensors (read when used) of a Hugging Face directory, checked against each other.

    dtype: of the tensors; None: as stored. Raises ModelError in one line for a missing directory or file, an
    architecture or rope type that is not supported, missing, extra or mis-shaped tensors, a corrupt file.
    """
    config = DecoderConfig.from_hf(read_config(directory))
    tensors = _tensors(Path(directory), dtype)
    if config.tie_embeddings and _HEAD in tensors and _EMBEDDING in tensors:
        if not torch.equal(tensors[_HEAD], tensors[_EMBEDDING]):
            raise ModelError(f"{directory}: config.json ties {_HEAD} to {_EMBEDDING}, but their values differ")
        tensors = tensors.without(_HEAD)
    check_tensors(str(directory), parameter_shapes(config), {name: tensors.shape(name) for name in tensors})
    return config, tensors


def load_weights(model: Decoder, tensors: Mapping[str, Tensor], source: str = "state") -> None:
    """Copy tensors into the model's parameters, cast to their dtype. Raises ModelError that names what does not fit."""
    own = dict(model.named_parameters())
    shape_of = tensors.shape if isinstance(tensors, LazyTensors) else (lambda name: tuple(tensors[name].shape))
    check_tensors(source, {k: tuple(p.shape) for k, p in own.items()}, {k: shape_of(k) for k in tensors})
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a decoder of this config; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}


def check_tensors(source: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError if names or shapes differ, naming the first few of each kind."""
    problems = {
        "missing": [name for name in wanted if name not in found],
        "extra": [name for name in found if name not in wanted],
        "mis-shaped": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
    }
    said = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if said:
        raise ModelError(f"{source}: tensors do not match the config; " + "; ".join(said))


def save_pretrained(
    directory: str | os.PathLike[str],
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    source: str | os.PathLike[str] | None = None,
    tokenizer: SavesTokenizer | None = None,
    chat_template: str | None = None,
    generation: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, int | list[int]] | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a directory that ``AutoModelForCausalLM.from_pretrained`` and vLLM load.

    state: parameter name -> tensor. dtype: of the file; None: as in ``state``. Tokenizer files come from ``tokenizer``
    or else from ``source`` (a directory the model was loaded from), which also gives the special token ids and
    generation_config.json; ``token_ids`` (bos_token_id, ...), ``generation`` and ``chat_template`` (Jinja) override.
    config.json is written last, so that an interrupted export is not a model directory. Raises ModelError if the state
    does not fit the config, StorageError if writing fails.
    """
    check_tensors("export", parameter_shapes(config), {name: tuple(t.shape) for name, t in state.items()})
    hf, out = config.to_hf(), Path(directory)
    inherited = {} if source is None else _read_json(Path(source) / "config.json")
    ids = {**{k: inherited[k] for k in _TOKEN_IDS if inherited.get(k) is not None}, **(token_ids or {})}
    kept = dtype or next(iter(state.values())).dtype
    try:
        _clear(out)
        _write_weights(out, state, kept, shard_bytes)
        _write_tokenizer(out, source, tokenizer, chat_template)
        _write_generation(out, source, {**ids, **(generation or {})})
        _write_json(out / "config.json", {**hf, **ids, "torch_dtype": str(kept).removeprefix("torch.")})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write model to {str(out)!r}: {error}") from error


def _clear(out: Path) -> None:
    """Make the folder and remove weights of an earlier export: a reader would prefer them to new shards."""
    out.mkdir(parents=True, exist_ok=True)
    for old in [out / "config.json", out / GENERATION, out / INDEX, *out.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)


def _write_weights(out: Path, state: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int) -> None:
    shards = _shards({name: t.numel() * dtype.itemsize for name, t in state.items()}, shard_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = WEIGHTS if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: state[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(t.numel() * dtype.itemsize for t in state.values())
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names in order, cut so that no shard is above ``most`` bytes (unless one tensor alone is)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_tokenizer(
    out: Path, source: str | os.PathLike[str] | None, tokenizer: SavesTokenizer | None, chat_template: str | None
) -> None:
    if source is not None:
        _copy_files(Path(source), out, TOKENIZER_FILES if tokenizer is None else (CHAT_TEMPLATE,))
    if tokenizer is not None:
        tokenizer.save(out)
    if chat_template is not None:
        (out / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")


def _write_generation(out: Path, source: str | os.PathLike[str] | None, own: Mapping[str, Any]) -> None:
    """Settings of the source, or else those that the tokenizer brought, under our own."""
    folders = [out] if source is None else [Path(source), out]
    found = next((f / GENERATION for f in folders if (f / GENERATION).is_file()), None)
    inherited = {} if found is None else _read_json(found)
    if inherited or own:
        _write_json(out / GENERATION, {**inherited, **own})


def _copy_files(source: Path, out: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _tensors(folder: Path, dtype: torch.dtype | None) -> LazyTensors:
    """The tensors of model.safetensors, or of the shards that the index names."""
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{folder / INDEX} has no weight_map")
        files = weight_map
    elif (folder / WEIGHTS).is_file():
        files = dict.fromkeys(_open_file(folder / WEIGHTS).keys(), WEIGHTS)
    else:
        raise ModelError(f"{str(folder)!r} has neither {WEIGHTS} nor {INDEX}; other formats of weights are not read")
    # Old Llama checkpoints carry this constant of the rotary embedding.
    return LazyTensors(folder, {k: f for k, f in files.items() if not k.endswith("rotary_emb.inv_freq")}, dtype)


def _open_file(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is corrupt or not a safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; it must hold an object")
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
