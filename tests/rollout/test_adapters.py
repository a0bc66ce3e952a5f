"""Adapters of requests: one engine, one base, and a low-rank change of it for each request."""

import pytest

from tests.errors import raises
from tests.rollout.reference import Plain
from tilth.config.schema import LoraConfig
from tilth.rollout.protocol import EngineError
from tilth.rollout.request import Request


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate([Request(0, [1]), Request(1, [1], adapter="a")]),
        lambda engine: engine.load_adapter("a", LoraConfig(rank=2), {}),
        lambda engine: engine.remove_adapter("a"),
    ],
)
def test_engines_without_adapters_refuse_them(call):
    with raises(EngineError, "request.adapter.engine"):
        call(Plain())
