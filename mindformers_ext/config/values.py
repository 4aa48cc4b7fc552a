"""Values against the annotated types of section.py: conversion of numbers, names of types and advice for messages."""

from __future__ import annotations

import math
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mindformers_ext.config.errors import show
from mindformers_ext.config.section import Unset

# `1e-6` is text to YAML 1.1, which wants `1.0e-6`; with an exponent the user can only have meant a number.
EXPONENT_FORM = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,4}")


class MismatchError(ValueError):
    """A value does not have the wanted type or range; the message says which would be right and what it is."""


def coerce(value: Any, hint: Any) -> Any:
    """`value` as an instance of `hint`, where only numbers change their type.

    Raises:
        MismatchError: another type, or out of range.
    """
    try:
        return _coerce(value, hint)
    except MismatchError:
        raise MismatchError(f"expected {type_name(hint)}, got {show(value)}{_advice(value, hint)}") from None


def _coerce(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        result = _coerce(value, arguments[0])
        if all(check.accepts(result) for check in arguments[1:]):
            return result
    elif origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _coerce(value, option)
            except MismatchError:
                continue
    elif origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
    elif origin is list:
        if isinstance(value, list):
            return [_coerce(item, arguments[0]) for item in value]
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is int or hint is float:
        return _number(value, hint)
    elif type(value) is hint:
        return value
    raise MismatchError


def _number(value: Any, hint: type) -> int | float:
    if isinstance(value, str) and EXPONENT_FORM.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise MismatchError
    if hint is float:
        return float(value)
    if value != int(value) or not -(2**63) <= value < 2**63:
        raise MismatchError
    return int(value)


def type_name(hint: Any) -> str:
    """The name of a type in a message."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([type_name(arguments[0]), *(check.text for check in arguments[1:])])
    if origin in (Union, types.UnionType):
        return ", or ".join(type_name(option) for option in arguments if not _is_unset(option))
    if origin is Literal:
        values = ", ".join(f"'{value}'" for value in arguments)
        return values if len(arguments) == 1 else f"one of {values}"
    if origin is list:
        return "a list" if arguments[0] is Any else f"a list (each entry {type_name(arguments[0])})"
    if origin is dict:
        return "a mapping"
    return {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}[hint]


def _is_unset(hint: Any) -> bool:
    return get_origin(hint) is Literal and get_args(hint) == (Unset.UNSET,)


def _advice(value: Any, hint: Any) -> str:
    """What to change when only the notation is wrong."""
    name = type_name(hint)
    if value is None:
        return "; leave the key out to get the default"
    if isinstance(value, (bool, int, float)) and re.search(r"\btext\b|'", name):
        return "; if it is meant as text, put it in quotes"
    if isinstance(value, str) and re.search("true or false|integer|number", name) and _is_bare_scalar(value):
        return "; remove the quotes"
    return ""


def _is_bare_scalar(text: str) -> bool:
    return text in ("true", "false", "True", "False") or re.fullmatch(r"[-+]?\d+(\.\d*)?", text) is not None
