"""A job with an output: whatever happens to it, running it again gives the file of a run that nothing happened to."""

import errno
import json
import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from mindformers_ext.predict import (
    Completion,
    JobStoppedError,
    Record,
    RecordError,
    Tokenizer,
    normalize_input,
    open_job,
    run_generation,
)
from mindformers_ext.predict import job as job_module

TOKENIZER = Tokenizer.from_folder(Path(__file__).parents[2] / "data" / "tokenizer")
IDENTITY = {"input": {"sha256": "a"}, "generation": {"seed": 1, "top_k": 5}}
RECORDS = [{"instruction": "x" * (index % 4), "id": index} for index in range(12)]


def decode(prompts, indices):
    return [Completion([*prompt[::-1], index % 300], "length") for prompt, index in zip(prompts, indices, strict=True)]


def run(output, records=RECORDS, answer=decode, identity=IDENTITY, resume="auto", **options):
    """Runs the job; returns (summary, indices that were decoded)."""
    decoded = []

    def noting(prompts, indices):
        decoded.extend(indices)
        return answer(prompts, indices)

    opening = {name: options.pop(name) for name in ("repeatable", "needs_ids", "facts") if name in options}
    with open_job(output, identity, resume=resume, **opening) as job:
        if job.manifest is not None:
            return job.manifest.summary(), decoded
        options = {"batch_size": 2, "max_new_tokens": 9, "collect": False} | options
        result = run_generation(
            normalize_input(records),
            TOKENIZER,
            noting,
            job,
            finished=job.finished,
            num_errors=job.num_errors,
            **options,
        )
        return job.publish(result.summary.num_records + result.summary.num_resumed), decoded


class Killed(BaseException):
    """Ends a run as a kill would: nothing catches it."""


def killed_at(index):
    def answer(prompts, indices):
        if index in indices:
            raise Killed
        return decode(prompts, indices)

    return answer


@pytest.fixture(params=["o.jsonl", "o.json", "o.txt"])
def expected(request, tmp_path):
    """Content of an undisturbed run's output, whose name the path given beside it has."""
    folder = tmp_path / "expected"
    run(folder / request.param)
    assert sorted(os.listdir(folder)) == [request.param, f"{request.param}.manifest.json"]
    return (folder / request.param).read_bytes(), tmp_path / request.param


def test_a_killed_run_goes_on_and_answers_no_record_twice(expected):
    content, path = expected
    with pytest.raises(Killed):
        run(path, answer=killed_at(9))
    assert not path.exists()
    journal = path.with_name(f"{path.name}.journal")
    done = {json.loads(line)["index"] for line in journal.read_text().splitlines()[1:]}
    summary, decoded = run(path)
    assert path.read_bytes() == content and not journal.exists()
    assert done and not done & set(decoded)
    assert (summary.num_records, summary.num_errors) == (12, 3)


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_another_batch_size_goes_on_to_the_same_file(expected, batch_size):
    content, path = expected
    with pytest.raises(Killed):
        run(path, answer=killed_at(9))
    run(path, batch_size=batch_size)
    assert path.read_bytes() == content


def test_a_journal_cut_anywhere_in_its_last_two_lines_gives_the_same_file(tmp_path):
    run(tmp_path / "expected.jsonl")
    path, journal = tmp_path / "o.jsonl", tmp_path / "o.jsonl.journal"
    with pytest.raises(Killed):
        run(path, answer=killed_at(9), batch_size=1)
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert all(json.loads(line)["index"] in (6, 7, 10) for line in lines[-2:])
    for cut in range(len(whole) - len(lines[-1]) - len(lines[-2]), len(whole) + 1):
        journal.write_bytes(whole[:cut])
        run(path, resume=True)
        assert path.read_bytes() == (tmp_path / "expected.jsonl").read_bytes(), cut
        path.unlink()


