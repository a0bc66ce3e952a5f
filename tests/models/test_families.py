"""A family that Tilth does not know, declared here and nowhere else: all that follows from its table."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import tilth
from tests.checkpoint.make import cut, save_sharded
from tests.config.test_plugins import forget
from tests.errors import raises
from tests.models.tiny import FAMILIES, decoder
from tilth.checkpoint.read import open_checkpoint
from tilth.config.load import from_dict
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import ModelError, PluginError
from tilth.core.layout import Mesh
from tilth.core.random import fill_normal_, stream
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder, Layer, Linear, RMSNorm
from tilth.models.family import ATTENTION, EMBEDDING, END, NORMS, Family, families, linear, new_config, norm
from tilth.models.hf import load_pretrained, open_tensors, save_pretrained
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.layout import layouts, per_rank
from tilth.plan.rules import rule_of
from tilth.plan.shape import matrices, parameter_shapes, parameters, token_flops
from tilth.plan.traffic import traffic
from tilth.training.engine import TrainEngine, negative_log_likelihood

HERE = "tests.models.test_families:"


class SquaredMLP(nn.Module):
    """down(relu(up(x))^2), with projections of other names and no gate."""

    def __init__(self):
        super().__init__()
        self.grow, self.shrink = Linear(), Linear()

    def forward(self, x):
        return self.shrink(F.relu(self.grow(x)).square())


class SandwichLayer(Layer):
    """A norm behind attention, too."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.mlp = SquaredMLP()
        self.behind = RMSNorm(config.rms_norm_eps)

    def leave(self, x, mixed, dropout):
        x = x + self._drop(self.behind(self.self_attn.o_proj(mixed.flatten(1))), dropout, "attention")
        return x + self._drop(self.mlp(self.post_attention_layernorm(x)), dropout, "mlp")


INNER = (
    *linear("mlp.grow", ("intermediate_size", "hidden_size"), "rows", "mlp_bias"),
    *linear("mlp.shrink", ("hidden_size", "intermediate_size"), "columns", "mlp_bias", "residual"),
)
TABLE = (
    EMBEDDING[0]._replace(hf="transformer.wte.weight"),
    *ATTENTION,
    *(row._replace(hf=row.name.replace("model.layers", "transformer.h")) for row in INNER),
    *NORMS,
    *norm("behind"),
    *END,
)


def sandwich():
    return Family(
        architecture="SandwichForCausalLM",
        table=TABLE,
        layer=SandwichLayer,
        fixed={"qk_norm": True},
        keys={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        activation="relu2",
    )


def changed(name, **changes):
    """The same family with something else in it."""
    tilth.family(name)(declared := lambda: replace(sandwich(), **changes))
    return declared


@pytest.fixture(autouse=True)
def _declared():
    tilth.family("sandwich")(sandwich)
    yield
    forget()


def config(**changes):
    tilth.family("sandwich")(sandwich)
    shape = {"vocab_size": 33, "hidden_size": 20, "intermediate_size": 28, "num_layers": 2, "num_heads": 4,
             "num_kv_heads": 2, "head_dim": 6, "family": "sandwich", "qk_norm": True, "mlp_bias": True}  # fmt: skip
    return DecoderConfig(**{**shape, **changes})


# -- training --------------------------------------------------------------------------------------------------------


def trained(rank, sizes=(1, 1, 1), sp=False, family="sandwich", table=TABLE, tied=True, optimizer="adamw"):
    """Initial weights, and those after two steps: float64, whole."""
    if family != "sandwich":
        changed(family, table=table)
    shape, mesh = config(family=family, tie_embeddings=tied), Mesh(("dp", "fsdp", "tp"), sizes)

    def build():
        return Decoder(shape, torch.float64).double()

    sharded = ShardedModel.alone(build()) if len(mesh) == 1 else shard(build, ParallelDims.of(mesh, rank), sp=sp)
    sharded.init_(3)
    names = list(sharded.parameters)
    start = {name: whole.clone() for name, whole in sharded.assemble(names).items()}
    section = OptimizerConfig(name=optimizer, lr=1e-3)
    engine = TrainEngine(sharded, section, total_steps=9, micro_tokens=16)
    rows = [np.arange(i, i + n) % 33 for i, n in enumerate((5, 9, 4, 12))]
    part, parts = (sharded.grid.coordinate("dp") + sharded.grid.coordinate("fsdp")), sharded.grid.size("dp", "fsdp")
    tokens = Jagged.of(rows[part::parts])
    mask = np.concatenate([[0] + [1] * (n - 1) for n in tokens.lengths]).astype(np.uint8)
    for _ in range(2):
        engine.update(tokens, mask, {}, negative_log_likelihood(26.0))
    return start, sharded.assemble(names)


def far(found, wanted):
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("sizes", "sp"), [((2, 1, 1), False), ((1, 2, 1), False), ((1, 1, 2), False), ((1, 1, 2), True)]
)
def test_it_trains_in_every_layout_as_on_one_device(pool, sizes, sp, optimizer):
    tied = optimizer == "adamw"
    start, end = trained(0, tied=tied, optimizer=optimizer)
    for first, last in pool.run(2, HERE + "trained", sizes=sizes, sp=sp, tied=tied, optimizer=optimizer):
        assert far(first, start) == 0
        assert far(last, end) < 1e-9
    assert all(not torch.equal(start[name], end[name]) for name in start)


