"""Independent ways to the same tokens: one request at a time, the whole sequence forward for each token, no cache."""

import numpy as np
import torch

from tilth.config.schema import LoraConfig
from tilth.core.random import stream
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.plan.lora import adapter_shapes

CONFIG = DecoderConfig(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True,
    max_positions=512,
)  # fmt: skip
WAYS = {
    "plain": {},
    "few-rows": {"max_rows": 5},
    "preemption": {"max_rows": 16, "kv_tokens": 320},
    "small-chunks": {"step_tokens": 23, "max_rows": 9},
    "other-blocks": {"block_size": 8, "max_rows": 7},
    "parity": {"parity": True},
}
"""Options of an engine by which a completion may not differ."""


def make_model(config=CONFIG, seed=0, dtype=torch.float32, scale=8.0):
    """A random model whose predictions are far from uniform, so that a wrong cache changes tokens."""
    model = Decoder(config, dtype)
    model.init_weights_(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model.to(dtype).requires_grad_(False)


def make_engine(model, **options):
    engine = Engine(model.config, EngineOptions(**{"seed": 7, "max_length": 256, "dtype": model.dtype, **options}))
    engine.update_weights(model.named_parameters(), version=1)
    return engine


LORAS = {
    "a": LoraConfig(rank=3, alpha=6.0),
    "b": LoraConfig(rank=8, alpha=4.0, rslora=True, targets=("q_proj", "down_proj")),
    "c": LoraConfig(rank=20, alpha=10.0, targets=("v_proj", "o_proj", "gate_proj")),
}


def halves(name, config=CONFIG, lora=None, size=1.0):
    """Tensors of an adapter that changes the model's predictions well."""
    generator = torch.Generator().manual_seed(ord(name[0]))
    shapes = adapter_shapes(config, lora or LORAS[name])
    return {half: size * torch.randn(shape, generator=generator) for half, shape in shapes.items()}


def draw(logits, u, params):
    """One token by brute force in float64: sort, filter, renormalise, walk along the vocabulary."""
    if params.temperature == 0:
        return int(np.argmax(logits)), 1.0
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    keep = np.ones(len(p), bool)
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        keep &= p >= p[order[min(params.top_k, len(p)) - 1]]
    if params.top_p < 1:
        inside = order[: params.top_k] if params.top_k else order
        mass = np.cumsum(p[inside]) / p[inside].sum()
        last = inside[np.searchsorted(mass, params.top_p)]
        keep &= p >= p[last]
    if params.min_p:
        keep &= p >= params.min_p * p.max()
    q = np.where(keep, p, 0)
    q /= q.sum()
    token = min(int(np.searchsorted(np.cumsum(q), u, side="right")), len(q) - 1)
    return token, q[token]


def naive(model, request, seed=7):
    """(tokens, float64 log-probs of the chosen ones before filters, after filters)."""
    tokens, raw, filtered = [int(t) for t in request.prompt], [], []
    params = request.params
    for _ in range(params.max_tokens):
        with torch.no_grad():
            hidden = model(torch.tensor(tokens), PackedContext([len(tokens)]))
            logits = model.logits(hidden[-1:])[0].double().numpy()
        u = stream(seed, "sample", request.id).uniform(len(tokens), 1).item()
        token, q = draw(logits, u, params)
        scaled = logits / (params.temperature or 1.0)
        raw.append(scaled[token] - np.logaddexp.reduce(scaled))
        filtered.append(np.log(q))
        tokens.append(token)
        if token in params.stop_tokens:
            break
    return tokens, np.array(raw), np.array(filtered)


KINDS = [
    SamplingParams(max_tokens=40, stop_tokens=(3, 5)),
    SamplingParams(max_tokens=25, temperature=0.0),
    SamplingParams(max_tokens=33, temperature=0.7, top_k=10, top_p=0.9, stop_tokens=(1,)),
    SamplingParams(max_tokens=70, temperature=1.3, min_p=0.05, stop_tokens=(2,)),
    SamplingParams(max_tokens=1),
]


def make_requests(count, seed=0, longest=50, kinds=KINDS, vocab=100):
    """Random prompts, some repeated, some that begin like the one before."""
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(count):
        prompt = rng.integers(0, vocab, int(rng.integers(1, longest)))
        if requests and i % 4 == 1:
            prompt = requests[-1].prompt
        elif requests and i % 5 == 0:
            prompt = np.concatenate([requests[-1].prompt[:35], prompt])
        requests.append(Request(i, prompt, kinds[int(rng.integers(len(kinds)))], group=i // 4, prompt_index=i))
    return requests


def check_blocks(blocks, tables):
    """The accounting of a BlockManager agrees with exactly these open tables; a word for the first contradiction."""
    refs = [0] * len(blocks._blocks)
    for table in tables:
        for index in table.blocks:
            refs[index] += 1
    if sorted([*blocks._blank, *blocks._idle]) != [i for i, n in enumerate(refs) if n == 0]:
        return "free"
    if len(blocks._blocks) > blocks.num_blocks:
        return "num_blocks"
    for i, block in enumerate(blocks._blocks):
        if block.refs != refs[i]:
            return "refs"
        if (block.digest is not None) != (blocks._registered.get(block.digest or b"") == i):
            return "digest"
        if block.refs == 0 and (i in blocks._idle) != (block.digest is not None):
            return "idle"
    slots = [blocks._blocks[i].slot for i in blocks._registered.values()]
    return "" if len(set(slots) | set(blocks._slots)) == len(slots) + len(blocks._slots) else "slot"


class Plain(GenerationEngine):
    """An engine that serves nothing beyond the protocol, and nothing of that."""

    def submit(self, requests): ...
    def poll(self): ...
    def abort(self, trajectory): ...
    def update_weights(self, weights, version): ...
    def sleep(self): ...
    def wake_up(self): ...
    def stats(self, reset=False): ...
