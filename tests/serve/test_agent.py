"""Agents of OpenAI's client: what they call is the episode, token by token, and their failures are their own."""

import asyncio

import numpy as np
import pytest

from tests.engines.reference import make_model
from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_episodes import Falls
from tests.patience import patience
from tests.rollout.test_episodes import TEXTS
from tests.serve.game import STOPS
from tests.serve.servers import WEATHER
from tilth.config.errors import RecipeError
from tilth.core.errors import PluginError
from tilth.core.random import stream_id
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.data.trajectories import read_trajectories
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.envs.calls import message_of
from tilth.envs.pool import EnvironmentPool
from tilth.models.config import DecoderConfig
from tilth.rollout.buffer import parted
from tilth.rollout.episodes import EpisodeRequest, EpisodeResult, Limits, Player
from tilth.serve.agents.conversation import MODEL, AgentConversations
from tilth.serve.agents.server import _called
from tilth.serve.anthropic import MessageForm, MessagesBody
from tilth.serve.errors import HttpError
from tilth.serve.schemas import ChatBody

AGENTS, GAME = "tests/serve/agents.py", "tests/serve/echo.py"
ROLLOUT = {"serve": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def file(name):
    return f"{GAME if name == 'Echo' else AGENTS}:{name}"


def opened(name, **options):
    return EnvironmentPool(file(name), **{"timeout": 20.0, "rollout": ROLLOUT, **options})


def play(pool, infos, *, turns=4, context=400, max_tokens=12, engine=None, ids=None, partial=0):
    """Play episodes by a small model, in parity mode: nothing but what was said decides on tokens and log-probs."""
    tokenizer = Tokenizer.train(TEXTS, 300)
    template = make_template("chatml", tokenizer)
    if engine is None:
        config = DecoderConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
            num_kv_heads=2, max_positions=512,
        )  # fmt: skip
        engine = Engine(config, EngineOptions(tokenizer=tokenizer, seed=3, max_length=context, parity=True))
        engine.update_weights(make_model(config, scale=1.0).named_parameters(), version=5)
    player = Player(engine, template, tokenizer, pool, Limits(turns, context))
    params = SamplingParams(max_tokens=max_tokens, stop_tokens=(*template.stops, *range(5, 60)))
    requests = [
        EpisodeRequest(i, info, at // 2, at) for at, (i, info) in enumerate(zip(ids or range(len(infos)), infos))
    ]
    player.begin(requests, params, partial)
    while player.open:
        assert list(EngineRounds(engine, source=player).drain())
        paused = [EpisodeResult.of(one.kept()) for one in player.results.values() if one.paused]  # as through a file
        player.begin([], params, partial, paused)
    return [player.results[one.id] for one in requests]


@pytest.fixture(scope="module")
def echo():
    pool = opened("Echo", rollout={**ROLLOUT, "serve": False})
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def odd():
    pool = opened("Odd", timeout=patience(20))
    yield pool
    pool.close()


def test_the_same_game_is_the_same_trajectory(echo, odd):
    """By the client of threads and by the asynchronous one, in turn."""
    infos = [{"prompt": f"What is {i}?", **({"by": "streams"} if i % 2 else {})} for i in range(6)]
    found = [play(pool, infos) for pool in (echo, odd)]
    assert {one.turns for one in found[0][::2]} & {one.turns for one in found[0][1::2]} & {2, 3}
    same_games(*found)


def same_games(games, others):
    for one, two in zip(games, others, strict=True):
        a, b = one.trajectory, two.trajectory
        same(a, b)
        assert a.segments == b.segments
        assert (a.reward, a.finish, one.parts, one.reason) == (b.reward, b.finish, two.parts, two.reason)
        assert a.reward is not None


@pytest.mark.parametrize("by, package", [("responses", "openai"), ("messages", "anthropic")])
def test_the_game_is_the_same_by_every_interface(echo, odd, by, package):
    pytest.importorskip(package, reason=f"the client {package} is not installed")
    infos = [{"prompt": f"What is {i}?", "by": by} for i in range(2)]
    games = play(odd, infos)
    same_games(play(echo, infos), games)
    assert max(game.turns for game in games) > 1


@pytest.fixture(scope="module")
def teams():
    pool = opened("Teams", timeout=patience(20))
    yield pool
    pool.close()


LONG = {"turns": 20, "context": 500, "max_tokens": 40}


def test_conversations_of_an_episode_are_those_of_episodes(teams, echo):
    """Each is the episode of an environment, token by token; and so is one that pauses between its turns."""
    infos = [{"prompt": f"What is {i}?"} for i in range(3)]
    apart = [
        play(echo, [{"prompt": info["prompt"] + " Help!" * (at == 1)} for info in infos],
             ids=[stream_id("conversation", i, at) if at else i for i in range(3)], **LONG)
        for at in range(3)
    ]  # fmt: skip
    whole, paused = play(teams, infos, **LONG), play(teams, infos, partial=5, **LONG)
    for row, (one, other) in enumerate(zip(whole, paused)):
        t = one.trajectory
        assert (t.id, t.finish, one.reason, one.turns, len(t.opened)) == (row, "stop", "", 9, 2)
        same(t, other.trajectory)
        assert t.segments == other.trajectory.segments and t.reward == other.trajectory.reward is not None
        for found, requests in zip(parted(t), [games[row].trajectory for games in apart], strict=True):
            same(found, requests)
            assert found.segments == requests.segments


def same(a, b):
    assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.mask, b.mask)
    assert np.array_equal(a.logprobs, b.logprobs) and a.versions == b.versions


