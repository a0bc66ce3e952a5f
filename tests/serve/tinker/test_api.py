"""Tinker's API through the SDK's own objects, beside the same loop in this process."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.serve.tinker.served import TOKENIZER, base, service, serving
from tilth.config.schema import LoraConfig
from tilth.core.errors import WorkerError
from tilth.runs.models import load_model
from tilth.serve.app import BODY
from tilth.serve.tinker.api import LARGEST
from tilth.serve.tinker.base import ALPHA, TARGETS
from tilth.serve.tinker.desk import FACTS
from tilth.serve.tinker.folders import CheckpointPath
from tilth.serve.tinker.wire import Datum
from tilth.serve.tinker.worker import AdamStep, ModelSpec, SharedBase, TrainedModel, read_state

ADAM = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
PROMPT = types.ModelInput.from_ints(TOKENIZER.encode("1+2="))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return base(tmp_path_factory.mktemp("base") / "m")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("state"), name="Org/small", requests=64) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return service(server)


def rows(seed, lengths=(5, 9)):
    numbers = np.random.default_rng(seed)
    return [numbers.integers(3, 20, n + 1) for n in lengths]


def datum(row):
    weights = {"weights": [1.0] * (len(row) - 1)}
    return types.Datum(types.ModelInput.from_ints(row[:-1].tolist()), {"target_tokens": row[1:].tolist(), **weights})


def sampled_datum(prompt, sequence, advantage, **more):
    """A datum of a sample, with its provenance. more: columns in place of the sample's."""
    before, count = prompt.length - 1, len(sequence.tokens)
    columns = {
        "target_tokens": np.array([0] * before + sequence.tokens),
        "logprobs": np.float32([0.0] * before + sequence.logprobs),
        "advantages": np.float32([0.0] * before + [advantage] * count),
        **more,
    }
    name, prompted, sampled = sequence.sequence_id, types.PromptProvenanceSpan, types.SampledProvenanceSpan
    tokens = types.ModelInput.from_ints(prompt.to_ints() + sequence.tokens[:-1])
    inputs = [prompted(sequence_id=name, length=before + 1), sampled(sequence_id=name, length=count - 1)]
    targets = [prompted(sequence_id=name, offset=1, length=before), sampled(sequence_id=name, length=count)]
    return types.Datum(tokens, columns).with_provenance(model_input=inputs, loss_fn_inputs=targets)


def own_datum(row):
    return Datum(row[:-1], {"target_tokens": row[1:], "weights": np.ones(len(row) - 1, np.float32)})


def run(client, steps=3, begin=0, **more):
    """Steps of a supervised loop; the metrics of each."""
    trained = client.create_lora_training_client("Org/small", **more).result() if "rank" in more else more["trained"]
    found = []
    for step in range(begin, begin + steps):
        passed, done = trained.forward_backward([*map(datum, rows(step))], "cross_entropy"), trained.optim_step(ADAM)
        found.append((passed.result(), done.result().metrics))
    return trained, found


def weights_of(server, trained, name):
    """Weights and optimizer state of a run, as the server saves them."""
    trained.save_state(name).result()
    folder = server.desk.folder.checkpoint(CheckpointPath(trained.model_id, "weights", name))
    return read_state(folder)[0]


RANKS = [pytest.param(4, id="lora"), pytest.param(0, id="full", marks=pytest.mark.slow)]


