"""Ids and lengths that a model cannot take are refused before it runs, where its config tells."""

from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Tensor
from stubs import Bigram, Sum

from mindformers_ext.generate import GenerationConfig, generate


def limited(vocab_size=6, seq_length=8):
    model = Bigram()
    model.config = SimpleNamespace(vocab_size=vocab_size, seq_length=seq_length)
    return model


def run(model, ids, **options):
    mask = options.pop("mask", None)
    config = GenerationConfig(**{"max_new_tokens": 2, **options})
    return generate(model, Tensor(np.array(ids)), config, None if mask is None else Tensor(np.array(mask)))


@pytest.mark.parametrize("bad", [-1, 6, 2**31])
def test_an_id_that_the_model_does_not_have_is_refused(bad):
    model = limited()
    with pytest.raises(ValueError, match=rf"row 1 has token id {bad}; the model's ids are 0 to 5"):
        run(model, [[1, 2], [bad, 2]])
    assert model.calls == []


def test_a_negative_id_is_refused_without_a_config_too():
    with pytest.raises(ValueError, match="row 0 has token id -1; the model's ids are 0 and above"):
        run(Sum(), [[-1, 2]])


def test_the_id_of_a_pad_does_not_matter():
    assert run(limited(), [[-100, 3], [1, 3]], mask=[[0, 1], [1, 1]]).shape == (2, 4)


@pytest.mark.parametrize("ids", [[[1.0, 2.0]], [[True, False]]])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(ValueError, match="input_ids must be integers"):
        run(limited(), ids)


def test_a_row_that_would_exceed_the_models_length_is_refused():
    model = limited()
    with pytest.raises(ValueError, match="row 0: 3 prompt tokens \\+ 6 new tokens exceed the model's length 8"):
        run(model, [[1, 3, 3]], max_new_tokens=6)
    assert model.calls == []
    assert run(model, [[1, 3, 3]], max_new_tokens=5).shape == (1, 8)
    assert run(model, [[1, 3, 3]], max_new_tokens=None, max_length=8).shape == (1, 8)


def test_a_model_without_a_config_has_no_limits():
    assert run(Bigram(), [[1, 3, 3]], max_new_tokens=20).shape == (1, 23)


def test_numpys_integers_are_options():
    config = GenerationConfig(
        max_new_tokens=np.int64(3), eos_token_id=[np.int32(2), np.int64(4)], pad_token_id=np.uint8(1)
    )
    assert (config.max_new_tokens, config.eos_token_ids, config.filler) == (3, (2, 4), 1)
    assert GenerationConfig(eos_token_id=np.array([2, 4])).eos_token_ids == (2, 4)
