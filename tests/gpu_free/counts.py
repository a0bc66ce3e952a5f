"""What engine and trainer ask of a device: launches and waits, counted on the pretended one.

python -m tests.gpu_free.counts
"""

import sys

if __name__ == "__main__":
    from tests.gpu_free import device  # before torch

    device.install()

import numpy as np
import torch

from tests.engines.reference import make_engine, make_model, make_requests
from tests.roles import small
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.engines.request import Request, SamplingParams
from tilth.models.config import DecoderConfig
from tilth.roles.objective import Objective
from tilth.training.engine import TrainEngine, negative_log_likelihood

device = sys.modules.get("tests.gpu_free.device")
CUDA = torch.device("cuda")
SAMPLED = SamplingParams(max_tokens=40)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
TOP_P = SamplingParams(max_tokens=40, top_p=0.9)


def shape(layers=2):
    return DecoderConfig(
        vocab_size=small.TOKENIZER.vocab_size, hidden_size=32, intermediate_size=64, num_layers=layers, num_heads=4,
        num_kv_heads=2, tie_embeddings=True, max_positions=512,
    )  # fmt: skip


def engine_in_flight(params, rows=20, config=None, **options):
    """Return an engine some steps after it has placed its rows."""
    config = config or shape()
    engine = make_engine(make_model(config, dtype=torch.bfloat16).to(CUDA), device=CUDA, max_rows=64, **options)
    engine.submit(make_requests(rows, kinds=[params], vocab=config.vocab_size))
    for _ in range(3):
        engine.poll()
    return engine


def decode_step(params, **options):
    """Count a step of rows that decode."""
    engine = engine_in_flight(params, **options)
    with device.counted() as counts:
        engine.poll()
    return counts


def captures(dtype=torch.float32):
    """Return the graphs of 48 answers of 5 to 240 tokens, and the answers: over slots in fp32, over pages in bf16."""
    rng, before = np.random.default_rng(0), device.Graph.captured
    requests = [
        Request(i, rng.integers(0, 100, 10), SamplingParams(max_tokens=int(n), temperature=0.0))
        for i, n in enumerate(rng.integers(5, 240, 48))
    ]
    said = make_engine(make_model(dtype=dtype), device=CUDA, compile=True, max_length=512).generate(requests)
    return device.Graph.captured - before, requests, said


def trainer(config=None, dtype=torch.bfloat16, **options):
    """A trainer that computes in this dtype; its parameters are fp32."""
    model = make_model(config or shape(), dtype=dtype).float().requires_grad_(True).to(CUDA)
    return TrainEngine(model, OptimizerConfig(lr=0.01), **{"total_steps": 9, "micro_tokens": 64, **options})


def update(count, how="plain", config=None, **options):
    """Count an update of ``count`` micro-batches of two samples; "shared": of one prompt; "policy": with its loss.
    options: of the trainer."""
    rng, shared = np.random.default_rng(0), how == "shared"
    prompts = rng.integers(0, 11, (count, 2 - shared, 8))
    tokens = np.concatenate([np.repeat(prompts, 1 + shared, 1), rng.integers(0, 11, (count, 2, 24))], 2)
    tokens = Jagged.of(list(tokens.reshape(2 * count, 32)))
    mask, columns = np.tile(np.arange(32) >= 8, 2 * count).astype(np.uint8), {}
    loss = negative_log_likelihood(float(mask.sum()))
    if how == "policy":
        columns = {name: rng.normal(size=len(mask)).astype(np.float32) for name in ("advantages", "rollout_logprobs")}
        loss = Objective.of(small.HOW, mask, tokens)
    engine = trainer(config, micro_tokens=56 if shared else 64, **options)
    for _ in range(2):  # the first one makes what stays
        with device.counted() as counts:
            engine.update(tokens, mask, columns, loss, entropy=how == "policy")
    return counts


def _line(what, counts, base=None, by=1):
    launches, waits = (getattr(counts, name) for name in ("beside", "waits"))
    launches, waits = launches - (base.beside if base else 0), waits.total() - (base.waits.total() if base else 0)
    print(f"| {what} | {launches / by:g} | {waits / by:g} |")


def main():
    torch.set_num_threads(1)
    print("| | launches beside graphs | waits |\n|---|---:|---:|")
    for name, params in (("sampled", SAMPLED), ("greedy", GREEDY), ("top-p", TOP_P)):
        _line(f"decode step, graphs, {name}", decode_step(params, compile=True))
    for layers in (2, 4):
        _line(f"decode step, eager, {layers} layers", decode_step(SAMPLED, config=shape(layers)))
    for how in ("plain", "shared", "policy"):
        for layers in (2, 4):
            few, many = (update(count, how, shape(layers)) for count in (2, 4))
            _line(f"micro-batch, {how}, {layers} layers", many, few, 2)
        _line(f"step of 2 micro-batches, {how}, 4 layers", few)
    for layers in (2, 4):
        few, many = (update(count, config=shape(layers), offload=1.0) for count in (2, 4))
        _line(f"micro-batch, plain, offloaded, {layers} layers", many, few, 2)
    print(f"\ngraphs captured for 48 answers: {captures()[0]}, over pages {captures(torch.bfloat16)[0]}")


if __name__ == "__main__":
    main()
