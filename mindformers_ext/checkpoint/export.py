"""Turn a checkpoint into a HuggingFace model folder: ``python -m mindformers_ext.checkpoint.export``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mindformers_ext.checkpoint.files import read_json_object
from mindformers_ext.checkpoint.huggingface import EXPORT_DTYPES, save_hf_checkpoint
from mindformers_ext.checkpoint.load import open_weights
from mindformers_ext.checkpoint.locate import checkpoint_folder, model_files_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 after a message on stderr."""
    parser = argparse.ArgumentParser(prog="python -m mindformers_ext.checkpoint.export", description=__doc__)
    parser.add_argument("--load_path", required=True, help="root of the iterations, an iteration folder or a HF folder")
    parser.add_argument("--output", required=True, help="HuggingFace folder to make; new or empty")
    parser.add_argument("--dtype", default="bfloat16", choices=EXPORT_DTYPES)
    parser.add_argument("--max_shard_bytes", type=int, default=5_000_000_000)
    options = parser.parse_args(arguments)
    try:
        _export(options.load_path, options.output, options.dtype, options.max_shard_bytes)
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _export(load_path: str, output: str, dtype: str, max_shard_bytes: int) -> None:
    from mindformers_ext.models.families import saved_config, weight_layout_of  # only this needs model families

    source = model_files_folder(checkpoint_folder(load_path))
    config = read_json_object(source / "config.json")
    layout = weight_layout_of(config)
    with open_weights(load_path, layout) as reader:
        files = save_hf_checkpoint(output, layout, reader.read, saved_config(config), dtype, max_shard_bytes, source)
        print(f"{reader.report.summary()} -> {output} ({dtype}, {len(files)} file(s))")


if __name__ == "__main__":
    raise SystemExit(main())
