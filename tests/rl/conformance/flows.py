"""The column (f): one step of every flow that can use an entry, as a recipe through the launcher; inline, one layer.

One run has an entry of every kind, so that a few runs cover all. Where one fails, its entries run one by one, and those
that fail alone have the blame. With two workers (column e of the whole table) the same runs must give the same numbers.
Runs with a correction have something to correct: their engine's log-probs are moved, in two rows of three.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tilth.roles.rollout
from tests.data.reading import load_pairs
from tests.flows import tiny
from tests.flows.test_cluster import COUNTED, NEAR, Lent
from tests.rl.conformance.cell import Cell, Subject
from tilth import rl
from tilth.cluster.backends.local import LocalBackend
from tilth.cluster.controller.cluster import Cluster
from tilth.config.flows import FLOWS
from tilth.config.load import from_dict
from tilth.config.schema import Recipe
from tilth.core.batch import Batch, Store
from tilth.core.errors import RecipeError
from tilth.data.prompts import load_source
from tilth.engines.request import Trajectory
from tilth.launch import life as launch
from tilth.rewards.process_pool import RewardPool
from tilth.rl.advantages import Advantage
from tilth.rl.registry import build
from tilth.rl.rollout_correction import CorrectionRule, Corrector
from tilth.roles.experience import to_batch
from tilth.runs.readers import read_metrics

MADE = {"remax": "baselines", "distill": "ref_logprobs"}
"""Flows that make a column which their estimator must look at; as an advantage nobody else has a use for it."""
TAUGHT = ("distill", "fapo")
"""Flows that ask another run's model, as teacher or judge."""
VALUE = {"clip": 0.2, "no clip": 0.0}
LEARNT = ("loss", "grad_norm")
"""Metrics that every run has: one that is missing is a failure, not 0."""
SAMPLED = ("samples/trained", "reward/mean", "length/mean", "tokens/generated", "entropy")
"""And those of runs that sample."""
FIRST = {"losses": "ppo_clip", "aggregations": "", "kl": "", "corrections": "", "value": "clip"}
"""What a run has where nothing is left to be covered; its estimator is then the flow's own."""


@dataclass(frozen=True)
class Mix:
    """A run: the flow and an entry of each kind ("": the flow's own)."""

    flow: str
    entries: dict[str, str] = field(default_factory=dict)
    kl_in: str = "loss"

    @property
    def subjects(self) -> list[Subject]:
        """Rows of the table that it covers."""
        return [Subject(kind, name) for kind, name in self.entries.items() if name]

    def __str__(self) -> str:
        return f"flow={self.flow} with {', '.join(s.name for s in self.subjects)}"


def usable(flow: str, subject: Subject) -> bool:
    """Whether a flow can use an entry: by the columns it makes and what it learns from, written down here anew."""
    facts, kind, name = FLOWS[flow], subject.kind, subject.name
    if kind == "preferences":
        compares = build("preferences", name, {}, rl.preference.PreferenceLoss).compares
        return facts.learns == "pairs" and (compares == "rewards") == facts.value
    if kind == "value":
        return facts.critic
    if kind == "advantages":
        needs = rl.check(name, _EVERY, kind="advantages").needs
        made = all((column in needs) == (flow == maker) for maker, column in MADE.items())
        return facts.samples and ("values" in needs) == facts.critic and made
    return facts.samples


_EVERY = (
    "rewards groups counts values logprobs ref_logprobs old_logprobs rollout_logprobs sum_pi_squared weights "
    "chunk_tokens uniforms baselines"
).split()


def _fits(correction: str, loss: str) -> bool:
    try:
        build("corrections", correction, {}, CorrectionRule).fits(rl.loss_entry(loss))
    except RecipeError:
        return False
    return True


def _take(kind: str, flow: str, wanted: list[Subject], also: Any = lambda name: True) -> str:
    """The first name of a kind that is wanted and that the flow can use; else what is always there."""
    for s in wanted:
        if s.kind == kind and usable(flow, s) and also(s.name):
            return s.name
    return FIRST.get(kind, "")


def mix(flow: str, wanted: list[Subject]) -> Mix:
    """A run of this flow that covers as much as it can of what is wanted."""
    facts = FLOWS[flow]
    if facts.learns == "pairs":
        return Mix(flow, {"preferences": _take("preferences", flow, wanted)})
    correction = _take("corrections", flow, wanted)
    loss = _take("losses", flow, wanted, lambda name: not correction or _fits(correction, name))
    if correction and not _fits(correction, loss):
        loss = build("corrections", correction, {}, CorrectionRule).made_for or "reinforce"
    entries = {"corrections": correction, "losses": loss}
    for kind in ("advantages", "aggregations", "kl", *(["value"] if facts.critic else [])):
        # Of few samples grpo_passk has a gradient at one in three: those that a correction may reject.
        entries[kind] = _take(kind, flow, wanted, lambda name: not correction or name != "grpo_passk")
    chosen = entries["advantages"] or facts.own.get("algorithm", {}).get("advantage", "grpo")
    entry = rl.check(chosen, _EVERY, kind="advantages")
    assert isinstance(entry, Advantage)
    shaped = len(wanted) % 2 and entry.reads_reward and not entry.relative_to_spread
    return Mix(flow, entries, "reward" if shaped else "loss")


