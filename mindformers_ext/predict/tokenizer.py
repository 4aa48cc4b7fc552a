"""Text to token ids and back, from the tokenizer files of a checkpoint folder."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tokenizers

logger = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_MAP_FILE = "special_tokens_map.json"
# Files of other libraries' tokenizers, from which a tokenizer.json can be made.
_FOREIGN_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "tiktoken.model")
MAX_FILE_BYTES = 256 * 1024**2
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The newer name first: it hides the older one.
_EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")


class Tokenizer:
    """A `tokenizers` pipeline with the special tokens that the model's files name."""

    def __init__(self, backend: tokenizers.Tokenizer, named_tokens: Mapping[str, str] | None = None) -> None:
        """Wraps `backend` as it is, without its padding and truncation.

        Args:
            backend: the pipeline; ids and texts are exactly what it gives.
            named_tokens: content of "bos_token", "eos_token", "pad_token" ..., each in the vocabulary of `backend`;
                kept as the attribute of that name.
        """
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.named_tokens = dict(named_tokens or {})
        self._named_ids = {name: backend.token_to_id(content) for name, content in (named_tokens or {}).items()}
        self._has_template = backend.num_special_tokens_to_add(is_pair=False) > 0
        self._size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> Tokenizer:
        """Reads tokenizer.json and, where they are there, tokenizer_config.json and special_tokens_map.json.

        The post-processor in tokenizer.json alone decides which special tokens `encode` adds: add_bos_token and
        add_eos_token of tokenizer_config.json do not count beside a tokenizer.json, as in transformers 5.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: the folder has no tokenizer.json, or one of the files is damaged.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"the tokenizer folder {str(folder)!r} does not exist or is not a directory")
        path = folder / _TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(_missing_tokenizer(folder))
        _refuse_huge(path)
        try:
            with _panics_as_errors:
                backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for every kind of damage
            raise ValueError(f"{path}: not a usable tokenizer file: {error}") from error
        config = _read_config(folder)
        named = {name: _content(folder, name, config[name]) for name in _NAMED_TOKENS if config.get(name) is not None}
        _add_special_tokens(backend, folder, config)
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        tokenizer = cls(backend, named)
        tokenizer._warn_of_idle_flags(folder, config)
        return tokenizer

    def _warn_of_idle_flags(self, folder: Path, config: Mapping[str, Any]) -> None:
        template = self._backend.encode("").ids
        for name in ("bos_token", "eos_token"):
            flag = config.get(f"add_{name}")
            added = self._named_ids.get(name) in template
            if name in self._named_ids and isinstance(flag, bool) and flag != added:
                action = "adds it" if added else "does not add it"
                logger.warning("%s: add_%s is %s, but tokenizer.json %s", folder / _CONFIG_FILE, name, flag, action)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`.

        With `add_special_tokens` the tokens of the file's template are added (a BOS, mostly), but a text that begins
        with them already, as a chat template writes it, gets them once.

        Raises:
            ValueError: the text is not valid Unicode (half of a surrogate pair), or the pipeline gives up on it.
        """
        try:
            with _panics_as_errors:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            if not isinstance(text, str):
                raise
            raise ValueError("the text holds half of a surrogate pair, which is not valid Unicode") from error
        ids: list[int] = encoding.ids
        if not self._has_template:
            return ids
        added = encoding.special_tokens_mask
        prefix = added.index(0) if 0 in added else len(added)
        return ids[prefix:] if prefix and ids[prefix : 2 * prefix] == ids[:prefix] else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`; ids without a token (padded rows of an embedding) give nothing."""
        with _panics_as_errors:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_new(self, prompt_ids: Sequence[int], new_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text that `new_ids` add to the prompt, with the space that a decoder drops at a text's start."""
        before = self.decode(prompt_ids, skip_special_tokens)
        whole = self.decode([*prompt_ids, *new_ids], skip_special_tokens)
        if whole.startswith(before):
            return whole[len(before) :]
        # New bytes that are no character can change how a byte-fallback decoder shows the end of the prompt.
        return self.decode(new_ids, skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included: the rows that an embedding must have."""
        return self._size

    @property
    def bos_token_id(self) -> int | None:
        """The id of tokenizer_config.json's bos_token, None without one."""
        return self._named_ids.get("bos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of tokenizer_config.json's eos_token, () without one."""
        eos = self._named_ids.get("eos_token")
        return () if eos is None else (eos,)

    @property
    def pad_token_id(self) -> int | None:
        """The id of tokenizer_config.json's pad_token, None without one; it may lie beyond the model's vocabulary."""
        return self._named_ids.get("pad_token")


class _PanicsAsErrors:
    """Context manager that turns a panic of the library, as of a regular expression without end, into a ValueError.

    The library derives it from BaseException, so it would end a run for the sake of one record. A class, because it is
    entered three times a record, and a generator costs as much as decoding a short text.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise ValueError(f"the tokenizer gives up: {error}") from None


_panics_as_errors = _PanicsAsErrors()


def _refuse_huge(path: Path) -> None:
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes; a tokenizer's file has at most {MAX_FILE_BYTES}")


def _missing_tokenizer(folder: Path) -> str:
    found = [name for name in _FOREIGN_FILES if (folder / name).is_file()]
    if not found:
        return f"{folder}: no {_TOKENIZER_FILE}; the checkpoint folder must hold the model's tokenizer files"
    return (
        f"{folder}: {', '.join(found)} without a {_TOKENIZER_FILE}; where transformers is installed, make one with "
        f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_object(folder / _CONFIG_FILE)
    if "added_tokens_decoder" not in config:  # files of old versions keep the names apart, and those win
        special_map = _read_object(folder / _SPECIAL_MAP_FILE)
        config.update({key: value for key, value in special_map.items() if key != "additional_special_tokens"})
    return config


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    _refuse_huge(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value


def _add_special_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Tells `backend` every special token of `config`; those it does not know yet get new ids."""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(key.isdecimal() for key in decoder):
        raise ValueError(f"{folder / _CONFIG_FILE}: added_tokens_decoder must map ids to tokens")
    for key in sorted(decoder, key=int):
        token = _added_token(folder, f"added_tokens_decoder.{key}", decoder[key])
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    values = {key: value for key, value in config.items() if key in _NAMED_TOKENS or _is_model_token(key, value)}
    key = next((key for key in _EXTRA_TOKENS if config.get(key)), _EXTRA_TOKENS[0])
    extra = config.get(key) or []
    if not isinstance(extra, list | dict):
        raise ValueError(f"{folder / _CONFIG_FILE}: {key} must be a list of tokens")
    pairs = extra.items() if isinstance(extra, dict) else enumerate(extra)
    values.update({f"{key}.{name}": value for name, value in pairs})
    tokens = [_added_token(folder, key, value) for key, value in values.items() if value is not None]
    backend.add_special_tokens(tokens)


def _is_model_token(key: str, value: Any) -> bool:
    # "image_token": "<image>"; not flags such as add_bos_token
    return key.endswith("_token") and isinstance(value, str)


def _added_token(folder: Path, key: str, value: Any) -> tokenizers.AddedToken:
    content = _content(folder, key, value)
    if isinstance(value, str):
        return tokenizers.AddedToken(content, special=True, normalized=False)
    special = value.get("special", not key.startswith("added_tokens_decoder")) is True
    flags = {name: value.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
    return tokenizers.AddedToken(content, special=special, normalized=value.get("normalized", not special), **flags)


def _content(folder: Path, key: str, value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str) or not content:
        raise ValueError(f"{folder / _CONFIG_FILE}: {key} must be a string or an object with a string 'content'")
    return content
