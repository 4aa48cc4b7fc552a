"""Writes the data of the quickstart: training files, prompts with their answers, and the tokenizer.

Everything is made from the lists in ``configs/quickstart/knowledge`` and from two-digit sums. The same lists give the
same files, byte for byte.

    python scripts/make_quickstart_data.py
    python scripts/make_quickstart_data.py --output build/quickstart --exam output/quickstart/exam.jsonl
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart"

VOCAB_SIZE = 1536
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
# Digits and Chinese characters stand alone, other words take the space before them along. A prompt and its answer
# always meet at such a border, so they have the same tokens together as apart.
WORD_PATTERN = r" ?\p{N}|\p{Han}| ?[^\s\p{Han}\p{N}\p{P}\p{S}]+| ?[\p{P}\p{S}]+|\s+"

# Two thirds of all sums are trained. The rest, with those asked below, is never seen: the model has to compute it.
TRAINED_SUMS = 8000

ASKED_SUMS = (
    "37 + 45",
    "58 + 26",
    "64 + 19",
    "48 + 37",
    "76 + 85",
    "99 + 99",
    "93 - 58",
    "71 - 46",
    "80 - 23",
    "52 - 17",
)
ASKED_CAPITALS = (
    "The capital of France is",
    "The capital of Japan is",
    "The capital of Egypt is",
    "The capital of Australia is",
    "The capital of Kazakhstan is",
    "The capital of the Netherlands is",
    "中国的首都是",
    "巴西的首都是",
)
ASKED_POEMS = (
    "床前明月光，",
    "欲穷千里目，",
    "谁知盘中餐，",
    "飞流直下三千尺，",
    "Shall I compare thee to a summer's day?",
    "Tyger Tyger, burning bright,",
    "Hope is the thing with feathers",
    "And all that's best of dark and bright",
)
ASKED_WORDS = (
    "English to Chinese: water =",
    "English to Chinese: friend =",
    "English to Chinese: library =",
    "English to Chinese: butterfly =",
    "Chinese to English: 月亮 =",
    "Chinese to English: 熊猫 =",
    "Chinese to English: 音乐 =",
    "Chinese to English: 明天 =",
)


@dataclass(frozen=True)
class Question:
    """A prompt and the text that continues it.

    Attributes:
        kind: arithmetic, capital, poem or translation.
        prompt: what the user writes.
        answer: what the model writes, with the space that separates it from the prompt.
    """

    kind: str
    prompt: str
    answer: str


def capitals(path: Path) -> Iterator[Question]:
    """Yields the capital of every country in English and, where the list has it, in Chinese."""
    for row in _rows(path):
        yield Question("capital", f"The capital of {row['country']} is", f" {row['capital']}")
        if row["country_zh"]:
            yield Question("capital", f"{row['country_zh']}的首都是", row["capital_zh"])


def translations(path: Path) -> Iterator[Question]:
    """Yields every word of the list in both directions."""
    for row in _rows(path):
        yield Question("translation", f"English to Chinese: {row['english']} =", f" {row['chinese']}")
        yield Question("translation", f"Chinese to English: {row['chinese']} =", f" {row['english']}")


def poem_lines(path: Path) -> Iterator[Question]:
    """Yields every line of a poem with the line that follows it."""
    previous = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            previous = ""
            continue
        if previous:
            yield Question("poem", previous, f" {line}" if line.isascii() else line)
        previous = line


def sums() -> Iterator[Question]:
    """Yields all sums of two two-digit numbers, and all differences that are not negative."""
    for a in range(10, 100):
        for b in range(10, 100):
            yield Question("arithmetic", f"{a} + {b} =", f" {a + b}")
            if a >= b:
                yield Question("arithmetic", f"{a} - {b} =", f" {a - b}")


def split_sums(questions: Iterable[Question], num_trained: int) -> tuple[list[Question], list[Question]]:
    """Splits sums into trained ones and others, as a digest of their text decides.

    ``a + b`` and ``b + a`` stay together: a sum that is not trained is unknown in either order.

    Returns:
        At least ``num_trained`` trained sums and the others, among them those of `ASKED_SUMS`.
    """
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(_unordered(question.prompt), []).append(question)
    asked = {_unordered(f"{text} =") for text in ASKED_SUMS}
    trained: list[Question] = []
    others: list[Question] = []
    for name in sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest()):
        (others if name in asked or len(trained) >= num_trained else trained).extend(groups[name])
    return trained, others


def check_unique(questions: Iterable[Question]) -> None:
    """Refuses a prompt with two different answers.

    Raises:
        ValueError: names the prompt and both answers.
    """
    answers: dict[str, str] = {}
    for question in questions:
        known = answers.setdefault(question.prompt, question.answer)
        if known != question.answer:
            raise ValueError(f"the prompt {question.prompt!r} has two answers: {known!r} and {question.answer!r}")


def train_tokenizer(questions: Iterable[Question]) -> Tokenizer:
    """Trains a byte-level BPE tokenizer, so that any text has tokens, on the texts of the questions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((question.prompt + question.answer for question in questions), trainer)
    return tokenizer


def main() -> None:
    """Reads the lists and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=QUICKSTART, help="folder to write to (default: %(default)s)")
    parser.add_argument(
        "--exam", type=Path, help="also write a prompt file with everything that is known and all sums not trained"
    )
    arguments = parser.parse_args()

    knowledge = QUICKSTART / "knowledge"
    facts = [
        *capitals(knowledge / "capitals.tsv"),
        *translations(knowledge / "words.tsv"),
        *poem_lines(knowledge / "poems.txt"),
    ]
    check_unique(facts)
    trained, others = split_sums(sums(), TRAINED_SUMS)
    known = {question.prompt: question for question in (*facts, *others)}
    asked = (*(f"{text} =" for text in ASKED_SUMS), *ASKED_CAPITALS, *ASKED_POEMS, *ASKED_WORDS)

    output: Path = arguments.output
    _write_training(output / "facts.jsonl", facts)
    _write_training(output / "sums.jsonl", trained)
    _write_prompts(output / "prompts.jsonl", [known[prompt] for prompt in asked])
    if arguments.exam:
        _write_prompts(arguments.exam, known.values())
    _write_tokenizer(output / "tokenizer", train_tokenizer([*facts, *trained]))
    print(f"{len(facts)} facts, {len(trained)} trained sums, {len(others)} others, {len(asked)} prompts: {output}")


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream, delimiter="\t", restval="", quoting=csv.QUOTE_NONE)


def _unordered(prompt: str) -> str:
    left, operator, right, _ = prompt.split()
    return " ".join([operator, *(sorted((left, right)) if operator == "+" else (left, right))])


def _write_training(path: Path, questions: Iterable[Question]) -> None:
    _write_records(path, ({"prompt": question.prompt, "response": question.answer} for question in questions))


def _write_prompts(path: Path, questions: Iterable[Question]) -> None:
    _write_records(
        path,
        (
            {"instruction": question.prompt, "answer": question.answer.strip(), "kind": question.kind}
            for question in questions
        ),
    )


def _write_records(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
