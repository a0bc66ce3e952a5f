"""Names, options and columns are checked before a run starts; a new algorithm is one decorated class."""

import pytest
import torch
from pydantic import Field

from tests.errors import raises
from tilth import rl
from tilth.core.errors import ArgumentError, RecipeError
from tilth.rl import registry
from tilth.rl.advantages import RowAdvantage
from tilth.rl.losses import PolicyLoss

ALL = ["logprobs", "old_logprobs", "advantages", "rewards", "groups", "values"]


LOSSES = {
    *("ppo_clip", "reinforce", "gpg", "cispo", "sapo", "dro", "dppo_tv", "dppo_kl"),
    *("clip_cov", "kl_cov", "gspo", "geo_mean"),
}


def test_names():
    found = rl.names()
    assert set(found["losses"]) == LOSSES and found["losses"][0] == "ppo_clip"
    whole = {"grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline", "opo", "gpg", "grpo_passk", "gdpo"}
    by_token = {"gae", "vapo", "reinforce_pp", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"}
    assert set(found["advantages"]) == whole | by_token | {"distill", "grpo_process"}
    sums = ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    assert found["aggregations"] == ["token-mean", "token-sum", *sums]
    assert found["kl"] == ["k1", "abs", "k2", "k3", "k1+", "k3+", "abs+"]


def test_every_entry_has_documented_options():
    for kind, entries in rl.names().items():
        for name in entries:
            entry = registry.lookup(kind, name)
            assert entry.__doc__ and all(f.description for f in entry.model_fields.values())


def test_options():
    assert rl.options("advantages", "gae") == {"gamma": 1.0, "lam": 1.0, "whiten": True}
    assert rl.options("losses", "ppo_clip")["clip_low"] == 0.2
    with raises(RecipeError, "losses"):
        rl.options("losses", "ppo-clip")


def test_scopes():
    assert rl.check("grpo", ["rewards", "groups"]).scope == "rows"
    assert rl.check("gae", ["rewards", "values"]).scope == "global moments"
    assert rl.check("gae", ["rewards", "values"], {"whiten": False}).scope == "token-local"
    assert rl.check("ppo_clip", ALL).scope == "token-local"
    assert rl.check("seq-mean-token-sum-norm", [], {"norm_length": 8}).scope == "token-local"


@pytest.mark.parametrize(
    "name, columns, options, key",
    [
        ("grop", ALL, {}, "name"),
        ("gae", ["rewards"], {}, "values"),
        ("grpo", ["rewards"], {}, "groups"),
        ("grpo", ALL, {"epss": 1}, "grpo.epss"),
        ("grpo", ALL, {"lam": 1}, "grpo.lam"),
        ("gae", ALL, {"gamma": 1.5}, "gae.gamma"),
        ("gae", ALL, {"gamma": "x"}, "gae.gamma"),
        ("grpo", ALL, {"singleton": "keep"}, "grpo.singleton"),
        ("grpo", ALL, {"eps": float("nan")}, "grpo.eps"),
        ("ppo_clip", ALL, {"kl_coef": 0.1}, "ref_logprobs"),
        ("ppo_clip", ALL, {"kl": "k4"}, "kl"),
        ("ppo_clip", ALL, {"dual_clip": 0.5}, "ppo_clip.dual_clip"),
        ("ppo_clip", ALL, {"clip_low": -1}, "ppo_clip.clip_low"),
        ("seq-mean-token-sum-norm", [], {"norm_length": 0}, "seq-mean-token-sum-norm.norm_length"),
        ("token-mean", [], {"norm_length": 3}, "token-mean.norm_length"),
    ],
)
def test_check_names_what_is_wrong(name, columns, options, key):
    with raises(RecipeError, key) as error:
        rl.check(name, columns, options)
    assert "\n" not in str(error.value)


def test_calls_check_too():
    tokens = dict(lengths=torch.tensor([2]), mask=torch.ones(2))
    with raises(RecipeError, "values"):
        rl.estimate("gae", rewards=torch.ones(1), groups=None, **tokens)
    with raises(RecipeError, "groups"):
        rl.estimate("grpo", rewards=torch.ones(1), groups=None, **tokens)
    with raises(RecipeError, "name"):
        rl.estimate_rows("gae", rewards=torch.ones(1), values=torch.ones(1))
    with raises(RecipeError, "grpo.baselines"):
        rl.estimate("grpo", rewards=torch.ones(1), groups=torch.zeros(1), baselines=torch.ones(1), **tokens)
    columns = dict(logprobs=torch.zeros(2), old_logprobs=torch.zeros(2), advantages=torch.zeros(2), **tokens)
    with raises(RecipeError, "ppo_clip.norm_length"):
        rl.policy_loss("ppo_clip", norm_length=3, **columns)
    with raises(RecipeError, "ppo_clip.clip_hi"):
        rl.policy_loss("ppo_clip", clip_hi=3, **columns)
    with raises(RecipeError, "ref_logprobs"):
        rl.policy_loss("ppo_clip", kl_coef=0.1, **columns)
    with raises(RecipeError, "aggregations"):
        rl.policy_loss("ppo_clip", aggregation="token-average", **columns)
    with raises(RecipeError, "kl"):
        rl.kl_penalty("k9", torch.zeros(1), torch.zeros(1))
    options = dict(aggregation="seq-mean-token-sum-norm", norm_length=4, clip_low=0.1)
    assert rl.policy_loss("ppo_clip", **columns, **options).loss.item() == 0


@pytest.fixture
def scratch(monkeypatch):
    """Registrations of a test are undone."""
    monkeypatch.setattr(registry, "_ENTRIES", {kind: dict(table) for kind, table in registry._ENTRIES.items()})


def test_a_new_estimator_is_one_class(scratch):
    """An estimator with a column of its own, as ReMax has it."""

    @rl.register("advantages", "baselined")
    class Baselined(RowAdvantage):
        """Score minus a baseline."""

        scale: float = Field(1.0, gt=0, description="factor")

        @property
        def needs(self):
            return ("rewards", "baselines")

        def rows(self, rows):
            return self.scale * (rows.scores - rows.columns["baselines"])

    result = rl.estimate(
        "baselined",
        rewards=torch.tensor([1.0, float("nan")]),
        lengths=torch.tensor([2, 1]),
        mask=torch.ones(3),
        groups=None,
        baselines=torch.tensor([0.25, 0.5]),
        scale=2.0,
    )
    assert result.advantages.tolist() == [1.5, 1.5, 0]
    assert "baselined" in rl.names()["advantages"]
    with raises(RecipeError, "baselines"):
        rl.check("baselined", ["rewards"])


def test_a_new_loss_is_one_class(scratch):
    @rl.register("losses", "plain")
    class Plain(PolicyLoss):
        """-A log p."""

        def tokens(self, step):
            return -step.advantages * step.logprobs, {"surprise": -step.logprobs}

    x = torch.tensor([-1.0, -3.0], requires_grad=True)
    result = rl.policy_loss(
        "plain",
        logprobs=x,
        old_logprobs=x,
        advantages=torch.tensor([1.0, 2.0]),
        mask=torch.ones(2),
        lengths=torch.tensor([2]),
    )
    result.loss.backward()
    assert x.grad.tolist() == [-0.5, -1.0] and float(result.metrics["surprise"]) == 2


def test_a_name_is_given_once_and_kinds_may_share_it(scratch):
    with raises(ArgumentError, "name"):
        rl.register("advantages", "grpo")(RowAdvantage)
    rl.register("losses", "grpo")(PolicyLoss)
    with raises(RecipeError, "kind"):
        rl.check("grpo", ALL)
    assert rl.check("grpo", ALL, kind="advantages").scope == "rows"
    rl.register("losses", "odd")(RowAdvantage)
    with raises(RecipeError, "losses.odd"):
        registry.build("losses", "odd", {}, PolicyLoss)


def test_metrics_merge_by_their_reduction():
    mean = rl.Metric(3.0, 2, "mean").merge(rl.Metric(5.0, 2, "mean"))
    assert float(mean) == 2
    assert float(rl.Metric(3.0, 2, "sum").merge(rl.Metric(5.0, 2, "sum"))) == 8
    assert float(rl.Metric(3.0, 2, "max").merge(rl.Metric(5.0, 2, "max"))) == 5
    with raises(ArgumentError, "other"):
        mean.merge(rl.Metric(1.0, 1, "max"))
    merged = rl.merge_metrics([{"a": rl.Metric(1.0, 1, "mean")}, {"a": rl.Metric(3.0, 1, "mean"), "b": mean}])
    assert {k: float(v) for k, v in merged.items()} == {"a": 2, "b": 2}


def test_results_know_their_names():
    result = rl.estimate_rows("grpo", rewards=torch.ones(2), groups=torch.zeros(2))
    assert result.shape == (2,)
    estimate = rl.Estimate(torch.zeros(1), None, torch.ones(1))
    with pytest.raises(KeyError):
        estimate["advantage"]
    with pytest.raises(KeyError):
        rl.LossResult(torch.zeros(()), {})["value"]
    with pytest.raises(AttributeError):
        rl.estimat
