"""Reads one YAML file into plain data, with the line of every key, within fixed limits.

PyYAML's safe loader does the scanning and the scalars; the tree is converted here so that lines are kept, and duplicate
keys, foreign tags and alias bombs are refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from mindformers_ext.config.errors import ConfigError, ConfigFileNotFoundError, KeyPath, Source, printable
from mindformers_ext.config.plain import MAX_DEPTH, MAX_VALUES, check_scalar

MAX_BYTES = 1 << 20

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = {_TAG + "str", _TAG + "timestamp", _TAG + "value"}  # dates stay as they are written
_MERGE_TAG = _TAG + "merge"


def read_yaml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Source]:
    """Reads the mapping that a YAML file holds.

    Args:
        path: the file: UTF-8, one document, at most `MAX_BYTES` bytes, `MAX_DEPTH` levels and `MAX_VALUES` values.

    Returns:
        The data (dict, list, str, int, float, bool, None) and its source, which knows the line of each key.

    Raises:
        ConfigFileNotFoundError: there is no such file.
        ConfigError: it cannot be read, or breaks a rule; the message names file and line.
    """
    name = printable(os.fsdecode(path), limit=None)
    text = _read_text(Path(path), name)
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        loader.file = name
        root = loader.get_single_node()
        if root is None or root.tag == _TAG + "null":
            raise ConfigError(f"{name}: the file is empty; it must hold sections such as 'inference:'")
        if not isinstance(root, MappingNode):
            raise ConfigError(f"{name}:{_line(root)}: the file must hold sections such as 'inference:', not one value")
        source = Source(name)
        return _Converter(loader, source).mapping(root, ()), source
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: the character U+{error.character:04X} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_sentence(name, error)) from None
    finally:
        if loader is not None:
            loader.dispose()


def read_inline(text: str) -> Any:
    """Reads one value from a command line: what YAML takes for a number, true, false, null or a quoted text becomes
    that, `[...]` and `{...}` become a list and a mapping. Anything else is text, character for character.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        value = None if root is None else _Converter(loader, Source()).value(root, ())
    except (yaml.YAMLError, ConfigError):
        return text
    if isinstance(root, ScalarNode):
        is_whole = root.end_mark.index == len(text)
        return value if is_whole and (root.style or root.tag not in _TEXT_TAGS) else text
    return value if text[:1] in ("[", "{") else text


def _read_text(path: Path, name: str) -> str:
    data = _read_bytes(path, name)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name}: is larger than {MAX_BYTES} bytes; put prompts in a file and name it in input_data")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: is not UTF-8 text; save the file as UTF-8") from None


def _read_bytes(path: Path, name: str) -> bytes:
    if "\0" in str(path):
        raise ConfigFileNotFoundError(f"{name}: is not a possible path; it holds a zero character")
    try:
        mode = path.stat().st_mode
        if S_ISDIR(mode):
            raise ConfigError(f"{name}: is a directory; give the YAML file itself")
        if not S_ISREG(mode):
            raise ConfigError(f"{name}: is not a regular file; give the YAML file itself")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigFileNotFoundError(f"{name}: there is no such file; give the path of a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


def _sentence(name: str, error: yaml.MarkedYAMLError) -> str:
    """PyYAML's error, which spans lines, as one sentence."""
    mark = error.problem_mark or error.context_mark
    place = f"{name}:{mark.line + 1}" if mark else name
    problem = printable(str(error.problem or error.context or "unknown problem"), limit=200)
    if "'\\t'" in problem:
        return f"{place}: a tab is used for indentation; use spaces"
    since = error.context_mark
    context = f" {error.context} that starts in line {since.line + 1}:" if error.problem and since else ""
    column = f" (column {mark.column + 1})" if mark else ""
    return f"{place}: is not valid YAML:{context} {problem}{column}; check indentation, colons and quotes there"


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _Loader(yaml.SafeLoader):
    """The safe loader with a limit on depth, because composing recurses."""

    file = ""
    depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            line = self.peek_event().start_mark.line + 1
            raise ConfigError(f"{self.file}:{line}: is nested deeper than {MAX_DEPTH} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Converter:
    """Turns composed nodes into plain data and notes the line of each key in `source`."""

    def __init__(self, loader: _Loader, source: Source) -> None:
        self.source = source
        self.values = 0
        self.open_nodes: set[int] = set()
        self.scalars = {
            _TAG + "null": loader.construct_yaml_null,
            _TAG + "bool": loader.construct_yaml_bool,
            _TAG + "int": loader.construct_yaml_int,
            _TAG + "float": loader.construct_yaml_float,
        }

    def fail(self, node: Node, path: KeyPath, problem: str) -> NoReturn:
        self.source.lines[path] = _line(node)
        raise self.source.error(path, problem)

    def value(self, node: Node, path: KeyPath) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            self.fail(node, path, f"the file holds more than {MAX_VALUES} values, aliases counted as often as used")
        if isinstance(node, ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open_nodes or len(path) > MAX_DEPTH:
            self.fail(node, path, f"an alias contains itself or nests deeper than {MAX_DEPTH} levels")
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, path)
            return self.sequence(node, path)
        finally:
            self.open_nodes.discard(id(node))

    def sequence(self, node: Node, path: KeyPath) -> list[Any]:
        if node.tag != _TAG + "seq":
            self.fail_tag(node, path)
        result = []
        for index, item in enumerate(node.value):
            item_path = (*path, index)
            self.source.lines[item_path] = _line(item)
            result.append(self.value(item, item_path))
        return result

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[Any, Any]:
        if node.tag != _TAG + "map":
            self.fail_tag(node, path)
        result: dict[Any, Any] = {}
        merges: list[Node] = []
        pairs: dict[Any, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE_TAG:
                merges += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                continue
            key = self.key(key_node, path)
            if key in pairs:
                first = _line(pairs[key][0])
                self.fail(key_node, (*path, key), f"this key is given twice, first in line {first}; remove one")
            pairs[key] = (key_node, value_node)
        for merged in reversed(merges):  # the first one named wins, and a key of the mapping itself wins over all
            content = self.value(merged, path)
            if not isinstance(content, dict):
                self.fail(merged, path, "'<<' must be followed by an alias of a mapping")
            result.update(content)
        for key, (key_node, value_node) in pairs.items():
            key_path = (*path, key)
            self.source.lines[key_path] = _line(key_node)
            result[key] = self.value(value_node, key_path)
        return result

    def key(self, node: Node, path: KeyPath) -> str | int:
        if not isinstance(node, ScalarNode):
            self.fail(node, path, "a key must be one word; if braces are meant as text, put them in quotes")
        key = self.scalar(node, path)
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            written = printable(node.value)
            self.fail(node, path, f"the key '{written}' is not text to YAML; put it in quotes")
        return key

    def scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        if node.tag not in _TEXT_TAGS and node.tag not in self.scalars:
            self.fail_tag(node, path)
        try:
            value = node.value if node.tag in _TEXT_TAGS else self.scalars[node.tag](node)
        except (ValueError, KeyError, IndexError, OverflowError):
            kind = node.tag.removeprefix(_TAG)
            self.fail(
                node, path, f"'{printable(node.value)}' cannot be read as {kind}; if it is text, put it in quotes"
            )
        try:
            return check_scalar(value)
        except ValueError as error:
            self.fail(node, path, str(error))

    def fail_tag(self, node: Node, path: KeyPath) -> NoReturn:
        tag = printable(str(node.tag).replace(_TAG, "!!"))
        self.fail(node, path, f"the tag {tag} is not allowed; write plain values")
