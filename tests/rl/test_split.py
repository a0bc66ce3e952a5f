"""A batch split over workers, groups straddling them: every estimator honours its scope, every denominator is one.

Workers are threads here, with ``reduce`` and ``gather`` that meet at a barrier as collectives do; one test is of real
processes with ``ParallelDims.sum`` and ``ParallelDims.gather_rows``.
"""

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.rl.strategies import Drawn, batches, columns_for, pick_columns
from tilth import rl
from tilth.core.errors import ArgumentError, RecipeError, TokenCountError
from tilth.rl.advantages import Advantage, Rows, Tokens
from tilth.rl.registry import _ENTRIES, Scope, build

ESTIMATORS = rl.names()["advantages"]
AGGREGATIONS = rl.names()["aggregations"]
many = settings(max_examples=examples(40), deadline=None)


@dataclass
class Meeting:
    """Collectives of so many threads: the sum of vectors, and rows one behind another in the order of ranks."""

    workers: int
    sums: int = 0
    gathers: int = 0
    _given: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.workers, timeout=20)

    def _meet(self, rank: int, mine: Any) -> list[Any]:
        self._given[rank] = mine
        self._barrier.wait()
        found = [self._given[r] for r in range(self.workers)]
        self._barrier.wait()
        return found

    def reduce(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def summed(vector: torch.Tensor) -> torch.Tensor:
            assert vector.dtype == torch.float64
            self.sums += rank == 0
            return torch.stack(self._meet(rank, vector)).sum(0)

        return summed

    def gather(self, rank: int) -> Callable[[Any], Any]:
        def gathered(columns: Any) -> Any:
            self.gathers += rank == 0
            parts = self._meet(rank, dict(columns))
            assert all(list(p) == list(columns) for p in parts)
            return {name: np.concatenate([p[name] for p in parts]) for name in columns}

        return gathered

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each worker makes; an error of one of them is raised."""
        results: list[Any] = [None] * self.workers

        def on_a_thread(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:  # noqa: BLE001 - handed to the test, which raises it
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=on_a_thread, args=(rank,)) for rank in range(self.workers)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        wrong = [r for r in results if isinstance(r, Exception)]
        for error in sorted(wrong, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results


def estimate(batch: Drawn, name: str, **more: Any) -> rl.Estimate:
    more = further(batch, name) | more
    columns = {"lengths": batch.lengths, "mask": batch.mask, "groups": batch.groups}
    return rl.estimate(name, rewards=batch.rewards, **columns, **more)


def further(batch: Drawn, name: str) -> dict[str, torch.Tensor]:
    """Further columns of an estimator; a test's own ones it passes itself."""
    return {} if name in ("longer", "in_company") else columns_for(name, batch)


def parts_of(n: int, owner: list[int], workers: int) -> list[torch.Tensor]:
    """Rows of each worker; each in an order of its own, so that nothing relies on it."""
    return [torch.tensor([r for r in reversed(range(n)) if owner[r] == w], dtype=torch.int64) for w in range(workers)]


def split(batch: Drawn, name: str, parts: list[torch.Tensor], **options: Any) -> tuple[list[rl.Estimate], Meeting]:
    """The estimates of the workers that have these rows."""
    meeting, columns = Meeting(len(parts)), further(batch, name)

    def work(rank: int) -> rl.Estimate:
        rows = parts[rank]
        mine = batch.pick(rows)
        return rl.estimate(
            name,
            rewards=mine.rewards,
            lengths=mine.lengths,
            mask=mine.mask,
            groups=mine.groups,
            row=rows,
            reduce=meeting.reduce(rank),
            gather=meeting.gather(rank),
            **pick_columns(columns, batch, rows),
            **options,
        )

    return meeting.run(work), meeting


STRADDLING = Drawn(
    lengths=torch.tensor([3, 4, 2, 5, 3, 4]),
    mask=torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    rewards=torch.tensor([1.0, 0.25, 0.7, 0.1, float("nan"), 0.3]),
    groups=torch.tensor([5, 5, 5, -1, -1, 5]),
    seed=3,
)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("owner", [[0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0], [0] * 6, [1] * 6])
def test_two_workers_with_a_group_on_both_make_what_one_makes(name, owner):
    whole = estimate(STRADDLING, name)
    parts = parts_of(6, owner, 2)
    found, meeting = split(STRADDLING, name, parts)
    assert_same(whole, found, parts, exact=build("advantages", name, {}, Advantage).scope != "global moments")
    scope = build("advantages", name, {}, Advantage).scope
    gathers = {"rows": 1, "group tokens": 1 + (len(set(owner)) > 1)}.get(scope, 0)
    assert (meeting.gathers, meeting.sums > 0) == (gathers, scope == "global moments")


def assert_same(whole: rl.Estimate, found: list[rl.Estimate], parts: list[torch.Tensor], exact: bool, batch=STRADDLING):
    tolerance = 0.0 if exact else 1e-6
    for one, rows in zip(found, parts):
        index = batch.token_index(rows)
        torch.testing.assert_close(one.advantages, whole.advantages[index], atol=tolerance, rtol=tolerance)
        assert one.mask.equal(whole.mask[index])
        assert (one.returns is None) == (whole.returns is None)
        if one.returns is not None:
            assert one.returns.equal(whole.returns[index])  # made before whitening, so of own tokens alone


@many
@given(batches(), st.data(), st.sampled_from(ESTIMATORS), st.integers(1, 3))
def test_any_split_of_any_batch_is_the_whole(batch, data, name, workers):
    n = len(batch.lengths)
    owner = data.draw(st.lists(st.integers(0, workers - 1), min_size=n, max_size=n))
    parts = parts_of(n, owner, workers)
    found, _ = split(batch, name, parts)
    exact = build("advantages", name, {}, Advantage).scope != "global moments"
    assert_same(estimate(batch, name), found, parts, exact, batch)


def test_token_local_needs_no_other_worker():
    """GAE without whitening: a lone worker that would wait at a barrier for ever."""
    parts = parts_of(6, [0, 1, 0, 1, 0, 1], 2)
    found, meeting = split(STRADDLING, "gae", parts, whiten=False)
    assert meeting.sums == meeting.gathers == 0
    assert_same(estimate(STRADDLING, "gae", whiten=False), found, parts, exact=True)


def test_without_the_others_rows_a_straddling_group_is_wrong():
    """The test above can fail: advantages of each part on its own are others."""
    parts = parts_of(6, [0, 1, 0, 1, 0, 1], 2)
    whole = estimate(STRADDLING, "grpo")
    alone = [estimate(STRADDLING.pick(rows), "grpo") for rows in parts]
    index = STRADDLING.token_index(parts[0])
    assert not torch.allclose(alone[0].advantages, whole.advantages[index], atol=1e-2)


def test_whitening_without_the_others_is_wrong():
    parts = parts_of(6, [0, 1, 0, 1, 0, 1], 2)
    values = torch.nan_to_num(STRADDLING.column(1))
    index = STRADDLING.token_index(parts[0])
    alone = estimate(STRADDLING.pick(parts[0]), "gae", values=values[index])
    assert not torch.allclose(alone.advantages, estimate(STRADDLING, "gae").advantages[index], atol=1e-2)


def test_rewards_a_token_are_gathered_as_scores_of_rows():
    per_token = torch.where(STRADDLING.mask, torch.arange(21) / 7.0, torch.nan)
    whole = estimate(Drawn(STRADDLING.lengths, STRADDLING.mask, per_token, STRADDLING.groups, 3), "rloo")
    parts, meeting = parts_of(6, [1, 0, 1, 0, 1, 0], 2), Meeting(2)

    def work(rank: int) -> rl.Estimate:
        mine = STRADDLING.pick(parts[rank])
        mine.rewards = per_token[STRADDLING.token_index(parts[rank])]
        return estimate(mine, "rloo", row=parts[rank], gather=meeting.gather(rank))

    assert_same(whole, meeting.run(work), parts, exact=True)


def test_one_worker_needs_no_index():
    one = estimate(STRADDLING, "grpo", gather=lambda columns: columns)
    assert one.advantages.equal(estimate(STRADDLING, "grpo").advantages)


def test_rows_without_their_index_in_the_whole_batch_are_seen():
    meeting, parts = Meeting(2), parts_of(6, [0, 1, 0, 1, 0, 1], 2)
    with raises(TokenCountError, "row"):
        meeting.run(lambda rank: estimate(STRADDLING.pick(parts[rank]), "grpo", gather=meeting.gather(rank)))


def test_an_index_of_another_size():
    with raises(TokenCountError, "row.shape"):
        estimate(STRADDLING, "grpo", gather=lambda c: c, row=torch.arange(5))


# -- estimators of one's own -----------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    """Estimators of a user, for the time of a test."""
    before = dict(_ENTRIES["advantages"])

    @rl.register("advantages", "longer")
    class Longer(rl.advantages.RowAdvantage):
        """Weighs by tokens and by a column of its own."""

        @property
        def needs(self) -> tuple[str, ...]:
            return ("rewards", "difficulty")

        def rows(self, rows: Rows) -> torch.Tensor:
            assert rows.counts is not None
            return rows.scores * rows.counts / rows.counts.sum() * rows.columns["difficulty"]

    @rl.register("advantages", "in_company")
    class InCompany(Advantage):
        """Sees the tokens of whole groups."""

        @property
        def needs(self) -> tuple[str, ...]:
            return ("rewards", "groups")

        @property
        def scope(self) -> Scope:
            return "group-local"

        def tokens(self, tokens: Tokens) -> tuple[torch.Tensor, None]:
            return tokens.packing.masked(tokens.packing.spread(tokens.rows.groups.centred)), None

    yield
    _ENTRIES["advantages"] = before


def custom(name: str, owner: list[int]) -> tuple[list[rl.Estimate], list[torch.Tensor]]:
    meeting, parts = Meeting(2), parts_of(6, owner, 2)
    difficulty = torch.linspace(1, 2, 6)

    def work(rank: int) -> rl.Estimate:
        rows = parts[rank]
        more = {"difficulty": difficulty[rows]} if name == "longer" else {}
        return estimate(STRADDLING.pick(rows), name, row=rows, gather=meeting.gather(rank), **more)

    return meeting.run(work), parts


def test_counts_and_own_columns_are_those_of_all_rows(registered):
    found, parts = custom("longer", [0, 1, 0, 1, 1, 1])
    assert_same(estimate(STRADDLING, "longer", difficulty=torch.linspace(1, 2, 6)), found, parts, exact=True)


def test_group_local_is_taken_where_groups_are_whole_and_refused_where_not(registered):
    found, parts = custom("in_company", [0, 0, 0, 1, 1, 0])
    assert_same(estimate(STRADDLING, "in_company"), found, parts, exact=True)
    with raises(RecipeError, "groups"):
        custom("in_company", [0, 0, 0, 1, 1, 1])


# -- denominators, losses and metrics --------------------------------------------------------------------------------


def options(aggregation: str, fixed: bool) -> dict[str, Any]:
    takes = "norm_length" in rl.options("aggregations", aggregation)
    return {"norm_length": 5} if takes and fixed else {}


@many
@given(batches(), st.data(), st.sampled_from(AGGREGATIONS), st.booleans())
def test_the_denominator_of_gathered_counts_is_that_of_the_batch(batch, data, aggregation, fixed):
    """What ``Shares`` does: counts of own rows, gathered in any order, then one denominator for all."""
    n, more = len(batch.lengths), options(aggregation, fixed)
    parts = parts_of(n, data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), 2)
    mine = [batch.pick(rows) for rows in parts]
    counts = torch.cat([rl.token_counts(m.mask, m.lengths) for m in mine])
    whole = rl.denominator(aggregation, batch.mask, batch.lengths, **more)
    assert rl.row_denominator(aggregation, counts, **more) == whole


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_denominators_of_workers_with_tokens_add_up_unless_they_are_fixed(aggregation):
    """So a sum over ranks would do for means, and would be wrong for ``token-sum`` and for empty ranks (at least 1)."""
    more = options(aggregation, fixed=True)
    parts = [STRADDLING.pick(rows) for rows in parts_of(6, [0, 1, 0, 1, 0, 1], 2)]
    added = sum(rl.denominator(aggregation, p.mask, p.lengths, **more) for p in parts)
    whole = rl.denominator(aggregation, STRADDLING.mask, STRADDLING.lengths, **more)
    assert (added == whole) == (aggregation != "token-sum")
    empty = rl.denominator(aggregation, torch.zeros(0), torch.zeros(0, dtype=torch.int64), **more)
    assert empty >= 1


