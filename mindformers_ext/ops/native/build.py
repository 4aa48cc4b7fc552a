"""Compiles the kernels once a machine and keeps the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from mindformers_ext.runtime import logger, world_size

_FOLDER = pathlib.Path(__file__).parent
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
_HEADERS = sorted(_FOLDER.glob("*.h"))
# Contracted multiply-adds and no errno; infinities and nan keep their meaning.
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-std=c++17")
_COMPILE_SECONDS = 300
_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "mfx_set_threads": (ctypes.c_int,),
    "mfx_linear": (*[_POINTER] * 4, *[_INT] * 3),
    "mfx_rms_norm": (*[_POINTER] * 3, *[_INT] * 2, _FLOAT),
    "mfx_add_rms_norm": (*[_POINTER] * 5, *[_INT] * 2, _FLOAT),
    "mfx_swiglu": (*[_POINTER] * 2, *[_INT] * 2, _FLOAT),
    "mfx_experts": (*[_POINTER] * 8, *[_INT] * 4, _FLOAT),
    "mfx_qkv_heads": (*[_POINTER] * 8, *[_INT] * 7, _FLOAT),
    "mfx_attention_weights": (*[_POINTER] * 2, *[_INT] * 5, _FLOAT),
    "mfx_attend": (*[_POINTER] * 6, *[_INT] * 6, _FLOAT),
    "mfx_split_latent": (*[_POINTER] * 7, *[_INT] * 5, _FLOAT),
    "mfx_absorb_query": (*[_POINTER] * 5, *[_INT] * 8),
    "mfx_attend_latent": (*[_POINTER] * 5, *[_INT] * 6, _FLOAT),
    "mfx_latent_values": (*[_POINTER] * 3, *[_INT] * 5),
    "mfx_hyper_collapse": (*[_POINTER] * 8, *[_INT] * 4, _FLOAT, _FLOAT),
    "mfx_hyper_expand": (*[_POINTER] * 5, *[_INT] * 3),
    "mfx_partial_rotary": (*[_POINTER] * 5, *[_INT] * 5, _FLOAT, _FLOAT),
    "mfx_sink_attention": (*[_POINTER] * 10, *[_INT] * 9, _FLOAT),
    "mfx_index_scores": (*[_POINTER] * 4, *[_INT] * 6),
    "mfx_causal_conv": (_POINTER, _INT, *[_POINTER] * 3, *[_INT] * 4),
    "mfx_gated_delta_rule": (*[_POINTER] * 5, *[_INT] * 6),
    "mfx_panel_rows": (),
    "mfx_pack": (*[_POINTER] * 2, ctypes.c_int32, *[_INT] * 2, *[_POINTER] * 2),
    "mfx_product": (*[_POINTER] * 3, _INT, _POINTER, _FLOAT),
    "mfx_packed_rows": (*[_POINTER] * 2, _INT, _POINTER),
    "mfx_attention_block": (*[_POINTER] * 10, *[_INT] * 5),
    "mfx_read": (_POINTER, _INT),
    "mfx_multiply_adds": (_INT, _FLOAT),
    "mfx_dense_layers": (_POINTER, _INT, *[_POINTER] * 8, *[_INT] * 5, _FLOAT, _FLOAT),
    "mfx_sequences_at_once": (_INT, _INT),
    "mfx_mlp": (*[_POINTER] * 5, _INT, _FLOAT),
    "mfx_packed_experts": (*[_POINTER] * 8, _INT, _FLOAT),
    "mfx_gated_rms_norm": (*[_POINTER] * 2, _INT, *[_POINTER] * 2, *[_INT] * 3, _FLOAT),
}


def load_library() -> ctypes.CDLL | None:
    """Returns the kernels; None, after one line of log, where they cannot be built.

    ``MINDFORMERS_EXT_KERNELS=numpy`` turns them off.
    """
    if os.environ.get("MINDFORMERS_EXT_KERNELS") == "numpy":
        return None
    try:
        library = _opened()
        _ = library.mfx_attend  # a compiler that makes nothing useful
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("no C++ kernels (%s); numpy is used instead, which is slower", _reason(error))
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    for name in ("mfx_panel_rows", "mfx_sequences_at_once", "mfx_read", "mfx_multiply_adds"):
        getattr(library, name).restype = _INT
    library.mfx_set_threads(num_threads())
    return library


def instruction_set(library: ctypes.CDLL) -> str:
    """Returns the vectors that the kernels were compiled for."""
    bits = 16 * int(library.mfx_panel_rows())
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    return {512: "AVX-512", 256: "AVX2"}.get(bits, "SSE") if on_x86 else f"{bits}-bit vectors"


def num_threads() -> int:
    """Threads for this process: ``OMP_NUM_THREADS``, or its share of the cores that the system lets the job use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # a container's limit: "<microseconds> <period>", or "max <period>"
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores // world_size())


def _opened() -> ctypes.CDLL:
    path = _library_path()
    # Opening a library that was cut short ends the process with SIGBUS, so its checksum is looked at first.
    checksum = path.with_suffix(".sha256")
    try:
        whole = checksum.read_text(encoding="ascii") == _digest(path)
    except OSError:
        whole = False
    if not whole:
        _compile(path)
        checksum.write_text(_digest(path), encoding="ascii")
    return ctypes.CDLL(str(path))


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _library_path() -> pathlib.Path:
    """Returns where the library of this source, compiler and processor belongs.

    Raises:
        OSError: no compiler, or no folder to write to.
        subprocess.SubprocessError: the compiler does not run.
    """
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], check=True, capture_output=True, timeout=_COMPILE_SECONDS)
    sources = b"|".join(path.read_bytes() for path in (*_HEADERS, *_SOURCES))
    parts = (sources, shlex.join([*compiler, *_FLAGS]).encode(), version.stdout, _processor().encode())
    return _cache_folder() / f"kernels-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def _compile(library: pathlib.Path) -> None:
    """Compiles the sources side by side and links them."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [pathlib.Path(folder, f"{source.stem}.o") for source in _SOURCES]
        commands = [
            [*_compiler(), *_FLAGS, "-fPIC", "-pthread", "-c", "-o", str(target), str(source)]
            for source, target in zip(_SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(num_threads()) as compilers:
            list(compilers.map(_run, commands))
        linked = pathlib.Path(folder, library.name)
        _run([*_compiler(), "-shared", "-pthread", "-o", str(linked), *map(str, objects)])
        os.replace(linked, library)  # at once: another process may be compiling the same


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_SECONDS)


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX") or "g++")
    if not command or shutil.which(command[0]) is None:
        raise FileNotFoundError(f"there is no {' '.join(command)}")
    return command


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"{error.cmd[0]} failed: {lines[-1]}" if lines else f"{error.cmd[0]} failed"
    return " ".join(str(error).split())


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
