"""The task `generate`: the model goes on with the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindformers_ext.predict.isolation import Job
from mindformers_ext.predict.records import Record, RecordError
from mindformers_ext.predict.rows import ANSWER_NAMES, answer_row
from mindformers_ext.predict.summary import RunSummary
from mindformers_ext.predict.task import prompt_ids
from mindformers_ext.predict.text import answer_text
from mindformers_ext.predict.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationTask:
    """See `run_generation` for the attributes, and `Task` for the rest."""

    tokenizer: Tokenizer
    max_new_tokens: int
    max_length: int | None = None
    vocab_size: int | None = None
    num_sequences: int = 1
    skip_special_tokens: bool = True
    names: frozenset[str] = ANSWER_NAMES

    def prepare(self, record: Record, content: int) -> Job:
        """See `Task`."""
        ids = prompt_ids(record, self.tokenizer, self.vocab_size)
        if isinstance(ids, RecordError):
            return Job(record, [], ids, content)
        if self.max_length is not None and len(ids) + self.max_new_tokens > self.max_length:
            message = (
                f"{len(ids)} prompt tokens + max_new_tokens {self.max_new_tokens} exceed the model's length "
                f"{self.max_length}"
            )
            return Job(record, [], RecordError("too_long", message), content)
        return Job(record, ids, None, content)

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """See `Task`."""
        rows = []
        for index, (completion, (_, ids)) in enumerate(zip(job.answers, self.outputs(job), strict=True)):
            new_ids = ids[len(job.prompt_ids) :]
            text = answer_text(
                self.tokenizer, job.prompt_ids, new_ids, completion.stop_position, self.skip_special_tokens
            )
            sequence = index if self.num_sequences > 1 else None
            rows.append(answer_row(job.record, job.prompt_ids, new_ids, text, completion, sequence))
        return rows

    def count(self, job: Job, summary: RunSummary) -> None:
        """See `Task`."""
        summary.add_answer(len(job.prompt_ids))
        for completion in job.answers:
            summary.add_sequence(len(completion.token_ids), completion.finish_reason)

    def outputs(self, job: Job) -> list[tuple[int, Any]]:
        """Returns (sample_idx, prompt ids + new ids) of each answer."""
        # A foreign model may give numpy's integers.
        return [(job.record.index, job.prompt_ids + [int(token) for token in one.token_ids]) for one in job.answers]
