"""Values given beside the YAML: dotted command line options, and keys set by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindformers_ext.config.errors import ConfigError, KeyPath, Source, dotted, printable, show
from mindformers_ext.config.plain import MAX_DEPTH, plain_copy
from mindformers_ext.config.yaml_reader import read_inline


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Reads `--section.key value` and `--section.key=value` from a command line.

    A value is read like a YAML scalar (`8`, `1e-6`, `true`, `null`, text; quotes make any of them text); one in square
    brackets or braces is read as a YAML list or mapping if it is one, else as text. It may start with `--` only after
    `=`.

    Raises:
        ConfigError: a token that is no such option, an option without value, or one given twice.
    """
    result: dict[str, Any] = {}
    remaining = list(tokens)
    while remaining:
        option = remaining.pop(0)
        name, equals, text = option.removeprefix("--").partition("=")
        shown = printable(option.partition("=")[0])
        if not option.startswith("--") or "." not in name:
            raise ConfigError(f"{shown}: not a known option; an override is written --section.key value")
        if not all(part.strip() for part in name.split(".")):
            raise ConfigError(f"{shown}: a part of the key is empty; an override is written --section.key value")
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"{shown}: has no value; write {shown} value or {shown}=value")
            text = remaining.pop(0)
        if name in result:
            raise ConfigError(f"{shown}: is given twice; give it once")
        result[name] = read_inline(text)
    return result


def apply_overrides(tree: dict[Any, Any], overrides: Mapping[str, Any], source: Source) -> None:
    """Sets dotted keys in the raw tree, in order, and marks them in `source`; missing sections are made.

    A number addresses an entry of a list: `callbacks.0.type`. A list that is missing is made, its entries in order.

    Raises:
        ConfigError: a malformed key, or one that leads through something that is not a section.
    """
    for name, value in overrides.items():
        if not isinstance(name, str) or not name or not all(part.strip() for part in name.split(".")):
            raise ConfigError(f"override {printable(repr(name))}: the key must be names joined by dots")
        keys = tuple(name.split("."))
        if len(keys) > MAX_DEPTH:
            raise ConfigError(f"override {printable(name)}: is nested deeper than {MAX_DEPTH} levels")
        _set(tree, keys, value, source)


def _set(tree: dict[Any, Any], keys: tuple[str, ...], value: Any, source: Source) -> None:
    node: Any = tree
    path: KeyPath = ()
    for key, following in zip(keys[:-1], keys[1:], strict=True):
        step = _entry(node, key, path, keys, source)
        path = (*path, step)
        if node[step] is None:
            node[step] = [] if following == "0" else {}
            source.overridden.add(path)
        node = node[step]
    step = _entry(node, keys[-1], path, keys, source)
    path = (*path, step)
    source.overridden.add(path)
    node[step] = plain_copy(value, source, path)


def _entry(node: Any, key: str, path: KeyPath, keys: tuple[str, ...], source: Source) -> str | int:
    """As `_step`, for an entry that is made where it is missing, as None."""
    if isinstance(node, list) and path in source.overridden and key == str(len(node)):
        node.append(None)
    step = _step(node, key, path, keys)
    if isinstance(node, dict):
        node.setdefault(step, None)
    return step


def _step(node: Any, key: str, path: KeyPath, keys: tuple[str, ...]) -> str | int:
    """`key` as it addresses an entry of `node`, which stands at `path`.

    Raises:
        ConfigError: `node` has no entries, or is a list without that one.
    """
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise ConfigError(f"override {dotted(keys)}: {dotted(path)} is {show(node)}, not a section")
    if key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(node):
        return int(key)
    raise ConfigError(
        f"override {dotted(keys)}: {dotted(path)} is a list of {len(node)} without entry {printable(key)}"
    )
