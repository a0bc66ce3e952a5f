"""Tests of a machine: what is wrong for certain is found."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tilth.cli import guard
from tilth.cli.main import app
from tilth.guard import node_check
from tilth.guard.node_check import check_node


def test_a_healthy_machine_is_sound_within_the_budget():
    found = check_node(0.2)
    assert found.sound and found.compute > 0 and found.memory > 0 and found.loopback > 0
    assert found.sentence().startswith("nothing is wrong")


def test_other_bits_of_a_product_are_found(monkeypatch):
    products = iter([b"right", b"wrong", *[b"right"] * 100_000])  # even a busy machine multiplies twice
    monkeypatch.setattr(node_check, "_product", lambda made: next(products))
    found = check_node(0.05)
    assert found.unequal == 1 and not found.sound


@pytest.mark.parametrize("wrong", ["flipped", "short"])
def test_bytes_that_do_not_arrive_are_found(monkeypatch, wrong):
    send = node_check._send

    def broken(there, data):
        send(there, (data[:-1] + bytes([data[-1] ^ 1])) if wrong == "flipped" else data[:-100])
        there.shutdown(1)

    monkeypatch.setattr(node_check, "_send", broken)
    found = check_node(0.05)
    assert found.failed == 4 and not found.sound and "4 of 4 transfers" in found.sentence()


def test_the_command_ends_with_1_for_a_machine_that_is_not_sound(monkeypatch):
    monkeypatch.setattr(guard, "check_node", lambda: check_node(0.1))
    found = CliRunner().invoke(app, ["guard", "check", "--json"])
    assert found.exit_code == 0 and json.loads(found.stdout)["sound"]
    products = iter(np.arange(1e6))
    monkeypatch.setattr(node_check, "_product", lambda made: next(products))
    assert CliRunner().invoke(app, ["guard", "check"]).exit_code == 1
