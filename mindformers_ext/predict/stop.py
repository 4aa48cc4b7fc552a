"""How a run ends early without losing what is finished."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A terminal and a launcher may both pass on one interrupt.
_SAME_SIGNAL_SECONDS = 1.0


class JobStoppedError(Exception):
    """The run ended early; finished records are in the journal, and the same job goes on from there."""


class StopSignals:
    """Context manager in which SIGTERM and SIGINT ask for a stop; a second one ends the process at once.

    Outside the main thread, where Python has no signals, it does nothing.

    Attributes:
        received: name of the signal that came, None if none did.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, object] = {}

    def check(self) -> None:
        """Returns if no signal came.

        Raises:
            JobStoppedError: names the signal.
        """
        if self.received is not None:
            raise JobStoppedError(f"{self.received} was received")

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = signal.Signals(number).name, now
            logger.warning("%s: the run stops after this step; a second signal ends it at once", self.received)
        elif now - self._since > _SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
