"""Runs with checkpoints for the commands that look at them; weights say of which step they are."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import torch
from typer.testing import CliRunner

from tests.checkpoint import hand
from tests.roles import small
from tilth.checkpoint import mark_best
from tilth.checkpoint.directory import step_name
from tilth.cli.main import app
from tilth.core.layout import Layout, Mesh, Replicate, Shard
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.runs.models import MODEL_FOLDER, save_shape

MESH = Mesh(("dp", "fsdp", "tp"), (1, 2, 2))


def call(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


def said(*arguments: object) -> Any:
    """What --json says of a command that ends well or with a finding."""
    result = call(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def refused(*arguments: object) -> str:
    """The line of a command that cannot do it."""
    result = call(*arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    return result.stderr


@cache
def weights(seed: int) -> dict[str, torch.Tensor]:
    """Nobody changes them: they are made once."""
    model = Decoder(small.config())
    model.init_weights_(seed)
    return {name: p.detach() for name, p in model.named_parameters()}


@cache
def critic(seed: int) -> ValueModel:
    decoder = Decoder(small.config())
    decoder.init_weights_(seed)
    model = ValueModel(decoder)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(seed))
        model.score.bias.fill_(0.5)
    return model.requires_grad_(False)


@cache
def groups(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """All that a run with everything has."""
    model = weights(seed)
    return {
        "model": model,
        "optimizer": {f"exp_avg.{name}": tensor * 0.5 for name, tensor in model.items()},
        "ema": {name: tensor * 0.75 for name, tensor in model.items()},
        "critic": {name: p.detach() for name, p in critic(seed).named_parameters()},
    }


def objects(step: int) -> dict[str, Any]:
    return {"progress": {"step": step, "phase": "grpo", "finished": ["warmup"]}, "digest": "abc", "order": [step] * 300}


def sharded(whole: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, Layout]]:
    """Over MESH: rows over fsdp, columns over tp."""

    def layout(tensor: torch.Tensor) -> Layout:
        return Layout(MESH, (Replicate(), Shard(0), Shard(1) if tensor.ndim > 1 else Replicate()), tuple(tensor.shape))

    return {group: {name: layout(tensor) for name, tensor in some.items()} for group, some in whole.items()}


def add(root: Path, step: int, *, whole=None, layouts: bool = False, said: dict[str, Any] | None = None) -> Path:
    """A checkpoint whose weights come from its step as a seed."""
    whole = whole or groups(step)
    given = sharded(whole) if layouts else None
    return hand.write(root / step_name(step), step, whole, given, objects(step) if said is None else said)


def shell(run: Path, *, state: str = "finished", keep: int = 2) -> Path:
    """A run without a checkpoint."""
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"state": state, "digest": "0"}))
    (run / "recipe.toml").write_text(f"[run]\nkeep = {keep}\n")
    save_shape(run / MODEL_FOLDER, small.config(), small.TOKENIZER)
    return run


def make_run(run: Path, steps: tuple[int, ...] = (2, 4, 6), *, best: int | None = None) -> Path:
    """A run with checkpoints of these steps; four ranks wrote that of step 4."""
    shell(run)
    for step in steps:
        add(run / "checkpoints", step, layouts=step == 4)
    if best is not None:
        mark_best(run / "checkpoints", {"step": best, "metric": "accuracy/heldout", "value": 0.5})
    return run


def flip(checkpoint: Path, group: str = "model") -> str:
    """Damage the first tensor that is written of a group; its name."""
    file = next(iter(sorted(checkpoint.glob(f"{group}.*"))))
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:start])
    data[start] ^= 1
    file.write_bytes(data)
    return next(
        name.partition("[")[0] for name, e in table.items() if name != "__metadata__" and e["data_offsets"][0] == 0
    )


def upload(root: Path, url: str) -> str:
    """Copy a folder of checkpoints into a store."""
    files, place = fsspec.url_to_fs(url)
    for file in root.rglob("*"):
        if file.is_file():
            files.pipe_file(f"{place}/{file.relative_to(root)}", file.read_bytes())
    return url


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def place_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def bare(run: Path, step: int) -> Path:
    """Damage that a crash cannot do: the folder has its name, and no manifest."""
    place = place_of(run, step)
    (place / "manifest.json").unlink()
    return place


def own(run: Path, *digests: str) -> None:
    """What run.json says of the works that it went on as; those of ``add`` are of abc."""
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"digests": digests}))
