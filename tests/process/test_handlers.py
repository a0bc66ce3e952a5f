"""Handlers of signals hold for their block, and only in the main thread."""

import signal
import threading

import pytest

from tilth.process.handlers import handling


def test_a_signal_is_handled_in_the_block_and_as_before_behind_it():
    before, heard = signal.getsignal(signal.SIGUSR2), []
    with pytest.raises(RuntimeError), handling({signal.SIGUSR2: lambda number, frame: heard.append(number)}) as able:
        signal.raise_signal(signal.SIGUSR2)
        assert able and heard == [signal.SIGUSR2]
        raise RuntimeError
    assert signal.getsignal(signal.SIGUSR2) is before


def test_another_thread_changes_nothing():
    before, seen = signal.getsignal(signal.SIGUSR2), []

    def work():
        with handling({signal.SIGUSR2: signal.SIG_IGN}) as able:
            seen.append((able, signal.getsignal(signal.SIGUSR2)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
