"""Settings of multi-token prediction, whose layers are neither trained nor used here. Never imports mindspore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_COUNTS = ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# Where a composite model keeps the keys of its text model.
_TEXT = "text_config"
_NUM_LAYERS = ("num_hidden_layers", "num_layers")
# Lists of one entry a layer, in which those of multi-token prediction come last.
_LISTS = ("compress_ratios", "csa_compress_ratios", "layer_types", "mlp_layer_types")


def without_mtp_layers(sources: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Cuts the layers of multi-token prediction out of what describes a model.

    Their number becomes 0, under every name that it has, and lists of one entry a layer end with the decoder's last.

    Args:
        sources: keys and values of ``config.json``, the YAML, ...; later ones win. They are not changed.

    Returns:
        The sources without these layers, and what was changed, in words.
    """
    changes: list[str] = []
    layers = _num_layers(sources)
    cut = [_cut(source, layers, changes) for source in sources]
    return cut, changes


def _cut(source: Mapping[str, Any], layers: int | None, changes: list[str]) -> dict[str, Any]:
    kept = dict(source)
    if isinstance(kept.get(_TEXT), Mapping):
        kept[_TEXT] = _cut(kept[_TEXT], layers, changes)
    for key in _COUNTS:
        if kept.get(key):
            changes.append(f"{key} {kept[key]} -> 0")
            kept[key] = 0
    for key in _LISTS:
        entries = kept.get(key)
        if layers is not None and isinstance(entries, (list, tuple)) and len(entries) > layers:
            changes.append(f"{key} of {len(entries)} entries -> {layers}")
            kept[key] = list(entries[:layers])
    return kept


def _num_layers(sources: Sequence[Mapping[str, Any]]) -> int | None:
    for source in reversed(sources):
        text = source.get(_TEXT)
        for keys in (source, text if isinstance(text, Mapping) else {}):
            for key in _NUM_LAYERS:
                if isinstance(keys.get(key), int):
                    return int(keys[key])
    return None
