"""Predicted memory: each item by hand, and how each key of the recipe moves it."""

import pytest

from tilth.config.load import load_recipe
from tilth.config.schema import SupervisedConfig
from tilth.models.family import new_config
from tilth.plan.layout import per_rank
from tilth.plan.memory import BASE, TOKEN, Memory, Need, kv_tokens, micro_tokens, together
from tilth.plan.shape import matrices, parameters
from tilth.plan.steps import plan_run, size, supervised_steps
from tilth.plan.working import Item, total


def predict(recipe, shape, longest, **more):
    """Of a run in one process."""
    return per_rank(recipe, shape, longest, **more)[0].memory


def predicted(*overrides, longest=16, vocab=14):
    recipe = load_recipe("addition-grpo", overrides)
    return predict(recipe, new_config(recipe.model, vocab), longest)


def item(memory, name):
    return {i.name: i.bytes for i in (*memory.held, *memory.training, *memory.generation)}.get(name, 0)


SHAPE = new_config(load_recipe("addition-grpo").model, 14)
COUNT = parameters(SHAPE)
COPY = "engine's copy of the weights"


def test_items_that_can_be_counted_by_hand():
    memory = predicted()
    assert item(memory, "interpreter and libraries") == BASE
    assert item(memory, "tokenizer") == 14 * TOKEN
    assert item(memory, "parameters") == memory.gradients == 4 * COUNT
    assert item(memory, COPY) == 4 * COUNT
    assert item(memory, "reference model") == 0


def test_optimizer_state():
    assert item(predicted("optimizer.name=adamw"), "optimizer state") == 8 * COUNT
    blocks = matrices(SHAPE)
    assert item(predicted(), "optimizer state") == 4 * blocks + 8 * (COUNT - blocks)


def test_bf16_halves_the_copy_and_the_cache_and_keeps_the_masters():
    memory = predicted("train.precision=bf16")
    assert item(memory, COPY) == 2 * COUNT and item(memory, "parameters") == 4 * COUNT
    assert 2 * item(memory, "KV cache") == item(predicted(), "KV cache")


def test_a_penalty_needs_a_reference_model():
    assert item(predicted("algorithm.kl_coef=0.1"), "reference model") == 4 * COUNT
    assert item(predicted("algorithm.kl_coef=0.1", "flow=sft"), "reference model") == 0
    assert item(predicted("algorithm.kl_coef=0.1", "flow=ppo"), "reference model") == 4 * COUNT


@pytest.mark.parametrize(
    ("keys", "times"),
    [
        (["policy.comm.gradients=topk"], 4),
        (["policy.comm.gradients=topk", "policy.comm.two_way=true"], 4 + 4 / 2),
        (["policy.comm.gradients=topk", "policy.comm.feedback=false"], 0),
        (["policy.comm={gradients='sdp4bit', weights='difference4'}", "policy.layout.zero=1"], 2 * 4 / 2),
    ],
)
def test_compression_keeps_what_it_leaves_out(keys, times):
    memory = predicted("cluster.backend=local", "cluster.workers=2", *keys)
    assert item(memory, "left out by compression") == pytest.approx(times * COUNT, rel=0.01)


@pytest.mark.parametrize(("name", "common"), [("cser", 4), ("average", 0)])
def test_ranks_that_learn_apart_keep_models_of_their_own(name, common):
    keys = ["cluster.backend=local", "cluster.workers=2", "flow=sft", f"policy.comm.local={name}"]
    memory = predicted(*keys)
    assert item(memory, "model that all ranks share") == common * COUNT
    assert item(memory, "model of one rank, where others read a mean") == 4 * COUNT
    own = item(memory, "optimizer state") + (4 + common) * COUNT
    assert item(memory, "copy of models and state of one rank being saved") == own


