"""The time from a command to its first token, on a checkpoint of a given shape with random bfloat16 weights."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
_TOKENIZER = ROOT / "configs" / "quickstart" / "tokenizer"


def write_checkpoint(folder: pathlib.Path, shape: dict[str, Any]) -> int:
    """Writes config.json, a tokenizer and random weights of a qwen3 model; returns the bytes of the weights."""
    from mindformers_ext.models import transformer_config
    from mindformers_ext.models.families import weight_layout

    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **shape}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for source in _TOKENIZER.iterdir():
        shutil.copy(source, folder)
    layout = weight_layout(transformer_config({}, config))
    tensors = [
        (name, size)
        for mapping in layout.mappings
        for name, size in zip(mapping.sources, mapping.source_shapes, strict=True)
    ]
    header, at = {}, 0
    for name, size in tensors:
        end = at + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(0)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, size in tensors:
            values = generator.standard_normal(size, np.float32) * np.float32(0.02)
            values = np.ones(size, np.float32) if len(size) == 1 and name.endswith("norm.weight") else values
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return at


def startup(shape: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Runs a prediction of one record and one token in several types of weights.

    Each runs twice and the second counts, when the files are in the cache of the system. Its end is the first token.

    Returns:
        By type: seconds of the whole command, and the most memory in MiB; and the seconds of importing mindspore.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "model").mkdir()
        size = write_checkpoint(folder / "model", shape)
        (folder / "prompts.jsonl").write_text('{"instruction": "hello"}\n', encoding="utf-8")
        results = {}
        for weight_dtype in ("auto", "float32", "int8"):
            (folder / "job.yaml").write_text(_yaml(folder, weight_dtype), encoding="utf-8")
            runs = [_run(folder) for _ in range(2)]
            results[weight_dtype] = runs[-1]
            print(
                f"{weight_dtype:<8}  {runs[-1]['seconds']:.2f} s to the first token ({size / 1e9:.2f} GB of weights), ",
                end="",
            )
            print(f"{runs[-1]['peak_mib']:.0f} MiB at most")
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mindspore"], check=True)
    results["import mindspore"] = {"seconds": time.perf_counter() - started}
    print(f"import mindspore alone: {results['import mindspore']['seconds']:.2f} s")
    return results


def _yaml(folder: pathlib.Path, weight_dtype: str) -> str:
    return (
        f"run_mode: predict\ncheckpoint: {{load_path: {folder / 'model'}, weight_dtype: {weight_dtype}}}\n"
        f"inference: {{input_data: {folder / 'prompts.jsonl'}, max_new_tokens: 1, batch_size: 1, "
        f"output: {folder / 'out.jsonl'}}}\npredict: {{progress: false, resume: false}}\n"
    )


def _run(folder: pathlib.Path) -> dict[str, float]:
    for file in folder.glob("out.jsonl*"):
        file.unlink()
    started = time.perf_counter()
    command = [sys.executable, str(ROOT / "run_mindformer.py"), "--config", str(folder / "job.yaml")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        log = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}:\n{log}")
    return {"seconds": time.perf_counter() - started, "peak_mib": usage.ru_maxrss / 1024}
