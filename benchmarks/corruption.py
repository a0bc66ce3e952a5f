"""Silent corruption: which flipped bits are found, who is named, and what looking for them costs.

    python benchmarks/corruption.py [--quick] [--json PATH] [--layouts dp,fsdp,tp] [--seeds N]

A trial is one optimizer step of a small model on the ranks of a layout, from the same state each time. On one rank a
bit of one float32 number flips: of a weight or of the optimizer's state between the snapshot and the update (at rest),
of a weight between the update and the next snapshot (updated), of a gradient after it was reduced, of an activation in
the forward pass, or of a message as it arrives. Then everything that is always on looks: digests before the update and
at the snapshot after it, sums of gradients given and got, loss and norm that are not finite, and the comparison of
copies. A spike of the norm (5 times that of the step without a flip) is only a warning and counts apart. Without
effect: the state after the step has the same bits as without the flip on all ranks. Named: the verdict has the rank,
and no other. Split: some ranks alone would leave the step out, and in a run wait for the others.

The cost is processor time in one process, over that of an update: of what reads the state, and of the sums as a rank of
two would take them.
"""

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from driver import benchmark_parser, write_rows
from torch import Tensor
from trial import JoinedRole

from tilth.checkpoint.copies import bits
from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.protocol import transfer
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import NonFiniteError
from tilth.core.layout import Mesh
from tilth.flows.step_log import FACTOR
from tilth.guard.snapshots import compare
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.checksums import GivenSums, digest, exact_sum
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.roles.state import Learner, check_finite
from tilth.trace.spans import span
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.optim import layer_of

LAYOUTS = {"dp": {"dp": 3}, "fsdp": {"fsdp": 2}, "tp": {"tp": 2}, "ep": {"ep": 2}, "fsdp ep": {"fsdp": 2, "ep": 2}}
TARGETS = ("weight", "optimizer", "updated", "gradient", "activation", "message")
KINDS = {"sign": (31,), "high exponent": (30, 29, 28), "low exponent": (26, 24, 23), "high fraction": (22, 20, 17),
         "low fraction": (11, 5, 0)}  # fmt: skip
"""Bits of a float32 by what they mean."""
CONFIG = DecoderConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=True, tie_embeddings=True,
)  # fmt: skip
LARGE = DecoderConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=688, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=64,
    qk_norm=True, tie_embeddings=True,
)  # fmt: skip
SPARSE = replace(CONFIG, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=24, expert_layers=(0, 1))
"""Model of the layouts with "ep"; gradients that flip are those of experts."""
LARGE_SPARSE = replace(
    LARGE, family="qwen3_moe", num_experts=8, experts_per_token=2, expert_size=344, expert_layers=(0, 1, 2, 3)
)
COLLECTIVES = tuple(
    name for name in ("all_reduce", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
                      "reduce_scatter_single") if hasattr(dist, name)
)  # fmt: skip


@dataclass(frozen=True)
class Flip:
    """A flip: on which rank, of what, which bit, and a seed for the number that has it."""

    rank: int
    target: str
    bit: int
    seed: int


def flip(tensor: Tensor, bit: int, rng: random.Random) -> None:
    """Flip a bit of one number in place, zeros aside where there are others."""
    flat = tensor.data.view(-1)  # a change that torch does not count
    places = torch.nonzero(flat).flatten()
    place = int(places[rng.randrange(len(places))]) if len(places) else rng.randrange(len(flat))
    flat.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)


def learner(config: DecoderConfig, grid: ParallelDims) -> Learner:
    """A role that trains, with one step behind it."""

    def build() -> Decoder:
        return Decoder(config)

    sharded = ShardedModel.alone(build()) if len(grid.mesh) == 1 else shard(build, grid)
    sharded.init_(0)
    section = OptimizerConfig(lr=1e-3, clip_norm=1.0)
    return Learner(TrainEngine(sharded, section, total_steps=100, micro_tokens=4096), "model", "optimizer")


