"""The decode loop on models whose answers can be worked out by hand."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from stubs import BOS, EOS, PAD, A, B, Bigram, Sum, bigram_table

from mindformers_ext.generate import GenerateMixin, GenerationConfig, GenerationStats, generate, generate_rows


def ids(*rows):
    return Tensor(np.array(rows, np.int32))


def test_greedy_follows_the_most_likely_path_and_keeps_the_eos():
    result = generate(Bigram(), ids([BOS]), GenerationConfig(max_new_tokens=5, eos_token_id=EOS))
    assert result.asnumpy().tolist() == [[BOS, A, EOS]]
    assert result.dtype == ms.int32


@pytest.mark.parametrize("count", [1, 2, 7])
def test_exactly_max_new_tokens_without_an_eos(count):
    result = generate(Bigram(), ids([BOS, B], [A, A]), GenerationConfig(max_new_tokens=count))
    assert result.shape == (2, 2 + count)


def test_ties_go_to_the_lowest_id():
    table = bigram_table({BOS: [0.1, 0.1, 0.1, 0.3, 0.3, 0.1]})
    assert generate_rows(Bigram(table), [[BOS]], GenerationConfig(max_new_tokens=1))[0].token_ids == [3]


def test_rows_are_unpadded_and_filled_on_the_right():
    batch, mask = ids([PAD, PAD, BOS], [BOS, B, A]), ids([0, 0, 1], [1, 1, 1])
    config = GenerationConfig(max_new_tokens=3, eos_token_id=EOS, pad_token_id=5)
    assert generate(Bigram(), batch, config, mask).asnumpy().tolist() == [[BOS, A, EOS, 5], [BOS, B, A, EOS]]


@pytest.mark.parametrize("use_cache", [True, False])
def test_plain_key_value_pairs_with_left_padding(use_cache):
    prompts = [[3], [1, 2, 3, 4, 5], [7, 7]]
    rows = generate_rows(Sum(), prompts, GenerationConfig(max_new_tokens=6, use_cache=use_cache))
    assert [row.token_ids for row in rows] == [Sum.answer(prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_that_end_early_do_not_disturb_the_others(use_cache):
    prompts = [[3], [1, 2, 3, 4, 5], [7, 7], [9, 1]]
    answers = [Sum.answer(prompt, 8) for prompt in prompts]
    eos = answers[1][1]
    rows = generate_rows(Sum(), prompts, GenerationConfig(max_new_tokens=8, eos_token_id=eos, use_cache=use_cache))
    for row, answer in zip(rows, answers, strict=True):
        expected = answer[: answer.index(eos) + 1] if eos in answer else answer
        assert row.token_ids == expected
        assert row.finish_reason == ("eos" if eos in answer else "length")


def test_every_id_of_the_eos_list_ends_a_row():
    rows = generate_rows(Bigram(), [[BOS], [B]], GenerationConfig(max_new_tokens=5, eos_token_id=[EOS, A]))
    assert [row.token_ids for row in rows] == [[A], [5, EOS]]


def test_an_eos_inside_the_prompt_ends_nothing():
    row = generate_rows(Bigram(), [[EOS, BOS, EOS, B]], GenerationConfig(max_new_tokens=5, eos_token_id=EOS))[0]
    assert row.token_ids == [5, EOS]


@pytest.mark.parametrize("pad", [0, EOS, A])
def test_the_pad_id_changes_nothing_but_the_filling(pad):
    config = GenerationConfig(max_new_tokens=4, eos_token_id=EOS, pad_token_id=pad)
    rows = generate_rows(Bigram(), [[BOS], [PAD, EOS, B, A, B]], config)
    assert [row.token_ids for row in rows] == [[A, EOS], [5, EOS]]


def test_the_model_sees_positions_from_the_first_real_token_and_a_padding_aware_mask():
    model = Bigram()
    generate_rows(model, [[A], [A, B, B]], GenerationConfig(max_new_tokens=2))
    prefill = model.calls[0]
    assert prefill["positions"].tolist() == [[0, 0, 0], [0, 1, 2]]
    assert (prefill["mask"][:, 0, -1] == 0).tolist() == [[False, False, True], [True, True, True]]
    assert (prefill["mask"][1, 0] == 0).tolist() == np.tri(3, dtype=bool).tolist()


def test_caller_keeps_the_training_state_and_gets_no_gradient():
    model = Bigram()
    model.set_train(True)
    generate(model, ids([BOS]), GenerationConfig(max_new_tokens=1))
    assert model.training


def test_stats_count_prompts_and_answers_apart():
    stats = GenerationStats()
    generate_rows(Sum(), [[3], [1, 2, 3]], GenerationConfig(max_new_tokens=4), stats)
    assert (stats.prefill_tokens, stats.decode_tokens) == (4, 6)
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0


def test_a_row_without_a_finite_score_is_an_error_not_token_zero():
    table = bigram_table()
    table[A] = np.nan
    with pytest.raises(FloatingPointError, match=r"no finite score for the next token of rows \[1\]"):
        generate_rows(Bigram(table), [[BOS], [A]], GenerationConfig(max_new_tokens=2))


def test_mixin_gives_any_cell_a_generate_method():
    class Model(GenerateMixin, Bigram):
        pass

    result = Model().generate(ids([BOS]), GenerationConfig(max_new_tokens=5), eos_token_id=EOS)
    assert result.asnumpy().tolist() == [[BOS, A, EOS]]
    with pytest.raises(TypeError, match="max_tokens"):
        Model().generate(ids([BOS]), max_tokens=3)


@pytest.mark.parametrize(
    ("batch", "mask", "message"),
    [
        ([[]], None, "at least one token"),
        ([[1, 2]], [[1, 0]], "padded on the left"),
        ([[1, 2], [1, 2]], [[0, 0], [1, 1]], r"no token in rows \[0\]"),
        ([[1, 2]], [[1]], "attention_mask has shape"),
    ],
)
def test_batches_that_cannot_be_generated_from_are_refused(batch, mask, message):
    mask = None if mask is None else ids(*mask)
    with pytest.raises(ValueError, match=message):
        generate(Bigram(), ids(*batch), GenerationConfig(max_new_tokens=1), mask)


def test_a_cell_without_logits_to_keep_is_not_given_it():
    class Plain(nn.Cell):
        def construct(self, input_ids, position_ids, attention_mask=None, past_key_values=None):
            return {"logits": Tensor(np.zeros((*input_ids.shape, 3), np.float32))}

    assert generate_rows(Plain(), [[1, 1]], GenerationConfig(max_new_tokens=2))[0].token_ids == [0, 0]