def test_an_average_and_the_noise_of_gradients_need_copies():
    plain = predicted()
    assert item(plain, "average of the weights") == item(plain, "gradients of one micro-batch") == 0
    more = predicted("train.ema=0.99", 'train.watch=["noise_scale"]')
    assert item(more, "average of the weights") == item(more, "gradients of one micro-batch") == 4 * COUNT
    assert more.peak == plain.peak + 12 * COUNT  # and the average's copy that is saved


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_a_relay_holds_two_versions_of_the_weights_for_all_engines_of_a_node(dp, tp):
    """In host memory, in the engine's dtype. On many machines the policy's node has one, and that of each engine."""
    name, pools = "relay's two versions of the weights", f"cluster.pools={{train = 1, rollout = {dp * tp}}}"
    keys = ["cluster.backend=local", pools, "rollout.pool=rollout", "rollout.staleness=2", "train.precision=bf16"]
    keys += [f"rollout.layout.dp={dp}", f"rollout.layout.tp={tp}"]
    recipe = load_recipe("addition-grpo", keys)
    shape = new_config(recipe.model, 14)
    found = [item(worker.memory, name) for worker in per_rank(recipe, shape, 16)]
    copies = [item(worker.memory, COPY) for worker in per_rank(recipe, shape, 16)]
    assert found[0] == 0 and sum(found) == 2 * sum(copies) / dp
    assert all(i.host for worker in per_rank(recipe, shape, 16) for i in worker.memory.held if i.name == name)
    far = load_recipe("addition-grpo", ["cluster.address=node:6379", "cluster.backend=ray", *keys[1:]])
    policy, *engines = (worker.memory for worker in per_rank(far, shape, 16))
    assert item(policy, name) == item(policy, "parameters")  # two of half the bytes
    assert [item(memory, name) for memory in engines] == [2 * size for size in copies[1:]]
    inline = ["rollout.staleness=2", "train.precision=bf16"]
    assert item(predicted(*inline), name) == 0
    assert item(predicted(*inline, "rollout.inflight=finish"), name) == 2 * item(predicted(*inline), COPY)
    recipe = load_recipe("addition-grpo", [key for key in keys if "staleness" not in key])
    assert not any(item(worker.memory, name) for worker in per_rank(recipe, shape, 16))


def test_what_is_certain_are_weights_gradients_and_optimizer_state():
    kl = ["optimizer.name=adamw", "algorithm.kl_coef=0.1"]
    memory = predicted(*kl)
    assert memory.certain(gpu=False) == 4 * COUNT * (1 + 1 + 2 + 1 + 1)  # and the reference's and the engine's copies
    assert predicted(*kl, "train.micro_tokens=32", "rollout.max_rows=8").certain(gpu=True) == memory.certain(gpu=True)


def test_on_a_gpu_copies_that_are_saved_and_libraries_are_in_host_memory():
    memory = predicted("train.device=cuda:0")
    host = sum(i.bytes for i in memory.items if i.host)
    copied = item(memory, "copy being saved")
    rounded = item(memory, "pinned memory, rounded up")
    assert (copied + rounded).bit_count() == 1 and copied < copied + rounded < 2 * copied
    assert host == BASE + 14 * TOKEN + copied + rounded and copied == 4 * COUNT + item(memory, "optimizer state")
    assert memory.on_gpu() == memory.peak - host


@pytest.mark.parametrize(
    ("policy", "critic", "taken"), [(9, 3, 20), (33, 31, 96), (7, 1.5, 10), (8, 0, 16), (8 - 2**-18, 0, 8), (0, 0, 0)]
)
def test_each_role_has_pinned_memory_of_its_own_rounded_up_with_a_page(policy, critic, taken):
    recipe = load_recipe("addition-grpo", ["train.device=cuda:0"])
    own = [Item("copy being saved", int(policy * 2**29), host=True), Item("state", 2**29)]
    own.append(Item("copy of that being saved", int(policy * 2**29), host=True))
    other = [Item("critic's copy being saved", int(critic * 2**30), host=True)]
    memory = together(recipe, [Need(tuple(own)), Need(tuple(other)), Need(())], 14)
    pinned = [i for i in memory.held if i.name.endswith(("being saved", "rounded up"))]
    assert total(tuple(pinned)) == taken * 2**30 and all(i.host for i in pinned)


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        (["train.offload=1"], 1.0),
        (["train.offload=0.5"], 0.5),
        (["train.offload=auto"], 0.0),
        (["train.offload=auto", "train.micro_tokens=8"], 6 * (16 - 8) / (4 * 16)),  # rows of 16 tokens
    ],
)
def test_activations_on_the_host_leave_two_layers_and_what_does_not_move(keys, share):
    base = ["train.device=cuda:0", "model.layers=6", *keys]
    plain, moved = predicted(*base, "train.offload=0"), predicted(*base)
    layer = item(plain, "activations") / 6
    assert item(moved, "activations on the host") == pytest.approx(share * 5 * layer, rel=0.05)
    left = 6 - 5 * share + (share > 0)
    assert item(moved, "activations") == pytest.approx(left * layer, abs=0.2 * layer)
    assert {i.host for i in moved.training if i.name == "activations on the host"} == ({True} if share else set())
    assert (moved == plain) == (share == 0)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_value_model_has_a_row_and_a_bias_instead_of_an_output_head(tied):
    recipe = load_recipe("addition-grpo", [f"model.tied={tied}"])
    shape = new_config(recipe.model, 14)
    body = parameters(shape) - (14 * 128 if tied == "false" else 0)
    assert parameters(shape, value=True) == body + 128 + 1


