"""Roles that learn from pairs: two passes give the gradient of the whole batch in any split; what they refuse."""

import dataclasses
import math
import threading

import numpy as np
import pytest
import torch

import tilth.rl as rl
from tests.data.reading import pair_records
from tests.errors import raises
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.config.schema import OptimizerConfig, PreferenceConfig
from tilth.core.errors import TokenCountError, TokenIdentityError
from tilth.data.prompts import PromptSet
from tilth.models.attention import PackedContext
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.parallel.sharded import ShardedModel
from tilth.roles import pairs
from tilth.roles.objective import WEIGHT
from tilth.roles.pairs import PART, PairError, PairPolicyWorker, PairTable, RatingWorker, RewardModelWorker
from tilth.roles.reference import ReferenceWorker
from tilth.training.engine import TrainEngine
from tilth.training.packed import rate

RECORDS = [
    {"prompt": "1+2=", "chosen": "03", "rejected": "04"},
    {"prompt": "1+2=", "chosen": "03", "rejected": "1", "margin": 0.3},
    {"prompt": "9+9=", "chosen": "18", "rejected": "81218"},
    {"prompt": "4+4=", "chosen": "08", "rejected": "8"},
]
PROMPTS = PromptSet(pair_records(RECORDS))
LOSSES = [
    PreferenceConfig(beta=0.5),
    PreferenceConfig(beta=0.5, smoothing=0.1, average=True, sft=0.3),
    PreferenceConfig(loss="hinge", beta=0.5, margin=0.5),
    PreferenceConfig(loss="robust", beta=0.5),
    PreferenceConfig(loss="simpo", margin=0.5),
]
TERRY = PreferenceConfig(loss="bradley_terry", margin=0.1, centring=0.05)


def decoder(seed=1):
    model = Decoder(small.config())
    model.init_weights_(seed)
    return model


def knowing(seed=1):
    """A value model whose head says something."""
    model = ValueModel(decoder(seed))
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
        model.score.bias.fill_(0.1)
    return model


def policy(store, *, micro_tokens=4096, seed=1, parity=False):
    engine = TrainEngine(
        decoder(seed), OptimizerConfig(lr=1e-2), total_steps=10, micro_tokens=micro_tokens, parity=parity, seed=1
    )
    return PairPolicyWorker(engine, store)


def reward_model(store, *, micro_tokens=4096, model=None):
    engine = TrainEngine(
        model or knowing(), OptimizerConfig(lr=1e-2), total_steps=10, micro_tokens=micro_tokens, scorer=rate
    )
    return RewardModelWorker(engine, store)


def batch_of(store, indices=(0, 1, 2)):
    return small.loader(store, PROMPTS).pairs(list(indices))


def referred(batch, store, seed=2):
    judge = ReferenceWorker(ShardedModel.of(decoder(seed)), store, temperature=1.0, micro_tokens=4096, parity=False)
    return judge.logprobs(batch)


def gradients(worker):
    """What an update would step by, kept instead of used: one vector."""
    kept = []
    worker.engine.optimizers.step = lambda lr: kept.append(
        torch.cat([p.grad.flatten().clone() for p in worker.engine.optimizers.parameters.values()])
    )
    worker.engine.section = worker.engine.section.model_copy(update={"clip_norm": 0.0})
    return kept


def score(model, ids, mask):
    """Of one answer alone, with a gradient: the sum of its log-probs, or its value after the last token."""
    hidden = model(ids, PackedContext([len(ids)]))
    if isinstance(model, ValueModel):
        return model.score(hidden)[int(mask.nonzero()[-1])].double()
    logs = (hidden @ model.head_weight.T).float().log_softmax(-1)
    return sum(logs[t - 1, ids[t]] for t in mask.nonzero().flatten().tolist()).double()


