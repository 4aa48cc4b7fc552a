"""A failing batch costs the record at fault only, and memory that runs out makes batches smaller."""

import pytest

from mindformers_ext.predict import Completion, Record, described_fault
from mindformers_ext.predict.isolation import Answerer, Job


class Memory:
    """Answers batches of at most `room` tokens, pads included."""

    def __init__(self, room, failure=MemoryError):
        self.room = room
        self.failure = failure
        self.sizes = []

    def __call__(self, prompts, indices):
        self.sizes.append(len(prompts))
        if len(prompts) * max(map(len, prompts)) > self.room:
            raise self.failure("Out of memory")
        return [Completion([index], "length") for index in indices]


def jobs(lengths):
    return [Job(Record(index, {}, "x"), [1] * length, None) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("failure", [MemoryError, RuntimeError])
def test_batches_stay_at_the_size_that_fits_after_memory_ran_out(failure, log):
    memory = Memory(room=20, failure=failure)
    answerer = Answerer(memory, 8, 1)
    batch = jobs([10] * 8)
    answerer.answer(batch)
    assert [job.answers[0].token_ids for job in batch] == [[index] for index in range(8)]
    assert memory.sizes == [8, 4, 2, 2, 2, 2] and answerer.batch_size == 2
    assert "batches have at most 2 prompts from now on" in log.text
    memory.sizes.clear()
    answerer.answer(jobs([10] * 5))
    assert memory.sizes == [2, 2, 1]


def test_a_record_that_fits_into_no_batch_is_an_error_of_its_own_and_the_others_live():
    memory = Memory(room=20)
    answerer = Answerer(memory, 4, 1)
    batch = jobs([10, 30, 10, 10])
    answerer.answer(batch)
    assert [None if job.error is None else job.error.type for job in batch] == [None, "oom", None, None]
    assert answerer.batch_size == 1


def test_another_fault_leaves_the_size_of_batches():
    def decode(prompts, indices):
        if 2 in indices:
            raise RuntimeError("kernel")
        return [Completion([index], "length") for index in indices]

    answerer = Answerer(decode, 4, 1)
    batch = jobs([3] * 4)
    answerer.answer(batch)
    assert [job.error is not None for job in batch] == [False, False, True, False]
    assert answerer.batch_size == 4


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("MemoryError", "", "oom"),
        ("RuntimeError", "Out of Memory!!! Request memory size: 1G", "oom"),
        ("RuntimeError", "Device(id:0) memory isn't enough and alloc failed, kernel name: MatMul", "oom"),
        ("RuntimeError", "Allocate memory failed", "oom"),
        ("RuntimeError", "Malloc for kernel output failed, Memory isn't enough, node: MatMul", "oom"),
        ("RuntimeError", "std::bad_alloc", "oom"),
        ("RuntimeError", "The memory is not enough", "oom"),
        ("RuntimeError", "kernel failed", "forward"),
        ("ValueError", "the shapes of memory and query differ", "forward"),
        ("FloatingPointError", "a row has no finite score", "forward"),
    ],
)
def test_memory_that_ran_out_is_known_by_what_libraries_say(kind, message, expected):
    fault = described_fault(kind, message)
    assert fault.type == expected and fault.message.startswith(kind)