@pytest.mark.parametrize("step", ["write_rows", "write_manifest", "remove"])
def test_a_crash_at_any_step_of_publishing_is_gone_on_from(expected, step, monkeypatch):
    content, path = expected

    def crash(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(job_module.Journal if step == "remove" else job_module, step, crash)
        with pytest.raises(Killed):
            run(path)
    _, decoded = run(path)
    assert path.read_bytes() == content and decoded == []
    assert sorted(os.listdir(path.parent)) == ["expected", path.name, f"{path.name}.manifest.json"]


def test_a_crash_between_the_last_write_and_the_new_name_leaves_the_old_output(expected, monkeypatch):
    content, path = expected
    path.write_text("old")

    def crash(source, target):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(Killed):
            run(path)
    assert path.read_text() == "old"
    assert run(path)[1] == [] and path.read_bytes() == content


def test_a_complete_output_is_left_alone_with_the_counts_of_its_run(expected):
    content, path = expected
    first, _ = run(path)
    stamp = path.stat().st_mtime_ns
    again, decoded = run(path)
    assert decoded == [] and path.stat().st_mtime_ns == stamp and path.read_bytes() == content
    assert again.to_dict() | {"num_resumed": 0} == first.to_dict() and again.num_resumed == 12
    assert run(path, resume=False)[1] != []


def test_existence_is_not_completeness(tmp_path):
    path = tmp_path / "o.jsonl"
    run(path)
    content = path.read_bytes()
    manifest = (tmp_path / "o.jsonl.manifest.json").read_bytes()
    for damage in (content[:-5], content.replace(b"length", b"lengtH"), b""):
        path.write_bytes(damage)
        assert run(path)[1] != [] and path.read_bytes() == content
    for damage in (manifest[:40], b"[]", b"{}", manifest.replace(b'"manifest": 1', b'"manifest": 2')):
        (tmp_path / "o.jsonl.manifest.json").write_bytes(damage)
        assert run(path)[1] != [] and path.read_bytes() == content


def test_a_text_output_that_ids_are_wanted_of_is_made_again(tmp_path):
    for name, again in (("o.txt", True), ("o.jsonl", False)):
        run(tmp_path / name)
        assert bool(run(tmp_path / name, needs_ids=True)[1]) is again


def test_a_complete_output_that_was_drawn_is_drawn_again_unless_resume_is_true(tmp_path):
    path = tmp_path / "o.jsonl"
    run(path, repeatable=False, facts={"seed": 3})
    assert run(path, repeatable=False, resume=True)[0].seed == 3
    assert run(path, repeatable=False)[1] != []


def test_a_run_that_goes_on_keeps_what_the_first_one_chose(tmp_path):
    path = tmp_path / "o.jsonl"
    with pytest.raises(Killed):
        run(path, answer=killed_at(9), repeatable=False, facts={"seed": 3})
    with open_job(path, IDENTITY, {"seed": 4}, repeatable=False) as job:
        assert job.facts == {"seed": 3} and job.num_finished > 0


OTHER = {"input": {"sha256": "b"}, "generation": {"seed": 1, "top_k": 6}}


def test_the_journal_of_another_job_is_refused_with_every_difference_and_kept(tmp_path):
    path, journal = tmp_path / "o.jsonl", tmp_path / "o.jsonl.journal"
    path.write_text("old")
    with pytest.raises(Killed):
        run(path, answer=killed_at(9))
    before = journal.read_bytes()
    for resume in ("auto", True):
        with pytest.raises(ValueError) as caught:
            run(path, identity=OTHER, resume=resume)
        for part in ('input.sha256 was "a", is "b"', "generation.top_k was 5, is 6", "predict.resume: false", "drops"):
            assert part in str(caught.value)
        assert "seed" not in str(caught.value)
    assert (journal.read_bytes(), path.read_text()) == (before, "old")
    _, decoded = run(path, identity=OTHER, resume=False)
    assert len(decoded) == 9


def test_a_journal_without_answers_is_in_nobodys_way(tmp_path):
    path = tmp_path / "o.jsonl"
    with pytest.raises(JobStoppedError):
        run(path, max_errors=1)
    assert len((tmp_path / "o.jsonl.journal").read_text().splitlines()) > 1
    assert len(run(path, identity=OTHER)[1]) == 9


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"", b""), (b'"record": ', b'"hash": '), (b'"facts": ', b'"other": ')],
    ids=["same", "lines", "head"],
)
def test_a_journal_of_another_form_is_refused_and_kept_whatever_its_lines_are(tmp_path, old, new):
    path, journal = tmp_path / "o.jsonl", tmp_path / "o.jsonl.journal"
    with pytest.raises(Killed):
        run(path, answer=killed_at(9))
    before = journal.read_bytes().replace(b'{"journal": 1', b'{"journal": 2', 1).replace(old, new)
    journal.write_bytes(before)
    with pytest.raises(ValueError, match="has the form 2 of a journal, this version knows 1"):
        run(path)
    assert journal.read_bytes() == before
    assert len(run(path, resume=False)[1]) == 9 and not journal.exists()