@many
@given(batches(), st.data(), st.sampled_from(AGGREGATIONS))
def test_losses_and_metrics_of_workers_add_up_to_those_of_one(batch, data, aggregation):
    n = len(batch.lengths)
    parts = parts_of(n, data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), 2)
    names = ["logprobs", "old_logprobs", "advantages", "ref_logprobs"]
    columns = {name: batch.column(i) for i, name in enumerate(names)}
    more = options(aggregation, fixed=True)
    denominator = rl.denominator(aggregation, batch.mask, batch.lengths, **more)

    def part(batch: Drawn, index: torch.Tensor) -> rl.LossResult:
        return rl.policy_loss(
            "ppo_clip",
            mask=batch.mask,
            lengths=batch.lengths,
            aggregation=aggregation,
            denominator=denominator,
            **{k: v[index] for k, v in columns.items()},
            **more,
        )

    whole = part(batch, torch.arange(len(batch.mask)))
    split = [part(batch.pick(rows), batch.token_index(rows)) for rows in parts]
    torch.testing.assert_close(sum(p.loss for p in split), whole.loss, atol=1e-11, rtol=1e-11)
    merged = rl.merge_metrics([pickle.loads(pickle.dumps(p.metrics)) for p in split])  # they travel to the controller
    assert set(merged) == set(whole.metrics)
    for name, metric in whole.metrics.items():
        assert float(merged[name]) == pytest.approx(float(metric), rel=1e-9, abs=1e-12, nan_ok=True), name


