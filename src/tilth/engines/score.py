"""Log-probs and embeddings of texts that are there: one forward pass over packed sequences, as the trainer's."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.core.errors import DataError
from tilth.core.trajectory import Likeliest
from tilth.engines.request import TextScores
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.plan.kernels import chunk_rows

Serving = Callable[[int], AbstractContextManager[object]]
"""Changes the rows of a pass, so many, by an adapter."""


def _passed(model: Decoder, texts: Sequence[np.ndarray], parity: bool, serving: Serving) -> tuple[np.ndarray, Tensor]:
    """Return all tokens int64 [T] and their hidden states after the final norm [T, hidden]. Raises DataError."""
    ids, vocabulary = np.concatenate([np.zeros(0, np.int64), *texts]), model.head_weight.shape[0]
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise DataError(f"a token id is outside the vocabulary of {vocabulary}", key="request.prompt.vocab_size")
    device = model.head_weight.device
    context = PackedContext([len(text) for text in texts], device, parity)
    with serving(len(context.positions)):
        return ids, model(ModelInput(torch.from_numpy(ids).to(device)), context)


@torch.inference_mode()
def embedded(
    model: Decoder, texts: Sequence[np.ndarray], pooling: str, parity: bool, serving: Serving
) -> list[np.ndarray]:
    """Return ``GenerationEngine.embed``. Raises DataError."""
    _, hidden = _passed(model, texts, parity, serving)
    rows = hidden.float().split([len(text) for text in texts])
    return [F.normalize(row.mean(0) if pooling == "mean" else row[-1], dim=0).cpu().numpy() for row in rows]


@torch.inference_mode()
def scored(
    model: Decoder, texts: Sequence[np.ndarray], likeliest: int, parity: bool, serving: Serving
) -> list[TextScores]:
    """Return ``GenerationEngine.score``; the texts are packed into one pass. Raises DataError."""
    ids, hidden = _passed(model, texts, parity, serving)
    lengths, device, vocabulary = [len(text) for text in texts], hidden.device, model.head_weight.shape[0]
    rows, chunk, k = len(ids), chunk_rows(vocabulary, None), min(likeliest, vocabulary)
    chosen = np.zeros(rows, np.float32)
    top = Likeliest(np.zeros((rows, k), np.int64), np.zeros((rows, k), np.float32))
    following = torch.from_numpy(np.append(ids[1:], 0)).to(device)
    for start in range(0, rows, chunk):
        some = slice(start, min(start + chunk, rows))
        logp = model.logits(hidden[some]).float().log_softmax(-1)
        chosen[some] = logp.gather(1, following[some, None])[:, 0].cpu().numpy()
        best = logp.topk(k)
        top.ids[some], top.logprobs[some] = best.indices.cpu().numpy(), best.values.cpu().numpy()
    ends = np.cumsum(lengths)
    own = [slice(end - length, end - 1) for end, length in zip(ends.tolist(), lengths)]
    return [TextScores(chosen[one], Likeliest(top.ids[one], top.logprobs[one])) for one in own]
