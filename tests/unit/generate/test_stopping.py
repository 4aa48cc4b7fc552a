"""Everything that ends a row, and that it ends no other row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stubs import BOS, EOS, A, B, Bigram, C, Sum

from mindformers_ext.generate import GenerationConfig, StoppingCriteria, generate_rows, stopping
from mindformers_ext.generate.stopping import StopMatch, StopStrings

LETTERS = "_^$abc"


def letters(prompt, new):
    return "".join(LETTERS[token] for token in new)


def run(prompts, model=None, decode=letters, **options):
    options = {"max_new_tokens": 5} | options
    return generate_rows(model or Bigram(), prompts, GenerationConfig(**options), decode=decode)


class TestStopStrings:
    """In a vocabulary of pieces."""

    pieces = ("a", "b", "ab", "ba", "", "aab", "  ", "é")

    def find(self, strings, new, prompt=(0, 1)):
        ids = np.array([*prompt, *new])
        return StopStrings(strings, lambda _, ids: "".join(self.pieces[i] for i in ids)).find(ids, len(prompt))

    @given(
        st.lists(st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=3),
        st.lists(st.integers(0, 7), min_size=1, max_size=30),
    )
    def test_the_first_token_that_completes_a_string_is_found(self, strings, new):
        done = [
            i + 1 for i in range(len(new)) if any(s in "".join(self.pieces[t] for t in new[: i + 1]) for s in strings)
        ]
        found = [count for count in range(1, len(new) + 1) if self.find(strings, new[:count]) is not None]
        assert found[:1] == done[:1]
        if done:
            text = "".join(self.pieces[t] for t in new[: done[0]])
            match = self.find(strings, new[: done[0]])
            assert text[match.position :].startswith(match.text) and match.text in strings
            assert match.position == min(text.find(s) for s in strings if s in text)

    def test_a_string_across_the_border_of_the_prompt_is_not_found(self):
        assert self.find(["ba"], [0], prompt=[1]) is None

    def test_a_string_may_end_inside_a_token(self):
        assert self.find(["ba"], [1, 5]) == StopMatch("ba", 0)

    def test_a_string_that_ended_in_an_earlier_token_is_no_news(self):
        assert self.find(["ab"], [2, 0]) is None

    def test_tokens_without_text_do_not_hide_a_string(self):
        assert self.find(["ab"], [0, *[4] * 40, 1]) == StopMatch("ab", 0)

    def test_a_character_of_several_tokens_is_found_when_it_is_complete(self):
        def decode(_, ids):
            return bytes(ids).decode("utf-8", "replace")

        ids = list("x€".encode())
        strings = StopStrings(["€"], decode)
        assert [strings.find(np.array([0, *ids[:n]]), 1) for n in range(1, 5)] == [None, None, None, StopMatch("€", 1)]

    @given(
        st.text("a停止🎉é\n", max_size=20),
        st.sampled_from(["停止", "🎉\n", "é停", "🎉🎉", "aé", "止"]),
        st.text("a停🎉", max_size=5),
    )
    def test_strings_of_many_bytes_are_found_wherever_they_stand(self, before, stop, after):
        def decode(_, ids):
            return bytes(ids).decode("utf-8", "replace")

        text = before + stop + after
        strings, ids = StopStrings([stop], decode), np.array([0, *text.encode()])
        found = next(filter(None, (strings.find(ids[: n + 1], 1) for n in range(1, len(ids)))))
        assert found == StopMatch(stop, text.index(stop))


def test_each_row_of_a_batch_has_its_own_stop_and_the_others_go_on():
    # greedy paths: ^ -> a$..., b -> c$..., a -> $
    rows = run([[B], [BOS]], stop_strings=["c"], eos_token_id=EOS)
    assert [(r.token_ids, r.finish_reason, r.stop_string) for r in rows] == [
        ([C], "stop", "c"),
        ([A, EOS], "eos", None),
    ]


def test_a_stop_string_ends_the_row_it_is_in_whatever_its_place_in_the_batch():
    digits = "0123456789a"

    def decode(_, new):
        return "".join(digits[token] for token in new)

    prompts = [[3], [1, 2, 3, 4, 5], [7, 7], [5], [2, 8]]
    texts = [decode((), Sum.answer(prompt, 12)) for prompt in prompts]
    strings = [texts[0][3:6], texts[3][6:9]]
    rows = run(prompts, Sum(), decode, max_new_tokens=12, stop_strings=strings)
    for row, text in zip(rows, texts, strict=True):
        cut = min((text.find(s) for s in strings if s in text), default=None)
        assert row.stop_position == cut
        assert decode((), row.token_ids) == (text if cut is None else text[: cut + 3])
        assert row.finish_reason == ("length" if cut is None else "stop")
    assert {row.finish_reason for row in rows} == {"length", "stop"}


def test_stop_strings_wait_for_min_new_tokens():
    options = {"stop_strings": "c", "eos_token_id": None, "max_new_tokens": 4}
    early = run([[B]], **options)[0]
    late = run([[B]], min_new_tokens=2, **options)[0]
    assert (early.token_ids, early.finish_reason) == ([C], "stop")
    assert len(late.token_ids) >= 2


def test_min_new_tokens_holds_back_every_id_of_the_eos_list():
    rows = run([[B], [BOS]], eos_token_id=[EOS, A, C], min_new_tokens=3, max_new_tokens=4)
    assert all(len(row.token_ids) >= 3 and not {EOS, A, C}.intersection(row.token_ids[:2]) for row in rows)


def test_stop_strings_without_a_decode_function_are_refused():
    with pytest.raises(ValueError, match="stop_strings need a decode function"):
        generate_rows(Bigram(), [[BOS]], GenerationConfig(stop_strings="x"))


def test_beams_end_at_a_stop_string_too():
    rows = run([[BOS], [B]], stop_strings=["c"], num_beams=2, num_return_sequences=2, eos_token_id=EOS)
    stopped = [row for row in rows if row.stop_string]
    assert stopped and all(row.finish_reason == "stop" and row.token_ids[-1] == C for row in stopped)
    assert all(row.stop_position == row.token_ids.index(C) for row in stopped)
    assert all(C not in row.token_ids for row in rows if not row.stop_string)


def test_max_length_counts_the_real_prompt_of_each_row():
    rows = run([[3], [1, 2, 3]], Sum(), max_new_tokens=None, max_length=6)
    assert [row.token_ids for row in rows] == [Sum.answer([3], 5), Sum.answer([1, 2, 3], 3)]
    with pytest.raises(
        ValueError, match=r"max_length 3 leaves no room for a new token after the prompts of rows \[1\]"
    ):
        run([[3], [1, 2, 3]], Sum(), max_new_tokens=None, max_length=3)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_max_time_ends_all_rows_after_the_step_it_passes_in(options, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(clock))
    rows = run([[BOS], [B]], max_time=2.5, **options)  # starts at 0; steps end at 1, 2 and 3
    assert [(len(row.token_ids), row.finish_reason) for row in rows] == [(3, "time")] * 2


class AfterToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append((input_ids.shape, scores.shape))
        return input_ids[:, -1] == self.token


def test_a_plug_in_gets_ids_and_scores_and_ends_single_rows():
    plugin = AfterToken(A)
    rows = run([[BOS, BOS], [B]], stopping_criteria=[plugin], eos_token_id=EOS, pad_token_id=0)
    assert [(row.token_ids, row.finish_reason) for row in rows] == [([A], "stop"), ([C, EOS], "eos")]
    assert plugin.shapes == [((2, 3), (2, 6)), ((1, 3), (1, 6))]


def test_a_plug_in_judges_the_candidates_of_beams():
    rows = run([[BOS]], stopping_criteria=[AfterToken(C)], num_beams=2, num_return_sequences=2, eos_token_id=EOS)
    assert all(C not in row.token_ids[:-1] for row in rows)


def test_a_plug_in_with_a_wrong_shape_is_named():
    def broken(input_ids, scores):
        return np.zeros((2, 2), bool)

    with pytest.raises(ValueError, match=r"stopping_criteria: .*broken must return booleans of shape \(1,\)"):
        run([[BOS]], stopping_criteria=[broken])


def test_every_cell_of_a_model_keeps_its_training_state():
    model = Bigram()
    model.frozen = Bigram()
    model.set_train(True)
    model.frozen.set_train(False)
    run([[BOS]], model)
    assert model.training and not model.frozen.training


def test_a_plugin_that_fails_is_named():
    def broken(input_ids, scores):
        return 1 / 0

    with pytest.raises(RuntimeError, match="logits_processor .*broken failed: ZeroDivisionError: division by zero"):
        run([[BOS]], logits_processor=[broken])


def test_more_log_probabilities_than_fit_are_refused():
    with pytest.raises(ValueError, match="output_logprobs 1000 for 1 prompts of up to 100000 new tokens"):
        run([[BOS]], output_logprobs=1000, max_new_tokens=100_000)
