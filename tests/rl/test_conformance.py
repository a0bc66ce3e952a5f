"""The conformance table: every registered entry by a few batches, and that each check of it can fail.

The whole table, with a step of every flow, is a long row here and ``benchmarks/conformance.py`` by itself.
"""

import json
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.rl.conformance import bandit, flows, table
from tests.rl.conformance.batch import drawn
from tests.rl.conformance.cell import Cell, Gap, NotApplicable, Subject, cell
from tests.rl.conformance.checks import check_golden, check_invariance, check_oracle, check_split, vectors
from tests.rl.conformance.edges import check_edges
from tests.rl.conformance.published import check_published
from tests.scripts import script
from tilth import rl
from tilth.config.flows import FLOWS
from tilth.config.load import from_dict
from tilth.rl.algorithm import Algorithm
from tilth.rl.registry import _ENTRIES, registered

SUBJECTS = table.subjects()


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.kind}-{s.name}")
def test_every_entry_agrees_with_its_references(subject):
    checks = {
        "golden": check_golden,
        "oracle": partial(check_oracle, count=1),
        "invariance": partial(check_invariance, count=1),
        "published": check_published,
    }
    for name, check in checks.items():
        found = cell(check, subject)
        assert found.state != "fail", f"{name}: {found.note}"


@pytest.mark.parametrize("kind", sorted({s.kind for s in SUBJECTS}))
def test_edges_of_each_kind(kind):
    """Of the first of each kind here; of all in the table."""
    found = cell(check_edges, next(s for s in SUBJECTS if s.kind == kind))
    assert found.state == "pass", found.note


@pytest.mark.slow
@pytest.mark.dist
def test_the_whole_table():
    """Random batches in hundreds, every flow, two worker processes."""
    made = table.make(quick=False)
    assert not made.failures, made.markdown()


@pytest.mark.slow
def test_the_quick_table():
    made = table.make(quick=True)
    assert not made.failures, made.markdown()


# ---- nothing is left out ----


def test_there_is_a_row_for_everything_registered_and_for_every_kind():
    rows = {(s.kind, s.name) for s in SUBJECTS}
    assert rows >= {(kind, name) for kind, names in rl.names().items() for name in names}
    assert {kind for kind, _ in rows} == {*rl.names(), "value"}


@pytest.fixture
def entries():
    """Entries of a test go when it ends."""
    before = {kind: dict(known) for kind, known in _ENTRIES.items()}
    yield
    for kind, known in before.items():
        _ENTRIES[kind] = known


@pytest.mark.parametrize("kind", list(rl.names()))
def test_an_entry_that_is_only_registered_fails_the_table(entries, kind):
    first = next(iter(registered(kind).values()))
    rl.register(kind, "unheard_of")(type("UnheardOf", (first,), {"__doc__": "New."}))
    subject = Subject(kind, "unheard_of")
    assert subject in table.subjects()
    found = cell(check_oracle, subject)
    assert found.state == "fail" and "no oracle" in found.note
    if "*" not in vectors()["without"].get(kind, {}):
        assert "does not say why" in cell(check_golden, subject).note


def test_a_new_option_that_nobody_sets_fails_the_table(entries):
    first = registered("advantages")["rloo"]
    wider = type("Rloo", (first,), {"__annotations__": {"more": float}, "more": 0.0, "__doc__": "With an option."})
    _ENTRIES["advantages"]["rloo"] = wider
    found = cell(check_oracle, Subject("advantages", "rloo"))
    assert found.state == "fail" and "no variant sets the option 'more'" in found.note


# ---- each check can fail ----


def swapped(kind, name, **members):
    """The entry of this name with other methods."""
    _ENTRIES[kind][name] = type("Swapped", (_ENTRIES[kind][name],), {"__doc__": "Wrong.", **members})
    return Subject(kind, name)


def test_a_wrong_number_is_seen_by_vectors_and_loops(entries):
    right = registered("advantages")["rloo"].relative
    subject = swapped("advantages", "rloo", relative=lambda self, groups: 1.0001 * right(self, groups))
    for check in (check_golden, partial(check_oracle, count=3)):
        found = cell(check, subject)
        assert found.state == "fail" and 1e-6 < found.largest < 1e-2


WRONG = {
    "aggregation": ("gspo", {"aggregation": property(lambda self: "token-mean")}),
    "tau_pos": ("sapo", {"tau_pos": 0.9, "__annotations__": {"tau_pos": float}}),
}


