"""Saved checkpoints read back exactly, and an interruption at any moment leaves a whole checkpoint behind."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindformers_ext.checkpoint import CheckpointError, load_training_state, load_weights, save_checkpoint
from mindformers_ext.checkpoint.save import COMMON_KEYS
from tests.unit.checkpoint import toy

LAYOUT = toy.make_layout()
PARAMETERS = toy.parameters(toy.hf_weights(), LAYOUT)
OPTIMIZER = {f"{kind}.{name}": array * 2 for kind in ("adam_m", "adam_v") for name, array in PARAMETERS.items()}
COMMON = {
    "global_step": 7,
    "consumed_samples": 56,
    "epoch_num": 0,
    "rng": {"seed": 3, "state": [1, 2]},
    "lr": 0.1 + 0.2,
}
EMBEDDING = "embedding.word_embeddings.weight"
TRACKER = "latest_checkpointed_iteration.txt"


def shifted(by: float) -> dict[str, np.ndarray]:
    return {name: array + np.float32(by) for name, array in PARAMETERS.items()}


def loaded(path: Path) -> dict[str, np.ndarray]:
    model = toy.Model()
    load_weights(path, LAYOUT, model.assign)
    return model.arrays


def test_a_saved_checkpoint_reads_back_exactly(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "run" / "ckpt", 7, PARAMETERS, OPTIMIZER, COMMON)
    root = folder.parent
    assert sorted(path.name for path in root.iterdir()) == ["iteration_00000007", TRACKER]
    assert (root / TRACKER).read_text() == "7"
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint-model-0000000-0000001.safetensors",
        "checkpoint-opt-0000000-0000001.safetensors",
        "common.json",
        "trainer_state.json",
    ]
    toy.assert_same(loaded(root), PARAMETERS)
    for path in (root, folder):
        with load_training_state(path) as state:
            assert (state.step, state.folder) == (7, folder)
            assert state.optimizer_tensors is not None
            toy.assert_same(loaded(state.folder), PARAMETERS)
            toy.assert_same(dict(state.optimizer_tensors), OPTIMIZER)
            assert {key: state.common[key] for key in COMMON} == COMMON


def test_common_json_has_exactly_the_keys_of_mindspore_transformers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 7, PARAMETERS, None, COMMON)
    assert set(json.loads((folder / "common.json").read_text())) == set(COMMON_KEYS)
    assert set(json.loads((folder / "trainer_state.json").read_text())) == set(COMMON) - set(COMMON_KEYS)


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    types = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", ">f4"]
    tensors = {f"t.{kind}": np.arange(3).astype(kind) for kind in types}
    tensors.update({"scalar": np.float32(3.5).reshape(()), "empty": np.zeros((0, 4), np.float32)})
    tensors["transposed"] = np.arange(6, dtype=np.float32).reshape(2, 3).T
    folder = save_checkpoint(tmp_path, 1, tensors, None, {})
    read = load_file(folder / toy.rank_file())
    assert set(read) == set(tensors)
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype.newbyteorder("=") and read[name].shape == array.shape
        np.testing.assert_array_equal(read[name], array)


def test_optimizer_may_be_left_out_and_the_prefix_too(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 2, PARAMETERS, None, {}, prefix=None)
    assert (folder / "model-0000000-0000001.safetensors").is_file()
    toy.assert_same(loaded(tmp_path), PARAMETERS)
    with load_training_state(tmp_path) as state:
        assert state.optimizer_tensors is None
        assert state.step == 2


def test_only_the_runs_own_checkpoints_are_pruned(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, PARAMETERS, None, {})
    written: list[Path] = []
    for step in (2, 3, 4, 4, 5):
        save_checkpoint(tmp_path, step, shifted(step), None, {}, save_max=2, written=written)
    kept = ["iteration_00000001", "iteration_00000004", "iteration_00000005"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, TRACKER]
    assert [path.name for path in written] == kept[1:]
    toy.assert_same(loaded(tmp_path), shifted(5))


def test_a_checkpoint_that_cannot_be_deleted_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = [tmp_path / "iteration_00000001"]
    save_checkpoint(tmp_path, 2, PARAMETERS, None, {}, save_max=1, written=written)
    assert "could not delete the old checkpoint" in caplog.text
    toy.assert_same(loaded(tmp_path), PARAMETERS)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, PARAMETERS, OPTIMIZER, {}, prefix="old")
    save_checkpoint(tmp_path, 2, shifted(1), None, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_00000002", TRACKER]
    toy.assert_same(loaded(tmp_path), shifted(1))


class Failing(Mapping[str, np.ndarray]):
    """Tensors of which the last cannot be produced when it is written."""

    def __init__(self) -> None:
        self.accesses = 0

    def __getitem__(self, name: str) -> np.ndarray:
        self.accesses += 1
        if self.accesses == 2 * len(PARAMETERS):
            raise OSError(28, "No space left on device")
        return PARAMETERS[name]

    def __iter__(self) -> Iterator[str]:
        return iter(PARAMETERS)

    def __len__(self) -> int:
        return len(PARAMETERS)


def test_a_failed_save_leaves_no_trace(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 2, PARAMETERS, None, {})
    for step in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, step, Failing(), None, {})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_00000002", TRACKER]
        toy.assert_same(loaded(tmp_path), PARAMETERS)


# Saves in a forked child that kills itself before its n-th change of the disk, for n = 1, 2, ... until a save succeeds.
KILLED_SAVES = """
import itertools, os, signal, sys
from pathlib import Path
from mindformers_ext.checkpoint import save_checkpoint
from tests.unit.checkpoint import toy
base, step = Path(sys.argv[1]), int(sys.argv[2])
values = toy.parameters(toy.hf_weights(), toy.make_layout())
newer = {name: array + 1 for name, array in values.items()}
def dying(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
for left in itertools.count(1):
    root = base / f"{left:03d}"
    save_checkpoint(root, 5, values, None, {})
    child = os.fork()
    if child == 0:
        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, dying(getattr(os, name)))
        save_checkpoint(root, step, newer, None, {}, save_max=1, written=[root / "iteration_00000005"])
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


