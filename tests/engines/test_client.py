"""An engine client: many clients, places, those who leave, workers that die."""

import asyncio
import os
import signal

import numpy as np
import pytest

from tests.engines.clients import POISON, Failing, Poisoned, alone, failing_engine, gathered, opened, request
from tests.errors import raises
from tilth.core.errors import DataError, NonFiniteError, WorkerLost
from tilth.engines.completion import RequestError
from tilth.process.restarts import RestartPolicy

REQUESTS = [request(i, most=4 + 4 * i, prompt=(5, 6, i)) for i in range(6)]


@pytest.fixture(scope="module")
def wanted():
    """Completions of REQUESTS, each alone in an engine."""
    return alone(REQUESTS)


def test_completions_are_those_of_an_engine_alone_whatever_their_company(wanted):
    async def staggered(room):
        async def late(one):
            await asyncio.sleep(0.002 * one.id)
            return (await gathered(room, [one]))[0]

        return await asyncio.gather(*map(late, REQUESTS))

    with opened() as room:
        together, apart = asyncio.run(gathered(room, REQUESTS)), asyncio.run(staggered(room))
        assert room.load == 0
    assert [t.tokens.tolist() for t in together] == [t.tokens.tolist() for t in apart] == wanted


def test_equal_ids_of_two_clients_are_two_requests():
    with opened() as room:
        one, other = asyncio.run(gathered(room, [request(3), request(3)]))
    assert one.tokens.tolist() == other.tokens.tolist() and one.id == other.id == 3


def test_beyond_its_places_a_room_takes_nothing():
    async def many(room):
        taken = room.admit([request(0), request(1)])
        with raises(RequestError, "serve.full"):
            room.admit([request(2), request(3)])
        assert room.load == 2
        taken += room.admit([request(2)])
        return [await one.whole() for one in taken]

    with opened(most=3) as room:
        assert len(asyncio.run(many(room))) == 3
        assert asyncio.run(gathered(room, [request(4)]))


def test_a_client_that_leaves_takes_its_request_along():
    async def leaving(room):
        stays = asyncio.create_task(gathered(room, [request(1, most=60)]))
        async for piece in room.generate(request(0, most=240)):
            if len(piece.tokens):
                break
        gone = asyncio.create_task(gathered(room, [request(2, most=240)]))
        await asyncio.sleep(0.01)
        gone.cancel()
        (found,) = await stays
        while room.load or room.status()["in_flight"]:
            await asyncio.sleep(0.01)
        return found

    with opened() as room:
        found = asyncio.run(leaving(room))
        counts = room.status()
    assert [found.tokens.tolist()] == alone([request(1, most=60)])
    assert counts["decoded_tokens"] < 200


def test_a_request_that_cannot_be_served_fails_alone():
    async def both(room):
        return await asyncio.gather(
            *(gathered(room, [r]) for r in (request(0), request(1, most=999))), return_exceptions=True
        )

    with opened() as room:
        (good,), bad = asyncio.run(both(room))
    assert good.finish == "length" and isinstance(bad, DataError) and bad.key == "request.max_tokens"


def test_a_loop_that_is_gone_does_no_harm():
    async def left(room):
        room.admit([request(0, most=200)])

    with opened() as room:
        asyncio.run(left(room))
        assert asyncio.run(gathered(room, [request(1)]))


def test_a_room_that_closes_lets_finish_and_takes_nothing():
    async def closing(room):
        short = asyncio.create_task(gathered(room, [request(0, most=40)]))
        await asyncio.sleep(0)
        closed = asyncio.create_task(asyncio.to_thread(room.close))
        await asyncio.sleep(0.005)
        with raises(RequestError, "serve.closing"):
            room.admit([request(1)])
        await closed
        return (await short)[0]

    with opened() as room:
        assert asyncio.run(closing(room)).finish == "length"
        assert not room._thread.is_alive()


def test_what_does_not_finish_in_time_fails_by_name():
    async def closing(room):
        (long,) = room.admit([request(0, most=250)])
        async for _ in long:
            break
        (long,) = room.admit([request(0, most=250)])
        await asyncio.to_thread(room.close, 0.0)
        with raises(RequestError, "serve.closed"):
            await long.whole()

    with opened() as room:
        asyncio.run(closing(room))


def test_a_call_is_answered_between_rounds():
    async def called(room):
        playing = asyncio.create_task(gathered(room, [request(0, most=40)]))
        found = await room.call("abilities")
        with raises(DataError, "request.adapter"):
            await room.remove_adapter("none")
        await playing
        return found

    with opened() as room:
        if not room.abilities.adapts:
            pytest.skip("no engine adapts yet")
        assert asyncio.run(called(room)) == room.abilities


@pytest.fixture
def failing():
    Failing.left, Failing.after = [], 3
    yield Failing
    Failing.left = []