@pytest.mark.parametrize("rank", RANKS)
def test_a_loop_through_the_sdk_is_the_loop_in_process_bit_for_bit(server, client, model, rank):
    trained, found = run(client, rank=rank, seed=3)
    loaded = load_model(model)
    lora = LoraConfig(rank=rank, alpha=ALPHA, targets=sum(TARGETS.values(), ())) if rank else LoraConfig(rank=0)
    twin = TrainedModel(SharedBase(loaded.config, loaded.tensors), ModelSpec(lora, 3))
    for step, (passed, metrics) in enumerate(found):
        logprobs, sums = twin.forward_backward([*map(own_datum, rows(step))], "cross_entropy", {}, forward_only=False)
        assert passed.metrics == sums
        assert all(np.array_equal(a["logprobs"].to_numpy(), b) for a, b in zip(passed.loss_fn_outputs, logprobs))
        assert metrics == twin.step(AdamStep(1e-2, (0.9, 0.95), 1e-12, 0.0, 1.0))
    stored, mine = weights_of(server, trained, "end"), twin.state()
    assert stored.keys() == mine.keys() and all(torch.equal(stored[name], mine[name]) for name in mine)
    info = trained.get_info()
    assert (info.lora_rank, info.is_lora) == (rank or None, bool(rank))


@pytest.mark.slow
def test_a_custom_loss_is_forward_and_weights(client):
    trained = client.create_lora_training_client("Org/small", rank=4, seed=3).result()
    twin = client.create_lora_training_client("Org/small", rank=4, seed=3).result()
    data = [*map(datum, rows(1))]

    def squares(given, logprobs):
        return sum((one**2).sum() for one in logprobs), {"squares": 1.0}

    found = trained.forward_backward_custom(data, squares).result()
    logprobs = twin.forward(data, "cross_entropy").result().loss_fn_outputs
    inputs = [
        {"target_tokens": one.loss_fn_inputs["target_tokens"], "weights": -2 * p["logprobs"].to_torch()}
        for one, p in zip(data, logprobs)
    ]
    again = [types.Datum(one.model_input, columns) for one, columns in zip(data, inputs)]
    twin.forward_backward(again, "cross_entropy").result()
    assert trained.optim_step(ADAM).result().metrics == twin.optim_step(ADAM).result().metrics
    assert found.metrics["loss:sum"] == pytest.approx(
        sum(float((p["logprobs"].to_torch() ** 2).sum()) for p in logprobs), rel=1e-5
    )


def test_log_probs_of_several_targets_for_a_token_come_in_their_shape(client):
    trained = client.create_lora_training_client("Org/small", rank=4, seed=3).result()
    (row,) = rows(1, (6,))
    targets, weights = np.stack([row[1:], row[:-1]], 1), np.ones((6, 2), np.float32)
    soft = types.Datum(types.ModelInput.from_ints(row[:-1].tolist()), {"target_tokens": targets, "weights": weights})
    found = trained.forward_backward([soft, soft], "cross_entropy").result().loss_fn_outputs
    plain = trained.forward([datum(row)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    assert [one["logprobs"].shape for one in found] == [[6, 2]] * 2
    np.testing.assert_allclose(found[1]["logprobs"].to_numpy().reshape(6, 2)[:, 0], plain, atol=1e-5)


def test_samples_come_from_the_weights_that_were_saved(client):
    trained, _ = run(client, steps=8, rank=8, seed=1)
    old = client.create_sampling_client(base_model="Org/small").result()
    new = trained.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    one, other = (who.sample(PROMPT, 3, params, include_prompt_logprobs=True).result() for who in (old, new))
    for who, answer in ((old, one), (new, other)):
        first = answer.sequences[0]
        whole = types.ModelInput.from_ints(PROMPT.to_ints() + first.tokens)
        scored = who.compute_logprobs(whole).result()
        np.testing.assert_allclose(scored[PROMPT.length :], first.logprobs, atol=1e-4)
        assert answer.prompt_logprobs[0] is None
        np.testing.assert_allclose(answer.prompt_logprobs[1:], scored[1 : PROMPT.length], atol=1e-5)
        assert all(s.stop_reason == "stop" or len(s.tokens) == 8 for s in answer.sequences)
    assert not np.allclose(one.prompt_logprobs[1:], other.prompt_logprobs[1:], atol=1e-3)
    assert len({tuple(s.tokens) for s in other.sequences}) > 1
    assert len({s.sequence_id for s in other.sequences}) == 3


def test_samples_are_trained_on_by_the_losses_of_recipes(server, client):
    """Neither loss moves anything but by REINFORCE where the model is the one that sampled."""
    trained = client.create_lora_training_client("Org/small", rank=4, seed=1).result()
    sampler = trained.save_weights_and_get_sampling_client(record_stability_info=True).result()
    answer = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=6, seed=1)).result()
    data = [sampled_datum(PROMPT, one, 1.0 - 2 * i) for i, one in enumerate(answer.sequences)]
    marked = [np.float32(one.loss_fn_inputs["advantages"].to_numpy() != 0) for one in data]
    norms = []
    for loss in ("importance_sampling", "stable_reinforce", "gspo"):
        more = [{"sequence_ratio_mask": mask} if loss == "gspo" else {} for mask in marked]
        given = [sampled_datum(PROMPT, s, 1.0 - 2 * i, **more[i]) for i, s in enumerate(answer.sequences)]
        trained.forward_backward(given, loss).result()
        still = types.AdamParams(learning_rate=0.0)
        norms.append(trained.optim_step(still).result().metrics["grad_norm:mean"])
    assert norms[0] > 0 and norms == pytest.approx([norms[0]] * 3, rel=1e-3)
    other = service(server).create_lora_training_client("Org/small", rank=4).result()
    plain = [types.Datum(one.model_input, one.loss_fn_inputs) for one in data]
    for who, wrong in ((trained, plain), (other, data)):  # without provenance; of another session
        with pytest.raises(tinker.RequestFailedError) as failed:
            who.forward_backward(wrong, "stable_reinforce").result()
        assert failed.value.category is types.RequestErrorCategory.User
    trained.forward_backward(data, "stable_reinforce", {"kl_coeff": 0.1}).result()


