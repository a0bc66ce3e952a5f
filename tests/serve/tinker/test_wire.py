"""Messages beside the SDK's own classes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError
from tilth.serve.tinker.wire import (
    MESSAGES,
    MOST,
    SampledTokens,
    Topk,
    place_of,
    read_train_request,
    write_output,
    write_samples,
)

OWN = {"PromptProvenanceSpan": "SourceSpan", "SampledProvenanceSpan": "SourceSpan"}
UNUSED = {"SamplingParams", "StopStrings", "StopTokens", "ImageDimensions"}


def request(**more):
    data = [types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], **more})]
    inner = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.7, "a": "b"})
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=inner, model_id="m", seq_id=3)
    )


def test_the_table_has_the_numbers_and_names_of_the_sdk():
    for name, message in tinker_public_pb2.DESCRIPTOR.message_types_by_name.items():
        if name in UNUSED:
            continue
        own = {int(number): field for number, field, *_ in map(str.split, MESSAGES[OWN.get(name, name)])}
        theirs = {field.number: field.name for field in message.fields}
        more = {n: f for n, f in theirs.items() if n not in own}
        assert own.items() <= theirs.items() and not (more.keys() - {3, 4} if name == "ImageChunk" else more)


def test_a_request_of_the_sdk_is_read():
    found = read_train_request(request(weights=torch.tensor([0.0, 1.0, 0.5])).SerializeToString())
    assert (found.model, found.seq, found.loss, found.forward_only) == ("m", 3, "ppo", False)
    assert found.options == {"clip_low_threshold": 0.7, "a": "b"}
    (row,) = found.data
    assert row.tokens.tolist() == [1, 2, 3] and row.columns["weights"].tolist() == [0, 1, 0.5]
    assert row.columns["target_tokens"].dtype == np.int64


def test_a_sparse_matrix_is_filled_with_zeros():
    sparse = torch.zeros(3, 40)
    sparse[1, 5], sparse[2, 0] = 2.0, 3.0
    message = request(weights=sparse)
    assert message.data[0].loss_fn_inputs["weights"].HasField("sparse_csr")
    (row,) = read_train_request(message.SerializeToString()).data
    assert np.array_equal(row.columns["weights"], sparse.numpy())


def test_answers_are_read_by_the_sdk():
    rows = [np.float32([1, 2]), np.float32([3]), np.zeros(0, np.float32)]
    found = deserialize_forward_backward_output(write_output(rows, {"loss:sum": 2.5}))
    assert [one["logprobs"].tolist() for one in found.loss_fn_outputs] == [[1, 2], [3], []]
    assert found.metrics == {"loss:sum": 2.5}
    topk = Topk(np.array([[0, 0], [3, 4]]), np.float32([[np.nan, np.nan], [-1, -2]]))
    one = SampledTokens("length", np.array([3, 4]), np.float32([-1, -2]), topk)
    answer = deserialize_sample_response(
        write_samples([one, one._replace(finish="stop", topk=None)], np.float32([np.nan, -1]), topk)
    )
    first, second = answer.sequences
    assert (first.stop_reason, second.stop_reason) == ("length", "stop")
    assert first.tokens == [3, 4] and second.logprobs == [-1, -2]
    assert answer.prompt_logprobs == [None, -1] and answer.topk_prompt_logprobs == [None, [(3, -1), (4, -2)]]


def broken(change):
    message = request()
    change(message)
    return message.SerializeToString()


@pytest.mark.parametrize(
    "body, key",
    [
        (b"\xff\xff", "body"),
        (broken(lambda m: m.data[0].model_input.add().image.SetInParent()), "data[0].model_input"),
        (
            broken(lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"abc")),
            "data[0].model_input.bytes",
        ),
        (broken(lambda m: setattr(m.data[0].loss_fn_inputs["x"], "dtype", 4)), "data[0].x.dtype"),
        (
            broken(lambda m: m.data[0].loss_fn_inputs["target_tokens"].shape.append(2)),
            "data[0].target_tokens.shape",
        ),
        (request().SerializeToString() + b"\xa0\x06\x01", "request.unknown"),
    ],
)
def test_a_broken_body_is_refused_by_its_field(body, key):
    with raises(DataError, key):
        read_train_request(body)


@settings(max_examples=examples(200))
@given(st.binary(max_size=200), st.integers(0, 80))
def test_noise_is_refused_and_never_more(noise, cut):
    for body in (noise, request().SerializeToString()[:cut] + noise):
        try:
            read_train_request(body)
        except DataError as error:
            assert error.key


@given(
    model=st.text(min_size=1, max_size=200), seq=st.integers(1, 2**31 - 1), behind=st.binary(), cut=st.integers(1, 9)
)
def test_model_and_number_are_read_from_the_beginning_of_a_body(model, seq, behind, cut):
    whole = tinker_public_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq).SerializeToString()
    assert place_of(whole + behind) == (model, seq)
    assert place_of(whole[:-cut]) is None
    assert place_of(behind) is None or behind[:1] == b"\n"


def odd(**fields):
    """A request whose one column has these fields."""
    found = request()
    column = found.data[0].loss_fn_inputs["target_tokens"]
    column.Clear()
    column.MergeFrom(type(column)(**fields))
    return found.SerializeToString()


def test_shapes_without_end_are_refused():
    with raises(DataError, "data[0].target_tokens.shape"):
        read_train_request(odd(dtype=2, dense=b"", shape=[2**32, 2**32]))  # whose product is 0 in 64 bits
    sparse = {"crow_indices": np.zeros(2, np.int64).tobytes()}
    with raises(DataError, "data[0].target_tokens.shape"):
        read_train_request(odd(dtype=2, sparse_csr=sparse, shape=[1, 2**40]))
    many = request()
    many.data.extend([many.data[0]] * MOST)
    with raises(DataError, "data.count"):
        read_train_request(many.SerializeToString())
