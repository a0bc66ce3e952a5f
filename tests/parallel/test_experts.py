"""Dispatch of tokens to experts on other ranks, beside a loop over tokens in one process."""

import pytest
import torch
from torch import Tensor

from tests.parallel.test_comm import Operators
from tilth.core.layout import Mesh
from tilth.models.moe import Routing
from tilth.parallel.dims import ParallelDims
from tilth.parallel.experts import ExpertExchange
from tilth.plan.experts import dispatch_elements, dispatch_mode

pytestmark = pytest.mark.dist
HERE = "tests.parallel.test_experts:"
WIDTH, EXPERTS = 6, 8
EVEN, UNEVEN, NONE = (5, 5, 5, 5), (7, 0, 2, 11), (0, 0, 0, 0)


def problem(tokens: tuple[int, ...], k: int, routing: str) -> dict[str, Tensor]:
    """Tokens of all ranks together, their experts and weights, and each expert's two matrices."""
    generator = torch.Generator().manual_seed(len(tokens) * k)
    n = sum(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores = normal(n, EXPERTS)
    if routing == "few":  # experts 1 to k alone: others are empty, and so are ranks
        scores[:, 1 : 1 + k] += 100
    return {
        "x": normal(n, WIDTH),
        "chosen": scores.topk(k).indices,
        "weights": normal(n, k),
        "up": normal(EXPERTS, 4, WIDTH),
        "down": normal(EXPERTS, WIDTH, 4),
        "probe": normal(n, WIDTH),
    }


def by_tokens(p: dict[str, Tensor]) -> list[Tensor]:
    """Result and gradients of a loop over tokens."""
    leaves = {name: p[name].clone().requires_grad_() for name in ("x", "weights", "up", "down")}
    out = 0 * leaves["x"]
    for i, experts in enumerate(p["chosen"].tolist()):
        for j, e in enumerate(experts):
            inner = torch.tanh(leaves["up"][e] @ leaves["x"][i])
            out = out.index_add(0, torch.tensor([i]), (leaves["weights"][i, j] * (leaves["down"][e] @ inner))[None])
    grads = torch.autograd.grad((out * p["probe"]).sum(), list(leaves.values()), allow_unused=True)
    return [out.detach(), *(torch.zeros_like(a) if g is None else g for a, g in zip(leaves.values(), grads))]


def dispatched(rank: int, tokens: tuple[int, ...], k: int, routing: str, mode: str, shuffle: bool = False):
    ranks, p = len(tokens), problem(tokens, k, routing)
    own = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    if shuffle:  # the same tokens in another order, with their experts in another order
        order = torch.arange(tokens[rank]).flip(0)
        p |= {n: p[n].clone() for n in ("x", "chosen", "weights", "probe")}
        for name in ("x", "chosen", "weights", "probe"):
            p[name][own] = p[name][own][order]
        p["chosen"], p["weights"] = p["chosen"].flip(1), p["weights"].flip(1)
    local = EXPERTS // ranks
    held = slice(rank * local, (rank + 1) * local)
    x, weights = (p[name][own].clone().requires_grad_() for name in ("x", "weights"))
    up, down = (p[name][held].clone().requires_grad_() for name in ("up", "down"))

    def run(rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([torch.tanh(r @ a.T) @ b.T for r, a, b in zip(parts, up, down)])

    group = ParallelDims.of(Mesh(("ep",), (ranks,)), rank).group("ep")
    with Operators() as operators:
        out = ExpertExchange(group, mode)(x, Routing(p["chosen"][own], weights), run, EXPERTS)
        grads = torch.autograd.grad((out * p["probe"][own]).sum(), (x, weights, up, down))
    found = [out.detach(), *grads]
    if shuffle:
        found = [t.flip(0) if i < 3 else t for i, t in enumerate(found)]
        found[2] = found[2].flip(1)
    return found, operators.seen


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


CASES = [
    (tokens[:ranks], k, routing)
    for ranks in (2, 4)
    for tokens in (EVEN, UNEVEN, NONE)
    for k, routing in ((1, "few"), (3, "all"))
    if ranks == 2 or (tokens, k) != (NONE, 3)
]


@pytest.mark.parametrize("mode", ["exchange", "gather"])
@pytest.mark.parametrize("tokens, k, routing", CASES)
def test_results_and_gradients_are_those_of_a_loop_over_tokens(pool, tokens, k, routing, mode):
    out, x, weights, up, down = by_tokens(problem(tokens, k, routing))
    found = pool.run(len(tokens), HERE + "dispatched", tokens=tokens, k=k, routing=routing, mode=mode)
    parts = [torch.cat([got[0][i] for got in found]) for i in range(5)]
    assert max(far(a, b) for a, b in zip(parts, (out, x, weights, up, down))) < 1e-12


@pytest.mark.parametrize("mode", ["exchange", "gather"])
def test_the_order_of_tokens_and_of_their_experts_does_not_matter(pool, mode):
    how = {"tokens": UNEVEN[:2], "k": 3, "routing": "all", "mode": mode}
    plain, shuffled = (pool.run(2, HERE + "dispatched", **how, shuffle=shuffle) for shuffle in (False, True))
    for (a, _), (b, _) in zip(plain, shuffled):
        assert max(far(x, y) for x, y in zip(a, b)) < 1e-12


def test_a_weight_that_is_applied_twice_or_a_slot_that_is_lost_would_be_seen():
    p = problem(EVEN[:2], 2, "all")
    out = by_tokens(p)[0]
    assert far(out, by_tokens(p | {"weights": p["weights"].square()})[0]) > 0.1
    assert far(out, by_tokens(p | {"chosen": p["chosen"][:, :1], "weights": p["weights"][:, :1]})[0]) > 0.1


@pytest.mark.parametrize("ranks, k", [(2, 1), (2, 4), (4, 2), (4, 4)])
def test_bytes_are_those_of_the_formulas_and_the_choice_is_the_smaller(pool, ranks, k):
    """Under uniform routing: token i has the experts i, i + 1, ..., each as often as the others."""
    moved = {}
    for mode in ("exchange", "gather"):
        found = pool.run(ranks, HERE + "moved", ranks=ranks, k=k, mode=mode)
        moved[mode] = found[0]
        wanted = 2 * dispatch_elements(mode, EXPERTS, k, WIDTH, ranks) * 8
        assert found == [pytest.approx(wanted)] * ranks
    assert pool.run(ranks, HERE + "moved", ranks=ranks, k=k, mode=None)[0] == min(moved.values())
    assert moved[dispatch_mode(k, ranks)] == min(moved.values())


class TokenRows(Operators):
    """Those that carry rows of tokens; not counts, experts and weights."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.seen)
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d" and args[1].shape[1:] != (WIDTH,):
            del self.seen[before:]
        return found


def moved(rank: int, ranks: int, k: int, mode: str | None) -> float:
    """Bytes of token rows that this rank sends, forward and backward."""
    group = ParallelDims.of(Mesh(("ep",), (ranks,)), rank).group("ep")
    x = torch.ones(EXPERTS, WIDTH, dtype=torch.float64, requires_grad=True)
    chosen = (torch.arange(EXPERTS)[:, None] + torch.arange(k)) % EXPERTS
    with TokenRows() as operators:
        routing = Routing(chosen, torch.ones(EXPERTS, k, dtype=torch.float64, requires_grad=True))
        out = ExpertExchange(group, mode)(x, routing, lambda rows, counts: 2 * rows, EXPERTS)
        out.sum().backward()
    times = {"all_to_all": 1, "all_gather": ranks - 1, "reduce_scatter": (ranks - 1) / ranks}
    return sum(times[op] * nbytes for op, _, nbytes in operators.seen)
