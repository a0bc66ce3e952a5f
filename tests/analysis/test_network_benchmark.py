"""The benchmark of the network: published sizes, sums that are right, and no faster than its link."""

import math
import socket
import threading
import time

import numpy as np
import pytest
from network_fusion import Fusion, Ring, fuse, synchronise

from tests.analysis.run_jobs import Job
from tests.scripts import script


@pytest.fixture(scope="module")
def ring():
    return script("network_ring.py")


@pytest.fixture(scope="module")
def models():
    return script("network_models.py")


def together(ring, ranks, bandwidth, do):
    """``do(ring of a rank)`` of each rank in a thread of its own."""
    pairs = [socket.socketpair() for _ in range(ranks)]
    links = [ring.Link(pairs[r][1], pairs[(r + 1) % ranks][0], bandwidth) for r in range(ranks)]
    found = {}
    threads = [
        threading.Thread(target=lambda r=r: found.update({r: do(ring.Ring(r, ranks, links[r]))})) for r in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in links:
        link.jobs.put(None)
    return [found[r] for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_ring_adds_up(ring, ranks, size):
    def do(mine):
        vector = np.random.default_rng(mine.rank).normal(size=size).astype(np.float32)
        before = vector.copy()
        mine.all_reduce(vector)
        return before, vector

    told = together(ring, ranks, math.inf, do)
    for _, summed in told:
        np.testing.assert_allclose(summed, np.sum([before for before, _ in told], axis=0), rtol=1e-5, atol=1e-6)


def test_a_throttled_link_is_no_faster_than_it_may_be(ring):
    def do(mine):
        began = time.perf_counter()
        mine.all_reduce(np.zeros(100_000, np.float32))
        return time.perf_counter() - began

    moved, rate = 400_000, 10e6
    assert min(together(ring, 2, rate, do)) >= moved / rate - ring.BURST - 0.01


def test_a_step_fuses_as_the_model_does(ring):
    work = ring.Work(0.001, (0.002,) * 6, (4000,) * 6)
    fusion = Fusion(8000, math.inf)
    for timed in together(ring, 2, math.inf, lambda mine: ring.step(mine, work, fusion)):
        assert len(timed.ready) == 6 and timed.ready[0] >= 0.003 and timed.back <= timed.end
        assert [size for _, _, size in timed.buckets] == [8000] * 3
        starts, ends = np.array([b[0] for b in timed.buckets]), np.array([b[1] for b in timed.buckets])
        assert (starts[1:] >= ends[:-1]).all() and ends[-1] <= timed.end


def test_a_wrong_sum_is_told(ring):
    class Silent:
        rank, ranks = 0, 2

        def all_reduce(self, vector):
            pass

    with pytest.raises(RuntimeError, match="the ring added up wrongly"):
        ring.step(Silent(), ring.Work(0.0, (0.0,), (40,)), Fusion(40, math.inf))


def test_models_have_their_published_parameters(models):
    sizes = {name: models.step_of(name).bytes.sum() / 4 for name in models.SECONDS}
    assert sizes == {"ResNet50": 25_557_032, "ResNet101": 44_549_160, "VGG16": 138_357_544}
    assert sum(work for _, work in models.vgg16()) == pytest.approx(15.47e9, rel=1e-3)  # multiplications of an image
    for name, seconds in models.SECONDS.items():
        step = models.step_of(name)
        assert (np.diff(step.ready) >= 0).all() and step.ready[0] > seconds / 3 and step.batch == seconds
    assert models.step_of("VGG16").bytes[0] == 4 * (4096 * 1000 + 1000)  # the last layer is the first of the way back


def test_the_papers_figures_in_its_direction(models):
    """At 100 Gbit/s no compression is needed on 64 ranks; at 10 Gbit/s f of a ResNet is about a half."""
    for name in models.SECONDS:
        step = models.step_of(name)
        assert synchronise(step, Ring(64, 12.5e9)).scaling > 0.99
        assert synchronise(step, Ring(64, 1.25e9)).scaling < 0.6
        assert fuse(step).bytes.sum() == pytest.approx(step.bytes.sum())


def test_a_run_on_paper_over_its_other_link():
    """Steps of 20 ms and two all-reduces, whose link is slow in every second window: each is told from the others."""
    runs = script("network_run.py")
    fast, slow = (1e-4, 1e8), (1e-3, 1e7)
    job = Job(2)
    for step in range(24):
        latency, bandwidth = slow if step // 6 % 2 else fast
        with job:
            work = [("forward", 0.02)]
            for size in (8, 1_000_000):
                work.append(("all_reduce", 2 * latency + size / bandwidth, {"bytes": size}))
            job.do("policy.update", {0: work, 1: work})
    there, back = runs.rows_of(job.events, 6, 4, *slow)
    assert (there["direction"], back["direction"]) == ("slow to fast", "fast to slow")
    assert there["measured_s"] == pytest.approx(0.02 + 4e-4 + 0.01, rel=1e-3)
    assert back["measured_s"] == pytest.approx(0.02 + 4e-3 + 0.1, rel=1e-3)
    assert (there["link_latency_us"], there["link_mb_per_s"]) == pytest.approx((100, 100), rel=1e-2)
    assert abs(there["error"]) < 0.01 and abs(back["error"]) < 0.01