def test_a_critic_is_a_second_model_whose_gradients_take_turns():
    memory, without = predicted("flow=ppo", "optimizer.name=adamw"), predicted("optimizer.name=adamw")
    critic = COUNT + 129
    assert item(memory, "critic's parameters") == 4 * critic
    assert item(memory, "critic's optimizer state") == 8 * critic
    assert memory.gradients == 4 * critic
    assert item(memory, "critic's copy being saved") == 12 * critic
    assert memory.peak - without.peak == pytest.approx(4 * 6 * critic, rel=0.01)
    still = predicted("flow=ppo", "optimizer.name=adamw", "run.save_background=false")
    assert memory.peak == still.peak  # the values are copied all the same, and the memory for that is kept
    assert item(without, "critic's parameters") == item(predicted("flow=sft"), "critic's parameters") == 0
    blocks = matrices(SHAPE)
    assert item(predicted("flow=ppo"), "critic's optimizer state") == 4 * blocks + 8 * (critic - blocks)


def test_what_generates_nothing_has_no_engine():
    recipe = load_recipe("addition-grpo", ["flow=pretrain"])
    memory = predict(recipe, SHAPE, 32, generates=False)
    for name in (COPY, "KV cache", "activations of generation", "logits of generation"):
        assert item(memory, name) == 0 < item(predicted(), name)
    assert memory.peak == sum(i.bytes for i in (*memory.held, *memory.training))


@pytest.mark.parametrize(
    ("overrides", "name", "factor"),
    [
        (["model.layers=8"], "KV cache", 16 / 9 * 17 / 16),  # and one spare buffer
        (["rollout.prompts=128", "rollout.max_rows=1024"], "KV cache", 2),
        (["rollout.max_rows=256"], "KV cache", 0.5),
        (["model.kv_heads=1"], "KV cache", 0.25),
        (["rollout.prompts=128", "rollout.max_rows=1024"], "logits of generation", 2),
        (["rollout.max_rows=256"], "logits of generation", 0.5),
    ],
)
def test_what_moves_an_item(overrides, name, factor):
    base = ["run.eval_prompts=8"]
    assert item(predicted(*base, *overrides), name) == pytest.approx(factor * item(predicted(*base), name), rel=0.12)


def test_an_engine_has_no_more_rows_than_it_is_asked_for():
    small = ["rollout.prompts=2", "run.eval_prompts=8"]
    assert item(predicted(*small), "KV cache") < 0.1 * item(predicted(), "KV cache")
    assert item(predicted(*small[:1]), "KV cache") == item(predicted(), "KV cache")  # an evaluation's 512


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [(["rollout.staleness=1"], 2), (["rollout.staleness=3"], 4), (["rollout.staleness=free", "rollout.buffer=3"], 3)],
)
def test_samples_of_several_steps_are_in_flight_where_they_may_be_behind(overrides, steps):
    small = ["run.eval_prompts=8", "rollout.max_rows=4096"]
    several = item(predicted(*small, "rollout.prompts=8", *overrides), "KV cache")
    assert several == item(predicted(*small, f"rollout.prompts={8 * steps}"), "KV cache")


