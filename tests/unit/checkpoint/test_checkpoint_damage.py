"""A damaged or unclear checkpoint is refused with a sentence that names file and tensor, and nothing is assigned."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mindformers_ext.checkpoint import CheckpointError, check_weights, load_weights
from mindformers_ext.models.weights import WeightLayout
from tests.unit.checkpoint import toy

LAYOUT = toy.make_layout()
HF = toy.hf_weights()
SHARDS = toy.split(HF)
FIRST, SECOND, THIRD = (toy.shard_name(number) for number in (1, 2, 3))
IN_FIRST = next(iter(SHARDS[FIRST]))
INDEX = "model.safetensors.index.json"

Damage = Callable[[Path], object]


def refuse(path: Path, *wanted: str, layout: WeightLayout = LAYOUT) -> str:
    """Both ways in refuse the path with the same message, which holds all of ``wanted`` on one line."""

    def assign(name: str, array: np.ndarray) -> None:
        raise AssertionError(f"{name} was assigned from a bad checkpoint")

    with pytest.raises(CheckpointError) as loading:
        load_weights(path, layout, assign)
    with pytest.raises(CheckpointError) as checking:
        check_weights(path, layout)
    message = str(loading.value)
    assert message == str(checking.value)
    for text in wanted:
        assert text in message
    assert "\n" not in message
    return message


def without(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in HF.items() if key != name}


def rewrite(name: str, tensors: dict[str, np.ndarray]) -> Damage:
    return lambda folder: (folder / name).write_bytes(toy.file_bytes(tensors))


def cut(name: str, keep: int) -> Damage:
    return lambda folder: os.truncate(folder / name, keep)


def put(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def edit(changes: dict[str, object]) -> Damage:
    return lambda folder: toy.edit_index(folder / INDEX, changes)


def link_out(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / SECOND).rename(outside)
    (folder / SECOND).symlink_to(outside)


def link_folder_out(folder: Path) -> None:
    outside = folder.parent / "other"
    outside.mkdir()
    (folder / FIRST).rename(outside / FIRST)
    (folder / "sub").symlink_to(outside)
    toy.edit_index(folder / INDEX, {name: f"sub/{FIRST}" for name in SHARDS[FIRST]})


def replace_by_folder(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()


SIZE_FIRST = len(toy.file_bytes(SHARDS[FIRST]))

SHARDED_DAMAGE: dict[str, tuple[Damage, list[str]]] = {
    "missing shard": (lambda folder: (folder / SECOND).unlink(), ["missing files (1)", SECOND]),
    "dangling link": (
        lambda folder: [(folder / SECOND).unlink(), (folder / SECOND).symlink_to("gone.safetensors")],
        ["missing files (1)", SECOND],
    ),
    "shard is a folder": (replace_by_folder, ["missing files (1)", FIRST]),
    "missing key": (edit({toy.NORM: None}), [toy.NORM, INDEX]),
    "key in index only": (
        rewrite(FIRST, {name: array for name, array in SHARDS[FIRST].items() if name != IN_FIRST}),
        [f"missing tensors that {INDEX} lists (1)", f"{IN_FIRST} in {FIRST}"],
    ),
    "key in shard only": (
        rewrite(FIRST, {**SHARDS[FIRST], "model.extra": np.zeros(2)}),
        [f"tensors that {INDEX} does not list (1)", f"model.extra in {FIRST}"],
    ),
    "key listed in another file": (
        edit({IN_FIRST: SECOND}),
        [f"tensors in another file than {INDEX} says (1)", f"{IN_FIRST} in {FIRST} instead of {SECOND}"],
    ),
    "key in two files": (
        rewrite(SECOND, {**SHARDS[SECOND], IN_FIRST: HF[IN_FIRST]}),
        ["tensors in several files (1)", f"{IN_FIRST} in {FIRST}, {SECOND}"],
    ),
    "extra key": (
        lambda folder: [
            rewrite(FIRST, {**SHARDS[FIRST], "model.extra": np.zeros(2)})(folder),
            edit({"model.extra": FIRST})(folder),
        ],
        ["left over tensors, which the model does not have (1)", f"model.extra in {FIRST}"],
    ),
    "wrong shape": (
        rewrite(FIRST, {**SHARDS[FIRST], IN_FIRST: np.zeros((7, 4))}),
        ["wrong shapes (1)", f"{IN_FIRST} in {FIRST} is [7, 4], expected [6, 4]"],
    ),
    "truncated data": (
        cut(FIRST, SIZE_FIRST - 5),
        [FIRST, f"truncated: it has {SIZE_FIRST - 5} of {SIZE_FIRST} bytes"],
    ),
    "truncated header": (cut(FIRST, 40), [FIRST, "truncated"]),
    "zero bytes": (cut(FIRST, 0), [FIRST, "is empty (0 bytes)"]),
    "not safetensors": (put(FIRST, b"these are not weights at all"), [FIRST, "is not a safetensors file"]),
    "zeros": (put(FIRST, bytes(4096)), [FIRST, "is not a safetensors file"]),
    "pickle": (put(FIRST, b"\x80\x04\x95" + bytes(40)), [FIRST, "pickle", "only safetensors is read"]),
    "torch archive": (put(FIRST, b"PK\x03\x04" + bytes(40)), [FIRST, "zip archive", "only safetensors is read"]),
    "lfs pointer": (put(FIRST, b"version https://git-lfs.github.com/spec/v1\noid"), [FIRST, "git lfs pull"]),
    "web page": (put(FIRST, b"<!doctype html><html>not found</html>"), [FIRST, "web page"]),
    "trailing bytes": (
        lambda folder: (folder / FIRST).write_bytes(toy.file_bytes(SHARDS[FIRST]) + b"more"),
        [FIRST, "is damaged"],
    ),
    "index outside": (edit({IN_FIRST: "../x.safetensors"}), [INDEX, "outside", "'../x.safetensors'", IN_FIRST]),
    "index deep outside": (edit({IN_FIRST: "a/../../x.safetensors"}), [INDEX, "outside", IN_FIRST]),
    "index absolute": (edit({IN_FIRST: "/etc/x.safetensors"}), [INDEX, "outside", "/etc/x.safetensors", IN_FIRST]),
    "index windows": (edit({IN_FIRST: "..\\x.safetensors"}), [INDEX, "outside", IN_FIRST]),
    "index nul": (edit({IN_FIRST: "x\0.safetensors"}), [INDEX, "outside", IN_FIRST]),
    "link outside": (link_out, [INDEX, "outside the checkpoint folder through a link", SECOND]),
    "folder link outside": (link_folder_out, [INDEX, "outside the checkpoint folder through a link", f"sub/{FIRST}"]),
    "index names a pickle": (edit({IN_FIRST: "pytorch_model.bin"}), [INDEX, "only safetensors is read", IN_FIRST]),
    "index names a number": (edit({IN_FIRST: 7}), [INDEX, IN_FIRST, "must be a name"]),
    "index is no json": (put(INDEX, b'{"weight_map": {'), [INDEX, "not valid JSON"]),
    "index is a list": (put(INDEX, b"[]"), [INDEX, "JSON object"]),
    "index is empty": (put(INDEX, b""), [INDEX, "not valid JSON"]),
    "index without map": (put(INDEX, b'{"metadata": {}}'), [INDEX, "weight_map"]),
    "index with empty map": (put(INDEX, b'{"weight_map": {}}'), [INDEX, "weight_map"]),
    "index nests deeply": (put(INDEX, b'{"weight_map":' * 100_000), [INDEX, "not valid JSON"]),
    "index repeats a key": (put(INDEX, b'{"weight_map": {"a": "x", "a": "y"}}'), [INDEX, "'a' appears twice"]),
    "two indexes": (put("fp16.model.safetensors.index.json", b"{}"), ["several indexes", INDEX]),
    "index and single file": (put("model.safetensors", toy.file_bytes(HF)), ["both model.safetensors", INDEX]),
    "huggingface and iterations": (put("latest_checkpointed_iteration.txt", b"3"), ["HuggingFace", "iterations"]),
}


@pytest.mark.parametrize("kind", SHARDED_DAMAGE)
def test_a_damaged_sharded_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    toy.write_sharded(folder, HF)
    damage, wanted = SHARDED_DAMAGE[kind]
    damage(folder)
    refuse(folder, *wanted)


SINGLE_DAMAGE: dict[str, tuple[Damage, list[str]]] = {
    "missing key": (
        rewrite("model.safetensors", without(toy.NORM)),
        [f"tensors missing from model.safetensors (1): {toy.NORM} (for decoder.final_layernorm.weight)"],
    ),
    "untied head absent": (
        rewrite("model.safetensors", without(toy.HEAD)),
        ["tensors missing from model.safetensors (1)", toy.HEAD],
    ),
    "part of a fused parameter": (
        rewrite("model.safetensors", without(toy.QKV[1])),
        ["tensors missing from model.safetensors (1)", toy.QKV[1], "linear_qkv"],
    ),
    "extra key": (
        rewrite("model.safetensors", {**HF, "model.layers.1.mlp.extra": np.zeros(3)}),
        ["left over tensors, which the model does not have (1)", "model.layers.1.mlp.extra in model.safetensors"],
    ),
    "wrong shape": (
        rewrite("model.safetensors", {**HF, toy.QKV[2]: np.zeros((3, 4))}),
        ["wrong shapes (1)", f"{toy.QKV[2]} in model.safetensors is [3, 4], expected [2, 4]"],
    ),
    "transposed": (rewrite("model.safetensors", {**HF, toy.EMBEDDING: np.zeros((4, 6))}), ["[4, 6], expected [6, 4]"]),
    "integer weight": (
        lambda folder: toy.write_single(folder, HF, {toy.NORM: "I32"}),
        ["types other than F32, F16, BF16 (1)", f"{toy.NORM} in model.safetensors is I32"],
    ),
    "8-bit weight": (lambda folder: toy.write_single(folder, HF, {toy.NORM: "F8_E4M3"}), ["F8_E4M3", toy.NORM]),
    "double weight": (lambda folder: toy.write_single(folder, HF, {toy.NORM: "F64"}), ["is F64", toy.NORM]),
    "no tensors": (rewrite("model.safetensors", {}), [f"tensors missing from model.safetensors ({len(HF)})"]),
    "dangling link": (
        lambda folder: [
            (folder / "model.safetensors").unlink(),
            (folder / "model.safetensors").symlink_to("gone"),
        ],
        ["model.safetensors is a link to nothing"],
    ),
}


@pytest.mark.parametrize("kind", SINGLE_DAMAGE)
def test_a_damaged_single_file_is_refused(tmp_path: Path, kind: str) -> None:
    toy.write_single(tmp_path, HF)
    damage, wanted = SINGLE_DAMAGE[kind]
    damage(tmp_path)
    refuse(tmp_path, *wanted)


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = toy.write_single(tmp_path, HF)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        refuse(tmp_path, "model.safetensors")


WHOLE = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
HEADERS = {
    "overlap": b'{"a":' + WHOLE + b',"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "hole": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "wrong size": b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "unknown type": b'{"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}}',
    "negative shape": b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
    "huge offsets": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9223372036854775807]}}',
    "no offsets": b'{"a":{"dtype":"F32","shape":[2]}}',
    "not json": b'{"a":',
    "not utf-8": b'{"\xff":1}',
    "deep": b'{"a":' * 20_000,
    "twice": b'{"a":' + WHOLE + b',"a":' + WHOLE + b"}",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_forged_header_is_refused(tmp_path: Path, kind: str) -> None:
    header = HEADERS[kind]
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refuse(tmp_path, "model.safetensors")


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_forged_header_length_is_refused(tmp_path: Path, length: int) -> None:
    path = toy.write_single(tmp_path, HF)
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    refuse(tmp_path, "model.safetensors")


def test_all_problems_are_in_one_message_and_long_lists_are_cut(tmp_path: Path) -> None:
    tensors = {
        **without(toy.NORM),
        toy.EMBEDDING: np.zeros((1, 1)),
        **{f"extra.{i:02d}": np.zeros(1) for i in range(25)},
    }
    toy.write_single(tmp_path, tensors)
    message = refuse(
        tmp_path,
        "tensors missing from model.safetensors (1)",
        "wrong shapes (1)",
        "left over tensors",
        "(25)",
        "and 15 more",
    )
    assert "extra.09" in message and "extra.10" not in message


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    toy.write_sharded(tmp_path, HF)
    (tmp_path / FIRST).write_bytes(b"")
    (tmp_path / THIRD).write_bytes(b"x" * 100)
    refuse(tmp_path, FIRST, THIRD)


def test_shards_without_an_index_must_be_complete(tmp_path: Path) -> None:
    toy.write_sharded(tmp_path, HF, index=False)
    (tmp_path / SECOND).unlink()
    refuse(tmp_path, "missing files (1)", SECOND)


def test_shards_of_two_saves_without_an_index_are_refused(tmp_path: Path) -> None:
    toy.write_sharded(tmp_path, HF, index=False)
    (tmp_path / toy.shard_name(1, total=2)).write_bytes(toy.file_bytes({}))
    refuse(tmp_path, "shards of several checkpoints")


def test_a_shard_number_out_of_range_is_refused(tmp_path: Path) -> None:
    toy.write_sharded(tmp_path, HF, index=False)
    (tmp_path / toy.shard_name(4)).write_bytes(toy.file_bytes({}))
    refuse(tmp_path, "out of range", toy.shard_name(4))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "rank_0.ckpt"])
def test_pickle_weights_are_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04anything")
    refuse(tmp_path, "only safetensors is read", name)


def test_a_folder_without_weights_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, str(tmp_path), "no weights found", "model.safetensors", "latest_checkpointed_iteration.txt")
    (tmp_path / "weights.safetensors").write_bytes(toy.file_bytes(HF))
    refuse(tmp_path, "no weights found", "found weights.safetensors")


def test_an_adapter_alone_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(toy.file_bytes({}))
    refuse(tmp_path, "adapter (LoRA)")


def test_a_path_that_is_missing_empty_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        check_weights(tmp_path / "nowhere", LAYOUT)
    path = toy.write_single(tmp_path, HF)
    with pytest.raises(CheckpointError, match=f"must be its folder, {tmp_path}"):
        check_weights(path, LAYOUT)
    with pytest.raises(CheckpointError, match="path is empty"):
        check_weights("", LAYOUT)


# MindFormers folders

PARAMETERS = toy.parameters(HF, LAYOUT)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "iteration_00000003"
    folder.mkdir()
    (folder / toy.rank_file()).write_bytes(toy.file_bytes(PARAMETERS))
    (tmp_path / TRACKER).write_text("3")
    return tmp_path


def test_a_tracker_that_points_nowhere_is_refused(root: Path) -> None:
    (root / TRACKER).write_text("7")
    refuse(root, TRACKER, "iteration_00000007, which is missing", "there are iteration_00000003")


@pytest.mark.parametrize("text", ["", "three", "-3", "3 4", "release", "9" * 40])
def test_a_tracker_without_a_number_is_refused(root: Path, text: str) -> None:
    (root / TRACKER).write_text(text)
    refuse(root, TRACKER, "must hold the number of an iteration")


def test_iterations_without_a_tracker_are_not_guessed(root: Path) -> None:
    (root / TRACKER).unlink()
    refuse(root, f"has no {TRACKER}", "name one of its folders: iteration_00000003")


def test_an_iteration_without_weights_is_refused(root: Path) -> None:
    (root / "iteration_00000003" / toy.rank_file()).unlink()
    refuse(root, "iteration_00000003", "no weights found")


def test_mindformers_names_and_shapes_are_checked(root: Path) -> None:
    first, *others = PARAMETERS
    tensors = {name: PARAMETERS[name] for name in others}
    tensors[others[0]] = np.zeros((1, 2))
    tensors["decoder.layers.9.extra"] = np.zeros(1)
    (root / "iteration_00000003" / toy.rank_file()).write_bytes(toy.file_bytes(tensors))
    refuse(
        root,
        f"tensors missing from {toy.rank_file()} (1): {first}",
        f"{others[0]} in {toy.rank_file()} is [1, 2], expected [8, 4]",
        f"decoder.layers.9.extra in {toy.rank_file()}",
    )


def test_a_missing_rank_is_named(root: Path) -> None:
    folder = root / "iteration_00000003"
    (folder / toy.rank_file()).rename(folder / toy.rank_file(total=2))
    refuse(root, "missing files (1)", toy.rank_file(rank=1, total=2))


def test_files_of_two_saves_in_one_iteration_are_refused(root: Path) -> None:
    folder = root / "iteration_00000003"
    (folder / toy.rank_file(prefix="other-")).write_bytes(toy.file_bytes(PARAMETERS))
    refuse(root, "files of several saves", toy.rank_file(), toy.rank_file(prefix="other-"))


def test_parameters_in_parts_are_refused_without_the_file_that_says_where_parts_belong(root: Path) -> None:
    folder = root / "iteration_00000003"
    (folder / toy.rank_file()).unlink()
    for rank in range(2):
        halves = {name: np.array_split(array, 2)[rank] for name, array in PARAMETERS.items()}
        (folder / toy.rank_file(rank=rank, total=2)).write_bytes(toy.file_bytes(halves))
    refuse(root, "in parts, and no metadata.json", "embedding.word_embeddings.weight", toy.rank_file(total=2))


@pytest.mark.parametrize("place", [".", "iteration_00000003"])
def test_adapter_only_iterations_are_refused(root: Path, place: str) -> None:
    (root / place / "mindformers_adapter_config.json").write_text("{}")
    refuse(root, "adapter (LoRA) weights only")
