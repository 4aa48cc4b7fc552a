"""More than tokens: several sequences, log-probabilities, the structured result."""

import numpy as np
import pytest
from mindspore import Tensor
from stubs import BIGRAM, BOS, EOS, PAD, A, B, Bigram, C, Sum

from mindformers_ext.generate import GenerationConfig, LogitsProcessor, generate, generate_rows


def rows_of(prompts, model=None, record_ids=None, **options):
    return generate_rows(model or Bigram(), prompts, GenerationConfig(**options), record_ids=record_ids)


SAMPLING = {"do_sample": True, "seed": 4, "max_new_tokens": 6, "eos_token_id": EOS}


def test_the_sequences_of_a_prompt_follow_each_other_and_are_numbered():
    rows = rows_of([[BOS], [A, B]], num_return_sequences=3, **SAMPLING)
    assert [row.sequence_idx for row in rows] == [0, 1, 2] * 2
    assert len({tuple(row.token_ids) for row in rows}) > 1


def test_more_sequences_do_not_change_the_first_ones():
    one, four = rows_of([[BOS], [A]], **SAMPLING), rows_of([[BOS], [A]], num_return_sequences=4, **SAMPLING)
    assert [row.token_ids for row in one] == [row.token_ids for row in four[::4]]


def test_the_prompt_is_read_once_for_all_its_sequences():
    model = Bigram()
    rows_of([[BOS], [A]], model, num_return_sequences=3, **SAMPLING | {"eos_token_id": None})
    assert [len(call["ids"]) for call in model.calls[:2]] == [2, 6]


@pytest.mark.parametrize("use_cache", [True, False])
def test_sequences_have_caches_of_their_own(use_cache):
    class Narrow(Sum):
        def logits(self, totals):
            return 3 * super().logits(totals)

    options = {**SAMPLING, "num_return_sequences": 4, "use_cache": use_cache}
    batch = [[3], [1, 2, 3, 4, 5], [7, 7]]
    together = rows_of(batch, Narrow(), **options)
    alone = [row for i, prompt in enumerate(batch) for row in rows_of([prompt], Narrow(), record_ids=[i], **options)]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]


@pytest.mark.parametrize("count", [0, 2, 6, 50])
def test_logprobs_are_those_of_the_model_before_any_processor(count):
    options = {"temperature": 3.0, "repetition_penalty": 1.5, "output_logprobs": count}
    for row in rows_of([[BOS], [A, B]], num_return_sequences=2, **SAMPLING, **options):
        last = BOS if len(row.token_ids) and row.logprobs[0] == pytest.approx(logprob(BOS, row.token_ids[0])) else B
        for token, value, pairs in zip(row.token_ids, row.logprobs, row.top_logprobs, strict=True):
            assert value == pytest.approx(logprob(last, token), abs=1e-5)
            assert len(pairs) == min(count, 6)
            best = sorted(range(6), key=lambda t, last=last: (-logprob(last, t), t))[:count]
            np.testing.assert_allclose([lp for _, lp in pairs], [logprob(last, t) for t in best], atol=1e-5)
            last = token


def logprob(last, token):
    row = np.array(BIGRAM.get(last, [1] * 6), float)
    return float(np.log(row / row.sum())[token])


def test_logprobs_are_absent_unless_asked_for():
    (row,) = rows_of([[BOS]], max_new_tokens=1)
    assert (row.logprobs, row.top_logprobs, row.score) == (None, None, None)


def ids(*rows):
    return Tensor(np.array(rows, np.int32))


def test_the_structured_result_of_beams_has_their_scores():
    config = GenerationConfig(
        max_new_tokens=5, num_beams=3, num_return_sequences=3, eos_token_id=EOS, pad_token_id=PAD,
        return_dict_in_generate=True,
    )  # fmt: skip
    output = generate(Bigram(), ids([BOS]), config)
    assert output.sequences.asnumpy().tolist() == [
        [BOS, A, B, C, EOS],
        [BOS, A, EOS, PAD, PAD],
        [BOS, B, C, EOS, PAD],
    ]
    np.testing.assert_allclose(output.sequences_scores.asnumpy(), [-0.8483, -0.8574, -0.9], atol=6e-5)
    assert [row.finish_reason for row in output.rows] == ["eos"] * 3


def test_output_scores_are_the_processed_ones_of_each_step():
    config = GenerationConfig(
        max_new_tokens=5, eos_token_id=EOS, suppress_tokens=[C], return_dict_in_generate=True, output_scores=True
    )
    output = generate(Bigram(), ids([BOS], [A]), config)
    assert output.sequences_scores is None
    assert [scores.shape for scores in output.scores] == [(2, 6)] * 2
    assert all(np.isneginf(scores[0, C]) for scores in output.scores)
    assert output.scores[0].argmax(axis=1).tolist() == [A, EOS]
    assert np.isnan(output.scores[1][1]).all()  # that row was finished


def test_output_scores_that_would_not_fit_are_refused_before_the_first_step():
    class Wide(Bigram):
        def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
            return {"logits": Tensor(np.zeros((*input_ids.shape, 100_000), np.float32))}

    config = GenerationConfig(max_new_tokens=6000, return_dict_in_generate=True, output_scores=True)
    with pytest.raises(ValueError, match=r"output_scores would need 2\.2 GiB .* use output_logprobs"):
        generate(Wide(), ids([BOS]), config)


class Forbid(LogitsProcessor):
    def __init__(self, token):
        self.token = token
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append((input_ids.tolist(), scores.shape))
        scores[:, self.token] = -np.inf
        return scores


def test_a_plug_in_sees_left_padded_ids_and_changes_scores_in_every_mode():
    plugin = Forbid(A)
    rows = rows_of([[BOS], [B, B]], logits_processor=[plugin], max_new_tokens=2, pad_token_id=PAD)
    assert plugin.shapes[0] == ([[PAD, BOS], [B, B]], (2, 6))
    assert [row.token_ids[0] for row in rows] == [B, C]
    for options in ({"num_beams": 3}, {"do_sample": True, "seed": 1}):
        assert all(A not in row.token_ids for row in rows_of([[BOS]], logits_processor=[Forbid(A)], **options))


def test_a_finished_row_is_not_put_through_the_processors_again():
    # EOS is all that no_repeat_ngram_size leaves to the first row; going on, it would have nothing
    options = {"no_repeat_ngram_size": 1, "eos_token_id": EOS, "max_new_tokens": 5}
    rows = rows_of([[A, B, PAD, BOS, C], [BOS], [BOS], [BOS]], **options)
    assert [row.token_ids for row in rows] == [[EOS]] + [[A, EOS]] * 3


def test_max_new_tokens_none_takes_the_documented_default():
    class Same(Bigram):
        def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
            return {"logits": Tensor(np.eye(6, dtype=np.float32)[np.full(input_ids.shape, A)])}

    assert rows_of([[BOS]], Same())[0].token_ids == [A] * 256
