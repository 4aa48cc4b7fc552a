"""From the user's records to rows of output: reading, tokenizing, batching, writing. Knows nothing of tensors."""

from mindformers_ext.predict.completion import Completion
from mindformers_ext.predict.records import Record, RecordError, normalize_input, record_count
from mindformers_ext.predict.run import RunResult, run_generation
from mindformers_ext.predict.sources import InputFiles, input_files, reads_stdin
from mindformers_ext.predict.summary import RunSummary, Timings, format_summary
from mindformers_ext.predict.templates import PromptTemplates, TemplateLimitError, read_templates
from mindformers_ext.predict.tokenizer import Tokenizer
from mindformers_ext.predict.writers import Writer, check_output, open_writer

__all__ = [
    "Completion",
    "InputFiles",
    "PromptTemplates",
    "Record",
    "RecordError",
    "RunResult",
    "RunSummary",
    "TemplateLimitError",
    "Timings",
    "Tokenizer",
    "Writer",
    "check_output",
    "format_summary",
    "input_files",
    "normalize_input",
    "open_writer",
    "read_templates",
    "reads_stdin",
    "record_count",
    "run_generation",
]
