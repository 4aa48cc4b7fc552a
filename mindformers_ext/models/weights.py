"""How the parameters of a model are named and laid out in HuggingFace checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Parts = Callable[[np.ndarray], list[np.ndarray]]


@dataclass(frozen=True)
class Sources:
    """One form in which checkpoints store a parameter: tensors, and where in the parameter each of them lies.

    Attributes:
        names: HuggingFace tensor names.
        shapes: shape of each tensor.
        parts: given the parameter, returns one view into it for each tensor. Together the views cover every element
            once. A view has any shape and strides; read in C order it holds the tensor's values in their order.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: Parts


@dataclass(frozen=True)
class WeightMapping:
    """One parameter and the HuggingFace tensors that it is made of.

    Attributes:
        name: parameter name, e.g. ``decoder.layers.0.self_attention.linear_qkv.weight``.
        shape: shape of the parameter.
        sources: HuggingFace tensor names; this form is the one that is saved.
        source_shapes: shape of each source.
        parts: views into the parameter, one a source; see `Sources`.
        dtype: ``float32``, or ``int32`` for tables of ids, which HuggingFace files store as int64.
        keep_float32: stays float32 when a checkpoint is exported in 16 bits.
        num_ids: a table's ids are 0 to ``num_ids - 1``; None: any that int32 holds.
        alternatives: other forms in which checkpoints store the parameter; no two forms share a tensor name.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    parts: Parts
    dtype: str = "float32"
    keep_float32: bool = False
    num_ids: int | None = None
    alternatives: tuple[Sources, ...] = ()

    @property
    def forms(self) -> tuple[Sources, ...]:
        """Every form in which checkpoints store the parameter, the saved one first."""
        return (Sources(self.sources, self.source_shapes, self.parts), *self.alternatives)


@dataclass(frozen=True)
class WeightLayout:
    """All parameters of a model, and the checkpoint tensors that it does not need.

    Attributes:
        mappings: one entry a parameter, in the order in which they are read.
        skippable: pairs of a regular expression (matched against the whole HuggingFace tensor name) and the
            reason that is logged when such a tensor is passed over.
        copies: pairs (tensor, original), both in HuggingFace's or both in our names: a checkpoint may store the tensor
            as well, with the values of its original, and is refused if they differ.
        renames: pairs (regular expression, replacement) for `re.sub`, applied in order to every tensor name of a
            HuggingFace checkpoint before anything else here is matched. Messages keep the stored name.
    """

    mappings: tuple[WeightMapping, ...]
    skippable: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
