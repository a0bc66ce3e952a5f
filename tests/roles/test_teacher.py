"""A teacher with another tokenizer: each of the policy's tokens gets the difference of its chunk, and what is in none
is not learned from."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilth.rl as rl
from tests.roles import small
from tests.roles.test_policy import reference
from tilth.cluster.backends.inline import InlineStore
from tilth.config.schema import Teacher as ChosenTeacher
from tilth.core.batch import Jagged
from tilth.data.alignment import Translator
from tilth.data.tokenizer import Tokenizer
from tilth.flows.teachers import each_by_its_own
from tilth.models.decoder import Decoder
from tilth.parallel.sharded import ShardedModel
from tilth.roles.experience import CHUNK_TOKENS, UNALIGNED
from tilth.roles.reference import ReferenceWorker
from tilth.roles.teacher import TeachersWorker, TeacherWorker, shares
from tilth.runs.metrics import Metrics
from tilth.training.packed import packed_logprobs

OTHERS = Tokenizer.train(["1+2=3 "], 260)


@st.composite
def aligned(draw):
    """Rows of chunks, and gaps between them, with log-probs of both sides."""
    rows, own, theirs = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        row, at, other = [], 0, 0
        for _ in range(draw(st.integers(0, 4))):
            at, other = at + draw(st.integers(0, 2)), other + draw(st.integers(0, 2))
            ends = at + draw(st.integers(1, 3)), other + draw(st.integers(1, 3))
            row.append((at, ends[0], other, ends[1]))
            at, other = ends
        numbers = np.random.default_rng(draw(st.integers(0, 99)))
        rows.append(row)
        own.append(-numbers.random(at + draw(st.integers(0, 2)), np.float32))
        theirs.append(-numbers.random(other + draw(st.integers(0, 2)), np.float32))
    return rows, own, theirs


def ragged(rows, kind):
    return Jagged.with_lengths(np.concatenate([np.zeros(0, kind), *rows]), [len(row) for row in rows])


@given(aligned())
def test_a_token_gets_what_a_loop_over_chunks_gives_it(case):
    rows, own, theirs = case
    chunks = ragged([np.array(row, np.int32).ravel() for row in rows], np.int32)
    ref, sizes = shares(chunks, ragged(own, np.float32), ragged(theirs, np.float32))
    gaps, counts, said = [], [], []
    for row, p, q in zip(rows, own, theirs):
        found = np.zeros((3, len(p)))
        for start, end, first, last in row:
            gap = q[first:last].sum(dtype=np.float64) - p[start:end].sum(dtype=np.float64)
            alone = q[first:last].sum(dtype=np.float64) if end - start == 1 else 0.0
            found[:, start:end] = np.array([[gap], [end - start], [alone]])
        for column, values in zip((gaps, counts, said), found):
            column.extend(values)
    assert ref.dtype == sizes.dtype == np.float32 and sizes.tolist() == counts
    np.testing.assert_array_equal(ref[sizes == 1], np.array(said, np.float32)[sizes == 1])
    assert not ref[sizes == 0].any()
    mask, flat = torch.from_numpy(sizes > 0), torch.from_numpy(ragged(own, np.float32).values)
    columns = {"logprobs": flat, "ref_logprobs": torch.from_numpy(ref), "chunk_tokens": torch.from_numpy(sizes)}
    lengths = torch.tensor([len(p) for p in own], dtype=torch.int64)
    given = {"rewards": torch.zeros(len(rows)), "groups": torch.zeros(len(rows), dtype=torch.int64)}
    found = rl.estimate("distill", align="characters", **given, **columns, lengths=lengths, mask=mask)
    np.testing.assert_allclose(found.advantages.numpy(), np.where(sizes > 0, gaps, 0.0), atol=1e-5)


def teacher(worker, tokenizer, model=None, most=small.CONTEXT):
    """A teacher with this tokenizer; by default its model is the policy's."""
    decoder = model or Decoder(small.config())
    sharded = ShardedModel.alone(decoder.requires_grad_(False))
    settings = {"temperature": worker.temperature, "micro_tokens": worker.engine.micro_tokens, "parity": False}
    translator = Translator(small.TOKENIZER, tokenizer, most)
    found = TeacherWorker(sharded, worker.store, translator=translator, **settings)
    if model is None:
        found.receive(worker.weights(), 0)
    return found


def followed(worker, frozen, batch):
    theirs = frozen.logprobs(frozen.translated(batch))
    return theirs, frozen.aligned(worker.logprobs(batch), theirs)


def column(worker, batch, name):
    return batch.read(worker.store, name)[name]


def test_with_the_same_tokenizer_it_is_the_reference_bit_for_bit():
    worker = small.policy(InlineStore())
    batch = small.experience(worker)
    _, found = followed(worker, teacher(worker, small.TOKENIZER), batch)
    plain = reference(worker).logprobs(batch)
    mask = column(worker, batch, "mask").values
    ours, theirs = (column(worker, each, "ref_logprobs").values for each in (found, plain))
    assert np.array_equal(ours, theirs) and theirs.any()
    assert np.array_equal(column(worker, found, CHUNK_TOKENS).values, mask.astype(np.float32))
    assert np.array_equal(column(worker, found, "mask").values, mask) and not found[UNALIGNED].any()
    assert found["prefix"].tolist() == batch["prefix"].tolist()


