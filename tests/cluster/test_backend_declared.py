"""A backend that a plugin declares: the worked example of docs/extending.md passes the conformance suite."""

import pytest

from tests.cluster import test_conformance
from tests.cluster.test_conformance import (  # noqa: F401  (fixtures, and tests that run here again)
    cluster,
    echo,
    test_a_role_made_again_is_the_next_generation_and_refuses_what_was_called_before,
    test_control_messages_are_answered_while_a_call_runs_and_only_by_methods_that_say_so,
    test_each_rank_gets_its_own,
    test_metrics_are_those_of_the_whole,
    test_payload_goes_from_worker_to_worker,
    test_rows_go_and_come_back_in_order,
)
from tests.config.test_plugins import write
from tests.documents import blocks
from tests.errors import raises
from tilth.cluster.controller.cluster import open_cluster
from tilth.config.load import load_recipe
from tilth.config.plugins import _DECLARED, load_plugins
from tilth.config.plugins import backend as declare_backend
from tilth.core.errors import PluginError, RecipeError

(BACKEND,) = (block.text for block in blocks("docs/extending.md") if block.first == "# pipes.py")


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """What the conformance suite takes: name and number of workers."""
    before = dict(_DECLARED["backend"])
    load_plugins([str(write(tmp_path_factory.mktemp("plugin"), BACKEND))])
    yield "pipes", 2
    _DECLARED["backend"] = before


@pytest.fixture
def declared():
    """Forgets what a test declares."""
    before = dict(_DECLARED["backend"])
    yield declare_backend
    _DECLARED["backend"] = before


# Those that name their backends would run here once for each of them. Some are slow: their processes are no forks.


@pytest.mark.slow
def test_workers_that_are_kept_outlive_calls_that_fail(backend, tmp_path):
    test_conformance.test_workers_that_are_kept_outlive_calls_that_fail(backend, tmp_path)


@pytest.mark.slow
def test_an_error_in_a_factory_comes_up(backend):
    test_conformance.test_an_error_in_a_factory_comes_up(backend)


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["a batch of step 3", ""])
def test_payload_that_is_still_held_at_the_end_is_a_named_error(backend, owner):
    test_conformance.test_payload_that_is_still_held_at_the_end_is_a_named_error(backend, owner)


@pytest.mark.slow
def test_roles_are_closed_at_the_end(backend, tmp_path):
    test_conformance.test_roles_are_closed_at_the_end(backend, tmp_path)


@pytest.mark.slow
def test_a_stopped_worker_is_named_by_control_messages(backend, monkeypatch):
    test_conformance.test_a_stopped_worker_is_named_by_control_messages(backend, monkeypatch)


@pytest.mark.slow
def test_payload_outlives_the_rank_that_made_it(backend):
    test_conformance.test_payload_outlives_the_rank_that_made_it(backend)


@pytest.mark.slow  # its workers import torch
def test_a_generation_is_looked_at_and_aborted_between_rounds(cluster):  # noqa: F811
    test_conformance.test_a_generation_is_looked_at_and_aborted_between_rounds(cluster)


def test_a_recipe_chooses_it_by_name(backend):
    assert load_recipe("addition-grpo", ["cluster.backend=pipes", "cluster.workers=2"]).cluster.backend == "pipes"


def test_a_backend_that_is_not_declared_is_refused_with_those_that_are():
    with pytest.raises(RecipeError) as raised:
        load_recipe("addition-grpo", ["cluster.backend=pipe"])
    assert "cluster.backend" in str(raised.value) and "inline, local, ray" in str(raised.value)
    with raises(RecipeError, "cluster.backend"):
        open_cluster("pipe", 1)
    with pytest.raises(PluginError):
        declare_backend("local")


class Silent:
    """Without the methods of a backend."""

    def __init__(self, workers, **options):
        self.workers, self.store = workers, None


class Broken:
    """One that does not start."""

    def __init__(self, workers, **options):
        raise RuntimeError("no machine")


@pytest.mark.parametrize("kind, key", [(Silent, "backend.mine.submit"), (Broken, "backend.mine")])
def test_a_class_that_is_no_backend_is_named_with_its_file(declared, kind, key):
    declared("mine")(kind)
    with raises(PluginError, key) as raised:
        open_cluster("mine", 1)
    assert "(test_backend_declared.py:" in str(raised.value)
