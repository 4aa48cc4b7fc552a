"""A run's output on the process that writes it: begun, gone on with, or already there."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mindformers_ext.predict.finished import FinishedRecords
from mindformers_ext.predict.identity import identity_differences
from mindformers_ext.predict.journal import SCHEMA, Journal
from mindformers_ext.predict.manifest import Manifest, fitting_manifest, write_manifest
from mindformers_ext.predict.output_files import check_output, journal_path
from mindformers_ext.predict.stop import JobStoppedError
from mindformers_ext.predict.summary import RunSummary, row_output
from mindformers_ext.predict.writers import keeps_ids, read_rows, write_rows

logger = logging.getLogger(__name__)

_SHOWN_DIFFERENCES = 12


class OutputJob:
    """Takes the rows of finished records in any order, and publishes them as the output, in input order, at the end.

    A context manager, which gives the journal up. Until `publish` has come to its end, the journal has everything.

    Attributes:
        path: the output.
        manifest: that of an output which was complete before; then there is nothing to do. None otherwise.
        facts: what the run that began the journal chose; given ones if this run did.
        finished: the records that need not be done.
        num_finished: how many these are.
        num_errors: how many of them have an error instead of an answer.
    """

    def __init__(self, path: Path, journal: Journal | None, manifest: Manifest | None, facts: dict[str, Any]) -> None:
        """See `open_job`."""
        self.path = path
        self.manifest = manifest
        self.facts = facts
        self._journal = journal
        self.finished = FinishedRecords() if journal is None else journal.finished
        self.num_finished = 0 if journal is None else journal.num_finished
        self.num_errors = 0 if journal is None else journal.num_errors

    def __enter__(self) -> OutputJob:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def write(self, index: int, content: int, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of a finished record to the journal; see `Journal.append`.

        Raises:
            JobStoppedError: the disk is full or gone.
        """
        assert self._journal is not None
        try:
            self._journal.append(index, content, rows)
        except OSError as error:
            raise JobStoppedError(_told(error)) from error

    def publish(self, num_records: int, outputs: list[tuple[int, Any]] | None = None) -> RunSummary:
        """Builds the output and its manifest, and removes the journal.

        Args:
            num_records: number of records of the input, all finished.
            outputs: is appended (sample_idx, ids of prompt and answer) of every answer.

        Returns:
            The counts of the whole output.

        Raises:
            JobStoppedError: the disk is full or gone; the journal stays.
        """
        journal = self._journal
        assert journal is not None and journal.header is not None
        summary = RunSummary()

        def counted(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            for row in rows:
                summary.add_row(row)
                if outputs is not None and "error" not in row:
                    outputs.append((row["sample_idx"], row_output(row)))
                yield row

        try:
            journal.sync()
            written = write_rows(self.path, counted(journal.rows(num_records)))
            manifest = Manifest(
                output=self.path.name,
                bytes=written.size,
                sha256=written.sha256,
                records=num_records,
                rows=written.rows,
                errors=dict(summary.errors),
                finish_reasons=dict(summary.finish_reasons),
                prompt_tokens=summary.prompt_tokens,
                new_tokens=summary.new_tokens,
                identity=journal.header.identity,
                facts=journal.header.facts,
                score_sums=summary.score_sums,
            )
            write_manifest(self.path, manifest)
        except OSError as error:
            raise JobStoppedError(_told(error)) from error
        journal.remove()
        self._journal = None
        return summary

    def stored_outputs(self) -> list[tuple[int, Any]]:
        """Returns (sample_idx, ids of prompt and answer) of every answer in an output that was complete before."""
        return [(row["sample_idx"], row_output(row)) for row in read_rows(self.path) if "error" not in row]


def open_job(
    output: str | os.PathLike[str],
    identity: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    resume: bool | Literal["auto"] = "auto",
    *,
    repeatable: bool = True,
    needs_ids: bool = False,
) -> OutputJob:
    """Begins the job of an output, goes on with it, or finds it done, making the parent folders.

    A journal is gone on with if its identity is this one; one of another identity that has answers is refused, so that
    nothing computed is lost by mistake. An output with a fitting manifest of this identity is left as it is.

    Args:
        output: the output file.
        identity: what its rows depend on; values that JSON can hold.
        facts: what this run chose itself, which a run that goes on with its journal takes over.
        resume: False starts over, whatever is there. True never replaces an output that is not this job's.
        repeatable: whether another run of this identity would write the same rows. If not, a complete output is made
            again unless `resume` is True.
        needs_ids: whether a complete output is of use only if the ids of its answers can be read from it.

    Raises:
        ValueError: see `check_output`; an unknown `resume`; another run is writing this output; or there is a journal
            or, with `resume` True, an output of another job.
        OSError: the journal cannot be made.
    """
    if resume not in (True, False, "auto"):
        raise ValueError(f"predict.resume must be true, false or auto, not {resume!r}")
    check_output(output)
    path = Path(os.path.abspath(output))
    identity = json.loads(json.dumps(identity))
    given = dict(facts or {})
    if resume is not False and not journal_path(path).exists():
        manifest = fitting_manifest(path)
        same = manifest is not None and not identity_differences(manifest.identity, identity)
        if manifest is not None and same and (repeatable or resume is True) and (keeps_ids(path) or not needs_ids):
            return OutputJob(path, None, manifest, manifest.facts)
        if resume is True and not same and path.exists():
            raise ValueError(_not_ours(path, manifest, identity))
    journal = Journal(journal_path(path))
    try:
        if _goes_on(journal, identity, resume):
            logger.info("%s: going on, %d records are finished", journal.path, journal.num_finished)
        else:
            journal.start(identity, given)
        assert journal.header is not None
        return OutputJob(path, journal, None, journal.header.facts)
    except BaseException:
        journal.close()
        raise


def _goes_on(journal: Journal, identity: Mapping[str, Any], resume: bool | Literal["auto"]) -> bool:
    """Whether a journal is gone on with; False starts over."""
    if journal.header is None or not journal.has_records:
        return False
    if journal.header.schema != SCHEMA and resume is not False:
        raise ValueError(
            f"{journal.path} has the form {journal.header.schema} of a journal, this version knows {SCHEMA}. Finish "
            "the job with the version that began it, give another output, or start over with predict.resume: false, "
            "which drops its records"
        )
    if resume is False:
        logger.warning("%s: starting over, as predict.resume says; the records in it are dropped", journal.path)
        return False
    differences = identity_differences(journal.header.identity, identity)
    if differences and journal.num_finished > journal.num_errors:
        raise ValueError(
            f"{journal.path} has finished records of another job: {_listed(differences)}. Run that job to its end, "
            "give another output, or start over with predict.resume: false, which drops them"
        )
    return not differences  # of another job that has no answer yet, nothing is lost


def _not_ours(path: Path, manifest: Manifest | None, identity: Mapping[str, Any]) -> str:
    reason = "it has no fitting manifest"
    if manifest is not None:
        reason = _listed(identity_differences(manifest.identity, identity))
    return (
        f"predict.resume is true, but {path} is not the output of this job: {reason}. Give another output, or replace "
        "it with predict.resume: auto"
    )


def _listed(differences: Sequence[str]) -> str:
    more = len(differences) - _SHOWN_DIFFERENCES
    return "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")


def _told(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
