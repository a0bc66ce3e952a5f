"""The base model of a training service, as its clients see it."""

from dataclasses import dataclass

from tilth.config.schema import LoraConfig
from tilth.core.errors import DataError
from tilth.runs.models import LoadedModel
from tilth.serve.tinker.bodies import ClientLora

TARGETS = {"train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "train_mlp": ("gate_proj", "up_proj", "down_proj")}
ALPHA = 32.0
"""Alpha of all adapters, as Tinker has it: their change is 32 / rank B A."""


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of a training service."""

    requests: int = 1024
    """Requests of one client, or of one sampler, that may wait."""
    models: int = 64
    """Clients' models that the worker holds at a time; others are on disk and come back with their next request."""
    idle: float = 120.0
    """Seconds without a sign of life of a session after which the worker holds its models no more."""


@dataclass(frozen=True)
class ServedBase:
    """A base model. names: that clients may call it by, the first one in answers."""

    names: tuple[str, ...]
    tokenizer: str
    arch: str
    vocabulary: int
    longest: int
    ends: tuple[int, ...]
    """Tokens that end every completion."""
    modules: tuple[str, ...]
    """Modules that can have adapters."""

    @classmethod
    def of(cls, model: str, loaded: LoadedModel, name: str) -> "ServedBase":
        """Return the base that a reference has loaded. name: by which clients call it besides; "": none."""
        folder, tokenizer = str(loaded.source.resolve()), loaded.tokenizer
        modules = {row.name.split(".")[-2] for row in loaded.config.table if row.kind == "matrix"}
        return cls(
            names=tuple(dict.fromkeys(filter(None, [name, model, folder]))),
            tokenizer=folder,
            arch=loaded.config.family,
            vocabulary=loaded.config.vocab_size,
            longest=loaded.config.max_positions,
            ends=() if tokenizer is None else tuple(tokenizer.stop_ids),
            modules=tuple(sorted(modules)),
        )

    def check_name(self, name: str) -> None:
        """Raise DataError for the name of another base."""
        if name not in self.names:
            there = ", ".join(map(repr, self.names))
            raise DataError(f"base_model={name!r} is not served here; there is {there}", key="base_model")

    def lora(self, asked: ClientLora | None) -> LoraConfig:
        """Return the adapters that a client asks for; rank 0: none. DataError: of modules that have none here."""
        if asked is None or not asked.rank:
            return LoraConfig(rank=0)
        wanted = [name for key, names in TARGETS.items() if getattr(asked, key) for name in names]
        targets = tuple(name for name in wanted if name in self.modules)
        if not targets:
            message = "lora_config: this server has adapters of attention and MLP; set train_attn or train_mlp"
            raise DataError(message, key="lora_config.targets")
        return LoraConfig(rank=asked.rank, alpha=ALPHA, targets=targets)
