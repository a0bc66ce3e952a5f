"""Queues and admission, without tensors."""

import numpy as np

from tests.engines.reference import check_blocks
from tilth.engines.blocks import BlockManager
from tilth.engines.request import Request, SamplingParams, SequenceState
from tilth.engines.scheduler import PrefillJob, Scheduler


def scheduler(blocks=100, rows=100):
    return Scheduler(BlockManager(blocks), rows)


def answers(*prompts, first=0):
    made = [SequenceState.start(Request(first + i, p, SamplingParams(max_tokens=4))) for i, p in enumerate(prompts)]
    return made


def text(n, value=1):
    return np.full(n, value)


class Computed:
    """A batch whose prompts are computed at once."""

    def __init__(self, prompts):
        self.prompts = prompts
        for p in prompts:
            p.computed = len(p.tokens)


def ids(found):
    return [[a.request.id for a in p.answers] for p in found]


def test_equal_prompts_side_by_side_are_one():
    s = scheduler()
    s.waiting.extend(answers(text(20), text(20), text(21), text(20)))
    assert ids(s.admit(1000, 0, 0)) == [[0, 1], [2], [3]]
    assert not s.waiting


def test_prompts_share_a_pass_within_budget_rows_and_a_quarter_of_their_length():
    s = scheduler()
    s.waiting.extend(answers(*(text(40, v) for v in range(5))))
    assert ids(s.admit(100, 0, 0)) == [[0], [1]]
    assert ids(s.admit(1000, 98, 0)) == [[2], [3]]
    s.waiting.extend(answers(text(200, 7), first=10))
    assert ids(s.admit(1000, 0, 0)) == [[4]]
    assert ids(s.admit(30, 0, 0)) == [[10]], "too long for the budget: alone, in chunks"


def test_admission_looks_at_each_length_once(monkeypatch):
    looked, remaining = [], PrefillJob.remaining
    monkeypatch.setattr(PrefillJob, "remaining", property(lambda job: looked.append(job) or remaining.fget(job)))
    s = scheduler(blocks=10_000, rows=1000)
    s.waiting.extend(answers(*(text(20, v) for v in range(100))))
    assert len(s.admit(10_000, 0, 0)) == 100
    assert len(looked) <= 200


def test_admission_leaves_a_reserve_while_others_run():
    s = scheduler(blocks=4)
    s.waiting.extend(answers(text(64)))
    assert s.admit(100, 1, 0) == []
    assert ids(s.admit(100, 0, 0)) == [[0]]


def test_each_sample_gets_a_table_and_the_last_takes_the_prompts():
    s = scheduler()
    s.waiting.extend(answers(*[text(20)] * 3))
    s.batch = Computed(s.admit(100, 0, 0))
    prompt = s.batch.prompts[0]
    own = list(prompt.table.blocks)
    s.computed()
    placed = s.place(98)
    assert [a.request.id for _, a in placed] == [0, 1] and s.queued == 1
    placed += s.place(0)
    tables = [a.table for _, a in placed]
    assert tables[2].blocks == own
    assert all(t.blocks[0] == own[0] for t in tables) and len({t.blocks[1] for t in tables}) == 3
    assert [a.order for _, a in placed] == [0, 1, 2]
    assert not check_blocks(s.blocks, tables)


def test_without_room_to_fork_one_goes_alone():
    s = scheduler(blocks=2)
    s.waiting.extend(answers(*[text(20)] * 3))
    s.batch = Computed(s.admit(100, 0, 0))
    s.computed()
    assert [a.request.id for _, a in s.place(0)] == [0]
    assert [a.request.id for a in s.waiting] == [1, 2] and not s.ready


def test_prompts_yield_newest_first_and_keep_their_order():
    s = scheduler()
    s.waiting.extend(answers(text(20), text(20), text(20, 2), text(20, 3)))
    s.batch = Computed(s.admit(60, 0, 0))
    s.computed()
    assert ids(s.ready) == [[0, 1], [2], [3]]
    assert s.yield_prompt() and s.yield_prompt() and s.yield_prompt() and not s.yield_prompt()
    assert [a.request.id for a in s.waiting] == [0, 1, 2, 3]
    assert not check_blocks(s.blocks, [])


def test_removed_wherever_it_waits():
    s = scheduler()
    s.waiting.extend(answers(text(20), text(20), text(20, 2), text(300, 3)))
    s.batch = Computed(s.admit(60, 0, 0))
    assert s.remove(2).request.id == 2  # its prompt stays in the pass, and is dropped after it
    s.computed()
    assert ids(s.ready) == [[0, 1]]
    assert [s.remove(i).request.id for i in (3, 0, 1)] == [3, 0, 1]
    assert s.remove(9) is None and s.queued == 0
    assert not check_blocks(s.blocks, [])


def test_remaining_counts_what_is_not_cached():
    assert PrefillJob(text(10), text(10), answers(text(10)), computed=3).remaining == 7
