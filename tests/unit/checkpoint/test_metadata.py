"""What a metadata.json may say, and what is wrong with one that does not fit its files."""

import json

import numpy as np
import pytest

from mindformers_ext.checkpoint import CheckpointError, check_weights, load_weights
from mindformers_ext.models.transforms import copied
from mindformers_ext.models.weights import WeightLayout
from mindformers_ext.parallel.plan import Region
from tests.unit.checkpoint import toy

LAYOUT = WeightLayout((copied("w", "w", 8, 4), copied("norm", "norm", 4)))
W = np.arange(32, dtype=np.float32).reshape(8, 4)
NORM = np.ones(4, np.float32)


def entry(shape, pieces, local, layout):
    return {
        "properties": {"dtype": "Float32", "replica_id": 0, "allow_shape_mismatch": False, "allow_to_save": True},
        "global_shape": shape,
        "axis_fragmentations": [1] * len(shape),
        "layout": layout,
        "chunk": [{"global_offset": [piece], "local_shape": local} for piece in range(pieces)],
    }


def stored(rank, *group):
    return {"file_name": toy.rank_file(rank=rank, total=4), "storage_rank": rank, "rank_group": list(group or [rank])}


@pytest.fixture
def folder(tmp_path):
    """Four ranks in a matrix of 2 x 2: rows of w are split by both axes, the inner one first; the norm is whole."""
    quarters = [0, 2, 1, 3]  # quarter of the rows that a rank holds
    for rank, quarter in enumerate(quarters):
        tensors = {"w": W[2 * quarter : 2 * quarter + 2]} | ({"norm": NORM} if rank == 2 else {})
        (tmp_path / toy.rank_file(rank=rank, total=4)).write_bytes(toy.file_bytes(tensors))
        (tmp_path / toy.rank_file("opt", rank=rank, total=4)).write_bytes(toy.file_bytes({"adam_m.w": tensors["w"]}))
    split = {
        "device_matrix": [2, 2],
        "tensor_map": [[0, 1], -1],
        "interleaved_parallel": False,
        "alias_name": ["dp", "tp"],
        "rank_list": [0, 1, 2, 3],
    }
    opt = [{**stored(rank), "file_name": toy.rank_file("opt", rank=rank, total=4)} for rank in range(4)]
    content = {
        "state_dict_metadata": {
            "w": entry([8, 4], 4, [2, 4], split),
            "norm": entry([4], 1, [4], None),
            "adam_m.w": entry([8, 4], 4, [2, 4], split),
        },
        "storage_data": {
            **{f"('w', ({quarters[rank]},))": [stored(rank)] for rank in range(4)},
            **{f"('adam_m.w', ({quarters[rank]},))": [opt[rank]] for rank in range(4)},
            "('norm', (0,))": [stored(2, 0, 1, 2, 3)],
        },
    }
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    return tmp_path


def edit(folder, change):
    path = folder / "metadata.json"
    content = json.loads(path.read_text())
    change(content["state_dict_metadata"], content["storage_data"])
    path.write_text(json.dumps(content))


def test_a_dimension_that_two_axes_of_ranks_split_is_joined_in_their_order(folder):
    found = {}
    check_weights(folder, LAYOUT)
    load_weights(folder, LAYOUT, found.__setitem__)
    np.testing.assert_array_equal(found["w"], W)
    np.testing.assert_array_equal(found["norm"], NORM)
    region = Region((8, 4), (((1, 2), (5, 7)), ((0, 1), (3, 4))))
    load_weights(folder, LAYOUT, found.__setitem__, {"w": region})
    np.testing.assert_array_equal(found["w"], region.take(W))


