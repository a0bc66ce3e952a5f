"""The recorder role of pre-training: pieces of documents as payload."""

from collections.abc import Sequence

import numpy as np

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Column, Ragged, Store
from tilth.data.documents import Corpus
from tilth.data.tokenizer import Tokenizer
from tilth.roles.experience import identity
from tilth.trace.spans import span


class DocumentWorker:
    """Sits next to the store and reads the tokenised documents."""

    def __init__(self, train: Corpus, heldout: Corpus | None, tokenizer: Tokenizer, store: Store) -> None:
        self.train = train
        self.heldout = heldout
        self.tokenizer = tokenizer
        self.store = store
        self._sizes: dict[int, int] = {}  # by index: every evaluation is about the same pieces

    @transfer(split="all", gather="first")
    def documents(self, indices: Sequence[int], *, heldout: bool = False) -> Batch:
        """Pieces as token payload; the mask is 1 on every token but each first, which nothing comes before.

        Of held-out pieces also the row column ``bytes``: UTF-8 bytes of the text that the tokens in the mask stand for
        (the end of a document is none; a character that a border cuts counts as its replacement's three).
        """
        corpus = self.heldout if heldout and self.heldout is not None else self.train
        with span("load") as spent:
            tokens = corpus.tokens(indices)
            spent.set(tokens=len(tokens.values))
        mask = np.ones(len(tokens.values), np.uint8)
        mask[tokens.offsets[:-1]] = 0
        pieces = [tokens.row(i) for i in range(len(indices))]
        rows: dict[str, np.ndarray] = {
            "prompt": np.asarray(indices, np.int64),
            "length": tokens.lengths.astype(np.int32),
            "identity": np.array([identity(piece) for piece in pieces], np.uint32),
        }
        if heldout:
            rows["bytes"] = np.array([self._bytes(int(i), piece) for i, piece in zip(indices, pieces)], np.int64)
        payload = {"tokens": tokens, "mask": Ragged(mask, tokens.offsets)}
        return Batch(rows, {k: Column.whole(self.store.put(k, v), len(pieces)) for k, v in payload.items()})

    def _bytes(self, index: int, piece: np.ndarray) -> int:
        """Of a held-out piece, counted once."""
        if index not in self._sizes:
            whole, first = self.tokenizer.decode(piece), self.tokenizer.decode(piece[:1])
            self._sizes[index] = len(whole.encode()) - len(first.encode())
        return self._sizes[index]
