"""From the user's records to rows of output: reading, tokenizing, batching, writing. Knows nothing of tensors."""

from mindformers_ext.predict.completion import Completion
from mindformers_ext.predict.records import Record, RecordError, input_file, normalize_input
from mindformers_ext.predict.run import RunResult, run_generation
from mindformers_ext.predict.summary import RunSummary, Timings, format_summary
from mindformers_ext.predict.tokenizer import Tokenizer
from mindformers_ext.predict.writers import Writer, check_output, open_writer

__all__ = [
    "Completion",
    "Record",
    "RecordError",
    "RunResult",
    "RunSummary",
    "Timings",
    "Tokenizer",
    "Writer",
    "check_output",
    "format_summary",
    "input_file",
    "normalize_input",
    "open_writer",
    "run_generation",
]