def test_activations_follow_the_micro_batch():
    """16 384 tokens are an upper bound: a step has no more than 64 groups, whose prompts are computed once."""
    budgets = [item(predicted(f"train.micro_tokens={n}"), "activations") for n in (512, 1024, 2048, 8192, 1 << 20)]
    assert budgets[1] == pytest.approx(2 * budgets[0], rel=0.01) and budgets == sorted(budgets)
    assert budgets[3] == budgets[4] < item(predicted("train.parity=true"), "activations")
    memory = predicted()
    assert 0.2 < item(memory, "slack of the allocator") / item(memory, "activations") < 0.45


def test_checkpointing_saves_activations():
    deep = ["model.layers=16"]
    few = item(predicted(*deep, "train.checkpointing=true"), "activations")
    assert few < 0.2 * item(predicted(*deep), "activations")


def test_logits_are_bounded_by_chunks():
    """At 150,000 words a chunk is 256 rows: its gradient, its logits and its log-probs are there together."""
    chunk = 256 * 150_000 * 4
    sizes = [item(predicted(f"rollout.prompts={n}", vocab=150_000, longest=32), "logits") for n in (8, 64, 640)]
    assert sizes[0] == sizes[1] == sizes[2] == pytest.approx(3 * chunk, rel=0.1)
    assert item(predicted("train.micro_tokens=32", vocab=150_000, longest=32), "logits") < 0.2 * sizes[0]


def test_peak_counts_the_greater_working_set_only():
    memory = predicted()
    held, training, generation = (sum(i.bytes for i in part) for part in memory[:3])
    assert memory.peak == held + max(training, generation) == sum(i.bytes for i in memory.items)
    assert isinstance(memory, Memory) and all(i.bytes >= 0 for i in memory.items)


def test_micro_tokens_and_kv_tokens():
    assert micro_tokens(load_recipe("addition-grpo"), 16) == 64 * 8 * 16
    assert micro_tokens(load_recipe("addition-grpo", ["algorithm.steps=0"]), 16) == 256 * 16
    assert micro_tokens(load_recipe("addition-grpo", ["train.micro_tokens=8"]), 16) == 16
    by_epochs = ["supervised.steps=0", "supervised.epochs=1.0", "supervised.batch=32"]
    assert micro_tokens(load_recipe("addition-grpo", ["flow=sft", *by_epochs]), 16) == 32 * 16
    assert kv_tokens(load_recipe("addition-grpo", ["rollout.kv_tokens=64"])) == 64


# -- the plan of a run -----------------------------------------------------------------------------------------------


def planned(*overrides, train=900_000, **more):
    recipe = load_recipe("addition-grpo", overrides)
    shape = new_config(recipe.model, 14)
    return plan_run(recipe, shape, train_prompts=train, heldout_prompts=100_000, longest_prompt=8, **more)


def test_plan_of_the_demo():
    base = [
        "supervised.steps=250",
        "supervised.check_every=10",
        "algorithm.steps=400",
        "rollout.prompts=64",
        "rollout.group=8",
    ]
    plan = planned(*base, "algorithm.epochs=2", "algorithm.minibatches=3", "run.eval_every=100")
    assert (plan.longest, plan.steps, plan.prompts, plan.samples) == (16, 400, 25_600, 204_800)
    assert plan.optimizer_steps == 250 + 400 * 6 and plan.tokens_per_step == 512 * 16
    assert plan.evaluations == 25 + 4
    assert plan.supervised_examples == 250 * 256 and plan.parameters == COUNT
    tokens = (250 * 256 + 2 * 204_800) * 16
    assert plan.flops == pytest.approx(6 * tokens * matrices(SHAPE), rel=0.15)


def test_longest_is_bounded_by_the_context():
    assert planned("rollout.max_tokens=31").longest == 32


def test_supervised_flow_has_no_samples():
    plan = planned("flow=sft")
    assert plan.steps == plan.samples == 0 and "reinforcement" not in "\n".join(plan.lines())


