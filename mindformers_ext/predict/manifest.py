"""The manifest beside an output: what made it, and by what one knows that it is whole."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindformers_ext.predict.output_files import manifest_path, replace_file
from mindformers_ext.predict.summary import RunSummary

SCHEMA = 1


@dataclass(frozen=True)
class Manifest:
    """What is known of a complete output.

    Attributes:
        output: its name.
        bytes: its size.
        sha256: of its content, hex.
        records: number of records of the input.
        rows: number of rows of the output.
        errors: records without an answer, by class.
        finish_reasons: number of answers by the reason why they ended.
        prompt_tokens: of all answered records.
        new_tokens: of all answers.
        identity: everything that the rows depend on, see `identity_differences`.
        facts: what the run chose itself: the seed of sampling.
        score_sums: of scores, see `RunSummary`.
        manifest: version of this form.
    """

    output: str
    bytes: int
    sha256: str
    records: int
    rows: int
    errors: dict[str, int]
    finish_reasons: dict[str, int]
    prompt_tokens: int
    new_tokens: int
    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    score_sums: dict[str, float] = field(default_factory=dict)
    manifest: int = SCHEMA

    def summary(self) -> RunSummary:
        """Returns the counts as those of a run, which took no time."""
        return RunSummary(
            num_answers=self.records - sum(self.errors.values()),
            errors=Counter(self.errors),
            finish_reasons=Counter(self.finish_reasons),
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            num_resumed=self.records,
            seed=self.facts.get("seed"),
            score_sums=dict(self.score_sums),
        )


def write_manifest(output: Path, manifest: Manifest) -> None:
    """Puts the manifest beside its output.

    Raises:
        OSError: the disk is full or gone.
    """
    text = json.dumps(asdict(manifest), indent=1) + "\n"
    replace_file(manifest_path(output), lambda file: file.write(text.encode()))


def fitting_manifest(output: Path) -> Manifest | None:
    """Returns the manifest of an output that is what the manifest says, byte for byte; None otherwise."""
    try:
        value = json.loads(manifest_path(output).read_bytes())
        manifest = Manifest(**value)
        size = output.stat().st_size
        if manifest.manifest != SCHEMA or manifest.bytes != size or manifest.sha256 != file_hash(output):
            return None
    except (OSError, ValueError, TypeError):
        return None
    return manifest


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file's content, hex.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        checksum = hashlib.sha256()
        while block := file.read(1 << 20):
            checksum.update(block)
    return checksum.hexdigest()
