"""Token ids in, token ids out: the decode loop, its caches and its choices."""

from mindformers_ext.generate.configuration import GenerationConfig
from mindformers_ext.generate.generation import GenerateOutput, generate, generate_rows
from mindformers_ext.generate.kv_cache import KVCache
from mindformers_ext.generate.lookup import lookup_obstacle
from mindformers_ext.generate.mixin import GenerateMixin
from mindformers_ext.generate.model_call import run_idle
from mindformers_ext.generate.plugins import LogitsProcessor, StoppingCriteria
from mindformers_ext.generate.prefix import PrefixCache, SharedPrefix, shared_prefix, sharing_obstacle
from mindformers_ext.generate.rows import FinishReason, GeneratedRow
from mindformers_ext.generate.sampler import greedy_sample
from mindformers_ext.generate.scoring import Likelihood, Pair, check_pairs, score_groups
from mindformers_ext.generate.stats import GenerationStats
from mindformers_ext.generate.streamers import Streamer, TextStreamer
from mindformers_ext.generate.utils import build_causal_mask, build_position_ids

__all__ = [
    "FinishReason",
    "GenerateMixin",
    "GenerateOutput",
    "GeneratedRow",
    "GenerationConfig",
    "GenerationStats",
    "KVCache",
    "Likelihood",
    "LogitsProcessor",
    "Pair",
    "PrefixCache",
    "SharedPrefix",
    "StoppingCriteria",
    "Streamer",
    "TextStreamer",
    "build_causal_mask",
    "build_position_ids",
    "check_pairs",
    "generate",
    "generate_rows",
    "greedy_sample",
    "lookup_obstacle",
    "run_idle",
    "score_groups",
    "shared_prefix",
    "sharing_obstacle",
]
