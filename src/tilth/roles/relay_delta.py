"""Changes of weights from one version to the next, without a loss: the exclusive or of their bits, compressed, since in
bf16 most elements keep theirs over an update. What is no shorter so travels whole; the length tells which."""

import numpy as np
import pyarrow

CODEC = "zstd"
"""Of lz4, zstd and places with values of changed elements the shortest (``benchmarks/relay.py``)."""


def packed(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return the changes from one array of bytes to another of the same length, or the whole one: uint8."""
    row = np.frombuffer(pyarrow.compress(pyarrow.py_buffer(new ^ old), codec=CODEC), np.uint8)
    return row if len(row) < len(new) else new


def unpacked(row: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return the array that ``packed`` got. Raises pyarrow's errors for what it has not returned."""
    if len(row) == len(old):
        return row
    changes = pyarrow.decompress(pyarrow.py_buffer(row), len(old), codec=CODEC)
    return np.frombuffer(changes, np.uint8) ^ old
