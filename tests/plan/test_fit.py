"""A plan against memories of any size: refused only where it can never be, warned of where it may not be, and keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.config.load import load_recipe
from tilth.core.errors import RecipeError
from tilth.core.memory import Room
from tilth.launch.build import check_fits
from tilth.models.family import new_config
from tilth.plan.fit import ENVIRONMENTS, EPISODE, SCORER, beside, places
from tilth.plan.memory import BASE
from tilth.plan.steps import plan_run

MB = 10**6


def planner(recipe):
    return plan_run(
        recipe, new_config(recipe.model, 5000), train_prompts=900, heldout_prompts=64, longest_prompt=16, generates=True
    )


def told(recipe, total, free=None, gpus=()):
    return check_fits(recipe, planner, Room(total, total if free is None else free, "this machine"), gpus)


RECIPE = load_recipe("addition-grpo", ["model.context=64", "optimizer.name=adamw", "supervised.steps=10"])
(PLACE,) = places(RECIPE, planner(RECIPE).workers, Room(1, 1, ""))


def test_what_fits_is_not_spoken_of():
    assert told(RECIPE, PLACE.needed) == []


def test_what_may_not_fit_is_told_with_keys_that_do():
    """Each key that is named is tried: with it nothing is told any more."""
    free = PLACE.needed - 200 * MB
    (text,) = told(RECIPE, 2 * PLACE.needed, free)
    assert "train.micro_tokens=" in text
    words = next(word for word in text.split() if word.startswith("train.micro_tokens="))
    section, _, value = words.partition("=")
    train = RECIPE.train.model_copy(update={section.partition(".")[2]: int(value)})
    assert told(RECIPE.model_copy(update={"train": train}), 2 * PLACE.needed, free) == []


def test_only_what_can_never_be_is_refused():
    assert told(RECIPE, PLACE.certain)  # a warning
    with pytest.raises(RecipeError) as caught:
        told(RECIPE, PLACE.certain - 1)
    assert "[model]" in str(caught.value)


@given(total=st.integers(1, 20_000), share=st.floats(0, 1))
def test_refusals_and_warnings_go_by_total_and_free(total, share):
    total, free = total * MB, int(total * MB * share)
    if PLACE.certain > total:
        with pytest.raises(RecipeError):
            told(RECIPE, total, free)
    else:
        assert bool(told(RECIPE, total, free)) == (PLACE.needed > free)


def test_workers_of_one_machine_share_its_memory_with_the_controller_and_those_who_score():
    four = load_recipe("addition-grpo", ["cluster.backend=local", "cluster.workers=4", "reward.workers=2"])
    workers = planner(four).workers
    (place,) = places(four, workers, Room(1, 1, ""))
    assert place.needed == sum(w.memory.peak for w in workers) + BASE + 2 * SCORER
    assert place.certain == sum(w.memory.certain(gpu=False) for w in workers)
    assert beside(RECIPE) == SCORER


def test_processes_of_environments_take_the_place_of_those_who_score():
    """Measured: 31 to 41 MB with 64 episodes and 81 to 89 MB with 1,024 in one process (calculator, retrieval)."""
    keys = ["rollout.prompts=8", "rollout.group=8", "run.eval_prompts=16"]
    few = load_recipe("calculator-tools", keys)
    many = load_recipe("calculator-tools", [*keys, "rollout.prompts=128"])
    assert beside(few) == pytest.approx(41e6, rel=0.2) and beside(many) == pytest.approx(89e6, rel=0.2)
    six = ["cluster.backend=local", "cluster.workers=3", "rollout.environments=2"]
    assert beside(load_recipe("calculator-tools", [*keys, *six])) == BASE + 6 * ENVIRONMENTS + 64 * EPISODE


def test_a_gpu_is_a_memory_of_its_own():
    recipe = load_recipe("addition-grpo", ["train.device=cuda", "model.layers=8"])
    plan = planner(recipe)
    host = Room(10**12, 10**12, "this machine")
    small = Room(plan.memory.on_gpu() - MB, plan.memory.on_gpu() - MB, "GPU 0")
    (text,) = check_fits(recipe, planner, host, [small])
    assert text.startswith("memory of GPU 0 may run out")
    with pytest.raises(RecipeError) as caught:
        check_fits(recipe, planner, host, [Room(MB, MB, "GPU 0")])
    assert "GPU 0" in str(caught.value)
    assert check_fits(recipe, planner, None, []) == []


def test_parameters_that_fsdp_would_divide_are_said_so():
    two = load_recipe(
        "addition-grpo",
        [
            "cluster.backend=local",
            "cluster.workers=2",
            "optimizer.name=adamw",
            "model.hidden=1024",
            "model.layers=12",
            "train.micro_tokens=64",
        ],
    )
    (place,) = places(two, planner(two).workers, Room(1, 1, ""))
    (text,) = told(two, 2 * place.needed, int(0.7 * place.needed))
    assert "policy.layout.fsdp=2" in text