def test_metrics_of_a_worker_without_rows_change_nothing():
    nothing = rl.Metric(0.0, 0, "mean")
    assert float(rl.Metric(6.0, 3, "mean").merge(nothing)) == float(nothing.merge(rl.Metric(6.0, 3, "mean"))) == 2.0
    with raises(ArgumentError, "other"):
        nothing.merge(rl.Metric(1.0, 1, "sum"))


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("name", ESTIMATORS)
def test_two_processes_make_what_one_makes(pool, name):
    parts = parts_of(6, [0, 1, 0, 1, 0, 1], 2)
    found = [rl.Estimate(*one) for one in pool.run(2, "tests.rl.test_split:in_a_process", name=name, parts=parts)]
    exact = build("advantages", name, {}, Advantage).scope != "global moments"
    assert_same(estimate(STRADDLING, name), found, parts, exact)


def in_a_process(rank: int, name: str, parts: list[torch.Tensor]) -> tuple[Any, Any, Any]:
    from tilth.core.layout import Mesh
    from tilth.parallel.dims import ParallelDims

    grid, rows = ParallelDims.of(Mesh(("dp", "fsdp", "tp"), (2, 1, 1)), rank), parts[rank]
    more = pick_columns(further(STRADDLING, name), STRADDLING, rows)
    one = estimate(STRADDLING.pick(rows), name, row=rows, reduce=grid.sum, gather=grid.gather_rows, **more)
    return one.advantages, one.returns, one.mask