def at_once(model, batch, store, how):
    """Loss and gradient of the whole batch by autograd through all answers together, pair by pair."""
    columns = batch.read(store, "tokens", "mask", *(c for c in ("ref_logprobs",) if c in batch.payload))
    found = {}
    for row in range(len(batch)):
        ids, mask = (torch.from_numpy(columns[c].row(row).copy()) for c in ("tokens", "mask"))
        theirs = columns["ref_logprobs"].row(row).sum(dtype=np.float64) if "ref_logprobs" in columns else 0.0
        found[int(batch["pair"][row]), int(batch["side"][row])] = score(model, ids, mask), theirs, int(mask.sum())
    pair = sorted({p for p, _ in found})
    prompt = [int(batch["prompt"][list(batch["pair"]).index(p)]) for p in pair]
    total = 0.0
    for p, where in zip(pair, prompt):
        (w, rw, nw), (lo, rl_, nl) = found[p, 1], found[p, 0]
        margin = how.margin + float(batch["margin"][list(batch["pair"]).index(p)])
        weight = 1 / (prompt.count(where) * len(set(prompt)))
        total = total + weight * formula(how, w, lo, rw, rl_, nw, nl, margin)
    total.backward()
    return float(total.detach()), torch.cat([q.grad.flatten() for q in model.parameters()])


def formula(how, w, lo, rw, rl_, nw, nl, margin):
    beta = how.beta or (2.0 if how.loss == "simpo" else 0.1)
    log = torch.nn.functional.logsigmoid
    if how.loss == "bradley_terry":
        return -log(w - lo - margin) + how.centring * (w + lo) ** 2
    if how.loss == "simpo":
        return -log(beta * (w / nw - lo / nl) - margin)
    by_w, by_l = (nw, nl) if how.average else (1, 1)
    x = beta * ((w - rw) / by_w - (lo - rl_) / by_l) - margin
    if how.loss == "hinge":
        return torch.relu(1 - x)
    if how.loss == "robust":
        return (-0.9 * log(x) + 0.1 * log(-x)) / 0.8
    return -(1 - how.smoothing) * log(x) - how.smoothing * log(-x) - how.sft * w / nw


# ---- the batch ----


