"""Optimizers (torch's AdamW, Muon for the matrices of the blocks, or another one of ``config.open_sets.OPTIMIZERS``),
learning rate, averages and norms of weights.

Parameters are fp32 masters whatever the compute dtype, so no second copy is kept. All state is materialised at
construction as named tensors: a checkpoint can be restored in place before the first step.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilth.config.code import describe
from tilth.config.open_sets import OPTIMIZERS, Needs
from tilth.config.plugins import Declaration, declared
from tilth.config.roles import resolve
from tilth.config.schema import OptimizerConfig as OptimizerSection
from tilth.core.errors import PluginError
from tilth.parallel.sharded import ShardedModel, buckets, squares_of
from tilth.parallel.zero import UpdateShards
from tilth.plan.layout import is_by_experts
from tilth.plan.rules import ENCODERS, Table, rule_of
from tilth.training.optimizers import EagerAdamW, EagerOptimizer, Squares, decay_groups

NEWTON_SCHULZ = 5, (3.4445, -4.7750, 2.0315)
"""Iterations, and coefficients of the quintic polynomial, of Muon (Jordan et al., 2024), as torch has them."""


Shards = ShardedModel | UpdateShards | None
"""What parameters of an optimizer are parts of; None: they are whole."""


class MatrixOptimizer(EagerOptimizer):
    """Optimizer that computes the change of a matrix from the whole of it, on matrices or this rank's parts of them.

    State stays divided; whole matrices are assembled bucket by bucket, those of experts each for itself. Every rank
    computes the changes of all matrices and applies its part. Of stacks that are divided by experts alone it changes
    its own experts, and nothing is sent.
    """

    needs: Needs = "matrices"
    lr_ratio = 1.0
    """Learning rate of matrices divided by that of the other parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sharded: Shards,
        section: OptimizerSection,
        **defaults: Any,
    ) -> None:
        """sharded: what these are parts of; None: they are whole. defaults: further keys of the group."""
        rate = {"lr": section.lr * self.lr_ratio, "weight_decay": section.weight_decay}
        super().__init__(list(parameters.values()), {**rate, **defaults})
        self.parameters, self.sharded = dict(parameters), sharded
        self.local = [n for n in parameters if sharded is None or is_by_experts(sharded.layouts[n])]
        self.names = [n for n in parameters if n not in self.local]

    def part(self, p: nn.Parameter) -> Tensor:
        """Return this rank's part of what the change is computed from, by default the gradient. Updates the state."""
        assert p.grad is not None
        return p.grad

    def change(self, whole: Tensor, lr: float) -> Tensor:
        """Return what to add to a matrix, or a stack of them, after its decay; whole: of all ranks' parts."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run one update; a collective call of the replica."""
        lr, decay = (group := self.param_groups[0])["lr"], 1 - group["lr"] * group["weight_decay"]
        for name in self.local:
            p = self.parameters[name]
            moved = self.change(self.part(p), lr)
            p.mul_(decay).add_(moved)
        if self.sharded is None:
            return
        for names in buckets({n: self.sharded.layouts[n].shape for n in self.names}):
            wanted = {n: self.part(self.parameters[n]) for n in names}
            for name, update in self.sharded.assemble(names, wanted, stage=True).items():
                p, moved = self.parameters[name], self.change(update, lr)
                p.mul_(decay).add_(self.sharded.own_part(name, moved))


