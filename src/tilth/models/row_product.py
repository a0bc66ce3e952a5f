"""Products of a few rows in a matrix library's order of sums (C++, built once for a machine, with the kernels of
``parallel.quantise``).

In parity mode a row has the bits that it has in a block of 16 rows (``models.steady``), so a library computes 4 to 16
rows for one. The order of the sums in such a block is simple: MKL adds fused multiply-adds one after another, up to
``BLOCKS`` terms (found from where a great term absorbs the others, arXiv 2411.00442), and these sums one after another.
A kernel with this order needs the rows that there are. ``steady`` tries it for each shape: another order costs time.
"""

import atexit
import ctypes
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import torch
from torch import Tensor

MOST = 15
"""Rows of a product at most; it is as fast as a library's of 16 rows, or faster (measured)."""
BLOCKS = (384, 192)
"""Terms of a sum: MKL's on processors of Intel and of AMD, both with AVX-512."""
LEAST = 16
"""Inputs and outputs of a weight at least: one vector."""
SHARED = 1 << 16
"""Elements of a weight from which on threads share a product."""
LIMIT, NICE = 120, 10
"""Seconds that a build may take, and its priority below others."""
INSTALL = 'built=$1; folder=$2; shift 2; "$@" && mv -f "$0" "$built" && rm -rf "$folder"'
SOURCES = [Path(__file__).with_name(name) for name in ("row_product.cpp", "coding.cpp")]
FLAGS = {"AVX512": ("-mavx512f", "-mfma", "-mprefer-vector-width=512"), "AVX2": ("-mavx2", "-mfma")}
ARGUMENTS = {
    "row_product": "ppppnnnni", "row_scores": "pppnnnnnni", "row_values": "pppnnnnnnni", "row_norm": "pppnnfi",
    "row_gated": "ppppnnnni", "row_softmax": "ppnn", "row_heads": "pppppppnnnnnfi", "row_pass": "ppppppppff",
    "dither_encode": "pninni", "dither_decode": "pnini", "signs_encode": "pnpi", "signs_decode": "pni",
    "greatest_encode": "pni", "hadamard": "pnfi",
}  # fmt: skip
"""Function of the library -> its arguments: pointers, numbers, an int or a float."""
WHEN_LOADED = list[Callable[[], None]]()
"""Called once the kernels are loaded: they clear what was found out without them."""
_library: ctypes.CDLL | None = None
_tried = False
_build: "_Build | None" = None


def prepare(*, wait: bool = True) -> None:
    """Load the kernels. If no process of this user has built them, build them: 8 s of processor time. Where that fails,
    print why, once.

    wait: False: a process of low priority builds, and a later call loads what it has built.
    """
    global _library, _tried
    if _tried:
        return
    try:
        built = _built(wait)
        if built is None:
            return
        found = ctypes.CDLL(str(built))
    except (ImportError, OSError, ValueError, subprocess.SubprocessError) as trouble:
        _tried = True
        why = [*(getattr(trouble, "stderr", None) or str(trouble)).strip().splitlines(), type(trouble).__name__][0]
        print(f"tilth: {_without(why)}", file=sys.stderr)
        return
    kinds = {"p": ctypes.c_void_p, "n": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
    for name, arguments in ARGUMENTS.items():
        getattr(found, name).argtypes = [kinds[one] for one in arguments]
    _library, _tried = found, True
    for forget in WHEN_LOADED:
        forget()


def missing() -> str:
    """Return a sentence on what this machine lacks to build the kernels; "" if it has it, or they are there."""
    try:
        _library_file()
    except (OSError, ValueError) as trouble:
        return _without(str(trouble))
    return ""


def _without(why: str) -> str:
    text = "so torch's functions compute, few rows with train.parity in blocks of 4 to 16"
    return f"the kernels for CPUs cannot be built ({why}), {text}"


def ready() -> bool:
    """Return True if the kernels are loaded."""
    return _library is not None


def library() -> ctypes.CDLL:
    """Return the kernels, which are ``ready``."""
    assert _library is not None
    return _library


class _Build:
    """Build of the library by a process of its own, which is killed where this one exits before it has ended, and
    installs what it has built where this one ends without a word, as workers do."""

    def __init__(self, command: list[str], built: Path, wait: bool) -> None:
        built.parent.mkdir(parents=True, exist_ok=True)
        self.built, self.owner = built, os.getpid()
        self.folder = Path(mkdtemp(dir=built.parent))  # processes of several machines may build at once
        self.command, self.errors = [*command, "-o", str(self.folder / built.name)], self.folder / "errors"
        shell = ["sh", "-c", INSTALL, str(self.folder / built.name), str(built), str(self.folder)]
        try:
            with self.errors.open("w") as errors:
                self.process = subprocess.Popen([*shell, *self.command], stderr=errors, start_new_session=True)
        except OSError:
            shutil.rmtree(self.folder)
            raise
        atexit.register(self.end)
        if not wait:
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PGRP, self.process.pid, NICE)

    def done(self, wait: bool) -> bool:
        """Return True once the library is where it belongs. SubprocessError: it could not be built."""
        if not wait and self.process.poll() is None:
            return False
        try:
            if code := self.process.wait(LIMIT):
                raise subprocess.CalledProcessError(code, self.command, stderr=self.errors.read_text())
        finally:
            self.end()
        return True

    def end(self) -> None:
        """Stop the build if it goes on, and remove its folder; a fork of this process leaves both alone."""
        if os.getpid() == self.owner:
            atexit.unregister(self.end)
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)