def plan(subjects: list[Subject], quick: bool) -> list[Mix]:
    """Runs that cover every entry in every flow that can use it; quick: in one of them."""
    runs: list[Mix] = []
    left = {flow: [s for s in subjects if usable(flow, s)] for flow in FLOWS}
    while any(left.values()):
        for flow in FLOWS:
            if not left[flow]:
                continue
            made = mix(flow, left[flow])
            runs.append(made)
            for other in FLOWS if quick else (flow,):
                left[other] = [s for s in left[other] if s not in made.subjects]
    return runs


def recipe(made: Mix, folder: Path, teacher: str, **more: Any) -> Recipe:
    """A run of one step by a model of one layer."""
    names, facts = made.entries, FLOWS[made.flow]
    how: dict[str, Any] = {"steps": 1, "minibatches": 2 if "minibatches" in facts.reads else 1, "kl_in": made.kl_in}
    keys = {"advantages": "advantage", "losses": "loss", "aggregations": "aggregation", "corrections": "correction"}
    how |= {key: names[kind] for kind, key in keys.items() if names.get(kind)}
    if names.get("kl") or _needs_reference(names):
        how |= {"kl_coef": 0.05, **({"kl": names["kl"]} if names.get("kl") else {})}
    if "refill" in facts.own.get("algorithm", {}):
        how["refill"] = 2
    base = tiny.settings(folder)
    sections = {
        "model": base["model"] | {"layers": 1},
        "supervised": {"steps": 1, "batch": 4, "check_every": 1} if facts.learns == "pairs" else {"steps": 0},
        "rollout": base["rollout"] | {"prompts": 3, "group": 3},
        "algorithm": how if facts.samples else {},
        "critic": {"steps": 1, "clip": VALUE[names.get("value") or "clip"]},
        "preference": {"loss": names["preferences"]} if names.get("preferences") else {},
        "reference": {"path": teacher} if made.flow == "distill" else {},
        "judge": {"path": teacher} if made.flow == "fapo" else {},
        "train": base["train"] | {"mismatch": 2.0 if _corrects(made) else 0.0},
        "run": {"dir": str(folder), "eval_every": 0, "eval_prompts": 2, "save_every": 100},
    }
    return from_dict(base | sections | {"flow": made.flow} | more)


def _needs_reference(names: dict[str, str]) -> bool:
    name = names.get("advantages")
    return bool(name) and "ref_logprobs" in rl.check(name, _EVERY, kind="advantages").needs


class Runs:
    """Runs in a folder that is removed, with one pool of rewards for all of them; a context manager."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._made: dict[str, list[dict[str, Any]]] = {}
        self._teacher = ""

    def __enter__(self) -> "Runs":
        self.folder = Path(tempfile.mkdtemp(prefix="tilth-conformance-"))
        self._open.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._pool = self._open.enter_context(RewardPool(tiny.close_enough, wait=False))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def metrics(self, made: Mix) -> list[dict[str, Any]]:
        """What a run committed; made once."""
        key = repr(made)
        if key not in self._made:
            self._teach(made)
            with mock.patch.object(tilth.roles.rollout, "to_batch", moved) if _corrects(made) else nullcontext():
                self._made[key] = self._run(made)
        return self._made[key]

    def exact(self, made: Mix) -> list[dict[str, Any]]:
        """The same by the engine's own log-probs, as worker processes have them."""
        return self._run(made) if _corrects(made) else self.metrics(made)

    def of_two(self, made: Mix) -> list[dict[str, Any]]:
        """The same on two worker processes, which all these runs share."""
        if not hasattr(self, "_cluster") or self._cluster.dispatch.failed is not None:
            self._cluster = Cluster(LocalBackend(2, timeout=120.0), 120.0)
            self._open.callback(self._cluster.close)
        with mock.patch.object(launch, "open_cluster", lambda *_, **__: Lent(self._cluster)):
            return self._run(made, cluster={"backend": "local", "workers": 2})

    def _teach(self, made: Mix) -> None:
        """The teacher's run, by an engine as it is."""
        if made.flow in TAUGHT and not self._teacher:
            self._teacher = str(self._launch(Mix("grpo"), "teacher"))

    def _run(self, made: Mix, **more: Any) -> list[dict[str, Any]]:
        self._teach(made)
        return read_metrics(self._launch(made, "run", **more))

    def _launch(self, made: Mix, name: str, **more: Any) -> Path:
        asked = recipe(made, self.folder, self._teacher, **more)
        pairs = asked.flow_spec.learns == "pairs"
        material = load_pairs(asked.data) if pairs else load_source(asked.data)
        with _pool(asked, self._pool) as pool:
            return launch.launch(asked, name, material, None if pairs else pool, [])[0]


def _corrects(made: Mix) -> bool:
    return bool(made.entries.get("corrections"))


