"""Seconds of a stage: bubbles of pipelines equal simulated schedules, hidden communication costs nothing."""

import numpy as np
import pytest

from tests.models import tiny
from tests.scripts import script
from tilth.plan.devices import DEVICES
from tilth.plan.shape import kv_bytes, parameters
from tilth.plan.step_time import AxisTime, Decoding, bubble_share, decode_seconds, pass_seconds, stage


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_the_bubble_of_a_pipeline_is_that_of_the_simulated_schedule(schedule, chunks, stages, micro_batches):
    made = script("pipeline_schedules.py")
    order = made.orders(schedule, stages, micro_batches, chunks)
    trace = made.synthetic(order, made.by_type(forward_compute=1 / chunks, backward_compute=2 / chunks))
    took = float((trace.start + trace.duration).max() - trace.start.min())
    passes = 3 * micro_batches
    assert took == pytest.approx(passes * (1 + bubble_share(stages, micro_batches, chunks)))


def test_the_bubble_of_zero_bubble_is_a_third():
    made = script("pipeline_schedules.py")
    order = made.orders("zero-bubble", 4, 12)
    took = (
        np.max(made.synthetic(order, made.by_type(forward_compute=1, backward_compute=1, weight_compute=1)).start) + 1
    )
    assert took == pytest.approx(3 * 12 * (1 + bubble_share(4, 12, schedule="zero-bubble")), rel=0.03)


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
