"""Records that replace each other: their rows are written as they are done, and a fault costs one record."""

from pathlib import Path

import pytest

from mindformers_ext.predict import Completion, JobStoppedError, Tokenizer, normalize_input, run_generation

DATA = Path(__file__).parents[2] / "data" / "tokenizer"
EOS = 0


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(DATA)


class Slots:
    """Ends the record with the fewest tokens first; a stretch fails in which a record of `bad` is under way."""

    def __init__(self, size, bad=(), failure=None):
        self.size, self.bad, self.failure = size, set(bad), failure or RuntimeError("kernel")
        self.under_way, self.most, self.resets, self.told = {}, [], [], []

    @property
    def room(self):
        return self.size - len(self.under_way)

    def advance(self, prompts, indices, more_to_come):
        assert len(prompts) <= self.room
        self.under_way |= dict(zip(indices, prompts, strict=True))
        assert self.under_way
        self.told.append(more_to_come)
        self.most.append(len(self.under_way))
        if self.bad.intersection(self.under_way):
            raise self.failure
        index = min(self.under_way, key=lambda index: len(self.under_way[index]))
        return [(index, [Completion([*self.under_way.pop(index), EOS], "eos")])]

    def reset(self, size):
        self.resets.append(size)
        self.size, self.under_way = size, {}


class Plain:
    """Answers batches; see `Slots`."""

    def __init__(self, bad=(), failure=None):
        self.bad, self.failure = set(bad), failure or RuntimeError("kernel")
        self.batches = []

    def __call__(self, prompts, indices):
        self.batches.append(list(indices))
        if self.bad.intersection(indices):
            raise self.failure
        return [Completion([*prompt, EOS], "eos") for prompt in prompts]


class Rows(list):
    def write(self, index, content, rows):
        self.extend(rows)


# The number of words of each.
WORDS = [9, 2, 5, 1, 7, 3, 3, 8, 1, 4]
RECORDS = [{"instruction": f"{'word ' * count}{index}"} for index, count in enumerate(WORDS)]


def run(tokenizer, refill, decode=None, data=RECORDS, **options):
    rows = Rows()
    result = run_generation(
        normalize_input(data),
        tokenizer,
        decode or Plain(),
        rows,
        **{"batch_size": 3, "max_new_tokens": 4, "refill": refill} | options,
    )
    return rows, result


def test_rows_are_those_of_batches_and_come_as_they_are_done(tokenizer):
    slots, plain = Slots(3), Plain()
    rows, result = run(tokenizer, slots, plain)
    expected, in_batches = run(tokenizer, None)
    by_index = lambda row: row["sample_idx"]  # noqa: E731
    assert sorted(rows, key=by_index) == sorted(expected, key=by_index)
    assert result.outputs == in_batches.outputs and plain.batches == []
    # Prompts begin in the order of batches, the longest first; the shortest of three is done first.
    assert [row["sample_idx"] for row in rows[:3]] == [4, 2, 9]
    assert slots.most == [3] * 8 + [2, 1]
    assert slots.told[0] and not slots.told[-1]


@pytest.mark.parametrize("bad", range(len(RECORDS)))
def test_a_fault_costs_its_record_only(tokenizer, bad):
    plain, slots = Plain([bad]), Slots(3, [bad])
    rows, result = run(tokenizer, slots, plain)
    assert sorted(row["sample_idx"] for row in rows) == list(range(len(RECORDS)))
    errors = [row for row in rows if "error" in row]
    assert [(row["sample_idx"], row["error_type"]) for row in errors] == [(bad, "forward")]
    assert all(len(batch) < 3 for batch in plain.batches)
    assert slots.most.count(3) > 3, "it went on with refill"


def test_a_fault_of_the_batch_alone_costs_no_record(tokenizer):
    rows, result = run(tokenizer, Slots(3, range(4)), Plain())
    assert result.summary.num_answers == len(rows) == len(RECORDS)


def test_memory_that_runs_out_leaves_fewer_records_under_way(tokenizer, log):
    slots = Slots(4, [7], MemoryError("Out of memory"))
    rows, result = run(tokenizer, slots, Plain(), batch_size=4)
    assert result.summary.num_answers == len(RECORDS)
    assert slots.resets[-1] == 2 and slots.most[-3:] == [2, 2, 1]
    assert "batches have at most 2 prompts from now on" in log.text


def test_mistakes_of_the_program_end_the_run(tokenizer):
    with pytest.raises(KeyError):
        run(tokenizer, Slots(3, [2], KeyError("x")))


def test_records_with_an_error_are_written_beside_the_others_and_stop_the_run_at_their_limit(tokenizer):
    data = [{"instruction": ""}, *RECORDS[:4], {"nothing": 1}, {"instruction": ""}]
    rows, result = run(tokenizer, Slots(3), data=data)
    assert result.summary.num_errors == 3 and len(rows) == 7
    with pytest.raises(JobStoppedError, match="max_errors is 2"):
        run(tokenizer, Slots(3), data=data, max_errors=2)
    with pytest.raises(JobStoppedError, match="on_error is abort"):
        run(tokenizer, Slots(3, [4]), Plain([4]), on_error="abort")


def test_a_stop_in_the_middle_keeps_what_is_done_and_the_next_run_does_the_rest(tokenizer):
    class Stopped(Slots):
        def advance(self, *arguments):
            if len(self.told) == 4:
                raise JobStoppedError("SIGTERM was received")
            return super().advance(*arguments)

    class Finished(dict):
        def has(self, index, content):
            return index in self

    rows = Rows()
    with pytest.raises(JobStoppedError):
        run_generation(
            normalize_input(RECORDS), tokenizer, Plain(), rows, batch_size=3, max_new_tokens=4, refill=Stopped(3)
        )
    done = {row["sample_idx"] for row in rows}
    assert len(done) == 4
    rest, result = run(tokenizer, Slots(3), finished=Finished.fromkeys(done))
    assert {row["sample_idx"] for row in rest} == set(range(len(RECORDS))) - done
    assert result.summary.num_resumed == 4


def test_the_model_is_prepared_once_and_only_for_records_that_can_be_answered(tokenizer):
    calls = []
    run(tokenizer, Slots(3), prepare=lambda: calls.append(1))
    assert calls == [1]
    run(tokenizer, Slots(3), data=[{"instruction": ""}], prepare=lambda: calls.append(1))
    assert calls == [1]


def test_reading_ahead_has_a_bound(tokenizer):
    read = []

    def records():
        for record in normalize_input(RECORDS * 10):
            read.append(record.index)
            yield record

    class Watched(Slots):
        def advance(self, *arguments):
            done = super().advance(*arguments)
            answered[0] += len(done)
            assert len(read) <= answered[0] + 3 + 2 * 12
            return done

    answered = [0]
    run_generation(records(), tokenizer, Plain(), None, batch_size=3, max_new_tokens=4, refill=Watched(3))
    assert len(read) == answered[0] == 100
