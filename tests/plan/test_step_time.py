"""Seconds of a stage: bubbles of pipelines equal simulated schedules, hidden communication costs nothing."""

from itertools import product

import pytest
from tilth_studies.pipeline_idle import simulate

from tests.models import tiny
from tests.scripts import script
from tilth.plan.devices import DEVICES
from tilth.plan.pipeline import passes, scoring
from tilth.plan.search import (
    AxisTime,
    Decoding,
    bubble_share,
    decode_seconds,
    optimizer_seconds,
    pass_seconds,
    stage,
    uneven,
)
from tilth.plan.shape import kv_bytes, parameters


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_the_bubble_of_a_pipeline_is_that_of_the_simulated_schedule(schedule, chunks, stages, micro_batches):
    made = script("pipeline_schedules.py")
    order = made.orders(schedule, stages, micro_batches, chunks)
    trace = made.synthetic(order, made.by_type(forward_compute=1 / chunks, backward_compute=2 / chunks))
    took = float((trace.start + trace.duration).max() - trace.start.min())
    passes = 3 * micro_batches
    assert took == pytest.approx(passes * (1 + bubble_share(stages, micro_batches, chunks)))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)])
@pytest.mark.parametrize("again", [False, True])
def test_bubbles_are_those_of_schedules_with_few_micro_batches_and_odd_numbers_of_them(schedule, chunks, again):
    backward = (1 if schedule == "zero-bubble" else 2) + again
    seconds = {"forward": 1.0, "backward": float(backward), "weight": 1.0}
    for stages, micro_batches in product((2, 4, 8), (1, 2, 3, 5, 8, 9, 17)):
        found = simulate(passes(schedule, stages, chunks, micro_batches), chunks, seconds)
        idle = max(end for _, end in found) / found[0][0] - 1
        assert bubble_share(stages, micro_batches, chunks, schedule, again=again) == pytest.approx(idle)
        found = simulate(scoring(stages, chunks, micro_batches), chunks, seconds)
        idle = max(end for _, end in found) / found[0][0] - 1
        assert bubble_share(stages, micro_batches, chunks, schedule, learns=False) == pytest.approx(idle)


def test_the_stage_with_the_head_is_the_slowest():
    small, large = (
        tiny.shape("qwen3", num_layers=4, vocab_size=50),
        tiny.shape("qwen3", num_layers=4, vocab_size=50_000),
    )
    assert uneven(small, 1, "1f1b", False) == 1.0
    assert 1.0 < uneven(small, 2, "1f1b", False) < uneven(large, 2, "1f1b", False) < 2.0
    assert uneven(large, 2, "1f1b", True) < 1.01


def test_an_optimizer_step_reads_and_writes_its_states():
    device = DEVICES["a100-80g"]
    assert optimizer_seconds(device, 10**9) == pytest.approx(30e9 / (device.links * device.memory_bandwidth))


def test_communication_beside_compute_counts_as_far_as_it_takes_longer():
    found = stage(10.0, 1.0, [AxisTime("tp", 2.0, False), AxisTime("fsdp", 6.0, True), AxisTime("ep", 7.0, True)])
    assert dict(found.exposed) == {"tp": 2.0, "fsdp": 0.0, "ep": 3.0} and found.total == 16.0


def test_small_passes_take_the_least_time_of_their_kernels():
    device = DEVICES["h100"]
    assert pass_seconds(device, 1e12, 5e12, 10) == 5.0
    assert pass_seconds(device, 1e12, 1.0, 1000) == pytest.approx(1000 * 16 * device.launch)


def test_decoding_reads_the_weights_at_each_step_and_the_cache_of_its_rows():
    device, shape = DEVICES["h100"], tiny.shape("qwen3", hidden_size=4096, intermediate_size=12288, num_layers=32)
    load = Decoding(rows=8, prompts=8, together=8, prompt=100, new=50)
    rate = device.rate("bf16")
    seconds, links = decode_seconds(device, rate, shape, load, 2, 1, 1.0)
    read = parameters(shape) * 2 + 8 * 125 * kv_bytes(shape, 2)
    assert links == 0 and seconds > 50 * read / (device.links * device.memory_bandwidth)
    two, on_links = decode_seconds(device, rate, shape, load, 2, 2, device.bandwidth(range(2)))
    assert 0 < on_links and two - on_links < seconds
    assert decode_seconds(device, rate, shape, load._replace(together=4), 2, 1, 1.0)[0] > 1.5 * seconds
    assert decode_seconds(device, rate, shape, load._replace(rows=0), 2, 1, 1.0) == (0.0, 0.0)
