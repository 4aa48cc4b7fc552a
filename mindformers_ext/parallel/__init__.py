"""How a model is spread over the processes of a job."""

from mindformers_ext.parallel.parallel_dims import ParallelDims
from mindformers_ext.parallel.parallelize import parallelize_model

__all__ = ["ParallelDims", "parallelize_model"]