@pytest.mark.dist
def test_a_norm_with_the_wrong_rule_misses_a_part_of_its_gradient(pool):
    wrong = tuple(row._replace(tp="whole") if ".behind." in row.name else row for row in TABLE)
    _, end = trained(0)
    for _, last in pool.run(2, HERE + "trained", sizes=(1, 1, 2), sp=True, family="wrong", table=wrong):
        apart = {name for name in end if float((last[name] - end[name]).abs().max()) > 1e-9}
        assert "model.layers.0.behind.weight" in apart


def test_initialisation_is_the_tables():
    model = Decoder(config())
    model.init_weights_(5)
    for name, p in model.named_parameters():
        wanted = torch.ones(p.shape) if "norm" in name or "behind" in name else torch.zeros(p.shape)
        if p.ndim > 1:
            std = 0.02 / 2 if name.endswith(("o_proj.weight", "shrink.weight")) else 0.02  # two layers
            fill_normal_(wanted, stream(5, "init", name), std)
        assert torch.equal(p, wanted), name


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [False, True])
def test_a_checkpoint_goes_from_one_layout_into_another(tmp_path, value):
    shape = config(tie_embeddings=False)
    model = ValueModel(Decoder(shape)) if value else Decoder(shape)
    model.init_weights_(1)
    whole, names = dict(model.state_dict()), ("dp", "fsdp", "tp")
    first = layouts(shape, Mesh(names, (1, 2, 2)), value=value)
    second = layouts(shape, Mesh(names, (2, 1, 4)), value=value)
    folder = save_sharded(tmp_path, 1, {"model": whole}, {"model": first})
    for rank in range(8):
        wanted = {name: cut(tensor, second[name], rank) for name, tensor in whole.items()}
        found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        open_checkpoint(folder).restore("model", found, second, rank)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
def test_hugging_face_has_its_own_names(tmp_path, value, shard_bytes):
    shape = config(tie_embeddings=False)
    model = ValueModel(Decoder(shape)) if value else Decoder(shape)
    model.init_weights_(1)
    save_pretrained(tmp_path, shape, model.state_dict(), values=value, shard_bytes=shard_bytes)
    stored = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert {"transformer.wte.weight", "transformer.h.1.mlp.grow.bias", "model.layers.1.behind.weight"} <= stored
    assert not any(".layers.1.mlp" in name or "embed_tokens" in name for name in stored)
    again, tensors = load_pretrained(tmp_path, values=value)
    assert again == (replace(shape, tie_embeddings=True) if value else shape)
    found = open_tensors(tmp_path) if not value else tensors
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensors[name], tensor) and torch.equal(found[name], tensor)
        part = tuple(slice(0, 1) for _ in tensor.shape)
        assert torch.equal(tensors.part(name, part), tensor[part])
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace("relu2", "gelu"))
    with raises(ModelError, "hidden_act"):
        load_pretrained(tmp_path, values=value)


