"""Settings of an adapter in the format of Hugging Face PEFT, read without torch: adapter_config.json."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError

CONFIG = "adapter_config.json"
_RIGHT: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),  # others take s B A out of the base's weights
}
"""Key of adapter_config.json -> values with which PEFT computes W + s B A."""
_HARMLESS = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("r", "lora_alpha", "use_rslora", "lora_dropout"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),
        *("qalora_group_size", "megatron_core", "ensure_weight_tying"),
    }
)
"""Keys of adapter_config.json that may have any value: what they choose is read from them or from the tensors, or acts
with another key alone."""


def read_lora(folder: Path) -> LoraConfig:
    """Return rank, alpha and dropout of an adapter; its tensors say what it changes.

    ModelError with the key: of an adapter whose meaning may be more than W + s B A, or a file that cannot be read.
    """
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{str(folder)!r} is not an adapter's directory: it has no {CONFIG}", key=CONFIG)
    with reading(folder):
        config = json.loads((folder / CONFIG).read_text())
        _check(config)
        return LoraConfig(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            rslora=bool(config.get("use_rslora")),
            dropout=float(config.get("lora_dropout") or 0.0),
        )


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Name the folder in the error of a file that cannot be read."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: cannot read the adapter: {error}", key=f"{folder.name}.adapter") from error


def _check(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a key with which PEFT may compute another thing than W + s B A."""
    for key, value in config.items():
        plain = value.lower() if key == "init_lora_weights" and isinstance(value, str) else value
        right = _RIGHT.get(key, ())
        if value and key not in _HARMLESS and plain not in right:  # an empty one is none
            good = " or ".join(map(json.dumps, right)) or "unset"
            message = f"{CONFIG}: {key} = {json.dumps(value)} may mean more than W + s B A; it must be {good}"
            raise ModelError(message, key=f"{CONFIG}.{key}")
