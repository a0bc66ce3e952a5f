"""Who talks to whom and how much: by hand for small layouts, and against bytes that a step moves."""

import numpy as np
import pytest

from tests.parallel.test_comm import Operators
from tilth.config.load import load_recipe
from tilth.core.batch import Jagged
from tilth.models.decoder import Decoder
from tilth.models.family import new_config
from tilth.parallel.dims import ParallelDims
from tilth.parallel.local import reducer_of
from tilth.parallel.sharded import shard
from tilth.plan.context import RING_SHARE
from tilth.plan.costs import wire
from tilth.plan.layout import place
from tilth.plan.shape import parameters
from tilth.plan.traffic import tokens_of_rank, traffic, work
from tilth.training.engine import TrainEngine, negative_log_likelihood

BASE = ["cluster.backend=local", "optimizer.name=adamw", "supervised.steps=0"]
PLAIN = ["algorithm.epochs=1", "algorithm.minibatches=1"]
LONGEST = 16


def asked(workers, *overrides):
    pools = f"cluster.pools={workers}" if isinstance(workers, str) else f"cluster.workers={workers}"
    return load_recipe("addition-grpo", [*BASE, *PLAIN, pools, *overrides])


def talks(workers, *overrides, **more):
    recipe = asked(workers, *overrides)
    return traffic(recipe, new_config(recipe.model, 14), LONGEST, **more)


SHAPE = new_config(load_recipe("addition-grpo").model, 14)
COUNT = parameters(SHAPE)


def test_one_rank_talks_to_nobody():
    assert talks(1) == talks(1, "flow=ppo", "algorithm.kl_coef=0.1") == []


@pytest.mark.parametrize(("ranks", "share"), [(2, 1 / 2), (4, 3 / 4)])
def test_replicas_add_up_gradients_once_an_update(ranks, share):
    (talk,) = talks(ranks)
    assert (talk.role, talk.axis, talk.groups) == ("policy", "dp", (tuple(range(ranks)),))
    assert talk.bytes == int(2 * share * 4 * COUNT)
    (many,) = talks(ranks, "algorithm.epochs=2", "algorithm.minibatches=3")
    assert many.bytes == pytest.approx(6 * talk.bytes, abs=6)


def test_shards_are_gathered_each_micro_batch_or_once_an_update():
    def sent(zero, *more):
        found = talks(2, "policy.layout.fsdp=2", f"policy.layout.zero={zero}", *more)
        assert [t.axis for t in found] == ["fsdp", "to rollout"]  # the second is the way to the engines
        return found[0].bytes

    once = 4 * COUNT / 2
    small = "train.micro_tokens=1024"  # 256 rows of 16 tokens a rank: 4 micro-batches
    assert sent(2) == sent(2, small) == pytest.approx(2 * once, rel=0.01)
    assert sent(3) == pytest.approx(3 * once, rel=0.01)
    assert sent(3, small) == pytest.approx(4 * 3 * once, rel=0.01)


def test_zero_1_sends_what_replicas_send_and_says_what():
    plain, divided = talks(4), talks(4, "policy.layout.zero=1")
    assert [(t.axis, t.groups, t.bytes) for t in divided] == [(t.axis, t.groups, t.bytes) for t in plain]
    assert "weights gathered" in divided[0].what and divided[0].updates
    moe = ["model.family=qwen3_moe", "model.experts=4", "policy.layout={dp = 2, ep = 2, zero = 1}"]
    assert {t.axis for t in talks(4, *moe) if t.updates} == {"dp, ep", "dp"}


def test_scoring_gathers_too():
    twice = ["algorithm.epochs=2", "algorithm.minibatches=1"]
    plain, scored = (talks(2, "policy.layout.fsdp=2", *more)[0].bytes for more in ([], twice))
    assert scored == pytest.approx((2 * 3 + 1) / 3 * plain, rel=0.01)


def test_hybrid_has_an_axis_each():
    found = talks(4, "policy.layout={dp=2, fsdp=2}", "rollout.layout.dp=4")
    assert [(t.axis, t.groups) for t in found] == [
        ("dp", ((0, 2), (1, 3))),
        ("fsdp", ((0, 1), (2, 3))),
        ("to rollout", ((0, 1), (2, 3))),
    ]
    assert found[0].bytes == pytest.approx(2 * 0.5 * 4 * COUNT / 2, rel=0.01)  # of half of the parameters


def test_tp_adds_up_hidden_states_around_two_blocks_forward_and_backward():
    found = {t.axis: t for t in talks(2, "policy.layout.tp=2")}
    tokens = 512 * LONGEST
    assert (
        found["tp"].bytes == SHAPE.num_layers * 4 * tokens * SHAPE.hidden_size * 4
    )  # an all-reduce of two sends it once
    again = {t.axis: t for t in talks(2, "policy.layout.tp=2", "train.checkpointing=true")}
    assert again["tp"].bytes == found["tp"].bytes * 6 // 4
    half = {t.axis: t for t in talks(2, "policy.layout.tp=2", "train.precision=bf16")}
    assert 2 * half["tp"].bytes == found["tp"].bytes
    spread = {t.axis: t for t in talks(2, "policy.layout.tp=2", "policy.layout.sp=true")}
    assert spread["tp"].bytes == found["tp"].bytes and "scattered" in spread["tp"].what


