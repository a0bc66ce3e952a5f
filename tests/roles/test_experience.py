import numpy as np
import pytest

from tests.errors import raises
from tilth.cluster.backends.inline import InlineStore
from tilth.core.batch import Jagged
from tilth.core.errors import TokenIdentityError
from tilth.core.trajectory import Trajectory
from tilth.roles.experience import check_identity, put_like, recorded_experts, texts, to_batch


def trajectory(id, prompt, completion, text="", reward=None, finish="stop"):
    tokens = np.array(prompt + completion, np.int64)
    mask = np.array([0] * len(prompt) + [1] * len(completion), np.uint8)
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    return Trajectory(
        id=id, prompt=7, group=id // 2, tokens=tokens, mask=mask, logprobs=logprobs,
        versions=[(len(prompt), 3)], reward=reward, finish=finish, text=text,
    )  # fmt: skip


@pytest.fixture
def made():
    store = InlineStore()
    some = [trajectory(0, [1, 2], [3], "a"), trajectory(1, [1, 2], [4, 5, 6], "bü", 0.25, "length")]
    return store, some, to_batch(some, store)


def test_rows_tell_what_the_controller_needs(made):
    _, _, batch = made
    assert batch["id"].tolist() == [0, 1]
    assert batch["length"].tolist() == [3, 5]
    assert batch["completion"].tolist() == [1, 3]
    assert batch["version"].tolist() == [3, 3]
    assert batch["finish"].tolist() == [0, 1]
    assert np.isnan(batch["reward"][0]) and batch["reward"][1] == np.float32(0.25)


def test_payload_is_what_the_engine_made(made):
    store, some, batch = made
    read = batch.read(store, "tokens", "mask", "rollout_logprobs", "text")
    for i, t in enumerate(some):
        assert np.array_equal(read["tokens"].row(i), t.tokens)
        assert np.array_equal(read["mask"].row(i), t.mask)
        assert np.array_equal(read["rollout_logprobs"].row(i), t.logprobs)
    assert texts(read["text"]) == ["a", "bü"]


def test_untouched_tokens_pass_whatever_the_order_of_rows(made):
    store, _, batch = made
    turned = batch.select(np.array([1, 0]))
    check_identity(turned, turned.read(store, "tokens")["tokens"])


@pytest.mark.parametrize("how", ["changed", "shortened"])
def test_edited_tokens_are_refused_with_the_trajectory(made, how):
    store, _, batch = made
    tokens = batch.read(store, "tokens")["tokens"]
    values, offsets = tokens.values.copy(), tokens.offsets.copy()
    if how == "changed":
        values[-1] += 1
    else:
        offsets[-1] -= 1
    with raises(TokenIdentityError, "trajectory.1.tokens"):
        check_identity(batch, tokens._replace(values=values, offsets=offsets))


def test_a_column_can_be_added_with_the_same_lengths(made):
    store, _, batch = made
    like = batch.read(store, "tokens")["tokens"]
    wider = put_like(batch, store, "advantages", np.arange(8, dtype=np.float32), like)
    turned = wider.select(np.array([1])).read(store, "advantages")["advantages"]
    assert turned.values.tolist() == [3, 4, 5, 6, 7]


def test_rows_stay_small_however_long_the_trajectories(made):
    _, _, batch = made
    nbytes = sum(c.nbytes for c in batch.rows.values()) + sum(
        c.part.nbytes + c.row.nbytes for c in batch.payload.values()
    )
    assert nbytes / len(batch) <= 200


def test_recorded_experts_of_a_rank_without_rows_are_none():
    empty = Jagged(np.zeros(0, np.dtype((np.void, 4))), np.zeros(1, np.int64))
    assert recorded_experts(empty, 2, 8, 2).shape == (0, 2, 2)
    items = np.array([[0, 1, 7, 255]], np.uint8).view(np.dtype((np.void, 4))).ravel()
    assert recorded_experts(Jagged.of([items]), 2, 8, 2).tolist() == [[[0, 1], [7, -1]]]
