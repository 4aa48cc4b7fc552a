"""`load_config`: from a file or a mapping to a checked configuration."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from mindformers_ext.config.build import build_config
from mindformers_ext.config.errors import Source
from mindformers_ext.config.overrides import apply_overrides
from mindformers_ext.config.plain import plain_copy
from mindformers_ext.config.rules import check_rules
from mindformers_ext.config.schema import TrainConfig
from mindformers_ext.config.yaml_reader import read_yaml


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    provided: Collection[str] = (),
) -> TrainConfig:
    """Loads and checks the configuration of a run; nothing on disk but the YAML file itself is looked at.

    Args:
        source: path of a YAML file, or the same content as a mapping (it is copied).
        overrides: dotted keys and their values, applied before anything is checked.
        provided: names of sections whose object the caller brings along ("model", "train_dataset", "optimizer",
            "lr_scheduler"); training then does not require them.

    Raises:
        ConfigFileNotFoundError: there is no such file (also a FileNotFoundError).
        ConfigError: any other mistake (a ValueError); one line with file, line, key, problem and remedy.
        TypeError: `source` is neither a path nor a mapping.
    """
    if isinstance(source, Mapping):
        origin = Source()
        tree = plain_copy(source, origin)
    elif isinstance(source, (str, os.PathLike)):
        tree, origin = read_yaml(source)
    else:
        raise TypeError(f"the configuration must be a path or a mapping, got {type(source).__name__}")
    apply_overrides(tree, overrides or {}, origin)
    config = build_config(tree, origin)
    check_rules(config, origin, provided)
    return config
