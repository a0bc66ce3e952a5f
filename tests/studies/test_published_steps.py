"""Predictions beside published step times: each row is the published job, and no error hides."""

import math
from dataclasses import replace

import pytest
from tilth_studies import published_steps
from tilth_studies.published_steps import ROWS, check, job, like, predicted, typical_error

from tilth.config.load import load_recipe
from tilth.plan.shape import parameters

SIZES = {"Llama 3.1 8B": 8.03e9, "GPT 175B": 175e9, "MT-NLG 530B": 530e9, "Qwen3 32B": 32.8e9}


@pytest.fixture(scope="module")
def found():
    return check()


def test_models_have_the_published_sizes_and_layouts_fill_the_devices():
    for row in {row.model: row for row in ROWS}.values():
        given = job(row)
        assert parameters(given.shape) == pytest.approx(SIZES[row.model.partition(",")[0]], rel=0.03)
        mesh = given.recipe.policy.layout.sizes(row.devices)
        assert given.recipe.cluster.workers == math.prod(mesh.values()) == row.devices


def test_every_row_has_a_source_and_a_prediction_of_its_size(found):
    assert {one.row.system.partition(",")[0] for one in found} >= {"torchtitan", "Megatron-LM", "NeMo-RL 0.4"}
    assert all(one.row.source and 0.2 < one.seconds / one.row.seconds < 1.5 for one in found)


def test_more_devices_take_less_time_and_selective_recomputation_repeats_no_product(found):
    by = {(one.row.model, one.row.devices): one.seconds for one in found}
    assert by["MT-NLG 530B", 2240] > by["MT-NLG 530B", 2800] > by["MT-NLG 530B", 3360]
    row = ROWS[0]
    none, every = (row._replace(keys=(*row.keys, f"train.checkpointing={how}")) for how in ("false", "true"))
    assert predicted(none).seconds == pytest.approx(predicted(row).seconds)
    assert predicted(every).seconds > 1.25 * predicted(row).seconds


def test_a_faster_device_is_seen_in_the_errors(found, monkeypatch):
    fast = {name: replace(kind, attained=1.0, links=1.0) for name, kind in published_steps.DEVICES.items()}
    monkeypatch.setattr(published_steps, "DEVICES", fast)
    assert predicted(ROWS[0]).error < next(one.error for one in found if one.row is ROWS[0]) - 0.1


def test_errors_of_rows_like_a_recipe_are_those_of_its_kind_of_flow(found):
    rl, given = (like(load_recipe(name), found) for name in ("addition-grpo", "sft"))
    assert len(rl) + len(given) == len(found) and all("GRPO" in one.row.model for one in rl)
    assert typical_error(rl) == pytest.approx(sum(abs(one.error) for one in rl) / 2)
