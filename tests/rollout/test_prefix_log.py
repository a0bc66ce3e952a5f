"""Tokens of samples in flight come back from the files of all ranks, but those that are torn or void."""

import numpy as np
import pytest

from tests.errors import raises
from tilth.core.errors import StorageError
from tilth.core.media import MediaItem
from tilth.engines.request import Request, SamplingParams
from tilth.rollout.prefix_log import DrawnTokens, PrefixLog

PROMPT = np.array([9, 8, 7])
SPANS = [(3, 4), (9, 5), (13, 6)]
"""Versions of the policy that drew 10 tokens and more behind the prompt."""


def asked(i=0, **params):
    return Request(i, PROMPT, SamplingParams(max_tokens=20, **params), group=3, prompt_index=5)


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


def test_files_of_samples_that_are_done_are_dropped(tmp_path):
    log, other = PrefixLog(tmp_path, 1, 4, 0), PrefixLog(tmp_path, 1, 4, 1)
    other.write([drawn(0, 1, asked(1))])
    for i in (1, 4, 7):
        log.write([drawn(0, 3, asked(i)), drawn(0, 3, asked(i + 1))])
        log.forget(3)
    assert sorted(path.name[15:] for path in tmp_path.glob("*.bin")) == [
        "rank-0-part-000001.bin",
        "rank-0-part-000002.bin",
        "rank-1-part-000000.bin",
    ]
    assert said(log.take(asked(4))) == told(3) and log.take(asked(2)) is None
    log.forget(9)
    assert [path.name[15:21] for path in tmp_path.glob("*.bin")] == ["rank-1"]


def test_a_disk_that_refuses_is_named(tmp_path):
    log = PrefixLog(tmp_path / "log", 1, 4, 0)
    (tmp_path / "log" / "attempt-000001-rank-0-part-000000.bin").mkdir()
    with raises(StorageError, "attempt-000001-rank-0-part-000000.bin"):
        log.write([drawn(0, 1)])
    (tmp_path / "file").write_text("")
    with raises(StorageError, "file"):
        PrefixLog(tmp_path / "file", 1, 4, 0)
