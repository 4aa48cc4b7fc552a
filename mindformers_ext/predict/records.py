"""Turns what the user gives as input into one `Record` for each prompt, whatever is wrong with it."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mindformers_ext.predict.strict_json import parse_json

ErrorType: TypeAlias = Literal["parse", "schema", "tokenize", "too_long", "forward", "oom"]

INPUT_SUFFIXES = (".jsonl", ".json", ".txt")
MAX_LINE_BYTES = 64 * 1024**2
MAX_JSON_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class RecordError:
    """Why a record has no answer: a class that programs can count and a sentence for people."""

    type: ErrorType
    message: str


@dataclass(frozen=True)
class Record:
    """One line, list element or literal of the input; exactly one of `prompt` and `error` is set.

    `index` counts records from 0 (blank lines are no records); `fields` are the user's own, to be written back.
    """

    index: int
    fields: dict[str, Any]
    prompt: str | None
    error: RecordError | None = None


# What a source yields before it is numbered: the fields of a record or the reason why there are none.
_Item: TypeAlias = "dict[str, Any] | RecordError"


def normalize_input(input_data: Any, dataset_field: str = "instruction") -> Iterator[Record]:
    """Yields the records of any of the input forms; the arguments are checked by the call, before iteration.

    Args:
        input_data: a path or the text of one prompt (`str`, or `os.PathLike` for a path only), a dict, or a list of
            only dicts or only strings. Files: `.jsonl` (one object a line, read lazily), `.json` (an object, or an
            array of objects or strings), any other (one prompt a line, read lazily). A string that names no file but
            looks like a path is an error: it ends in one of `INPUT_SUFFIXES`, or has a slash and no white space.
        dataset_field: the field that holds the prompt; strings and text lines become records with this one field.
            A string under "input" is appended to the prompt after a newline.

    Raises:
        FileNotFoundError: `input_data` is a path (or looks like one) and there is no such file.
        OSError: the file cannot be opened.
        TypeError: `input_data` is none of the forms above.
        ValueError: no input, or a `.json` file that is not JSON.
    """
    if not isinstance(dataset_field, str) or not dataset_field:
        raise ValueError(f"dataset_field must be the name of a field, not {dataset_field!r}")
    if input_data is None:
        raise ValueError("no input_data was given: pass a file, a prompt, a dict or a list")
    path = input_file(input_data)
    items: Iterable[_Item]
    if path is not None:
        items = _read_file(path, dataset_field)
    elif isinstance(input_data, str):
        items = [{dataset_field: input_data}]
    elif isinstance(input_data, Mapping):
        items = [_json_copy(input_data)]
    elif isinstance(input_data, list | tuple):
        items = _read_list(input_data, dataset_field)
    else:
        raise TypeError(f"input_data must be a path, a string, a dict or a list, not {type(input_data).__name__}")
    return _number(items, dataset_field)


def input_file(input_data: Any) -> str | None:
    """Returns the path of the file that `input_data` names, None when it is the data itself.

    Raises:
        FileNotFoundError: it looks like a path, or is an `os.PathLike`, and there is no such file.
    """
    if isinstance(input_data, os.PathLike):
        path = os.fsdecode(input_data)
    elif isinstance(input_data, str):
        path = input_data
    else:
        return None
    if os.path.isfile(path):
        return path
    if isinstance(input_data, str) and not _looks_like_path(path):
        return None
    kind = "is a directory, not a file" if os.path.isdir(path) else "does not exist"
    hint = "; to use it as a prompt, put it in a list" if isinstance(input_data, str) else ""
    raise FileNotFoundError(f"input_data {path!r} {kind}{hint}")


def _looks_like_path(text: str) -> bool:
    stripped = text.strip()
    if len(stripped.splitlines()) > 1:
        return False
    return stripped.lower().endswith(INPUT_SUFFIXES) or (os.sep in stripped and len(stripped.split()) == 1)


def _number(items: Iterable[_Item], dataset_field: str) -> Iterator[Record]:
    for index, item in enumerate(items):
        if isinstance(item, RecordError):
            yield Record(index, {}, None, item)
            continue
        prompt = _prompt_of(item, dataset_field)
        if isinstance(prompt, RecordError):
            yield Record(index, item, None, prompt)
        else:
            yield Record(index, item, prompt)


def _prompt_of(fields: dict[str, Any], dataset_field: str) -> str | RecordError:
    if dataset_field not in fields:
        return RecordError("schema", f"the record has no field {dataset_field!r}")
    prompt = fields[dataset_field]
    if not isinstance(prompt, str):
        return RecordError("schema", f"field {dataset_field!r} must be a string, not {_json_kind(prompt)}")
    extra = fields.get("input")
    if dataset_field != "input" and isinstance(extra, str) and extra:
        prompt = f"{prompt}\n{extra}" if prompt else extra
    return prompt if prompt else RecordError("schema", f"field {dataset_field!r} is empty")


def _read_file(path: str, dataset_field: str) -> Iterable[_Item]:
    # Opened once here so that a file that cannot be read is refused before anything slow happens.
    with open(path, "rb"):
        pass
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".jsonl":
        return _read_jsonl(path)
    if suffix == ".json":
        return _read_json(path, dataset_field)
    return _read_text(path, dataset_field)


def _read_list(values: list[Any] | tuple[Any, ...], dataset_field: str) -> Iterator[_Item]:
    kind: type = str if values and isinstance(values[0], str) else Mapping
    odd = next((number for number, value in enumerate(values) if not isinstance(value, kind)), None)
    if odd is not None:
        raise TypeError(
            f"input_data must be a list of only strings or only dicts; element {odd} is {type(values[odd]).__name__}"
        )
    return ({dataset_field: value} if isinstance(value, str) else _json_copy(value) for value in values)


def _read_json(path: str, dataset_field: str) -> list[_Item]:
    if os.path.getsize(path) > MAX_JSON_BYTES:
        raise ValueError(f"{path}: a .json file is read whole and may have {MAX_JSON_BYTES} bytes; use .jsonl")
    with open(path, "rb") as file:
        value = _parse(file.read().removeprefix(codecs.BOM_UTF8))
    if isinstance(value, RecordError):
        raise ValueError(f"{path}: {value.message}")
    if not isinstance(value, list | dict):
        raise ValueError(f"{path}: expected an object or an array of objects or strings, found {_json_kind(value)}")
    elements = value if isinstance(value, list) else [value]
    items: list[_Item] = []
    for number, element in enumerate(elements):
        if isinstance(element, str):
            items.append({dataset_field: element})
        elif isinstance(element, dict):
            items.append(element)
        else:
            message = f"{path}: element {number} is {_json_kind(element)}, not an object or a string"
            items.append(RecordError("schema", message))
    return items


def _read_jsonl(path: str) -> Iterator[_Item]:
    for number, line in _lines(path):
        value = _parse(line) if line is not None else _too_long_line()
        if isinstance(value, RecordError):
            yield RecordError(value.type, f"{path}:{number}: {value.message}")
        elif not isinstance(value, dict):
            yield RecordError("schema", f"{path}:{number}: the line is {_json_kind(value)}, not an object")
        else:
            yield value


def _read_text(path: str, dataset_field: str) -> Iterator[_Item]:
    for number, line in _lines(path):
        try:
            yield {dataset_field: line.decode("utf-8")} if line is not None else _too_long_line()
        except UnicodeDecodeError as error:
            yield RecordError("parse", f"{path}:{number}: not UTF-8 at byte {error.start + 1} of the line")


def _lines(path: str) -> Iterator[tuple[int, bytes | None]]:
    """Yields (line number from 1, line without its ending), None for a line that is too long; skips blank lines."""
    with open(path, "rb") as file:
        number = 0
        # Only \n ends a line: U+2028 and its kind may stand inside a string.
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
                continue
            # Files glued together have a byte order mark in the middle too.
            line = line.removesuffix(b"\n").removesuffix(b"\r").removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def _too_long_line() -> RecordError:
    return RecordError("parse", f"the line has more than {MAX_LINE_BYTES} bytes")


def _parse(text: bytes | str) -> Any:
    """Returns the value of JSON text, or a RecordError."""
    try:
        return parse_json(text)
    except ValueError as error:
        return RecordError("parse", str(error))


def _json_copy(fields: Mapping[Any, Any]) -> _Item:
    """Returns the record as a JSON file would have given it, so that it can be written back."""
    try:
        value = _parse(json.dumps(dict(fields), default=_plain, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        return RecordError("schema", f"the record cannot be written as JSON: {error}")
    return value


def _plain(value: Any) -> Any:
    # numpy scalars and arrays, as data frames give them
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((str, "a string"), (list, "an array"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return "a number"