# -- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_counts_and_flops_are_those_of_the_modules(tied):
    shape = config(tie_embeddings=tied)
    model = Decoder(shape)
    assert parameter_shapes(shape) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert parameters(shape) == sum(p.numel() for p in model.parameters())
    assert parameters(shape, value=True) == sum(p.numel() for p in ValueModel(model).parameters())
    inside = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, Linear)]
    assert matrices(shape) == sum(m.weight.numel() for m in inside)
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * 7
    assert token_flops(shape, 7).forward == 2 * (matrices(shape) + 33 * 20) + attention


def test_memory_follows_the_table():
    asked = from_dict({"model": {"family": "sandwich"}, "cluster": {"backend": "local", "workers": 4}, "optimizer":
                       {"name": "muon"}, "policy": {"layout": {"fsdp": 2, "tp": 2}}})  # fmt: skip
    shape = new_config(asked.model, 50)
    assert shape.family == "sandwich" and shape.qk_norm
    plain = [row for row in TABLE if ".behind." not in row.name]
    changed("plainer", table=tuple(plain), layer=lambda config, i: Layer(config, i))
    other = replace(shape, family="plainer")
    for found, less in zip(per_rank(asked, shape, 40), per_rank(asked, other, 40)):
        (seat,), (fewer,) = ([s for s in w.seats if s.role == "policy"] for w in (found, less))
        mesh = Mesh(("dp", "fsdp", "tp"), (1, 2, 2))
        boxes = {name: layout.boxes(found.rank) for name, layout in layouts(shape, mesh).items()}
        assert seat.elements == sum(box.numel for held in boxes.values() for box in held)
        moments = (
            2 * seat.elements
            - sum(
                box.numel
                for name, held in boxes.items()
                if name.startswith("model.layers") and "proj" in name
                for box in held
            )
            - sum(
                box.numel
                for name, held in boxes.items()
                if name.endswith(("grow.weight", "shrink.weight"))
                for box in held
            )
        )
        assert found.memory.by_name()["optimizer state"] == 4 * moments
        assert seat.elements - fewer.elements == shape.num_layers * shape.hidden_size // 2
        more = found.memory.by_name()["activations"] - less.memory.by_name()["activations"]
        assert more > 0


def test_muon_takes_its_matrices_and_adamw_the_rest():
    engine = TrainEngine(Decoder(config()), OptimizerConfig(name="muon"), total_steps=1, micro_tokens=9)
    muon = {name.partition(".")[2] for name in engine.optimizers.state_tensors() if name.startswith("momentum_buffer")}
    ends = ("q_proj", "k_proj", "v_proj", "o_proj", "grow", "shrink")
    assert muon == {n for n in parameter_shapes(config()) if n.removesuffix(".weight").endswith(ends)}


# -- what is refused -------------------------------------------------------------------------------------------------


