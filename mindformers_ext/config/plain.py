"""Plain data: what a configuration may be made of, whether it comes from YAML, a mapping or an override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindformers_ext.config.errors import KeyPath, Source, printable

MAX_DEPTH = 32
MAX_VALUES = 100_000


def check_scalar(value: Any) -> Any:
    """Returns a scalar that can be stored, printed and written as UTF-8.

    Raises:
        ValueError: an integer beyond 64 bits, or text with half of a surrogate pair.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError("this integer does not fit in 64 bits")
    if isinstance(value, str) and not value.isascii():
        try:
            # JSON writes one character beyond U+FFFF as two escapes; YAML reads them as two halves.
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise ValueError("this text holds half of a surrogate pair, which is no character") from None
    return value


def plain_copy(value: Any, source: Source, path: KeyPath = ()) -> Any:
    """A deep copy of `value` made of dict, list, str, int, float, bool and None; a tuple becomes a list.

    Raises:
        ConfigError: another type, a key that is neither text nor an integer, or data beyond the limits.
    """
    return _Copier(source).copy(value, path)


class _Copier:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.values = 0

    def copy(self, value: Any, path: KeyPath) -> Any:
        self.values += 1
        if len(path) > MAX_DEPTH or self.values > MAX_VALUES:
            limits = f"{MAX_DEPTH} levels or {MAX_VALUES} values"
            raise self.source.error(path[:3], f"holds more than {limits}, or contains itself")
        if isinstance(value, Mapping):
            return {self.key(key, path): self.copy(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.copy(item, (*path, index)) for index, item in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return self.scalar(value, path)
        raise self.source.error(path, f"an object of type {type(value).__name__} cannot be part of a configuration")

    def scalar(self, value: Any, path: KeyPath) -> Any:
        try:
            return check_scalar(value)
        except ValueError as error:
            raise self.source.error(path, str(error)) from None

    def key(self, key: Any, path: KeyPath) -> str | int:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise self.source.error(path, f"the key {printable(repr(key))} must be text")
        return self.scalar(key, path)
