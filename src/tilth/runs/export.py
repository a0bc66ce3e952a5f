"""Export of a model as a Hugging Face directory, or of a run's adapters for PEFT."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from tilth.checkpoint.storage import Location, is_url
from tilth.core.errors import DataError, ModelError, StorageError
from tilth.models.expand import Sizes, expand, expanded_config
from tilth.models.hf import save_pretrained
from tilth.models.peft import save_adapter
from tilth.runs.models import LoadedModel, MergedTensors, load_model, models

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ExportedModel(NamedTuple):
    """A model that was written. base: of adapters, the model that they change; None: whole weights.

    values: the model has a head of values instead of a vocabulary.
    """

    path: Path
    step: int | None
    base: str | None
    values: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the step, and the files with their bytes together."""
        files = sorted(file.name for file in self.path.iterdir())
        nbytes = sum((self.path / name).stat().st_size for name in files)
        return {"path": str(self.path), "step": self.step, "files": files, "bytes": nbytes}

    def loading(self) -> str:
        """Return how transformers or PEFT loads it, or what transformers lacks; reads its configuration only."""
        if self.base is not None:
            return f"peft.PeftModel.from_pretrained(BASE, {str(self.path)!r}) loads it; its base is {self.base}"
        import transformers

        version = f"transformers {transformers.__version__}"
        try:
            config = transformers.AutoConfig.from_pretrained(self.path)
        except (ValueError, KeyError) as error:
            return f"{version} cannot read its config.json: {str(error).splitlines()[0]}"
        wanted = (config.architectures or ["no architecture"])[0]
        if not hasattr(transformers, wanted):
            return f"{version} has no {wanted}, so only Tilth loads it"
        call = f"transformers.{'AutoModelForTokenClassification' if self.values else 'AutoModelForCausalLM'}"
        return f"{call}.from_pretrained({str(self.path)!r}) loads it, by its configuration; no weights were read"


def write_model(
    spec: str, where: Location, *, group: str = "", dtype: str = "", adapter: bool = False
) -> ExportedModel:
    """Write weights, tokenizer with its chat template, and configuration into a new local directory.

    adapter: write what the run has learned beside its base instead, in PEFT's format. group: of a checkpoint's
    weights, empty: the one of ``spec``. dtype: of the files, empty: as saved. After an error (DataError, StorageError,
    or one of reading the model) nothing is left behind.
    """
    if dtype and dtype not in DTYPES:
        raise DataError(f"--dtype {dtype}: it must be {' or '.join(DTYPES)}", key="--dtype")
    out, values = _local(where), models().get(group, False)
    model = load_model(spec, group) if group else load_model(spec)
    if adapter:
        return ExportedModel(out, model.step, _write_adapter(model, spec, out), values)
    return _write(model, out, DTYPES.get(dtype), values)


def write_expanded(spec: str, where: Location, sizes: Sizes, *, untie: bool = False) -> ExportedModel:
    """Write a model that is expanded to these sizes, in fp32, or float64 if it is; errors as of ``write_model``, and
    ModelError of ``models.expand``."""
    out, model = _local(where), load_model(spec)
    grown = expanded_config(model.config, sizes, untie=untie)
    dtype = torch.float64 if next(iter(model.tensors.values())).dtype == torch.float64 else torch.float32
    weights = expand(model.config, model.tensors, grown)
    return _write(model._replace(config=grown, tensors=weights), out, dtype)


def _write(model: LoadedModel, out: Path, dtype: torch.dtype | None, values: bool = False) -> ExportedModel:
    """Write a model with its tokenizer into a local directory. dtype: None: as its tensors."""
    tokenizer = model.tokenizer
    ids: dict[str, int | list[int]] = {}
    if tokenizer is not None:
        ends = list(tokenizer.stop_ids)
        ids = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.pad_id}
    with _filled(out) as made:
        save_pretrained(
            made, model.config, model.tensors,
            dtype=dtype, tokenizer=tokenizer, source=model.source, token_ids=ids, values=values,
        )  # fmt: skip
    return ExportedModel(out, model.step, None, values)


def _write_adapter(model: LoadedModel, spec: str, out: Path) -> str:
    """Write the adapters of a run; return its base. ModelError if it has none, or PEFT has no layers for them."""
    if not isinstance(model.tensors, MergedTensors):
        message = f"{spec} has no adapters: it learned its weights; leave --adapter out, or train with policy.lora.rank"
        raise ModelError(message, key="--adapter")
    base = str(model.settings.get("model", {}).get("path", ""))
    with _filled(out) as made:
        save_adapter(made, model.config, model.tensors.lora, model.tensors.adapters(), base)
    return base


def _local(where: Location) -> Path:
    """Check that a directory is local and empty or absent; DataError, StorageError."""
    if is_url(where):
        raise DataError(f"OUT={where!r} is a URL; export into a local directory and copy it from there", key="OUT")
    out = Path(where)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StorageError(f"OUT={str(out)!r} is there already; name a new or empty directory", key="OUT")
    return out


@contextmanager
def _filled(out: Path) -> Iterator[Path]:
    """Yield a folder inside ``out``, whose files move to ``out`` at the end; after an error remove what is new.

    It is inside since ``out`` may be a mount or a link, and files of others in ``out`` must stay.
    """
    new = [folder for folder in (out, *out.parents) if not os.path.lexists(folder)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="unfinished-", dir=out) as made:
            yield Path(made)
            for file in sorted(Path(made).iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(out / file.name)  # config.json comes last: it marks a folder as a model
    except OSError as error:
        raise StorageError(f"cannot write model to {str(out)!r}: {error}", key=out.name) from error
    finally:
        for folder in new:
            with suppress(OSError):  # it holds the model, or files of others
                folder.rmdir()
