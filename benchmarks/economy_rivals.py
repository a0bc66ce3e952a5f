"""What ``economy.py`` compares with, beside what Tilth has: SGD and AdaGrad, EF-SGD and QSparse-local-SGD by blocks,
unbiased codes with a residual, four bits in both levels, and weights that are coded themselves, not their changes."""

from typing import Any

import torch
from torch import Tensor

import tilth
from tilth.config.open_sets import COMPRESSORS, LOCAL_METHODS, CompressorSpec
from tilth.config.schema import OptimizerConfig
from tilth.parallel.comm import Group
from tilth.parallel.compress import Dither
from tilth.parallel.local import ErrorReset
from tilth.parallel.reducer import Pieces, split
from tilth.parallel.sync import CompressedReducer, TwoLevels, gather_coded

MOMENTUM = 0.9


class LateResiduals(ErrorReset):
    """QSparse-local-SGD (arXiv 1906.02367), with H = 1 EF-SGD: every H steps a block of 1 / models of what each rank
    has done since, and of what it left out before, is averaged. All ranks go on from z; the rest, the residual, waits
    for the next sync, where CSER leaves it in the model."""

    def __init__(self, every: int = 1, smallest: int = 65_536, seed: int = 0, *, models: int = 2) -> None:
        super().__init__(every, smallest, seed, changes=0, models=models)
        self.residuals = dict[str, Tensor]()

    def sync(self) -> None:
        done = {name: z - self._own[name] for name, z in self._shared.items()}
        done = {name: d + self.residuals[name] if self.residuals else d for name, d in done.items()}
        blocks = self.blocks("models", self.models)
        parts = self._parts(done, blocks)
        self.mean(list(parts.values()))
        for name, z in self._parts(self._shared, blocks).items():
            z.sub_(parts[name])
            parts[name].zero_()
        for name, z in self._shared.items():
            self._own[name].copy_(z)
        self.residuals = done


class FourBits(TwoLevels):
    """Four bits a value within nodes too, without a transform."""

    def __init__(self) -> None:
        super().__init__(smooth=False)
        self.within = Dither(bits=4, group=128)


class DirectWeights(CompressedReducer):
    """Weights that travel in four bits themselves; the rank that updates a part keeps it exact."""

    def gather_weights(self, out: Tensor, own: Tensor, group: Group, pieces: Pieces) -> None:
        assert self._weights is not None
        for part, piece in split(own, pieces[group.rank()]):
            if piece.name in self._weights.names:
                part -= self._weights.left[piece.name].flatten()  # which coding adds
        gather_coded(self._weights, out.zero_(), own, group, pieces)


def direct(smallest: int, seed: int, bucket_bytes: int) -> DirectWeights:
    """Return the sum of gradients, exact, after which weights are coded."""
    made = DirectWeights(None, weights=Dither(bits=4, group=2048), smallest=smallest, seed=seed)
    made.bucket_bytes = bucket_bytes
    return made


def declare() -> None:
    """Let a configuration name them."""

    @tilth.optimizer("adagrad", state=("sum",))
    def adagrad(parameters: Any, section: OptimizerConfig) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=section.lr)

    @tilth.optimizer("sgd", state=("momentum_buffer",))
    def sgd(parameters: Any, section: OptimizerConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=section.lr, momentum=MOMENTUM)

    LOCAL_METHODS["late"] = f"{__name__}:LateResiduals"
    COMPRESSORS["fourbits"] = CompressorSpec(FourBits, state=())
    for name in ("randomk", "dither"):
        COMPRESSORS[f"{name}-residual"] = CompressorSpec(COMPRESSORS[name].made)
