"""How much a pass is: tokens, squares and FLOPs of each micro-batch, against counts one by one and torch's counter."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.training.cutting import micros
from tests.training.test_engine import CONFIG, batch, engine, model
from tests.training.test_packed import SAMPLES, group
from tests.training.test_packed import batch as packed
from tilth.analysis.read import read_events
from tilth.core.batch import Jagged
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.plan.shape import Flops, attended, pass_flops, sequence_flops
from tilth.trace import recorder, span
from tilth.training import rate
from tilth.training.engine import negative_log_likelihood
from tilth.training.packed import WorkAmounts, packed_logprobs, packed_values

CPU = torch.device("cpu")
SHAPE = DecoderConfig(vocab_size=10, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2)
MODEL = Decoder(SHAPE)


@contextlib.contextmanager
def recorded(folder, into: list):
    """The events of the block, in the order in which they began."""
    with recorder.to(folder):
        yield
    into += read_events(folder).sort_by("start").to_pylist()


def looked_at(micro) -> int:
    """Pairs counted one by one: the tokens of each branch see its prompt and those before them in the branch."""
    if micro.trees is None:
        return sum(place + 1 for n in micro.lengths.tolist() for place in range(n))
    seen, at = 0, 0
    for n in micro.trees.lengths.tolist():
        branch = micro.trees.branch[at : at + n].tolist()
        seen += sum(sum(b in (0, own) for b in branch[: i + 1]) for i, own in enumerate(branch))
        at += n
    return seen


@given(SAMPLES, st.integers(1, 40), st.booleans())
def test_work_is_what_one_counts(samples, most, share):
    tokens, mask = packed(samples)
    total = 0
    for _, micro in micros(tokens, mask, {}, most, CPU, share=share):
        work, pairs = WorkAmounts.of(MODEL, micro), looked_at(micro)
        assert micro.pairs == pairs and work.tokens == micro.computed
        assert work.squares == 2 * pairs - work.tokens
        assert work.flops == pass_flops(SHAPE, work.tokens, pairs)
        total += work.squares
    if not share:
        assert total == sum(int(n) ** 2 for n in tokens.lengths)


def test_squares_of_a_shared_prompt():
    """A prompt of 6 and four samples of 1: 36 and four times 7^2 - 6^2."""
    tokens, mask = packed(group([1, 2, 3, 4, 5, 6], [[7], [8], [9], [7]]))
    works = {s: [WorkAmounts.of(MODEL, m) for _, m in micros(tokens, mask, {}, 100, CPU, share=s)] for s in (0, 1)}
    assert [(w.tokens, w.squares) for w in works[0]] == [(28, 4 * 49)]
    assert [(w.tokens, w.squares) for w in works[1]] == [(10, 36 + 4 * 13)]


@given(st.lists(st.integers(0, 30), max_size=6), st.booleans())
def test_a_pass_over_sequences_is_that_of_their_tokens_and_pairs(lengths, head):
    found = pass_flops(SHAPE, sum(lengths), attended(np.array(lengths, np.int64)), head)
    if head:
        assert found == sequence_flops(SHAPE, np.array(lengths, np.int64))
    else:
        less = 2.0 * SHAPE.vocab_size * SHAPE.hidden_size * sum(lengths)
        assert found.forward == pytest.approx(sequence_flops(SHAPE, np.array(lengths, np.int64)).forward - less)
    assert found.backward == 2 * found.forward and (sum(lengths) or found == Flops(0.0, 0.0))


@pytest.mark.parametrize("value", [False, True])
def test_products_with_weights_are_those_that_torch_counts(value):
    """The counter adds up what each kernel does; attention is left out, for its kernels compute masked pairs too."""
    made = ValueModel(model()) if value else model()
    with FlopCounterMode(display=False) as counter:
        hidden = made(torch.arange(9), PackedContext([4, 5]))
        found = hidden.sum() if value else (hidden @ made.head_weight.T).sum()
        found.backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op))
    expected = pass_flops(CONFIG, 9, 0, head=not value).both
    assert counted == expected


def test_passes_of_an_update_say_how_much_they_are(tmp_path):
    trained, events = engine(micro_tokens=10), []
    tokens, mask = batch()[:2]
    with recorded(tmp_path, events), span("step", step=3):
        found = trained.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    passes = {op: [e for e in events if e["op"] == op] for op in ("forward", "backward")}
    assert len(passes["forward"]) == len(passes["backward"]) > 2
    for there, back in zip(passes["forward"], passes["backward"]):
        assert [there[k] for k in ("tokens", "squares", "micro_batch", "step")] == [
            back[k] for k in ("tokens", "squares", "micro_batch", "step")
        ]
        assert back["flops"] == 2 * there["flops"] > 0
    assert [e["micro_batch"] for e in passes["forward"]] == list(range(len(passes["forward"])))
    assert sum(e["tokens"] for e in passes["forward"]) == found.computed == found.tokens
    assert sum(e["squares"] for e in passes["forward"]) == int((tokens.lengths**2).sum())
    assert found.flops == pytest.approx(sum(e["flops"] for e in events), rel=1e-12)
    assert found.flops == pytest.approx(sequence_flops(CONFIG, tokens.lengths).both, rel=1e-12)


def test_an_update_on_nothing_is_no_work():
    tokens = Jagged.with_lengths(np.zeros(0, np.int64), np.zeros(0, np.int64))
    found = engine().update(tokens, np.zeros(0, np.uint8), {}, negative_log_likelihood(1.0))
    assert (found.flops, found.computed) == (0, 0)


@pytest.mark.parametrize("value", [False, True])
def test_passes_without_a_gradient_are_told_too(tmp_path, value):
    tokens, mask = packed(group([1, 2, 3, 4, 5, 6], [[7], [8], [9], [7]]) + group([1], [[2] * 7]))
    used, events = model(SHAPE), []
    used = ValueModel(Decoder(SHAPE)) if value else used
    with recorded(tmp_path, events), span("logprobs"):
        found = (packed_values if value else packed_logprobs)(used, tokens, mask, max_tokens=12)
    assert len(found) == len(mask)
    passes = [e for e in events if e["op"] == "infer"]
    assert [(e["micro_batch"], e["tokens"], e["squares"]) for e in passes] == [(0, 10, 88), (1, 8, 64)]
    pairs = [(88 + 10) // 2, (64 + 8) // 2]
    assert [e["flops"] for e in passes] == [pass_flops(SHAPE, e["tokens"], p, not value).forward
                                            for e, p in zip(passes, pairs)]  # fmt: skip
    assert {e["op"] for e in events} == {"logprobs", "infer"}


def test_a_shared_prompt_is_work_once():
    tokens, mask = packed(group([1, 2, 3, 4, 5, 6], [[7], [8], [9], [7]]))
    trained = engine(micro_tokens=100, config=SHAPE)
    done = trained.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    assert done.computed == 10 and done.flops == pass_flops(SHAPE, 10, 49).both
    assert done.flops < sequence_flops(SHAPE, tokens.lengths).both / 2


def test_a_link_is_measured_in_its_slower_direction(monkeypatch):
    monkeypatch.setattr(rate, "COPIED", 1 << 20)
    assert 1e7 < rate.host_bandwidth(torch.device("cpu")) < 1e13
    seconds = iter([0.5, 0.25])
    monkeypatch.setattr(rate, "_least_seconds", lambda work, device: next(seconds))
    assert rate.host_bandwidth(torch.device("cpu")) == (1 << 20) / 0.5


def test_a_copy_in_memory_reads_and_writes(monkeypatch):
    monkeypatch.setattr(rate, "COPIED", 1 << 20)
    assert 1e7 < rate.memory_bandwidth(torch.device("cpu")) < 1e13
    monkeypatch.setattr(rate, "_least_seconds", lambda work, device: 0.5)
    assert rate.memory_bandwidth(torch.device("cpu")) == 2 * (1 << 21) / 0.5
