"""What crosses between controller and workers in a step does not depend on how long the samples are."""

from pathlib import Path

import numpy as np
import pytest

import tilth
from tilth.cluster.controller.cluster import open_cluster
from tilth.roles.trajectory_writer import SHOWN


@pytest.mark.parametrize(
    "backend, workers", [("inline", 1), pytest.param("local", 2, marks=[pytest.mark.dist, pytest.mark.slow])]
)
def test_bytes_a_row_are_flat_from_16_to_16384_tokens(monkeypatch, backend, workers):
    """Prompts are loaded, samples made, scored and written to Parquet, each in a worker."""
    monkeypatch.syspath_prepend(str(Path(tilth.__file__).parents[2] / "benchmarks"))
    import dispatch

    with open_cluster(backend, workers, timeout=120) as cluster:
        group = dispatch.group_of(cluster)
        few, many = (dispatch.bytes_per_row(cluster, group, tokens) for tokens in (16, 16_384))
    assert abs(many - few) <= SHOWN / dispatch.FEW + 2  # one answer is shown in the terminal
    assert many <= 8 * 200  # calls of four kinds and their answers


def test_the_test_above_could_fail(monkeypatch):
    """A role that answers its tokens to the controller is seen."""
    monkeypatch.syspath_prepend(str(Path(tilth.__file__).parents[2] / "benchmarks"))
    import dispatch

    with open_cluster("inline", 1) as cluster:
        group = dispatch.group_of(cluster)
        role = cluster.backend.host.roles["role"]
        score = role.score

        def leaky(batch):
            found = batch.read(role.store, "tokens")["tokens"]
            told = {f"t{i}": np.array([found.row(row)[i] for row in range(len(batch))]) for i in range(16)}
            return score(batch).with_rows(**told)

        few = dispatch.bytes_per_row(cluster, group, 16)
        role.score = leaky
        assert dispatch.bytes_per_row(cluster, group, 16) > few + 16 * 8