def test_calls_side_by_side_wait_for_each_other(teams):
    beside = {"prompt": "Which?", "beside": True}
    three, many = play(teams, [{**beside, "games": 3}, {**beside, "games": 5}], **LONG)
    assert len(three.trajectory.opened) == 2 and three.turns == 9 and three.trajectory.reward is not None
    assert many.trajectory.reward is None and "conversations = 4" in many.reason


def test_failures_are_the_episodes_own(odd):
    """Each agent's call that is refused, or that it never makes, costs its own reward and no other one."""
    expected = {
        "well": "",
        "raises": "ValueError: as asked",
        "silent": "run ended without a call",
        "cools": "temperature: turns are drawn with rollout.temperature = 1.0",
        "seeds": "seed: a turn that is trained on",
        "forces": "response_format: a turn that is trained on",
        "rewrites": "messages.0 is",
        "drops": "messages.0 is",
        "edits": "messages.1 is",
        "asks_again": "messages.1 is missing",
        "branches": "a call was refused: ",
        "changes_tools": "tools differ",
        "another_model": "there is no model 'gpt-5'",
        "leaves": "run ended before the answer to its call",
        "comes_back": "",
        "comes_back_at_once": "",
        "completes": "there is no /v1/completions for an agent, but /v1/chat/completions",
        "counts": "",
        "only_counts": "run ended without a call",
        "doubles": "this client adds /v1 itself: give it base_url without",
        "long": "of a context of 400",
        "long_and_raises": "of a context of 400",
        "many": "4 turns",
        "wrong_token": "Error code: 401",
        "too_late": "",
    }
    found = dict(
        zip(expected, play(odd, [{"prompt": f"{how}?", "how": how} for how in expected], max_tokens=20), strict=True)
    )
    for how, why in expected.items():
        one = found[how]
        assert why in one.reason and bool(why) == bool(one.reason), (how, one.reason)
        kept = not why or how in ("long", "long_and_raises", "many")
        assert (one.trajectory.reward is not None) == kept, how
    assert found["long"].trajectory.finish == found["many"].trajectory.finish == "length"
    assert found["many"].turns == 4 and found["too_late"].parts == {"late": 400.0, "torch": 0.0}
    well = found["well"]
    chosen = np.flatnonzero(well.trajectory.mask)
    assert well.parts["prompt"] == chosen[0] and 0 < well.parts["new"] <= 5
    first = well.trajectory.logprobs[chosen[: int(well.parts["new"])]]
    assert well.parts["logprob"] == pytest.approx(float(first.sum()), rel=1e-6)
    assert well.turns == 2 and well.parts["stopped"] == 1


