"""Checkpoints on disk: HuggingFace and MindFormers folders, read, checked and written. Never imports mindspore."""

from mindformers_ext.checkpoint.digest import weights_digest
from mindformers_ext.checkpoint.distributed import Part, save_distributed
from mindformers_ext.checkpoint.errors import CheckpointError
from mindformers_ext.checkpoint.files import read_model_json
from mindformers_ext.checkpoint.huggingface import save_hf_checkpoint, write_model_files
from mindformers_ext.checkpoint.load import (
    CheckReport,
    LoadReport,
    WeightReader,
    check_weights,
    load_weights,
    open_weights,
)
from mindformers_ext.checkpoint.locate import (
    Location,
    has_iterations,
    locate_checkpoint,
    model_files_folder,
    saved_step,
)
from mindformers_ext.checkpoint.resume import TensorReader, TrainingState, load_training_state
from mindformers_ext.checkpoint.save import check_no_other_run, check_save_path, keep_only, save_checkpoint

__all__ = [
    "CheckReport",
    "CheckpointError",
    "LoadReport",
    "Location",
    "Part",
    "TensorReader",
    "TrainingState",
    "WeightReader",
    "check_no_other_run",
    "check_save_path",
    "check_weights",
    "has_iterations",
    "keep_only",
    "load_training_state",
    "load_weights",
    "locate_checkpoint",
    "model_files_folder",
    "open_weights",
    "read_model_json",
    "save_checkpoint",
    "save_distributed",
    "save_hf_checkpoint",
    "saved_step",
    "weights_digest",
    "write_model_files",
]
