"""The cache of a whole model, for state objects and for plain pairs."""

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.generate import KVCache
from mindformers_ext.models.cache import KeyValueState


def pair(*shape, start=0):
    values = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
    return Tensor(values), Tensor(-values)


def test_empty_cache_holds_nothing():
    cache = KVCache()
    assert (len(cache), cache.length, cache.nbytes, cache.past_key_values) == (0, 0, 0, [])


def test_update_replaces_and_checks_the_number_of_layers():
    cache = KVCache()
    cache.update([pair(1, 2, 3, 4)])
    cache.update([pair(1, 2, 5, 4)])
    assert (cache.length, cache.nbytes) == (5, 2 * 2 * 5 * 4 * 4)
    with pytest.raises(ValueError, match="returned 2 cache entries, 1 before"):
        cache.update([pair(1, 2, 5, 4)] * 2)


def test_merge_appends_along_the_sequence():
    cache = KVCache()
    cache.merge([pair(1, 1, 2, 2)])
    cache.merge([pair(1, 1, 1, 2, start=100)])
    assert cache[0][0].asnumpy()[0, 0].tolist() == [[0, 1], [2, 3], [100, 101]]
    assert cache[0][1].asnumpy()[0, 0, -1].tolist() == [-100, -101]


def test_reorder_and_crop_reach_pairs_and_states_alike():
    state = KeyValueState(2, 1, 2, max_length=4)
    state.update(*pair(2, 1, 3, 2))
    cache = KVCache([pair(2, 1, 3, 2), state])
    cache.reorder(np.array([1, 0, 1]))
    cache.crop(2)
    expected = pair(2, 1, 3, 2)[0].asnumpy()[[1, 0, 1], :, :2]
    np.testing.assert_array_equal(cache[0][0].asnumpy(), expected)
    np.testing.assert_array_equal(state.key.asnumpy()[:, :, :2], expected)
    assert cache.length == state.length == 2


def test_clear_frees_every_entry():
    state = KeyValueState(1, 1, 2, max_length=4)
    state.update(*pair(1, 1, 1, 2))
    cache = KVCache([state])
    cache.clear()
    assert (len(cache), state.nbytes) == (0, 0)


def test_detach_keeps_the_values():
    cache = KVCache([pair(1, 1, 2, 2)])
    before = cache[0][0].asnumpy().copy()
    np.testing.assert_array_equal(cache.detach()[0][0].asnumpy(), before)