@pytest.mark.parametrize("count, most", [(40, 16), pytest.param(2000, 512, marks=pytest.mark.slow)])
def test_any_number_of_samples_may_be_asked_for_at_once_and_training_goes_on(model, tmp_path, count, most):
    with serving(model, tmp_path, name="Org/small") as server:
        server.desk.samplers.line.most, server.desk.room.most = most, most
        trained, _ = run(service(server), rank=4, steps=1)
        sampler = trained.save_weights_and_get_sampling_client().result()
        prompts = [types.ModelInput.from_ints(rows(i, (4 + i % 9,))[0].tolist()) for i in range(count)]
        scores = [sampler.compute_logprobs(prompt) for prompt in prompts]
        samples = [sampler.sample(one, 2, types.SamplingParams(max_tokens=2)) for one in prompts[: count // 4]]
        run(service(server), rank=4, steps=2)
        assert [len(one.result()) for one in scores] == [prompt.length for prompt in prompts]
        assert {len(one.result().sequences) for one in samples} == {2}
        assert server.desk.samplers.line.taken == 0
        alone = sampler.compute_logprobs(prompts[7]).result()
        assert scores[7].result()[1:] == pytest.approx(alone[1:], abs=1e-6)


@pytest.mark.slow
def test_adapters_of_experts_are_trained_and_sampled_from(tmp_path):
    """The engine of all samplers serves them; its log-probs are those of the trained model."""
    experts = {"num_experts": 3, "experts_per_token": 2, "expert_size": 16, "expert_layers": (0, 1)}
    with serving(base(tmp_path / "base", **experts), tmp_path / "state", name="Org/small") as server:
        trained, _ = run(service(server), rank=4, seed=1, steps=4)
        old = service(server).create_sampling_client(base_model="Org/small").result()
        new = trained.save_weights_and_get_sampling_client().result()
        scores = []
        for who in (old, new):
            (one,) = who.sample(PROMPT, 1, types.SamplingParams(max_tokens=6, seed=2)).result().sequences
            scored = who.compute_logprobs(types.ModelInput.from_ints(PROMPT.to_ints() + one.tokens)).result()
            np.testing.assert_allclose(scored[PROMPT.length :], one.logprobs, atol=1e-4)
            scores.append(scored[1 : PROMPT.length])
        assert trained.save_weights_external("files").result().path.endswith("files")
        assert not np.allclose(*scores, atol=1e-3)


def test_a_seed_stops_and_likely_tokens_are_honoured(client):
    sampler = client.create_sampling_client(base_model="Org/small").result()
    seeded = types.SamplingParams(max_tokens=6, seed=5)
    first, second = (sampler.sample(PROMPT, 2, seeded, topk_sample_logprobs=2).result() for _ in range(2))
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    for one in first.sequences:
        assert len(one.topk_logprobs) == len(one.tokens) and all(len(two) == 2 for two in one.topk_logprobs)
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
    (likely,) = (
        sampler.sample(PROMPT, 1, greedy, topk_prompt_logprobs=3, include_prompt_logprobs=True).result().sequences
    )
    at_second = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[likely.tokens[1]])
    (ended,) = sampler.sample(PROMPT, 1, at_second).result().sequences
    assert (ended.tokens, ended.stop_reason) == (likely.tokens[:2], "stop") or likely.tokens[0] == likely.tokens[1]


def test_log_probs_of_few_targets_are_those_of_the_prompts_tokens(client):
    sampler = client.create_sampling_client(base_model="Org/small").result()
    own, one = PROMPT.to_ints(), types.SamplingParams(max_tokens=1)
    ids = torch.full((len(own) - 1, 6), -1, dtype=torch.int64)
    ids[0, 1], ids[2, 0] = own[1], own[3]
    dense, sparse = (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1))
    found = []
    for asked in (dense, sparse):
        answer = sampler.sample(PROMPT, 1, one, include_prompt_logprobs=True, target_prompt_logprobs=asked).result()
        found.append(answer.target_prompt_logprobs)
    assert found[1].sparse_col_indices == [1, 0] and found[1].data == [answer.prompt_logprobs[i] for i in (1, 3)]
    values = found[0].to_torch()
    assert (values.isnan() == (ids < 0)).all() and values[ids >= 0].tolist() == found[1].data
    with pytest.raises(tinker.BadRequestError):
        sampler.sample(PROMPT, 1, one, target_prompt_logprobs=types.TensorData.from_torch(ids - 1)).result()


