"""Sessions that fall silent: their models leave the worker and come back, and no bit is lost."""

import signal
import subprocess
import sys
import time

import httpx
import pytest
import tinker
import torch
from tinker import types

from tests.serve.tinker.served import base, service, serving
from tests.serve.tinker.test_api import datum, rows, run
from tilth.serve.tinker import api
from tilth.serve.tinker.folders import CheckpointPath
from tilth.serve.tinker.worker import read_state


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return base(tmp_path_factory.mktemp("base") / "m")


def saved(server, trained):
    path = trained.save_state("end").result().path
    return read_state(server.desk.folder.checkpoint(CheckpointPath.read(path)))[0]


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def calm(model, tmp_path_factory):
    """States of two runs on a server that holds both all the time."""
    with serving(model, tmp_path_factory.mktemp("calm"), name="Org/small") as server:
        return [saved(server, run(service(server), steps=4, rank=4, seed=seed)[0]) for seed in (1, 2)]


LIMITS = [pytest.param({"idle": 0.2}, id="idle"), pytest.param({"models": 1}, id="models", marks=pytest.mark.slow)]


@pytest.mark.parametrize("limits", LIMITS)
def test_a_model_that_left_the_worker_comes_back_with_all_its_bits(model, tmp_path, calm, limits):
    with serving(model, tmp_path, name="Org/small", **limits) as server:
        client = service(server)
        every = [run(client, steps=2, rank=4, seed=seed)[0] for seed in (1, 2)]
        held = lambda: [server.desk.clients[one.model_id].alive >= 0 for one in every]  # noqa: E731
        until(lambda: held() == ([False, False] if "idle" in limits else [False, True]))
        assert (tmp_path / "models" / every[0].model_id / "state.safetensors").exists()
        for trained in every:
            run(client, steps=2, begin=2, trained=trained)
        found = [saved(server, trained) for trained in every]
    for mine, wanted in zip(found, calm):
        assert mine.keys() == wanted.keys() and all(torch.equal(mine[name], wanted[name]) for name in wanted)


CLIENT = """
import sys, tinker
from tests.serve.tinker.test_api import run
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-none")
trained, _ = run(client, steps=2, rank=4, seed=1)
print(trained.model_id, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_model_of_a_killed_client_is_released_and_that_of_a_living_one_is_not(model, tmp_path):
    with serving(model, tmp_path, name="Org/small", idle=12.0) as server:  # the SDK's heart beats every 10 seconds
        living, _ = run(service(server), steps=2, rank=4, seed=2)
        command = [sys.executable, "-c", CLIENT, server.url]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        killed = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        clients = server.desk.clients
        assert clients[killed].alive == clients[living.model_id].alive == 0
        until(lambda: clients[killed].alive < 0)
        assert clients[living.model_id].alive == 0 and clients[killed].saved == 4
        body = {"model_id": killed, "seq_id": 5, "path": "late"}
        name = httpx.post(f"{server.url}/api/v1/save_weights", json=body).json()["request_id"]
        late = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": name}).json()
        assert late["path"] == f"tinker://{killed}/weights/late" and clients[killed].alive == 0


def test_a_session_that_ends_frees_its_models(model, tmp_path):
    with serving(model, tmp_path, name="Org/small") as server:
        client = service(server)
        trained, _ = run(client, steps=1, rank=4, seed=1)
        client.close("success").result()
        until(lambda: server.desk.clients[trained.model_id].alive < 0)


def test_a_client_goes_on_after_a_body_that_is_too_large_or_unknown(model, tmp_path, monkeypatch):
    """What has no place among a client's requests would leave a gap in their numbers, and later ones would wait."""
    monkeypatch.setattr(api, "LARGEST", 3000)
    with serving(model, tmp_path, name="Org/small") as server:
        trained = service(server).create_lora_training_client("Org/small", rank=4, seed=1).result()
        image = types.Datum(
            types.ModelInput(chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=2)]),
            {"target_tokens": [1, 2], "weights": [1.0, 1.0]},
        )
        large = [*map(datum, rows(0, [60] * 8))]
        sent = [trained.forward_backward(data, "cross_entropy") for data in (large, [image])]
        sent.append(trained.save_state("x", user_metadata={"a": "b" * 4000}))
        for one, part in zip(sent, ("limit is 3000", "text alone", "limit is 3000")):
            with pytest.raises(tinker.RequestFailedError) as refused:
                one.result()
            assert part in str(refused.value) and refused.value.category is types.RequestErrorCategory.User
        run(None, steps=1, trained=trained)
        body = b'{"seq_id": 9, "model_id": "' + b"m" * 4000
        assert httpx.post(f"{server.url}/api/v1/optim_step", content=body).status_code == 400
