"""Turns plain data into the dataclasses of schema.py: types, ranges and names of keys are checked here."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

from mindformers_ext.config.errors import ConfigError, KeyPath, Source, dotted, joined, printable, show
from mindformers_ext.config.generation import GenerationSection
from mindformers_ext.config.schema import ModelSection, TrainConfig
from mindformers_ext.config.section import OpenSection, Section, yaml_fields
from mindformers_ext.config.values import EXPONENT_FORM, MismatchError, coerce

AnySection = TypeVar("AnySection", bound=Section)

_OWN_KEY_PREFIXES = ("x-", "x_")
_TOP_LEVEL_EXTRA = {"eval_dataset"}  # read by MindSpore Transformers without being a field of its TrainConfig
_TYPO_RATIO = 0.8  # an unknown key this close to a known one is a typing mistake even where free keys are allowed


def build_config(tree: dict[Any, Any], source: Source) -> TrainConfig:
    """Builds the configuration from plain data.

    Raises:
        ConfigError: unknown keys, wrong types or values out of range, all of them, a line each; the message names file,
            line and key.
    """
    config = _build(TrainConfig, tree, (), source)
    assert isinstance(config, TrainConfig)
    return config


def build_generation(options: dict[str, Any]) -> GenerationSection:
    """Builds the `generation` section alone, from options that did not come from a file.

    Raises:
        ConfigError: see `build_config`.
    """
    return build_section(GenerationSection, options, ("generation",), Source())


def build_section(cls: type[AnySection], tree: dict[Any, Any], path: KeyPath, source: Source) -> AnySection:
    """Builds one section alone, whose place is `path`.

    Raises:
        ConfigError: see `build_config`.
    """
    section = _build(cls, tree, path, source)
    assert isinstance(section, cls)
    return section


def _build(cls: type[Section], tree: Any, path: KeyPath, source: Source) -> Section:
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise source.error(path, f"expected a section with keys, got {show(tree)}")
    if cls is ModelSection:
        tree = _with_single_architecture(tree)
    hints = yaml_fields(cls)
    known: dict[str, Any] = {}
    extra: dict[Any, Any] = {}
    errors: list[ConfigError] = []
    for key, value in tree.items():
        try:
            if key in hints:
                known[key] = _field(value, hints[key], (*path, key), source)
            else:
                _check_unknown_key(cls, key, path, source)
                extra[key] = _with_numbers(value)
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise joined(errors)
    if extra:
        known["extra"] = extra
    return cls(given=frozenset(tree) & hints.keys(), **known)


def _field(value: Any, hint: Any, path: KeyPath, source: Source) -> Any:
    section = next((part for part in (hint, *get_args(hint)) if _is_section(part)), None)
    if section is None:
        try:
            return coerce(value, hint)
        except MismatchError as error:
            raise source.error(path, str(error)) from None
    if get_origin(hint) is list:
        if value is not None and not isinstance(value, list):
            raise source.error(path, f"expected a list of sections, got {show(value)}")
        return [_build(section, item, (*path, index), source) for index, item in enumerate(value or [])]
    if value is None and types.NoneType in get_args(hint):
        return None
    return _build(section, value, path, source)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and get_origin(hint) is None and issubclass(hint, Section)


def _with_numbers(value: Any) -> Any:
    """Free values, in which `1e-6` becomes a number like in the known fields."""
    if isinstance(value, str) and EXPONENT_FORM.fullmatch(value):
        return float(value)
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    return value


def _with_single_architecture(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Hugging Face's config.json writes `architectures` as a list of one name."""
    names = tree.get("architectures")
    return {**tree, "architectures": names[0]} if isinstance(names, list) and len(names) == 1 else tree


def _check_unknown_key(cls: type[Section], key: Any, path: KeyPath, source: Source) -> None:
    """Passes a key that the section may keep as it is.

    Raises:
        ConfigError: the key is reserved, unknown, or so close to a known one that it must be a mistake.
    """
    place = (*path, key)
    if key in cls.reserved:
        raise source.error(place, cls.reserved[key])
    if not isinstance(key, str):
        raise source.error(place, f"the key {key} must be text; the section has the keys {', '.join(yaml_fields(cls))}")
    if issubclass(cls, OpenSection) and _closest(key, yaml_fields(cls), _TYPO_RATIO) is None:
        return
    if cls is TrainConfig and (key in _TOP_LEVEL_EXTRA or key.startswith(_OWN_KEY_PREFIXES)):
        return
    raise source.error(place, unknown_key(cls, key, path))


def unknown_key(cls: type[Section], key: str, path: KeyPath) -> str:
    """The sentence about an unknown key, with the nearest known name that can be found."""
    own_names = yaml_fields(cls)
    close = _closest(key, own_names, _TYPO_RATIO)
    elsewhere = [name for name in all_keys() if name.rpartition(".")[2] == key and "." in name]
    if close is None and elsewhere:
        return f"unknown key here; did you mean {' or '.join(elsewhere[:2])}?"
    close = close or _closest(key, own_names, 0.55)
    if close is not None:
        return f"unknown key; did you mean {dotted((*path, close))}?"
    known = printable(", ".join(own_names), limit=400)
    own = "; keys of your own start with x-" if cls is TrainConfig else ""
    return f"unknown key; known here: {known}{own}"


def _closest(key: str, names: Iterable[str], ratio: float) -> str | None:
    wanted = key.lower().replace("-", "_")[:80]
    return next(iter(difflib.get_close_matches(wanted, list(names), n=1, cutoff=ratio)), None)


@cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key that YAML may set; the list of callbacks aside."""
    return tuple(_keys_below(TrainConfig, ""))


def _keys_below(cls: type[Section], prefix: str) -> Iterator[str]:
    for name, hint in yaml_fields(cls).items():
        yield prefix + name
        parts = () if get_origin(hint) is list else (hint, *get_args(hint))
        for part in filter(_is_section, parts):
            yield from _keys_below(part, f"{prefix}{name}.")
