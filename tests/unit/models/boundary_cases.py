"""The models of tests/data/boundaries: their weights follow from a seed, so that only names and shapes are stored."""

import itertools
import json
import pathlib
import re
import zlib

import numpy as np
from safetensors.numpy import save_file

FOLDER = pathlib.Path(__file__).parents[2] / "data" / "boundaries"
# Standard deviations that let every part of a model show in its logits: (pattern of the name, mean, deviation).
_SCALES = [
    (r"norm\.weight", 0.6, 0.2),  # some families add one to it
    (r"A_log", -2.5, 1.0),  # memories of a few and of hundreds of tokens
    (r"dt_bias|attn_sink", 0.0, 1.0),
    (r"e_score_correction_bias|gate\.bias", 0.0, 0.1),
    (r"hc_\w*scale", 1.0, 0.2),
    (r"hc_\w*base|\.ape", 0.0, 0.5),
    (r"bias", 0.0, 0.15),
    (r"conv1d\.weight", 0.0, 0.5),
    (r"embed_tokens\.weight", 0.0, 0.5),
]


def cases(family):
    """Returns the stored cases of a family, by name."""
    return json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))["cases"]


def write_checkpoint(folder, case, changed=None):
    """Writes a case as a HuggingFace folder.

    Args:
        folder: where to; exists.
        case: with config, seed and tensors.
        changed: pattern of tensors that get other values than the seed says.
    """
    shapes = expanded(case["tensors"])
    seeds = {name: case["seed"] + 10**6 * bool(changed and re.fullmatch(changed, name)) for name in shapes}
    tensors = {name: random_tensor(seeds[name], name, shapes) for name in shapes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")


def random_tensor(seed, name, shapes):
    """Returns the values of a tensor: float32, or int64 for a table of experts.

    Args:
        seed: of the case.
        name: of the tensor in the checkpoint.
        shapes: shape of every tensor of the checkpoint, by name.
    """
    shape = shapes[name]
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("tid2eid"):
        experts = shapes[name.replace("tid2eid", "weight")][0]
        return np.argsort(generator.random((shape[0], experts)), axis=1)[:, : shape[1]].astype(np.int64)
    scales = [scale for pattern, *scale in _SCALES if re.search(rf"(?:{pattern})$", name)]
    mean, deviation = scales[0] if scales else (0.0, 2.5 * shape[-1] ** -0.5)
    return (mean + deviation * generator.standard_normal(shape)).astype(np.float32)


def expanded(tensors):
    """Returns shapes by tensor name from those by pattern: ``layers.{0,2}.w`` stands for two names."""
    shapes = {}
    for pattern, shape in tensors.items():
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        if len(parts) == 1:
            shapes[pattern] = tuple(shape)
        for chosen in itertools.product(*parts) if len(parts) > 1 else ():
            shapes["".join(chosen)] = tuple(shape)
    return shapes


def compacted(shapes):
    """Returns shapes by pattern; `expanded` undoes it."""
    experts = {}
    for name, shape in shapes.items():
        match = re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)
        key = (match[1], match[3]) if match else (name,)
        experts.setdefault((key, tuple(shape)), []).append(match[2] if match else "")
    layers = {}
    for (key, shape), numbers in experts.items():
        name = f"{key[0]}{{{','.join(sorted(numbers, key=int))}}}{key[1]}" if len(key) > 1 else key[0]
        match = re.fullmatch(r"(.*?layers\.)(\d+)(\..*)", name)
        whole = (match[1], match[3]) if match else (name,)
        layers.setdefault((whole, shape), []).append(match[2] if match else "")
    return {
        f"{key[0]}{{{','.join(sorted(numbers, key=int))}}}{key[1]}" if len(key) > 1 else key[0]: list(shape)
        for (key, shape), numbers in sorted(layers.items())
    }
