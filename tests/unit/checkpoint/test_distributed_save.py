"""Checkpoints that the ranks of one layout save load in every other one, bit by bit."""

import json
import os

import numpy as np
import pytest

from mindformers_ext.checkpoint import check_weights, distributed, load_weights, save_distributed
from mindformers_ext.checkpoint.tensor_file import TensorFile
from tests.unit.checkpoint.ranks import described, dims_of, on_all_ranks, parts_of, regions_of, whole_model

FAMILIES = ["qwen3", "qwen3_moe", "qwen3_5", "deepseek_v3", "deepseek_v4"]
LAYOUTS = {
    "replicas": {},
    "fsdp8": {"fsdp": 8},
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp4fsdp2": {"tp": 4, "fsdp": 2},
    "tp8": {"tp": 8},
    "ep4fsdp4": {"ep": 4, "fsdp": 4},
    "tp2ep2pp2": {"tp": 2, "ep": 2, "pp": 2},
    "cp2fsdp2pp2": {"cp": 2, "fsdp": 2, "pp": 2},
}


def splits(config, layout, monkeypatch):
    """The layouts of 8 ranks that a model allows."""
    found = {}
    for name, degrees in LAYOUTS.items():
        try:
            found[name] = regions_of(config, layout, dims_of(8, **degrees), monkeypatch)
        except ValueError as error:
            assert "parallelism" in str(error) or "stages" in str(error), error
    assert len(found) >= 4
    return found


def save(folder, whole, regions, **options):
    def action(job):
        return save_distributed(folder, 20, parts_of(whole, regions[job.rank]), None, {}, job, **options)

    results = on_all_ranks(len(regions), action)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert set(results) == {folder / "iteration_00000020"}
    return results[0]


def stored_bytes(folder):
    """Bytes of values by rank file."""
    sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with TensorFile(path) as file:
            sizes[path.name] = sum(tensor.nbytes for tensor in file.tensors.values())
    return sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_reads_what_every_other_one_saved(family, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "_PIECE", 1 << 12)
    config, layout = described(family)
    whole = whole_model(family, layout)
    layouts = splits(config, layout, monkeypatch)
    readers = list(layouts.values())
    for index, (name, regions) in enumerate(layouts.items()):
        folder = tmp_path / name
        save(folder, whole, regions, remove_redundancy=bool(index % 2))
        assert check_weights(folder, layout).step == 20
        found = {}
        assert load_weights(folder, layout, found.__setitem__).read_values == sum(map(np.size, whole.values()))
        assert list(found) == list(whole)
        for parameter, values in whole.items():
            assert found[parameter].dtype == values.dtype and found[parameter].tobytes() == values.tobytes(), parameter
        for rank in (index % 8, (3 * index + 4) % 8):
            wanted = readers[(index + 1) % len(readers)][rank]
            part = {}
            load_weights(folder, layout, part.__setitem__, wanted, (rank, 8))
            assert part.keys() == wanted.keys()
            for parameter, region in wanted.items():
                assert part[parameter].tobytes() == region.take(whole[parameter]).tobytes(), (name, parameter)


@pytest.mark.parametrize(("layout_name", "copies"), [("replicas", 8), ("ep4fsdp4", 2)])
def test_without_redundancy_every_value_is_stored_once_and_files_are_of_like_size(
    layout_name, copies, tmp_path, monkeypatch
):
    config, layout = described("qwen3_moe")
    whole = whole_model("qwen3_moe", layout)
    regions = splits(config, layout, monkeypatch)[layout_name]
    total = sum(values.nbytes for values in whole.values())
    once = stored_bytes(save(tmp_path / "once", whole, regions, remove_redundancy=True))
    assert sum(once.values()) == total and len(once) == 8
    assert max(once.values()) < 1.5 * total / 8
    every = stored_bytes(save(tmp_path / "every", whole, regions))
    assert len(every) == 8 and sum(every.values()) == copies * total