class Muon(MatrixOptimizer):
    """Muon: the gradient with Nesterov momentum, orthogonalised.

    ``torch.optim.Muon`` iterates in bf16, which turns a gradient's last bits into 1e-2 of the step where its rank is
    low: another size of micro-batches, or another layout, would train another model.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], sharded: Shards, section: OptimizerSection) -> None:
        self.lr_ratio, self.bf16 = section.muon_lr_ratio, section.muon_precision == "bf16"
        super().__init__(parameters, sharded, section, momentum=section.muon_momentum)

    def part(self, p: nn.Parameter) -> Tensor:
        """Return this rank's part of the gradient with Nesterov momentum, as in torch's Muon."""
        assert p.grad is not None
        buffer, momentum = self.state[p]["momentum_buffer"], self.param_groups[0]["momentum"]
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)

    def change(self, whole: Tensor, lr: float) -> Tensor:
        return _orthogonal_step(whole, lr, self.bf16)


def _orthogonal_step(update: Tensor, lr: float, bf16: bool) -> Tensor:
    """Return the change that Muon makes to a matrix, or to each of a stack, for a gradient with momentum."""
    if update.ndim > 2:
        return torch.stack([_orthogonal_step(one, lr, bf16) for one in update]) if len(update) else update
    rows, columns = update.shape
    return orthogonal(update, bf16).to(update.dtype).mul_(-lr * math.sqrt(max(1.0, rows / columns)))


def orthogonal(update: Tensor, bf16: bool = False) -> Tensor:
    """Return about U V^T of a matrix [out, in] with the singular vectors U and V, by Newton-Schulz iterations; its
    singular values are about 0.7 to 1.2. bf16: iterate in bf16, as ``torch.optim.Muon``, not in the matrix's dtype."""
    count, (a, b, c) = NEWTON_SCHULZ
    tall = update.shape[0] > update.shape[1]
    x = update.bfloat16() if bf16 else update
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(count):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _made(make: Callable[..., Any], given: Sequence[Any], offered: Mapping[str, Any]) -> Any:
    """Call a factory with these arguments, and those of ``offered`` that it names after them."""
    named = list(inspect.signature(make).parameters)[len(given) :]
    return make(*given, **{name: offered[name] for name in named if name in offered})


