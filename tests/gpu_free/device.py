"""A CUDA device that is pretended: what a GPU would be asked to do runs with its values on a CPU.

    python -m pytest -p tests.gpu_free.device -m gpu tests        # make gpu DEVICE=pretended

A CPU build of torch is told that it has one device (``shim.cpp``, built once with g++). Tensors of it are wrappers
around CPU tensors. Each operation on them is checked, counted, then computed on the CPU:

- Faults raise: operands on the device and on the host, ``numpy`` of a device tensor, what the capture of a graph does
  not allow. A replay runs the captured operations again on the memory that they had, so an input that is not static and
  a graph of another cache give other values.
- Copies that nobody waits for (to pinned memory, or on a stream of their own) happen when somebody waits; until then
  their target holds 255 in every byte, which is NaN.
- Waits of the host are counted by line of the package: ``item``, copies to the host, copies of pageable memory, shapes
  that depend on values. So are launches, bytes, and memory by the lifetime of storages.

It does not find wrong kernels, their limits, races between kernels of two streams, or speed. torch.compile returns its
argument.
"""

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
import zlib
from collections import Counter
from pathlib import Path
from typing import ClassVar

SOURCE = Path(__file__).with_name("shim.cpp")


def _load_shim():
    """Build the shim if no other process has, and load it. Hooks are looked up once, at torch's first use of CUDA."""
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported before the pretended device: pass -p tests.gpu_free.device")
    home = Path(importlib.util.find_spec("torch").origin).parent
    digest = f"{zlib.crc32(SOURCE.read_bytes() + (home / 'version.py').read_bytes()):08x}"
    built = Path(tempfile.gettempdir()) / f"tilth-pretended-{os.getuid()}-{digest}.so"
    if not built.exists():
        mine = built.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{home}/include", str(SOURCE)]
        command += ["-o", str(mine), f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
        subprocess.run(command, check=True)
        mine.replace(built)
    ctypes.CDLL(str(home / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built))


_load_shim()

import torch  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten  # noqa: E402

DEVICE = torch.device("cuda", 0)
FREE = {
    "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided", "aten.detach",
    "aten.alias", "aten.view", "aten._unsafe_view", "aten.t", "aten.transpose", "aten.expand", "aten.slice",
    "aten.select", "aten.split", "aten.split_with_sizes", "aten.as_strided", "aten.permute", "aten.unsqueeze",
    "aten.squeeze", "aten._reshape_alias", "aten.lift_fresh", "aten.unbind", "aten.diagonal", "aten.unfold",
    "aten.set_", "aten.resize_", "aten.detach_", "aten.view_as_real", "aten.is_same_size", "prim.device",
}  # fmt: skip
"""Operations without a kernel."""
MANY = {
    "aten.embedding_dense_backward": 9, "aten.sort": 6, "aten.topk": 4, "aten.cumsum": 2, "aten.index_put": 6,
    "aten.index_put_": 6, "aten._index_put_impl_": 6, "aten._fused_adamw_": 3, "aten._foreach_norm": 2,
    "aten.nonzero": 3, "aten._embedding_bag": 3, "pretended.rms_norm_backward": 2, "pretended.attention_backward": 3,
}  # fmt: skip
"""Kernels of one operation, roughly, where it is not one."""
INDEXING = ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_")
ON_DEVICE_ALONE = ("aten.mm", "aten.bmm", "aten.addmm", "aten.index_", "aten.gather", "aten.scatter", "aten.embedding")
"""Operations that take no number of the host, not even one without dimensions."""
VALUES = {
    "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive",
    "aten.bincount", "aten.equal", "aten._local_scalar_dense", "aten.is_nonzero",
}  # fmt: skip
"""Operations whose result on the host, or whose shape, depends on values."""


class DeviceFault(RuntimeError):
    """What a real device would have refused, or read where nothing is yet."""


class Counts:
    """What was asked of the device, by operation; waits by line too."""

    def __init__(self):
        self.launches, self.waits, self.where, self.bytes = Counter(), Counter(), Counter(), Counter()

    @property
    def graphs(self):
        """Replays of graphs."""
        return self.launches["graph"]

    @property
    def beside(self):
        """Launches beside graphs."""
        return self.launches.total() - self.graphs


class Tally:
    """The counts of now."""

    def __init__(self):
        self.lock, self.now = threading.RLock(), Counts()

    def wait(self, kind):
        """Count a wait of the host, at which everything that was queued happens."""
        self.now.waits[kind] += 1
        self.now.where[f"{kind} @ {place()}"] += 1
        for stream in Stream.every:
            stream.drain()


TALLY = Tally()


@contextlib.contextmanager
def counted():
    """Yield the counts of a block."""
    TALLY.now = Counts()
    yield TALLY.now
    TALLY.now = Counts()


def place():
    """Return the innermost lines of the package."""
    frames = [f for f in traceback.extract_stack(limit=60) if "/src/tilth/" in f.filename]
    return " < ".join(f"{f.filename.split('/src/tilth/')[-1]}:{f.lineno} {f.name}" for f in frames[::-1][:3])


def fault(text):
    raise DeviceFault(f"{text} @ {place()}")


class Memory:
    """Bytes of the device's storages, by their lifetime."""

    def __init__(self):
        self.users, self.now, self.peak = Counter(), 0, 0

    def reset_peak(self, *_):
        self.peak = self.now


MEMORY = Memory()


class _User:
    """A wrapper's share in the life of a storage."""

    def __init__(self, storage):
        self.storage, self.size = storage, storage.nbytes()
        with TALLY.lock:
            MEMORY.users[storage._cdata] += 1
            if MEMORY.users[storage._cdata] == 1:
                MEMORY.now += self.size
                MEMORY.peak = max(MEMORY.peak, MEMORY.now)

    def __del__(self):
        with TALLY.lock:
            MEMORY.users[self.storage._cdata] -= 1
            if not MEMORY.users[self.storage._cdata]:
                del MEMORY.users[self.storage._cdata]
                MEMORY.now -= self.size


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on the device."""

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip
        made._inner = inner
        made._user = _User(inner.untyped_storage())
        return made

    def __repr__(self, **_):
        return f"DeviceTensor({self._inner!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    @property
    def data(self):
        with torch.no_grad():
            return self.detach()

    @data.setter
    def data(self, other):
        assert isinstance(other, DeviceTensor) and other.shape == self.shape and other.dtype == self.dtype, "data ="
        self._inner, self._user = other._inner, other._user

    def numpy(self, *_, **__):
        fault("numpy() of a device tensor")

    def __array__(self, *_, **__):
        fault("an array of a device tensor")

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self._inner.data_ptr()

    def untyped_storage(self):
        return self._inner.untyped_storage()

    def set_(self, *what):
        return DeviceTensor(self._inner.set_(*what))  # torch would look at the device of the storage

    def record_stream(self, stream):
        pass

    def is_pinned(self, *_):
        return False

    def pin_memory(self, *_):
        fault("pin_memory of a device tensor")

    def share_memory_(self):
        return self

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            made = DeviceTensor(self._inner.detach().clone())
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(made, self.requires_grad) if parameter else made
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _again, (self._inner.detach(), self.requires_grad, isinstance(self, torch.nn.Parameter))


def _again(inner, grad, parameter):
    made = DeviceTensor(inner)
    return torch.nn.Parameter(made, grad) if parameter else made.requires_grad_(grad)


# ---- operations ----


def _name(func):
    return str(func).rsplit(".", 1)[0]


def _on_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


@functools.cache
def _composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _views(func):
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def run(func, args, kwargs):
    """Check, count and compute one operation, some of whose tensors are on the device."""
    if func is torch.ops.prim.device.default:
        return DEVICE
    if _composite(func):  # reaches us whole in inference mode
        with MODE:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    flat, spec = tree_flatten((args, kwargs))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    name, target = _name(func), kwargs.get("device")
    there = [x for x in tensors if isinstance(x, DeviceTensor)]
    here = [x for x in tensors if not isinstance(x, DeviceTensor) and x.device.type == "cpu"]
    if there and here and not (name in ("aten._to_copy", "aten.copy_", "aten.set_") or target is not None):
        _check_mixed(func, name, args, there, here)
    with TALLY.lock:
        to_host = _count(name, args, kwargs, there, here, target)
    inner_args, inner_kwargs = tree_unflatten([x._inner if isinstance(x, DeviceTensor) else x for x in flat], spec)
    inner_kwargs = dict(inner_kwargs)
    if _on_cuda(target):
        inner_kwargs["device"] = torch.device("cpu")
        if name == "aten._to_copy":  # a copy in any case
            inner_kwargs["non_blocking"] = False
    if inner_kwargs.pop("pin_memory", None):
        inner_kwargs["pin_memory"] = False
    if name == "aten.copy_" and _later(args, kwargs):
        Stream.current().put(func, inner_args[:2])
        return args[0]
    found = func(*inner_args, **inner_kwargs)
    if Graph.current is not None and not to_host:
        Graph.current.steps.append((func, inner_args, inner_kwargs, found))
    if to_host:
        return args[0] if name == "aten.copy_" else found
    # A view of a tensor that is none of inference is none either, also in inference mode.
    normal = bool(there) and _views(func) and not there[0].is_inference() and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if normal else contextlib.nullcontext():
        out = tree_map(lambda x: DeviceTensor(x) if isinstance(x, torch.Tensor) else x, found)
    if name in ("aten.copy_", "aten.set_") and not isinstance(args[0], DeviceTensor):
        return args[0]
    return return_and_correct_aliasing(func, args, kwargs, out) if there else out


def _later(args, kwargs):
    """True for a copy that the host does not wait for and other work on the device need not see yet."""
    into, source = (isinstance(x, DeviceTensor) for x in args[:2])
    if into != source and not _asynchronous(args, kwargs):
        return False
    return not into or Stream.current() is not Stream.default


def _asynchronous(args, kwargs):
    """True for a copy between the device and pinned memory that says that nobody need wait for it."""
    host = args[0] if isinstance(args[1], DeviceTensor) else args[1]
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")) and is_pinned(host)


_pinned = {}


def is_pinned(tensor):
    known = _pinned.get(tensor.untyped_storage()._cdata)
    return known is not None and not known.expired()


def _pin(tensor):
    if len(_pinned) > 1000:
        for key in [key for key, known in _pinned.items() if known.expired()]:
            del _pinned[key]
    _pinned[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())
    return tensor


def _check_mixed(func, name, args, there, here):
    """Operands of both devices: allowed are numbers of the host, and indices of the host, for which it waits."""
    if all(x.dim() == 0 for x in here) and not name.startswith(ON_DEVICE_ALONE):
        return
    if name in INDEXING and isinstance(args[0], DeviceTensor):
        TALLY.wait("indices of the host")
        return
    shapes = [(tuple(x.shape), "device" if isinstance(x, DeviceTensor) else "host") for x in there + here]
    fault(f"{func}: operands on the device and on the host {shapes}")


def _count(name, args, kwargs, there, here, target):
    """Count an operation; return True if its result is on the host."""
    captured = Graph.current is not None
    if name == "aten._local_scalar_dense":
        if captured:
            fault("item() while a graph is captured")
        TALLY.wait("item")
        return True
    to_host = False
    if name == "aten._to_copy" and target is not None:
        to_host = bool(there) and not _on_cuda(target)
        to_device = bool(here) and _on_cuda(target)
        if captured and (to_host or to_device):
            fault("a copy between host and device while a graph is captured")
        if to_host:
            TALLY.wait("copy to host")
        elif to_device and not (kwargs.get("non_blocking") and is_pinned(here[0])):
            TALLY.wait("copy from host" if here[0].dim() or here[0].numel() != 1 else "number from host")
    if name == "aten.copy_":
        into, source = args[:2]
        to_host = not isinstance(into, DeviceTensor)
        crossing = to_host or (not isinstance(source, DeviceTensor) and source.device.type == "cpu")
        if captured and crossing:
            fault("a copy between host and device while a graph is captured")
        if crossing and not _asynchronous(args, kwargs):
            TALLY.wait("copy to host" if to_host else "copy from host")
    if name in VALUES:
        if captured:
            fault(f"{name} while a graph is captured")
        TALLY.wait(name.removeprefix("aten."))
        to_host = name in ("aten.equal", "aten.is_nonzero")
    if name in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        TALLY.wait("boolean index")
    if name == "aten.repeat_interleave" and kwargs.get("output_size") is None:
        TALLY.wait("repeat_interleave")
    if name not in FREE:
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
        number = MANY.get(name, 1)
        if name.startswith(("aten._foreach", "aten._fused")) and lists:
            number = max(number, math.ceil(len(lists[0]) / 30))
        if not captured:
            TALLY.now.launches[name] += number
        TALLY.now.bytes[name] += sum(map(_touched, there))
    return to_host


def _touched(x):
    """Return the bytes of a tensor that an operation reads or writes."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()) if n > 1)
    return min(x.numel(), span) * x.element_size()


class Pretend(TorchDispatchMode):
    """Sees factories that are asked for tensors on the device or in pinned memory."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # which would import torch.compile, two seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(t is DeviceTensor for t in types) or _on_cuda(kwargs.get("device")):
            return run(func, args, kwargs)
        if kwargs.get("pin_memory"):
            return _pin(func(*args, **{**kwargs, "pin_memory": False}))
        if any(isinstance(x, DeviceTensor) for x in tree_flatten((args, kwargs))[0]):
            return run(func, args, kwargs)
        return func(*args, **kwargs)


MODE = Pretend()


# ---- the runtime ----


class Graph:
    """A CUDA graph: the operations of a block, run again on the same memory."""

    current = None
    captured = 0
    """Number of graphs so far."""
    living: ClassVar = weakref.WeakSet()
    """Graphs whose memory there is."""

    def __init__(self, *_, **__):
        self.steps, self._pool = [], None

    def pool(self):
        return self._pool

    def replay(self):
        TALLY.now.launches["graph"] += 1
        with torch.inference_mode():
            for func, args, kwargs, found in self.steps:
                again = func(*args, **kwargs)
                for new, old in zip(tree_flatten(again)[0], tree_flatten(found)[0]):
                    if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    def reset(self):
        self.steps.clear()
        Graph.living.discard(self)


@contextlib.contextmanager
def _capturing(graph, pool=None, stream=None, capture_error_mode="global"):
    if Graph.current is not None:
        fault("a capture within a capture")
    if pool is not None and all(other.pool() != pool for other in Graph.living):
        fault("a capture into the memory of graphs that are gone, where torch's allocator stops")
    Graph.current, Graph.captured = graph, Graph.captured + 1
    graph._pool = pool or (0, Graph.captured)
    Graph.living.add(graph)
    try:
        yield
    finally:
        Graph.current = None


class Stream:
    """A queue of copies that have not happened yet. All other work happens at once."""

    every: ClassVar = []
    default = None
    _here = threading.local()

    def __init__(self, *_, **__):
        self.device, self._queue = DEVICE, []
        Stream.every.append(self)

    @classmethod
    def current(cls, *_):
        return getattr(cls._here, "stream", None) or cls.default

    @classmethod
    @contextlib.contextmanager
    def entered(cls, stream):
        before, cls._here.stream = cls.current(), stream
        try:
            yield
        finally:
            cls._here.stream = before

    def put(self, func, tensors):
        """Queue a copy, and make its target unfit to be read."""
        with TALLY.lock:
            tensors[0].fill_(math.nan if tensors[0].is_floating_point() else torch.tensor(-1).to(tensors[0].dtype))
            self._queue.append((func, tensors))

    def drain(self):
        with TALLY.lock:
            queue, self._queue = self._queue, []
            for func, tensors in queue:
                func(*tensors)

    def wait_stream(self, other):
        other.drain()

    def wait_event(self, event):
        event.drain()

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        TALLY.wait("stream")


Stream.default = Stream()


class Event:
    """A point in a stream."""

    def __init__(self, *_, **__):
        self.at = self.stream = None

    def record(self, stream=None):
        self.at, self.stream = time.perf_counter(), stream or Stream.current()

    def drain(self):
        if self.stream is not None:
            self.stream.drain()

    def wait(self, stream=None):
        self.drain()

    def query(self):
        return True

    def synchronize(self):
        TALLY.wait("event")

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class _Properties:
    name, total_memory, major, minor, multi_processor_count = "a pretended H100", 80 << 30, 9, 0, 132


def install():
    """Pretend from now on, in this thread and those that it starts."""
    from tests.gpu_free import kernels

    torch._C._set_only_lift_cpu_tensors(True)
    here = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "empty_cache": lambda: None, "Event": Event,
        "synchronize": lambda *_: TALLY.wait("synchronize"), "Stream": Stream, "current_stream": Stream.current,
        "stream": Stream.entered, "CUDAGraph": Graph, "graph": _capturing, "set_device": lambda *_: None,
        "get_device_name": lambda *_: _Properties.name, "get_device_properties": lambda *_: _Properties,
        "get_device_capability": lambda *_: (9, 0), "mem_get_info": lambda *_: (70 << 30, 80 << 30),
        "memory_allocated": lambda *_: MEMORY.now, "max_memory_allocated": lambda *_: MEMORY.peak,
        "max_memory_reserved": lambda *_: MEMORY.peak, "reset_peak_memory_stats": MEMORY.reset_peak,
        "memory_stats": lambda *_: {}, "is_current_stream_capturing": lambda: Graph.current is not None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda *_: None,
    }  # fmt: skip
    for name, value in here.items():
        setattr(torch.cuda, name, value)
    torch.compile = lambda model=None, **_: model if model is not None else lambda given: given
    torch.Tensor.is_pinned = lambda tensor, *_: is_pinned(tensor)
    kernels.install()
    alike = torch._has_compatible_shallow_copy_type

    def shallow(input: torch.Tensor, from_: torch.Tensor) -> bool:  # torch._dynamo looks at the signature
        return DeviceTensor not in (type(input), type(from_)) and alike(input, from_)

    torch._has_compatible_shallow_copy_type = shallow
    MODE.__enter__()
    start = threading.Thread.run

    def run_with_mode(self):
        with MODE:
            start(self)

    threading.Thread.run = run_with_mode


# ---- pytest -p tests.gpu_free.device ----


def pytest_configure(config):
    torch.set_num_threads(1)
    install()


def pytest_runtest_teardown(item):
    Graph.current = None
