"""Where HuggingFace's separate tensors lie in the fused parameters of this package.

Each transformation is written once, as views into the parameter: loading fills them, saving reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mindformers_ext.models.weights import Sources, WeightMapping


def copied(name: str, source: str, *shape: int, **options: Any) -> WeightMapping:
    """A parameter that is one HuggingFace tensor as it is; ``options`` are further fields of `WeightMapping`."""
    return WeightMapping(name, shape, (source,), (shape,), lambda parameter: [parameter], **options)


def joined_rows(name: str, sources: tuple[str, ...], rows: tuple[int, ...], columns: tuple[int, ...]) -> WeightMapping:
    """Projections of one input, one below the other.

    Args:
        name: the fused parameter.
        sources: names of the projections.
        rows: rows of each.
        columns: ``(hidden_size,)`` for weights, ``()`` for biases.
    """
    ends = np.cumsum(rows).tolist()

    def parts(parameter: np.ndarray) -> list[np.ndarray]:
        return [parameter[end - count : end] for count, end in zip(rows, ends, strict=True)]

    return WeightMapping(name, (ends[-1], *columns), sources, tuple((count, *columns) for count in rows), parts)


def fused_qkv(
    name: str,
    sources: tuple[str, str, str],
    groups: int,
    heads: int,
    dim: int,
    columns: tuple[int, ...],
    gated: bool = False,
) -> WeightMapping:
    """Query, key and value projections fused group by group: ``heads`` query heads, one key, one value.

    Args:
        name: the fused parameter.
        sources: names of q, k and v.
        groups: key-value heads.
        heads: query heads of one group.
        dim: size of a head.
        columns: ``(hidden_size,)`` for weights, ``()`` for biases.
        gated: q gives every head's query and then its gate; here a group's gates follow its queries.
    """
    kinds = 2 if gated else 1
    query, single = groups * heads * dim * kinds, groups * dim

    def parts(parameter: np.ndarray) -> list[np.ndarray]:
        rows = parameter.reshape(groups, kinds * heads + 2, dim, *columns)
        queries = rows[:, :-2].reshape(groups, kinds, heads, dim, *columns)
        return [queries.swapaxes(1, 2), rows[:, -2], rows[:, -1]]

    shapes = ((query, *columns), (single, *columns), (single, *columns))
    return WeightMapping(name, (query + 2 * single, *columns), sources, shapes, parts)


def interleaved_gate_up(name: str, sources: tuple[str, str], size: int, columns: tuple[int, ...]) -> WeightMapping:
    """Gate and up projections whose rows alternate: gate 0, up 0, gate 1, up 1, ...

    Args:
        name: the fused parameter.
        sources: names of gate and up.
        size: rows of each.
        columns: ``(hidden_size,)`` for weights, ``()`` for biases.
    """
    shape = (size, *columns)
    return WeightMapping(
        name, (2 * size, *columns), sources, (shape, shape), lambda parameter: [parameter[0::2], parameter[1::2]]
    )


def expert_gate_up(
    name: str, sources: tuple[str, str], stacked: str | None, experts: int, hidden: int, ffn: int
) -> WeightMapping:
    """Gate and up projections of all experts, ``[E, H, 2F]``: on the last axis gate, then up (``experts.weight1``).

    Args:
        name: the fused parameter.
        sources: names of one expert's gate and up, ``[F, H]`` each, with ``{e}`` for its number, e.g.
            ``model.layers.0.mlp.experts.{e}.gate_proj.weight``. Checkpoints are saved in this form.
        stacked: name of the tensor ``[E, 2F, H]`` (gate rows, then up rows) of checkpoints that have one for all
            experts, or None.
        experts: number of experts, E.
        hidden: size of their input, H.
        ffn: size between the projections, F.
    """

    def parts(parameter: np.ndarray) -> list[np.ndarray]:
        return [half.T for expert in parameter for half in (expert[:, :ffn], expert[:, ffn:])]

    names = tuple(source.format(e=index) for index in range(experts) for source in sources)
    return WeightMapping(
        name,
        (experts, hidden, 2 * ffn),
        names,
        ((ffn, hidden),) * len(names),
        parts,
        alternatives=_stacked(stacked, (experts, 2 * ffn, hidden)),
    )


def expert_down(name: str, source: str, stacked: str | None, experts: int, hidden: int, ffn: int) -> WeightMapping:
    """Down projections of all experts, ``[E, F, H]`` (``experts.weight2``).

    Args:
        name: the fused parameter.
        source: name of one expert's projection, ``[H, F]``, with ``{e}`` for its number. This form is saved.
        stacked: name of the tensor ``[E, H, F]`` of checkpoints that have one for all experts, or None.
        experts: number of experts, E.
        hidden: size of their output, H.
        ffn: size of their input, F.
    """
    names = tuple(source.format(e=index) for index in range(experts))
    return WeightMapping(
        name,
        (experts, ffn, hidden),
        names,
        ((hidden, ffn),) * experts,
        lambda parameter: [expert.T for expert in parameter],
        alternatives=_stacked(stacked, (experts, hidden, ffn)),
    )


def _stacked(name: str | None, shape: tuple[int, int, int]) -> tuple[Sources, ...]:
    """The form of one tensor for all experts, transposed against the parameter."""
    if name is None:
        return ()
    return (Sources((name,), (shape,), lambda parameter: [parameter.transpose(0, 2, 1)]),)