def _built(wait: bool) -> Path | None:
    """Return the path of the built library; None: it is being built. Raises ValueError, OSError or
    SubprocessError."""
    global _build
    if _build is not None and _build.owner == os.getpid():
        return _build.built if _build.done(wait) else None  # and no look at the compiler
    built, command = _library_file()
    if not built.exists():
        _build = _Build(command, built, wait)
        return built if _build.done(wait) else None
    return built


def _library_file() -> tuple[Path, list[str]]:
    """Return where the library of this machine belongs, in torch's folder of extensions, and the command that builds
    it there. ValueError: this machine cannot build it; FileNotFoundError: it has no compiler, and no library.

    torch.utils.cpp_extension would import setuptools to say where and by what.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in FLAGS or platform.system() == "Windows":
        raise ValueError(f"it needs AVX2 or AVX-512 and no Windows, here are {capability} and {platform.system()}")
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", *FLAGS[capability]]
    compiler, source = os.environ.get("CXX", "c++"), b"".join(path.read_bytes() for path in SOURCES)
    digest = f"{zlib.crc32(source + ' '.join([compiler, *flags]).encode()):08x}"
    home = os.path.expanduser("~")  # "~" for a user without one
    cache = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home != "~" else gettempdir())
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions")
    built = root / f"tilth_row_product_{digest}.so"
    words = shlex.split(compiler)  # CXX="ccache g++"
    if not built.exists() and not (words and shutil.which(words[0])):
        raise FileNotFoundError(f"there is no C++ compiler {compiler}: install g++, or set CXX")
    return built, [*words, *flags, *map(str, SOURCES)]


def orders(out: int, width: int) -> Iterator[int]:
    """Yield numbers of terms of a sum that a library may have: a width up to twice a block is divided evenly."""
    if min(out, width) >= LEAST:
        yield from dict.fromkeys(width if width <= n else -(-width // 2) if width <= 2 * n else n for n in BLOCKS)


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, terms: int, threads: int) -> Tensor:
    """Compute x [n, in] times weight [out, in], plus bias, all float32, n up to ``MOST``: ``out`` [n, out], contiguous.

    terms: of a sum in order. A row has the same bits for every n and number of threads. The kernel is ``ready``.
    """
    assert _library is not None
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    added, shares = None if bias is None else bias.data_ptr(), _shares(weight.numel(), threads)
    columns, width = weight.shape
    _library.row_product(
        x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), x.shape[0], width, columns, terms, shares
    )
    return out


def row_scores(q: Tensor, k: Tensor, terms: int, threads: int) -> Tensor:
    """Return q [n, rows, width] times the transpose of k [n, keys, width], as ``row_product``: [n, rows, keys]."""
    assert _library is not None
    (heads, rows, width), keys = q.shape, k.shape[1]
    q, k, found = q.contiguous(), _packed(k), q.new_empty(heads, rows, keys)
    sizes = (heads, k.stride(0), rows, width, keys, terms, _shares(found.numel() * width, threads))
    _library.row_scores(q.data_ptr(), k.data_ptr(), found.data_ptr(), *sizes)
    return found


def row_values(weights: Tensor, v: Tensor, terms: int, block: int, threads: int) -> Tensor:
    """Return weights [n, rows, keys] times v [n, keys, width], a width of whole vectors: [n, rows, width].

    terms: of a sum; sums of a block of keys are added, then the blocks.
    """
    assert _library is not None
    (heads, rows, keys), width = weights.shape, v.shape[2]
    weights, v, found = weights.contiguous(), _packed(v), v.new_empty(heads, rows, width)
    sizes = (heads, v.stride(0), rows, width, keys, terms, block, _shares(found.numel() * keys, threads))
    _library.row_values(weights.data_ptr(), v.data_ptr(), found.data_ptr(), *sizes)
    return found


def _packed(x: Tensor) -> Tensor:
    """Return x [n, keys, width] with the elements of each n in order; slots behind its keys may follow."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _shares(products: int, threads: int) -> int:
    return threads if products >= SHARED else 1
