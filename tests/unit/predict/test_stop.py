"""A signal stops a run in good order, a second one ends the process."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mindformers_ext.predict import JobStoppedError, StopSignals
from mindformers_ext.predict import stop as stop_module

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_an_error_at_the_next_check_and_handlers_are_put_back(number, log):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        signals.check()
        os.kill(os.getpid(), number)
        with pytest.raises(JobStoppedError, match=f"{number.name} was received"):
            signals.check()
    assert signal.getsignal(number) is before
    assert f"{number.name}: the run stops after this step" in log.text


def test_the_same_interrupt_from_terminal_and_launcher_is_one(monkeypatch):
    monkeypatch.setattr(stop_module, "_SAME_SIGNAL_SECONDS", 3600.0)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGINT"


SECOND = """
import os, signal
from mindformers_ext.predict import StopSignals, stop
stop._SAME_SIGNAL_SECONDS = -1.0
with StopSignals():
    os.kill(os.getpid(), signal.SIGTERM)
    print("first", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("second", flush=True)
"""


def test_a_second_signal_ends_the_process_at_once():
    done = subprocess.run([sys.executable, "-c", SECOND], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "first\n")


def test_other_threads_than_the_main_one_can_run_without_signals():
    caught = []

    def body():
        try:
            with StopSignals() as signals:
                signals.check()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert caught == []