@pytest.mark.parametrize("partial", [0, 5])
def test_tokens_are_counted_as_the_call_has_them(odd, partial):
    """By Anthropic's client, of each turn before it is asked for; also where the episode pauses between its turns."""
    pytest.importorskip("anthropic", reason="the client anthropic is not installed")
    (one,) = play(odd, [{"prompt": "What?", "how": "counts_by_anthropic"}], partial=partial)
    t, opened = one.trajectory, [s.start for s in one.trajectory.segments if s.role == "assistant"]
    assert [one.parts[f"turn{turn}"] for turn in range(3)] == [1, 1, 1] and not one.reason and one.turns == 3
    assert one.parts["fresh"] == opened[0] and one.parts["last"] > len(t.tokens)


@pytest.mark.slow
def test_one_that_hangs_is_given_up():
    pool = opened("Odd", timeout=patience(4))
    try:
        hangs, well = play(pool, [{"prompt": "What?", "how": how} for how in ("hangs", "well")])
    finally:
        pool.close()
    assert hangs.status == "timeout" and hangs.trajectory.mask.any() and hangs.trajectory.reward is None
    assert well.trajectory.reward == 1


@pytest.mark.parametrize("name, serve", [pytest.param("Plays", False, marks=pytest.mark.slow), ("Echo", True)])
def test_agents_and_nothing_else_are_served(name, serve):
    with raises(PluginError, "rollout.serve.environment"):
        opened(name, rollout={**ROLLOUT, "serve": serve})


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def body(messages, **more):
    return ChatBody.model_validate({"model": "policy", "messages": messages, **more})


def test_calls_of_tools_come_and_go():
    """What the policy called is in its turn, and what the tools say is all that the next call adds."""
    talk, asked = AgentConversations(ROLLOUT), [{"role": "developer", "content": "?"}]
    first = talk.call(body(asked, tools=[TOOL], stop="x", max_tokens=7), again=False)
    assert talk.next() == [{"role": "system", "content": "?"}]
    assert talk.limits == {"max_tokens": 7, "stop": ["x"], "details": False}
    assert talk.tools[0]["function"]["name"] == "add"
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    talk.answer({**message_of(written), "text": written, "finish": "stop"})
    turn = first.result(0)
    (call,) = turn.message["tool_calls"]
    assert turn.end == {"finish_reason": "tool_calls"} and call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "8"}
    whole = [*asked, turn.message, answer]
    second = talk.call(body(whole, tools=[TOOL]), again=False)
    assert talk.next() == [answer]
    for broken in ("add", '{"name": "", "arguments": {}}', r'{"name": "add", "arguments": {"a": "\ud800"}}'):
        text = f"<tool_call>{broken}</tool_call>"
        talk.answer({**message_of(text), "text": text, "finish": "length"})
        turn = second.result(0)
        assert (
            turn.message["content"] == text
            and "tool_calls" not in turn.message
            and turn.end == {"finish_reason": "length"}
        )
        whole = [*whole, turn.message, answer]
        second = talk.call(body(whole, tools=[TOOL]), again=False)


def test_calls_of_tools_are_those_of_anthropics_interface():
    """Its blocks go on with what was said, whoever writes them."""
    talk, tool = AgentConversations({}), {"name": "add", "input_schema": {"type": "object", "properties": {}}}

    def ask(*messages):
        asked = {"model": "policy", "max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": "?"}]}
        asked["messages"] += messages
        return talk.call(MessagesBody.model_validate(asked).chat(), again=False)

    first = ask()
    assert talk.next() == [{"role": "user", "content": "?"}]
    written = 'so <tool_call>{"name": "add", "arguments": {"a": "\u20ac", "b": [1.5]}}</tool_call>'
    talk.answer({**message_of(written), "text": written, "finish": "stop", "stopped": "x", "counts": [3, 4]})
    whole = {"choices": [{"message": first.result(0).message, **first.result(0).end}], "usage": first.result(0).usage}
    form = MessageForm(None, {"id": "chatcmpl-1", "model": "policy", "usage": first.result(0).usage}).whole(whole)
    text, call = form["content"]
    assert (text["text"], call["input"]) == ("so", {"a": "\u20ac", "b": [1.5]}) and form["stop_reason"] == "tool_use"
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "8"}]}
    ask({"role": "assistant", "content": [text, call]}, result)
    assert talk.next() == [{"role": "tool", "tool_call_id": call["id"], "content": "8"}]
    talk.answer({"role": "assistant", "content": "", "text": "", "finish": "stop"})
    ask({"role": "assistant", "content": [text, call]}, result, {"role": "assistant", "content": []}, result)
    with pytest.raises(HttpError) as caught:
        ask({"role": "assistant", "content": [{**text, "text": "no"}, call]}, result)
    assert caught.value.code == "agent.parallel"


