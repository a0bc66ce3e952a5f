"""Loader role: opens the data where it is read, and turns it into payload."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilth.cluster.backends.capacity import cores
from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Column, Jagged, Store
from tilth.core.media import MEDIA, pack_media
from tilth.data.computed import has_media
from tilth.data.documents import Corpus
from tilth.data.examples import Kind, LoadedSample, tokenised
from tilth.data.prompts import PromptSet
from tilth.data.template import Example, Template
from tilth.data.tokenizer import Tokenizer
from tilth.plan.batch import RowTable
from tilth.plan.loaders import Shares
from tilth.process.child import finalize
from tilth.roles.experience import INFO, identity
from tilth.roles.pairs import CHOSEN
from tilth.roles.source_loaders import SourceLoaders
from tilth.trace.spans import span


class PromptLoader:
    """Prompts with their answers or pairs, and the template that tokenises them.

    A call that is given ``then``, the samples of the next step, has its loaders begin with them.
    """

    def __init__(
        self,
        prompts: PromptSet,
        template: Template,
        context: int,
        store: Store,
        *,
        episodes: bool = False,
        loaders: SourceLoaders | None = None,
    ) -> None:
        """episodes: a prompt's conversation is asked up to the assistant's first turn, not to its last. loaders:
        processes that make the tokens in place of this one."""
        self.prompts, self.template, self.context, self.store = prompts, template, context, store
        self.episodes, self.loaders = episodes, loaders
        if loaders is not None:
            finalize(self, loaders.close)

    @transfer(split="all", gather="first", patient=True)
    def examples(self, indices: Sequence[int], then: Sequence[int] = ()) -> Batch:
        """Return prompts with their answers as token payload; the mask is 1 on what the policy would write."""
        found = self._samples("examples", indices, then)
        examples = [Example(one.rows[0], one.masks[0]) for one in found]
        return _supervised({"prompt": np.asarray(indices, np.int64)}, examples, self.store, self._media(indices))

    @transfer(split="rows", gather="rows", patient=True)
    def encode(self, asked: Batch, then: Sequence[int] = ()) -> Batch:
        """Add the payload column ``prompt_tokens`` to rows with a column ``prompt``, and ``media`` if the source has
        some."""
        distinct, place = np.unique(asked["prompt"], return_inverse=True)
        found = self._samples("begins" if self.episodes else "prompts", distinct, then)
        columns = {"prompt_tokens": [one.rows[0] for one in found], **self._media(distinct)}
        return asked.with_payload(**{name: self._shared(name, rows, place) for name, rows in columns.items()})

    @transfer(split="rows", gather="rows", patient=True)
    def begin(self, asked: Batch, then: Sequence[int] = ()) -> Batch:
        """Add the payload column ``info``: JSON of a record's columns, ``prompt``, and ``messages`` that begin it."""
        distinct, place = np.unique(asked["prompt"], return_inverse=True)
        rows = [one.rows[0] for one in self._samples("episodes", distinct, then)]
        return asked.with_payload(**{INFO: self._shared(INFO, rows, place)})

    @transfer(split="rows", gather="rows")
    def texts(self, batch: Batch) -> Batch:
        """Add the payload columns ``prompt_text`` and ``answer`` (the right one, empty where there is none)."""
        distinct, place = np.unique(batch["prompt"], return_inverse=True)
        prompts = [self.prompts[i] for i in distinct]
        written = {"prompt_text": [p.text for p in prompts], "answer": [str(p.info.get("answer", "")) for p in prompts]}
        columns = {k: [np.frombuffer(text.encode(), np.uint8) for text in texts] for k, texts in written.items()}
        return batch.with_payload(**{name: self._shared(name, rows, place) for name, rows in columns.items()})

    @transfer(split="all", gather="first", reads=True)
    def loading(self) -> dict[str, Any]:
        """Return what a plan of its loaders needs: ``cores`` here, the ``plan`` that they follow, and ``costs``."""
        assert self.loaders is not None
        return {"cores": cores(), "plan": self.loaders.plan, "costs": self.loaders.costs()}

    @transfer(split="all", gather="first", reads=True)
    def follow(self, plan: Sequence[Shares]) -> None:
        """Have its loaders follow a plan."""
        assert self.loaders is not None
        self.loaders.follow(plan)

    def _samples(self, kind: Kind, indices: Sequence[int] | np.ndarray, then: Sequence[int]) -> list[LoadedSample]:
        """Return samples as tokens, made here or by loaders, which begin with those of ``then``."""
        wanted = [int(i) for i in indices]
        with span("load") as spent:
            if self.loaders is None:
                found = tokenised(kind, self.prompts, wanted, self.template, self.context)
            else:
                found = self.loaders.take(kind, wanted)
                if len(then):  # a look at samples in between forgets nothing
                    self.loaders.ask(kind, [int(i) for i in then])
            spent.set(tokens=0 if kind == "episodes" else sum(one.tokens for one in found))
        return found

    def _media(self, indices: Sequence[int] | np.ndarray) -> dict[str, list[np.ndarray]]:
        """Return the column ``media`` of prompts, if their source has some: then on all workers."""
        if not has_media(self.prompts.source):
            return {}
        return {MEDIA: [pack_media(self.prompts[int(i)].media) for i in indices]}

    def _shared(self, name: str, rows: Sequence[np.ndarray], place: np.ndarray) -> Column:
        return Column.whole(self.store.put(name, Jagged.of(rows)), len(rows)).take(place)

    @transfer(split="all", gather="first", patient=True)
    def pairs(self, indices: Sequence[int], then: Sequence[int] = ()) -> Batch:
        """Return all pairs of these prompts as token payload, the chosen answer before the rejected one.

        Rows: prompt (a place in ``indices`` that comes twice is two prompts), pair, side, margin, length, group (the
        prompt, whose tokens they share), id, identity. The mask is 1 on the answer and its end token.
        """
        found = self._samples("pairs", indices, then)
        sides = [Example(*side) for one in found for side in zip(one.rows, one.masks)]
        margins = [margin for one in found for margin in one.margins]
        prompt = np.repeat(np.arange(len(found), dtype=np.int64), [len(one.rows) for one in found])
        rows: dict[str, np.ndarray] = {
            "prompt": prompt,
            "pair": np.repeat(np.arange(len(margins), dtype=np.int64), 2),
            "group": prompt,
            "id": np.arange(len(sides), dtype=np.int64),
            "side": np.tile(np.array([CHOSEN, 0], np.int8), len(margins)),
            "margin": np.repeat(np.array(margins, np.float64), 2),
        }
        return _supervised(rows, sides, self.store)