def test_a_process_opens_only_the_files_that_hold_its_part(tmp_path, monkeypatch):
    config, layout = described("qwen3")
    whole = whole_model("qwen3", layout)
    regions = splits(config, layout, monkeypatch)["tp2pp2"]
    folder = save(tmp_path, whole, regions)
    # Ranks 0 and 1 hold the halves of the first stage, 4 and 5 those of the second, the others are their replicas.
    for name in ("2", "3", "4", "5", "6", "7"):
        path = folder / f"checkpoint-model-000000{name}-0000008.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    part = {}
    report = load_weights(folder, layout, part.__setitem__, regions[0])
    assert report.read_files == 1 and report.read_parameters == len(regions[0])
    assert report.summary().startswith(
        f"{len(regions[0])} of {len(whole)} parameters, {sum(region.size for region in regions[0].values()):,} of "
    )
    assert "1 of 8 file(s)" in report.summary()
    with pytest.raises(ValueError, match=r"checkpoint-model-0000004-0000008\.safetensors is truncated"):
        load_weights(folder, layout, part.__setitem__, regions[4])
    with pytest.raises(ValueError, match=r"checkpoint-model-000000\d-0000008\.safetensors is truncated"):
        check_weights(folder, layout)


def failing_job(tmp_path, monkeypatch, broken_rank, where):
    """Saves an iteration, then one more in which a rank fails; returns what the ranks raised."""
    config, layout = described("qwen3")
    whole = whole_model("qwen3", layout)
    regions = splits(config, layout, monkeypatch)["fsdp8"]
    save(tmp_path, whole, regions)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def action(job):
        parts = parts_of(whole, regions[job.rank])
        if job.rank == broken_rank:
            where(job, parts)
        return save_distributed(tmp_path, 21, parts, None, {}, job)

    results = on_all_ranks(8, action)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(tmp_path)) == ["iteration_00000020", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20"
    return results


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_that_cannot_write_fails_all_of_them_and_leaves_the_last_checkpoint_alone(tmp_path, monkeypatch, rank):
    write = distributed.write_tensors
    names = []

    def full(job, parts):
        names.append(f"checkpoint-model-000000{rank}-0000008.safetensors")

    def full_disk(path, *rest):
        if path.name in names:
            raise OSError(28, "No space left on device")
        write(path, *rest)

    monkeypatch.setattr(distributed, "write_tensors", full_disk)
    for error in failing_job(tmp_path, monkeypatch, rank, full):
        assert isinstance(error, OSError)
        assert str(error).startswith(f"rank {rank}: {tmp_path}") and str(error).endswith("No space left on device")


def test_values_that_no_rank_holds_are_refused_by_all(tmp_path, monkeypatch):
    def forget(job, parts):
        del parts["decoder.final_layernorm.weight"]

    for error in failing_job(tmp_path, monkeypatch, 3, forget):
        assert isinstance(error, ValueError)
        assert "decoder.final_layernorm.weight cannot be saved: no process holds [(" in str(error)


def test_types_that_differ_are_refused_by_all(tmp_path, monkeypatch):
    def widen(job, parts):
        part = parts["decoder.final_layernorm.weight"]
        parts["decoder.final_layernorm.weight"] = type(part)(part.region, part.values.astype(np.float64))

    for error in failing_job(tmp_path, monkeypatch, 3, widen):
        assert isinstance(error, ValueError)
        assert "is float32 [" in str(error) and "on rank 0 and float64 [" in str(error) and "on rank 3" in str(error)


def test_the_metadata_describes_pieces_as_mindspore_transformers_does(tmp_path, monkeypatch):
    """The ranks of tp2 x fsdp2 hold quarters of the rows of a projection, in the order tp, fsdp."""
    config, layout = described("qwen3")
    whole = whole_model("qwen3", layout)
    regions = regions_of(config, layout, dims_of(4, tp=2, fsdp=2), monkeypatch)
    folder = save(tmp_path, whole, regions, prefix=None)
    content = json.loads((folder / "metadata.json").read_text())
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    rows, hidden = whole[name].shape
    entry = content["state_dict_metadata"][name]
    assert entry["properties"]["dtype"] == "Float32" and entry["global_shape"] == [rows, hidden]
    assert entry["axis_fragmentations"] == [4, 1]
    assert list(entry["layout"].values()) == [[4], [0, -1], False, ["dim0"], [0, 2, 1, 3]]
    assert entry["chunk"] == [{"global_offset": [n], "local_shape": [rows // 4, hidden]} for n in range(4)]
    assert content["storage_data"][f"('{name}', (1,))"] == [
        {"file_name": "model-0000002-0000004.safetensors", "storage_rank": 2, "rank_group": [2]}
    ]