def test_after_an_engine_broke_requests_begin_again_and_streams_go_on(failing, wanted):
    failing.left = [RuntimeError("broken")] * 2
    with opened(make=failing_engine) as room:
        found = asyncio.run(gathered(room, REQUESTS))  # it compares pieces with the whole
        assert room.restarts == 2
    assert [t.tokens.tolist() for t in found] == wanted


def test_a_request_that_breaks_every_engine_fails_by_name(failing):
    failing.left = [WorkerLost(f"gone {i}", key="serve.advance") for i in range(3)]
    with opened(make=failing_engine) as room:
        with raises(WorkerLost, "serve.advance"):
            asyncio.run(gathered(room, [request(0)]))
        assert asyncio.run(gathered(room, [request(1)])) and room.restarts == 3


@pytest.mark.parametrize("place", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 5))])
def test_a_request_that_breaks_every_worker_fails_alone(place, wanted):
    async def beside(room):
        asked = [*REQUESTS[:place], request(99, prompt=(5, POISON)), *REQUESTS[place:]]
        taken = room.admit(asked)
        while room.restarts < 2:
            await asyncio.sleep(0.001)
        taken += room.admit([request(50)])
        return await asyncio.gather(*(one.whole() for one in taken), return_exceptions=True)

    with opened(make=failing_engine, kind=Poisoned) as room:
        found = asyncio.run(beside(room))
        assert room.restarts <= 7 and not room.load
    lost = found.pop(place)
    assert isinstance(lost, WorkerLost) and lost.key == "serve.advance"
    assert [t.tokens.tolist() for t in found] == wanted + alone([request(50)])


def test_a_worker_that_dies_of_everything_fails_all_that_is_there(failing, monkeypatch):
    monkeypatch.setattr("tilth.engines.client.RESTARTS", RestartPolicy(attempts=3, fruitless=4))
    failing.left = [WorkerLost("gone", key="serve.advance")] * 5
    with opened(make=failing_engine) as room:
        with raises(WorkerLost, "serve.advance"):
            asyncio.run(gathered(room, REQUESTS))
        assert asyncio.run(gathered(room, REQUESTS)) and room.restarts == 5


def test_a_call_that_breaks_every_worker_fails_alone():
    async def beside(room):
        room.group.score_texts = lambda *arguments: 1 / 0
        playing = asyncio.create_task(gathered(room, [request(0, most=40)]))
        with pytest.raises(ZeroDivisionError):
            await room.call("score_texts", [[1]], 0, "", idempotent=True)
        return (await playing)[0]

    with opened() as room:
        found = asyncio.run(beside(room))
        assert room.restarts == 3 and [found.tokens.tolist()] == alone([request(0, most=40)])


def test_an_error_of_the_weights_is_that_of_all_requests(failing):
    failing.left = [NonFiniteError("nan", key="logits")]
    with opened(make=failing_engine) as room:
        with raises(NonFiniteError, "logits"):
            asyncio.run(gathered(room, [request(0), request(1)]))
        assert asyncio.run(gathered(room, [request(1)]))


def test_a_room_whose_worker_cannot_start_again_says_so(failing, monkeypatch):
    failing.left = [RuntimeError("broken")]
    with opened(make=failing_engine) as room:
        monkeypatch.setattr(room.cluster, "make", lambda group: 1 / 0)
        with raises(RequestError, "serve.worker"):
            asyncio.run(gathered(room, [request(0)]))
        with raises(RequestError, "serve.failed"):
            asyncio.run(gathered(room, [request(1)]))


def test_another_completion_after_a_restart_is_noticed(failing):
    async def changed(room):
        async for piece in room.generate(request(0, most=60)):
            for completion in room._running.values():
                completion._said = [99 - token for token in completion._said]
            failing.left, failing.after = [RuntimeError("broken")], 0

    with opened(make=failing_engine) as room, raises(RequestError, "serve.replay"):
        asyncio.run(changed(room))


@pytest.mark.dist
def test_a_worker_that_is_killed_is_started_again(wanted):
    async def killed(room):
        tokens, pid = [], room.cluster.backend.links[0].pid
        others = asyncio.create_task(gathered(room, REQUESTS))
        async for piece in room.generate(request(50, most=60)):
            if len(tokens) < 20 <= len(tokens) + len(piece.tokens):
                os.kill(pid, signal.SIGKILL)
            tokens += piece.tokens.tolist()
        assert room.cluster.backend.links[0].pid != pid and np.array_equal(piece.whole.tokens[3:], tokens)
        return [piece.whole, *await others]

    with opened("local") as room:
        found = asyncio.run(killed(room))
        assert room.restarts == 1
    assert [t.tokens.tolist() for t in found] == alone([request(50, most=60)]) + wanted
