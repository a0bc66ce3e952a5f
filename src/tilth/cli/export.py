"""A model as a Hugging Face directory."""

from pathlib import Path

import typer

from tilth.core.errors import StorageError
from tilth.flows.model import load_model
from tilth.models.hf import save_pretrained


def write_model(spec: str, out: Path) -> None:
    """Write weights, tokenizer with its chat template, and configuration into a new directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StorageError(f"{str(out)!r} is there already; name a new or empty directory")
    model = load_model(spec)
    tokenizer = model.tokenizer
    ids: dict[str, int | list[int]] = {}
    if tokenizer is not None:
        ends = list(tokenizer.stop_ids)
        ids = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.pad_id}
    save_pretrained(out, model.config, model.tensors, tokenizer=tokenizer, source=model.source, token_ids=ids)
    typer.echo(f"wrote {out}: transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it")
