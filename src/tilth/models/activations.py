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

from tilth.models.casts import is_kept

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
    """Bytes of one storage: the first ones on the host, the rest on the device, all while the backward pass uses it."""

    def __init__(self, host: Tensor, rest: Tensor, sent: torch.cuda.Event | None) -> None:
        """sent: when ``host`` is filled; None: it is."""
        self.host, self.rest, self.sent = host, rest, sent
        self.users = self.unpacked = 0
        self.back: Tensor | None = None
        self.ready: torch.cuda.Event | None = None


class _Tag(NamedTuple):
    """Stand-in of a saved tensor in autograd: its layer, and its view of what was moved."""

    layer: int
    moved: _Moved
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Held(NamedTuple):
    """A saved tensor that stays on the device; with its backward pass what moved of earlier layers begins to return."""

    layer: int
    tensor: Tensor


class HostActivations:
    """Move the first rows of what autograd saves to host memory in the forward pass, and back before the backward pass.

    ``ratio``: share of the rows (tokens) of each storage in passes that begin, 0 to 1. A storage moves once, however
    many operations save it or a view of it. Parameters, kept casts of them, tensors below ``least`` bytes and the last
    layer's stay. While a layer is in use the one before it comes back, so that two are on the device. On a GPU copies
    run on a stream for each direction, from and to pinned memory; on a CPU they are copies in the same memory, for
    tests.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device, least: int = 1 << 12) -> None:
        self.parameters = {p.untyped_storage()._cdata for p in parameters}
        self.least, self.device, self.ratio = least, device, 1.0
        cuda = device.type == "cuda"
        self.streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else None
        """Of copies to the host, and of copies back."""
        self.tensors = self.bytes = 0
        """Moved since the start."""

    def begin(self, rows: int, layers: int) -> Callable[[int], AbstractContextManager[Any]]:
        """Begin a forward pass; return a function from the number of a layer to the context in which it runs."""
        moved = round(self.ratio * rows) if torch.is_grad_enabled() else 0
        return _OffloadedPass(self, (moved, rows), layers).layer if moved else resident

    def stays(self, tensor: Tensor) -> bool:
        """True for a tensor that is not worth a copy, or is no activation."""
        storage = tensor.untyped_storage()
        small = storage.nbytes() < self.least or storage.nbytes() > 2 * tensor.nbytes
        weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)  # FSDP's, gathered
        weight = weight or is_kept(tensor)  # all micro-batches need it
        return small or weight or tensor.device != self.device or storage._cdata in self.parameters

    def move(self, tensor: Tensor, part: tuple[int, int]) -> _Moved:
        """Copy the first ``part[0]`` of the ``part[1]`` rows of a tensor's storage to the host, the rest on the
        device."""
        source, sent = _bytes(tensor), None
        cut = source.numel() * part[0] // part[1]
        self.tensors, self.bytes = self.tensors + 1, self.bytes + cut
        host = torch.empty(cut, dtype=torch.uint8, pin_memory=self.streams is not None)
        rest = source[cut:].clone()
        if self.streams is None:
            host.copy_(source[:cut])
        else:
            out, _ = self.streams
            out.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(out):
                host.copy_(source[:cut], non_blocking=True)
                sent = out.record_event()
            source.record_stream(out)
        return _Moved(host, rest, sent)

    def fetch(self, moved: _Moved) -> Tensor:
        """Return all bytes on the device, on their way there at least."""
        if moved.back is not None:
            return moved.back
        if self.streams is None or moved.sent is None:
            moved.back = torch.cat((moved.host, moved.rest))
            return moved.back
        cut, (_, stream) = moved.host.numel(), self.streams
        with torch.cuda.stream(stream):
            stream.wait_event(moved.sent)
            back = moved.back = moved.rest.new_empty(cut + moved.rest.numel())
            back[:cut].copy_(moved.host, non_blocking=True)
            back[cut:].copy_(moved.rest)
            moved.ready = stream.record_event()
        moved.rest.record_stream(stream)
        return back


class _OffloadedPass:
    """One forward pass whose activations move, and its backward pass. Holds weak references alone: what autograd frees
    is free."""

    def __init__(self, owner: HostActivations, part: tuple[int, int], layers: int) -> None:
        self._owner, self._part, self._last = owner, part, layers - 1
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, ref[_Moved]]] = {}
        self._used: list[list[ref[_Moved]]] = [[] for _ in range(layers)]
        """What each layer has saved and the backward pass has not asked for yet; the last one returns first."""

    def layer(self, number: int) -> AbstractContextManager[Any]:
        """Return the context of a layer."""
        return saved_tensors_hooks(partial(self._pack, number), self._unpack)

    def _pack(self, layer: int, tensor: Tensor) -> Tensor | _Tag | _Held:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version  # unique while the weak reference keeps the storage's address
        moved = self._known[key][1]() if key in self._known else None
        if moved is None and self._owner.stays(tensor):
            return tensor.detach()  # an operation's result refers to the operation, which would hold it for ever
        if moved is None and layer == self._last:
            return _Held(layer, tensor.detach())
        if moved is None:
            moved = self._owner.move(tensor, self._part)
            self._known[key] = StorageWeakRef(storage), ref(moved)
        moved.users += 1
        self._used[layer].append(ref(moved))
        return _Tag(layer, moved, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _unpack(self, saved: Tensor | _Tag | _Held) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        found = saved.tensor if isinstance(saved, _Held) else self._whole(saved)
        before = self._used[saved.layer - 1] if saved.layer else []
        while before:
            if (coming := before.pop()()) is not None:
                self._owner.fetch(coming)
        return found

    def _whole(self, saved: _Tag) -> Tensor:
        """Return the tensor of a tag; after its last use the device is rid of the copy."""
        moved, device = saved.moved, self._owner.device
        back = self._owner.fetch(moved)
        if moved.ready is not None:
            now = torch.cuda.current_stream(device)
            now.wait_event(moved.ready)
            back.record_stream(now)
        moved.unpacked += 1
        if moved.unpacked % moved.users == 0:
            moved.back = None
        empty = torch.empty(0, dtype=saved.dtype, device=device)
        return empty.set_(back.untyped_storage(), saved.offset, saved.size, saved.stride)


def resident(layer: int) -> AbstractContextManager[None]:
    """Return the context of a layer whose activations stay."""
    return nullcontext()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the storage of a tensor as uint8 [bytes]."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
