"""Flows sft and pretrain: what they train on, what they measure on what is held out, and what they do not build."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import tilth.flows.policy_gradient
import tilth.flows.supervised
from tests.errors import raises
from tests.flows import tiny
from tilth.api import run_recipe, train
from tilth.checkpoint import read_best
from tilth.config.load import from_dict
from tilth.core.errors import DataError, PluginError, RewardError, WeightMismatch
from tilth.core.random import stream
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.engine import Engine
from tilth.launch.build import CACHE, PretrainTexts, build
from tilth.models.hf import save_pretrained
from tilth.runs.models import load_model
from tilth.runs.readers import read_metrics, read_trajectories


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    return tiny.learn(tmp_path_factory.mktemp("sft"), "sft", run={"eval_prompts": 64})


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return tiny.learn(tmp_path_factory.mktemp("pretrain"), "pretrain", run={"eval_prompts": 200})


def by_hand(directory: Path, examples, folder: Path) -> tuple[float, int]:
    """Negative log-likelihood in nats under ``transformers``, and tokens that it is of; in float64, one at a time."""
    from transformers import AutoModelForCausalLM

    loaded = load_model(directory)
    save_pretrained(folder, loaded.config, loaded.tensors, tokenizer=loaded.tokenizer, source=loaded.source)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total, count = 0.0, 0
    for tokens, mask in examples:
        ids = torch.tensor(np.array(tokens))[None]
        logs = model(ids).logits[0].log_softmax(-1)
        chosen = np.flatnonzero(mask)
        total -= sum(logs[t - 1, ids[0, t]].item() for t in chosen)
        count += len(chosen)
    return total, count


# ---- fine-tuning ----


def test_without_a_reward_nothing_is_generated_and_the_loss_on_held_out_answers_is_measured(sft):
    records = read_metrics(sft.directory)
    assert [r["phase"] for r in records] == ["sft"] * 8
    assert [r["step"] for r in records if "loss/heldout" in r] == [1, 3, 6, 8]
    assert not any("accuracy/heldout" in r or "tokens/generated" in r for r in records)
    assert records[-1]["loss/heldout"] < records[0]["loss/heldout"]
    assert read_trajectories(sft.directory).num_rows == 0 and sft.accuracy is None


def test_the_held_out_loss_is_that_of_transformers(sft, tmp_path):
    _, held = PromptSet.of(tiny.SUMS).split(0.2)
    template = make_template("", load_model(sft.directory).tokenizer)
    total, count = by_hand(sft.directory, template.examples(list(held)), tmp_path)
    assert read_metrics(sft.directory)[-1]["loss/heldout"] == pytest.approx(total / count, rel=1e-5)


def test_no_rollout_and_no_reward_role_is_built(tmp_path):
    made = tiny.recipe(tmp_path, flow="sft")
    assert build(made, PromptSet.of(tiny.SUMS), None, tiny.inline()).roles.rollout is None
    documents = tiny.recipe(tmp_path, flow="pretrain")
    roles = build(documents, PretrainTexts(tiny.TEXTS[10:], tiny.TEXTS[:10]), None, tiny.inline()).roles
    assert roles.rollout is None and roles.reward is None and roles.reference is None


def test_with_a_reward_accuracy_is_measured_beside_the_loss_and_the_engine_published_to_only_then(
    tmp_path, monkeypatch
):
    received, whole = [], Engine.update_weights

    def counted(self, weights, version, **options):
        received.append(version)
        whole(self, weights, version, **options)

    monkeypatch.setattr(Engine, "update_weights", counted)
    result = tiny.learn(tmp_path, "sft", reward=tiny.close_enough)
    records = read_metrics(result.directory)
    assert [r["step"] for r in records if "reward/heldout" in r] == [1, 3, 6, 8]
    assert all(("loss/heldout" in r) == ("reward/heldout" in r) for r in records)
    assert received == [0, 3, 6, 8] and result.reward == records[-1]["reward/heldout"] and result.accuracy is None


def test_what_is_published_for_an_evaluation_is_verified(tmp_path, monkeypatch):
    whole = Engine.update_weights

    def damages(self, weights, version, **options):
        whole(self, weights, version, **options)
        if version == 3:
            dict(self.named_parameters())["model.norm.weight"].add_(1e-6)

    monkeypatch.setattr(Engine, "update_weights", damages)
    with raises(WeightMismatch, "model.norm.weight"):
        tiny.learn(tmp_path, "sft", reward=tiny.close_enough)


@pytest.mark.slow
def test_until_ends_fine_tuning_early_where_there_is_an_accuracy(tmp_path):
    def always(prompt, completion, info):
        return 0.5

    scored = tiny.learn(tmp_path, "sft", reward=always, supervised={"until": 0.4})
    assert scored.summary["steps"] == 0 and scored.summary["state"] == "finished"
    plain = tiny.learn(tmp_path, "sft", supervised={"until": 0.4})
    assert plain.summary["steps"] == 8


@pytest.mark.parametrize(
    "epochs, steps", [(0.5, 3), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((1.0, 5), (2.0, 10)))]
)
def test_epochs_become_steps(tmp_path, epochs, steps):
    train = len(PromptSet.of(tiny.SUMS).split(0.2)[0])
    assert math.ceil(epochs * train / 16) == steps
    result = tiny.learn(tmp_path, "sft", supervised={"steps": 0, "epochs": epochs, "batch": 16})
    assert [r["phase_steps"] for r in read_metrics(result.directory)] == [steps] * steps


def test_steps_go_before_epochs(tmp_path):
    result = tiny.learn(tmp_path, "sft", supervised={"steps": 2, "epochs": 9.0})
    assert result.summary["steps"] == 2


TURNS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}"},
            {"role": "assistant", "content": f"{a + 1}"},
            {"role": "user", "content": "and"},
            {"role": "assistant", "content": f"{a + 2}"},
        ]
    }
    for a in range(60)
]


def test_conversations_of_several_turns_are_learned_turn_by_turn_and_the_template_stays_with_the_run(tmp_path):
    made = {"data": {"template": "chatml", "tokenizer": "bpe:300"}, "model": {"context": 64}}
    result = tiny.learn(tmp_path, "sft", prompts=PromptSet.of(TURNS), **made)
    loaded = load_model(result.directory)
    template = make_template("model", loaded.tokenizer)
    assert loaded.template == "model" and "<|im_start|>" in loaded.tokenizer.chat_template
    _, held = PromptSet.of(TURNS).split(0.2)
    examples = template.examples(list(held))
    said = [loaded.tokenizer.decode(e.tokens[e.mask == 1]) for e in examples]
    assert said == [f"{p.messages[1]['content']}{p.answer}" for p in held]
    total, count = by_hand(result.directory, examples, tmp_path / "hf")
    assert len(held) <= 16  # so that all of them are evaluated
    assert read_metrics(result.directory)[-1]["loss/heldout"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_another_template_file_is_another_run(tmp_path):
    file = tmp_path / "chat.jinja"
    source = "{% for m in messages %}<|im_start|>{{ m.role }}SIGN{{ m.content }}<|im_end|>{% endfor %}" + (
        "{% if add_generation_prompt %}<|im_start|>assistantSIGN{% endif %}"
    )
    made = {"data": {"template": str(file), "tokenizer": "bpe:300"}, "model": {"context": 64}}
    names = []
    for sign in (":", ";"):
        file.write_text(source.replace("SIGN", sign))
        stopped = tiny.Recorder(at_step=lambda record: 1 / 0)
        with raises(PluginError, "Recorder.on_step_end"):
            tiny.learn(tmp_path / "runs", "sft", callbacks=[stopped], **made)
        names = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert names == ["sft-001", "sft-002"]


# ---- pre-training ----


def test_pre_training_learns_from_all_tokens_but_each_first(pretrained):
    records = read_metrics(pretrained.directory)
    assert [r["phase"] for r in records] == ["pretrain"] * 8
    assert [r["step"] for r in records if "bits_per_byte/heldout" in r] == [1, 3, 6, 8]
    assert records[-1]["loss/heldout"] < records[0]["loss/heldout"]


def pieces(ids: list[int], context: int):
    """A document cut by hand into as many full pieces as there are, and the rest."""
    found = [ids[i : i + context] for i in range(0, len(ids), context)]
    if len(found) > 1 and len(found[-1]) == 1:  # one token alone has nothing to predict
        found[-2:] = [found[-2][:-1], found[-2][-1:] + found[-1]]
    return found


def test_loss_and_bits_per_byte_on_held_out_documents_are_those_of_transformers(pretrained, tmp_path):
    _, held = PromptSet.of(tiny.TEXTS).split(0.2)
    tokenizer = load_model(pretrained.directory).tokenizer
    cut = [p for t in held for p in pieces([*tokenizer.encode(t.text), tokenizer.eos_id], 12)]
    assert len(held) < len(cut) and pretrained.summary["steps"] == 8
    total, count = by_hand(pretrained.directory, [(p, [0] + [1] * (len(p) - 1)) for p in cut], tmp_path)
    text = sum(len(tokenizer.decode(p[1:]).encode()) for p in cut)
    last = read_metrics(pretrained.directory)[-1]
    assert last["loss/heldout"] == pytest.approx(total / count, rel=1e-5)
    assert last["bits_per_byte/heldout"] == pytest.approx(total / math.log(2) / text, rel=1e-5)


def test_each_epoch_reads_every_piece_once_in_an_order_of_seed_and_epoch(tmp_path):
    made = tiny.recipe(tmp_path, flow="pretrain", model={"context": 24})
    parts = build(made, PretrainTexts(tiny.TEXTS, []), None, tiny.inline())
    n, base = len(parts.train), stream(3, "documents")
    first, second = parts.train.take(base, 0, n), parts.train.take(base, n, n)
    assert sorted(first) == sorted(second) == list(range(n)) and not np.array_equal(first, second)
    assert np.array_equal(parts.train.take(base, n // 2, n), np.concatenate([first, second])[n // 2 : n // 2 + n])
    assert not np.array_equal(first, parts.train.take(stream(4, "documents"), 0, n))


def test_a_tokenizer_is_trained_once_and_a_resumed_run_loads_it(tmp_path, monkeypatch):
    trained, whole = [], Tokenizer.train

    def counted(texts, size):
        trained.append(size)
        return whole(texts, size)

    monkeypatch.setattr(Tokenizer, "train", staticmethod(counted))

    def stop(record):
        if record["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.learn(tmp_path, "pretrain", callbacks=[tiny.Recorder(at_step=stop)])
    assert trained == [300] and (tmp_path / "pretrain-001/model/tokenizer.json").is_file()
    result = tiny.learn(tmp_path, "pretrain")
    assert trained == [300] and result.directory.name == "pretrain-001" and result.summary["state"] == "finished"


def test_tokenised_documents_are_kept_beside_the_runs_and_it_is_told_where_tokens_come_from(pretrained, tmp_path):
    train = max((pretrained.directory.parent / CACHE).glob("pieces-*"), key=disk)
    assert "documents: tokenised" in (pretrained.directory / "log.txt").read_text()
    watcher = tiny.Recorder()
    tiny.learn(pretrained.directory.parent, "pretrain", supervised={"steps": 1}, callbacks=[watcher])
    assert [m for m in watcher.messages if "documents: tokens from" in m and train.name in m]


def disk(folder: Path) -> int:
    return (folder / "pieces.arrow").stat().st_size


def test_prompts_that_are_held_out_too_are_left_out_of_training_and_told(tmp_path):
    for name, records in (("train", tiny.SUMS), ("test", tiny.SUMS[:7])):
        lines = "".join(json.dumps(r) + "\n" for r in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    where = {"source": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "test.jsonl")}
    watcher = tiny.Recorder()
    made = tiny.recipe(tmp_path / "runs", flow="sft", data=where)
    run_recipe(made, name="sft", callbacks=[watcher])
    said = " ".join(watcher.messages)
    assert "7 prompts are in data.heldout too" in said and "93 prompts to train on, 7 held out" in said


@pytest.mark.slow
def test_what_was_pre_trained_is_fine_tuned_with_its_own_tokenizer(pretrained, tmp_path):
    where = {"path": str(pretrained.directory), "context": 12}
    result = tiny.learn(tmp_path, "sft", model=where)
    own, before = load_model(result.directory).tokenizer, load_model(pretrained.directory).tokenizer
    assert own.fingerprint() == before.fingerprint()


def test_a_model_and_a_tokenizer_of_different_vocabulary_are_refused(pretrained, tmp_path):
    Tokenizer.characters("0123456789+=").save(tmp_path / "other")
    where = {
        "model": {"path": str(pretrained.directory), "context": 12},
        "data": {"tokenizer": str(tmp_path / "other")},
    }
    with raises(DataError, "data.tokenizer.+"):
        tiny.learn(tmp_path / "runs", "sft", **where)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("page", [tilth.flows.policy_gradient, tilth.flows.supervised])
def test_a_loop_has_at_most_forty_lines(page):
    assert len(Path(page.__file__).read_text().splitlines()) <= 40


def test_pre_training_in_a_few_lines(tmp_path):
    settings = tiny.settings(tmp_path, flow="pretrain", supervised={"steps": 1})
    del settings["data"]
    result = train(data=tiny.TEXTS, live=False, **settings)
    assert result.summary["bits_per_byte"] > 0


def test_experience_needs_a_reward(tmp_path):
    settings = tiny.settings(tmp_path)
    del settings["data"]
    with raises(RewardError, "reward.function"):
        train(data=tiny.SUMS, live=False, **settings)


# ---- the best checkpoint ----


def scripted(monkeypatch, values):
    """Held-out losses, one evaluation after another, instead of the measured ones."""
    left = iter(values)

    def told(evaluator):
        evaluator.metrics.add("loss/heldout", value := next(left))
        return "loss/heldout", value

    monkeypatch.setattr("tilth.flows.heldout.Evaluator.measure", told)


@pytest.mark.parametrize(
    "losses, step, value",
    [
        ([1.0, 5.0, 3.0, 3.0, 4.0], 4, 3.0),  # on a tie the earlier one; the first, before any step, is no choice
        pytest.param([9.0, 2.0, 3.0, 4.0, 5.0], 2, 2.0, marks=pytest.mark.slow),
        pytest.param([9.0, 5.0, 4.0, 3.0, 1.0], 8, 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_best_checkpoint_is_kept_and_named(tmp_path, monkeypatch, losses, step, value):
    scripted(monkeypatch, losses)
    result = tiny.learn(tmp_path, "sft", supervised={"check_every": 2}, run={"keep": 1, "save_every": 3})
    best = {"step": step, "metric": "loss/heldout", "value": value}
    assert read_best(result.directory / "checkpoints") == best == result.summary["best"]
    kept = sorted(p.name for p in (result.directory / "checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{step:06d}", "step-000008"})
    assert torch.isfinite(load_model(f"{result.directory}@best").tensors["model.norm.weight"]).all()


def test_the_reward_of_answers_chooses_the_best_where_there_is_one(tmp_path):
    result = tiny.run(tiny.recipe(tmp_path, supervised={"steps": 3}, algorithm={"steps": 3}))
    best, records = result.summary["best"], read_metrics(result.directory)
    values = [(r["reward/heldout"], -r["step"]) for r in records if "reward/heldout" in r]
    after = [(v, s) for v, s in values if s != -4]  # step 4 tells the reward before it, that of step 3
    assert best["metric"] == "reward/heldout" and (best["value"], -best["step"]) == max(after)


# ---- rewards of several parts ----


def graded(prompt, completion, info):
    right = float(completion == info["answer"])
    return {"reward": 0.1 * len(completion) + right, "correct": right, "format": float(completion.isdecimal())}


def test_accuracy_is_the_part_correct_and_parts_are_told_apart(tmp_path):
    watcher = tiny.Recorder()
    short = {"supervised": {"steps": 1}, "algorithm": {"steps": 1}}
    result = tiny.run(tiny.recipe(tmp_path, **short), reward=graded, callbacks=[watcher])
    last = watcher.records[-1]
    assert last["accuracy/heldout"] == last["reward/heldout/part/correct"] <= 1
    assert 0 <= last["reward/heldout/part/format"] <= 1 and last["reward/part/format"] >= 0
    assert result.summary["parts_heldout"] == {
        "correct": last["reward/heldout/part/correct"],
        "format": last["reward/heldout/part/format"],
    }


def test_the_share_of_groups_with_a_gradient_is_told_whether_or_not_flat_ones_are_dropped(tmp_path):
    def only_some(prompt, completion, info):
        return float(len(completion)) if int(prompt[0]) % 2 else 1.0

    shares = []
    for drop in (True, False):
        watcher = tiny.Recorder()
        made = tiny.recipe(tmp_path, algorithm={"drop_flat": drop, "steps": 1}, supervised={"steps": 0})
        tiny.run(made, reward=only_some, callbacks=[watcher], name=str(drop))
        table = read_trajectories(tmp_path / f"{drop}-001").to_pylist()
        groups = {}
        for row in table:
            groups.setdefault(row["group"], set()).add(row["reward"])
        shares.append(watcher.records[-1]["groups/gradient"])
        assert shares[-1] == pytest.approx(sum(len(g) > 1 for g in groups.values()) / len(groups))
    assert shares[0] == shares[1] > 0


def test_settings_of_a_supervised_flow_need_something_to_do(tmp_path):
    from tilth.core.errors import RecipeError

    with raises(RecipeError, "supervised.steps"):
        from_dict(tiny.settings(tmp_path, flow="pretrain", supervised={"steps": 0}))
