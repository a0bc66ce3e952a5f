"""Suffix drafts against a search by brute force through all that was said."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.errors import raises
from tests.examples import examples
from tilth.engines.draft import Draft, DraftError
from tilth.engines.suffix import PAUSE, SuffixDrafter, SuffixTree

BOTH = pytest.mark.parametrize("branches", [False, True])
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def raw(tokens):
    return np.array(tokens, np.int32).tobytes()


def lengths_of(depth):
    return sorted({depth, *(n for n in (1, 2, 4, 8, 16, 32) if n <= depth)}, reverse=True)


def behind(texts, run):
    """How often each token came behind a run, by a search of all places. texts: (tokens, first counted one)."""
    places = ((text, at) for text, start in texts for at in range(max(start, len(run)), len(text)))
    return Counter(text[at] for text, at in places if text[at - len(run) : at] == run)


def longest(texts, context, depth):
    for length in lengths_of(depth):
        if length <= len(context) and (found := behind(texts, context[-length:])):
            return length, found
    return 0, Counter()


def follow(tree, context):
    """Continuations of a text, each of the text with those before it, until nothing is known."""
    while found := tree.guesses(context):
        yield found[0]
        context = tree.longer(context, found[0].token)


def check_follows(tree, texts, context, depth, steps=6):
    """A tree follows a text to where a search does, with the same counts."""
    for found, _ in zip(follow(tree, raw(context)), range(steps)):
        length, counts = longest(texts, context, depth)
        assert (found.length, found.count, found.total) == (length, max(counts.values()), counts.total())
        assert counts[found.token] == found.count
        context = [*context, found.token]
    return context


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(TEXT, max_size=5), TEXT, st.integers(1, 9), st.data())
def test_a_tree_is_a_search_through_all_texts(texts, context, depth, data):
    tree, known = SuffixTree(depth), []
    for text in texts:
        start = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(start, len(text)))  # appended in two parts
        tree.add(raw(text[:cut]), start)
        tree.add(bytearray(raw(text)), cut)
        known.append((text, start))
    assert tree.tokens == sum(len(text) - start for text, start in known)
    whole = check_follows(tree, known, context, depth)
    if len(whole) < len(context) + 6:
        assert longest(known, whole, depth) == (0, Counter())
    for length in range(1, 1 + min(depth, len(context))):
        run, held = context[-length:], length in lengths_of(depth)
        assert tree.counts(raw(run)) == (behind(known, run) if held else {})


def test_a_search_that_counts_one_place_too_many_is_seen():
    tree = SuffixTree(2)
    tree.add(raw([0, 1, 0, 1]), 0)
    with pytest.raises(AssertionError):
        check_follows(tree, [([0, 1, 0, 1, 0, 1], 0)], [0], 2)


class Flight(RuleBasedStateMachine):
    """Rows of two prompts come, speak and go; what is at rest is bounded, and trees hold what they must."""

    DEPTH, HISTORY, KEPT = 4, 60, 25
    PROMPTS = ([0, 1, 2, 0, 1, 2], [1])

    def __init__(self):
        super().__init__()
        self.drafter = SuffixDrafter(self.DEPTH, self.HISTORY, self.KEPT)
        self.rows, self.count = {}, 0  # id -> [prompt, completion]
        self.rest = []  # (prompt, completion), the oldest first
        self.planted = {}  # prompt -> completions that were at rest when its tree was made, and have come since

    @rule(which=st.integers(0, 1), said=st.lists(st.integers(0, 2), max_size=6))
    def begin(self, which, said):
        if not any(row[0] == which for row in self.rows.values()):
            some, room = [], self.KEPT
            for prompt, text in reversed(self.rest):
                if prompt == which and room > 0:
                    some.append(text)
                    room -= len(text)
            self.planted[which] = some
        self.drafter.begin(self.count, np.array(self.PROMPTS[which]), np.array(said, np.int64))
        self.rows[self.count] = [which, said]
        self.count += 1

    @rule(number=st.integers(0, 99), said=st.lists(st.integers(0, 2), min_size=1, max_size=6), asks=st.booleans())
    def speak(self, number, said, asks):
        if not self.rows:
            return
        id = sorted(self.rows)[number % len(self.rows)]
        if asks:
            self.check(id, self.drafter.propose([id], [3], 0.0)[0].tokens)
        self.drafter.accept([id], [np.array(said)])
        self.rows[id][1] = [*self.rows[id][1], *said]

    def check(self, id, draft):
        """The draft follows what was said to the prompt; of other rows what they had said when they last asked."""
        which, said = self.rows[id]
        row = self.drafter._rows[id]
        prompt = self.PROMPTS[which]
        last = prompt[-self.DEPTH :]
        texts = [(prompt, 1), *((last + text, len(last)) for text in self.planted[which])]
        for other, (its, text) in self.rows.items():
            if its == which:
                counted = self.drafter._rows[other].counted
                texts.append(((last + text)[:counted], len(last)))
        assert len(draft) <= 3
        if row.left < row.pause or not row.pause:
            tree = self.drafter._trees[row.prompt]
            context = last + said
            assert check_follows(tree, texts, context, self.DEPTH, steps=3)[len(context) :] == list(draft)

    @rule(number=st.integers(0, 99))
    def leave(self, number):
        if not self.rows:
            return
        id = sorted(self.rows)[number % len(self.rows)]
        which, said = self.rows.pop(id)
        self.drafter.forget(id)
        self.rest.append((which, said))
        if any(row[0] == which for row in self.rows.values()):
            self.planted[which].append(said)
        size = sum(len(text) + min(self.DEPTH, len(self.PROMPTS[which])) for which, text in self.rest)
        while size > self.HISTORY:
            which, text = self.rest.pop(0)
            size -= len(text) + min(self.DEPTH, len(self.PROMPTS[which]))
        assert self.drafter.tokens == size <= self.HISTORY
        assert len(self.drafter._trees) == len({row[0] for row in self.rows.values()})


TestFlight = Flight.TestCase
TestFlight.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


def spoken(drafter, id, tokens, budget=8, least=0.5):
    """Say these tokens, with drafts; return (tokens, positions computed, passes)."""
    at = computed = passes = 0
    while at < len(tokens):
        draft = drafter.propose([id], [min(budget, len(tokens) - at - 1)], least)[0].tokens
        stand = next((i for i, token in enumerate(draft) if token != tokens[at + i]), len(draft))
        drafter.accept([id], [np.array(tokens[at : at + stand + 1])])
        at, computed, passes = at + stand + 1, computed + 1 + len(draft), passes + 1
    return computed, passes


@BOTH
def test_a_draft_branches_where_several_continuations_have_a_chance(branches):
    """After 1 2 came 3 4 three times, 5 6 twice and 7 once; the likeliest tokens come, what follows one behind it."""
    text = [n for more in ([3, 4], [5, 6], [3, 4], [7, 8], [5, 6], [3, 4]) for n in (1, 2, *more)]
    drafter = SuffixDrafter(2, branches=branches)
    drafter.begin(0, np.array([9]), np.array([*text, 1, 2]))
    (draft,) = drafter.propose([0], [4], 0.05)
    assert draft == (Draft([3, 4, 5, 7], [0, 1, 0, 0]) if branches else Draft([3, 4, 1], [0, 1, 2]))
    drafter.accept([0], [np.array([5, 6])])
    tries = {kind: tally.tries for kind, tally in drafter._tallies.items()}
    assert tries[2, 2, False] == 3 and tries.get((2, 1, True)) == (3 if branches else None)
    assert drafter._rows[0].fortune.tries > 4


def test_what_was_said_before_is_said_in_few_passes():
    drafter, prompt = SuffixDrafter(8), np.arange(5)
    text = np.random.default_rng(0).integers(0, 1000, 200).tolist()
    for id in range(3):
        drafter.begin(id, prompt, np.zeros(0, np.int64))
        computed, passes = spoken(drafter, id, text)
        drafter.forget(id)
        if not id:
            assert passes == 200 and computed < 205
    assert passes < 40 and computed < 240


def test_a_row_is_a_draft_of_its_group():
    """A second row of a prompt follows one that is still in flight."""
    drafter, text = SuffixDrafter(8), list(range(50, 150))
    for id in range(2):
        drafter.begin(id, np.arange(5), np.zeros(0, np.int64))
    drafter.accept([0], [np.array(text)])
    drafter.propose([0], [1], 0.0)
    drafter.begin(0, np.arange(5), np.array([*text, 7]))  # a token beside drafts, as after a preemption
    assert spoken(drafter, 1, text)[1] < 30


@BOTH
def test_drafts_that_are_not_worth_it_end_and_begin_again(branches):
    rng, drafter = np.random.default_rng(0), SuffixDrafter(4, branches=branches)
    drafter.begin(0, np.array([9]), np.zeros(0, np.int64))
    computed, _ = spoken(drafter, 0, rng.integers(0, 4, 400).tolist())
    late, _ = spoken(drafter, 0, rng.integers(0, 4, 400).tolist())
    assert computed < 520 and late < 420
    assert drafter._rows[0].pause <= PAUSE
    _, passes = spoken(drafter, 0, [0, 1, 2, 3] * 100)
    assert passes < 120


def test_two_drafts_without_a_verdict_are_refused():
    drafter = SuffixDrafter(4)
    drafter.begin(0, np.array([9]), np.array([1]))
    drafter.propose([0], [1], 0.0)
    with raises(DraftError, "draft.open"):
        drafter.propose([0], [1], 0.0)
    drafter.accept([0], [np.array([1])])
    drafter.propose([0], [1], 0.0)
    drafter.forget(0)
    drafter.forget(0)


def test_calls_decide_alone():
    """Two drafters with the same calls make the same drafts."""
    text = np.random.default_rng(1).integers(0, 3, 300).tolist()
    pair = [SuffixDrafter(8), SuffixDrafter(8)]
    for drafter in pair:
        drafter.begin(0, np.array([1, 2]), np.zeros(0, np.int64))
    assert spoken(pair[0], 0, text) == spoken(pair[1], 0, text)