def _declared(own: Declaration, given: Sequence[Any], offered: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Build the optimizer that a plugin declares. PluginError: it cannot be built, or is no torch optimizer."""
    try:
        made = _made(own.value, given, offered)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{own.title}: {describe(error, own.file)}", key=own.name) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PluginError(
            f"{own.title} returns a {type(made).__name__}, not a torch.optim.Optimizer", key=f"{own.name}.return"
        )
    return made


def matrices_of(section: OptimizerSection, table: Table, names: Collection[str]) -> set[str]:
    """Return the parameters that an optimizer which needs matrices updates."""
    needs = OPTIMIZERS[section.name].needs == "matrices"
    return {name for name in names if needs and rule_of(table, name).kind == "matrix"}


class Optimizers:
    """One or two torch optimizers that step together."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        section: OptimizerSection,
        table: Table,
        sharded: Shards = None,
        squares: Squares = squares_of,
    ) -> None:
        """table: rules of the parameters; sharded: what these are parts of; None: they are whole. squares: norms of
        whole tensors of which ranks have parts (``ShardedModel.squares``)."""
        self.parameters = dict(parameters)
        self.section, self.sharded = section, sharded
        self.table, self._spec = table, OPTIMIZERS[section.name]
        own = declared("optimizer").get(section.name)
        blocks = {n: p for n, p in parameters.items() if self._by_matrix(n)}
        rest = {n: p for n, p in parameters.items() if n not in blocks}
        self._parts: list[tuple[torch.optim.Optimizer, Declaration | None]] = []
        """Optimizers, each with its declaration by a plugin."""
        wanted: list[tuple[Mapping[str, nn.Parameter], tuple[Any, ...]]] = []
        if rest and (self._spec.needs == "matrices" or not self._spec.made):  # adapters are matrices alone
            self._parts.append((self._adamw(rest), None))
        elif rest:
            wanted.append((rest, (list(rest.values()), section)))
        if blocks:
            wanted.append((blocks, (blocks, sharded, section)))
        for named, given in wanted:
            offered = {"named": named, "table": table, "squares": squares}
            made = _made(resolve(self._spec.made), given, offered) if own is None else _declared(own, given, offered)
            self._parts.append((made, own))
        self._materialise()

    @property
    def made(self) -> list[torch.optim.Optimizer]:
        """Torch's optimizers."""
        return [optimizer for optimizer, _ in self._parts]

    def _by_matrix(self, name: str) -> bool:
        """Return True if an optimizer that needs matrices updates a parameter."""
        return bool(matrices_of(self.section, self.table, (name,)))

    def _adamw(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        groups = decay_groups(parameters, self.table, self.section.weight_decay)
        return EagerAdamW(groups, lr=self.section.lr, betas=self.section.betas, fused=True)

    def _kinds(self, name: str) -> tuple[str, ...]:
        """Return the kinds of state of a parameter."""
        own = self._spec.needs == "elements" or self._by_matrix(name)
        return (self._spec if own else OPTIMIZERS["adamw"]).state

    def state_dtypes(self, parameters: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Return '<kind>.<parameter name>' -> dtype of the state of these parameters, also those of other ranks."""
        found: dict[str, torch.dtype] = {}
        for name, dtype in parameters.items():
            kinds = self._kinds(name)
            found |= {f"{kind}.{name}": dtype for kind in kinds}
            found |= {f"step.{name}": torch.float32} if kinds and not self._by_matrix(name) else {}
        return found

    def _materialise(self) -> None:
        names: dict[Tensor, str] = {p: n for n, p in self.parameters.items()}
        for optimizer, _ in self._parts:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if keys := self._kinds(names[p]):
                    optimizer.state[p] = {k: torch.zeros_like(p) for k in keys}
                if keys and not self._by_matrix(names[p]):
                    optimizer.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return live state as '<kind>.<parameter name>' -> tensor, for saving and for restoring in place."""
        names: dict[Tensor, str] = {p: n for n, p in self.parameters.items()}
        found: dict[str, Tensor] = {}
        for optimizer, _ in self._parts:
            for p, state in optimizer.state.items():
                found |= {f"{kind}.{names[p]}": tensor for kind, tensor in state.items()}
        return found

    def retune(self, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Set AdamW's constants of the next steps; matrices alone decay."""
        for optimizer, _ in self._parts:
            for group in optimizer.param_groups:
                group |= {"betas": betas, "eps": eps}
                if "decays" in group:
                    group["weight_decay"] = weight_decay

    def step(self, lr: float) -> None:
        """Run one update with this learning rate (that of matrices scaled by its ratio)."""
        for optimizer, own in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = lr * getattr(optimizer, "lr_ratio", 1.0)
            optimizer.step() if own is None else self._step_own(optimizer, own)
        if isinstance(self.sharded, UpdateShards):
            self.sharded.gather()

    def _step_own(self, optimizer: torch.optim.Optimizer, own: Declaration) -> None:
        """Run one update of a declared optimizer. PluginError: it fails, or holds state that is not declared."""
        named = self._spec.state
        try:
            optimizer.step()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{own.title}, state={named}: {describe(error, own.file)}", key=f"{own.name}.step"
            ) from error
        for state in optimizer.state.values():
            if unknown := sorted(state.keys() - {*named, "step"}):
                raise PluginError(
                    f"{own.title} keeps {unknown[0]!r}; name it in state={(*named, *unknown)}", key=f"{own.name}.state"
                )

    @property
    def linear(self) -> bool:
        """True if the learning rate of a batch n times as large is n times as high, not its root: without adaptive
        denominators, as in ``torch.optim.SGD`` and optimizers with an attribute ``linear``."""
        return all(isinstance(one, torch.optim.SGD) or getattr(one, "linear", False) for one, _ in self._parts)

    @torch.no_grad()
    def rescale(self, ratio: float) -> None:
        """Correct momentum with a factor of the learning rate, which an optimizer names as ``rate_inside``, for a rate
        that is ``ratio`` times that of the last step (arXiv 1706.02677)."""
        for optimizer, _ in self._parts:
            for kind in getattr(optimizer, "rate_inside", ()):
                torch._foreach_mul_([state[kind] for state in optimizer.state.values()], ratio)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self.parameters.values():
            p.grad = None

    def clip(self, max_norm: float, measure: Callable[[Mapping[str, Tensor]], float] | None = None) -> float:
        """Scale gradients to a global L2 norm of at most ``max_norm`` (0: only measure); returns the norm before.

        measure: the norm of all gradients, of which ``parameters`` have this rank's part; None: they have all.
        """
        grads = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        if not grads and measure is None:
            return 0.0
        norm = (
            torch.nn.utils.get_total_norm(grads.values())
            if measure is None
            else torch.tensor(measure(grads), dtype=torch.float64)
        )
        value = float(norm)
        if max_norm and value > max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return value


Kind = Literal["constant", "linear", "cosine", "wsd", "plateau"]
DECAY_SHARE = 0.2
"""Share of all steps in which 'wsd' (warm-up, stable, decay; arXiv 2404.06395) falls linearly to zero."""


def lr_factor(kind: Kind, step: float, total: int, warmup: int, plateau: int = 0) -> float:
    """Return the factor on the peak learning rate for step 0 .. total - 1; between two of them where a batch is not
    that of the recipe.

    The first ``warmup`` steps rise linearly to 1 (step 0 is 1 / warmup, never 0); then 'constant' stays, 'linear' and
    'cosine' fall to 0 just after the last step, 'wsd' stays and falls linearly over the last fifth of all steps,
    'plateau' (LANS, arXiv 2006.13484) stays for ``plateau`` steps and falls linearly to 0.
    """
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    left = (total - step) / max(total - warmup, 1)
    if kind == "linear":
        return max(left, 0.0)
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (1 - max(left, 0.0))))
    if kind == "plateau":
        return min(1.0, max((total - step) / max(total - warmup - plateau, 1), 0.0))
    if kind == "wsd":
        return min(1.0, max((total - step) / max(DECAY_SHARE * total, 1), 0.0))
    return 1.0


