"""Hugging Face directories: transformers loads what we write, we load what it writes, bad ones are named."""

import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.errors import raises
from tests.models.tiny import FAMILIES, decoder, reference, shape, tokens
from tilth.core.errors import ModelError, StorageError
from tilth.models.attention import PackedContext
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.models.hf import (
    load_pretrained,
    load_weights,
    open_tensors,
    read_config,
    save_pretrained,
)
from tilth.models.unread import Unread, block, shapes
from tilth.plan.shape import parameter_shapes


def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(ids, PackedContext([len(ids)])))


def loaded(directory: Path, **options: Any) -> Decoder:
    config, tensors = load_pretrained(directory, **options)
    model = Decoder(config)
    load_weights(model, tensors)
    return model


def transformers_logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    other = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        return other(ids[None]).logits[0]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    model = decoder(FAMILIES["qwen3"])
    save_pretrained(tmp_path / "out", model.config, model.state_dict())
    return tmp_path / "out"


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
@pytest.mark.parametrize("name", ["llama-llama3", "llama-biases", "qwen2-window", "qwen3-window-yarn", "mistral"])
def test_export_loads_in_transformers_and_here(name: str, shard_bytes: int, tmp_path: Path) -> None:
    model, ids = decoder(FAMILIES[name]), tokens([40])
    save_pretrained(tmp_path, model.config, model.state_dict(), shard_bytes=shard_bytes)
    again = loaded(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    assert (transformers_logits(tmp_path, ids) - logits(model, ids)).abs().max() <= 1e-5
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert (len(shards) > 2) == (shard_bytes < 10**9)
    assert all(len(load_file(f)) == 1 or f.stat().st_size < shard_bytes + 5000 for f in shards)


FIRST = {config.family: name for name, config in reversed(FAMILIES.items())}


@pytest.mark.parametrize(
    ("name", "max_shard_size"),
    [pytest.param(name, "5GB", marks=[pytest.mark.slow] * (name not in FIRST.values())) for name in FAMILIES]
    + [("qwen3", "60KB"), ("llama-none", "60KB")],
)
def test_what_transformers_saves_loads_here_and_goes_back(name: str, max_shard_size: str, tmp_path: Path) -> None:
    model, ids = decoder(FAMILIES[name]), tokens([40])
    other = reference(model)
    other.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    config, tensors = load_pretrained(tmp_path / "theirs")
    assert config == model.config
    assert all(torch.equal(tensors[k], v) for k, v in model.state_dict().items())
    save_pretrained(tmp_path / "ours", config, tensors, source=tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(transformers_logits(tmp_path / "ours", ids), other(ids[None]).logits[0])


def test_dtype_of_file_and_of_import(tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen2"])
    save_pretrained(tmp_path, model.config, model.state_dict(), dtype=torch.bfloat16)
    _, tensors = load_pretrained(tmp_path)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    name = "model.norm.weight"
    assert torch.equal(tensors[name], model.get_parameter(name).bfloat16())
    assert load_pretrained(tmp_path, torch.float32)[1][name].dtype == torch.float32
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama-none", "model.layers.1.mlp.up_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("gpt-oss", "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_codes_of_a_quantisation_are_no_weights(name: str, tensor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of the right shape, and without scales, which would be extra tensors."""
    model = decoder(FAMILIES[name])
    save_pretrained(tmp_path, model.config, model.state_dict())
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {tensor: stored[tensor].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_pretrained(tmp_path)
    assert caught.value.key.endswith(".dtype") and ".1." in caught.value.key


def test_fused_weights_are_exported_by_their_names(tmp_path: Path) -> None:
    model = decoder(FAMILIES["llama-biases"])
    model.fuse()
    save_pretrained(tmp_path, model.config, model.state_dict())
    assert load_file(tmp_path / "model.safetensors").keys() == parameter_shapes(model.config).keys()
    assert torch.equal(logits(loaded(tmp_path), tokens([16])), logits(decoder(FAMILIES["llama-biases"]), tokens([16])))


class FakeTokenizer:
    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


def test_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen3"])
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    ids = {"eos_token_id": [3, 4], "pad_token_id": 0}
    save_pretrained(
        first,
        model.config,
        model.state_dict(),
        tokenizer=FakeTokenizer(),
        chat_template="{{ messages }}",
        generation={"temperature": 0.6},
        token_ids=ids,
    )
    (first / "merges.txt").write_text("a b")
    save_pretrained(second, model.config, model.state_dict(), source=first, generation={"top_k": 5})
    save_pretrained(third, model.config, model.state_dict(), source=second, tokenizer=FakeTokenizer())
    assert not (third / "merges.txt").exists()
    for folder in (first, second, third):
        assert (folder / "tokenizer.json").read_text() == "{}"
        assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
        assert ids.items() <= read_config(folder).items()
    assert (second / "merges.txt").read_text() == "a b"
    generation = transformers.GenerationConfig.from_pretrained(second)
    assert (generation.eos_token_id, generation.temperature, generation.top_k) == ([3, 4], 0.6, 5)


def test_generation_settings_of_the_tokenizer_are_kept(tmp_path: Path) -> None:
    class WithSettings(FakeTokenizer):
        def save(self, directory: Path) -> None:
            (directory / "generation_config.json").write_text('{"temperature": 0.4, "pad_token_id": 9}')

    model = decoder(FAMILIES["qwen3"])
    save_pretrained(tmp_path, model.config, model.state_dict(), tokenizer=WithSettings(), token_ids={"pad_token_id": 1})
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"temperature": 0.4, "pad_token_id": 1}


def test_a_second_export_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    one, two = decoder(FAMILIES["qwen3"]), decoder(FAMILIES["llama-none"], seed=3)
    save_pretrained(tmp_path, one.config, one.state_dict(), shard_bytes=30_000)
    save_pretrained(tmp_path, two.config, two.state_dict())
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(logits(loaded(tmp_path), tokens([9])), logits(two, tokens([9])))


def test_tied_head_may_be_in_the_file_if_it_is_equal(exported: Path) -> None:
    file = exported / "model.safetensors"
    state = load_file(file)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, file)
    assert "lm_head.weight" not in load_pretrained(exported)[1]
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}, file)
    with raises(ModelError, "lm_head.weight"):
        load_pretrained(exported)


def test_rotary_constants_of_old_checkpoints_are_ignored(exported: Path) -> None:
    file = exported / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file)
    assert len(load_pretrained(exported)[1]) == len(parameter_shapes(FAMILIES["qwen3"]))


