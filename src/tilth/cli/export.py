"""A model as a Hugging Face directory."""

import json
from pathlib import Path

import torch
import typer

from tilth.core.errors import DataError, StorageError
from tilth.flows.model import OF_VALUES, load_model
from tilth.models.hf import save_pretrained

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write_model(spec: str, out: Path, *, group: str = "", dtype: str = "", as_json: bool = False) -> None:
    """Write weights, tokenizer with its chat template, and configuration into a new directory.

    group: of a checkpoint's weights, empty: as ``spec`` says. dtype: of the files, empty: as they are kept.
    """
    if dtype and dtype not in DTYPES:
        raise DataError(f"--dtype {dtype}: it must be {' or '.join(DTYPES)}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StorageError(f"{str(out)!r} is there already; name a new or empty directory")
    model = load_model(spec, group) if group else load_model(spec)
    tokenizer = model.tokenizer
    ids: dict[str, int | list[int]] = {}
    if tokenizer is not None:
        ends = list(tokenizer.stop_ids)
        ids = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.pad_id}
    save_pretrained(
        out,
        model.config,
        model.tensors,
        dtype=DTYPES.get(dtype),
        tokenizer=tokenizer,
        source=model.source,
        token_ids=ids,
        values=group in OF_VALUES,
    )
    if as_json:
        files = sorted(file.name for file in out.iterdir())
        nbytes = sum((out / name).stat().st_size for name in files)
        typer.echo(json.dumps({"path": str(out), "step": model.step, "files": files, "bytes": nbytes}))
        return
    loader = "AutoModelForTokenClassification" if group in OF_VALUES else "AutoModelForCausalLM"
    typer.echo(f"wrote {out}: transformers.{loader}.from_pretrained({str(out)!r}) loads it")