@pytest.mark.parametrize(
    "lost", ["finish_reason", "num_prompt_tokens", "num_new_tokens", "generated_ids", "sample_idx"]
)
def test_a_record_whose_line_was_edited_beyond_use_is_answered_again(tmp_path, lost):
    path, journal = tmp_path / "o.jsonl", tmp_path / "o.jsonl.journal"
    with pytest.raises(Killed):
        run(path, answer=killed_at(9))
    lines = journal.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if "generated_ids" in line)
    entry = json.loads(lines[place])
    del entry["rows"][0][lost]
    lines[place] = json.dumps(entry)
    journal.write_text("\n".join(lines) + "\n")
    assert entry["index"] in run(path)[1]
    run(tmp_path / "expected.jsonl")
    assert path.read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


@pytest.mark.parametrize("identity", [IDENTITY, OTHER])
def test_resume_true_replaces_no_output_that_is_not_this_jobs(tmp_path, identity):
    path = tmp_path / "o.jsonl"
    run(path, resume=True)
    if identity is IDENTITY:
        path.write_text("edited")
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"predict\.resume is true, but .*o\.jsonl is not the output of this job"):
        run(path, identity=identity, resume=True)
    assert path.read_bytes() == content and not (tmp_path / "o.jsonl.journal").exists()
    assert run(path, identity=identity)[1] != []


def test_an_edited_record_is_answered_again_and_its_neighbours_are_not(tmp_path):
    edited = [dict(record) for record in RECORDS]
    edited[1]["instruction"] = "yyy"
    run(tmp_path / "expected.jsonl", records=edited)
    path = tmp_path / "o.jsonl"
    with pytest.raises(Killed):
        run(path, answer=killed_at(10), batch_size=1)
    _, decoded = run(path, records=edited)
    assert 1 in decoded and 2 not in decoded and 3 not in decoded
    assert path.read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


def test_a_full_disk_stops_the_run_and_what_was_finished_is_kept(expected, monkeypatch):
    content, path = expected
    path.write_text("old")
    pwrite, room = os.pwrite, 1500

    def full(descriptor, data, offset):
        if offset + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(JobStoppedError, match=r"o\..*\.journal: cannot write: No space left on device"):
            run(path)
    assert path.read_text() == "old"
    summary, decoded = run(path)
    assert path.read_bytes() == content and 0 < len(decoded) < 9


def test_a_disk_that_is_full_at_the_end_stops_the_run_and_everything_is_kept(expected, monkeypatch):
    content, path = expected

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "replace", lambda source, target: full(0))
        with pytest.raises(JobStoppedError, match="No space left on device"):
            run(path)
    assert not path.exists()
    assert run(path)[1] == [] and path.read_bytes() == content


