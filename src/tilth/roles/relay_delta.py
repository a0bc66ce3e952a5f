"""What changes in an array of weights from one version to the next, without a loss: in bf16 most elements keep their
bits over an update.

An element that changed travels as its place and its value: for each block of 2**16 elements the number of its changes
(uint32), then their places in their blocks (uint16), then their values. An array whose changes would be no shorter than
itself travels whole; the length tells which it is.
"""

import numpy as np

BLOCK = 1 << 16


def packed(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return the changes from one array of words (unsigned integers) to another, or the whole one, as bytes."""
    places, blocks = np.flatnonzero(new != old), -(-len(new) // BLOCK)
    if 4 * blocks + (2 + new.itemsize) * len(places) >= new.nbytes:
        return new.view(np.uint8)
    counts = np.bincount(places // BLOCK, minlength=blocks).astype(np.uint32)
    parts = counts, (places % BLOCK).astype(np.uint16), new[places]
    return np.concatenate([part.view(np.uint8) for part in parts])


def unpack(row: np.ndarray, words: np.ndarray) -> None:
    """Change an array of words as ``packed`` has described it."""
    if len(row) == words.nbytes:
        words.view(np.uint8)[:] = row
        return
    blocks = -(-len(words) // BLOCK)
    counts, rest = row[: 4 * blocks].view(np.uint32), row[4 * blocks :]
    places, values = rest[: 2 * counts.sum()].view(np.uint16), rest[2 * counts.sum() :].view(words.dtype)
    words[np.repeat(np.arange(blocks) * BLOCK, counts) + places] = values
