"""Adapters in the format of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError
from tilth.models.config import DecoderConfig
from tilth.plan.lora import INFIX, adapter_shapes, is_adapter, weight_of
from tilth.plan.shape import hf_experts, hf_fused, hf_names

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PLAIN: Mapping[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""Key of adapter_config.json -> the one value that is supported, the default of PEFT."""


class StoredAdapter(NamedTuple):
    """An adapter of a directory."""

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    """Under the names of Tilth."""
    source: str


def save_adapter(
    folder: Path, shape: DecoderConfig, lora: LoraConfig, tensors: Mapping[str, Tensor], base: str
) -> None:
    """Write adapters for ``PeftModel.from_pretrained``. base: reference of the model that they change.

    Those of experts are written one by one, under the names of their matrices; PEFT stacks them where transformers
    stacks the experts, if it knows the family (those of Mixtral and Qwen MoE), and takes no dropout then.
    ModelError: experts that PEFT cannot adapt so.
    """
    there, experts, fused = hf_names(shape), hf_experts(shape), hf_fused(shape)
    found, modules, stacked = dict[str, Tensor](), dict[str, None](), dict[str, None]()
    for name, tensor in tensors.items():
        weight = weight_of(name)
        if weight in fused:
            message = f"{name} changes experts, which PEFT adapts in another form; export the merged weights instead"
            raise ModelError(message, key=f"{name}.peft")
        of_experts = weight in experts
        paths, parts = (experts[weight], tensor.unbind()) if of_experts else ([there.get(weight, weight)], [tensor])
        for path, part in zip(paths, parts):
            found[f"{_PREFIX}{path.removesuffix('.weight')}.lora_{name[-1]}.weight"] = part.contiguous()
        (stacked if of_experts else modules)[paths[0].removesuffix(".weight").rpartition(".")[2]] = None
    _check_stacked(shape, stacked, modules)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": sorted({*modules, *stacked}),
        "lora_dropout": 0.0 if stacked else lora.dropout,
        "inference_mode": True,
        **_PLAIN,
    }
    save_file(found, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=1))


def _check_stacked(shape: DecoderConfig, stacked: Collection[str], others: Collection[str]) -> None:
    """Raise ModelError for modules of experts that PEFT cannot adapt. others: modules that are no experts."""
    if both := sorted({*stacked} & {*others}):
        message = f"{both[0]} is changed in experts and in other layers, of which PEFT would adapt the experts alone"
        raise ModelError(f"{message}; export the merged weights instead", key="peft.experts.shared")
    if not stacked:
        return
    gate_and_up = {path.split(".")[-2] for name, (path, *_) in hf_experts(shape).items() if "down_proj" not in name}
    if 0 < len(gate_and_up & {*stacked}) < len(gate_and_up):
        message = f"PEFT adapts {' and '.join(sorted(gate_and_up))} of experts together, and this adapter has one"
        raise ModelError(f"{message}; export the merged weights instead", key="peft.experts.pair")


def load_adapter(directory: str | os.PathLike[str], shape: DecoderConfig) -> StoredAdapter:
    """Return the adapter of a directory for a model of this shape. ModelError with the file, the key and the reason."""
    folder = Path(directory)
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{str(folder)!r} is not an adapter's directory: it has no {CONFIG}", key=CONFIG)
    try:
        config = json.loads((folder / CONFIG).read_text())
        _check(config)
        names = config["target_modules"]
        lora = LoraConfig(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            rslora=bool(config.get("use_rslora")),
            dropout=float(config.get("lora_dropout") or 0.0),
            targets=(names,) if isinstance(names, str) else tuple(sorted(names)),
        )
        stored = load_file(folder / TENSORS)
    except (ValueError, KeyError, TypeError, ValidationError, OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot read the adapter: {error}", key=f"{folder.name}.adapter") from error
    tensors = dict(_renamed(stored, shape, folder))
    modules = dict.fromkeys(weight_of(name).split(".")[-2] for name in tensors)
    lora = lora.model_copy(update={"targets": tuple(sorted(modules))})
    check_adapter(str(folder), tensors, adapter_shapes(shape, lora))
    return StoredAdapter(lora, tensors, str(folder))


def _check(config: Mapping[str, Any]) -> None:
    """Raise ModelError for what an adapter of another kind says of itself."""
    for key, right in {"peft_type": "LORA", **_PLAIN}.items():
        value = config.get(key, right)
        if value != right and (value or right):  # an empty one is none
            message = f"{CONFIG}: {key} = {json.dumps(value)} is not supported; it must be {json.dumps(right)}"
            raise ModelError(message, key=f"{CONFIG}.{key}")


def _renamed(stored: Mapping[str, Tensor], shape: DecoderConfig, folder: Path) -> Iterator[tuple[str, Tensor]]:
    own = {there: name for name, there in hf_names(shape).items()}
    experts = {there: (name, i) for name, every in hf_experts(shape).items() for i, there in enumerate(every)}
    stacks = dict[str, dict[int, Tensor]]()
    for name, tensor in stored.items():
        path, _, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
        half = rest.removesuffix(".weight")
        if half not in ("A", "B"):
            raise ModelError(f"{folder / TENSORS}: {name} is no part of an adapter of matrices", key=name)
        weight, expert = experts.get(f"{path}.weight", (own.get(f"{path}.weight", f"{path}.weight"), None))
        adapter = f"{weight.removesuffix('.weight')}{INFIX}{half}"
        if expert is None:
            yield adapter, tensor
        else:
            stacks.setdefault(adapter, {})[expert] = tensor
    for adapter, parts in stacks.items():
        if len(parts) < shape.num_experts or len({part.shape for part in parts.values()}) > 1:
            message = f"{folder / TENSORS}: {adapter} has {len(parts)} of {shape.num_experts} experts, or other shapes"
            raise ModelError(message, key=f"{adapter}.experts")
        yield adapter, torch.stack([parts[i] for i in range(shape.num_experts)])


def check_adapter(source: str, found: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError for the first adapter that a model lacks, or that it has in another shape or not at all."""
    assert all(map(is_adapter, wanted))
    for name, tensor in found.items():
        if name not in wanted:
            raise ModelError(f"{source}: {name} has no place in this model", key=f"{name}.extra")
        if tuple(tensor.shape) != wanted[name]:
            message = f"{source}: {name} is {list(tensor.shape)}, and this model's would be {list(wanted[name])}"
            raise ModelError(f"{message}: an adapter of another base", key=f"{name}.shape")
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise ModelError(f"{source}: {missing} is missing", key=f"{missing}.missing")
