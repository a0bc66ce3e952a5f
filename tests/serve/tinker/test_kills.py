"""A server that is killed and started again: clients go on, and every bit is that of an undisturbed server."""

import asyncio
import os
import signal
import threading
import time

import httpx
import pytest
import tinker
import torch
from tinker import types

from tests.errors import raises
from tests.serve.tinker.served import TOKENIZER, Served, base, service, serving
from tests.serve.tinker.test_api import ADAM, datum, rows, run, sampled_datum, weights_of
from tilth.core.errors import CheckpointError, StorageError, WorkerLost
from tilth.serve.start import ServeOptions
from tilth.serve.tinker import desk
from tilth.serve.tinker.folders import ABOUT, CheckpointPath, ServiceFolder, write_json
from tilth.serve.tinker.start import TrainOptions, open_training
from tilth.serve.tinker.worker import STATE, read_about, read_state

PROMPT = types.ModelInput.from_ints(TOKENIZER.encode("1+2="))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return base(tmp_path_factory.mktemp("base") / "m")


def loop(server, steps, strike):
    """Steps of a small RL loop; ``strike`` may kill the server at any of its places. Returns the last state's path."""
    client = service(server)
    trained = client.create_lora_training_client("Org/small", rank=4, seed=3).result()
    for step in range(steps):
        sampler = trained.save_weights_and_get_sampling_client(record_stability_info=True).result()
        strike(step, "snapshot")
        answer = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=5, seed=step))
        strike(step, "sample")
        data = [sampled_datum(PROMPT, one, 1.0 - 2 * number) for number, one in enumerate(answer.result().sequences)]
        passed = trained.forward_backward(data, "stable_reinforce")
        strike(step, "passes")
        passed.result()
        passed = trained.forward_backward([*map(datum, rows(step))], "cross_entropy")
        done = trained.optim_step(ADAM)
        strike(step, "step")
        passed.result(), done.result()
    strike(steps, "save")
    return trained.save_state("end").result().path


class Striker:
    """Kills the server in a phase of each step, and starts it again on the same port."""

    def __init__(self, model, state, phase, **options):
        self.model, self.state, self.phase, self.struck = model, state, phase, 0
        self.options = {"name": "Org/small", **options}
        self.server = Served(model, state, **self.options)

    def __call__(self, step, phase):
        if phase == self.phase:
            self.server.kill()
            self.struck += 1
            self.server = Served(self.model, self.state, port=self.server.port, **self.options)


def outcome(model, state, phase, steps, **options):
    striker = Striker(model, state, phase, **options)
    try:
        path = loop(striker.server, steps, striker)
        return read_state(striker.server.desk.folder.checkpoint(CheckpointPath.read(path)))[0], striker
    finally:
        striker.server.close()


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    return outcome(model, tmp_path_factory.mktemp("calm"), "never", 3)[0]


@pytest.fixture(scope="module")
def undisturbed_worker(model, tmp_path_factory):
    """Of a worker in a process of its own, where matrix products may round otherwise than here."""
    return outcome(model, tmp_path_factory.mktemp("calm"), "never", 3, backend="local")[0]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["snapshot", "sample", "passes", "step", "save"])
