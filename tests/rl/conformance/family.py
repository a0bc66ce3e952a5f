"""How each kind of entry is called: on a whole batch, in micro-batches, and on one worker's rows of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.rl.conformance.batch import Batch
from tests.rl.test_split import Meeting
from tilth import rl
from tilth.rl.advantages import Advantage
from tilth.rl.packing import Packing, alone, rows_alone
from tilth.rl.preference import pair_weights
from tilth.rl.registry import build

Options = dict[str, Any]


@dataclass(frozen=True)
class Worker:
    """What a worker has to speak to the others with, and which rows of the whole batch are its own."""

    reduce: Callable[[Tensor], Tensor] = alone
    gather: Callable[[Any], Any] = rows_alone
    row: Tensor | None = None

    @property
    def columns(self) -> Options:
        """Keyword arguments; none where a worker has the whole batch."""
        return {} if self.row is None else {"reduce": self.reduce, "gather": self.gather}


ALONE = Worker()


@dataclass(frozen=True)
class Variant:
    """One way to call an entry."""

    options: Options = field(default_factory=dict)
    aggregation: str = ""
    weighted: bool = False

    def __str__(self) -> str:
        said = [f"{k}={v}" for k, v in self.options.items()] + [self.aggregation, "weighted" * self.weighted]
        return ", ".join(filter(None, said))


@dataclass(frozen=True)
class Result:
    """totals: numbers that add up over parts. tokens: columns [total] of the rows that were given."""

    totals: dict[str, float]
    tokens: dict[str, Tensor]


def _cat(results: Sequence[Result], index: Sequence[Tensor], total: int) -> Result:
    """Parts of a batch as one: totals added, columns put where their tokens lie."""
    totals: dict[str, float] = {}
    columns: dict[str, Tensor] = {}
    for part, at in zip(results, index):
        for name, number in part.totals.items():
            totals[name] = totals.get(name, 0.0) + number
        for name, column in part.tokens.items():
            columns.setdefault(name, torch.zeros(total, dtype=column.dtype))[at] = column
    return Result(totals, columns)


class Family:
    """A kind. micros False: it works before a batch is cut into micro-batches."""

    kind = ""
    micros = True

    def run(self, name: str, variant: Variant, batch: Batch, worker: Worker = ALONE, cuts: Any = None) -> Result:
        """On a worker's rows. cuts: row indices of each micro-batch; None: all rows in one, which sees the batch."""
        raise NotImplementedError

    def split(self, name: str, variant: Variant, batch: Batch, parts: Sequence[Tensor]) -> Result:
        """Two workers or more with these rows each, as threads that meet; in the order of the batch."""
        meeting = Meeting(len(parts))

        def work(rank: int) -> Result:
            worker = Worker(meeting.reduce(rank), meeting.gather(rank), parts[rank])
            return self.run(name, variant, batch.pick(parts[rank]), worker, self.halves(len(parts[rank])))

        found = meeting.run(work)
        return _cat(found, [batch.index(p) for p in parts], len(batch.mask))

    def halves(self, rows: int) -> Any:
        """Micro-batches of a worker's rows."""
        return list(torch.arange(rows).tensor_split(2)) if self.micros else None

    def index_of(self, variants: list[Variant]) -> set[str]:
        """Options that at least one variant sets."""
        return {option for v in variants for option in v.options}


class Advantages(Family):
    kind, micros = "advantages", False

    def run(self, name: str, variant: Variant, batch: Batch, worker: Worker = ALONE, cuts: Any = None) -> Result:
        found = rl.estimate(
            name,
            rewards=batch.rewards,
            lengths=batch.lengths,
            mask=batch.mask,
            groups=batch.groups,
            **self.columns(name, variant, batch),
            **(worker.columns | ({} if worker.row is None else {"row": worker.row})),
            **variant.options,
        )
        made = {"advantages": found.advantages, "mask": found.mask}
        return Result({}, made if found.returns is None else made | {"returns": found.returns})

    def columns(self, name: str, variant: Variant, batch: Batch) -> dict[str, Tensor]:
        """What the entry needs besides rewards and groups, and importance weights where they are asked for."""
        needs = build("advantages", name, variant.options, Advantage).needs
        wanted = [*needs, *(["weights"] if variant.weighted else [])]
        every = batch.tokens | batch.rows | {"logprobs": batch.tokens["old_logprobs"]}  # estimators see it by this name
        return {c: every[c] for c in wanted if c not in ("rewards", "groups", "counts")}