class Gain(SandwichLayer):
    """With a parameter that no row has."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.gain = nn.Parameter(torch.ones(3))


class Forgets(SandwichLayer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        del self.behind


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"layer": Gain}, "model.layers.0.gain"),
        ({"layer": Forgets}, "model.layers.0.behind.weight"),
        ({"table": tuple(row for row in TABLE if ".behind." not in row.name)}, "model.layers.0.behind.weight"),
        ({"layer": None}, "model.layers.0.mlp.grow.weight"),
    ],
)
def test_a_parameter_of_the_table_or_the_modules_alone_is_refused_by_name(changes, parameter):
    changed("odd", **changes)
    with pytest.raises(ModelError) as raised:
        Decoder(config(family="odd"))
    assert parameter in str(raised.value)


def test_a_name_is_taken_once_and_unknown_ones_are_told_what_there_is():
    with pytest.raises(PluginError) as raised:
        tilth.family("qwen3")(sandwich)
    assert "qwen3" in str(raised.value)
    with raises(ModelError, "family") as raised:
        config(family="sandwitch")
    assert "sandwich" in str(raised.value)
    tilth.family("nothing")(lambda: None)
    with raises(PluginError, "family.nothing"):
        families()


def test_its_layers_are_its_own():
    assert all(layer.parts[1] is SandwichLayer.leave for layer in Decoder(config()).model.layers)


@pytest.mark.slow  # test_decoder compiles quickly
def test_it_compiles_and_its_layers_are_its_own():
    model = Decoder(config(mlp_bias=False))
    model.init_weights_(0)
    with torch.no_grad():
        plain = model(torch.arange(9), PackedContext([9]))
    model.compile(backend="eager")
    assert all(layer.parts[1] is not Layer.leave for layer in model.model.layers)
    with torch.no_grad():
        assert torch.equal(model(torch.arange(9), PackedContext([9])), plain)


# -- the families of Tilth: what they were before there was a table --------------------------------------------------

GOLDEN = json.loads(Path(__file__).with_name("families_golden.json").read_text())


def short(value):
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() & GOLDEN.keys()))
def test_shapes_layouts_counts_and_config_json_are_those_that_they_were(name):
    shape = FAMILIES[name]
    model = Decoder(shape)
    sizes = [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    boxes = {
        str(mesh.sizes): short({n: [[(b.offset, b.size) for b in layout.boxes(r)] for r in mesh.ranks]
                                for n, layout in layouts(shape, mesh).items()})
        for mesh in (Mesh(("dp", "fsdp", "tp"), size) for size in [(1, 2, 2), (2, 2, 1), (1, 1, 2), (1, 1, 4)])
    }  # fmt: skip
    assert GOLDEN[name] == {
        "shapes": short(sizes),
        "value": short([(n, tuple(p.shape)) for n, p in ValueModel(model).named_parameters()]),
        "boxes": short(boxes),
        "config": short({**shape.to_hf(), "torch_dtype": "float32"}),
        "parameters": parameters(shape),
        "value_parameters": parameters(shape, value=True),
        "flops": token_flops(shape, 7).both,
        "muon": short([n for n, _ in sizes if rule_of(shape.table, n).kind == "matrix"]),
    }


PLANS = {
    "plain": {},
    "muon": {
        "optimizer": {"name": "muon", "muon_precision": "bf16"},
        "train": {"precision": "bf16", "checkpointing": True},
    },
    "ppo": {"flow": "ppo"},
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("plan", PLANS)
def test_memory_and_traffic_are_those_that_they_were(family, plan):
    model = {"family": family, "tied": family != "llama", "kv_heads": 2}
    spread = {"cluster": {"backend": "local", "workers": 4}, "policy": {"layout": {"fsdp": 2, "tp": 2, "sp": True}}}
    asked = from_dict({"model": model, **spread, **PLANS[plan]})
    shape = new_config(asked.model, 53)
    workers = [
        [w.rank, w.memory.by_name(), [s.elements for s in w.seats if s.role != "writer"]]
        for w in per_rank(asked, shape, 40)
    ]
    talks = [[talk.role, talk.axis, talk.bytes] for talk in traffic(asked, shape, 40)]
    (alone,) = per_rank(from_dict({"model": model, **PLANS[plan]}), shape, 40)
    assert GOLDEN["plans"][f"{family}-{plan}"] == short([*workers, alone.memory.by_name(), talks])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_rank_left_without_tokens_passes_in_every_family(name: str) -> None:
    """As of a sequence shorter than the ranks that divide its tokens."""
    model = decoder(FAMILIES[name])
    hidden = model(torch.zeros(0, dtype=torch.int64), PackedContext([]))
    assert hidden.shape == (0, model.config.hidden_size)
    hidden.sum().backward()
    layers = {n: p.grad for n, p in model.named_parameters() if "layers" in n and "correction" not in n}
    assert all(grad is not None and not grad.any() for grad in layers.values())