@pytest.mark.parametrize("what", WRONG)
def test_another_default_than_the_published_one_is_seen(entries, what):
    name, members = WRONG[what]
    found = cell(check_published, swapped("losses", name, **members))
    assert found.state == "fail" and what in found.note


def test_a_wrong_gradient_of_a_right_value_is_seen(entries):
    right = registered("losses")["ppo_clip"].tokens

    def tokens(self, step):
        loss, metrics = right(self, step)
        return loss + 0.01 * (step.logprobs - step.logprobs.detach()), metrics

    subject = swapped("losses", "ppo_clip", tokens=tokens)
    assert "gradient" in cell(partial(check_oracle, count=3), subject).note


def test_a_loss_of_the_micro_batch_is_seen(entries):
    """Each micro-batch centres its own advantages: the classical mistake."""
    right = registered("losses")["reinforce"].tokens

    def tokens(self, step):
        count = step.packing.mask.sum().clamp(min=1)
        own = step.packing.masked(step.advantages - step.advantages.sum() / count)
        return right(self, replace(step, advantages=own))

    found = cell(check_invariance, swapped("losses", "reinforce", tokens=tokens))
    assert found.state == "fail" and "micro-batches" in found.note
    assert cell(check_split, Subject("losses", "reinforce")).state == "fail"


def test_an_estimator_that_goes_by_the_order_of_rows_is_seen(entries):
    right = registered("advantages")["grpo_no_std"].rows

    def rows(self, rows):
        return right(self, rows) * torch.linspace(1, 2, len(rows.scores), dtype=torch.float64)

    found = cell(check_invariance, swapped("advantages", "grpo_no_std", rows=rows))
    assert found.state == "fail" and "another order" in found.note


def test_an_estimator_that_sees_its_own_rows_only_is_seen(entries):
    def tokens(self, tokens):
        return tokens.packing.masked(tokens.packing.spread(self.rows(tokens.rows))), None

    found = cell(check_split, swapped("advantages", "rloo", tokens=tokens))
    assert found.state == "fail" and "owners" in found.note


def test_padding_that_counts_is_seen(entries):
    def denominator(self, counts):
        return float(len(counts)) * 7

    wrong = swapped("aggregations", "token-mean", denominator=denominator)
    assert cell(check_oracle, wrong).state == "fail"
    right = registered("losses")["gspo"].tokens

    def tokens(self, step):
        loss, metrics = right(self, step)
        return loss * step.packing.spread(step.packing.lengths).to(loss.dtype), metrics

    found = cell(check_invariance, swapped("losses", "gspo", tokens=tokens))
    assert found.state == "fail" and "padded" in found.note


def test_masked_nan_equal_rewards_and_missing_ones_are_seen(entries):
    def noisy(self, rows):
        return rows.scores - rows.scores.mean()

    found = cell(check_edges, swapped("advantages", "grpo_no_std", rows=noisy))
    assert found.state == "fail" and ("reward nan" in found.note or "exactly 0" in found.note)

    def leaking(self, d):
        return d * torch.where(d > 5, torch.nan, 1.0)

    found = cell(check_edges, swapped("kl", "k1", value=leaking))
    assert found.state == "fail" and "log-ratio 60" in found.note


def test_what_raises_is_a_failed_cell_and_what_compares_nothing_too():
    def broken(subject):
        raise ZeroDivisionError("by hand")

    assert cell(broken, SUBJECTS[0]).note == "ZeroDivisionError: by hand"
    assert cell(lambda subject: Gap(1.0), SUBJECTS[0]) == Cell("fail", "nothing was compared")

    def idle(subject):
        raise NotApplicable("it has no such thing")

    assert cell(idle, SUBJECTS[0]) == Cell("n/a", "it has no such thing")


@pytest.mark.parametrize(
    "actual, expected, holds",
    [
        (1.0, 1.0 + 1e-7, True),
        (1.0, 1.1, False),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (1e6, 1e6 + 0.1, True),
    ],
)
def test_a_gap_by_its_tolerance(actual, expected, holds):
    gap = Gap(1e-6)
    gap.see(actual, expected, "it")
    assert (gap.wrong == "") == holds
    gap.see(torch.zeros(2), torch.zeros(3), "shapes")
    assert gap.wrong