def test_a_piece_that_another_rank_of_its_group_wrote_is_found(folder):
    """Without redundancy the layout names a rank that did not write."""

    def replicas(described, storage):
        for name in ("w", "adam_m.w"):
            described[name]["layout"]["rank_list"] = [9, 8, 7, 6]
        for places in storage.values():
            places[0]["rank_group"].append(9 - places[0]["storage_rank"])

    edit(folder, replicas)
    found = {}
    load_weights(folder, LAYOUT, found.__setitem__)
    np.testing.assert_array_equal(found["w"], W)


def no_storage(described, storage):
    del storage["('w', (2,))"]


def other_file(described, storage):
    storage["('w', (2,))"][0]["file_name"] = toy.rank_file(rank=7, total=8)


def outside(described, storage):
    storage["('w', (2,))"][0]["file_name"] = "../x-model-0000000-0000001.safetensors"


def uneven(described, storage):
    described["w"]["global_shape"] = [9, 4]


def overlapping(described, storage):
    described["w"]["layout"]["tensor_map"] = [0, 0]
    for chunk in described["w"]["chunk"]:
        chunk["local_shape"] = [4, 2]


def too_many_ranks(described, storage):
    described["w"]["layout"]["rank_list"] = [0, 1, 2]


def other_shape(described, storage):
    described["w"]["chunk"][0]["local_shape"] = [4, 4]


def unknown_type(described, storage):
    described["w"]["properties"]["dtype"] = "Float5"


def damaged(described, storage):
    del described["w"]["properties"]


def no_number(described, storage):
    described["w"]["global_shape"] = ["eight", 4]


def not_there(described, storage):
    del described["w"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_storage, r"no file holds \[4:6, 0:4\] of w \[8, 4\]"),
        (other_file, r"missing files \(1\): checkpoint-model-0000007-0000008\.safetensors \(for w\)"),
        (outside, r"missing files \(1\): \.\./x-model-0000000-0000001\.safetensors \(for w\)"),
        (uneven, r"w \[9, 4\]: its layout cuts 9 into 4 equal pieces"),
        (overlapping, r"w \[8, 4\]: its layout makes 2 of 4 pieces"),
        (too_many_ranks, r"w is laid out over 3 ranks in a matrix of \[2, 2\]"),
        (other_shape, r"w \[8, 4\] is said to lie in pieces of \[2, 4\], \[4, 4\], but"),
        (unknown_type, r"w has the unknown type 'Float5'"),
        (damaged, r"the description of w is damaged"),
        (no_number, r"the description of w is damaged"),
        (not_there, r"tensors missing from metadata\.json \(1\): w"),
    ],
)
def test_metadata_that_does_not_fit_is_one_sentence(folder, change, message):
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(folder, LAYOUT, lambda *_: None)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "types", "message"),
    [
        ({"v": W[:2]}, "F32", r"0000001-0000004\.safetensors does not hold w, which metadata\.json says it does"),
        ({"w": W[:3]}, "F32", r"w in .*1-0000004\.safetensors is F32 \[3, 4\], but metadata\.json says F32 \[2, 4\]"),
        ({"w": W[:2]}, "F16", r"w in .*1-0000004\.safetensors is F16 \[2, 4\], but metadata\.json says F32 \[2, 4\]"),
    ],
)
def test_a_file_that_contradicts_the_metadata_is_refused_where_it_is_needed(folder, tensors, types, message):
    (folder / toy.rank_file(rank=1, total=4)).write_bytes(toy.file_bytes(tensors, types))
    for read in (lambda: check_weights(folder, LAYOUT), lambda: load_weights(folder, LAYOUT, lambda *_: None)):
        with pytest.raises(CheckpointError, match=message):
            read()
    load_weights(folder, LAYOUT, lambda *_: None, {"w": Region((8, 4), (((0, 2),), ((0, 4),)))})


def test_a_rank_file_that_is_gone_is_named(folder):
    (folder / toy.rank_file(rank=1, total=4)).unlink()
    with pytest.raises(CheckpointError, match=r"missing files \(1\): checkpoint-model-0000001-0000004\.safetensors"):
        load_weights(folder, LAYOUT, lambda *_: None)