def test_keys_and_values_go_around_or_tokens_are_exchanged_for_heads():
    def sent(*more):
        found = {t.axis: t for t in talks(2, "policy.layout.cp=2", *more)}
        assert found["cp"].groups == ((0, 1),) and "gradients" in talks(2, "policy.layout.cp=2")[0].what
        return found["cp"].bytes

    heads, kv_heads, tokens = SHAPE.num_heads, SHAPE.num_kv_heads, 512 * LONGEST
    one = SHAPE.num_layers * tokens * SHAPE.head_dim * 4 / 2  # a float of each head, to the other rank
    assert sent() == pytest.approx(RING_SHARE * 3 * 2 * kv_heads * one)
    assert sent("train.checkpointing=true") == pytest.approx(sent() * 4 / 3)
    assert sent("train.precision=bf16") == pytest.approx(sent() * 2 / 3)
    assert sent("policy.layout.cp_style=ulysses") == pytest.approx(2 * (2 * heads + 2 * max(kv_heads, 2)) * one / 2)


def test_rows_longer_than_the_capacity_of_a_rank_go_around_as_along_cp():
    def sent(axis, micro):
        found = talks(2, f"policy.layout.{axis}=2", f"train.micro_tokens={micro}")
        return sum(t.bytes for t in found if t.axis == axis and "attention" in t.what)

    assert sent("hdp", LONGEST) == 0 < sent("hdp", LONGEST // 2) == sent("cp", LONGEST // 2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
def test_a_rank_talks_for_the_layers_of_its_stage_alone(axis, schedule):
    more = ["model.layers=8", *(["model.family=qwen3_moe", "model.experts=4"] if axis == "ep" else [])]
    found = [
        {t.axis: t.bytes for t in talks(2 * pp, f"policy.layout.{axis}=2", f"policy.layout.pp={pp}", *rest, *more)}
        for pp, rest in ((1, []), (2, [f"policy.layout.pp_schedule={schedule}"]))
    ]
    assert found[1][axis] == pytest.approx(found[0][axis] / 2)


def test_engines_elsewhere_get_their_weights_from_the_replicas_in_turn():
    found = talks("{train=2, speak=3}", "rollout.pool=speak")
    assert [(t.axis, t.groups) for t in found] == [("dp", ((0, 1),)), ("to rollout", ((0, 2, 3), (1, 4)))]
    assert found[-1].bytes == 4 * COUNT, "the first replica has two engines to serve, and sends each a half"
    half = talks("{train=2, speak=3}", "rollout.pool=speak", "train.precision=bf16")
    assert half[-1].bytes == 2 * COUNT
    assert [t.axis for t in talks("{train=2, speak=3}", "rollout.pool=speak", generates=False)] == ["dp"]


def test_a_reference_scores_and_a_critic_learns():
    more = ["flow=ppo", "algorithm.kl_coef=0.1", "critic.layout.fsdp=2", "reference.layout.fsdp=2"]
    found = {(t.role, t.axis): t.bytes for t in talks(2, *more)}
    assert set(found) == {("policy", "dp"), ("reference", "fsdp"), ("critic", "fsdp")}
    assert found["reference", "fsdp"] == pytest.approx(4 * COUNT / 2, rel=0.01)
    assert found["critic", "fsdp"] == pytest.approx((3 + 1) * 4 * COUNT / 2, rel=0.01)


def test_a_reference_that_is_replicated_says_nothing():
    assert {t.role for t in talks(2, "algorithm.kl_coef=0.1")} == {"policy"}


def test_pre_training_counts_its_own_batch():
    recipe = asked(2, "flow=pretrain", "supervised.steps=3", "supervised.batch=40", "supervised.until=1.0")
    assert work(recipe, "policy", 2, LONGEST).tokens == 20 * LONGEST
    assert (work(recipe, "policy", 2, LONGEST).updates, work(recipe, "policy", 2, LONGEST).scored) == (1, 0)
    assert tokens_of_rank(recipe, place(recipe)["policy"], LONGEST) == 20 * LONGEST


def test_engines_over_tp_add_up_and_get_what_they_lack():
    found = {(t.role, t.axis): t for t in talks(2, "policy.layout.tp=2", "rollout.layout.tp=2")}
    blocks = SHAPE.num_layers * 2 * 512 * LONGEST * SHAPE.hidden_size * 4
    recipe = asked(2)
    logits = 512 * recipe.rollout.max_tokens * 14 * 4 / 2
    assert found["rollout", "tp"].bytes == blocks + logits
    assert ("publish", "to rollout") not in found, "each rank trains what it generates with"
    whole = {t.axis: t.bytes for t in talks(2, "policy.layout.tp=2")}
    assert whole["to rollout"] == pytest.approx(4 * COUNT / 2, rel=0.01)
    found = {t.axis: t for t in talks(8, "policy.layout.tp=4", "rollout.layout.tp=2")}
    assert found["to rollout"].bytes == pytest.approx(4 * COUNT / 4, rel=0.02)


@pytest.mark.parametrize("axis", ["dp", "fsdp", "tp"])
def test_groups_of_an_axis_cover_the_mesh_and_differ_in_it_alone(axis):
    placed = place(asked("{first=2, rest=12}", "policy.pool=rest", "policy.layout={dp=3, fsdp=2, tp=2}"))["policy"]
    found, at = placed.mesh.groups(axis), placed.mesh.names.index(axis)
    assert sorted(rank for group in found for rank in group) == list(range(2, 14))
    for group in found:
        places = [placed.mesh.coordinates(rank) for rank in group]
        assert [p[at] for p in places] == list(range(placed.mesh.sizes[at]))
        assert len({p[:at] + p[at + 1 :] for p in places}) == 1


def test_stages_pass_on_hidden_states_and_gradients():
    (found,) = (t for t in talks(2, "policy.layout.pp=2") if t.axis == "pp")
    tokens = 512 * LONGEST
    assert found.groups == ((0, 1),) and found.bytes == tokens * SHAPE.hidden_size * 4
    many = ("policy.layout.pp=2", 'policy.layout.pp_schedule="interleaved"')
    (twice,) = (t for t in talks(2, *many) if t.axis == "pp")
    assert twice.bytes == 3 * found.bytes  # of its two parts: 2 forward and 1 back, or 1 and 2


# ---- against bytes that steps move ----

HERE = "tests.plan.test_traffic:moved"
ZERO = "policy.layout.zero=1"
COMM = {
    "exact": [""],
    "onebit": ["gradients='onebit', smallest=1000"],
    "topk, both ways": ["gradients='topk', two_way=true, options={share=0.125}, smallest=1000"],
    "randomk": ["gradients='randomk', options={share=0.125}, smallest=1000"],
    "dither, zero 1": ["gradients='dither', smallest=1000", ZERO],
    "sdp4bit": ["gradients='sdp4bit', weights='difference4', node_size=2, smallest=1000", ZERO],
    "weights alone": ["weights='difference4', smallest=1000", ZERO],
    "shards": ["gradients='topk', options={share=0.125}, smallest=1000", "policy.layout={fsdp=4, zero=2}"],
    "average": ["local='average', every=4"],
    "adaalter": ["local='adaalter', every=4", "optimizer.name=adaalter"],
    "cser": ["local='cser', every=4, options={changes=4, models=2}, smallest=1000"],
    "cser, resets alone": ["local='cser', every=4, options={changes=0, models=2}, smallest=1000"],
}


def small(name):
    comm, *more = COMM[name]
    return ["flow=sft", "supervised.steps=3", "model.hidden=64", "model.layers=2", f"policy.comm={{{comm}}}", *more]


def moved(rank, ranks, more):
    """Mean bytes that a rank sends in a step of a period, but for what decides about the step."""
    recipe = asked(ranks, *more)
    grid, config = ParallelDims.of(place(recipe)["policy"].mesh, rank), new_config(recipe.model, 14)
    reducer = reducer_of(recipe.policy.comm, 0)
    sharded = shard(lambda: Decoder(config), grid, zero=recipe.policy.layout.zero, reducer=reducer)
    sharded.init_(0)
    engine = TrainEngine(sharded, recipe.optimizer, total_steps=9, micro_tokens=64)
    tokens, mask = Jagged.of([np.arange(8, dtype=np.int64) + rank] * 2), np.tile(np.arange(8) > 0, 2).astype(np.uint8)
    with Operators() as operators:
        for _ in range(steps := recipe.policy.comm.every):  # of other methods all steps are alike
            engine.update(tokens, mask, {}, negative_log_likelihood(64.0))
    sent = [wire(op, len(ranks.split(",")), nbytes)[1] for op, ranks, nbytes in operators.seen if nbytes > 64]
    return float(sum(sent)) / steps


@pytest.mark.dist
@pytest.mark.parametrize("name", COMM)
def test_coded_and_rare_messages_are_counted_as_they_are(pool, name):
    planned = sum(t.bytes for t in talks(4, *small(name)) if t.role == "policy")
    assert planned == pytest.approx(max(pool.run(4, HERE, ranks=4, more=small(name))), rel=0.02)


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["fsdp=2, zero=1", "fsdp=2, zero=2", "fsdp=2, zero=3", "tp=2"])
def test_matrices_that_an_optimizer_gathers_are_counted_as_they_are(pool, layout):
    more = ["flow=sft", "supervised.steps=3", "model.hidden=64", "model.layers=2", f"policy.layout={{{layout}}}"]
    muon = "optimizer.name=muon"
    planned = sum(t.bytes for t in talks(2, *more, muon) if t.role == "policy")
    sent = max(pool.run(2, HERE, ranks=2, more=[*more, muon]))
    if "tp" in layout:  # what else goes along tp are tokens, of which the plan has the longest sequences
        planned -= sum(t.bytes for t in talks(2, *more) if t.role == "policy")
        sent -= max(pool.run(2, HERE, ranks=2, more=more))
    assert planned == pytest.approx(sent, rel=0.01) and planned > 0
