"""What one process imports: FSDP and DTensor would be a fifth of the start of a run, torch.compile and sympy half."""

import subprocess
import sys

CODE = """
import sys
import numpy, torch
import tilth.launch.workers, tilth.roles.policy, tilth.roles.rollout
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.models import row_product
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.training.engine import TrainEngine, negative_log_likelihood

config = DecoderConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
row_product.missing()
for name in ("adamw", "muon", "lans", "adaalter"):
    sharded = shard(lambda: Decoder(config), ParallelDims.alone())
    sharded.init_(0)
    engine = TrainEngine(sharded, OptimizerConfig(name=name, lr=0.1), total_steps=1, micro_tokens=16)
    mask = (numpy.arange(9) > 0).astype(numpy.uint8)
    engine.update(Jagged.of([numpy.arange(9)]), mask, {}, negative_log_likelihood(8.0))
slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "sympy", "setuptools")
print(sorted(name for name in sys.modules if name.startswith(slow)))
"""


def test_one_process_imports_neither_fsdp_nor_a_compiler():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stdout + ran.stderr