def test_plan_of_ppo():
    """Two steps of the critic alone and three of both, each on 512 samples, two epochs of three minibatches."""
    base = ["flow=ppo", "critic.steps=2", "algorithm.steps=3", "algorithm.epochs=2", "algorithm.minibatches=3"]
    plan = planned(*base, "supervised.steps=0")
    assert (plan.value_steps, plan.steps, plan.prompts, plan.samples) == (2, 3, 5 * 64, 5 * 512)
    assert (plan.optimizer_steps, plan.critic_optimizer_steps) == (3 * 6, 5 * 6)
    assert plan.critic_parameters == COUNT + 129
    assert plan.flops == pytest.approx(6 * (3 + 5) * 2 * 512 * 16 * matrices(SHAPE), rel=0.15)
    text = "\n".join(plan.lines())
    assert "and a critic of" in text and "value pre-training: 2 steps" in text and "3 steps, 320 prompts" in text
    without = planned(*base[2:], "supervised.steps=0")
    assert without.value_steps == without.critic_optimizer_steps == without.critic_parameters == 0
    assert "critic" not in "\n".join(without.lines()) and without.flops < 0.5 * plan.flops


def test_value_pre_training_is_not_evaluated():
    ppo = ["flow=ppo", "supervised.steps=0", "algorithm.steps=10", "run.eval_every=5"]
    assert planned(*ppo, "critic.steps=0").evaluations == planned(*ppo, "critic.steps=50").evaluations == 3


@pytest.mark.parametrize(
    ("steps", "epochs", "examples", "count"),
    [
        (7, 2.0, 1000, 7),  # steps go before epochs
        (0, 0.0, 1000, 0),
        (0, 1.0, 1000, 4),  # 250 + 250 + 250 + 250
        (0, 1.0, 1001, 5),  # one more example, one more step
        (0, 2.5, 1000, 10),
        (0, 0.1, 30_000, 12),  # 0.1 * 30,000 / 250 is a little more than 12 in floating point
        (0, 1.0, 3, 1),
        (0, 1.0, 0, 0),
    ],
)
def test_steps_of_epochs(steps, epochs, examples, count):
    asked = SupervisedConfig(steps=steps, epochs=epochs, batch=250)
    assert supervised_steps(asked, examples) == count


def test_plan_of_epochs():
    plan = planned("flow=sft", "supervised.steps=0", "supervised.epochs=2.0", "supervised.batch=300", train=1000)
    assert plan.supervised_steps == plan.optimizer_steps == 7 and plan.supervised_examples == 2100
    assert plan.tokens_per_step == 300 * 16 and plan.evaluations == 3  # before, at step 5, at the end
    assert "7 steps, 2,100 examples" in "\n".join(plan.lines())


def test_plan_of_pre_training_speaks_of_pieces_as_long_as_the_context():
    plan = planned("flow=pretrain", "supervised.steps=0", "supervised.epochs=1.0", train=2560, generates=False)
    assert plan.longest == 32 and plan.supervised_steps == 10 and plan.tokens_per_step == 256 * 32
    assert "2,560 pieces of documents to train on" in plan.lines()[0]
    assert "KV cache" not in plan.memory.by_name()
    assert plan.flops == pytest.approx(6 * 2560 * 32 * matrices(SHAPE), rel=0.15)


@pytest.mark.parametrize(("every", "steps", "count"), [(0, 10, 2), (3, 10, 5), (5, 10, 3), (20, 10, 2)])
def test_evaluations(every, steps, count):
    plan = planned("supervised.steps=0", f"algorithm.steps={steps}", f"run.eval_every={every}")
    assert plan.evaluations == count


def test_lines_state_what_matters():
    text = "\n".join(planned("algorithm.steps=400", "supervised.steps=0").lines())
    for part in ("900,000 prompts", "100,000 held out", "400 steps", "25,600 prompts", "204,800 samples", "predicted"):
        assert part in text
    assert "supervised" not in text


def test_as_dict_is_json():
    import json

    data = json.loads(json.dumps(planned().as_dict()))
    assert data["memory_peak"] == sum(data["memory"].values()) and data["steps"] == planned().steps


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 bytes"), (1500, "1.5 kB"), (12_345_678, "12.3 MB"), (1.44e9, "1.44 GB")]
)
def test_size(nbytes, text):
    assert size(nbytes) == text
