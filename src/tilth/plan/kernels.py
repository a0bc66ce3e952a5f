"""Sizes of chunks and buffers of model and engine, shared by the kernels and the memory prediction."""

import math
from collections.abc import Iterator

# ---- the output head ----

CHUNK_ELEMENTS = 1 << 24
CHUNK_ROWS = (256, 1024)
"""Default chunk of logits: 64 MiB in fp32, 256 to 1024 rows. The product that gives the weight's gradient sums over
them: over 128 it takes four times as long as over 1024 (V 16,384)."""
GPU_CHUNK_ELEMENTS, GPU_CHUNK_ROWS = 1 << 28, (1024, 8192)
"""Chunk of a GPU, 1 GiB: each chunk reads and writes the whole gradient of the weight in fp32 (not measured)."""
CACHED_ELEMENTS = 1 << 21
"""A part of a chunk: 8 MiB of fp32 logits."""
KEPT_ELEMENTS = 1 << 26
"""Most log-probs that are kept for the backward pass: 256 MiB. Computing them twice costs 5 % of a step and more."""
ROW_MULTIPLE = 16
"""Rows of the block whose bits each row of a linear layer has in parity mode on a CPU (``models.steady``)."""
TAIL = 4
"""Rows of the smallest block, where it has these bits."""


HEAD_ROWS, HEAD_COLUMNS, HEAD_INNER, HEAD_SPAN = 128, 128, 64, 1024
"""Of the kernel for a GPU: a tile of logits, the depth of a product's step, columns of a program."""
HEAD_STEPS, HEAD_SPARE = (2, 3), 4 << 10
"""Steps of a product whose inputs a program holds, and bytes of shared memory beside them: joins of rows, and 1 KB of
the driver."""


def head_stages(memory: int) -> int:
    """Return the steps of a product that the kernel for a GPU holds, given the bytes of shared memory of a program."""
    least, most = HEAD_STEPS
    return min(max((memory - HEAD_SPARE) // ((HEAD_ROWS + HEAD_COLUMNS) * HEAD_INNER * 2), least), most)


def gradient_columns(rows: int, vocab: int, tile: int = HEAD_COLUMNS) -> int:
    """Return the columns of the vocabulary whose gradient the kernel of a GPU has at a time, whole tiles."""
    return min(max(GPU_CHUNK_ELEMENTS // max(rows, 1) // tile, 1) * tile, round_up(vocab, tile))


def chunk_rows(vocab: int, wanted: int | None = None, gpu: bool = False) -> int:
    """Return the rows of hidden states per chunk of logits, ``wanted`` or the default, rounded up."""
    elements, (least, most) = (GPU_CHUNK_ELEMENTS, GPU_CHUNK_ROWS) if gpu else (CHUNK_ELEMENTS, CHUNK_ROWS)
    rows = wanted or min(max(elements // max(vocab, 1), least), most)
    return rows + -rows % ROW_MULTIPLE


def keeps(rows: int, vocab: int) -> bool:
    """True if the log-probs of this many rows are kept for their backward pass."""
    return rows * vocab <= KEPT_ELEMENTS


# ---- attention on a CPU ----

MASKED_UP_TO = {4: 256, 2: 768}
"""Longest sequence for which plain matmuls win over SDPA with a mask, by bytes of an element (measured, forward and
backward)."""
CAUSAL_UP_TO = {4: 128, 2: 768}
"""Longest sequence for which plain matmuls win over causal SDPA, which skips half of the scores, by element bytes."""

# ---- the rollout engine ----

SMALLEST = 128
"""Longest sequence of the first lane in tokens; each next lane takes twice as many."""
ROWS = 8
"""Rows are allocated, moved and compiled in multiples of this."""
KEYS = 16
"""Attention looks at a multiple of this many slots."""
BLOCK = 16
"""Tokens of a block of the KV cache."""
PAGE = 256
"""Tokens of a block where attention reads blocks in place, on a GPU: the least that torch's kernel takes."""
PAGED_TORCH, FLASH_WIDTH = "2.13", 256
"""First version whose own kernel reads pages, and the widest head of this kernel; all are multiples of 8."""
PROMPT_WIDTH = 8
"""Chunks of prompts are padded to a multiple of this."""
PASS = 4096
"""Most tokens of a forward pass: what it makes stays in the cache of the processor (12,288 were 1.3 times slower)."""
DRAFT_WIDTH = 64
"""Most tokens of a row in a pass of a drafting model, of those that it has not seen."""
CHOICE_ELEMENTS = 1 << 24
"""Most logits of first tokens at a time: 64 MiB."""


def round_up(n: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-n // multiple) * multiple


def limit_for(length: int, longest: int) -> int:
    """Return the limit of the length bucket for ``length`` tokens, if no sequence exceeds ``longest``."""
    limit = SMALLEST
    while limit <= length and limit < longest:
        limit *= 2
    return min(limit, round_up(longest, KEYS))


def slots_for(tokens: int) -> int:
    """Return the cache slots of rows of up to this many tokens.

    Laying out the cache anew every g tokens costs 3 T / g token visits a step, g / 2 idle slots cost as many again:
    least at g = sqrt(6 T).
    """
    step = max(KEYS, 1 << round(math.log2(6 * tokens) / 2))
    return round_up(tokens, step)


def grown(size: int, need: int) -> int:
    """Return the new size of a KV cache buffer of ``size`` that must hold ``need``."""
    return max(need, size * 3 // 2) if need > size else size


def layouts_until(first: int, longest: int, context: int, fixed: bool) -> Iterator[list[int]]:
    """Yield the growing slot counts of each length bucket that a sequence passes from ``first`` to ``longest`` tokens.

    fixed: a bucket has its limit of slots at once, as on a GPU.
    """
    limit = limit_for(first, context)
    while True:
        last = min(longest, limit)
        tokens = [last] if fixed else sorted({*range(min(first + 1, last), last, KEYS), last})
        yield sorted({limit if fixed else min(limit, slots_for(t)) for t in tokens})
        if limit >= longest or limit >= round_up(context, KEYS):
            return
        first, limit = limit, limit_for(limit, context)
