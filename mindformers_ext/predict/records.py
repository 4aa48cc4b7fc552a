"""Turns what the user gives as input into one `Record` for each prompt, whatever is wrong with it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, Literal, TypeAlias

from mindformers_ext.predict import sources
from mindformers_ext.predict.json_array import Fault, split_elements
from mindformers_ext.predict.sources import STDIN, DamagedFileError, input_files, open_source, read_lines, suffix_of
from mindformers_ext.predict.strict_json import parse_json

logger = logging.getLogger(__name__)

ErrorType: TypeAlias = Literal["parse", "schema", "template", "tokenize", "too_long", "forward", "oom"]


@dataclass(frozen=True)
class RecordError:
    """Why a record has no answer: a class that programs can count and a sentence for people."""

    type: ErrorType
    message: str


@dataclass(frozen=True)
class Record:
    """One line, list element or literal of the input; exactly one of `prompt` and `error` is set.

    `index` counts records from 0 over all files (blank lines are no records); `fields` are the user's own, to be
    written back. `add_special_tokens` tells whether the tokenizer adds its own to the prompt: a chat template has
    written them already.
    """

    index: int
    fields: dict[str, Any]
    prompt: str | None
    error: RecordError | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Prompt:
    """The text that goes to the tokenizer; see `Record.add_special_tokens`."""

    text: str
    add_special_tokens: bool = True


# Makes the prompt of a record from its fields.
MakePrompt: TypeAlias = "Callable[[dict[str, Any]], Prompt | RecordError]"
# What a source yields before it is numbered: the fields of a record or the reason why there are none.
_Item: TypeAlias = "dict[str, Any] | RecordError"


def normalize_input(
    input_data: Any, dataset_field: str = "instruction", make_prompt: MakePrompt | None = None
) -> Iterator[Record]:
    """Yields the records of any of the input forms; the arguments are checked by the call, before iteration.

    Files are opened one after the other and read as records are asked for. What is wrong inside a file becomes an error
    record in its place; a compressed file that is damaged, or a `.json` array that is cut off, ends with one.

    Args:
        input_data: a path, a pattern or the text of one prompt (`str`, or `os.PathLike` for a path only), `-` for
            lines of JSON on standard input, a dict, a dict with the one key `files` (a path or pattern, or a list of
            them), or a list of only dicts or only strings, which are prompts. Files: `.jsonl` (one object a line),
            `.json` (an object, or an array of objects or strings), any other (one prompt a line), and each of them
            followed by `.gz`. A string that names no file but looks like a path is an error: it ends in one of
            `INPUT_SUFFIXES`, or has no white space and a slash, or `.gz` at its end.
        dataset_field: the field that holds the prompt; strings and text lines become records with this one field.
        make_prompt: makes the prompt of a record; None takes the text of `dataset_field`, and after a newline that of
            a field "input" if it holds text.

    Raises:
        FileNotFoundError: `input_data` is a path (or looks like one) and there is no such file.
        OSError: the file cannot be opened.
        TypeError: `input_data` is none of the forms above.
        ValueError: no input, or a file that is named twice.
    """
    if not isinstance(dataset_field, str) or not dataset_field:
        raise ValueError(f"dataset_field must be the name of a field, not {dataset_field!r}")
    if input_data is None:
        raise ValueError("no input_data was given: pass a file, a prompt, a dict or a list")
    files = input_files(input_data)
    items: Iterable[_Item]
    if files is not None:
        for path in files.paths:  # a file that cannot be read is refused before anything slow happens
            with open(path, "rb"):
                pass
        items = chain.from_iterable(_read_file(path, dataset_field) for path in files.paths)
    elif sources.reads_stdin(input_data):
        items = _read_file(STDIN, dataset_field)
    elif isinstance(input_data, str):
        items = [{dataset_field: input_data}]
    elif isinstance(input_data, Mapping):
        items = [_json_copy(input_data)]
    elif isinstance(input_data, list | tuple):
        items = _read_list(input_data, dataset_field)
    else:
        raise TypeError(f"input_data must be a path, a string, a dict or a list, not {type(input_data).__name__}")
    return _number(items, make_prompt or field_prompt(dataset_field))


def record_count(input_data: Any) -> int | None:
    """Returns how many records there are where that is known without reading: not of files and standard input."""
    if input_data is None or input_files(input_data) is not None or sources.reads_stdin(input_data):
        return None
    return len(input_data) if isinstance(input_data, list | tuple) else 1


def field_prompt(dataset_field: str, may_be_empty: bool = False) -> MakePrompt:
    """Returns what takes the prompt from the field `dataset_field`, joined with a text under "input" by a newline."""

    def make(fields: dict[str, Any]) -> Prompt | RecordError:
        if dataset_field not in fields:
            chat = "messages" in fields
            hint = "; set predict.chat_template to use its field 'messages'" if chat else ""
            return RecordError("schema", f"the record has no field {dataset_field!r}{hint}")
        prompt = fields[dataset_field]
        if not isinstance(prompt, str):
            return RecordError("schema", f"field {dataset_field!r} must be a string, not {json_kind(prompt)}")
        extra = fields.get("input")
        if dataset_field != "input" and isinstance(extra, str) and extra:
            prompt = f"{prompt}\n{extra}" if prompt else extra
        if prompt or may_be_empty:
            return Prompt(prompt)
        return RecordError("schema", f"field {dataset_field!r} is empty")

    return make


def _number(items: Iterable[_Item], make_prompt: MakePrompt) -> Iterator[Record]:
    for index, item in enumerate(items):
        if isinstance(item, RecordError):
            yield Record(index, {}, None, item)
            continue
        prompt = make_prompt(item)
        if isinstance(prompt, RecordError):
            yield Record(index, item, None, prompt)
        else:
            yield Record(index, item, prompt.text, add_special_tokens=prompt.add_special_tokens)


def _read_file(path: str, dataset_field: str) -> Iterator[_Item]:
    suffix = ".jsonl" if path == STDIN else suffix_of(path)
    label = sources.STDIN_NAME if path == STDIN else path
    count = 0
    try:
        with open_source(path) as file:
            if suffix == ".jsonl":
                items = _read_jsonl(file, label)
            elif suffix == ".json":
                items = _read_json(file, label, dataset_field)
            else:
                items = _read_text(file, label, dataset_field)
            for item in items:
                yield item
                count += 1
    except DamagedFileError as error:
        message = f"{label}: the compressed file is damaged after its first {count} records; the rest is lost: {error}"
        yield RecordError("parse", message)


def _read_list(values: list[Any] | tuple[Any, ...], dataset_field: str) -> Iterator[_Item]:
    kind: type = str if values and isinstance(values[0], str) else Mapping
    odd = next((number for number, value in enumerate(values) if not isinstance(value, kind)), None)
    if odd is not None:
        raise TypeError(
            f"input_data must be a list of only strings or only dicts; element {odd} is {type(values[odd]).__name__}"
        )
    if values and kind is str and all(os.path.isfile(value) for value in values):
        logger.warning("input_data is a list of prompts, each the name of a file; to read files, give {files: [...]}")
    return ({dataset_field: value} if isinstance(value, str) else _json_copy(value) for value in values)


def _read_json(file: BinaryIO, label: str, dataset_field: str) -> Iterator[_Item]:
    for number, text in enumerate(split_elements(file, sources.MAX_LINE_BYTES)):
        place = f"{label}: element {number}"
        element = RecordError("parse", text.message) if isinstance(text, Fault) else _parse(text)
        if isinstance(element, RecordError):
            yield RecordError("parse", f"{place}: {element.message}")
        elif isinstance(element, str):
            yield {dataset_field: element}
        elif isinstance(element, dict):
            yield element
        else:
            yield RecordError("schema", f"{place} is {json_kind(element)}, not an object or a string")


def _read_jsonl(file: BinaryIO, label: str) -> Iterator[_Item]:
    for number, line in read_lines(file):
        value = _parse(line) if line is not None else _too_long_line()
        if isinstance(value, RecordError):
            yield RecordError(value.type, f"{label}:{number}: {value.message}")
        elif not isinstance(value, dict):
            yield RecordError("schema", f"{label}:{number}: the line is {json_kind(value)}, not an object")
        else:
            yield value


def _read_text(file: BinaryIO, label: str, dataset_field: str) -> Iterator[_Item]:
    for number, line in read_lines(file):
        try:
            yield {dataset_field: line.decode("utf-8")} if line is not None else _too_long_line()
        except UnicodeDecodeError as error:
            yield RecordError("parse", f"{label}:{number}: not UTF-8 at byte {error.start + 1} of the line")


def _too_long_line() -> RecordError:
    return RecordError("parse", f"the line has more than {sources.MAX_LINE_BYTES} bytes")


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


def json_kind(value: Any) -> str:
    """Returns what JSON calls a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((str, "a string"), (list, "an array"), (dict, "an object")):
        if isinstance(value, kind):
            return name
    return "a number"