def test_checkpoints_are_listed_loaded_and_deleted(server, client):
    trained, _ = run(client, rank=4, seed=2)
    path = trained.save_state("middle", user_metadata={"a": "b"}, ttl_seconds=3600).result().path
    sampled = trained.save_weights_for_sampler("sampled").result().path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-x")
    listed = {one.tinker_path: one for one in rest.list_checkpoints(trained.model_id).result().checkpoints}
    assert listed.keys() == {path, sampled}
    assert listed[path].user_metadata == {"a": "b"} and listed[path].expires_at is not None
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    again = client.create_training_client_from_state_with_optimizer(path).result()
    fresh = client.create_training_client_from_state(path).result()
    _, found = run(client, trained=trained, begin=3)
    _, same = run(client, trained=again, begin=3)
    _, other = run(client, trained=fresh, begin=3)
    assert [a for _, a in found] == [a for _, a in same]
    assert found[0][0].metrics == other[0][0].metrics and found[-1][0].metrics != other[-1][0].metrics
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state(path.replace("middle", "nothing")).result()
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state_with_optimizer(sampled).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert [one.tinker_path for one in rest.list_checkpoints(trained.model_id).result().checkpoints] == [sampled]
    assert client.create_sampling_client(model_path=sampled).result().get_base_model() == "Org/small"
    runs = rest.list_training_runs(limit=100).result()
    assert trained.model_id in [one.training_run_id for one in runs.training_runs]


def test_files_for_others_are_downloaded_by_signed_links(server, client):
    trained, _ = run(client, rank=4, seed=2, steps=1)
    path = trained.save_weights_external("files").result().path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-x")
    urls = rest.get_external_weights_urls(path).result().urls
    assert urls.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert httpx.get(urls["adapter_config.json"]).json()["r"] == 4
    assert httpx.get(urls["adapter_config.json"].replace("expires=", "expires=1")).status_code == 404