def test_weights_are_those_of_an_undisturbed_server(model, tmp_path, monkeypatch, undisturbed, phase):
    monkeypatch.setattr(desk, "STEPS", 2)  # one kill hits a state on disk with a log behind it, another the log alone
    found, striker = outcome(model, tmp_path, phase, 3)
    assert striker.struck == (1 if phase == "save" else 3)
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], undisturbed[name]) for name in found)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2"])
def test_weights_of_two_workers_are_those_of_an_undisturbed_server_of_two(model, tmp_path, monkeypatch, layout):
    monkeypatch.setattr(desk, "STEPS", 2)
    options = {"backend": "local", "layout": layout}
    calm, _ = outcome(model, tmp_path / "calm", "never", 3, **options)
    found, striker = outcome(model, tmp_path / "struck", "step", 3, **options)
    assert striker.struck == 3 and found.keys() == calm.keys()
    assert all(torch.equal(found[name], calm[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["snapshot", "sample", "passes", "step", "save"])
def test_a_killed_worker_changes_no_bit(model, tmp_path, undisturbed_worker, phase):
    """The server lives on and starts its worker again; requests that ran, run again."""
    with serving(model, tmp_path, name="Org/small", backend="local") as server:

        def strike(step, now):
            if now == phase:
                os.kill(server.desk.room.cluster.backend.probe(0).pid, signal.SIGKILL)

        path = loop(server, 3, strike)
        assert server.desk.room.restarts >= 1
        found = read_state(server.desk.folder.checkpoint(CheckpointPath.read(path)))[0]
    assert found.keys() == undisturbed_worker.keys()
    assert all(torch.equal(found[name], undisturbed_worker[name]) for name in found)


def losing(server, monkeypatch, lost):
    """Let the worker die in each call that ``lost`` selects."""
    room, call = server.desk.room, server.desk.room.call

    async def dies(method, *arguments, **more):
        if lost(method, arguments):
            room.restarts += 1  # what it held counts no more
            raise WorkerLost("it died", key="train")
        return await call(method, *arguments, **more)

    monkeypatch.setattr(room, "call", dies)


def test_a_request_that_kills_each_worker_fails_and_those_behind_it_do_not(model, tmp_path, monkeypatch):
    found = []
    with serving(model, tmp_path, name="Org/small") as server:
        losing(server, monkeypatch, lambda method, given: method == "forward_backward" and len(given[0][0]) == 1)
        for poisoned in (False, True):
            trained = service(server).create_lora_training_client("Org/small", rank=4, seed=3).result()
            for step in range(2):
                if poisoned:
                    with pytest.raises(tinker.RequestFailedError) as failed:
                        trained.forward_backward([datum(rows(9)[0])], "cross_entropy").result()
                    assert failed.value.category is types.RequestErrorCategory.Server
                run(None, steps=1, begin=step, trained=trained)
            found.append(weights_of(server, trained, "end"))
    calm, struck = found
    assert calm.keys() == struck.keys() and all(torch.equal(calm[name], struck[name]) for name in calm)


@pytest.mark.slow
def test_a_run_begins_at_its_checkpoint_though_the_worker_dies(model, tmp_path, monkeypatch):
    with serving(model, tmp_path, name="Org/small") as server:
        trained, _ = run(service(server), rank=4, seed=3, steps=1)
        wanted, deaths = weights_of(server, trained, "mine"), iter([True, True])
        losing(server, monkeypatch, lambda method, given: method == "read" and next(deaths, False))
        path = f"tinker://{trained.model_id}/weights/mine"
        again = service(server).create_training_client_from_state_with_optimizer(path).result()
        found = weights_of(server, again, "same")
    assert next(deaths, None) is None
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.slow
def test_a_request_behind_a_load_waits_while_the_load_is_tried_again(model, tmp_path, monkeypatch):
    with serving(model, tmp_path, name="Org/small") as server:
        trained, _ = run(service(server), rank=4, seed=3, steps=1)
        path = trained.save_state("mine").result().path
        room, call, tries = server.desk.room, server.desk.room.call, []

        async def dies(method, *arguments, **more):
            if method == "read":
                tries.append(method)
                while not server.desk.client(arguments[0]).queue.operations:
                    await asyncio.sleep(0.005)
                if len(tries) == 1:
                    room.restarts += 1
                    raise WorkerLost("it died", key="train")
            return await call(method, *arguments, **more)

        monkeypatch.setattr(room, "call", dies)
        ask = lambda route, **body: httpx.post(f"{server.url}/api/v1/{route}", json=body).json()  # noqa: E731
        session, _, _ = trained.model_id.partition(":")
        begun = ask("load_weights", session_id=session, model_seq_id=7, path=path, optimizer=True)
        sent = ask("save_weights", model_id=begun["model_id"], seq_id=1, path="next")
        found = ask("retrieve_future", request_id=sent["request_id"])
        assert found["path"].endswith("/next") and len(tries) == 2
        assert ask("retrieve_future", request_id=begun["request_id"])["path"] == path


def test_a_run_that_could_not_be_loaded_trains_nothing(model, tmp_path):
    with serving(model, tmp_path, name="Org/small") as server:
        trained, _ = run(service(server), rank=4, seed=3, steps=1)
        path = trained.save_state("mine").result().path
        (server.desk.folder.checkpoint(CheckpointPath.read(path)) / STATE).write_bytes(b"damaged")
        with pytest.raises(tinker.RequestFailedError):
            service(server).create_training_client_from_state(path).result()
        body = {"model_id": list(server.desk.clients)[-1], "seq_id": 1, "path": "mine"}
        name = httpx.post(f"{server.url}/api/v1/save_weights", json=body).json()["request_id"]
        found = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": name}).json()
        assert found["category"] == "user" and path in found["error"]


@pytest.mark.slow
def test_a_lost_request_would_change_the_weights(model, tmp_path, monkeypatch, undisturbed):
    """Without the requests behind the state on disk, a restarted server trains on from other weights."""
    monkeypatch.setattr(desk, "REPEATED", ())
    monkeypatch.setattr(desk, "STEPS", 100)
    striker = Striker(model, tmp_path, "save")
    try:
        path = loop(striker.server, 3, striker)
        found = read_state(striker.server.desk.folder.checkpoint(CheckpointPath.read(path)))[0]
        assert not all(torch.equal(found[name], undisturbed[name]) for name in undisturbed)
    finally:
        striker.server.close()


def test_a_server_that_is_asked_to_end_loses_no_request(model, tmp_path, monkeypatch):
    """The request that runs ends, those that wait run when the server is back, and none runs twice."""
    reached = threading.Event()

    async def step(self, client, operation):
        if operation.seq == 4 and ends:
            reached.set()
            while not self._closing:
                await asyncio.sleep(0.005)
        return await desk.ClientRunner._step(self, client, operation)

    monkeypatch.setitem(desk.OPERATIONS, "optim_step", step)
    server, found = Served(model, tmp_path, name="Org/small"), []
    for ends in (False, True):
        trained = service(server).create_lora_training_client("Org/small", rank=4, seed=3).result()
        sent = []
        for number in range(4):
            sent += [trained.forward_backward([*map(datum, rows(number))], "cross_entropy"), trained.optim_step(ADAM)]
        if ends:
            assert reached.wait(30)
            server.end()
            assert read_about(tmp_path / "models" / trained.model_id)["seq"] == 4
            server = Served(model, tmp_path, port=server.port, name="Org/small")
        metrics = [one.result().metrics for one in sent]
        path = trained.save_state("end").result().path
        found.append((metrics, read_state(server.desk.folder.checkpoint(CheckpointPath.read(path)))[0]))
    server.close()
    (calm, weights), (ended, others) = found
    assert ended == calm and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_folder_of_another_base_is_refused(model, tmp_path):
    ServiceFolder(tmp_path / "state", "base", "a1b2")
    with raises(CheckpointError, "service.state"):
        open_training(str(model), ServeOptions(port=0, backend="inline"), TrainOptions(tmp_path / "state"))


def test_a_folder_that_names_its_base_as_earlier_versions_did_is_accepted(tmp_path):
    write_json(tmp_path / ABOUT, {"base_model": "b", "fingerprint": "step 3, weights a1b2)", "secret": "s"})
    ServiceFolder(tmp_path, "b", "a1b2").lock.release()
    with raises(CheckpointError, "service.state"):
        ServiceFolder(tmp_path, "b", "b2")


def test_a_folder_of_a_server_that_runs_is_refused(model, tmp_path):
    folder = ServiceFolder(tmp_path, "base", "a1b2")
    with raises(StorageError, "service.lock"):
        ServiceFolder(tmp_path, "base", "a1b2")
    folder.lock.release()
    ServiceFolder(tmp_path, "base", "a1b2").lock.release()


@pytest.mark.slow
def test_waiting_clients_are_told_to_ask_again(model, tmp_path, monkeypatch):
    """A request whose predecessor has not come waits, and runs when that is there."""
    monkeypatch.setattr(desk, "WAIT", 0.2)
    server = Served(model, tmp_path, name="Org/small")
    try:
        trained = service(server).create_lora_training_client("Org/small", rank=4, seed=3).result()
        body = {"model_id": trained.model_id, "seq_id": 2, "path": "second"}
        name = httpx.post(f"{server.url}/api/v1/save_weights", json=body).json()["request_id"]
        ask = lambda: httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": name})  # noqa: E731
        assert ask().status_code == 408
        first = httpx.post(f"{server.url}/api/v1/save_weights", json={**body, "seq_id": 1, "path": "first"})
        assert first.status_code == 200
        until = time.monotonic() + 20
        while ask().status_code == 408 and time.monotonic() < until:
            threading.Event().wait(0.01)
        assert ask().json()["path"].endswith("/second")
    finally:
        server.close()
