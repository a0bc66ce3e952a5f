"""The recorder role of flows that learn from pairs: both answers of each pair as payload."""

from collections.abc import Sequence

import numpy as np

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Column, Ragged
from tilth.data.pairs import encode_pairs, pairs_of
from tilth.roles.experience import identity
from tilth.roles.pairs import CHOSEN
from tilth.roles.recorder import RecorderWorker
from tilth.trace.spans import span


class PairRecorderWorker(RecorderWorker):
    """Knows the pairs of each prompt too."""

    @transfer(split="all", gather="first")
    def pairs(self, indices: Sequence[int]) -> Batch:
        """All pairs of these prompts as token payload, the chosen answer before the rejected one.

        Rows: prompt (a place in ``indices`` that comes twice is two prompts), pair, side, margin, length, group (the
        prompt, whose tokens they share), id, identity. The mask is 1 on the answer and its end token.
        """
        counts = [len(pairs_of(self.prompts, int(i))) for i in indices]
        with span("load") as spent:
            encoded = encode_pairs(self.prompts, indices, self.template, self.context)
            examples = [example for one in encoded for example in (one.chosen, one.rejected)]
            spent.set(tokens=sum(len(e.tokens) for e in examples))
        made = list(zip(np.repeat(np.arange(len(counts)), counts).tolist(), encoded))
        pair = np.repeat(np.arange(len(made), dtype=np.int64), 2)
        prompt = np.repeat(np.array([place for place, _ in made], np.int64), 2)
        rows: dict[str, np.ndarray] = {
            "prompt": prompt,
            "pair": pair,
            "group": prompt,
            "id": np.arange(2 * len(made), dtype=np.int64),
            "side": np.tile(np.array([CHOSEN, 0], np.int8), len(made)),
            "margin": np.repeat(np.array([one.margin for _, one in made], np.float64), 2),
            "length": np.array([len(e.tokens) for e in examples], np.int32),
            "identity": np.array([identity(e.tokens) for e in examples], np.uint32),
        }
        payload = {"tokens": [e.tokens for e in examples], "mask": [e.mask for e in examples]}
        put = {k: Column.whole(self.store.put(k, Ragged.of(v)), len(examples)) for k, v in payload.items()}
        return Batch(rows, put)
