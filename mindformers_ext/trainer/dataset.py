"""Training data: documents from jsonl or text files, tokenised and packed into blocks of one length."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mindformers_ext.config import DATALOADERS
from mindformers_ext.models.mask import MASKED
from mindformers_ext.predict.strict_json import parse_json
from mindformers_ext.runtime import logger

IGNORE_INDEX = -100


class Encoder(Protocol):
    """What the dataset asks of a tokenizer."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end a document; the first one is appended to each."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text."""


@dataclass(frozen=True)
class Batch:
    """Samples of one micro-batch.

    Attributes:
        input_ids: int32 [B, S].
        labels: int32 [B, S]; the token that follows each input token, -100 where nothing is to be learned.
        documents: int32 [B, S]; number of the document within its block, from 1; 0 marks padding.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    documents: np.ndarray

    @property
    def num_counted(self) -> int:
        """Number of labels that take part in the loss."""
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))

    @property
    def num_tokens(self) -> int:
        """Number of input tokens that are not padding."""
        return int(np.count_nonzero(self.documents))

    @property
    def position_ids(self) -> np.ndarray:
        """int32 [B, S]; positions start again at 0 with every document."""
        index = np.arange(self.documents.shape[1], dtype=np.int32)
        begins = np.ones(self.documents.shape, bool)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)

    @property
    def attention_mask(self) -> np.ndarray | None:
        """float32 [B, 1, S, S], added to the scores: causal, and closed between documents.

        None where no block holds more than one document: padding stands at the end, where plain causal attention
        keeps it away from every real token.
        """
        if self.documents.max() <= 1:
            return None
        length = self.documents.shape[1]
        visible = self.documents[:, :, None] == self.documents[:, None, :]
        visible &= np.tri(length, dtype=bool)
        return np.where(visible, np.float32(0), MASKED)[:, None]

    def unpacked(self) -> Batch:
        """Returns the same documents one a row, as long as the longest, for models that cannot keep them apart."""
        index = np.arange(len(self.documents))[:, None] * (self.documents.max() + 1) + self.documents
        real = self.documents > 0
        numbers, rows, lengths = np.unique(index[real], return_inverse=True, return_counts=True)
        columns = self.position_ids[real]
        shape = (len(numbers), int(lengths.max()))
        input_ids, documents = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        labels = np.full(shape, IGNORE_INDEX, np.int32)
        input_ids[rows, columns], labels[rows, columns] = self.input_ids[real], self.labels[real]
        documents[rows, columns] = 1
        return Batch(input_ids, labels, documents)


class TrainDataset(Protocol):
    """What the training loop asks of a dataset: an endless, addressable stream of samples."""

    def __len__(self) -> int:
        """Number of samples of one epoch."""

    def batch(self, start: int, size: int) -> Batch:
        """Returns samples ``start`` to ``start + size`` of the stream of epochs."""


