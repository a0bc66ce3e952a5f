"""Adapters in the format of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError
from tilth.models.adapter_config import CONFIG, read_lora, reading
from tilth.models.config import DecoderConfig
from tilth.plan.lora import INFIX, adapter_shapes, is_adapter, scale_of, weight_of
from tilth.plan.shape import hf_experts, hf_fused, hf_names

TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


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
    stacks the experts, if it knows the family (those of Mixtral and Qwen MoE), and takes no dropout then. It doubles
    rank and alpha of gate and up, which changes alpha / sqrt(rank): the scale is written as alpha / rank. ModelError:
    experts that PEFT cannot adapt so.
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
    if stacked and lora.rslora:
        lora = lora.model_copy(update={"rslora": False, "alpha": scale_of(lora) * lora.rank})
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
        "bias": "none",
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
    every = {path.split(".")[-2]: name for name, (path, *_) in hf_experts(shape).items()}
    if any("down_proj" not in every[module] for module in stacked) and len(stacked) < len(every):
        message = (
            f"this adapter changes {' and '.join(sorted(stacked))} of experts, and PEFT adapts those of gate and up"
        )
        message = f"{message} only with all of {', '.join(sorted(every))}"
        raise ModelError(f"{message}; export the merged weights instead", key="peft.experts.parts")


def load_adapter(directory: str | os.PathLike[str], shape: DecoderConfig) -> StoredAdapter:
    """Return the adapter of a directory for a model of this shape. ModelError with the file, the key and the reason."""
    folder = Path(directory)
    lora = read_lora(folder)
    with reading(folder):
        tensors = dict(_renamed(load_file(folder / TENSORS), shape, folder))
    if not tensors:
        raise ModelError(f"{folder / TENSORS} is empty; it must hold an adapter's A and B", key=f"{TENSORS}.empty")
    lora = lora.model_copy(update={"targets": tuple(sorted({weight_of(name).split(".")[-2] for name in tensors}))})
    check_adapter(str(folder), tensors, adapter_shapes(shape, lora))
    return StoredAdapter(lora, tensors, str(folder))


def _renamed(stored: Mapping[str, Tensor], shape: DecoderConfig, folder: Path) -> Iterator[tuple[str, Tensor]]:
    own = {there: name for name, there in hf_names(shape).items()}
    experts = {there: (name, i) for name, every in hf_experts(shape).items() for i, there in enumerate(every)}
    stacks = dict[str, dict[int, Tensor]]()
    blocks = {name.rpartition(".")[0].rpartition(".")[0] for name in (*hf_experts(shape), *hf_fused(shape))}
    wrapped = {name: _wrapped(name) for name in stored}
    for (block, outer), pair in _pairs({name: one for name, one in wrapped.items() if one[0] in blocks}).items():
        halves = {half: stored[name] for half, name in pair.items()}
        yield from _of_parameter(block, halves, shape, f"{folder / TENSORS}: {block}{outer}")
    for name, tensor in stored.items():
        if wrapped[name][0] in blocks:
            continue
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


def _wrapped(name: str) -> tuple[str, str, str]:
    """Return the module of a stored tensor, the wrappers around it that PEFT writes for ``target_parameters``, and the
    half."""
    path, _, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
    module = path.removesuffix(".base_layer" * path.count(".base_layer"))
    return module, path.removeprefix(module), rest.removesuffix(".weight")


def _pairs(found: Mapping[str, tuple[str, str, str]]) -> dict[tuple[str, str], dict[str, str]]:
    """Return (module, wrappers) -> half -> name of its tensor."""
    pairs = dict[tuple[str, str], dict[str, str]]()
    for name, (module, wrappers, half) in found.items():
        pairs.setdefault((module, wrappers), {})[half] = name
    return pairs


def _of_parameter(
    block: str, halves: Mapping[str, Tensor], shape: DecoderConfig, source: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of one stack of experts, of which PEFT adapts gate and up as one matrix. halves: A [rank *
    experts, in] and B [out, rank * experts], as ``peft.tuners.lora.layer.ParamWrapper`` has them."""
    experts, inner, hidden = shape.num_experts, shape.expert_size, shape.hidden_size
    if halves.keys() != {"A", "B"} or len(halves["A"]) % experts or halves["B"].shape[1] != len(halves["A"]):
        raise ModelError(f"{source} is no adapter of a stack of {experts} experts", key=f"{block}.parameters")
    a = halves["A"].unflatten(0, (experts, -1))
    b = halves["B"].unflatten(1, (-1, experts)).permute(2, 0, 1)
    sizes = a.shape[2], b.shape[1]
    if sizes == (inner, hidden):
        parts = {"down_proj": b}
    elif sizes == (hidden, 2 * inner):
        alternate = f"{block}.gate_proj.weight" in hf_fused(shape)
        gate, up = (b[:, 0::2], b[:, 1::2]) if alternate else b.chunk(2, 1)
        parts = {"gate_proj": gate, "up_proj": up}
    else:
        message = f"{source} changes matrices [{sizes[1]}, {sizes[0]}], and the experts' are [{2 * inner}, {hidden}] "
        raise ModelError(f"{message}and [{hidden}, {inner}]: another base", key=f"{block}.parameters")
    for name, part in parts.items():
        yield f"{block}.{name}{INFIX}A", a.clone()
        yield f"{block}.{name}{INFIX}B", part.contiguous()


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
