"""Adapters by name: in a room, and by the field ``model`` of a request."""

import asyncio
from pathlib import Path

import openai
import pytest

from tests.engines.clients import Failing, failing_engine, gathered, opened, request, small_engine
from tests.engines.reference import LORAS, halves
from tests.errors import raises
from tests.serve.servers import client_of, model_folder, running
from tilth.cli.generate import complete
from tilth.cli.main import GenerateCommand
from tilth.core.errors import DataError, ModelError
from tilth.engines.request import Request
from tilth.models.peft import save_adapter
from tilth.runs.models import load_model


def adapted(one, name):
    """The completion of an engine that has nothing else to do."""
    engine = small_engine()
    engine.load_adapter(name, LORAS[name], halves(name))
    (found,) = engine.generate([Request(one.id, one.prompt, one.params, adapter=name, draws=(0, one.id))])
    return found.tokens.tolist()


def test_an_adapter_is_there_after_a_restart_too():
    async def used(room):
        await room.load_adapter("a", LORAS["a"], halves("a"))
        asked = Request(3, [5, 6, 7], request(3).params, adapter="a")
        Failing.left, Failing.after = [RuntimeError("broken")], 4
        found = await gathered(room, [asked, request(4)])
        await room.remove_adapter("a")
        with raises(DataError, "request.adapter"):
            await gathered(room, [asked])
        with raises(ModelError, "adapter.rank"):
            await room.load_adapter("b", LORAS["a"].model_copy(update={"rank": 0}), {})
        return found

    with opened(make=failing_engine) as room:
        one, other = asyncio.run(used(room))
        assert room.restarts == 1
    assert one.tokens.tolist() == adapted(request(3), "a")
    assert other.tokens.tolist() == small_engine(seed=0).generate([request(4)])[0].tokens.tolist()


def test_model_names_an_adapter(tmp_path):
    model = model_folder(tmp_path)
    config = load_model(model).config
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_adapter(tmp_path / name, config, LORAS[name], halves(name, config), model)
    asked = {"prompt": "what is it?", "max_tokens": 16, "temperature": 0.0}
    with running(model, adapters={"one": str(tmp_path / "a"), "two": str(tmp_path / "b")}) as (_, address):
        with client_of(address) as client:
            assert [card.id for card in client.models.list()] == [Path(model).name, "one", "two"]
            texts = [client.completions.create(model=name, **asked).choices[0].text for name in (model, "one", "two")]
            score = [
                client.completions.create(model=name, prompt="what is it?", max_tokens=0, echo=True, logprobs=0)
                for name in (model, "one")
            ]
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="three", **asked)
    ((wanted,), _) = complete(GenerateCommand(model, "what is it?", temperature=0.0, max_tokens=16, template=""))
    assert texts[0] == wanted.text and len(set(texts)) == 3
    one, other = (found.choices[0].logprobs.token_logprobs[1:] for found in score)
    assert max(abs(a - b) for a, b in zip(one, other)) > 1e-2


def test_an_adapter_of_another_base_is_refused(tmp_path):
    model = model_folder(tmp_path)
    (tmp_path / "a").mkdir()
    save_adapter(tmp_path / "a", small_engine().config, LORAS["a"], halves("a"), "other")
    with pytest.raises(ModelError), running(model, adapters={"one": str(tmp_path / "a")}):
        pass