def test_the_loader_puts_both_answers_of_each_pair():
    store = InlineStore()
    batch = batch_of(store, (0, 2, 0))
    assert batch["pair"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and batch["side"].tolist() == [1, 0] * 5
    assert batch["prompt"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]  # drawn twice, it is two prompts
    assert batch["margin"].tolist() == [0, 0, 0.3, 0.3, 0, 0, 0, 0, 0.3, 0.3]
    tokens = batch.read(store, "tokens")["tokens"]
    assert small.TOKENIZER.decode(tokens.row(3)) == "1+2=1"


# ---- loss and gradient ----


@pytest.mark.parametrize("how", LOSSES, ids=lambda how: f"{how.loss}{'+' * how.average}")
@pytest.mark.parametrize("micro_tokens", [4096, 20, 1])
def test_an_update_of_a_policy_has_the_gradient_of_the_whole_batch(how, micro_tokens):
    store = InlineStore()
    batch = batch_of(store)
    if how.loss != "simpo":
        batch = referred(batch, store)
    loss, expected = at_once(decoder(), batch, store, how)
    worker = policy(store, micro_tokens=micro_tokens)
    kept = gradients(worker)
    found = worker.pair_step(batch, how)
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(kept[0], expected, atol=2e-6) and expected.norm() > 0.01
    assert float(found["pairs"]) == 4 and WEIGHT not in found
    assert float(found["grad_norm"]) == pytest.approx(float(expected.norm()), rel=1e-4)


@pytest.mark.parametrize("micro_tokens", [4096, 20, 1])
def test_an_update_of_a_reward_model_has_the_gradient_of_the_whole_batch(micro_tokens):
    store = InlineStore()
    batch = batch_of(store)
    loss, expected = at_once(knowing(), batch, store, TERRY)
    worker = reward_model(store, micro_tokens=micro_tokens)
    kept = gradients(worker)
    found = worker.pair_step(batch, TERRY)
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(kept[0], expected, atol=2e-6) and expected.norm() > 0.01


@pytest.mark.parametrize("order", [[7, 2, 0, 5, 4, 1, 6, 3], [1, 0, 3, 2, 5, 4, 7, 6]])
def test_the_order_of_answers_changes_nothing(order):
    store = InlineStore()
    batch = referred(batch_of(store), store)
    found = []
    for some in (batch, batch.select(np.array(order))):
        worker = policy(store, micro_tokens=20)
        kept = gradients(worker)
        found.append((float(worker.pair_step(some, LOSSES[0])["loss"]), kept[0]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert torch.allclose(found[0][1], found[1][1], atol=2e-6)


def test_where_the_policy_begins_the_loss_is_log_2_to_the_last_bit():
    store = InlineStore()
    batch = referred(batch_of(store, (1, 2)), store, seed=1)  # those without margins
    found = policy(store).pair_eval(batch, PreferenceConfig())
    assert float(found["loss"]) == math.log(2) and float(found["rewards/accuracy"]) == 0.5
    assert float(found["rewards/chosen"]) == float(found["rewards/rejected"]) == 0


def test_a_reward_model_that_has_learned_nothing_says_nothing():
    store = InlineStore()
    found = reward_model(store, model=ValueModel(decoder())).pair_eval(
        batch_of(store, (1, 2)), PreferenceConfig(loss="bradley_terry")
    )
    assert float(found["loss"]) == math.log(2)


@pytest.mark.parametrize("make, how", [(policy, PreferenceConfig(beta=0.5)), (reward_model, TERRY)])
def test_updates_put_chosen_answers_ahead(make, how):
    store = InlineStore()
    batch = referred(batch_of(store), store, seed=1)
    worker = make(store)
    losses = [float(worker.pair_step(batch, how)["loss"]) for _ in range(8)]
    found = worker.pair_eval(batch, how)
    assert losses[-1] < losses[0] and float(found["rewards/accuracy"]) == 1 and float(found["rewards/margin"]) > 0
    assert worker.engine.steps == 8  # what is only measured moves nothing


# ---- several workers ----


def over_workers(batch, store, parts, how):
    """One update of each worker on rows of its own, as collectives would have it: slopes and metrics of each."""
    workers, barrier, given = len(parts), threading.Barrier(len(parts), timeout=20), {}

    def gather(rank):
        def gathered(rows):
            given[rank] = rows
            barrier.wait()
            found = {name: np.concatenate([given[r][name] for r in range(workers)]) for name in rows}
            barrier.wait()
            return found

        return gathered

    found, errors = {}, []

    def work(rank):
        try:
            some = batch.select(np.array(parts[rank], np.int64))
            columns = some.read(store, "tokens", "mask")
            own = {name: some[name] for name in ("pair", "side", "prompt", "margin")}
            own["score"] = reward_model(store)._scores(columns["tokens"], columns["mask"].values)
            own["count"] = own["reference"] = np.ones(len(some))
            table = PairTable.of(own, gather(rank))
            result = table.loss(how)
            found[rank] = table.of_rows(some["pair"], some["side"], result.chosen, result.rejected), float(result.loss)
        except (PairError, threading.BrokenBarrierError) as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if real:
        raise real[0]
    return found


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 3, 4, 7], [1, 2, 5, 6]], [[], [*range(8)]]])
def test_workers_with_halves_of_pairs_find_the_slopes_of_one(parts):
    store = InlineStore()
    batch = batch_of(store)
    (whole, loss) = over_workers(batch, store, [[*range(8)]], TERRY)[0]
    found = over_workers(batch, store, parts, TERRY)
    for rank, rows in enumerate(parts):
        slopes, told = found[rank]
        assert told == pytest.approx(loss, rel=1e-6)  # of rounding in the model
        assert np.allclose(slopes, whole[rows], atol=1e-6)


# ---- what is refused ----


