"""Models of clients on several workers beside one, and workers that are killed."""

import os
import shutil
import signal

import pytest
import torch
from tinker import types

from tests.errors import raises
from tests.serve.tinker.served import base, service, serving
from tests.serve.tinker.test_api import datum, rows
from tilth.cli.main import ServeCommand
from tilth.cli.serve import serve
from tilth.core.errors import DataError
from tilth.serve.tinker.folders import CheckpointPath
from tilth.serve.tinker.start import mesh_of
from tilth.serve.tinker.worker import read_state

SMOOTH = types.AdamParams(learning_rate=1e-2, eps=1e-3)
"""With a tiny epsilon AdamW turns the rounding of a gradient near zero into whole steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return base(tmp_path_factory.mktemp("base") / "m")


def steps(server, trained, begin, count, strike=lambda: None):
    """Steps of one client, with two passes each; returns log-probs and sums of all passes."""
    found = []
    for step in range(begin, begin + count):
        sent = [
            trained.forward_backward(
                [*map(datum, rows(step, [4, 9, 30, 7, 12])), datum(rows(9)[0])][:n], "cross_entropy"
            )
            for n in (6, 1)
        ]
        done = trained.optim_step(SMOOTH)
        strike()
        for one in sent:
            passed = one.result()
            found += [torch.tensor([passed.metrics["loss:sum"]])]
            found += [out["logprobs"].to_torch() for out in passed.loss_fn_outputs]
        done.result()
    return found


def state(server, trained, name):
    """Everything that a checkpoint has, in the middle of a step."""
    trained.forward_backward([*map(datum, rows(7, [5, 3, 8]))], "cross_entropy")
    path = CheckpointPath.read(trained.save_state(name).result().path)
    return read_state(server.desk.folder.checkpoint(path))[0], str(path)


def close(mine, wanted):
    """Weights alike within 1e-5, moments and gradients within 1e-3 of their norm: they show the rounding of weights."""
    assert mine.keys() == wanted.keys()
    apart = {name: (mine[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-6) for name in wanted}
    assert max(apart.values()) < 1e-3, max(apart, key=apart.get)
    weights = [name for name in wanted if name.startswith("weights/")]
    assert max(float((mine[name] - wanted[name]).abs().max()) for name in weights) < 1e-5


@pytest.fixture(scope="module", params=[4, 0], ids=["lora", "full"])
def alone(request, model, tmp_path_factory):
    """Passes and states of one worker."""
    with serving(model, tmp_path_factory.mktemp("alone"), name="Org/small") as server:
        trained = service(server).create_lora_training_client("Org/small", rank=request.param, seed=3).result()
        found = steps(server, trained, 0, 3)
        return request.param, found, state(server, trained, "middle")[0]


def pid(server, rank):
    return server.desk.room.cluster.backend.probe(rank).pid


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "layout, backend",
    [
        ("dp=2", "local"),
        pytest.param("dp=2", "ray", marks=pytest.mark.ray),
        ("fsdp=2", "local"),
        ("tp=2", "local"),
        ("dp=2,fsdp=2", "local"),
        ("fsdp=2,tp=2", "local"),
    ],
)
def test_several_workers_give_the_losses_and_weights_of_one_and_survive_their_death(
    model, tmp_path, alone, layout, backend
):
    rank, wanted, there = alone
    with serving(model, tmp_path / "two", name="Org/small", backend=backend, layout=layout) as server:
        trained = service(server).create_lora_training_client("Org/small", rank=rank, seed=3).result()
        found = steps(server, trained, 0, 1)
        for victim in (1, 0):
            found += steps(
                server, trained, 2 - victim, 1, lambda victim=victim: os.kill(pid(server, victim), signal.SIGKILL)
            )
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        own, path = state(server, trained, "middle")
        assert server.desk.room.restarts == 2
        close(own, there)
        sampler = trained.save_weights_and_get_sampling_client().result()
        sampled = sampler.sample(
            types.ModelInput.from_ints([3, 4]), 2, types.SamplingParams(max_tokens=4, seed=1)
        ).result()
        trained.optim_step(SMOOTH).result()
        after, _ = state(server, trained, "after")
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    with serving(model, tmp_path / "one", name="Org/small") as server:  # checkpoints are those of any number of workers
        client = service(server)
        again = client.create_training_client_from_state_with_optimizer(path).result()
        again.optim_step(SMOOTH).result()
        close(state(server, again, "after")[0], after)
        one = client.create_sampling_client(model_path=again.save_weights_for_sampler("s").result().path).result()
        assert len(sampled.sequences) == 2 and one.get_base_model() == "Org/small"


@pytest.mark.parametrize("layout", ["pp=2", "dp=0", "dp", "dp=x", "dp=2,cp=2", "dp=2,dp=3"])
def test_a_layout_that_clients_models_cannot_have_is_refused(layout):
    with raises(DataError, "--layout"):
        mesh_of(layout)
    assert len(mesh_of("dp=2,fsdp=2")) == 4 and len(mesh_of("")) == 1


@pytest.mark.parametrize("given", [{"layout": "dp=2"}, {"idle": 3.0}, {"models": 2}, {"requests": 4}])
def test_options_of_a_server_that_trains_need_one(given):
    with raises(DataError, "--train"):
        serve(ServeCommand("model", port=0, **given))
