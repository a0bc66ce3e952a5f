"""Messages of Tinker's API that travel as Protocol Buffers: data to train on, and answers of the size of data.

The table has the fields of the SDK's version 0.38 by their numbers; a field that it lacks is unknown here, and a
message that has one is refused, since its meaning would be lost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, unknown_fields
from google.protobuf.message import DecodeError, Message

from tilth.core.errors import DataError

MEDIA = "application/x-protobuf"
PACKAGE = "tinker_public"
MESSAGES: Mapping[str, tuple[str, ...]] = {
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense bytes |", "2 sparse_csr SparseCsr |", "3 dtype enum", "4 shape int64 *"),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype enum", "4 trailing_shape int64 *"),
    "ArrayRecord": ("1 type_tag string", "2 fields BatchedTensor @", "3 num_datums int64"),
    "ForwardBackwardOutput": ("1 loss_fn_output_type string", "2 loss_fn_outputs ArrayRecord *", "3 metrics double @"),
    "EncodedTextChunk": ("1 tokens bytes",),
    "ImageChunk": ("1 data bytes", "2 format string"),
    "DmelChunk": ("1 dmel bytes",),
    "Chunk": ("1 encoded_text EncodedTextChunk |", "2 image ImageChunk |", "3 dmel DmelChunk |"),
    "SourceSpan": ("1 sequence_id string", "2 offset int64", "3 length int64"),
    "ProvenanceSpan": ("1 prompt_tokens SourceSpan |", "2 sampled_tokens SourceSpan |"),
    "Datum": (
        "1 model_input Chunk *", "2 loss_fn_inputs Tensor @", "3 model_input_spans ProvenanceSpan *",
        "4 loss_fn_input_spans ProvenanceSpan *",
    ),
    "LossConfigValue": ("1 number double |", "2 text string |"),
    "ForwardBackwardRequest": (
        "1 model_id string", "2 seq_id int32", "3 data Datum *", "4 loss_fn string", "5 loss_fn_config double @",
        "6 forward_only bool", "7 loss_fn_config_v2 LossConfigValue @",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SampledSequence": (
        "1 stop_reason enum", "2 tokens bytes", "3 logprobs bytes", "4 topk_sampled_logprobs TopkLogprobs",
    ),
    "PromptAltTokens": ("1 tokens Tensor", "2 logprobs Tensor"),
    "SampleResponse": (
        "1 sequences SampledSequence *", "2 prompt_logprobs bytes", "3 topk_prompt_logprobs TopkLogprobs",
        "4 prompt_cache_hit_tokens int32", "5 target_prompt_logprobs Tensor", "6 prompt_alt_tokens PromptAltTokens",
    ),
}  # fmt: skip
"""Message -> "number name type", and * for repeated, @ for a map from names, | for one of several."""
_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES: Mapping[str, Any] = {
    "bytes": _FIELD.TYPE_BYTES, "string": _FIELD.TYPE_STRING, "double": _FIELD.TYPE_DOUBLE, "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32, "int64": _FIELD.TYPE_INT64, "uint32": _FIELD.TYPE_UINT32, "enum": _FIELD.TYPE_INT32,
}  # fmt: skip
MOST = 1 << 14
"""Most sequences of a request; the SDK sends 1,024 at most in one."""
DENSE = 1 << 24
"""Most values of a sparse matrix with its zeros filled in: those of the largest body without any."""
FLOAT32, INT64 = 1, 2
_DTYPES: Mapping[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
STOP_REASONS = {"stop": 0, "length": 1}


def _field(message: Any, number: str, name: str, kind: str, mark: str = "") -> None:
    """Add one field of the table to a message."""
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if mark in ("*", "@"):
        field.label = _FIELD.LABEL_REPEATED
    if mark == "@":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _field(entry, "1", "key", "string")
        _field(entry, "2", "value", kind)
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{message.name}.{entry.name}"
    elif kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0


def _classes() -> Mapping[str, type[Message]]:
    """Return the classes of all messages of the table, in a pool of their own."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for row in fields:
            _field(message, *row.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


_CLASS = _classes()


class ProvenanceRun(NamedTuple):
    """Tokens of a datum that are those of one sample, or of its prompt, from an offset on."""

    sampled: bool
    sequence: str
    offset: int
    length: int


@dataclass(frozen=True)
class Datum:
    """One sequence: tokens int64 [N] of the input, and columns of the loss by name, float32 or int64.

    inputs, targets: where the tokens and ``target_tokens`` are from, in runs that tile them; empty: not said.
    """

    tokens: np.ndarray
    columns: Mapping[str, np.ndarray]
    inputs: Sequence[ProvenanceRun] = ()
    targets: Sequence[ProvenanceRun] = ()

    @property
    def sampled(self) -> np.ndarray:
        """Targets that a model sampled, by their provenance: bool [N]."""
        return np.repeat([run.sampled for run in self.targets], [run.length for run in self.targets]).astype(bool)


class TrainRequest(NamedTuple):
    """Request for a forward pass, and a backward pass unless ``forward_only``."""

    model: str
    seq: int
    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool


class Topk(NamedTuple):
    """The most likely tokens at each place, int64 [n, k], and their log-probs float32 [n, k]; NaN: not asked for."""

    tokens: np.ndarray
    logprobs: np.ndarray


class SampledTokens(NamedTuple):
    """One completion: tokens int64 [n], log-probs float32 [n]."""

    finish: str
    tokens: np.ndarray
    logprobs: np.ndarray
    topk: Topk | None = None


def read_train_request(body: bytes) -> TrainRequest:
    """Return the request that a body holds. DataError names the field that is wrong."""
    found: Any = _CLASS["ForwardBackwardRequest"]()
    try:
        found.ParseFromString(body)
    except DecodeError as error:
        raise DataError(f"the body is no ForwardBackwardRequest: {error}", key="body") from error
    _check_known(found, "request")
    options: dict[str, float | str] = dict(found.loss_fn_config)
    for name, value in found.loss_fn_config_v2.items():
        options[name] = value.text if value.WhichOneof("one") == "text" else value.number
    if len(found.data) > MOST:
        message = f"data has {len(found.data)} sequences, the limit of one request is {MOST}: send several"
        raise DataError(message, key="data.count")
    data = [_datum(i, datum) for i, datum in enumerate(found.data)]
    return TrainRequest(found.model_id, found.seq_id, data, found.loss_fn, options, found.forward_only)


def place_of(body: bytes) -> tuple[str, int] | None:
    """Return model and number of a request for passes from the beginning of its body, which may be damaged behind;
    None: they are not there. Protocol Buffers write fields by their numbers, these first."""
    size, at = _varint(body, 1)
    name, (seq, _) = body[at : at + size], _varint(body, at + size + 1)
    if body[:1] != b"\x0a" or body[at + size : at + size + 1] != b"\x10" or seq < 1:
        return None
    return name.decode(errors="replace"), seq


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number of at most 31 bits and where it ends; 0: there is none."""
    for count, byte in enumerate(raw[at : at + 5]):
        if byte < 128:
            bits = [one & 127 for one in raw[at : at + count + 1]]
            return sum(bit << 7 * i for i, bit in enumerate(bits)), at + count + 1
    return 0, at


def _check_known(message: Any, where: str) -> None:
    more = unknown_fields.UnknownFieldSet(message)
    if len(more):
        numbers = ", ".join(str(field.field_number) for field in more)
        message = f"{where} has the fields {numbers}, which this server does not know: it speaks the API of tinker 0.38"
        raise DataError(message, key=f"{where}.unknown")


def _datum(i: int, datum: Any) -> Datum:
    where = f"data[{i}]"
    _check_known(datum, where)
    kinds = {chunk.WhichOneof("one") for chunk in datum.model_input}
    if other := kinds - {"encoded_text"}:
        message = f"{where}.model_input has a chunk of kind {other.pop()}; this server trains on text alone"
        raise DataError(message, key=f"{where}.model_input")
    raw = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    tokens = _numbers(raw, np.dtype("<i4"), f"{where}.model_input").astype(np.int64)
    columns = {name: _tensor(tensor, f"{where}.{name}") for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(tokens, columns, [*map(_run, datum.model_input_spans)], [*map(_run, datum.loss_fn_input_spans)])


def _run(span: Any) -> ProvenanceRun:
    sampled = span.WhichOneof("one") == "sampled_tokens"
    found = span.sampled_tokens if sampled else span.prompt_tokens
    return ProvenanceRun(sampled, found.sequence_id, found.offset, found.length)


def _tensor(tensor: Any, where: str) -> np.ndarray:
    """Return a tensor of at most two dimensions; a sparse one with zeros filled in."""
    if tensor.dtype not in _DTYPES:
        message = f"{where} has the dtype {tensor.dtype}; it must be float32 ({FLOAT32}) or int64 ({INT64})"
        raise DataError(message, key=f"{where}.dtype")
    kind, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("one") != "sparse_csr":
        values = _numbers(tensor.dense, kind, where)
        if shape and (min(shape) < 0 or math.prod(shape) != len(values)):
            message = f"{where} has {len(values)} values, which are not of the shape {list(shape)}"
            raise DataError(message, key=f"{where}.shape")
        return values.reshape(shape) if shape else values
    return _dense(tensor.sparse_csr, kind, shape, where)


def _dense(sparse: Any, kind: np.dtype[Any], shape: tuple[int, ...], where: str) -> np.ndarray:
    values = _numbers(sparse.values, kind, where)
    ends, columns = (_numbers(x, np.dtype("<i8"), where) for x in (sparse.crow_indices, sparse.col_indices))
    return filled(values, ends, columns, shape, where)


def filled(
    values: np.ndarray, ends: np.ndarray, columns: np.ndarray, shape: tuple[int, ...], where: str, rest: int = 0
) -> np.ndarray:
    """Return a matrix in compressed rows as a dense one, ``rest`` in its other cells. DataError."""
    counts = np.diff(ends)
    good = len(shape) == 2 and len(ends) == shape[0] + 1 and len(values) == len(columns) and (counts >= 0).all()
    good = good and ends[0] == 0 and ends[-1] == len(values)
    if good and math.prod(shape) > DENSE:
        message = f"{where} has the shape {list(shape)}, whose {math.prod(shape)} values are more than {DENSE}"
        raise DataError(message, key=f"{where}.shape")
    if not good or ((columns < 0) | (columns >= shape[1])).any():
        raise DataError(f"{where} is no sparse matrix of the shape {list(shape)}", key=f"{where}.sparse")
    found = np.full(shape, rest, values.dtype)
    found[np.repeat(np.arange(shape[0]), counts), columns] = values
    return found


def _numbers(raw: bytes, kind: np.dtype[Any], where: str) -> np.ndarray:
    if len(raw) % kind.itemsize:
        message = f"{where} has {len(raw)} bytes, not a multiple of the {kind.itemsize} bytes of an element"
        raise DataError(message, key=f"{where}.bytes")
    return np.frombuffer(raw, kind)


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the body of the answer to a ``TrainRequest``. logprobs: float32 [N] of each sequence, or [N, K]."""
    out: Any = _CLASS["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    sizes = [one.size * 4 for one in logprobs]
    field = record.fields["logprobs"]
    field.data, field.dtype = b"".join(one.astype("<f4").tobytes() for one in logprobs), FLOAT32
    field.offsets = np.concatenate([[0], np.cumsum(sizes)]).astype("<i8").tobytes()
    field.trailing_shape.extend(logprobs[0].shape[1:])
    return bytes(out.SerializeToString(deterministic=True))


def write_samples(
    sequences: Sequence[SampledTokens], prompt: np.ndarray | None = None, topk: Topk | None = None,
    targets: np.ndarray | None = None, sparse: bool = False,
) -> bytes:  # fmt: skip
    """Return the body of the answer to a request for samples.

    prompt: log-probs float32 [prompt], NaN where not asked for; targets: float32 [prompt - 1, K], likewise; sparse:
    these in compressed rows.
    """
    out: Any = _CLASS["SampleResponse"]()
    for one in sequences:
        row = out.sequences.add(stop_reason=STOP_REASONS[one.finish])
        row.tokens, row.logprobs = one.tokens.astype("<i4").tobytes(), one.logprobs.astype("<f4").tobytes()
        if one.topk is not None:
            _put_topk(row.topk_sampled_logprobs, one.topk)
    if prompt is not None:
        out.prompt_logprobs = prompt.astype("<f4").tobytes()
    if topk is not None:
        _put_topk(out.topk_prompt_logprobs, topk)
    if targets is not None:
        out.target_prompt_logprobs.dtype = FLOAT32
        out.target_prompt_logprobs.shape.extend(targets.shape)
        _put_values(out.target_prompt_logprobs, targets.astype("<f4"), sparse)
    return bytes(out.SerializeToString(deterministic=True))


def _put_values(out: Any, values: np.ndarray, sparse: bool) -> None:
    if not sparse:
        out.dense = values.tobytes()
        return
    asked = ~np.isnan(values)
    out.sparse_csr.values = values[asked].tobytes()
    out.sparse_csr.crow_indices = np.append(0, np.cumsum(asked.sum(1))).astype("<i8").tobytes()
    out.sparse_csr.col_indices = asked.nonzero()[1].astype("<i8").tobytes()


def read_samples(body: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tokens and log-probs, float32, of each sequence in an answer that ``write_samples`` made."""
    found: Any = _CLASS["SampleResponse"].FromString(body)
    return [(np.frombuffer(one.tokens, "<i4"), np.frombuffer(one.logprobs, "<f4")) for one in found.sequences]


_MASKED = -99999.0
"""Log-prob of a place that was not asked for, with token 0."""


def _put_topk(out: Any, topk: Topk) -> None:
    unknown = np.isnan(topk.logprobs)
    out.token_ids = np.where(unknown, 0, topk.tokens).astype("<i4").tobytes()
    out.logprobs = np.where(unknown, _MASKED, topk.logprobs).astype("<f4").tobytes()
    out.length, out.k = topk.tokens.shape