class DocumentLoader:
    """Pieces of tokenised documents."""

    def __init__(self, train: Corpus, heldout: Corpus | None, tokenizer: Tokenizer, store: Store) -> None:
        self.train, self.heldout, self.tokenizer, self.store = train, heldout, tokenizer, store
        self._sizes: dict[int, int] = {}  # by index: every evaluation reads the same pieces

    @transfer(split="all", gather="first")
    def documents(self, indices: Sequence[int], *, heldout: bool = False) -> Batch:
        """Return pieces as token payload; the mask is 1 on every token but the first of each piece.

        Held-out pieces also get the row column ``bytes``: UTF-8 bytes of the text of the tokens in the mask (the end of
        a document has none; a character cut at a border counts as its replacement's three).
        """
        corpus = self.heldout if heldout and self.heldout is not None else self.train
        with span("load") as spent:
            tokens = corpus.tokens(indices)
            spent.set(tokens=len(tokens.values))
        mask = np.ones(len(tokens.values), np.uint8)
        mask[tokens.offsets[:-1]] = 0
        rows: dict[str, np.ndarray] = {"prompt": np.asarray(indices, np.int64)}
        if heldout:
            rows["bytes"] = np.array([self._bytes(int(i), piece) for i, piece in zip(indices, tokens.rows())], np.int64)
        return _with_tokens(rows, tokens, mask, self.store)

    def _bytes(self, index: int, piece: np.ndarray) -> int:
        """Count the bytes of a held-out piece, once."""
        if index not in self._sizes:
            whole, first = self.tokenizer.decode(piece), self.tokenizer.decode(piece[:1])
            self._sizes[index] = len(whole.encode()) - len(first.encode())
        return self._sizes[index]


def _supervised(
    rows: Mapping[str, np.ndarray],
    examples: Sequence[Example],
    store: Store,
    payload: Mapping[str, list[np.ndarray]] | None = None,
) -> Batch:
    tokens, mask = Jagged.of([e.tokens for e in examples]), Jagged.of([e.mask for e in examples])
    found = _with_tokens(rows, tokens, mask.values, store)
    more = {name: Column.whole(store.put(name, Jagged.of(v)), len(v)) for name, v in (payload or {}).items()}
    return found.with_payload(**more)


def _with_tokens(rows: Mapping[str, np.ndarray], tokens: Jagged, mask: np.ndarray, store: Store) -> Batch:
    """Return a batch of these rows with their tokens, and the row columns that follow from these."""
    count = len(tokens.lengths)
    found = {
        **rows,
        "length": tokens.lengths.astype(np.int32),
        "identity": np.array([identity(ids) for ids in tokens.rows()], np.uint32),
        **RowTable.of(tokens, mask).columns(),
    }
    payload = {"tokens": tokens, "mask": Jagged(mask, tokens.offsets)}
    return Batch(found, {name: Column.whole(store.put(name, column), count) for name, column in payload.items()})
