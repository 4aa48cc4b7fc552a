"""How much of the disk an output takes, and whether there is so much."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from mindformers_ext.predict.output_files import journal_path
from mindformers_ext.predict.sources import input_files

logger = logging.getLogger(__name__)

# A row repeats its record, and has the prompt as ids: about one for 4 bytes of text, with up to 8 characters each.
_BYTES_OF_INPUT = 3
_BYTES_OF_TOKEN = 12  # of a new one: its id and its text
_BYTES_OF_ROW = 150  # names and numbers
_GIB = 2**30


def space_warning(
    output: str | os.PathLike[str], input_data: Any, num_records: int | None, num_new_tokens: int
) -> str | None:
    """Returns what to tell of a disk that may be too small for the journal and the output; None if it is not.

    Args:
        output: the output file, whose folder exists.
        input_data: as `normalize_input` takes it.
        num_records: of the whole input; None where that is not known, and then there is no estimate.
        num_new_tokens: most tokens that all answers to a record have together.
    """
    files = input_files(input_data)
    if files is None or num_records is None:
        return None
    path = Path(os.path.abspath(output))
    size = sum(os.path.getsize(source) for source in files.paths) * _BYTES_OF_INPUT
    size += num_records * (_BYTES_OF_ROW + num_new_tokens * _BYTES_OF_TOKEN)
    journal = journal_path(path)
    needed = 2 * size - (journal.stat().st_size if journal.exists() else 0)
    free = shutil.disk_usage(path.parent).free
    if needed <= free:
        return None
    return (
        f"{path.parent} has {free / _GIB:.1f} GiB free; the journal and the output of {num_records} records may need "
        f"{needed / _GIB:.1f} GiB. On a full disk the run stops, and the same call goes on where it ended"
    )


def warn_of_space(
    output: str | os.PathLike[str], input_data: Any, num_records: int | None, num_new_tokens: int
) -> None:
    """Logs what `space_warning` has to tell."""
    warning = space_warning(output, input_data, num_records, num_new_tokens)
    if warning is not None:
        logger.warning(warning)
