"""Activations between forward and backward pass: kept, recomputed as a whole or by operation, or moved to the host."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

aten = torch.ops.aten
PRODUCTS: tuple[Any, ...] = (aten.mm.default, aten.addmm.default, aten._grouped_mm.default)
ATTENTION: tuple[Any, ...] = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
KEPT: dict[bool | str, tuple[Any, ...]] = {True: (), "selective": PRODUCTS + ATTENTION}
"""``train.checkpointing`` -> operations whose outputs a layer keeps; all others run again in the backward pass.

Products and attention take most of a layer's time, their outputs a part of its memory. Products of batches are not
among them: they are the scores of plain attention, with L^2 elements.
"""


def run_layer(layer: Callable[..., Tensor], how: bool | str, *inputs: Any) -> Tensor:
    """Return a layer's output, its activations kept (False) or recomputed by a policy of ``KEPT``."""
    if not how or not torch.is_grad_enabled():
        return layer(*inputs)
    kept = KEPT[how]
    context = partial(create_selective_checkpoint_contexts, list(kept)) if kept else noop_context_fn
    found: Tensor = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=context)
    return found


class _Moved:
    """Bytes of one storage on the host, and on the device while the backward pass uses them."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.users = 0
        self.back: Tensor | None = None
        self.ready: torch.cuda.Event | None = None


class _View(NamedTuple):
    """A saved tensor as a view of what was moved."""

    moved: _Moved
    at: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class HostActivations:
    """Move what autograd saves to host memory in the forward pass, and back before the backward pass needs it.

    Each storage moves once, however many operations save it or a view of it. Parameters, and tensors below ``least``
    bytes, stay. On a GPU copies run on a stream of their own, into pinned memory; ``AHEAD`` storages are on their way
    back while one is in use. On a CPU they are copies in the same memory, for tests.
    """

    AHEAD = 2

    def __init__(self, parameters: Iterable[Tensor], device: torch.device, least: int = 1 << 12) -> None:
        self._stay = {p.untyped_storage()._cdata for p in parameters}
        self._least, self.device = least, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, ref[_Moved], int]] = {}
        self._order: list[ref[_Moved]] = []
        self.tensors = self.bytes = 0

    def __call__(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return saved_tensors_hooks(self._pack, self._unpack) if torch.is_grad_enabled() else nullcontext()

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        small = storage.nbytes() < self._least or storage.nbytes() > 2 * tensor.nbytes
        weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)  # FSDP's, gathered
        if small or weight or tensor.device != self.device or storage._cdata in self._stay:
            return tensor
        key = storage._cdata, tensor._version
        before = self._known.get(key)
        moved = None if before is None or before[0].expired() else before[1]()
        if moved is None or before is None:
            self._known = {k: v for k, v in self._known.items() if not v[0].expired()}
            moved = self._out(tensor)
            before = self._known[key] = StorageWeakRef(storage), ref(moved), len(self._order)
            self._order.append(before[1])
        moved.users += 1
        return _View(moved, before[2], tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _out(self, tensor: Tensor) -> _Moved:
        source = _bytes(tensor)
        self.tensors, self.bytes = self.tensors + 1, self.bytes + source.numel()
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self._stream is not None)
        if self._stream is None:
            host.copy_(source)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                host.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
        return _Moved(host)

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        moved = saved.moved
        back = self._fetch(moved)
        for one in self._order[max(0, saved.at - self.AHEAD) : saved.at]:
            if (coming := one()) is not None and coming.users:
                self._fetch(coming)
        if moved.ready is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_event(moved.ready)
            back.record_stream(now)
        moved.users -= 1
        if not moved.users:
            moved.back = None
            while self._order and ((last := self._order[-1]()) is None or not last.users):
                self._order.pop()
        empty = torch.empty(0, dtype=saved.dtype, device=self.device)
        return empty.set_(back.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _fetch(self, moved: _Moved) -> Tensor:
        """Return the bytes on the device, on their way there at least."""
        if moved.back is None and self._stream is None:
            moved.back = moved.host.clone()
        elif moved.back is None:
            with torch.cuda.stream(self._stream):
                moved.back = moved.host.to(self.device, non_blocking=True)
                moved.ready = torch.cuda.current_stream(self.device).record_event()
        found: Tensor = moved.back  # type: ignore[assignment]  # one of both has set it
        return found


def _bytes(tensor: Tensor) -> Tensor:
    """Return the storage of a tensor as uint8 [bytes]."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
