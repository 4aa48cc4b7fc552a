"""Runs on 2 ranks: a model of two layers as two stages, against the model in one piece. Prints one line a check."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

from mindformers_ext.parallel.groups import init_parallel, single
from mindformers_ext.parallel.parallel_dims import ParallelDims
from mindformers_ext.parallel.pipeline import PerMicroBatch, PipelineScheduleRuntime, StageModelBuilder
from mindformers_ext.runtime import setup_runtime

ROWS, TOKENS, HIDDEN, VOCAB = 5, 3, 4, 11


class Config:
    num_layers = 2


class Part(nn.Cell):
    """Layers ``layer_start`` to ``layer_end`` of a model with an embedding, tanh layers and a mean loss over rows."""

    def __init__(self, config, layer_start, layer_end, pre_process, post_process, stage_idx, vp_size):
        super().__init__()
        weights = np.random.default_rng(7).standard_normal((config.num_layers, HIDDEN, HIDDEN)).astype(np.float32)
        table = np.random.default_rng(8).standard_normal((VOCAB, HIDDEN)).astype(np.float32)
        self.pre_process, self.post_process = pre_process, post_process
        if pre_process:
            self.table = ms.Parameter(Tensor(table), name="table")
        self.layers = ms.ParameterTuple(
            [ms.Parameter(Tensor(weights[i]), name=f"layer{i}") for i in range(layer_start, layer_end)]
        )

    def construct(self, x, input_ids=None, labels=None, scale=1.0):
        if self.pre_process:
            x = ms.ops.gather(self.table, x.reshape(-1), 0)
        for weight in self.layers:
            x = mint.tanh(ms.ops.matmul(x, weight)) * scale
        if self.post_process and labels is not None:
            return ((x.sum(-1) - labels.reshape(-1)) ** 2).mean()
        return x


def activation_shape(args, kwargs):
    return kwargs["input_ids"].size, HIDDEN


def build(context, has_backward, **options):
    return StageModelBuilder(context).build_stages(Part, Config(), has_backward=has_backward, **options)


def whole_model(has_backward):
    return build(single(), has_backward)


def data():
    random = np.random.default_rng(9)
    ids = Tensor(random.integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32))
    return ids, Tensor(random.standard_normal((ROWS, TOKENS)).astype(np.float32))


def check_forward(context):
    ids, _ = data()
    (expected,) = PipelineScheduleRuntime(whole_model(False)).run(ids, input_ids=ids)
    for options in ({"activation_shape": activation_shape}, {"dyn_shape": True}):
        for micro_batches in (1, 2, 3, 7):
            runtime = PipelineScheduleRuntime(build(context, False, **options), micro_batches)
            for _ in range(2):
                context.traffic.clear()
                outputs = runtime.run(ids, input_ids=ids, scale=1.0)
                parts = min(micro_batches, ROWS)
                assert len(outputs) == (parts if context.rank == 1 else 0)
                if outputs:
                    joined = np.concatenate([output.asnumpy() for output in outputs])
                    np.testing.assert_array_equal(joined, expected.asnumpy())
                sent = context.traffic.total("send")
                shape_words = 8 * 4 * parts if "dyn_shape" in options else 0
                wanted = ROWS * TOKENS * HIDDEN * 4 + shape_words if context.rank == 0 else 0
                assert sent.bytes == wanted, (sent, wanted)
            assert 0 < runtime.idle_share < 1
    runtime = PipelineScheduleRuntime(build(context, False, activation_shape=activation_shape))
    outputs = runtime.run(PerMicroBatch([ids[:4], ids[4:]]), input_ids=PerMicroBatch([ids[:4], ids[4:]]))
    assert [output.shape for output in outputs] == ([(12, HIDDEN), (3, HIDDEN)] if context.rank == 1 else [])
    print("forward is right", flush=True)


def check_backward(context, schedule):
    ids, labels = data()
    whole = PipelineScheduleRuntime(whole_model(True), 1, schedule)
    (loss,) = whole.run(ids, input_ids=ids, labels=labels)
    names = [parameter.name for parameter in whole.stage.parameters]
    expected = dict(zip(names, whole.stage.gradients, strict=True))
    # One gradient by slope, so that both ways cannot be wrong together.
    step, weight = 1e-2, whole.stage.submodule.layers[0]
    slopes = []
    for sign in (1, -1):
        shifted = weight.asnumpy().copy()
        shifted[1, 2] += sign * step
        kept = weight.asnumpy().copy()
        weight.set_data(Tensor(shifted))
        slopes.append(float(whole.run(ids, input_ids=ids, labels=labels)[0].asnumpy()))
        weight.set_data(Tensor(kept))
    slope = (slopes[0] - slopes[1]) / (2 * step)
    np.testing.assert_allclose(expected["layer0"].asnumpy()[1, 2], slope, rtol=2e-2)
    for micro_batches in (1, 2, 4):
        stages = build(context, True, activation_shape=activation_shape)
        runtime = PipelineScheduleRuntime(stages, micro_batches, schedule)
        for _ in range(2):
            losses = runtime.run(ids, input_ids=ids, labels=labels)
            if context.rank == 1:
                sizes = [micro * ROWS // micro_batches for micro in range(micro_batches + 1)]
                total = sum(
                    float(one.asnumpy()) * (b - a) / ROWS for one, a, b in zip(losses, sizes, sizes[1:], strict=False)
                )
                np.testing.assert_allclose(total, float(loss.asnumpy()), rtol=1e-5)
            stage = runtime.stage
            assert [p.name for p in stage.parameters] == (["layer1"] if context.rank else ["table", "layer0"])
            for parameter, gradient in zip(stage.parameters, stage.gradients, strict=True):
                np.testing.assert_allclose(gradient.asnumpy(), expected[parameter.name].asnumpy(), rtol=1e-4, atol=1e-5)
    print(f"{schedule} is right", flush=True)


def main():
    setup_runtime("CPU")
    context = init_parallel(ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=2, ep=1, world_size=2))
    check_forward(context)
    check_backward(context, "gpipe")
    check_backward(context, "1f1b")


main()
