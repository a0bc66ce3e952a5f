"""Device types: bandwidth of groups in nodes, tables of a user's own."""

from dataclasses import asdict

import pytest

from tests.errors import raises
from tilth.core.errors import RecipeError
from tilth.plan.devices import DEVICES, device_type


def test_groups_within_a_node_use_its_links_and_others_share_its_network():
    kind = DEVICES["a100-80g"]
    reached = kind.links
    assert kind.bandwidth(range(8)) == reached * 300e9
    assert kind.bandwidth(range(0, 64, 8)) == reached * 25e9  # one member a node: seven other groups beside it
    assert kind.bandwidth(range(16)) == reached * 200e9  # all members of both nodes
    assert kind.bandwidth([0, *range(8, 16)]) == reached * 25e9  # the sender alone in its node


def test_pools_are_any_number_in_a_node_and_then_whole_nodes():
    assert DEVICES["h100"].pool_sizes(24) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]
    assert DEVICES["h100"].pool_sizes(12) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert DEVICES["cpu"].pool_sizes(3) == [1, 2, 3]


def test_pools_of_many_nodes_are_sixteenths_and_powers_of_two():
    sizes = DEVICES["h100"].pool_sizes(1024)
    assert sizes[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128] and sizes[12:] == list(range(192, 1025, 64))
    assert max(DEVICES["h100"].pool_sizes(1000)) == 1000 and len(DEVICES["h100"].pool_sizes(128)) == 8 + 15


def test_a_message_goes_around_a_group_slowly_between_nodes():
    kind = DEVICES["a100-80g"]
    assert kind.latency(range(1)) == 0.0 and kind.latency(range(8)) == pytest.approx(7 * kind.hop)
    assert kind.latency(range(16)) == pytest.approx(14 * kind.hop + kind.far)
    assert kind.latency(range(0, 64, 8)) == pytest.approx(7 * kind.far)


@pytest.mark.parametrize("kind", DEVICES.values(), ids=DEVICES)
def test_every_type_names_its_source_and_its_rates(kind):
    assert kind.source and {"bf16", "tf32", "fp32"} <= kind.flops.keys()
    assert kind.rate("fp32") <= kind.rate("fp32", "high") <= kind.rate("bf16") == kind.attained * kind.flops["bf16"]


def written(folder, **changes):
    fields = {**asdict(DEVICES["h100"]), "name": "mine", **changes}
    rates = fields.pop("flops")
    lines = [f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in fields.items()]
    (folder / "mine.toml").write_text("\n".join([*lines, "[flops]", *(f"{k} = {v}" for k, v in rates.items())]))
    return str(folder / "mine.toml")


def test_a_table_of_ones_own(tmp_path):
    found = device_type(written(tmp_path, memory=10**11))
    assert (found.name, found.memory, found.flops) == ("mine", 10**11, DEVICES["h100"].flops)


def test_what_is_wrong_is_named(tmp_path):
    with raises(RecipeError, "device_type"):
        device_type("h1000")
    with raises(RecipeError, "device_type.file"):
        device_type(str(tmp_path / "none.toml"))
    with raises(RecipeError, "device_type.intra"):
        device_type(written(tmp_path, intra=-1.0))
    with raises(RecipeError, "device_type.colour"):
        device_type(written(tmp_path, colour="red"))
