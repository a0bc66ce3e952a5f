"""Tilth's part of vLLM's workers: tokens drawn as the native engine draws them, and weights replaced in place.

vLLM's own sampler then has one token to choose from, so that seeds, filters, ties and log-probs mean what they mean in
Tilth, whatever the version of vLLM.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from tilth.engines.sampling import Chosen, Rules, choose, draws

Drawn = tuple[list["Row"], list[int], Chosen]
_DRAWN: list[Drawn] = []
"""Draws of this process that ``Extension.drawn`` has not returned yet."""


_FREED: list[tuple[torch.UntypedStorage, int]] = []
"""Storages of the KV cache that are freed, with their bytes."""


@dataclass
class Row:
    """A request in the batch: its name on the wire, random numbers, rules and tokens."""

    wire: str
    draws: tuple[int, int]
    sampling: Any
    prompt: list[int]
    output: list[int]


class Draw(LogitsProcessor):
    """Draw the token of each row by the random number of its place, and leave vLLM only this one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.device = device
        self.rows: dict[int, Row] = {}
        self.rules: Rules | None = None

    def is_argmax_invariant(self) -> bool:
        """Return False: the token that is left need not be the likeliest."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the rows of the batch."""
        if process_dict_updates(self.rows, batch_update, _row):
            self.rules = None

    def apply(self, logits: Tensor) -> Tensor:
        """Draw from float32 logits [B, V] in place."""
        places = sorted(self.rows)
        if not places:
            return logits
        rows: list[Any] = [self.rows[place] for place in places]
        if self.rules is None:
            self.rules = Rules.of([row.sampling for row in rows], self.device)
        starts = [len(row.prompt) + len(row.output) for row in rows]
        uniform = torch.from_numpy(draws(0, rows, starts, 1)[:, 0])
        index = torch.tensor(places, device=self.device)
        chosen = choose(logits[index], uniform.to(self.device), self.rules)
        _DRAWN.append((rows, starts, chosen))
        logits[index] = -torch.inf
        logits[index, chosen.tokens] = 0.0
        return logits


def _row(params: Any, prompt: list[int] | None, output: list[int]) -> Row:
    given = dict(params.extra_args["tilth"])
    return Row(given.pop("wire"), tuple(given.pop("draws")), SimpleNamespace(**given), prompt or [], output)


class Extension:
    """Methods that vLLM adds to its worker."""

    model_runner: Any
    vllm_config: Any

    def drawn(self) -> dict[str, dict[int, tuple[float, float]]]:
        """Return log-probs of draws since the last call, before and after filters, by request and place."""
        found: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        for rows, starts, chosen in _DRAWN:
            logprobs = chosen.logprobs.tolist()
            sampling = logprobs if chosen.sampling is None else chosen.sampling.tolist()
            for row, start, *both in zip(rows, starts, logprobs, sampling):
                found[row.wire][start] = (both[0], both[1])
        _DRAWN.clear()
        return dict(found)

    def begin_load(self) -> None:
        """Begin to replace all weights, whatever form they have in the kernels."""
        initialize_layerwise_reload(self.model_runner.get_model())

    def load(self, body: bytes) -> None:
        """Take some of them, a safetensors file."""
        self.model_runner.get_model().load_weights(safetensors.torch.load(body).items())

    def end_load(self) -> None:
        """Put them into use."""
        model = self.model_runner.get_model()
        finalize_layerwise_reload(model, self.vllm_config.model_config)
        for layer in model.modules():  # vLLM 0.32 does not pack a head again that shares the embedding's weight
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def free_cache(self) -> None:
        """Free the KV cache's memory, on a device where vLLM's own sleep does nothing."""
        for cache in self.model_runner.kv_caches:
            storage = cache.untyped_storage()  # layers may share one
            if storage.nbytes():
                _FREED.append((storage, storage.nbytes()))
                storage.resize_(0)

    def allocate_cache(self) -> None:
        """Allocate it again."""
        while _FREED:
            storage, size = _FREED.pop()
            storage.resize_(size)