class PackedDataset:
    """Blocks of tokens, read as an endless stream: epoch after epoch, each in its own order.

    Sample ``k`` of the stream depends on ``k`` and the seed alone, so training can go on from any position, and a
    step may straddle two epochs.

    Args:
        input_ids: int32 [N, S].
        labels: int32 [N, S].
        documents: int32 [N, S]; see `Batch`.
        shuffle: draws a new order for every epoch; otherwise blocks come as they are.
        seed: seed of the order.
    """

    def __init__(
        self, input_ids: np.ndarray, labels: np.ndarray, documents: np.ndarray, shuffle: bool = False, seed: int = 0
    ) -> None:
        if not len(input_ids):
            raise ValueError("the training dataset has no samples")
        self._input_ids, self._labels, self._documents = input_ids, labels, documents
        self._shuffle, self._seed = shuffle, seed
        self._epoch = -1
        self._order = np.arange(len(input_ids))

    def __len__(self) -> int:
        return len(self._input_ids)

    def batch(self, start: int, size: int) -> Batch:
        """Returns samples ``start`` to ``start + size`` of the stream."""
        rows = np.array([self._row(index) for index in range(start, start + size)])
        return Batch(self._input_ids[rows], self._labels[rows], self._documents[rows])

    def _row(self, index: int) -> int:
        epoch, offset = divmod(index, len(self))
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self), self._seed, epoch)
        return int(self._order[offset])


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of ``range(count)`` that (seed, epoch) determine, the same under every numpy version."""
    bits = np.random.PCG64([seed, epoch]).random_raw(count)
    return np.argsort(bits, kind="stable")


@dataclass(frozen=True)
class Document:
    """Token ids of one document, EOS at the end; tokens before ``first`` are given and not learned."""

    ids: list[int]
    first: int


def build_dataset(
    kind: str,
    path: str | os.PathLike[str] | Sequence[str],
    tokenizer: Encoder,
    seq_length: int,
    *,
    text_field: str = "text",
    prompt_field: str | None = None,
    response_field: str | None = None,
    packing: bool = True,
    shuffle: bool = False,
    seed: int = 0,
    vocab_size: int | None = None,
) -> PackedDataset:
    """Reads, tokenises and packs the documents of one or several files.

    Args:
        kind: ``JsonlDataset`` (one JSON object a line) or ``TextDataset`` (every line that is not blank is a document).
        path: file or files.
        tokenizer: its first EOS id ends every document.
        seq_length: tokens of a block; longer documents are cut into pieces.
        text_field: field that holds the text of a record.
        prompt_field: field of the part that is given; together with ``response_field`` instead of ``text_field``.
        response_field: field of the part that is learned.
        packing: several documents a block; they do not see each other. Without it each block holds one document.
        shuffle: mixes the documents before packing, and the blocks anew in every epoch.
        seed: seed of the shuffling.
        vocab_size: size of the model's vocabulary, to be checked against; None skips the check.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: unusable options or data; for data the message begins with ``file:line:``.
    """
    if kind not in DATALOADERS:
        raise ValueError(f"train_dataset.dataloader.type {kind!r} is not supported; use {' or '.join(DATALOADERS)}")
    if (prompt_field is None) != (response_field is None):
        raise ValueError("train_dataset.dataloader.prompt_field and response_field go together; one of them is missing")
    if prompt_field is not None and kind != "JsonlDataset":
        raise ValueError("train_dataset.dataloader.prompt_field needs type JsonlDataset")
    if not tokenizer.eos_token_ids:
        raise ValueError("the tokenizer names no EOS token; training needs one to end documents with")

    fields = (text_field,) if prompt_field is None or response_field is None else (prompt_field, response_field)
    paths = [path] if isinstance(path, (str, os.PathLike)) else path
    documents = []
    for file in map(Path, paths):
        for number, texts in _read_jsonl(file, fields) if kind == "JsonlDataset" else _read_text(file):
            documents.append(_tokenize(texts, tokenizer, f"{file}:{number}", vocab_size))
    if not documents:
        raise ValueError(f"no documents in {', '.join(map(str, paths))}")
    if shuffle:
        # Neighbours in a file are often alike. This order comes from an epoch that no run reaches.
        documents = [documents[index] for index in shuffled(len(documents), seed, epoch=2**32)]
    return _pack(documents, seq_length, packing, shuffle, seed)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields number and text of the lines that are not blank; only a line feed ends a line."""
    if not path.exists():
        raise FileNotFoundError(f"train_dataset.dataloader.path: {path} does not exist")
    if path.is_dir():
        raise ValueError(f"train_dataset.dataloader.path: {path} is a directory; name the files")
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                # Files glued together have a byte order mark in the middle too.
                line = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid UTF-8 ({error.reason} at byte {error.start})") from None
            if line:
                yield number, line


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_text(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in _lines(path):
        yield number, [line]


def _read_jsonl(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in _lines(path):
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}")
        for field in fields:
            value = record.get(field)
            if not isinstance(value, str) or not value:
                found = f"it is {value!r:.40}" if field in record else f"the record has {', '.join(record) or 'none'}"
                raise ValueError(f"{path}:{number}: field {field!r} must be a text that is not empty; {found}")
            if not _is_unicode(value):
                raise ValueError(f"{path}:{number}: field {field!r} holds half of a surrogate pair, which is no text")
        yield number, [record[field] for field in fields]


def _tokenize(texts: Sequence[str], tokenizer: Encoder, place: str, vocab_size: int | None) -> Document:
    """Tokenises a text, or a prompt and its response, and ends it with EOS."""
    ids, first = list(tokenizer.encode("".join(texts))), 1
    if len(texts) > 1:
        prompt = list(tokenizer.encode(texts[0]))
        if ids[: len(prompt)] != prompt:
            # A token spans the seam. Prediction will be given the prompt's own tokens, so training is too.
            ids = prompt + _without_prefix(tokenizer.encode(texts[1]), tokenizer.encode(""))
        first = max(1, len(prompt))
    if ids[-1:] != [tokenizer.eos_token_ids[0]]:
        ids.append(tokenizer.eos_token_ids[0])
    if len(ids) < 2:
        raise ValueError(f"{place}: the text gives no tokens")
    if vocab_size is not None and max(ids) >= vocab_size:
        raise ValueError(f"{place}: token id {max(ids)} does not fit the model's vocab_size {vocab_size}")
    return Document(ids, first)


def _without_prefix(ids: Sequence[int], prefix: Sequence[int]) -> list[int]:
    return list(ids[len(prefix) :] if list(ids[: len(prefix)]) == list(prefix) else ids)


def _pack(documents: Sequence[Document], length: int, packing: bool, shuffle: bool, seed: int) -> PackedDataset:
    pieces = [piece for document in documents for piece in _pieces(document, length)]
    if not pieces:
        raise ValueError("no document leaves a token to learn")
    sizes = [len(ids) for ids, _ in pieces]
    blocks = assign_blocks(sizes, length, in_order=not shuffle) if packing else list(range(len(pieces)))
    shape = (max(blocks) + 1, length)
    inputs, numbers = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    labels = np.full(shape, IGNORE_INDEX, np.int32)
    filled = [(0, 0)] * shape[0]
    for (ids, targets), block in zip(pieces, blocks, strict=True):
        begin, number = filled[block]
        end = begin + len(ids)
        inputs[block, begin:end], labels[block, begin:end], numbers[block, begin:end] = ids, targets, number + 1
        filled[block] = (end, number + 1)

    too_long = sum(len(document.ids) - 1 > length for document in documents)
    if too_long:
        logger.warning("%d of %d documents are longer than %d tokens and were cut", too_long, len(documents), length)
    logger.info(
        "training data: %d documents, %d tokens (%d learned), %d blocks of %d, %.1f%% padding",
        *(len(documents), sum(sizes), np.count_nonzero(labels != IGNORE_INDEX), *shape),
        100 - 100 * sum(sizes) / inputs.size,
    )
    return PackedDataset(inputs, labels, numbers, shuffle, seed)


def _pieces(document: Document, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (input ids, labels) of at most ``length`` tokens; pieces without a token to learn are left out."""
    ids = np.array(document.ids, np.int32)
    inputs, labels = ids[:-1], ids[1:].copy()
    labels[: document.first - 1] = IGNORE_INDEX
    for start in range(0, len(inputs), length):
        targets = labels[start : start + length]
        if (targets != IGNORE_INDEX).any():
            yield inputs[start : start + length], targets


def assign_blocks(sizes: Sequence[int], capacity: int, in_order: bool = False) -> list[int]:
    """Chooses a block for each piece.

    Args:
        sizes: tokens of each piece, 1 to ``capacity``.
        capacity: tokens of a block.
        in_order: fills one block after the other, so that pieces keep their order. Otherwise a piece goes into the
            fullest block that has room for it (best fit), which leaves little padding.

    Returns:
        The number of the block of each piece.
    """
    return list(_next_fit(sizes, capacity) if in_order else _best_fit(sizes, capacity))


def _next_fit(sizes: Sequence[int], capacity: int) -> Iterator[int]:
    block, free = -1, 0
    for size in sizes:
        if size > free:
            block, free = block + 1, capacity
        free -= size
        yield block


def _best_fit(sizes: Sequence[int], capacity: int) -> Iterator[int]:
    by_free: list[list[int]] = [[] for _ in range(capacity + 1)]
    occupied = 0  # bit n is set where by_free[n] holds a block
    count = 0
    for size in sizes:
        candidates = occupied >> size
        if candidates:
            free = size + (candidates & -candidates).bit_length() - 1
            block = by_free[free].pop()
            if not by_free[free]:
                occupied ^= 1 << free
        else:
            free, block, count = capacity, count, count + 1
        by_free[free - size].append(block)
        occupied |= 1 << (free - size)
        yield block