def rows(config: DecoderConfig, grid: ParallelDims, count: int, length: int) -> tuple[Jagged, np.ndarray, float]:
    """This rank's rows, their mask, and the tokens to learn from of all ranks."""
    part, parts = grid.mesh.index(grid.rank, *grid.mesh.over("rows")), grid.mesh.count("rows")
    tokens = Jagged.of(list(np.random.default_rng(part).integers(0, config.vocab_size, (count, length))))
    mask = np.tile(np.arange(length) > 0, count).astype(np.uint8)
    return tokens, mask, float(mask.sum() * parts)


def left_out(*_: Any) -> None:
    """Leave a step out without asking the other ranks for their rows, who may not leave it out."""
    raise NonFiniteError("this rank leaves the step out", key="grad_norm")


class Trial(JoinedRole):
    """One rank of a layout."""

    def __init__(self, context: Any, *, folder: str) -> None:
        """folder: for snapshots."""
        super().__init__(context)
        self.grid = ParallelDims.of(context.mesh, context.rank)
        self.config = SPARSE if self.grid.size("ep") > 1 else CONFIG
        self.learner = learner(self.config, self.grid)
        self.learner.engine.before_update = lambda: None  # is called apart, so that no rank waits for one that raises
        self.learner._at_rest.forget()
        setattr(self.learner.engine, "_leave_out", left_out)  # noqa: B010 - likewise
        self.misreduced, self.sums = self.learner.sharded.gradients.misreduced, list[str]()
        setattr(self.learner.sharded.gradients, "misreduced", self._recorded)  # noqa: B010 - likewise
        self.folder = folder
        self.rows = rows(self.config, self.grid, 4, 12)
        self._update()
        self.begin = {name: tensor.clone() for name, tensor in self._tensors()}
        self.position = self.learner.engine.position()

    def _recorded(self) -> str:
        self.sums.append(self.misreduced())
        return ""

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for title, group in self.learner.groups().items():
            yield from ((f"{title}/{name}", tensor) for name, tensor in group.tensors.items())

    def _update(self) -> Any:
        tokens, mask, total = self.rows
        return self.learner.engine.update(tokens, mask, {}, negative_log_likelihood(total))

    @transfer("all", "all")
    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run a trial; return what this rank finds. asked: fields of a Flip; empty: none."""
        given = Flip(**asked) if asked else None
        for name, tensor in self._tensors():
            tensor.copy_(self.begin[name])
        self.learner.engine.restore(self.position)
        self.learner.sharded.reshard()
        rest = self.learner._at_rest
        rest.forget()
        self.learner.snapshot(self.folder, 0)
        rest.remember(self.learner.groups())
        mine = given is not None and given.rank == self.grid.rank
        rng = random.Random(given.seed if given is not None else 0)
        if mine and given is not None and given.target in ("weight", "optimizer"):
            self._at_rest(given, rng)
        changed = rest.changed()
        rest.forget()
        undo = self._armed(given, rng) if mine and given is not None else lambda: None
        wrong, norm = False, 0.0
        self.sums.clear()
        try:
            norm = self._update().grad_norm
        except NonFiniteError:
            wrong = True
        finally:
            undo()
        alone = wrong
        if mine and given is not None and given.target == "updated":
            self._at_rest(given, rng)
        changed += rest.changed()
        try:
            check_finite(self.learner.groups())
        except NonFiniteError:
            wrong = True
        return {
            "rest": bool(changed), "sums": any(self.sums), "not_finite": wrong, "left_out": alone, "norm": norm,
            "state": self._bits(),
            "copies": self.learner._copies.digests(self.learner.groups()),
        }  # fmt: skip

    def _bits(self) -> int:
        return hash(tuple(bits(tensor) for _, tensor in self._tensors() if tensor.numel()))

    def _at_rest(self, given: Flip, rng: random.Random) -> None:
        title = "optimizer/" if given.target == "optimizer" else "model/"
        some = [t for name, t in self._tensors() if name.startswith(title) and t.numel() and t.dtype == torch.float32]
        flip(rng.choice(some), given.bit, rng)

    def _armed(self, given: Flip, rng: random.Random) -> Callable[[], None]:
        """Let the flip happen within the update; return what takes away the traces of that."""
        if given.target == "gradient":
            return self._gradient(given, rng)
        if given.target == "activation":
            layer, struck = rng.choice(list(self.learner.sharded.model.model.layers)), list[bool]()

            def changed(module: Any, args: Any, out: Any) -> None:
                if not struck:
                    struck.append(True)
                    flip(out[0] if isinstance(out, tuple) else out, given.bit, rng)

            return layer.register_forward_hook(changed).remove
        return self._message(given, rng) if given.target == "message" else lambda: None

    def _gradient(self, given: Flip, rng: random.Random) -> Callable[[], None]:
        plain = span.__enter__

        def entered(one: span) -> span:
            if one.op == "optimizer":
                setattr(span, "__enter__", plain)  # noqa: B010 - once
                named = self.learner.engine.optimizers.parameters
                grads = [p.grad for name, p in named.items() if self.config is CONFIG or ".experts." in name]
                flip(rng.choice([g for g in grads if g is not None and g.numel()]), given.bit, rng)
            return plain(one)

        setattr(span, "__enter__", entered)  # noqa: B010 - a method of a class
        return lambda: setattr(span, "__enter__", plain)

    def _message(self, given: Flip, rng: random.Random) -> Callable[[], None]:
        """Flip a bit in what one of the collectives of the update has left on this rank."""
        plain, left = {name: getattr(dist, name) for name in COLLECTIVES}, [rng.randrange(3)]

        def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                work, out = call(*args, **kwargs), args[0] if args else kwargs["output"]
                if left[0] == 0 and out.dtype == torch.float32 and out.numel() > 1:
                    if work is not None:
                        work.wait()
                    flip(out, given.bit, rng)
                    left[0] = -1
                elif out.dtype == torch.float32 and out.numel() > 1:
                    left[0] -= 1
                return work

            return called

        for name, call in plain.items():
            setattr(dist, name, wrapped(call))

        def undo() -> None:
            for name, call in plain.items():
                setattr(dist, name, call)

        return undo


def measure(
    cluster: Cluster, layout: str, seeds: int, kinds: dict[str, tuple[int, ...]], folder: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each target and kind of bit. folder: for snapshots."""
    sizes = LAYOUTS[layout]
    ranks = math.prod(sizes.values())
    mesh = Mesh.of(sizes, tuple(range(ranks)))
    group = cluster.group(f"trial-{layout}", "corruption:Trial", {"folder": folder}, mesh=mesh)
    clean = group.run({})
    for target in TARGETS:
        for kind, places in kinds.items():
            row = {"layout": layout, "ranks": ranks, "target": target, "bits": kind, "trials": 0, "effect": 0,
                   "rest": 0, "sums": 0, "not_finite": 0, "copies": 0, "found": 0, "named": 0, "spike": 0,
                   "split": 0}  # fmt: skip
            for seed in range(seeds):
                for bit in places:
                    victim = (seed + bit) % ranks
                    _count(row, group.run(asdict(Flip(victim, target, bit, seed * 100 + bit))), clean, victim)
            yield row


