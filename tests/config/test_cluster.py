"""Workers, pools and layouts: what overrides can say, what contradicts, and that each message says what would work."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.config.axes import AXES, MODEL, over
from tilth.config.checks import learners, pool_of, pools
from tilth.config.errors import RecipeError
from tilth.config.load import differences, digest, dump_toml, from_dict, load_recipe
from tilth.config.schema import LayoutConfig, Recipe

LOCAL, ADAMW = "cluster.backend=local", "optimizer.name=adamw"
APART = "rollout.speculate=suffix", "rollout.draft.apart=true"
PARTIAL = " and ".join(f"{name} = 1" for name in over("tokens", *MODEL))


def sizes(**given: int) -> str:
    """Names of all axes and their sizes, as messages have them."""
    return f"{' x '.join(AXES)} = {' x '.join(str(given.get(name, 1)) for name in AXES)}"


def said(*overrides: str, recipe: str = "addition-grpo") -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 220
    return message


def test_by_default_one_worker_in_this_process():
    recipe = Recipe()
    assert (recipe.cluster.backend, recipe.cluster.workers, pools(recipe)) == ("inline", 1, {"": 1})
    assert recipe.policy.layout == recipe.critic.layout == recipe.rollout.layout == LayoutConfig(dp=0, fsdp=1, tp=1)


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        (["policy.layout.fsdp=2"], LayoutConfig(fsdp=2)),
        (["policy.layout.fsdp=2", "policy.layout.tp=2"], LayoutConfig(fsdp=2, tp=2)),
        (["policy.layout.fsdp=2", "policy.layout={tp=2}"], LayoutConfig(tp=2)),
        (["policy.layout={tp=2, sp=true}"], LayoutConfig(tp=2, sp=True)),
        (["policy.layout.tp=2", "policy.layout.sp=True"], LayoutConfig(tp=2, sp=True)),
        (["policy={layout={fsdp=4}}"], LayoutConfig(fsdp=4)),
        (["policy.layout.zero=2"], LayoutConfig(zero=2)),
        (["policy.layout.zero=1"], LayoutConfig(zero=1)),
    ],
)
def test_layouts_by_entry_and_by_table(overrides, layout):
    recipe = load_recipe("addition-grpo", [LOCAL, ADAMW, "cluster.workers=4", *overrides])
    assert recipe.policy.layout == layout
    assert from_dict(tomllib.loads(dump_toml(recipe))) == recipe


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.pools.train=2"], {"train": 2}),
        (["cluster.pools={train=2,rollout=2}"], {"train": 2, "rollout": 2}),
        (["cluster.pools={train=2,rollout=2}", "cluster.pools.rollout=3"], {"train": 2, "rollout": 3}),
        (["cluster.pools={b=1,a=1}", "cluster.workers=2"], {"b": 1, "a": 1}),
        (["cluster.workers=3"], {"": 3}),
    ],
)
def test_pools_in_their_order(overrides, expected):
    recipe = load_recipe("addition-grpo", [LOCAL, *overrides])
    assert list(pools(recipe).items()) == list(expected.items())
    assert pool_of(recipe, "policy") == pool_of(recipe, "reward") == next(iter(expected))
    assert from_dict(tomllib.loads(dump_toml(recipe))) == recipe


def test_a_role_in_a_pool_of_its_own():
    recipe = load_recipe("addition-grpo", [LOCAL, "cluster.pools={train=2,speak=2}", "rollout.pool=speak"])
    assert (pool_of(recipe, "policy"), pool_of(recipe, "rollout")) == ("train", "speak")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.layout.fsdq=2"], "unknown key policy.layout.fsdq; did you mean policy.layout.fsdp?"),
        (["policy.fsdp=2"], "unknown key policy.fsdp; did you mean policy.layout.fsdp?"),
        (["polcy.layout.tp=2"], "unknown key polcy; did you mean policy?"),
        (["policy.layout.fsdp=0"], "policy.layout.fsdp = 0 is not an integer above 0"),
        (["policy.layout.sp=2"], "policy.layout.sp = 2 is not true or false"),
        (["policy.layout.zero=4"], "policy.layout.zero = 4 is not one of 1, 2, 3"),
        (["policy.layout=3"], f"policy.layout = 3 is not a layout, a table of {', '.join(LayoutConfig.model_fields)}"),
        (["cluster.pools.train=0"], "cluster.pools.train = 0 is not an integer above 0"),
        (["cluster.pools=3"], "cluster.pools = 3 is not a table"),
        (
            ["cluster.backend=lokal"],
            "cluster.backend = 'lokal' is not one of inline, local, ray; did you mean 'local'?",
        ),
    ],
)
def test_wrong_words_and_values(overrides, message):
    assert said(*overrides) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.workers=4"],
            "cluster.workers = 4 workers, and cluster.backend = inline is one process; set it to local or ray",
        ),
        (
            ["cluster.pools={a=1,b=1}"],
            "cluster.pools = 2 workers, and cluster.backend = inline is one process; set it to local or ray",
        ),
        (
            [LOCAL, "cluster.workers=2", "train.device=cuda:1"],
            "train.device = 'cuda:1' is one GPU for 2 workers; use cuda: each takes its own",
        ),
        (
            [LOCAL, "cluster.workers=3", "cluster.pools={a=1,b=1}"],
            "cluster.workers = 3, but cluster.pools have 2 together; leave cluster.workers out",
        ),
        (
            [LOCAL, 'cluster.pools={"" = 2}'],
            "cluster.pools = {'': 2} has a pool without a name; name it, as in cluster.pools.",
        ),
        (
            [LOCAL, "cluster.pools={train=2,gen=2}", "rollout.pool=trian"],
            "rollout.pool = 'trian' is not in cluster.pools; did you mean train?",
        ),
        (
            [LOCAL, "cluster.pools={train=2,gen=2}", "reward.pool=xyz"],
            "reward.pool = 'xyz' is not in cluster.pools; there is train, gen",
        ),
        (
            ["critic.pool=a"],
            "critic.pool = 'a' is not in cluster.pools; set cluster.pools.a = WORKERS, or leave critic.pool out",
        ),
        (
            [LOCAL, "cluster.workers=6", "policy.layout.fsdp=4"],
            "policy.layout.fsdp = 4 does not divide cluster.workers = 6; fsdp may be 1, 2, 3 or 6",
        ),
        (
            [LOCAL, "cluster.workers=6", "policy.layout.tp=2", "policy.layout.fsdp=2"],
            "policy.layout.fsdp = 2 does not divide cluster.workers = 6 with policy.layout.tp = 2; fsdp may be 1 or 3",
        ),
        (
            [LOCAL, "cluster.pools={train=3,gen=2}", "policy.layout.tp=2"],
            "policy.layout.tp = 2 does not divide the 3 workers of pool train; tp may be 1 or 3",
        ),
        (
            [LOCAL, "cluster.workers=4", "policy.layout={dp=1,fsdp=2}"],
            f"policy.layout {sizes(dp=1, fsdp=2)} = 2 does not fill cluster.workers = 4; dp = 2 would, or 0: auto",
        ),
        (
            [LOCAL, "cluster.workers=4", "policy.layout={dp=4,fsdp=2}"],
            f"policy.layout {sizes(dp=4, fsdp=2)} = 8 is more than cluster.workers = 4; dp = 2 would, or 0: auto",
        ),
        (["policy.layout.tp=2"], "policy.layout.tp = 2 does not divide cluster.workers = 1; tp may be 1"),
        (
            [LOCAL, "cluster.workers=2", "rollout.layout.tp=2", "rollout.compile=true"],
            "rollout.compile = true does not compile the collectives that rollout.layout.tp = 2 has in every step; set",
        ),
        (
            [LOCAL, *APART, "cluster.workers=2", "rollout.layout.tp=2"],
            "rollout.draft.apart = true, but drafts of a process apart come by a clock, and the ranks of "
            "rollout.layout.tp = 2 guess alike; use false",
        ),
        (
            [LOCAL, ADAMW, "cluster.workers=2", "rollout.layout.tp=2", "train.parity=true"],
            "train.parity = true needs rollout.layout.tp = 1, not 2: partial sums round differently",
        ),
        (
            [LOCAL, "cluster.workers=2", "rollout.layout.fsdp=2"],
            "rollout.layout.fsdp = 2, but the rollout engine takes dp, ep and tp only; set it to 1",
        ),
        (
            ["rollout.layout.sp=true"],
            "rollout.layout.sp = true, but the rollout engine takes dp, ep and tp only; set it to false",
        ),
        (
            ["rollout.layout.pp_schedule=interleaved"],
            "rollout.layout.pp_schedule = 'interleaved', but the rollout engine takes dp, ep and tp only; set",
        ),
        (
            ["policy.layout.sp=true"],
            "policy.layout.sp = true divides over policy.layout.tp, which is 1; set tp to 2 or more, or sp = false",
        ),
        (
            [LOCAL, "cluster.workers=2", "policy.layout.tp=2", "train.parity=true"],
            "train.parity = true needs policy.layout.tp = 1, not 2: partial sums round differently",
        ),
        (
            [LOCAL, ADAMW, "cluster.workers=2", "policy.layout.tp=2", 'train.watch=["noise_scale"]'],
            f"train.watch = ['noise_scale']: noise_scale needs whole gradients: policy.layout.{PARTIAL}; or",
        ),
        (
            [LOCAL, "cluster.workers=2", "policy.layout.cp=2", 'train.watch=["noise_scale"]'],
            f"train.watch = ['noise_scale']: noise_scale needs whole gradients: policy.layout.{PARTIAL}; or",
        ),
        (
            [LOCAL, "cluster.workers=2", "policy.layout.cp=2", "train.parity=true"],
            "train.parity = true needs policy.layout.cp = 1, not 2: parts of a softmax round differently",
        ),
        (
            [LOCAL, "cluster.workers=2", "policy.layout.cp_style=ulysses"],
            "policy.layout.cp_style = 'ulysses' needs policy.layout.cp of 2 or more, not 1; or leave it out",
        ),
        (
            [LOCAL, "cluster.workers=4", "policy.layout.hdp=2"],
            "policy.layout.hdp = 2 divides rows and tokens in place of dp, and policy.layout.dp is 2; set",
        ),
        (
            [LOCAL, "cluster.workers=4", "policy.layout={hdp = 2, cp = 2}"],
            "policy.layout.hdp = 2 divides rows and tokens in place of cp, and policy.layout.cp is 2; set",
        ),
        (
            [LOCAL, "cluster.workers=2", "policy.layout={hdp = 2, cp_style = 'ulysses'}"],
            "policy.layout.cp_style = 'ulysses' divides heads over all ranks, policy.layout.hdp has rings of",
        ),
        (
            [LOCAL, "cluster.workers=2", "policy.layout.hdp=2", "train.parity=true"],
            "train.parity = true needs policy.layout.hdp = 1, not 2: parts of a softmax round differently",
        ),
        (
            [LOCAL, "cluster.workers=2", "policy.layout.hdp=2", 'train.watch=["noise_scale"]'],
            f"train.watch = ['noise_scale']: noise_scale needs whole gradients: policy.layout.{PARTIAL}; or",
        ),
        (
            [LOCAL, "cluster.workers=2", "rollout.layout.cp=2"],
            "rollout.layout.cp = 2, but the rollout engine takes dp, ep and tp only; set it to 1",
        ),
        (["guard.spares=2"], "guard.spares = 2: cluster.backend = 'inline' has none; use guard.spares=0 or "),
        (["guard.spares=2", LOCAL], "guard.spares = 2: cluster.backend = 'local' has none; use guard.spares=0 or "),
        (["guard.hang_after=0.01"], "guard.hang_after = 0.01 is not a number of at least 1"),
        (
            ["guard.spares=1", "cluster.backend=ray", "guard.restarts=0"],
            "guard.spares = 1: guard.restarts = 0 uses none",
        ),
    ],
)
def test_contradictions_say_what_would_work(overrides, message):
    assert said(*overrides).startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        ["flow=grpo", "critic.layout.tp=2"],
        ["flow=grpo", "reference.layout.fsdp=2"],
        ["flow=pretrain", "rollout.layout.tp=2"],
        [LOCAL],
        [LOCAL, "cluster.workers=2", "policy.layout.fsdp=2", "optimizer.name=muon"],
        [LOCAL, ADAMW, "cluster.workers=2", "train.parity=true", "policy.layout.fsdp=2"],
        [LOCAL, ADAMW, "cluster.workers=4", "policy.layout={dp=2,tp=2}"],
        [LOCAL, ADAMW, "cluster.workers=2", "rollout.layout.tp=2"],
        [LOCAL, "cluster.workers=4", "policy.layout={fsdp = 2, hdp = 2, zero = 1}"],
    ],
)
def test_what_is_allowed(overrides):
    load_recipe("addition-grpo", overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["flow=ppo", "critic.layout.tp=2"], "critic.layout.tp = 2"),
        (["algorithm.kl_coef=0.1", "reference.layout.fsdp=2"], "reference.layout.fsdp = 2"),
    ],
)
def test_layouts_of_roles_count_where_the_flow_has_them(overrides, key):
    assert said(*overrides).startswith(key)


def test_which_roles_hold_a_model_of_the_trainer():
    assert list(learners(from_dict({"flow": "grpo"}))) == ["policy"]
    assert list(learners(from_dict({"flow": "ppo", "algorithm": {"kl_coef": 0.1}}))) == [
        "policy",
        "reference",
        "critic",
    ]


@given(st.integers(1, 24), st.integers(0, 6), st.integers(1, 6), st.integers(1, 6))
def test_a_layout_is_taken_exactly_if_it_fills_the_pool(workers, dp, fsdp, tp):
    data = {
        "cluster": {"backend": "local", "workers": workers},
        "policy": {"layout": {"dp": dp, "fsdp": fsdp, "tp": tp}},
    }
    fits = dp * fsdp * tp == workers if dp else workers % (fsdp * tp) == 0
    if fits:
        assert from_dict(data).policy.layout.fsdp == fsdp
    else:
        with pytest.raises(RecipeError) as caught:
            from_dict(data)
        assert caught.value.key.startswith("policy.layout")


def test_digest_counts_the_division_and_neither_patience_nor_address():
    base = load_recipe("addition-grpo", [LOCAL, "cluster.pools={a=1,b=1}"])
    for same in ("cluster.timeout=25.0", "cluster.address=auto"):
        assert digest(load_recipe("addition-grpo", [LOCAL, "cluster.pools={a=1,b=1}", same])) == digest(base)
    others = [["cluster.pools={b=1,a=1}"], ["cluster.pools={a=1,b=1}", "rollout.pool=b"], ["cluster.workers=2"]]
    digests = {digest(load_recipe("addition-grpo", [LOCAL, *o])) for o in others}
    assert len(digests | {digest(base)}) == 4


def test_a_call_must_leave_room_for_the_slowest_reward():
    tight = {"backend": "local", "workers": 2, "timeout": 8.0}
    with raises(RecipeError, "cluster.timeout"):
        from_dict({"cluster": tight})
    from_dict({"cluster": tight, "reward": {"timeout": 4.0}})
    from_dict({"cluster": {"timeout": 8.0}})


def test_what_differs_between_two_recipes_is_named():
    one, two = (
        from_dict({"cluster": {"backend": "local", "workers": 2}}),
        from_dict({"seed": 1, "cluster": {"timeout": 5.0}}),
    )
    found = differences(one, two)
    assert list(found) == ["seed", "cluster.backend", "cluster.workers"]
    assert list(found.values()) == [
        "seed was 0 and is 1",
        'cluster.backend was "local" and is "inline"',
        "cluster.workers was 2 and is 1",
    ]
    assert differences(one, one) == {}
