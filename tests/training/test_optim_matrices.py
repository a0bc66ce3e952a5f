"""An optimizer of one's own that needs whole matrices: it sees them whole in every layout, AdamW updates the rest."""

from unittest.mock import patch

import pytest
import torch

from tests.errors import raises
from tests.parallel.layouts import Case, batch, engine_of, loss_of, rows_of, spread, weights
from tilth.config import plugins
from tilth.config.open_sets import OPTIMIZERS, optimizer_states
from tilth.core.errors import PluginError
from tilth.training.optim import MatrixOptimizer

HERE = "tests.training.test_optim_matrices:"
RATE = 0.02


class Spectral(MatrixOptimizer):
    """The gradient over its largest singular value (spectral descent), which no part of a matrix knows."""

    def change(self, whole, lr):
        return -lr * whole / torch.linalg.matrix_norm(whole, 2, keepdim=True).clamp(min=1e-12)


class Wrong(Spectral):
    def part(self, p):
        raise ValueError("here")


def trained(rank, case, kind=Spectral, steps=1):
    with patch.dict(OPTIMIZERS), patch.dict(plugins._DECLARED["optimizer"]):
        plugins.optimizer("spectral")(kind)
        sharded = spread(case, rank)
        sharded.load_(weights(case))
        optimizer = {"name": "spectral", "lr": RATE, "clip_norm": 0.0, "weight_decay": 0.0}
        engine, (tokens, mask, starts) = engine_of(case, sharded, optimizer=optimizer), rows_of(case, sharded)
        state = optimizer_states("spectral")
        for _ in range(steps):
            engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
        kept = {name.partition(".")[0] for name in engine.optimizers.state_tensors()}
        assert kept == state | {"step"} == {"exp_avg", "exp_avg_sq", "step"}
        return {name: t.clone() for name, t in sharded.assemble(list(sharded.layouts)).items()}


def test_matrices_of_blocks_move_by_the_optimizer_and_all_else_by_adamw():
    case, before = Case(double=True), weights(Case(double=True))
    after = trained(0, case)
    for name, tensor in after.items():
        moved = tensor - before[name]
        if tensor.ndim == 2 and "layers" in name:
            assert torch.linalg.matrix_norm(moved, 2) == pytest.approx(RATE)
        else:  # AdamW's first step
            assert moved.abs().max() == pytest.approx(RATE, rel=1e-3)


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case(fsdp=2, double=True), Case(tp=2, double=True)], ids=str)
def test_no_layout_trains_another_model(pool, case):
    one = trained(0, case.alone, steps=2)
    for found in pool.run(2, HERE + "trained", case=case, steps=2):
        for name, tensor in one.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_failure_names_the_optimizer():
    with raises(PluginError, "spectral.step"):
        trained(0, Case(), Wrong)