def _count(row: dict[str, Any], found: list[dict[str, Any]], clean: list[dict[str, Any]], victim: int) -> None:
    rest = {rank for rank, one in enumerate(found) if one["rest"]}
    sums = {rank for rank, one in enumerate(found) if one["sums"]}
    verdict = compare({rank: one["copies"] for rank, one in enumerate(found)})
    stopped = any(one["not_finite"] for one in found)
    named = rest or sums or (set(verdict.ranks) if verdict is not None else set())
    norm = max(one["norm"] for one in found)
    row["trials"] += 1
    row["effect"] += any(a["state"] != b["state"] for a, b in zip(found, clean)) or stopped
    row["rest"] += bool(rest)
    row["sums"] += bool(sums)
    row["not_finite"] += stopped
    row["copies"] += verdict is not None
    seen = bool(rest or sums or stopped or verdict)
    row["found"] += seen
    row["named"] += named == {victim}
    row["split"] += 0 < sum(one["left_out"] for one in found) < len(found)
    row["spike"] += not seen and norm > FACTOR * clean[0]["norm"]


def cost(config: DecoderConfig, tokens: int) -> dict[str, Any]:
    """Return processor seconds of an update on so many tokens, and of what looks at the whole state for it: before the
    update, after it and at the snapshot; and of the sums of gradients, or of their digests where FSDP sends none.

    Gradients of experts are looked at in one of some steps: a step has its share of that.
    """
    torch.set_num_threads(1)
    grid = ParallelDims.alone()
    role = learner(config, grid)
    mine, mask, total = rows(config, grid, tokens // 256, 256)
    loss, every = negative_log_likelihood(total), role.sharded.gradients.looks[1][1]
    named = {name: p.detach() for name, p in role.engine.optimizers.parameters.items()}
    parts = [{n: p for n, p in named.items() if (".experts." in n) == experts} for experts in (False, True)]
    role.engine.before_update, role.engine.after_update = lambda: None, lambda _: None
    done: Any = None

    def update() -> None:
        nonlocal done
        done = role.engine.update(mine, mask, {}, loss)

    def check() -> None:
        role._after_update(done)
        role.check_at_rest()
        role._before_update()

    looks = {"update": update, "check": check}
    for name, part in zip(("", "experts_"), parts):
        looks |= {f"{name}sums": _sums(part), f"{name}digests": partial(_digests, part)} if part else {}
    seconds = dict.fromkeys(looks, math.inf)
    for number in range(4):
        for name, look in looks.items():
            if name.endswith("sums"):
                look()  # a rank has just written them when it adds them up
            began = time.process_time()
            look()
            seconds[name] = min(seconds[name], time.process_time() - began) if number else math.inf
    share = {
        kind: (seconds["check"] + seconds[kind] + seconds.get(f"experts_{kind}", 0.0) / every) / seconds["update"]
        for kind in ("sums", "digests")
    }
    return {
        "layout": "one rank", "target": "cost", "parameters": sum(p.numel() for p in named.values()),
        "tokens": tokens, **{f"{name}_seconds": round(one, 5) for name, one in seconds.items()}, "every": every,
        "share": round(share["sums"], 5), "share_tp": round(share["digests"], 5),
    }  # fmt: skip


def _digests(gradients: Mapping[str, Tensor]) -> None:
    """Take digests as the backward pass leaves gradients, and before the optimizer."""
    for _ in range(2):
        torch.stack([digest(one) for one in gradients.values()])


def _sums(gradients: Mapping[str, Tensor]) -> Callable[[], Any]:
    """Return what adds up what one of two ranks gives to the reduce-scatters of its layers, and what it gets."""
    given: Any = GivenSums(SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    layers = dict[str, list[Tensor]]()
    for name, p in gradients.items():
        layers.setdefault(layer_of(name), []).append(p.view(-1)[: p.numel() // 2 * 2])
    whole = [torch.cat(parts) for parts in layers.values()]
    shards = [p[: len(p) // 2] for parts in layers.values() for p in parts]

    def taken() -> Any:
        for one in whole:
            given.add(one)
        return exact_sum(shards)

    return taken


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__, "dp and fsdp, three kinds of bits, one seed")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    names, kinds, sizes = given.layouts.split(","), KINDS, [2048, 8192]
    if given.quick:
        names, kinds, given.seeds, sizes = ["dp", "fsdp"], {"sign": (31,), "high exponent": (30,)}, 1, [1024]
    made = list[dict[str, Any]]()
    workers = max(math.prod(LAYOUTS[name].values()) for name in names)
    shared = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tilth-corruption-")
    with shared as folder, open_cluster("local", workers, timeout=120) as cluster:
        for name in names:
            for row in measure(cluster, name, given.seeds, kinds, f"{folder}/{name}"):
                made.append(row)
                show(row)
                write_rows(given.json, made)
    for tokens in sizes:
        for config in (LARGE, LARGE_SPARSE):
            made.append(cost(config, tokens))
            show(made[-1])
    write_rows(given.json, made)


if __name__ == "__main__":
    main()