def moved(trajectories: Sequence[Trajectory], store: Store, **how: bool) -> Batch:
    """``to_batch`` of an engine with another policy: of three rows it finds one less likely by about 0.75 a token, one
    likelier, one as it is; seeded by the rows."""

    def kind(t: Trajectory) -> int:
        return (t.id + t.prompt) % 3

    def other(t: Trajectory) -> Trajectory:
        by = np.random.default_rng(abs(t.id)).normal((-0.75, 0.75, 0.0)[kind(t)], 0.05, len(t.logprobs))
        return replace(t, logprobs=t.logprobs + np.float32(t.mask * by * (kind(t) < 2)))

    return to_batch([other(t) for t in trajectories], store, **how)


@contextmanager
def _pool(asked: Recipe, here: RewardPool) -> Iterator[RewardPool]:
    """The pool of this process; another one, not started, for workers that have their own."""
    if asked.cluster.backend == "inline":
        yield here
        return
    with RewardPool(tiny.close_enough, wait=False, start=False) as other:
        yield other


def problem(runs: Runs, made: Mix) -> str:
    """What is wrong with a run; "": nothing."""
    try:
        records = runs.metrics(made)
    except Exception as error:  # noqa: BLE001 - a crash is the cell of these entries
        return f"{made}: {type(error).__name__}: {error}"
    said = wrong(made, records[-1]) if records else "no step was committed"
    return f"{made}: {said}" if said else ""


def present(made: Mix) -> tuple[str, ...]:
    """Metrics that a run of this flow must have."""
    facts = FLOWS[made.flow]
    return LEARNT + (SAMPLED if facts.samples else ()) + (("value/loss",) if facts.critic else ())


def wrong(made: Mix, record: dict[str, Any]) -> str:
    """What is wrong with the record of a step; "": nothing. Something was learned, and a correction did something."""
    for name in present(made):
        number = record.get(name, math.nan)
        if not math.isfinite(number) or (number <= 0 and name in ("samples/trained", "grad_norm")):
            return f"{name} = {number}"
    chosen = build("corrections", made.entries["corrections"], {}, CorrectionRule) if _corrects(made) else None
    if not isinstance(chosen, Corrector):
        return ""
    if chosen.weighted and record.get("correction/weight", 1.0) == 1:
        return "all weights are 1"
    if chosen.rejects and not chosen.by_advantage and not record.get("correction/rejected", 0.0) > 0:
        return "nothing was rejected"
    return ""


def apart(runs: Runs, made: Mix) -> str:
    """What two workers make otherwise than one; "": nothing."""
    try:
        ours, theirs = runs.of_two(made), runs.exact(made)
    except Exception as error:  # noqa: BLE001 - a crash is the cell of these entries
        return f"{made} on two workers: {type(error).__name__}: {error}"
    last = len(ours) - 1  # steps before it are the critic's alone
    said = [
        unequal(present(made) if i == last else (), a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
    return next((f"{made}: {what}" for what in said if what), "" if said else f"{made}: no step was committed")


def unequal(must: Sequence[str], ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Which number of a step on two workers is not that of one worker; "": all are. must: what both may not lack."""
    for name, tolerance in [*((n, 1e-6) for n in COUNTED), *((n, 2e-4) for n in NEAR)]:
        if name not in must and name not in ours and name not in theirs:
            continue
        x, y = ours.get(name, math.nan), theirs.get(name, math.nan)
        if not abs(x - y) <= tolerance * max(1.0, abs(y)):
            return f"{name} = {x:.7g} on two workers, {y:.7g} on one"
    return ""


def check_flows(subjects: list[Subject], quick: bool) -> dict[Subject, dict[str, Cell]]:
    """Cells of the column flows, and, where not quick, of real workers (``processes``) for each entry."""
    found: dict[Subject, dict[str, Cell]] = {s: {} for s in subjects}
    with Runs() as runs:
        for made in plan(subjects, quick):
            _blame(found, runs, made, "flows", problem)
        for made in [] if quick else plan(subjects, quick=True):
            _blame(found, runs, made, "processes", apart)
    for subject, cells in found.items():
        if "flows" not in cells:
            cells["flows"] = Cell("fail", "no flow can use it")
    return found


def _blame(found: dict[Subject, dict[str, Cell]], runs: Runs, made: Mix, column: str, check: Any) -> None:
    """Pass for all entries of a run, or fail for those that fail on their own, or for all where none does."""
    told = check(runs, made)
    guilty: dict[Subject, str] = {}
    if told:
        for subject in made.subjects:
            alone = replace(made, entries={subject.kind: subject.name})
            alone = alone if subject.kind == "kl" else replace(alone, kl_in="loss")
            if subject.kind == "corrections":
                loss = build("corrections", subject.name, {}, CorrectionRule).made_for if subject.name != "none" else ""
                alone = replace(alone, entries=alone.entries | {"losses": loss or "ppo_clip"})
            said = check(runs, alone)
            guilty |= {subject: said} if said else {}
        guilty = guilty or dict.fromkeys(made.subjects, told)
    for subject in made.subjects:
        if subject in found and found[subject].get(column, Cell("pass")).state == "pass":
            found[subject][column] = Cell("fail", guilty[subject]) if subject in guilty else Cell("pass")
