"""How the parameters of a model are named and laid out in HuggingFace checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WeightMapping:
    """One parameter and the HuggingFace tensors that it is made of.

    Attributes:
        name: parameter name, e.g. ``decoder.layers.0.self_attention.linear_qkv.weight``.
        shape: shape of the parameter.
        sources: HuggingFace tensor names, in the order that ``to_parameter`` expects.
        source_shapes: shape of each source.
        to_parameter: joins the sources into the parameter; keeps the dtype.
        to_hf: splits the parameter into the sources; inverse of ``to_parameter``.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    to_parameter: Callable[[Sequence[np.ndarray]], np.ndarray]
    to_hf: Callable[[np.ndarray], list[np.ndarray]]


@dataclass(frozen=True)
class WeightLayout:
    """All parameters of a model, and the checkpoint tensors that it does not need.

    Attributes:
        mappings: one entry a parameter, in the order in which they are read.
        skippable: pairs of a regular expression (matched against the whole HuggingFace tensor name) and the
            reason that is logged when such a tensor is passed over.
        copies: pairs (tensor, original), both in HuggingFace's or both in our names: a checkpoint may store the tensor
            as well, with the values of its original, and is refused if they differ.
    """

    mappings: tuple[WeightMapping, ...]
    skippable: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
