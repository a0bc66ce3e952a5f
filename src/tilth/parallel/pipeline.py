"""Pipelines: parts of a model on stages, and what goes from one stage to the next.

A part is the one-device model without what other parts have, so parameters keep their full names. Hidden states go
forward and their gradients back along channels between neighbouring stages; every stage derives their shapes from the
rows it has, which are the same on all stages. Sends run beside the following passes, and each receive is posted one
pass before its result is needed (MegaScale, 2402.15627, section 2).
"""

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilth.core.errors import ModelError
from tilth.models.attention import AttentionContext
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.parallel.comm import Channel, broadcast
from tilth.parallel.dims import ParallelDims
from tilth.parallel.division import Division
from tilth.plan.pipeline import Direction, Orders, Pass, Stages, needed

Shared = TypeVar("Shared")
AHEAD = 2
"""Hidden states for each stage that a pass without gradients may send before the first ones have arrived."""


def check_learned(stages: Stages, learned: Collection[str]) -> None:
    """Raise ModelError if adapters leave a part of a pipeline without a parameter to learn: it has no backward pass."""
    idle = (part for part in range(len(stages.layers)) if not any(stages.holds(part, name) for name in learned))
    if learned and (part := next(idle, None)) is not None:
        layers = f"layers {stages.layers[part].start} to {stages.layers[part].stop - 1}"
        message = f"layout.pp = {stages.count}: no adapter is in {layers}, a part of the pipeline without a gradient"
        raise ModelError(
            f"{message}; name matrices of every layer in lora.targets, or use pp = 1", key="layout.pp.learned"
        )


def keep_part(model: Decoder, stages: Stages, part: int) -> Decoder:
    """Remove from a model what other parts have, in place; on the meta device nothing was ever allocated."""
    own, inner = stages.layers[part], model.model
    model.first, model.last = part == 0, part == len(stages.layers) - 1
    kept = nn.ModuleList()
    for i in own:  # under its own number: names of parameters stay
        kept.add_module(str(i), inner.layers[i])
    inner.layers = kept
    if not stages.holds(part, "model.embed_tokens."):
        del inner.embed_tokens
    if not model.last:
        del inner.norm
        model.lm_head = None
        if isinstance(model, ValueModel):
            del model.score
    return model


def divide_layers(division: Division) -> None:
    """Divide a model into stages along "pp"."""
    keep_part(division.model, division.stages, division.part)


@dataclass(frozen=True)
class PipelinePlan:
    """Pipeline of a model, alike on every rank."""

    stages: Stages
    schedule: str
    dtypes: Mapping[str, torch.dtype]
    """Of all parameters."""
    drops: bool = False
    """True if passes that learn have dropout, on any stage."""


class Handover:
    """Carries results of passes to the passes that need them, in one process; ``Pipe`` does so between stages."""

    ahead = 0
    """Passes between the posting of a pass and the pass."""

    def __init__(self, orders: Orders, stage: int, parts: int) -> None:
        """orders: passes of each stage in a step; stage: this one; parts: of the whole model."""
        self.order, self.parts = orders[stage], parts
        self._results = dict[Pass, Tensor]()

    def passes(self, context: Callable[[int], AttentionContext]) -> Iterator[Pass]:
        """Yield the stage's passes in order. context: of a micro-batch, which begins when it is first asked for."""
        posted = 0
        for at, one in enumerate(self.order):
            while posted < min(at + 1 + self.ahead, len(self.order)):
                self.post(self.order[posted], context(self.order[posted].micro_batch))
                posted += 1
            yield one
        self.finish()

    def post(self, one: Pass, ctx: AttentionContext) -> None:
        """Prepare for what a pass needs. ctx: of its micro-batch."""

    def take(self, one: Pass) -> Tensor:
        """Return what a pass needs: the hidden states it begins with, or the gradient of those it ended with."""
        before = needed(one, self.parts)
        assert before is not None
        return self._results.pop(before)

    def give(self, one: Pass, result: Tensor) -> None:
        """Hand over the result of a pass of any but the last part (forward) or the first one (backward)."""
        self._results[one] = result

    def finish(self) -> None:
        """Wait until all results are handed over."""