def change_state(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


def drop(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.mlp.up_proj.weight"]


def add(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.9.extra"] = torch.ones(2)


def reshape(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = torch.ones(3)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (drop, "model.layers.1.mlp.up_proj.weight.missing"),
        (add, "model.layers.9.extra.extra"),
        (reshape, "model.norm.weight.shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Any, key: str, exported: Path) -> None:
    change_state(exported, change)
    with raises(ModelError, key) as caught:
        load_pretrained(exported)
    assert str(exported) in str(caught.value) and "\n" not in str(caught.value)


def test_many_missing_tensors_are_counted(exported: Path) -> None:
    config = {**read_config(exported), "num_hidden_layers": 5}
    (exported / "config.json").write_text(json.dumps({**config, "layer_types": None}))
    with pytest.raises(ModelError) as raised:
        load_pretrained(exported)
    assert raised.value.key.endswith(".missing") and str(raised.value).endswith(" and 18 more")


def test_load_weights_checks_too() -> None:
    model = decoder(FAMILIES["qwen3"])
    state = dict(model.state_dict())
    state["stray"] = state.pop("model.norm.weight")
    with raises(ModelError, "model.norm.weight.missing") as raised:
        load_weights(model, state, "step 5")
    assert "extra: stray" in str(raised.value)


def test_no_directory_no_config_no_weights(tmp_path: Path, exported: Path) -> None:
    with raises(ModelError, "absent"):
        load_pretrained(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with raises(ModelError, "config.json"):
        load_pretrained(tmp_path / "empty")
    (exported / "model.safetensors").rename(exported / "pytorch_model.bin")
    with raises(ModelError, "model.safetensors"):
        load_pretrained(exported)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_config_that_is_not_an_object(content: str, exported: Path) -> None:
    (exported / "config.json").write_bytes(content.encode("latin-1"))
    with raises(ModelError, "config.json.type" if content == "[1]" else "config.json.content"):
        load_pretrained(exported)


@pytest.mark.parametrize("keep", [0, 5, 200, 20_000])
def test_truncated_file_is_corrupt(keep: int, exported: Path) -> None:
    file = exported / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with raises(ModelError, "model.safetensors.header"):
        load_pretrained(exported)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/hostname", "a/../../x", "", ".", "\0", "x" * 300, "\ud800", 3, None, ["a"]]
)
def test_shards_outside_of_the_directory_are_not_opened(tmp_path: Path, name: object) -> None:
    model = decoder(FAMILIES["qwen3"])
    save_pretrained(tmp_path / "model", model.config, model.state_dict(), shard_bytes=60_000)
    shutil.copy(next((tmp_path / "model").glob("*.safetensors")), tmp_path / "secret.safetensors")
    file = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.norm.weight"] = name
    file.write_text(json.dumps(index))
    with raises(ModelError, "model.safetensors.index.json.weight_map.model.norm.weight"):
        load_pretrained(tmp_path / "model")


def test_shards_in_folders_and_behind_links_are_read(tmp_path: Path) -> None:
    """The cache of a hub is a folder of links."""
    model = decoder(FAMILIES["qwen3"])
    save_pretrained(tmp_path, model.config, model.state_dict(), shard_bytes=60_000)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    (tmp_path / "blobs").mkdir()
    first, second, *_ = sorted(set(index["weight_map"].values()))
    (tmp_path / first).rename(tmp_path / "blobs" / first)
    (tmp_path / second).rename(tmp_path / "blobs" / second)
    (tmp_path / second).symlink_to(tmp_path / "blobs" / second)
    index["weight_map"] = {k: f"blobs/{v}" if v == first else v for k, v in index["weight_map"].items()}
    file.write_text(json.dumps(index))
    _, tensors = load_pretrained(tmp_path)
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_brackets_without_end_are_no_json(exported: Path, name: str) -> None:
    (exported / name).write_text("[" * 100_000)
    with raises(ModelError, f"{name}.content"):
        load_pretrained(exported)


def test_a_pipe_in_the_place_of_weights_is_not_waited_for(exported: Path) -> None:
    (exported / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "pipe"}}')
    os.mkfifo(exported / "pipe")
    with raises(ModelError, "pipe.type"):
        load_pretrained(exported)


def test_shards_that_are_missing_or_do_not_hold_what_the_index_says(tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen3"])
    save_pretrained(tmp_path, model.config, model.state_dict(), shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    index["weight_map"]["model.norm.weight"] = first
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises(ModelError, f"{first}.model.norm.weight"):
        load_pretrained(tmp_path)
    (tmp_path / first).unlink()
    with raises(ModelError, first):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with raises(ModelError, "model.safetensors.index.json.weight_map"):
        load_pretrained(tmp_path)
    assert last != first


def test_state_that_does_not_fit_is_not_exported(tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen3"])
    with raises(ModelError, "model.layers.0.mlp.gate_proj.weight.shape"):
        save_pretrained(tmp_path, shape("qwen3", intermediate_size=32), model.state_dict())
    assert not list(tmp_path.iterdir())


def test_writing_that_fails_is_a_storage_error(tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen3"])
    (tmp_path / "file").write_text("")
    with raises(StorageError, "out"):
        save_pretrained(tmp_path / "file" / "out", model.config, model.state_dict())


class Counted(Unread):
    """Tensors that come into being when asked for; how many of them there were at once."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.tensors, self.alive, self.most, self.read = tensors, 0, 0, list[str]()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        made = self.tensors[name][slices].clone()
        self.alive += 1
        self.most = max(self.most, self.alive)
        self.read.append(name)
        weakref.finalize(made, self._gone)
        return made

    def _gone(self) -> None:
        self.alive -= 1


def test_names_and_shapes_are_known_without_reading() -> None:
    tensors = Counted({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    assert "a" in tensors and "c" not in tensors and list(tensors) == ["a", "b"] and len(tensors) == 2
    assert shapes(tensors) == {"a": (2, 3), "b": (4,)}
    with pytest.raises(KeyError):
        tensors["c"]
    assert tensors.read == [] and block(tensors, "a", (slice(1),)).shape == (1, 3)


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_a_model_is_written_without_being_in_memory(shard_bytes: int, tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen3"])
    state = Counted({name: p.detach() for name, p in model.named_parameters()})
    save_pretrained(tmp_path, model.config, state, dtype=torch.bfloat16, shard_bytes=shard_bytes)
    assert state.most <= 2 and sorted(state.read) == sorted(state)  # the last one goes when the next one is there
    config, tensors = load_pretrained(tmp_path)
    assert config == model.config
    assert all(torch.equal(tensors[name], tensor.bfloat16()) for name, tensor in state.tensors.items())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9)
    assert {name for file in files for name in load_file(file)} == set(state)


def test_an_index_names_the_file_of_each_tensor_and_their_size(tmp_path: Path) -> None:
    model = decoder(FAMILIES["llama-none"])
    save_pretrained(tmp_path, model.config, model.state_dict(), shard_bytes=30_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], model.state_dict()[name])


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2", "qwen3", "mistral"])
def test_a_value_model_is_a_classifier_of_tokens(name: str, tmp_path: Path) -> None:
    model = ValueModel(decoder(FAMILIES[name]))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
        model.score.bias.fill_(0.25)
    save_pretrained(tmp_path, FAMILIES[name], dict(model.named_parameters()), values=True)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    ids = tokens([40])
    with torch.no_grad():
        ours = model.score(model(ids, PackedContext([40])))
        found = theirs(ids[None]).logits[0]
    assert found.shape == (40, 1) and (found[:, 0] - ours).abs().max() <= 1e-4 * ours.abs().max()
    assert theirs.config.id2label == {0: "value"}
    assert shapes(open_tensors(tmp_path)) == parameter_shapes(FAMILIES[name], value=True)
    with raises(ModelError, "config.json.architectures"):
        load_pretrained(tmp_path)


def test_weights_of_a_policy_are_no_value_model(tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen3"])
    with raises(ModelError, "score.weight.missing"):
        save_pretrained(tmp_path, model.config, model.state_dict(), values=True)
    assert not list(tmp_path.iterdir())


def test_a_block_of_a_tensor_is_read_alone(exported: Path) -> None:
    tensors = open_tensors(exported)
    name = "model.embed_tokens.weight"
    assert torch.equal(tensors.part(name, (slice(3, 7), slice(0, 2))), tensors[name][3:7, :2])
    assert torch.equal(tensors.part(name, (slice(5, 6),)), tensors[name][5:6])
    assert tensors.files[name] == "model.safetensors"


def test_a_head_that_is_the_embedding_once_more_is_no_tensor_of_its_own(exported: Path) -> None:
    state = load_file(exported / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    save_file({**state, "lm_head.weight": embedding.clone()}, exported / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" not in open_tensors(exported)
    save_file({**state, "lm_head.weight": embedding + 1}, exported / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight" in open_tensors(exported)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    model = decoder(FAMILIES["qwen3"])
    with raises(ModelError, "dtype"):
        save_pretrained(tmp_path, model.config, model.state_dict(), dtype=torch.int8)


def crafted(header: dict[str, Any] | str, body: bytes = b"\0" * 8) -> bytes:
    """A safetensors file of this header."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


CRAFTED = {
    "header of 2 GB": (2 << 30).to_bytes(8, "little") + b"{}",
    "no JSON": crafted("hello"),
    "deep": crafted('{"a":' + "[" * 100_000),
    "overlap": crafted({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}),
    "beyond the end": crafted({"a": entry([1], 10**12, 10**12 + 4)}),
    "overflow": crafted({"a": entry([1 << 40, 1 << 40], 0, 8)}),
    "unknown dtype": crafted({"a": entry([2], 0, 8, "X9")}),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_file_of_weights_is_a_named_error(exported: Path, case: str) -> None:
    (exported / "model.safetensors").write_bytes(CRAFTED[case])
    with raises(ModelError, "model.safetensors.header"):
        load_pretrained(exported)


@pytest.mark.parametrize("family, field, key", [
    ("qwen3", "num_hidden_layers", "num_layers"), ("qwen3-moe", "num_experts", "num_experts"),
])  # fmt: skip
@pytest.mark.parametrize("read", [load_pretrained, open_tensors])
def test_a_count_far_beyond_the_tensors_takes_no_memory(
    tmp_path: Path, family: str, field: str, key: str, read: Any
) -> None:
    model = decoder(FAMILIES[family])
    save_pretrained(tmp_path, model.config, model.state_dict())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: 10**8}))
    with raises(ModelError, f"config.json.{key}"):
        read(tmp_path)