def test_publishing_and_what_else_is_not_offered_is_refused_with_a_sentence(server, client):
    trained, _ = run(client, rank=4, seed=2, steps=1)
    path = trained.save_state("mine").result().path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-x")
    with pytest.raises(tinker.BadRequestError) as refused:
        rest.publish_checkpoint_from_tinker_path(path).result()
    assert "save_weights_external" in str(refused.value)
    for method, place in (("POST", "copy_weights"), ("GET", "audit"), ("POST", "sessions/search"), ("POST", "nothing")):
        assert httpx.request(method, f"{server.url}/api/v1/{place}").status_code == 400
    with pytest.raises(tinker.RequestFailedError):
        trained.save_weights_and_get_sampling_client(kind="inflight").result()
    sampler = client.create_sampling_client(base_model="Org/small").result()
    with pytest.raises(tinker.BadRequestError):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2), prompt_alt_tokens_k=2).result()


def test_bad_input_reaches_the_client_as_the_sdks_own_errors_and_the_client_goes_on(client):
    with pytest.raises(tinker.BadRequestError):
        client.create_lora_training_client("Org/other", rank=4).result()
    with pytest.raises(tinker.BadRequestError):
        client.create_lora_training_client("Org/small", rank=4, train_mlp=False, train_attn=False).result()
    trained = client.create_lora_training_client("Org/small", rank=4).result()
    data = [*map(datum, rows(1))]
    with pytest.raises(tinker.RequestFailedError) as failed:
        trained.forward_backward(data, "ppo").result()
    assert failed.value.category is types.RequestErrorCategory.User and "advantages" in str(failed.value)
    with pytest.raises(tinker.RequestFailedError):
        trained.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError):
        trained.forward_backward(data, "gspo").result()
    for wrong in (-1.0, float("nan")):
        with pytest.raises(tinker.RequestFailedError):
            trained.optim_step(types.AdamParams(learning_rate=wrong)).result()  # what follows does not wait for it
    trained.save_state("same").result()
    with pytest.raises(tinker.RequestFailedError):
        trained.save_state("same").result()
    with pytest.raises(tinker.RequestFailedError):
        trained.save_state("../same").result()
    assert trained.save_state("same", overwrite=True).result().path.endswith("same")
    trained.forward_backward(data, "cross_entropy").result()
    assert trained.optim_step(ADAM).result().metrics["step:max"] == 1


def test_a_request_that_is_sent_again_runs_once_and_another_with_its_number_is_refused(server, client):
    trained = client.create_lora_training_client("Org/small", rank=4, seed=4).result()
    trained.forward_backward([*map(datum, rows(1))], "cross_entropy").result()
    body = {"model_id": trained.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    answers = [httpx.post(f"{server.url}/api/v1/optim_step", json=body).json() for _ in range(3)]
    assert len({json.dumps(one) for one in answers}) == 1
    found = httpx.post(f"{server.url}/api/v1/retrieve_future", json={"request_id": answers[0]["request_id"]}).json()
    assert found["metrics"]["step:max"] == 1
    body["adam_params"]["learning_rate"] = 0.02
    again = httpx.post(f"{server.url}/api/v1/optim_step", json=body)
    assert again.status_code == 400 and "two clients with one name" in again.json()["detail"]
    with_lora = {"session_id": trained.model_id.split(":")[0], "model_seq_id": 0, "base_model": "Org/small"}
    again = httpx.post(f"{server.url}/api/v1/create_model", json={**with_lora, "lora_config": {"rank": 5}})
    assert again.status_code == 400 and "two clients with one name" in again.json()["detail"]


@pytest.mark.parametrize(
    "place, body, field",
    [
        ("optim_step", {"model_id": "m"}, "seq_id"),
        ("optim_step", {"model_id": "m", "seq_id": 1, "adam_params": {"beta1": 2}}, "adam_params.beta1"),
        ("asample", {"sampling_session_id": "s", "seq_id": 0}, "prompt"),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "b", "more": 1}, "more"),
        ("retrieve_future", {"request_id": "odd"}, "request_id"),
        ("create_session", [], "body"),
    ],
)
def test_a_malformed_body_is_refused_by_its_field(server, place, body, field):
    found = httpx.post(f"{server.url}/api/v1/{place}", json=body)
    assert found.status_code == 400 and field in found.json()["detail"]