# ---- vectors and batches ----


def test_the_adaptive_coefficient_has_its_published_value():
    given = vectors()["controller"]
    found = rl.adapt(given["coef"], given["kl"], **{k: given[k] for k in ("target", "horizon", "count")})
    assert found == pytest.approx(given["next"], abs=1e-9)


def test_every_vector_is_of_an_entry_that_exists():
    for kind, names in rl.names().items():
        assert {case["entry"] for case in vectors().get(kind, [])} <= set(names)


def test_batches_have_every_edge():
    every = [drawn(seed) for seed in range(40)]
    assert any(bool(b.rewards.isnan().any()) for b in every)
    counts = [rl.token_counts(b.mask, b.lengths) for b in every]
    assert any(bool((c == 0).any()) for c in counts) and any(len(c) == 1 for c in counts)
    assert all(b.tokens["values"][~b.mask].isnan().all() for b in every)
    padded, at = every[0].padded(2, 9)
    assert torch.equal(padded.mask[at], every[0].mask) and int(padded.mask.sum()) == int(every[0].mask.sum())


# ---- flows ----


def test_the_plan_of_runs_covers_every_entry_in_every_flow_that_can_use_it():
    def covered(runs):
        return {(made.flow, s) for made in runs for s in made.subjects}

    whole = covered(flows.plan(SUBJECTS, quick=False))
    for flow in FLOWS:
        assert {s for s in SUBJECTS if flows.usable(flow, s)} <= {s for f, s in whole if f == flow}, flow
    quick = flows.plan(SUBJECTS, quick=True)
    assert {s for _, s in covered(quick)} == set(SUBJECTS) and len(quick) < 40


@pytest.fixture(scope="module")
def runs():
    with flows.Runs() as runs:
        yield runs


def test_one_step_of_a_flow(runs):
    first, *_ = flows.plan([s for s in SUBJECTS if s.kind == "aggregations"], quick=True)
    assert not flows.problem(runs, first)


SOUND = dict.fromkeys(("loss", "grad_norm", *flows.SAMPLED, "value/loss", "correction/weight"), 0.5)


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, ""),
        ({"grad_norm": 0.0}, "grad_norm = 0.0"),
        ({"samples/trained": 0.0}, "samples/trained = 0.0"),
        ({"loss": math.nan}, "loss = nan"),
        ({"value/loss": None}, "value/loss = nan"),
        ({"entropy": None}, "entropy = nan"),
        ({"correction/weight": 1.0}, "all weights are 1"),
        ({"correction/rejected": 0.0}, "nothing was rejected"),
    ],
)
def test_a_run_that_learns_nothing_or_corrects_nothing_fails(change, said):
    made = flows.Mix("ppo", {"corrections": "decoupled_seq_mis"})
    record = {k: v for k, v in ({**SOUND, "correction/rejected": 0.1} | change).items() if v is not None}
    assert flows.wrong(made, record) == said


def test_numbers_that_both_runs_lack_are_not_equal():
    made = flows.Mix("grpo")
    assert not flows.unequal(flows.present(made), SOUND, SOUND)
    without = {k: v for k, v in SOUND.items() if k != "grad_norm"}
    assert flows.unequal(flows.present(made), without, without) == "grad_norm = nan on two workers, nan on one"
    assert flows.unequal(flows.present(made), SOUND, without) and flows.unequal(flows.present(made), without, SOUND)
    assert flows.unequal(flows.present(made), SOUND | {"kl": 1.0}, SOUND).startswith("kl = 1 ")


@pytest.mark.parametrize(
    "name", ["decoupled_seq_mis", pytest.param("decoupled_geo_rs_token_tis", marks=pytest.mark.slow)]
)
def test_corrections_have_something_to_correct(runs, monkeypatch, name):
    made = flows.Mix("grpo", {"corrections": name, "losses": "ppo_clip"})
    assert not flows.problem(runs, made)
    monkeypatch.setattr(flows, "moved", flows.to_batch)
    assert flows.problem(runs, replace(made, kl_in="reward")).endswith(("all weights are 1", "rejected"))


