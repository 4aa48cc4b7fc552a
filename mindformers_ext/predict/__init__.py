"""From the user's records to rows of output: reading, tokenizing, batching, writing. Knows nothing of tensors."""

from mindformers_ext.predict.answer_metrics import AnswerMetrics
from mindformers_ext.predict.completion import Completion
from mindformers_ext.predict.finished import FinishedRecords
from mindformers_ext.predict.isolation import FAULTS_OF_RECORDS, BatchError, Decode, described_fault, fault_of
from mindformers_ext.predict.job import OutputJob, open_job
from mindformers_ext.predict.output_files import check_output
from mindformers_ext.predict.records import Record, RecordError, normalize_input, record_count
from mindformers_ext.predict.refill import Refill
from mindformers_ext.predict.run import RunResult, run_generation
from mindformers_ext.predict.sources import InputFiles, input_files, reads_stdin
from mindformers_ext.predict.stop import JobStoppedError, StopSignals
from mindformers_ext.predict.summary import RunSummary, Timings, format_summary
from mindformers_ext.predict.templates import PromptTemplates, TemplateLimitError, read_templates
from mindformers_ext.predict.tokenizer import Tokenizer

__all__ = [
    "FAULTS_OF_RECORDS",
    "AnswerMetrics",
    "BatchError",
    "Completion",
    "Decode",
    "FinishedRecords",
    "InputFiles",
    "JobStoppedError",
    "OutputJob",
    "PromptTemplates",
    "Record",
    "RecordError",
    "Refill",
    "RunResult",
    "RunSummary",
    "StopSignals",
    "TemplateLimitError",
    "Timings",
    "Tokenizer",
    "check_output",
    "described_fault",
    "fault_of",
    "format_summary",
    "input_files",
    "normalize_input",
    "open_job",
    "read_templates",
    "reads_stdin",
    "record_count",
    "run_generation",
]
