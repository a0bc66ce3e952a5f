"""Block accounting under random traces: nothing leaks, nothing is shared that should not be, hashes never lie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engines.reference import check_blocks
from tests.errors import raises
from tests.examples import examples
from tilth.engines.blocks import BlockError, BlockManager

SIZE = 4


def tokens(*values):
    return np.array(values, np.int64)


class Trace(RuleBasedStateMachine):
    """Sequences over two symbols come, fork, grow and go; a shadow records what each block must hold."""

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(12, SIZE, max_cached=7)
        self.open = []  # [table, tokens, computed]
        self.store = {}  # slot -> (version, tokens up to the end of the block)
        self.version = 0

    def save(self, entry):
        table, text, computed = entry
        for index, slot in self.blocks.register(table, text, computed, self.version):
            assert (index + 1) * SIZE <= computed
            self.store[slot] = (self.version, text[: (index + 1) * SIZE].tolist())

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=20), spare=st.integers(0, 2))
    def start(self, text, spare):
        text, free = tokens(*text), self.blocks.free
        table = self.blocks.open(text, self.version, spare)
        if table is None:
            assert self.blocks.free == free
            assert free - spare < self.blocks.blocks_for(len(text))
            return
        assert len(table.blocks) == self.blocks.blocks_for(len(text))
        assert table.cached < len(text), "at least one token must be computed"
        for i, slot in enumerate(self.blocks.slots(table)):
            assert self.store[slot] == (self.version, text[: (i + 1) * SIZE].tolist())
        self.open.append([table, text, table.cached])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def compute(self, data):
        entry = data.draw(st.sampled_from(self.open))
        entry[2] = data.draw(st.integers(entry[2], len(entry[1])))
        self.save(entry)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fork(self, data):
        table, text, computed = data.draw(st.sampled_from(self.open))
        if computed < len(text):
            return
        free = self.blocks.free
        copy = self.blocks.fork(table, len(text))
        partial = len(text) % SIZE > 0
        if copy is None:
            assert partial and not free
            return
        assert self.blocks.free == free - partial
        full = len(text) // SIZE
        assert copy.blocks[:full] == table.blocks[:full]
        assert not set(copy.blocks[full:]) & set(table.blocks)
        self.open.append([copy, text, computed])

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data, more):
        entry = data.draw(st.sampled_from(self.open))
        before, free = list(entry[0].blocks), self.blocks.free
        text = np.concatenate([entry[1], more])
        if self.blocks.extend(entry[0], len(text)):
            entry[1] = text
            assert len(entry[0].blocks) == self.blocks.blocks_for(len(text))
            assert entry[0].blocks[: len(before)] == before
        else:
            assert entry[0].blocks == before and self.blocks.free == free

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data):
        entry = data.draw(st.sampled_from(self.open))
        self.open.remove(entry)
        self.blocks.close(entry[0])
        assert entry[0].blocks == []

    @rule()
    def new_weights(self):
        self.version += 1
        self.blocks.flush()

    @invariant()
    def consistent(self):
        assert not check_blocks(self.blocks, [e[0] for e in self.open])
        assert self.blocks.free + self.blocks.used == self.blocks.num_blocks

    @invariant()
    def written_blocks_are_not_shared(self):
        """The block that a sequence writes to next belongs to it alone."""
        holders = [b for table, _, _ in self.open for b in table.blocks]
        for table, text, computed in self.open:
            for block in (
                table.blocks[computed // SIZE :] if computed < len(text) else table.blocks[len(text) // SIZE :]
            ):
                assert holders.count(block) == 1


TestTrace = Trace.TestCase
TestTrace.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def filled(text, blocks=None):
    blocks = blocks or BlockManager(8, SIZE)
    table = blocks.open(text, 0)
    assert table is not None
    blocks.register(table, text, len(text), 0)
    return blocks, table


def test_a_hit_revives_freed_blocks_and_leaves_one_token():
    text = tokens(*range(8))
    blocks, table = filled(text)
    first = list(table.blocks)
    blocks.close(table)
    again = blocks.open(text, 0)
    assert again.cached == 4  # the second block would leave nothing to compute
    assert again.blocks[0] == first[0]
    longer = blocks.open(np.append(text, 9), 0)
    assert longer.cached == 8 and longer.blocks[:2] == first


def test_nothing_is_found_before_it_is_computed():
    blocks = BlockManager(8, SIZE)
    text = tokens(*range(9))
    table = blocks.open(text, 0)
    assert blocks.open(text, 0).cached == 0
    assert blocks.register(table, text, 3, 0) == []
    assert [i for i, _ in blocks.register(table, text, 7, 0)] == [0]
    assert blocks.open(text, 0).cached == 4


def test_another_version_or_parent_is_another_block():
    text = tokens(1, 1, 1, 1, 2, 2, 2, 2, 3)
    blocks, _ = filled(text)
    assert blocks.open(text, 1).cached == 0
    assert blocks.open(tokens(2, 2, 2, 2, 3), 0).cached == 0


def test_roots_survive_longest():
    blocks, table = filled(tokens(*range(8)), BlockManager(3, SIZE))
    blocks.close(table)
    other = blocks.open(tokens(*[7] * 8), 0)  # takes the blank block and evicts one registered
    blocks.close(other)
    assert blocks.open(tokens(*range(9)), 0).cached == 4


def test_a_full_store_forgets_the_oldest_first():
    blocks = BlockManager(8, SIZE, max_cached=2)
    for start in (0, 10, 20):
        _, table = filled(tokens(*range(start, start + 4)), blocks)
        blocks.close(table)
    found = [blocks.open(tokens(*range(s, s + 4), 99), 0).cached for s in (0, 10, 20)]
    assert found == [0, 4, 4]


def test_reserve_is_respected():
    blocks = BlockManager(4, SIZE)
    assert blocks.open(tokens(*range(12)), 0, spare=2) is None
    assert blocks.open(tokens(*range(12)), 0, spare=1) is not None


def test_freeing_twice_is_named():
    blocks, table = filled(tokens(1, 2, 3, 4, 5))
    held = list(table.blocks)
    blocks.close(table)
    table.blocks = held
    with raises(BlockError, "close"):
        blocks.close(table)


@pytest.mark.parametrize(
    "harm, key",
    [
        (lambda b, t: t.blocks.pop(), "free"),
        (lambda b, t: t.blocks.append(t.blocks[0]), "refs"),
        (lambda b, t: b._blank.append(t.blocks[0]), "free"),
        (lambda b, t: b._registered.clear(), "digest"),
        (lambda b, t: setattr(b._blocks[t.blocks[1]], "slot", b._blocks[t.blocks[0]].slot), "slot"),
    ],
)
def test_check_sees_every_kind_of_damage(harm, key):
    blocks, table = filled(tokens(*range(8)))
    assert not check_blocks(blocks, [table])
    harm(blocks, table)
    assert check_blocks(blocks, [table]) == key


@given(st.lists(st.integers(0, 3), min_size=0, max_size=40), st.integers(-1, 3))
def test_chain_depends_on_every_earlier_token(values, flip):
    blocks = BlockManager(1, SIZE)
    text = tokens(*values)
    count = len(text) // SIZE
    plain = [d for d, _ in blocks.chain(text, 0, count)]
    assert len(set(plain)) == count
    if 0 <= flip < len(text):
        changed = text.copy()
        changed[flip] += 1
        assert not set(plain) & {d for d, _ in blocks.chain(changed, 0, count)}