class _Losses(Family):
    """Kinds that end in one number with a gradient."""

    leaf = "logprobs"

    def run(self, name: str, variant: Variant, batch: Batch, worker: Worker = ALONE, cuts: Any = None) -> Result:
        if cuts is None and worker.row is None:
            return self.micro(name, variant, batch, {})
        shared = self.prepare(name, variant, batch, worker)
        cuts = [torch.arange(len(batch))] if cuts is None else cuts
        found = [self.micro(name, variant, batch.pick(rows), shared) for rows in cuts]
        return _cat(found, [batch.index(rows) for rows in cuts], len(batch.mask))

    def prepare(self, name: str, variant: Variant, batch: Batch, worker: Worker) -> Options:
        """What every micro-batch must know of the whole batch."""
        aggregation, options = self.aggregation(name, variant)
        counts = rl.token_counts(batch.mask, batch.lengths)
        if worker.row is not None:
            counts = torch.from_numpy(worker.gather({"counts": counts.numpy()})["counts"])
        return {"denominator": rl.row_denominator(aggregation, counts, **options)}

    def aggregation(self, name: str, variant: Variant) -> tuple[str, Options]:
        known = rl.options("aggregations", variant.aggregation or "token-mean")
        return variant.aggregation or "token-mean", {k: v for k, v in variant.options.items() if k in known}

    def micro(self, name: str, variant: Variant, batch: Batch, shared: Options) -> Result:
        leaf = batch.tokens[self.leaf].clone().requires_grad_()
        loss = self.loss(name, variant, batch, leaf, shared)
        loss.backward()
        return Result({"loss": float(loss.detach())}, {"gradient": leaf.grad})

    def loss(self, name: str, variant: Variant, batch: Batch, leaf: Tensor, shared: Options) -> Tensor:
        raise NotImplementedError


class Losses(_Losses):
    kind = "losses"

    def aggregation(self, name: str, variant: Variant) -> tuple[str, Options]:
        own = {k: v for k, v in variant.options.items() if k in rl.options("losses", name)}
        chosen = variant.aggregation or rl.loss_entry(name, **own).aggregation
        known = rl.options("aggregations", chosen)
        return chosen, {k: v for k, v in variant.options.items() if k in known}

    def prepare(self, name: str, variant: Variant, batch: Batch, worker: Worker) -> Options:
        own = {k: v for k, v in variant.options.items() if k in rl.options("losses", name)}
        found = rl.thresholds(name, **self.columns(batch), **worker.columns, **own)
        return super().prepare(name, variant, batch, worker) | {"thresholds": found}

    def columns(self, batch: Batch) -> dict[str, Tensor]:
        names = ("logprobs", "old_logprobs", "advantages", "uniforms")
        return {c: batch.tokens[c] for c in names} | {"mask": batch.mask, "lengths": batch.lengths}

    def loss(self, name: str, variant: Variant, batch: Batch, leaf: Tensor, shared: Options) -> Tensor:
        columns = self.columns(batch) | {"logprobs": leaf, "ref_logprobs": batch.tokens["ref_logprobs"]}
        columns |= {"weights": batch.tokens["weights"]} if variant.weighted else {}
        return rl.policy_loss(name, aggregation=variant.aggregation, **columns, **shared, **variant.options).loss


class Kl(Losses):
    """A form as the penalty of PPO's loss: value and gradient in one."""

    kind = "kl"

    def run(self, name: str, variant: Variant, batch: Batch, worker: Worker = ALONE, cuts: Any = None) -> Result:
        as_penalty = Variant({"kl": name, "kl_coef": 0.7, **variant.options}, variant.aggregation, variant.weighted)
        return super().run("ppo_clip", as_penalty, batch, worker, cuts)