def test_an_answer_is_given_again_only_to_who_lost_it():
    talk, asked = AgentConversations({}), [{"role": "user", "content": "?"}]
    first = talk.call(body(asked, temperature=0.3), again=False)
    assert talk.call(body(asked), again=True) is first
    with pytest.raises(HttpError, match="still being answered"):
        talk.call(body(asked), again=False)
    talk.next()
    talk.answer({"role": "assistant", "content": "!"})
    assert talk.call(body(asked), again=True).result(0) is first.result(0)
    with pytest.raises(HttpError) as caught:
        talk.call(body(asked), again=False)
    assert (caught.value.param, caught.value.code) == ("messages.1", "agent.history")
    talk.close("enough")
    with pytest.raises(HttpError) as caught:
        talk.call(body([*asked, {"role": "assistant", "content": "!"}, *asked]), again=False)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("field, value", [("max_tokens", 9), ("stop", ["x"]), ("logprobs", True)])
def test_a_repeated_call_has_the_limits_of_the_first(field, value):
    talk, asked = AgentConversations({}), [{"role": "user", "content": "?"}]
    first = talk.call(body(asked, max_tokens=7), again=False)
    talk.leave(first)
    assert talk.call(body(asked, max_completion_tokens=7), again=False) is first
    with pytest.raises(HttpError) as caught:
        talk.call(body(asked, **{"max_tokens": 7, field: value}), again=False)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, field, "agent.repeat")


def test_one_conversation_has_one_call_at_a_time():
    talk, asked = AgentConversations({}), [{"role": "user", "content": "?"}]
    talk.call(body(asked), again=False)
    with pytest.raises(HttpError) as caught:
        talk.call(body([*asked, *asked]), again=False)
    assert caught.value.code == "agent.parallel"


def test_a_client_that_asks_anew_may_be_faster_than_the_end_of_its_connection():
    talk, asked = AgentConversations({}), body([{"role": "user", "content": "?"}])
    first = talk.call(asked, again=False)

    async def anew():
        asyncio.get_running_loop().call_later(0.05, talk.leave, first)
        return await _called(talk, asked, False, wait=asyncio.wait_for)

    assert asyncio.run(anew()) is first


@pytest.mark.parametrize("field, value", [("name", "Eve"), ("tool_call_id", "another")])
def test_who_said_something_does_not_change(field, value):
    said = {"role": "tool", "content": "8", "name": "add", "tool_call_id": "one"}
    talk = AgentConversations({})
    talk.call(body([said]), again=False)
    talk.answer({"role": "assistant", "content": "!"})
    whole = [{**said, field: value}, {"role": "assistant", "content": "!"}, said]
    with pytest.raises(HttpError) as caught:
        talk.call(body(whole), again=False)
    assert (caught.value.param, caught.value.code) == ("messages.0", "agent.history")


def test_a_schema_that_no_call_can_follow_is_the_calls_fault():
    pytest.importorskip("llguidance")
    talk, asked = AgentConversations({**ROLLOUT, "tool_schemas": True}), [{"role": "user", "content": "?"}]
    wrong = {"type": "function", "function": {"name": "sub", "parameters": {"type": "nonsense"}}}
    with pytest.raises(HttpError) as caught:
        talk.call(body(asked, tools=[TOOL, wrong]), again=False)
    assert (caught.value.status, caught.value.param) == (400, "tools.1.function.parameters")
    talk.call(body(asked, tools=[TOOL]), again=False)


@pytest.mark.parametrize("field, value", [("top_k", 5), ("min_p", 0.5), ("n", 2), ("seed", 1), ("top_logprobs", 1),
                                          ("stop_token_ids", [1]), ("return_token_ids", True)])  # fmt: skip