@pytest.mark.parametrize(
    "rows, counts",
    [
        ([0, 2, 3, 4, 5], "1 chosen and 0 rejected"),
        ([0, 1, 1, 2, 3], "1 chosen and 2 rejected"),
        ([0, 0], "2 chosen and 0"),
    ],
)
def test_an_answer_that_is_lost_or_there_twice_is_named(rows, counts):
    store = InlineStore()
    with raises(PairError, "pair.0") as caught:
        reward_model(store).pair_step(batch_of(store).select(np.array(rows)), TERRY)
    assert counts in str(caught.value)


def test_every_worker_sees_that_an_answer_is_lost():
    store = InlineStore()
    with raises(PairError, "pair.3"):
        over_workers(batch_of(store), store, [[0, 1, 2, 3], [4, 5, 7]], TERRY)


def test_tokens_that_were_edited_are_refused():
    store = InlineStore()
    batch = batch_of(store)
    wrong = batch.with_rows(identity=batch["identity"][::-1].copy())
    with pytest.raises(TokenIdentityError):
        reward_model(store).pair_step(wrong, TERRY)


def test_a_part_that_weighs_too_little_is_seen(monkeypatch):
    whole = pairs.linear

    def forgets(what):
        loss = whole(what)

        def less(micro):
            value, metrics = loss(micro)
            return value, {WEIGHT: dataclasses.replace(metrics[WEIGHT], total=metrics[WEIGHT].total * 0.9)}

        return less

    monkeypatch.setattr(pairs, "linear", forgets)
    store = InlineStore()
    with raises(TokenCountError, "weight"):
        reward_model(store).pair_step(batch_of(store), TERRY)


# ---- as a reward ----


def rated(batch, store, *, weight=1.0, alone=True, model=None, micro_tokens=4096):
    worker = RatingWorker(
        ShardedModel.of(model or knowing()), store, weight=weight, micro_tokens=micro_tokens, parity=False
    )
    return worker.rate(batch, alone=alone)


def test_a_sample_is_scored_by_its_own_tokens_after_the_last_one():
    speaker = small.policy()
    batch = small.experience(speaker)
    model = knowing()
    found = rated(batch, speaker.store, model=model, micro_tokens=30)
    columns = batch.read(speaker.store, "tokens", "mask")
    for row in range(len(batch)):
        ids, mask = (torch.from_numpy(columns[c].row(row).copy()) for c in ("tokens", "mask"))
        with torch.no_grad():
            expected = float(score(model, ids, mask))
        assert found[PART][row] == pytest.approx(expected, abs=1e-5) == found["reward"][row]
        assert mask[-1] == 1  # a cut answer is scored after its last token, any other after its end token


def test_the_score_is_added_to_the_reward_and_what_is_missing_stays_so():
    speaker = small.policy()
    batch = small.experience(speaker)
    gone = batch["reward"].copy()
    gone[2] = np.nan
    found = rated(batch.with_rows(reward=gone), speaker.store, weight=0.5, alone=False)
    expected = gone + 0.5 * found[PART]
    assert np.allclose(found["reward"], expected, equal_nan=True, atol=1e-6) and np.isnan(found["reward"][2])
    said = rated(batch.with_rows(outcome=batch["reward"]), speaker.store, alone=False)
    assert np.array_equal(said["outcome"], batch["reward"]) and (said["reward"] != batch["reward"]).any()
    assert np.array_equal(*(rated(batch, speaker.store, weight=0.5)[name] for name in ("outcome", "reward")))
    broken = knowing()
    with torch.no_grad():
        broken.score.bias.fill_(torch.nan)
    lost = rated(batch, speaker.store, model=broken)
    assert np.isnan(lost["reward"]).all() and np.isnan(lost[PART]).all()


def test_metrics_of_pairs_are_told_once_and_by_names_that_add_up():
    store = InlineStore()
    found = reward_model(store).pair_step(batch_of(store), TERRY)
    assert all(isinstance(metric, rl.Metric) for metric in found.values())
    assert float(found["rewards/margin"]) == pytest.approx(
        float(found["rewards/chosen"]) - float(found["rewards/rejected"]), abs=1e-6
    )
