"""Pieces of documents as batches, and the bytes of what is held out: right, and counted once."""

import numpy as np
import pytest

from tilth.cluster.backends.inline import InlineStore
from tilth.data.documents import Corpus
from tilth.data.tokenizer import Tokenizer
from tilth.roles.loader import DocumentLoader

TEXTS = ["ein Öl-Käfer\n" * 9, "two", "drei Bäume " * 20]


@pytest.fixture
def worker(tmp_path):
    tokenizer = Tokenizer.train(TEXTS, 300)
    corpora = [Corpus.build(texts, tokenizer, 8, tmp_path) for texts in (["training only"], TEXTS)]
    return DocumentLoader(*corpora, tokenizer, InlineStore())


def counting(worker, monkeypatch):
    calls, plain = [], Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, **how: calls.append(ids) or plain(self, ids, **how))
    return calls


def test_bytes_are_those_of_the_tokens_behind_the_first_and_counted_once(worker, monkeypatch):
    some = np.array([3, 0, len(worker.heldout) - 1])
    expected = []
    for piece in (worker.heldout.tokens([i]).row(0) for i in some):
        texts = [worker.tokenizer.decode(ids).encode() for ids in (piece, piece[:1])]
        expected.append(len(texts[0]) - len(texts[1]))
    calls = counting(worker, monkeypatch)
    assert worker.documents(some, heldout=True)["bytes"].tolist() == expected and max(expected) > 5
    assert len(calls) == 2 * len(some)
    assert worker.documents(some[::-1], heldout=True)["bytes"].tolist() == expected[::-1]
    assert len(calls) == 2 * len(some)
    worker.documents(np.array([3, 1]), heldout=True)
    assert len(calls) == 2 * len(some) + 2


def test_training_counts_no_bytes(worker, monkeypatch):
    calls = counting(worker, monkeypatch)
    assert "bytes" not in worker.documents(np.array([0])).rows and not calls


def test_the_mask_leaves_out_each_first_token(worker):
    batch = worker.documents(np.array([1, 0]), heldout=True)
    found = batch.read(worker.store, "tokens", "mask")
    for row, index in enumerate((1, 0)):
        assert found["tokens"].row(row).tolist() == worker.heldout.tokens([index]).row(0).tolist()
        mask = found["mask"].row(row)
        assert mask[0] == 0 and mask[1:].all() and len(mask) == batch["length"][row]
