"""Compiles the kernels once a machine and keeps the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

from mindformers_ext.runtime import logger

_SOURCE = pathlib.Path(__file__).with_name("kernels.cpp")
# Contracted multiply-adds and no errno; infinities and nan keep their meaning.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-std=c++17")
_COMPILE_SECONDS = 120
_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "mfx_set_threads": (ctypes.c_int,),
    "mfx_linear": (*[_POINTER] * 4, *[_INT] * 3),
    "mfx_rms_norm": (*[_POINTER] * 3, *[_INT] * 2, _FLOAT),
    "mfx_add_rms_norm": (*[_POINTER] * 5, *[_INT] * 2, _FLOAT),
    "mfx_swiglu": (*[_POINTER] * 2, *[_INT] * 2),
    "mfx_qkv_heads": (*[_POINTER] * 8, *[_INT] * 5, _FLOAT),
    "mfx_attention_weights": (*[_POINTER] * 2, *[_INT] * 5, _FLOAT),
    "mfx_attend": (*[_POINTER] * 5, *[_INT] * 6, _FLOAT),
}


def load_library() -> ctypes.CDLL | None:
    """Returns the kernels; None, after one line of log, where they cannot be built.

    ``MINDFORMERS_EXT_KERNELS=numpy`` turns them off.
    """
    if os.environ.get("MINDFORMERS_EXT_KERNELS") == "numpy":
        return None
    try:
        library = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()[0]
        logger.warning("no C++ kernels (%s); numpy is used instead, which is slower", reason)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.mfx_set_threads(len(os.sched_getaffinity(0)))
    return library


def _built() -> pathlib.Path:
    """Returns the path of the compiled library, after compiling it if it is not there.

    Raises:
        OSError: no compiler, or no folder to write to.
        subprocess.SubprocessError: the compiler failed.
    """
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise FileNotFoundError(f"there is no {name}")
    identity = "\0".join((_SOURCE.read_text(encoding="utf-8"), *_FLAGS, _version(compiler), _processor()))
    folder = _cache_folder()
    library = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as temporary:
            command = [compiler, *_FLAGS, "-shared", "-fPIC", "-pthread", "-o", temporary.name, str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
            os.replace(temporary.name, library)  # another process may be compiling the same
        except BaseException:
            os.unlink(temporary.name)
            raise
    return library


def _version(compiler: str) -> str:
    result = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS
    )
    return result.stdout


def _processor() -> str:
    """Whatever tells two processors apart: the code is made for one of them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


def _cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for folder in (
        pathlib.Path(base, "mindformers_ext"),
        pathlib.Path(tempfile.gettempdir(), f"mindformers_ext-{os.getuid()}"),
    ):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        # A library that somebody else could replace must not be loaded.
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022:
            return folder
    raise PermissionError("there is no cache folder to write the library to")
