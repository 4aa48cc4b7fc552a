"""Rows for processors: contexts from plain lists, and what is left of a row."""

import numpy as np

from mindformers_ext.generate import GenerationConfig
from mindformers_ext.generate.processors import StepContext, build_processors

# entropy 1.52548
GOLDEN = np.log(np.array([[0.40, 0.25, 0.15, 0.10, 0.06, 0.04]], np.float32))


def context(*histories, prompt=None, step=0, records=None, sequences=None):
    """A context of rows with these histories, all of which is prompt unless ``prompt`` gives the length."""
    rows = [np.array(history, np.int64) for history in histories]
    lengths = [len(row) if prompt is None else prompt for row in rows]
    return StepContext(
        rows,
        np.array(lengths),
        np.arange(len(rows)) if records is None else np.array(records),
        np.zeros(len(rows), np.int64) if sequences is None else np.array(sequences),
        step,
    )


def process(options, scores, histories=((0,),), **where):
    """The scores after the processors of ``options``."""
    scores = np.atleast_2d(np.array(scores, np.float32))
    processors = build_processors(GenerationConfig(**options), scores.shape[1])
    return processors(scores, context(*histories, **where))


def kept(scores):
    """The ids that are left, a list for each row."""
    return [np.flatnonzero(row > -np.inf).tolist() for row in scores]
