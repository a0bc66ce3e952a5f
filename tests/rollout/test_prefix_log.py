"""Tokens of samples in flight come back from the files of all ranks, but those that are torn or void."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.errors import raises
from tilth.core.errors import StorageError
from tilth.core.media import MediaItem
from tilth.engines.request import Progress, Request, SamplingParams
from tilth.rollout.prefix_log import DrawnTokens, FlightLog, PrefixLog

PROMPT = np.array([9, 8, 7])
SPANS = [(3, 4), (9, 5), (13, 6)]
"""Versions of the policy that drew 10 tokens and more behind the prompt."""


def asked(i=0, group=3, **params):
    return Request(i, PROMPT, SamplingParams(max_tokens=20, **params), group=group, prompt_index=5)


def drawn(start, stop, request=None, finish=None, filtered=False):
    """Tokens [start, stop) of a completion, each a hundred and its place."""
    places = np.arange(start, stop)
    logprobs = -places.astype(np.float32) / 7
    spans = [span for span in SPANS if span[0] < 3 + stop]
    sampling = logprobs / 2 if filtered else None
    return DrawnTokens(
        request or asked(), start, 100 + places, logprobs, sampling, spans, finish, "ä" if finish else ""
    )


def said(t):
    return None if t is None else t.tokens.tolist()


def told(stop):
    return [9, 8, 7, *range(100, 100 + stop)]


def test_a_sample_comes_back_on_any_rank_with_all_its_columns(tmp_path):
    one, other = PrefixLog(tmp_path, 1, 4, rank=0), PrefixLog(tmp_path, 1, 4, rank=1)
    filtered, media = asked(1, top_k=3), Request(2, PROMPT, media=(MediaItem("eye", 0, 1, b"1"),))
    for start, stop in ((0, 4), (4, 5), (5, 12)):
        one.write([drawn(start, stop), drawn(start, stop, filtered, filtered=True), drawn(start, stop, media)])
    one.write([drawn(12, 12, filtered, "stop", filtered=True)])
    t = other.take(asked())
    assert (said(t), t.mask.tolist(), t.versions) == (told(12), [0] * 3 + [1] * 12, SPANS)
    assert (t.id, t.prompt, t.group, t.finish, t.sampling_logprobs) == (0, 5, 3, "aborted", None)
    assert t.logprobs.dtype == np.float32 and np.array_equal(t.logprobs[3:], drawn(0, 12).logprobs)
    whole = other.take(filtered)
    assert (said(whole), whole.finish, whole.text) == (told(12), "stop", "ä")
    assert np.array_equal(whole.sampling_logprobs, whole.logprobs / 2)
    assert other.take(media).media == media.media and other.take(asked(7)) is None


def test_what_was_drawn_otherwise_is_not_taken(tmp_path):
    log = PrefixLog(tmp_path, 1, 4, 0)
    log.write([drawn(0, 4)])
    for other in (asked(temperature=0.5), Request(0, PROMPT[:2], asked().params), asked(stop_tokens=(4,))):
        assert log.take(other) is None
    assert said(log.take(asked())) == told(4)


def test_a_sample_that_moved_is_that_of_its_new_replica(tmp_path):
    one, other = PrefixLog(tmp_path, 1, 4, 0), PrefixLog(tmp_path, 1, 4, 1)
    one.write([drawn(0, 4)])
    one.write([drawn(4, 6)])
    other.write([drawn(0, 6)])
    other.write([drawn(6, 9)])
    assert said(one.take(asked())) == told(9)


@pytest.mark.parametrize(("version", "stop"), [(3, 0), (4, 6), (5, 10), (6, 12)])
def test_what_later_versions_drew_is_void_in_the_next_attempt(tmp_path, version, stop):
    PrefixLog(tmp_path, 1, 4, 0).write([drawn(0, 12, finish="stop")])
    t = PrefixLog(tmp_path, 2, version, 0).take(asked())
    assert said(t) == (told(stop) if stop else None)
    if stop:
        assert t.finish == ("stop" if stop == 12 else "aborted") and t.versions == [s for s in SPANS if s[0] < 3 + stop]
    PrefixLog(tmp_path, 3, 9, 0)
    assert said(PrefixLog(tmp_path, 4, 9, 0).take(asked())) == (told(stop) if stop else None)


def test_the_newest_attempt_that_knows_a_sample_is_right(tmp_path):
    PrefixLog(tmp_path, 1, 4, 0).write([drawn(0, 12)])
    PrefixLog(tmp_path, 2, 4, 1).write([drawn(0, 2)])
    assert said(PrefixLog(tmp_path, 3, 6, 0).take(asked())) == told(2)


@pytest.mark.parametrize("cut", [1, 20, 40, -1])
def test_a_torn_frame_ends_what_is_known(tmp_path, cut):
    log = PrefixLog(tmp_path, 1, 4, 0)
    log.write([drawn(0, 4)])
    (path,) = tmp_path.glob("*.bin")
    whole = path.stat().st_size
    log.write([drawn(4, 8)])
    log.write([drawn(8, 9)])
    data = bytearray(path.read_bytes())
    if cut < 0:
        data[whole + 100] ^= 1  # of the second frame
    path.write_bytes(data if cut < 0 else data[: whole + cut])
    assert said(PrefixLog(tmp_path, 2, 6, 1).take(asked())) == told(4)


def test_a_new_worker_of_an_attempt_writes_behind_what_the_lost_one_has_torn(tmp_path):
    PrefixLog(tmp_path, 1, 4, 0).write([drawn(0, 4), drawn(4, 8)])
    (path,) = tmp_path.glob("*.bin")
    path.write_bytes(path.read_bytes()[:-5])
    new = PrefixLog(tmp_path, 1, 4, 0)
    new.write([drawn(4, 9)])
    assert said(PrefixLog(tmp_path, 1, 4, 1).take(asked())) == told(9)
    new.forget(4)  # those of the lost one, too
    assert not [*tmp_path.glob("*.bin")]


def test_a_sample_that_began_again_under_other_weights_is_that_of_the_weights(tmp_path):
    """Also where its replica has died: both courses are of one attempt."""
    first, again = drawn(0, 4)._replace(versions=[(3, 4)]), drawn(0, 3)._replace(versions=[(3, 5)])
    PrefixLog(tmp_path, 1, 4, 0).write([first])
    log = PrefixLog(tmp_path, 1, 4, 1)
    log.write([again._replace(tokens=again.tokens + 50)])
    assert said(log.take(asked(), 5)) == [9, 8, 7, 150, 151, 152] and said(log.take(asked(), 4)) == told(4)
    assert log.take(asked(), 6) is None


def test_one_version_where_a_sample_has_one(tmp_path):
    log = PrefixLog(tmp_path, 1, 4, 0)
    log.write([drawn(0, 4), drawn(0, 8, asked(1))])
    assert said(log.take(asked(), 4)) == told(4) and said(log.take(asked(1))) == told(8)
    assert log.take(asked(), 5) is None and log.take(asked(1), 4) is None and log.take(asked(1), 5) is None


def test_what_older_weights_drew_is_not_taken(tmp_path):
    log = PrefixLog(tmp_path, 1, 4, 0)
    log.write([drawn(0, 8)])
    first = SPANS[0][1]
    assert said(log.take(asked(), least=first)) == told(8) and log.take(asked(), least=first + 1) is None


def test_turns_of_an_episode_are_told_apart_by_what_was_said_before(tmp_path):
    log, later = PrefixLog(tmp_path, 1, 4, 0), Request(0, np.array(told(4)), asked().params, group=3)
    log.write([drawn(0, 4, finish="stop"), drawn(0, 2, later)])
    assert said(log.take(asked())) == told(4) and said(log.take(later)) == [*told(4), 100, 101]


def test_files_of_samples_that_are_done_are_dropped(tmp_path):
    """Also those of ranks that are no longer there. Requests of a conversation have ids of their own."""
    PrefixLog(tmp_path, 1, 4, 5).write([drawn(0, 1, asked(1 << 60, 1))])
    PrefixLog(tmp_path, 1, 4, 6).write([drawn(0, 1, asked(5, 4))])
    log, other = PrefixLog(tmp_path, 2, 4, 0), PrefixLog(tmp_path, 2, 4, 1)
    other.write([drawn(0, 1, asked(1, 1))])
    for i in (1, 4, 7):
        log.write([drawn(0, 3, asked(i, i)), drawn(0, 3, asked(i + 1, i))])
        log.forget(3)
    assert sorted(path.name[15:] for path in tmp_path.glob("*.bin")) == [
        "rank-0-part-000001.bin",
        "rank-0-part-000002.bin",
        "rank-1-part-000000.bin",
        "rank-6-part-000000.bin",
    ]
    assert said(log.take(asked(4))) == told(3) and log.take(asked(2)) is None
    log.forget(9)
    assert [path.name[15:21] for path in tmp_path.glob("*.bin")] == ["rank-1"]


def test_tokens_of_a_request_are_logged_once_and_its_rest_is_drawn(tmp_path):
    """Up to where it is left for now, where that is before its end."""
    engine = SimpleNamespace(reports=True, version=4)
    one, request = FlightLog(PrefixLog(tmp_path, 1, 4, 0), engine), asked()
    one.begin(request)
    first = drawn(0, 4)
    one.write({0: Progress(first.tokens, first.logprobs, versions=first.versions)})
    assert [(row.tokens, row.left) for row in one.rows()] == [(7, 16)] and (one.still, one.peak) == (0, 7)
    one.write({})
    assert one.still == 1
    again = FlightLog(PrefixLog(tmp_path, 2, 4, 0), engine)
    for stop, most in ((23, 20), (22, 19), (8, 5), (7, None), (3, None)):
        again.stops = {0: stop}
        t = again.take(request)
        left = again.left(request)
        assert said(t) == told(4) and (None if left is None else left.max_tokens) == most
    t.tokens, t.mask, t.logprobs = np.array(told(9)), np.array([0] * 3 + [1] * 9), np.zeros(12, np.float32)
    t.finish = "length"
    assert again.end(t) and not [*again.rows()]
    again.flush()
    assert said(again.take(request)) == told(9)
    t.finish = "stop"
    assert not again.end(t)
    again.flush()
    assert again.take(request).finish == "stop" and not [*again.rows()]


@pytest.mark.parametrize("count", [2, 6])
def test_tokens_of_two_draws_of_a_sample_are_not_joined(tmp_path, count):
    """One replica went on from what it saw of a lost one, before it saw all: a third takes tokens of one of them."""

    def write(log, *tokens):
        log.write({0: Progress(np.array(tokens), np.zeros(len(tokens), np.float32), versions=SPANS[:1])})

    engine = SimpleNamespace(reports=True, version=4)
    lost, second, third = (FlightLog(PrefixLog(tmp_path, 1, 4, rank), engine) for rank in range(3))
    lost.begin(asked())
    write(lost, 100, 101)
    write(lost, 102, 103)
    lost.log.forget(0)  # the next file
    write(lost, 104, 105, 106, 107)
    late = max(tmp_path.glob("*.bin")).rename(tmp_path / "late")
    assert said(second.take(asked())) == told(4)
    write(second, *[50] * count)
    write(second, 51)
    late.rename(tmp_path / "attempt-000001-rank-0-part-000001.bin")
    assert said(third.take(asked())) == (told(8) if count > 4 else [*told(4), *[50] * count, 51])


def test_a_disk_that_refuses_is_named(tmp_path):
    log = PrefixLog(tmp_path / "log", 1, 4, 0)
    (tmp_path / "log" / "attempt-000001-rank-0-part-000000.bin").mkdir()
    with raises(StorageError, "attempt-000001-rank-0-part-000000.bin"):
        log.write([drawn(0, 1)])
    (tmp_path / "file").write_text("")
    with raises(StorageError, "file"):
        PrefixLog(tmp_path / "file", 1, 4, 0)
