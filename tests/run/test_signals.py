"""SIGINT and SIGTERM: the first asks, the second insists, the third does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from megatrain.run.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_second_insists_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_third_signal_ends_a_process_that_hangs() -> None:
    code = """
        import os, signal, time
        from megatrain.run.signals import StopSignals
        with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
                except KeyboardInterrupt:
                    pass
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 130
    assert "signal again to stop now" in done.stderr


def test_another_thread_than_the_main_one_installs_no_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with StopSignals() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
    assert signal.getsignal(signal.SIGTERM) is before