def test_the_blame_for_a_failed_run_is_with_the_entry_that_fails_alone():
    made = flows.Mix("grpo", {"losses": "gspo", "advantages": "rloo", "kl": "k1"})
    found = {s: {} for s in made.subjects}
    flows._blame(found, None, made, "flows", lambda runs, m: "no" if m.entries.get("kl") == "k1" else "")
    states = {s.name: cells["flows"].state for s, cells in found.items()}
    assert states == {"gspo": "pass", "rloo": "pass", "k1": "fail"}
    found = {s: {} for s in made.subjects}
    flows._blame(found, None, made, "flows", lambda runs, m: "together" if len(m.subjects) == 3 else "")
    assert {cells["flows"].note for cells in found.values()} == {"together"}


# ---- the benchmark ----


def test_the_benchmark_prints_writes_and_fails(entries, tmp_path, capsys, monkeypatch):
    main = script("conformance.py").main
    asked = ["conformance.py", "--quick", "--only", "rloo", "--json", str(tmp_path / "t.json")]
    made = partial(table.make, flows=False)
    monkeypatch.setattr(table, "make", made)
    monkeypatch.setattr(sys, "argv", [*asked, "--markdown", str(tmp_path / "t.md")])
    assert main() == 0
    assert "| advantages | `rloo` | pass | pass | pass | pass | pass |" in (tmp_path / "t.md").read_text()
    states = {(r["kind"], r["name"], r["column"]): r["state"] for r in json.loads((tmp_path / "t.json").read_text())}
    assert states["advantages", "rloo", "golden"] == "pass"
    swapped("advantages", "rloo", relative=lambda self, groups: groups.scores)
    assert main() == 1
    assert "FAIL advantages rloo, golden" in capsys.readouterr().out


# ---- the bandit ----

SMALL = bandit.Bandit(((0.3, 0.6), (0.5, 0.4)), ((0.0, 1.0, 1.0), (0.0, 0.0, 1.0)))


@pytest.fixture(scope="module")
def measured():
    who = tuple(c for c in bandit.CONTENDERS if c.aggregation == bandit.SUM)
    return {row["estimator"]: row for row in bandit.measure(SMALL, 3, who)}


def test_probabilities_of_a_bandit_add_up_and_its_gradient_is_that_of_the_reward():
    assert sum(p for _, p in SMALL.outcomes(3)) == pytest.approx(1.0, abs=1e-12)
    step = 1e-6
    for prompt, token in ((0, 0), (1, 1)):

        def reward(by, prompt=prompt, token=token):
            logit = math.log(SMALL.stops[prompt][token] / (1 - SMALL.stops[prompt][token])) + by
            row = list(SMALL.stops[prompt])
            row[token] = 1 / (1 + math.exp(-logit))
            moved = replace(SMALL, stops=tuple(tuple(row) if p == prompt else s for p, s in enumerate(SMALL.stops)))
            each = [sum(map(lambda a, b: a * b, moved.probabilities(p), moved.rewards[p])) for p in (0, 1)]
            return sum(each) / 2

        slope = (reward(step) - reward(-step)) / (2 * step)
        assert float(SMALL.gradient()[prompt, token]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("title", ["REINFORCE, no baseline", "RLOO", "ReMax"])
def test_unbiased_estimators_have_the_gradient_of_the_reward(measured, title):
    """Advantages are float32."""
    assert measured[title]["scale"] == pytest.approx(1.0, abs=1e-6)
    assert measured[title]["turned"] < 0.05


def test_dr_grpo_is_short_by_one_over_the_group_and_grpo_turns(measured):
    assert measured["Dr.GRPO"]["scale"] == pytest.approx(1 - 1 / 3, abs=1e-6) and measured["Dr.GRPO"]["turned"] < 0.05
    assert measured["Dr.GRPO"]["noise"] == pytest.approx(measured["RLOO"]["noise"], rel=1e-6)
    assert all(measured[t]["turned"] > 0.5 for t in ("REINFORCE++", "REINFORCE++ with baseline", "OPO"))
    assert measured["RLOO"]["noise"] < measured["REINFORCE, no baseline"]["noise"]


@pytest.mark.parametrize("name", rl.names()["losses"])
def test_a_recipe_that_names_a_loss_alone_has_the_options_it_was_published_with(name):
    """Keys that losses share have values of their own in the recipe, which are those of the checks here."""
    found = Algorithm.of(from_dict({"algorithm": {"loss": name}})).options("losses", name)
    own = rl.options("losses", name)
    assert {k: v or None for k, v in found.items()} == {k: own[k] or None for k in found}