def test_the_modes_of_all_files_are_0640_also_of_replaced_ones(tmp_path):
    path = tmp_path / "o.jsonl"
    for name in ("o.jsonl", "o.jsonl.manifest.json"):
        (tmp_path / name).touch(0o777)
    run(path)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in os.listdir(tmp_path)} == {0o640}


def test_max_errors_stops_the_run_and_a_higher_limit_goes_on(tmp_path):
    run(tmp_path / "expected.jsonl")
    path = tmp_path / "o.jsonl"
    with pytest.raises(JobStoppedError, match=r"3 records have an error, predict\.max_errors is 3"):
        run(path, max_errors=3, batch_size=1)
    _, decoded = run(path, max_errors=4)
    assert 0 < len(decoded) < 9 and path.read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


def test_errors_of_earlier_runs_count_in_max_errors(tmp_path):
    path = tmp_path / "o.jsonl"
    with pytest.raises(JobStoppedError, match="2 records have an error"):
        run(path, max_errors=2, batch_size=1)
    with pytest.raises(JobStoppedError, match="3 records have an error"):
        run(path, max_errors=3, batch_size=1)
    before = (tmp_path / "o.jsonl.journal").read_bytes()
    with pytest.raises(JobStoppedError, match=r"predict\.max_errors is 3; a higher one goes on"):
        run(path, max_errors=3, answer=lambda prompts, indices: pytest.fail("a batch was answered"))
    assert (tmp_path / "o.jsonl.journal").read_bytes() == before


def test_on_error_abort_stops_before_the_record_is_written(tmp_path):
    run(tmp_path / "expected.jsonl")
    path = tmp_path / "o.jsonl"
    with pytest.raises(JobStoppedError, match=r"record 0 has an error \(schema: field 'instruction' is empty\)"):
        run(path, on_error="abort")
    assert len((tmp_path / "o.jsonl.journal").read_text().splitlines()) == 1
    run(path)
    assert path.read_bytes() == (tmp_path / "expected.jsonl").read_bytes()


def test_several_answers_to_a_record_are_finished_together(tmp_path):
    def twice(prompts, indices):
        return [answer for pair in zip(*[decode(prompts, indices)] * 2, strict=True) for answer in pair]

    def dying(prompts, indices):
        return killed_at(9)(prompts, indices) and twice(prompts, indices)

    run(tmp_path / "expected.jsonl", answer=twice, num_sequences=2)
    path = tmp_path / "o.jsonl"
    with pytest.raises(Killed):
        run(path, answer=dying, num_sequences=2)
    summary, _ = run(path, answer=twice, num_sequences=2)
    assert path.read_bytes() == (tmp_path / "expected.jsonl").read_bytes()
    assert (summary.num_records, summary.finish_reasons["length"]) == (12, 18)


def test_nothing_is_prepared_when_nothing_is_left_to_answer(tmp_path, monkeypatch):
    path = tmp_path / "o.jsonl"
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "write_rows", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            run(path, prepare=lambda: calls.append(1))
    assert calls == [1]
    run(path, prepare=lambda: pytest.fail("weights were read"))


def test_memory_does_not_grow_with_the_number_of_records(tmp_path):
    def records(count):
        for index in range(count):
            if index % 50 == 0:
                yield Record(index, {"id": index}, None, RecordError("parse", "bad"))
            else:
                yield Record(index, {"id": index, "text": "some words " * 20}, "some words")

    def peak(count):
        with open_job(tmp_path / f"{count}.jsonl", IDENTITY) as job:
            tracemalloc.start()
            result = run_generation(
                records(count), TOKENIZER, decode, job, batch_size=8, max_new_tokens=9, collect=False
            )
            job.publish(result.summary.num_records)
            highest = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return highest

    peak(100)
    # 24 bytes a record: its place in the journal and its hash, in arrays that grow by doubling.
    assert peak(4000) - peak(400) < 3600 * 48 + 100_000