def test_a_teacher_s_own_tokens_are_scored_and_what_it_lacks_is_out_of_the_mask():
    worker = small.policy(InlineStore())
    batch = small.experience(worker)
    model = Decoder(replace(small.config(), vocab_size=OTHERS.vocab_size))
    model.init_weights_(7)
    frozen = teacher(worker, OTHERS, model, most=int(batch["length"].max()) - 1)
    theirs, found = followed(worker, frozen, batch)
    tokens, mask, said = (column(worker, theirs, name) for name in ("tokens", "mask", "ref_logprobs"))
    alone = packed_logprobs(model, tokens, mask.values, max_tokens=4096)
    np.testing.assert_allclose(said.values, alone, atol=1e-5)
    assert theirs["length"].tolist() == tokens.lengths.tolist() and theirs["length"].max() == frozen.translator.most
    before, kept = (column(worker, each, "mask") for each in (batch, found))
    lost = [int((a != 0).sum() - (b != 0).sum()) for a, b in zip(before.rows(), kept.rows())]
    assert found[UNALIGNED].tolist() == lost and any(lost)
    how = small.algorithm(advantage="distill", loss="reinforce", options={"align": "characters"})
    whole = worker.advantages(found, how)
    ready = column(worker, whole, "advantages").values
    assert not ready[kept.values == 0].any() and ready[kept.values != 0].any()
    worker.update(whole, how)


# ---- several ----


class Counted(Decoder):
    """A decoder that counts its passes."""

    passes = 0

    def forward(self, *args, **how):
        self.passes += 1
        return super().forward(*args, **how)


def test_each_row_has_the_log_probs_of_its_own_teacher_and_the_others_compute_nothing():
    worker = small.policy(InlineStore())
    batch = worker.logprobs(small.experience(worker))
    batch = batch.with_rows(prompt=np.arange(len(batch)) % 3)
    models = []
    for seed in (7, 8, 9):
        models.append(Counted(small.config()))
        models[-1].init_weights_(seed)
    settings = {"temperature": worker.temperature, "micro_tokens": worker.engine.micro_tokens, "parity": False}
    names = ("a", "b", "idle")
    group = TeachersWorker(
        {
            name: ReferenceWorker(ShardedModel.alone(model.requires_grad_(False)), worker.store, **settings)
            for name, model in zip(names, models)
        }
    )
    followed, metrics, told = np.array([0, 1, 0], np.int16), Metrics(), list[tuple[int, int, str]]()
    log = SimpleNamespace(metrics=metrics, add_unaligned=lambda *counts: told.append(counts))
    teachers = [ChosenTeacher(name, "", "", False) for name in names]
    found = each_by_its_own(batch, group, teachers, followed, log)
    for name in batch.rows:
        np.testing.assert_array_equal(found[name], batch[name], name)
    columns = found.read(worker.store, "tokens", "mask", "old_logprobs", "ref_logprobs")
    tokens, mask, own, said = columns.values()
    mine, gaps, counts = followed[batch["prompt"]], {name: 0.0 for name in names}, dict.fromkeys(names, 0)
    assert [model.passes > 0 for model in models] == [True, True, False]
    for row, number in enumerate(mine):
        ids, chosen = tokens.take(np.array([row])), mask.rows()[row]
        alone = packed_logprobs(models[number], ids, chosen, max_tokens=4096, temperature=worker.temperature)
        np.testing.assert_allclose(said.rows()[row], alone, atol=1e-5)
        gaps[names[number]] += float((own.rows()[row] - alone)[chosen != 0].sum())
        counts[names[number]] += int((chosen != 0).sum())
    values = metrics.values()
    for number, name in enumerate(names):
        assert values[f"reference/rows/{name}"] == (mine == number).sum()
        if counts[name]:
            assert values[f"reference/kl/{name}"] == pytest.approx(gaps[name] / counts[name], abs=1e-5)
            assert values[f"reference/unaligned/{name}"] == 0
    assert not told
    aligned = [teachers[0], teachers[1]._replace(aligns=True)]
    group.aligned = lambda part, theirs, name: TeachersWorker.aligned(group, part, theirs, name).with_rows(
        unaligned=np.ones(len(part), np.int32)
    )
    each_by_its_own(batch, group, aligned, followed, log)
    tokens = [int(batch["completion"][mine == number].sum()) for number in (0, 1)]
    assert told == [(0, tokens[0], "a"), ((mine == 1).sum(), tokens[1], "b")]


def test_a_batch_without_rows_has_the_columns_of_a_teacher():
    worker = small.policy(InlineStore())
    batch = worker.logprobs(small.experience(worker)).select(np.zeros(0, np.int64))
    group = TeachersWorker({"a": reference(worker)})
    teachers = [ChosenTeacher("a", "", "", False)]
    found = each_by_its_own(batch, group, teachers, np.zeros(99, np.int16), SimpleNamespace(metrics=Metrics()))
    assert len(found) == 0 and "ref_logprobs" in found.payload