def test_data_of_one_pass_may_be_larger_than_a_prompt(server):
    """A body that the server in front refused would leave a gap in the numbers, and later requests would wait."""
    found = httpx.post(f"{server.url}/api/v1/forward_backward", content=b"{" + b" " * BODY + b"}")
    assert found.status_code == 400
    assert httpx.post(f"{server.url}/api/v1/create_session", content=b" " * (LARGEST + 1)).status_code == 413


@pytest.mark.slow
def test_eight_clients_at_once_each_train_their_own(server, client):
    def one(seed):
        _, found = run(service(server), steps=2, rank=2, seed=seed)
        return [passed.metrics for passed, _ in found]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
    assert together[0] == one(0) and together[5] == one(5)
    assert len({json.dumps(each) for each in together}) > 1


def test_a_client_that_asks_too_much_waits(server):
    queue = server.desk.clients[next(iter(server.desk.clients))].queue
    before, queue.most = queue.most, 0
    body = {"model_id": queue.name, "seq_id": queue.next, "adam_params": {}}
    try:
        assert httpx.post(f"{server.url}/api/v1/optim_step", json=body).status_code == 429
    finally:
        queue.most = before


def test_the_session_says_what_differs_and_ends(server):
    made = service(server)
    made.create_sampling_client(base_model="Org/small").result()
    name = made.holder.get_session_id()
    rest = tinker.RestClient(base_url=server.url, api_key="tml-x")
    assert rest.get_session(name).result().sampler_ids == [f"{name}:sample:0"]
    made.close("success").result()
    assert httpx.post(f"{server.url}/api/v1/session_heartbeat", json={"session_id": name}).status_code == 410


@pytest.mark.slow
def test_a_token_is_asked_for_but_not_by_signed_links(model, tmp_path):
    with serving(model, tmp_path, name="Org/small", token="tml-secret") as server:
        with pytest.raises(tinker.AuthenticationError):
            service(server).create_sampling_client(base_model="Org/small").result()
        own = tinker.ServiceClient(base_url=server.url, api_key="tml-secret")
        trained, _ = run(own, rank=2, seed=1, steps=1)
        path = trained.save_weights_external("files").result().path
        rest = tinker.RestClient(base_url=server.url, api_key="tml-secret")
        urls = rest.get_external_weights_urls(path).result().urls
        assert httpx.get(urls["adapter_config.json"]).status_code == 200


def test_no_answer_waits_for_an_acknowledgement(server):
    """Without TCP_NODELAY every answer on a kept connection costs the 40 ms of a delayed ACK."""
    with httpx.Client() as kept:
        kept.get(f"{server.url}/api/v1/healthz")
        sockets = [one.transport.get_extra_info("socket") for one in list(server.server.server_state.connections)]
        assert sockets and all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)


def test_openais_interface_is_on_the_same_server(server):
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    body = {"model": listed[0]["id"], "prompt": "1+2=", "max_tokens": 4}
    assert httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] <= 4
    assert "tilth_requests_total" in httpx.get(f"{server.url}/metrics").text


LIMITS = [
    ("asample", {"sampling_params": {"top_k": 2**63}}, "sampling_params.top_k"),
    ("asample", {"sampling_params": {"stop": [2**63]}}, "sampling_params.stop"),
    ("asample", {"sampling_params": {"seed": 2**63}}, "sampling_params.seed"),
    ("asample", {"seq_id": 2**63}, "seq_id"),
    ("asample", {"prompt": {"chunks": [{"tokens": [2**70]}]}}, "prompt.chunks"),
    ("asample", {"target_prompt_logprobs": {"data": [2**70], "dtype": "int64"}}, "target_prompt_logprobs.data"),
    ("asample", {"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [0, -1]}}, "target_prompt_logprobs"),
    ("optim_step", {"model_id": "m", "seq_id": 2**31}, "seq_id"),
    ("save_weights", {"model_id": "m", "seq_id": 1, "path": "p", "ttl_seconds": 10**17}, "ttl_seconds"),
    ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 10**300}, "sampling_session_seq_id"),
    ("retrieve_future", {"request_id": f"f/m/{'9' * 5000}"}, "request_id"),
]


