"""What the spans of roles say was done: tokens and squares of their rows, and the loading of data."""

import numpy as np
import pytest

from tests.roles import small
from tests.roles.test_documents import worker as documents
from tests.roles.test_pairs import PROMPTS as PAIRS
from tests.training.test_work import recorded
from tilth.cluster.backends.inline import InlineStore
from tilth.core.batch import Batch
from tilth.engines.request import Request, SamplingParams
from tilth.roles.experience import on_rows

__all__ = ["documents"]


@pytest.fixture
def told(tmp_path):
    """The sums of tokens and squares of an operation's events in a block, and their number."""
    events: list[dict] = []

    def sums(op):
        mine = [e for e in events if e["op"] == op]
        return sum(e["tokens"] for e in mine), sum(e["squares"] for e in mine), len(mine)

    sums.block = lambda: recorded(tmp_path / "events", events)
    return sums


def squares(lengths) -> int:
    return sum(int(n) ** 2 for n in lengths)


def test_rows_whose_squares_do_not_fit_an_int32():
    some = on_rows("update", Batch({"length": np.array([50_000, 70_000, 1], np.int32)}, {}))
    assert (some.tokens, some.squares) == (120_001, 50_000**2 + 70_000**2 + 1)
    none = on_rows("update", Batch({"length": np.zeros(0, np.int32)}, {}))
    assert (none.tokens, none.squares) == (0, 0)


def test_an_update_and_its_scores_are_of_all_rows(told):
    worker = small.policy()
    rows = small.experience(worker)
    with told.block():
        scored = worker.logprobs(worker.advantages(rows, small.HOW))
        worker.logprobs(scored, squares=True)
        worker.update(scored, small.HOW)
    whole = int(rows["length"].sum()), squares(rows["length"])
    assert told("update") == (*whole, 1) and told("logprobs") == (2 * whole[0], 2 * whole[1], 2)
    assert told("forward") == told("backward") and told("forward")[0] <= whole[0]
    assert told("infer")[:2] == (2 * told("forward")[0], 2 * told("forward")[1])


def test_flops_of_an_update_are_those_of_its_passes(tmp_path):
    worker, events = small.policy(micro_tokens=30), []
    rows = worker.advantages(small.experience(worker), small.HOW)
    with recorded(tmp_path, events):
        worker.update(rows, small.HOW)
    (update,) = [e for e in events if e["op"] == "update"]
    passes = [e for e in events if e["op"] in ("forward", "backward")]
    assert update["flops"] == pytest.approx(sum(e["flops"] for e in passes)) and len(passes) > 2


def test_generating_is_the_completions_and_what_they_add_to_the_squares(told):
    speaker = small.rollout(InlineStore())
    speaker.receive(small.policy().weights(), 0)
    with told.block():
        rows = small.generated(speaker, small.asked(speaker.store, (3, 8, 41), 4, 0))
    written, prompts = rows["completion"].astype(int), rows["length"].astype(int) - rows["completion"]
    assert told("generate")[:2] == (int(written.sum()), squares(rows["length"]) - squares(prompts))
    assert told("load") == (sum(dict(zip(rows["prompt"].tolist(), prompts.tolist())).values()), 0, 1)
    check_engine(told, dict(zip(rows["prompt"].tolist(), prompts.tolist())).values(), prompts, rows["length"])


def check_engine(told, computed, prompts, lengths) -> None:
    """Prompts are computed once for all their samples; of each sample all but its last token goes through decoding."""
    assert told("prefill")[:2] == (sum(computed), squares(computed))
    decoded = np.asarray(lengths, int) - 1
    assert told("decode")[:2] == (int((decoded - prompts).sum()), squares(decoded) - squares(prompts))


@pytest.mark.parametrize("chunk", [4096, 7])
def test_chunks_of_a_long_prompt_have_the_squares_of_the_whole(told, chunk):
    from tests.engines.reference import make_engine, make_model

    engine = make_engine(make_model(), step_tokens=chunk)
    lengths = (40, 3, 17)
    asked = [
        Request(id=i, prompt=np.arange(n) % 5 + i, params=SamplingParams(5, 1.0), group=i, prompt_index=i)
        for i, n in enumerate(lengths)
    ]
    with told.block():
        found = engine.generate(asked)
    check_engine(told, lengths, np.array(lengths), [len(t.tokens) for t in found])
    assert told("prefill")[2] >= (6 if chunk == 7 else 1)


def test_data_that_become_tokens_are_loaded(told, documents):
    store = InlineStore()
    with told.block():
        examples = small.loader(store).examples([3, 99, 3])
        pairs = small.loader(store, PAIRS).pairs([0, 1])
        pieces = documents.documents(np.array([0]))
        held_out = documents.documents(np.array([1, 0, 2]), heldout=True)
    tokens = sum(int(made["length"].sum()) for made in (examples, pairs, pieces, held_out))
    assert told("load") == (tokens, 0, 4)
