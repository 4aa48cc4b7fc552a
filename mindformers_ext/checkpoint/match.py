"""Pair the parameters of a model with the tensors of a checkpoint, from the headers alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindformers_ext.checkpoint.errors import ProblemList, listed
from mindformers_ext.checkpoint.locate import METADATA_FILE, Location
from mindformers_ext.checkpoint.pieces import PiecedTensor
from mindformers_ext.checkpoint.quantized import FP4, FP8, QuantizedTensor, quantized, scale_names
from mindformers_ext.checkpoint.tensor_file import READABLE, StoredTensor, TensorFile
from mindformers_ext.models.weights import Parts, Sources, WeightLayout, WeightMapping

# Tensors by the name that the layout knows them by, one for each file that holds it.
AnyTensor = StoredTensor | PiecedTensor
Found = dict[str, list[AnyTensor]]


@dataclass(frozen=True)
class Match:
    """A parameter and the tensors that it is read from.

    Attributes:
        mapping: the parameter.
        parts: views into it, one a tensor.
        shapes: shape of each tensor's values.
        tensors: the tensors.
    """

    mapping: WeightMapping
    parts: Parts
    shapes: tuple[tuple[int, ...], ...]
    tensors: tuple[AnyTensor | QuantizedTensor, ...]

    @property
    def stored(self) -> list[AnyTensor]:
        """What is read from the files: the tensors, of quantized ones codes and scales."""
        stored: list[AnyTensor] = []
        for tensor in self.tensors:
            stored += [tensor.codes, tensor.scales] if isinstance(tensor, QuantizedTensor) else [tensor]
        return stored


def tensors_by_name(location: Location, layout: WeightLayout, files: Sequence[TensorFile]) -> Found:
    """Collects the tensors of all files, those of HuggingFace under the layout's names.

    Raises:
        CheckpointError: if files and index disagree, or two tensors get one name.
    """
    found: Found = {}
    for file in files:
        for name, tensor in file.tensors.items():
            found.setdefault(name, []).append(tensor)
    if location.format == "mindformers":
        return found
    problems = ProblemList(str(location.folder))
    for name, tensors in found.items():
        if len(tensors) > 1:
            problems.add("tensors in several files", f"{name} in {listed(t.label for t in tensors)}")
    if location.index is not None and location.weight_map is not None:
        _compare_with_index(location.index.name, location.weight_map, found, problems)
    renamed = _renamed(layout, found, problems)
    problems.raise_if_any()
    return renamed


def _compare_with_index(index: str, weight_map: dict[str, str], found: Found, problems: ProblemList) -> None:
    for name, file in weight_map.items():
        holders = [tensor.label for tensor in found.get(name, [])]
        if not holders:
            problems.add(f"missing tensors that {index} lists", f"{name} in {file}")
        elif os.path.normpath(file) not in holders:
            problems.add(f"tensors in another file than {index} says", f"{name} in {holders[0]} instead of {file}")
    for name, tensors in found.items():
        if name not in weight_map:
            problems.add(f"tensors that {index} does not list", tensors[0].where)


def _renamed(layout: WeightLayout, found: Found, problems: ProblemList) -> Found:
    rules = [(re.compile(pattern), replacement) for pattern, replacement in layout.renames]
    renamed: Found = {}
    for stored, tensors in found.items():
        name = stored
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        if name in renamed:
            problems.add("two tensors for one name", f"{renamed[name][0].where} and {tensors[0].where} are both {name}")
        renamed.setdefault(name, tensors)
    return renamed


def match_parameters(location: Location, layout: WeightLayout, found: Found) -> dict[str, Match]:
    """Pairs every parameter with its tensors.

    Raises:
        CheckpointError: with all that does not fit.
    """
    problems = ProblemList(str(location.folder))
    index = location.index or location.metadata
    searched = index.name if index else listed((file.name for file in location.files), 3)
    plain = location.format == "mindformers"
    misfit = "wrong shapes"
    if plain and len(location.files) > 1 and location.metadata is None:
        misfit = f"parameters in parts, and no {METADATA_FILE} that would say which file holds which part"
    # Scales belong to a tensor under its stored name, whatever the layout calls it.
    by_stored_name: dict[str, StoredTensor] = {}
    if not plain:
        by_stored_name = {one[0].name: one[0] for one in found.values() if isinstance(one[0], StoredTensor)}
    matches = {}
    used: set[str] = set()
    for mapping in layout.mappings:
        form = _own_form(mapping) if plain else _chosen_form(mapping, found, problems)
        chosen: list[AnyTensor | QuantizedTensor] = []
        for name, shape in zip(form.names, form.shapes, strict=True):
            if name not in found:
                needed_for = "" if plain else f" (for {mapping.name})"
                problems.add(f"tensors missing from {searched}", f"{name}{needed_for}")
                continue
            tensor = found[name][0]
            used.add(tensor.name)
            if isinstance(tensor, StoredTensor) and _is_quantized(tensor, tuple(shape), mapping.dtype, by_stored_name):
                used.update(scale_names(tensor.name))
                chosen += _quantized(tensor, tuple(shape), by_stored_name, problems)
            else:
                _check_tensor(found[name], tuple(shape), mapping.dtype, misfit, problems)
                chosen.append(tensor)
        matches[mapping.name] = Match(mapping, form.parts, form.shapes, tuple(chosen))
    for name, original in layout.copies:
        if name in found and original in found:
            for tensors in (found[name], found[original]):
                _check_tensor(tensors, found[original][0].shape, "float32", misfit, problems)
    for name, tensors in found.items():
        if tensors[0].name not in used and skip_reason(layout, name, found) is None:
            problems.add("left over tensors, which the model does not have", tensors[0].where)
    problems.raise_if_any()
    return matches


def _is_quantized(
    tensor: StoredTensor, shape: tuple[int, ...], dtype: str, by_stored_name: Mapping[str, StoredTensor]
) -> bool:
    """Whether a weight is stored in 8 or 4 bits; bytes are FP4 pairs if they have scales or half the shape."""
    if dtype != "float32" or not by_stored_name:
        return False
    if tensor.dtype in ("I8", "U8"):
        half = (*shape[:-1], shape[-1] // 2) if shape else None
        return tensor.shape == half or any(name in by_stored_name for name in scale_names(tensor.name))
    return tensor.dtype in FP8 or tensor.dtype in FP4


def _quantized(
    tensor: StoredTensor, shape: tuple[int, ...], by_stored_name: Mapping[str, StoredTensor], problems: ProblemList
) -> list[QuantizedTensor]:
    try:
        return [quantized(tensor, shape, by_stored_name)]
    except ValueError as error:
        problems.add("quantized tensors that cannot be read", str(error))
        return []


def _own_form(mapping: WeightMapping) -> Sources:
    """The form in MindFormers checkpoints: the parameter itself."""
    return Sources((mapping.name,), (mapping.shape,), lambda parameter: [parameter])


def _chosen_form(mapping: WeightMapping, found: Found, problems: ProblemList) -> Sources:
    """The form of which the checkpoint has tensors; the saved one if it has none, or some of several."""
    present = [form for form in mapping.forms if any(name in found for name in form.names)]
    if len(present) > 1:
        kinds = []
        for form in present:
            missing = [name for name in form.names if name not in found]
            first = next(name for name in form.names if name in found)
            lacking = f"without {listed(missing, 3)}" if missing else "complete"
            kinds.append(f"{len(form.names) - len(missing)} of {len(form.names)} like {first} ({lacking})")
        problems.add("parameters stored in several forms at once", f"{mapping.name}: {' and '.join(kinds)}")
        names = tuple(name for form in present for name in form.names if name in found)
        return Sources(names, tuple(found[name][0].shape for name in names), mapping.parts)
    return present[0] if present else mapping.forms[0]


def _check_tensor(
    tensors: Sequence[AnyTensor], shape: tuple[int, ...], dtype: str, misfit: str, problems: ProblemList
) -> None:
    """Notes a wrong shape under ``misfit``, and wrong types, of one tensor in all files that hold it."""
    for tensor in tensors:
        if tensor.shape != shape:
            problems.add(misfit, f"{tensor.where} is {list(tensor.shape)}, expected {list(shape)}")
            break
    readable = READABLE[dtype]
    for tensor in tensors:
        if tensor.dtype not in readable:
            problems.add(f"types other than {', '.join(readable)}", f"{tensor.where} is {tensor.dtype}")
            break


def skip_reason(layout: WeightLayout, name: str, found: Found) -> str | None:
    """Why a tensor that fills no parameter may be passed over, or None if nothing says so."""
    for copy, original in layout.copies:
        if name == copy and original in found:
            return f"a copy of {original}"
    return next((reason for pattern, reason in layout.skippable if re.fullmatch(pattern, name)), None)