@pytest.mark.parametrize("place, body, field", LIMITS)
def test_a_number_without_end_is_refused_before_it_reaches_anything(server, place, body, field):
    if place == "asample":
        whole = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": [{"tokens": [3]}]}}
        body = {**whole, "sampling_params": {"max_tokens": 2}, **body}
    found = httpx.post(f"{server.url}/api/v1/{place}", json=body)
    assert found.status_code == 400 and found.json()["key"].startswith(field), found.text
    assert server.desk.room.restarts == 0


def test_a_signature_may_have_any_letters(server):
    found = httpx.get(f"{server.url}/api/v1/files/a/b/c/d?expires=1&signature=%C3%A9")
    assert (found.status_code, found.json()["key"]) == (404, "link.signature")


def test_a_traceback_of_a_worker_is_in_no_answer(server, client, monkeypatch):
    broken = WorkerError("role train, rank 0: it broke\nTraceback (most recent call last): ...", key="train.create")

    async def breaks(*given, **more):
        raise broken

    trained = client.create_lora_training_client("Org/small", rank=4, seed=4).result()
    monkeypatch.setattr(server.desk.room, "forward_backward", breaks)
    with pytest.raises(tinker.RequestFailedError) as caught:
        trained.forward([*map(datum, rows(1))], "cross_entropy").result()
    assert "it broke" in str(caught.value) and "Traceback" not in str(caught.value)
    monkeypatch.setattr(server.desk.runner, "trouble", broken)
    found = httpx.get(f"{server.url}/api/v1/healthz")
    assert found.status_code == 503 and "Traceback" not in found.text


def test_paths_are_counted_by_their_routes(server):
    for number in range(3):
        path = f"{number}{'A' * 2000}"
        assert httpx.get(f"{server.url}/api/v1/files/r/k/n/{path}?expires=1&signature=x").status_code == 404
        assert httpx.get(f"{server.url}/v1/models/{path}").status_code == 404
        assert httpx.get(f"{server.url}/api/v1/{path}").status_code == 400
        assert httpx.get(f"{server.url}/{path}").status_code == 404
    page = httpx.get(f"{server.url}/metrics").text
    assert "AAAA" not in page and 'path="/v1/models/{name:path}"' in page
    assert 'path="/api/v1/files/{run}/{kind}/{name}/{file}"' in page


def test_silent_sessions_without_models_make_place_for_new_ones(model, tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.serve.tinker.desk.SESSIONS", 3)

    def begin(**more):
        return httpx.post(f"{server.url}/api/v1/create_session", json={"sdk_version": "0", "tags": [], **more})

    with serving(model, tmp_path, name="Org/small") as server:
        first, *others = [begin().json()["session_id"] for _ in range(3)]
        sampler = {"session_id": first, "sampling_session_seq_id": 0, "base_model": "Org/small"}
        assert httpx.post(f"{server.url}/api/v1/create_sampling_session", json=sampler).status_code == 200
        assert (found := begin()).status_code == 429 and found.json()["key"] == "service.sessions"
        httpx.post(f"{server.url}/api/v1/sessions/{first}/finish", json={})
        last = begin().json()["session_id"]
        assert [*server.desk.sessions] == [*others, last] and not server.desk.samplers.samplers
        assert sorted(path.name for path in (tmp_path / "sessions").iterdir()) == sorted([*others, last])
        assert (found := begin(user_metadata={"a": "b" * FACTS})).status_code == 400
        assert found.json()["key"] == "user_metadata"