class Pipe(Handover):
    """Channels of one stage to the stages before and after it, for the passes of one step."""

    ahead = 1

    def __init__(
        self, orders: Orders, stage: int, parts: int, *, grid: ParallelDims, model: Decoder, spread: int
    ) -> None:
        """model: a part on this stage; spread: ranks that divide the tokens of hidden states."""
        super().__init__(orders, stage, parts)
        self.grid, self._spread = grid, spread
        self._ranks = grid.ranks("pp")
        self._width, self._dtype = model.config.hidden_size, model.dtype
        self._device = next(model.parameters()).device
        self._places = {one: (stage, at) for stage, order in enumerate(orders) for at, one in enumerate(order)}
        self._scores = all(one.direction == "forward" for order in orders for one in order)
        self._posted: dict[Pass, tuple[Channel, Tensor, dist.Work | None]] = {}
        self._sent: list[tuple[Pass, dist.Work, Tensor]] = []

    def _channel(self, direction: Direction, source: int, target: int) -> Channel:
        """Return the channel between the stages of two parts."""
        n = len(self._ranks)
        return self.grid.channel(self._ranks[source % n], self._ranks[target % n], direction)

    def connect(self) -> None:
        """Send one number along each channel, in one order on all stages; a collective call of all stages.

        Two ranks wait for each other at their first message, so first messages in the order of passes could wait for
        ever: a stage posts a receive before it has sent what the other stage waits for.
        """
        n, hello = len(self._ranks), torch.zeros(1, device=self._device)
        some = range(min(n, self.parts - 1))
        links: list[tuple[int, int, Direction]] = [(part, part + 1, "forward") for part in some]
        links += [(part + 1, part, "backward") for part in some]
        for source, target, direction in sorted(links):
            if self.grid.rank not in (self._ranks[source % n], self._ranks[target % n]):
                continue
            channel = self._channel(direction, source, target)
            if self.grid.rank == channel.source:
                channel.send(hello).wait()
            else:
                channel.receive(hello, channel.post(hello))

    def post(self, one: Pass, ctx: AttentionContext) -> None:
        before = needed(one, self.parts)
        if before is None or before.part == one.part:
            return
        channel = self._channel(one.direction, before.part, one.part)
        rows = -(-ctx.positions.shape[0] // self._spread)
        out = torch.empty(rows, self._width, dtype=self._dtype, device=self._device)
        self._posted[one] = channel, out, channel.post(out) if out.numel() else None

    def take(self, one: Pass) -> Tensor:
        channel, out, work = self._posted.pop(one)
        if work is not None:
            channel.receive(out, work)
        self._release(one)
        return out

    def give(self, one: Pass, result: Tensor) -> None:
        if not result.numel():  # of a rank without a token of these sequences
            return
        user = one._replace(part=one.part + (1 if one.direction == "forward" else -1))
        result = result.contiguous()
        self._sent.append((user, self._channel(one.direction, one.part, user.part).send(result), result))
        if self._scores and len(self._sent) > AHEAD * len(self._ranks):  # nothing comes back that would free them
            self._sent.pop(0)[1].wait()

    def _release(self, one: Pass) -> None:
        """Free what has arrived for sure: the sender of this pass's input had used it before."""
        stage, at = self._places[needed(one, self.parts) or one]
        arrived = [(stage, 0) <= self._places[user] <= (stage, at) for user, _, _ in self._sent]
        for (_, work, _), there in zip(self._sent, arrived):
            if there:
                work.wait()
        self._sent = [sent for sent, there in zip(self._sent, arrived) if not there]

    def finish(self) -> None:
        for _, work, _ in self._sent:
            work.wait()
        self._sent.clear()


def share(x: Tensor, grid: ParallelDims) -> None:
    """Replace x by that of the last stage, of the same shape; a collective call of all stages."""
    group = grid.group("pp")
    assert group is not None
    broadcast(x, grid.ranks("pp")[-1], group)


def share_object(found: Shared, grid: ParallelDims) -> Shared:
    """Return what the last stage found; a collective call of all stages."""
    own = grid.rank == grid.ranks("pp")[-1]
    data = torch.frombuffer(bytearray(pickle.dumps(found) if own else b"-"), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    share(size, grid)
    data = data if own else torch.empty(int(size), dtype=torch.uint8)
    share(data, grid)
    return found if own else cast(Shared, pickle.loads(data.numpy().tobytes()))
