import errno

import numpy as np
import pytest

from mindformers_ext.ops import memory
from mindformers_ext.ops.memory import aligned_zeros

_MEBI = 1 << 20


@pytest.mark.parametrize(("count", "alignment"), [(5, 64), (_MEBI, 2 * _MEBI), (_MEBI + 1, 2 * _MEBI)])
def test_starts_where_it_is_read_fast(count: int, alignment: int) -> None:
    array = aligned_zeros((count, 1), np.int16)
    assert array.shape == (count, 1)
    assert array.dtype == np.int16
    assert not array.any()
    assert array.ctypes.data % alignment == 0


def test_arrays_have_memory_of_their_own() -> None:
    first, second = aligned_zeros((_MEBI,)), aligned_zeros((_MEBI,))
    first[:] = 1
    assert not second.any()


@pytest.mark.parametrize(("number", "raised"), [(errno.ENOMEM, MemoryError), (errno.EPERM, PermissionError)])
def test_too_little_memory_is_told_from_other_mistakes(monkeypatch, number: int, raised: type) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    with pytest.raises(raised):
        aligned_zeros((_MEBI,))
