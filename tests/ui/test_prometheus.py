"""The endpoint for Prometheus, asked over HTTP and read by prometheus_client's own parser."""

import json
import math
import re
import socket
import urllib.request

import pytest

from tests.errors import raises
from tests.flows.tiny import Recorder, recipe, run, stand_in
from tilth.config.load import from_dict
from tilth.core.errors import RecipeError
from tilth.runs.metrics import METRICS, declaration, schema
from tilth.ui import prometheus
from tilth.ui.prometheus import HOST, POSITION, Endpoint, exposed
from tilth.ui.track import tracking

pytest.importorskip("prometheus_client")
RECORD = {"step": 3, "attempt": 1, "phase": "grpo", "phase_step": 3, "seconds": 4.5, "loss": 0.25}


def scrape(port: int) -> dict:
    """Every family that the endpoint tells of, by name."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def values(family) -> dict:
    """(phase, name or "") -> value of one family."""
    return {(s.labels["phase"], s.labels.get("name", "")): s.value for s in family.samples}


@pytest.fixture
def endpoint(tmp_path):
    found = Endpoint(free_port())
    found.on_run_start(stand_in(tmp_path / "demo-001", say=lambda text: None))
    yield found
    found.close(False)


def free_port() -> int:
    with socket.socket() as door:
        door.bind((HOST, 0))
        return door.getsockname()[1]


# ---- names ----


def test_every_declared_metric_has_a_name_of_its_own_that_prometheus_takes():
    names = [exposed(metric) for metric in [*METRICS.values(), *POSITION.values()]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"tilth(_[a-z0-9]+)+", name) for name in names)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("accuracy/heldout", "tilth_accuracy_heldout"),
        ("memory/rss", "tilth_memory_rss_bytes"),
        ("bytes/sent/*", "tilth_bytes_sent"),
        ("save/seconds", "tilth_save_seconds"),
        ("time/*", "tilth_time_seconds"),
        ("correction/rejected", "tilth_correction_rejected"),
        ("correction/rejected/*", "tilth_correction_rejected_by_name"),
    ],
)
def test_names_say_their_unit_where_prometheus_wants_it(name, want):
    assert exposed(METRICS[name]) == want


# ---- what can be fetched ----


def test_every_metric_tells_its_unit_and_its_reduction(endpoint):
    plain = {name: 1.5 for name in METRICS if not name.endswith("*")}
    families = {name.replace("*", "x-1"): 2.5 for name in METRICS if name.endswith("*")}
    endpoint.on_step_end(stand_in(), 3, {**RECORD, **plain, **families})
    found = scrape(endpoint.port)
    for name, metric in METRICS.items():
        family = found[exposed(metric)]
        assert family.type == "gauge"
        unescaped = family.documentation.replace("\\\\", "\\")
        assert unescaped.endswith(f"(unit: {metric.unit}, reduction: {metric.reduction})"), name
        assert values(family) == ({("grpo", "x-1"): 2.5} if name.endswith("*") else {("grpo", ""): 1.5})
    assert len(found) == len(METRICS) + len(POSITION)


def test_run_phase_and_place_are_told(endpoint):
    endpoint.on_step_end(stand_in(), 3, RECORD)
    found = scrape(endpoint.port)
    assert found["tilth_step"].samples[0].labels == {"run": "demo-001", "phase": "grpo"}
    assert values(found["tilth_step"]) == {("grpo", ""): 3.0}
    assert values(found["tilth_seconds"]) == {("grpo", ""): 4.5}
    assert "tilth_attempt" not in found and "tilth_phase" not in found


def test_a_metric_that_is_not_measured_each_step_keeps_its_last_value_and_phase(endpoint):
    endpoint.on_step_end(stand_in(), 3, {**RECORD, "phase": "warmup", "accuracy/heldout": 0.5, "loss": 2.0})
    endpoint.on_step_end(stand_in(), 3, {**RECORD, "step": 4, "loss": 1.0})
    found = scrape(endpoint.port)
    assert values(found["tilth_accuracy_heldout"]) == {("warmup", ""): 0.5}
    assert values(found["tilth_loss"]) == {("grpo", ""): 1.0}


def test_a_loss_that_is_not_a_number_any_more_is_not_shown_as_the_old_one(endpoint):
    endpoint.on_step_end(stand_in(), 3, {**RECORD, "grad_norm": 1.0})
    endpoint.on_step_end(stand_in(), 3, {**RECORD, "loss": math.nan, "grad_norm": math.inf})
    found = scrape(endpoint.port)
    assert math.isnan(values(found["tilth_loss"])[("grpo", "")])
    assert values(found["tilth_grad_norm"]) == {("grpo", ""): math.inf}


def test_what_a_reward_calls_its_parts_is_text_and_nothing_else(endpoint):
    wild = {'reward/part/a"b\n} 1': 1.0, "reward/part/ünï": 2.0, "reward/part/a-b": 3.0, "reward/part/a_b": 4.0}
    endpoint.on_step_end(stand_in(), 3, {**RECORD, **wild})
    found = values(scrape(endpoint.port)["tilth_reward_part"])
    assert found == {("grpo", name.removeprefix("reward/part/")): value for name, value in wild.items()}


def test_before_the_first_step_there_is_nothing_and_no_error():
    found = Endpoint(free_port())
    assert scrape(found.port) == {}
    found.close(True)


def test_it_listens_on_loopback_only(endpoint):
    assert endpoint._server.server_address[0] == "127.0.0.1"


# ---- the port ----


def test_a_port_that_is_taken_is_told_before_the_run(endpoint):
    asked = from_dict({"run": {"prometheus": endpoint.port}})
    with raises(RecipeError, "run.prometheus"):
        with tracking(asked):
            pass


def test_the_port_is_free_again_after_the_run_and_after_an_error():
    port = free_port()
    asked = from_dict({"run": {"prometheus": port}})
    for _ in range(2):
        with pytest.raises(ValueError):
            with tracking(asked) as (found,):
                assert found.port == port and scrape(port) == {}
                raise ValueError("of the run")
    with tracking(asked), raises(RecipeError, "run.prometheus"):
        Endpoint(port)


def test_no_port_unless_asked_for():
    with tracking(from_dict({})) as none:
        assert none == []


def test_a_missing_library_is_told_before_the_run(monkeypatch):
    monkeypatch.setattr(prometheus.importlib.util, "find_spec", lambda _: None)
    with raises(RecipeError, "run.prometheus.library"):
        Endpoint(9400)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_named(port):
    with pytest.raises(RecipeError) as caught:
        from_dict({"run": {"prometheus": port}})
    assert "run.prometheus" in str(caught.value)


# ---- a whole run, and the other sinks ----


def test_a_run_can_be_scraped_while_it_goes_on_and_every_sink_says_unit_and_reduction(tmp_path):
    port, seen = free_port(), []
    watching = Recorder(lambda record: seen.append((record, scrape(port))) if record["step"] == 3 else None)
    made = recipe(tmp_path, supervised={"steps": 2}, algorithm={"steps": 2}, run={"prometheus": port})
    directory = run(made, callbacks=[watching]).directory
    ((_, found),) = seen  # the third step's own values come when all callbacks were told
    told = watching.records[1]
    for name in (name for name in told if name in schema() or "/" in name):
        sample = declaration(name)
        labels = (told["phase"], name.removeprefix(sample.name[:-1]) if sample.name.endswith("*") else "")
        assert values(found[exposed(sample)])[labels] == told[name], name
    assert {s.labels["run"] for family in found.values() for s in family.samples} == {directory.name}
    beside = json.loads((directory / "metrics_schema.json").read_text())
    for name in {name for record in watching.records for name in record} - set(prometheus.KEYS):
        assert {"unit", "reduction", "description"} == set(beside[declaration(name).name])
    assert f"metrics for Prometheus: http://{HOST}:{port}/metrics" in watching.messages


def test_the_time_of_a_phase_that_a_step_has_not_had_is_gone(endpoint):
    endpoint.on_step_end(stand_in(), 3, {**RECORD, "time/evaluate": 0.75, "time/step": 2.0})
    assert values(scrape(endpoint.port)["tilth_time_seconds"])[("grpo", "evaluate")] == 0.75
    endpoint.on_step_end(stand_in(), 3, {**RECORD, "step": 4, "time/update": 0.9, "time/step": 1.0})
    found = values(scrape(endpoint.port)["tilth_time_seconds"])
    assert found[("grpo", "update")] == 0.9 and ("grpo", "evaluate") not in found