class Aggregations(_Losses):
    kind, leaf = "aggregations", "loss"

    def aggregation(self, name: str, variant: Variant) -> tuple[str, Options]:
        return name, variant.options

    def loss(self, name: str, variant: Variant, batch: Batch, leaf: Tensor, shared: Options) -> Tensor:
        return rl.aggregate(name, leaf, mask=batch.mask, lengths=batch.lengths, **shared, **variant.options)


class Value(_Losses):
    """The value loss; its two forms are not in the registry."""

    kind, leaf = "value", "values"

    def loss(self, name: str, variant: Variant, batch: Batch, leaf: Tensor, shared: Options) -> Tensor:
        old, returns = (batch.tokens[c] for c in ("old_values", "returns"))
        more = shared | variant.options | ({"aggregation": variant.aggregation} if variant.aggregation else {})
        return rl.value_loss(leaf, old, returns, batch.mask, batch.lengths, **more).loss


class Corrections(Family):
    kind, micros = "corrections", False

    def run(self, name: str, variant: Variant, batch: Batch, worker: Worker = ALONE, cuts: Any = None) -> Result:
        found = rl.correct(
            name,
            rollout_logprobs=batch.tokens["rollout_logprobs"],
            old_logprobs=batch.tokens["old_logprobs"],
            advantages=batch.tokens["advantages"],
            mask=batch.mask,
            lengths=batch.lengths,
            **({} if worker.row is None else {"reduce": worker.reduce}),
            **variant.options,
        )
        weights = batch.mask.double() if found.weights is None else found.weights
        bypass = batch.mask & found.bypass
        totals = {}
        for metric, value in found.metrics.items():
            if type(value) is rl.Metric and value.reduction == "mean" and metric != "correction/scale":
                totals |= {f"sum of {metric}": float(value.total), f"count of {metric}": float(value.count)}
        return Result(totals, {"weights": weights, "mask": found.mask, "bypass": bypass})


class Preferences(_Losses):
    """Each row is the chosen answer of a pair, the rejected one is known by its row columns."""

    kind = "preferences"

    def prepare(self, name: str, variant: Variant, batch: Batch, worker: Worker) -> Options:
        """The weight of each pair in the whole batch: a prompt weighs as much as any other."""
        row = torch.arange(len(batch)) if worker.row is None else worker.row
        every = {"row": row.numpy(), "groups": batch.groups.numpy()}
        every = every if worker.row is None else worker.gather(every)
        weights = pair_weights(torch.from_numpy(every["groups"]))
        return {"weights": dict(zip(every["row"].tolist(), weights.tolist())), "row": row}

    def run(self, name: str, variant: Variant, batch: Batch, worker: Worker = ALONE, cuts: Any = None) -> Result:
        shared = self.prepare(name, variant, batch, worker)
        cuts = [torch.arange(len(batch))] if cuts is None else cuts
        parts = []
        for rows in cuts:
            own = [shared["weights"][r] for r in shared["row"][rows].tolist()]
            parts.append(self.pairs(name, variant, batch.pick(rows), torch.tensor(own, dtype=torch.float64)))
        return _cat(parts, [batch.index(rows) for rows in cuts], len(batch.mask))

    def pairs(self, name: str, variant: Variant, batch: Batch, weights: Tensor) -> Result:
        packing, columns = Packing.of(batch.lengths, batch.mask), batch.rows
        score, reference = (packing.sum(batch.tokens[c]) for c in ("logprobs", "ref_logprobs"))
        found = rl.preference_loss(
            name,
            chosen=score,
            rejected=columns["rejected"],
            counts=(packing.counts.clamp(min=1), columns["rejected_counts"]),
            reference=(reference, columns["rejected_reference"]),
            margins=columns["margins"] if variant.weighted else None,
            weights=weights,
            **variant.options,
        )
        slopes = {"chosen": found.chosen, "rejected": found.rejected}
        return Result({"loss": float(found.loss)}, {k: packing.masked(packing.spread(v)) for k, v in slopes.items()})


_ALL = (Advantages(), Losses(), Aggregations(), Kl(), Value(), Corrections(), Preferences())
FAMILIES: dict[str, Family] = {family.kind: family for family in _ALL}
