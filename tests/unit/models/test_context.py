"""What a forward refuses of positions and masks, and what it makes of them."""

import re

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.models.compression import pads_of
from mindformers_ext.models.context import ForwardContext
from mindformers_ext.models.rope import RopeParameters, RotaryTable


def context(positions=None, mask=None):
    ids = Tensor(np.zeros((2, 3), np.int32))
    return ForwardContext(ids, positions, mask, 0, {"main": RotaryTable(RopeParameters(), 4, 8)})


def test_positions_of_one_row_hold_for_all():
    one = context(np.array([[4, 5, 6]]))
    np.testing.assert_array_equal(one.positions, [[4, 5, 6], [4, 5, 6]])
    assert one.rotary()[0].shape == (2, 3, 4)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (3, 3), (2, 1)])
def test_positions_of_another_shape_are_refused(shape):
    message = f"position_ids of shape {shape} do not fit 2 rows of 3 new tokens: give [2, 3], or [1, 3] for all rows"
    with pytest.raises(ValueError, match=re.escape(message)):
        context(np.zeros(shape, np.int32))


def test_pads_are_counted_on_the_left_and_refused_elsewhere():
    np.testing.assert_array_equal(pads_of(context(mask=np.array([[0, 0, 1], [1, 1, 1]]))), [2, 0])
    with pytest.raises(ValueError, match="sparse attention needs all pads on the left"):
        pads_of(context(mask=np.array([[1, 1, 0], [1, 1, 1]])))
