"""Process-wide settings: device, execution mode, seeds and logging."""

from __future__ import annotations

import logging
import os
import random
import sys

import numpy as np

logger = logging.getLogger("mindformers_ext")

DEVICE_TARGETS = ("CPU", "Ascend")


def rank() -> int:
    """Returns the rank of this process, 0 outside a distributed job."""
    return int(os.environ.get("RANK_ID", "0"))


def world_size() -> int:
    """Returns the number of processes of the job that msrun started, 1 outside a distributed job."""
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def setup_logging(level: int = logging.INFO) -> None:
    """Sends the package's log to stderr; ranks other than 0 report warnings and errors only."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level if rank() == 0 else logging.WARNING)


def setup_runtime(device_target: str | None = None, seed: int | None = None, deterministic: bool = False) -> None:
    """Puts MindSpore into PyNative mode on one device and seeds every generator.

    Args:
        device_target: ``CPU`` or ``Ascend``; None takes Ascend where MindSpore finds one, the CPU otherwise.
        seed: seed of Python, numpy and MindSpore; None leaves them alone.
        deterministic: asks MindSpore for deterministic kernels.

    Raises:
        ValueError: unknown device target.
    """
    import mindspore as ms

    if device_target is not None and device_target not in DEVICE_TARGETS:
        raise ValueError(f"device_target {device_target!r} is not one of {', '.join(DEVICE_TARGETS)}")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    if device_target is not None:
        ms.set_device(device_target)
    if ms.get_context("device_target") == "CPU":
        # Asynchronous dispatch makes threads spin for each other on few cores: three times slower.
        ms.runtime.launch_blocking()
    if deterministic:
        ms.set_deterministic(True)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        ms.set_seed(seed)