def test_what_changes_the_drawing_is_refused(field, value):
    talk = AgentConversations(ROLLOUT)
    with pytest.raises(HttpError) as caught:
        talk.call(body([{"role": "user", "content": "?"}], logprobs=True, **{field: value}), again=False)
    assert caught.value.param == field and caught.value.status == 400


def runs(folder, name, **more):
    rollout = {"environment": file(name), "serve": name != "Echo", "turns": 4, "stop": [*STOPS]}
    rollout |= {"turn_seconds": patience(20), **more.pop("rollout", {})}
    sections = {"model": {"context": 96}, "data": {"template": "chatml", "tokenizer": "bpe:300"}}
    sections["train"] = {"parity": True}  # the order in which agents call changes no token
    return tiny.recipe(folder, rollout=rollout, **{**sections, **more})


@pytest.mark.slow
@pytest.mark.parametrize("kind, package", [("Plays", "openai"), ("Messages", "anthropic")])
def test_a_run_learns_from_an_agent_what_it_learns_from_the_environment(tmp_path, kind, package):
    pytest.importorskip(package, reason=f"the client {package} is not installed")
    few = {"supervised": {"steps": 2}, "algorithm": {"steps": 2}, "run": {"eval_prompts": 4}}
    one, other = (tiny.run(runs(tmp_path, kind, **few), reward=None, name=kind) for kind in ("Echo", kind))
    assert tiny.weights(one.directory) == tiny.weights(other.directory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Plays", "Teams"])
def test_a_run_that_begins_again_in_the_middle_is_the_same(tmp_path, kind):
    recipe = runs(tmp_path, kind, rollout={"turns": 12, "max_tokens": 24}, model={"context": 500})
    whole = tiny.run(recipe, reward=None, name="whole")
    with pytest.raises(PluginError):
        tiny.run(recipe, reward=None, name="again", callbacks=[Falls(9)])
    again = tiny.run(recipe, reward=None, name="again")
    assert tiny.same(tiny.numbers(whole.directory), tiny.numbers(again.directory))
    assert tiny.weights(whole.directory) == tiny.weights(again.directory)


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["grpo", "gae"])
def test_the_trainer_sees_what_each_conversation_has_seen(tmp_path, learns):
    """Log-probs of engine and trainer agree, without parity mode, and with critic and reference too."""
    more = {"flow": "ppo", "critic": {"lr": 1e-3}} if learns == "gae" else {}
    more |= {"algorithm": {"advantage": learns, "steps": 3, "kl": "k3", "kl_coef": 0.1}, "train": {"parity": False}}
    recipe = runs(tmp_path, "Teams", rollout={"turns": 12, "max_tokens": 24}, model={"context": 500}, **more)
    directory = tiny.run(recipe, reward=None).directory
    assert 0 < max(one.get("mismatch/max", 0.0) for one in tiny.numbers(directory)) < 1e-4
    rows = read_trajectories(directory).to_pylist()
    assert sum(row["conversations"] is not None for row in rows) > 20


def test_serving_needs_an_agent(tmp_path):
    with raises(RecipeError, "rollout.serve"):
        tiny.recipe(tmp_path, rollout={"serve": True})


def test_only_the_native_engine_follows_schemas_of_tools(tmp_path):
    with pytest.raises(RecipeError) as caught:
        tiny.recipe(tmp_path, rollout={"environment": file("Odd"), "engine": "vllm", "tool_schemas": True})
    assert "rollout.tool_schemas.engine" in caught.value.key


def test_an_agent_without_parallel_calls_gets_the_first_one():
    talk = AgentConversations({})
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "tools": [WEATHER]}
    turn = talk.call(ChatBody.model_validate({**asked, "parallel_tool_calls": False}), False)
    calls = [{"name": "weather", "arguments": {"city": city}, "problem": ""} for city in ("Oslo", "Rome")]
    talk.answer({"role": "assistant", "content": "", "tool_calls": calls})
    (only,) = turn.result().message["tool_calls"]
    assert "Oslo" in only["function"]["arguments"]
