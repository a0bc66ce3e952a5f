"""Do both contenders of ``rl_vs_trl.py`` compute the same? Log-probs of the same ids, loss and gradient of one batch.

python benchmarks/rl_check.py TASK.json RESULT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rl_task import Task, cores
from rl_trl import Clock, Steps, make_trainer
from shapes import CONTEXT, SHAPES
from torch import Tensor

from tilth.config.schema import AlgorithmConfig
from tilth.core.batch import Jagged
from tilth.models.decoder import Decoder
from tilth.models.hf import load_weights
from tilth.plan.batch import MicroBatchLimits
from tilth.rl.algorithm import Algorithm
from tilth.roles.objective import Objective
from tilth.runs.models import load_model
from tilth.training.packed import cut, model_input, plan_micros, score

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BOUNDS = {
    "fp32": {"logprob": 1e-4, "loss": 1e-5, "gradient": 1e-4},
    "bf16": {"logprob": 0.1, "loss": 1e-2, "gradient": 0.1},
}
"""Largest difference of a log-prob and of the loss; of a gradient tensor relative to its norm (bf16: two roundings)."""


class Batch:
    """Random prompts and completions with the lengths of step 0, and random advantages, one for each sample."""

    def __init__(self, task: Task) -> None:
        rng = np.random.default_rng(1)
        vocabulary = SHAPES[task.shape]["vocab_size"]
        self.lengths = np.array(task.lengths(0))
        prompts = rng.integers(2, vocabulary, (task.prompts, task.prompt_tokens))
        self.prompts = np.repeat(prompts, task.group, axis=0)
        self.completions = [rng.integers(2, vocabulary, n) for n in self.lengths]
        self.advantages = rng.standard_normal(task.samples).astype(np.float32)

    def rows(self) -> tuple[Jagged, np.ndarray, np.ndarray]:
        """Packed tokens, mask and advantage of each token, as Tilth has them."""
        tokens = Jagged.of([np.concatenate([p, c]) for p, c in zip(self.prompts, self.completions)])
        width = self.prompts.shape[1]
        mask = np.concatenate([np.r_[np.zeros(width), np.ones(n)] for n in self.lengths]).astype(np.uint8)
        return tokens, mask, np.repeat(self.advantages, tokens.lengths) * mask

    def padded(self) -> dict[str, Tensor]:
        """The inputs of TRL's loss."""
        ids = torch.zeros(len(self.lengths), int(self.lengths.max()), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, c in enumerate(self.completions):
            ids[i, : len(c)], mask[i, : len(c)] = torch.from_numpy(c), 1
        prompts = torch.from_numpy(self.prompts)
        return {
            "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": ids,
            "completion_mask": mask, "advantages": torch.from_numpy(self.advantages), "num_items_in_batch": mask.sum(),
        }  # fmt: skip


def tilth_side(task: Task, batch: Batch) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Log-probs [n, longest], loss and gradients."""
    loaded = load_model(task.folder)
    model = Decoder(loaded.config, DTYPES[task.precision])
    load_weights(model, loaded.tensors, str(loaded.source))
    model.to(task.device)
    tokens, mask, advantages = batch.rows()
    loss = Objective.of(Algorithm(AlgorithmConfig(), task.longest), mask, tokens)
    total, found = 0.0, np.zeros(len(mask), np.float32)
    plan = plan_micros(tokens, mask, MicroBatchLimits(16_384, share=True)).learn
    for index, micro in cut(tokens, mask, {"advantages": advantages}, plan, torch.device(task.device)):
        score(model, micro, model(*model_input(micro)), temperature=1.0, entropy=True)
        value, _ = loss(micro)
        value.backward()
        total += float(value.detach())
        found[index] = micro.logprobs.detach().cpu().numpy()
    table = torch.zeros(len(batch.lengths), int(batch.lengths.max()))
    for i, (row, keep) in enumerate(zip(np.split(found, tokens.offsets[1:-1]), np.split(mask, tokens.offsets[1:-1]))):
        table[i, : batch.lengths[i]] = torch.from_numpy(row[keep == 1])
    return table, total, {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}


def trl_side(task: Task, batch: Batch, folder: str) -> tuple[Tensor, float, dict[str, Tensor]]:
    """The same from TRL's own loss function."""
    trainer = make_trainer(task, folder, Steps(task, Clock()))
    trainer.current_gradient_accumulation_steps = 1
    inputs = {name: tensor.to(trainer.model.device) for name, tensor in batch.padded().items()}
    model = trainer.model.train()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logprobs = trainer._get_per_token_logps_and_entropies(model, ids, seen, inputs["completion_ids"].shape[1])[0]
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    return (logprobs * inputs["completion_mask"]).cpu(), float(loss.detach()), grads


def compare(task: Task, folder: str) -> dict[str, Any]:
    """Greatest differences, and whether they are within the bounds."""
    batch, bounds = Batch(task), BOUNDS[task.precision]
    (mine, my_loss, my_grads), (theirs, their_loss, their_grads) = (
        tilth_side(task, batch),
        trl_side(task, batch, folder),
    )
    assert my_grads.keys() == their_grads.keys(), my_grads.keys() ^ their_grads.keys()
    gaps = {n: float((g - their_grads[n]).norm() / their_grads[n].norm()) for n, g in my_grads.items()}
    found = {
        "logprob": float((mine - theirs).abs().max()), "loss": abs(my_loss - their_loss), "gradient": max(gaps.values())
    }  # fmt: skip
    return {**found, "right": all(found[k] <= bounds[k] for k in found), "bounds": bounds, "context": CONTEXT}


def main() -> None:
    task = Task.load(Path(sys.argv[1]))
    torch.set_num_threads(cores(task.threads))
    result = compare(task, str(Path(sys.argv[2]).parent / "trl"))
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
