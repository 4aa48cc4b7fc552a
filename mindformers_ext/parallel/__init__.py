"""How a model is spread over the processes of a job.

This module does not import MindSpore. What needs it is in `collectives` (the only module that communicates), `groups`,
`agreement` and `pipeline`.
"""

from mindformers_ext.parallel.parallel_dims import AXES, Axis, Coordinates, ParallelDims
from mindformers_ext.parallel.parallelize import parallelize_model

__all__ = ["AXES", "Axis", "Coordinates", "ParallelDims", "parallelize_model"]
