"""JSON as the standard has it: no NaN, no key twice, no endless nesting."""

from __future__ import annotations

import json
import math
from typing import Any

# Far below Python's recursion limit: what was read can also be written, from any depth of the call stack.
MAX_NESTING = 200


def parse_json(text: bytes | str) -> Any:
    """Returns the value of JSON text.

    Raises:
        ValueError: one sentence that says what is wrong.
    """
    too_deep = f"JSON nested deeper than {MAX_NESTING} levels"
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("{") + text.count("[") > MAX_NESTING and _nesting(value) > MAX_NESTING:
        raise ValueError(too_deep)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} is there twice")
            seen.add(key)
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is beyond the range of a float")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def _nesting(value: Any) -> int:
    depth = 0
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth
