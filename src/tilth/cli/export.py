"""``tilth export``: write a model as a Hugging Face directory."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import typer

from tilth.checkpoint.storage import Location, is_url
from tilth.core.errors import DataError, ModelError, StorageError
from tilth.models.hf import save_pretrained
from tilth.models.peft import save_adapter
from tilth.runs.models import LoadedModel, MergedTensors, load_model, models

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write_model(
    spec: str, where: Location, *, group: str = "", dtype: str = "", adapter: bool = False, as_json: bool = False
) -> None:
    """Write weights, tokenizer with its chat template, and configuration into a new local directory.

    adapter: write what the run has learned beside its base instead, in PEFT's format. group: of a checkpoint's
    weights, empty: the one of ``spec``. dtype: of the files, empty: as saved. After an error (DataError, StorageError,
    or one of reading the model) nothing is left behind.
    """
    if dtype and dtype not in DTYPES:
        raise DataError(f"--dtype {dtype}: it must be {' or '.join(DTYPES)}", key="--dtype")
    out = _local(where)
    model = load_model(spec, group) if group else load_model(spec)
    tokenizer = model.tokenizer
    ids: dict[str, int | list[int]] = {}
    if tokenizer is not None:
        ends = list(tokenizer.stop_ids)
        ids = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.pad_id}
    if adapter:
        _write_adapter(model, spec, out, as_json=as_json)
        return
    with _filled(out) as made:
        save_pretrained(
            made,
            model.config,
            model.tensors,
            dtype=DTYPES.get(dtype),
            tokenizer=tokenizer,
            source=model.source,
            token_ids=ids,
            values=models().get(group, False),
        )
    if as_json:
        _tell(out, model.step)
        return
    loader = "AutoModelForTokenClassification" if models().get(group, False) else "AutoModelForCausalLM"
    typer.echo(f"wrote {out}: {_loads(out, loader)}")


def _loads(out: Path, loader: str) -> str:
    """Return how transformers loads the directory, or what transformers lacks for it; reads its configuration only."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(out)
    except (ValueError, KeyError) as error:
        return f"transformers {transformers.__version__} cannot read its config.json: {str(error).splitlines()[0]}"
    wanted = (config.architectures or ["no architecture"])[0]
    if not hasattr(transformers, wanted):
        return f"transformers {transformers.__version__} has no {wanted}, so only Tilth loads it"
    return f"transformers.{loader}.from_pretrained({str(out)!r}) loads it, by its configuration; no weights were read"


def _write_adapter(model: LoadedModel, spec: str, out: Path, *, as_json: bool) -> None:
    """Write the adapters of a run. ModelError if it has none, or PEFT has no layers for them."""
    if not isinstance(model.tensors, MergedTensors):
        message = f"{spec} has no adapters: it learned its weights; leave --adapter out, or train with policy.lora.rank"
        raise ModelError(message, key="--adapter")
    base = str(model.settings.get("model", {}).get("path", ""))
    with _filled(out) as made:
        save_adapter(made, model.config, model.tensors.lora, model.tensors.adapters(), base)
    if as_json:
        _tell(out, model.step)
        return
    typer.echo(f"wrote {out}: peft.PeftModel.from_pretrained(BASE, {str(out)!r}) loads it; its base is {base}")


def _tell(out: Path, step: int | None) -> None:
    files = sorted(file.name for file in out.iterdir())
    nbytes = sum((out / name).stat().st_size for name in files)
    typer.echo(json.dumps({"path": str(out), "step": step, "files": files, "bytes": nbytes}))


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