@pytest.mark.parametrize("step", [5, 10])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, step: int) -> None:
    """Step 10 replaces step 5 as the newest (and prunes it); step 5 replaces itself."""
    command = [sys.executable, "-c", KILLED_SAVES, str(tmp_path), str(step)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3], timeout=120)
    is_new = []
    for root in sorted(tmp_path.iterdir()):
        found = loaded(root)
        is_new.append(bool(np.array_equal(found[EMBEDDING], shifted(1)[EMBEDDING])))
        toy.assert_same(found, shifted(1) if is_new[-1] else PARAMETERS)
        save_checkpoint(root, step, shifted(2), None, {})
        toy.assert_same(loaded(root), shifted(2))
    assert len(is_new) > 10
    assert is_new == sorted(is_new), "the old checkpoint before some moment, the new one from then on"
    assert not is_new[0] and is_new[-1]


def test_saving_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    class Lazy(Mapping[str, np.ndarray]):
        def __getitem__(self, name: str) -> np.ndarray:
            return np.ones((512, 256), np.float32)

        def __iter__(self) -> Iterator[str]:
            return iter([str(number) for number in range(8)])

        def __len__(self) -> int:
            return 8

    tracemalloc.start()
    try:
        save_checkpoint(tmp_path, 1, Lazy(), None, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * 512 * 256 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step of a checkpoint must be 0 or more"),
        ({"save_max": 0}, "checkpoint.save_max must be 1 or more"),
        ({"prefix": "a/b"}, "checkpoint.prefix"),
        ({"common": {"x": object()}}, "trainer_state.json cannot be written as JSON"),
        ({"model_tensors": {"c": np.zeros(2, np.complex64)}}, "c has type complex64"),
        ({"model_tensors": {"__metadata__": np.zeros(2)}}, "__metadata__"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    arguments = {"step": 1, "model_tensors": PARAMETERS, "optimizer_tensors": None, "common": {}, **change}
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, **arguments)
    assert not list(tmp_path.glob("**/*.safetensors"))


# Resuming


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("common.json", None, "holds no training checkpoint"),
        ("common.json", "{", "common.json is not valid JSON"),
        ("common.json", '{"global_step": "7"}', "global_step must be a step number, not '7'"),
        ("trainer_state.json", "[1]", "trainer_state.json must hold a JSON object"),
        (toy.rank_file("opt"), "", "is empty"),
        (toy.rank_file(), None, "holds no training checkpoint"),
    ],
)
def test_a_damaged_training_checkpoint_is_refused(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    folder = save_checkpoint(tmp_path, 7, PARAMETERS, OPTIMIZER, COMMON)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_training_state(tmp_path)


def test_resuming_from_a_huggingface_folder_or_several_ranks_is_refused(tmp_path: Path) -> None:
    toy.write_single(tmp_path / "hf", toy.hf_weights())
    with pytest.raises(CheckpointError, match="holds no training checkpoint.*checkpoint.no_load_optim: true"):
        load_training_state(tmp_path / "hf")
    folder = save_checkpoint(tmp_path / "mf", 7, PARAMETERS, None, COMMON)
    (folder / toy.rank_file()).rename(folder / toy.rank_file(total=2))
    (folder / toy.rank_file(rank=1, total=2)).write_bytes(toy.file_bytes(PARAMETERS))
    with pytest.raises(CheckpointError, match="saved on 2 ranks.*checkpoint.no_load_optim: true"):
        load_training_state(tmp_path / "mf")