@dataclass
class BatchScale:
    """Factor on the learning rate for batches of another size than the recipe's (Dynamic SGD, arXiv 1904.12043).

    A larger batch raises it linearly over ``ramp`` steps, a smaller one lowers it at once: its gradient is noisier.
    """

    ramp: int
    linear: bool
    """True: the factor is that of the batch (SGD); False: its root (optimizers that divide by second moments)."""
    share: float = 1.0
    """Batch over that of the recipe."""
    before: float = 1.0
    """Share at which the learning rate was where it changed."""
    since: float = 0
    """Optimizer step of the change."""
    used: float = 1.0
    """Factor of the last step."""

    def change(self, share: float, now: float) -> None:
        """Go on with this share from optimizer step ``now``; within a ramp from where it is."""
        if share != self.share:
            self.before, self.share, self.since = self._at(now), share, now

    def _at(self, now: float) -> float:
        """Return the share that the learning rate is for."""
        if self.share <= self.before or not self.ramp:
            return self.share
        return self.before + (self.share - self.before) * min(1.0, (now - self.since) / self.ramp)

    def factor(self, now: float) -> float:
        """Return the factor of optimizer step ``now``."""
        return self._at(now) if self.linear else math.sqrt(self._at(now))

    def position(self) -> dict[str, float]:
        """Return what a resume must restore; nothing before the first change."""
        kept = {f"batch/{name}": getattr(self, name) for name in ("share", "before", "since", "used")}
        return {} if self.share == self.before == self.used == 1 else kept

    def restore(self, position: Mapping[str, float]) -> None:
        """Restore what ``position`` returned."""
        for name, start in (("share", 1.0), ("before", 1.0), ("since", 0), ("used", 1.0)):
            setattr(self, name, position.get(f"batch/{name}", start))


class Average:
    """Exponential moving average of the weights in fp32 (arXiv 1703.01780).

    It starts as a copy of the weights, not as zeros, so there is no bias to correct. decay 0: no average, no memory; 1:
    stays at the start.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay = decay
        self._parameters = dict(parameters) if decay else {}
        self.tensors = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        """The average by parameter name, live: for saving, and for restoring in place."""

    @torch.no_grad()
    def begin(self) -> None:
        """Restart from the current weights."""
        for name, average in self.tensors.items():
            average.copy_(self._parameters[name])

    @torch.no_grad()
    def follow(self) -> None:
        """Move towards the current weights: average += (1 - decay) (weights - average)."""
        if self.tensors:
            live = [p.float() for p in self._parameters.values()]
            torch._foreach_lerp_(list(self.tensors.values()), live, 1 - self.decay)


_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NAMES = {"embed_tokens": "embedding", "lm_head": "head"}


def layer_of(parameter: str) -> str:
    """Return the layer of a parameter: its number, or embedding, norm (the final one), head; or the encoder."""
    if parameter.startswith(ENCODERS):
        return parameter.split(".")[1]
    inside = _LAYER.search(parameter)
    if inside:
        return inside[1]
    module = parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return _NAMES.get(module, module)


def layer_norms(names: Sequence[str], squares: Tensor) -> dict[str, float]:
    """Return layer -> L2 norm of all of its tensors together. squares: float64 [len(names)], of ``ShardedModel``."""
    layers = [layer_of(name) for name in names]
    slots = {layer: slot for slot, layer in enumerate(dict.fromkeys(layers))}
    index = torch.tensor([slots[layer] for layer in layers], dtype=torch.int64, device=squares.device)
    found = torch.zeros(len(slots), dtype=torch.float64, device=squares.device).index_add_(0, index, squares)
    return dict(zip(slots, found.sqrt().tolist()))
