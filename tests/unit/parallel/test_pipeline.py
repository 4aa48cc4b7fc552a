"""The runtime in one process: how a batch is split, what is refused, and stages connected by queues."""

import threading
from queue import SimpleQueue
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindformers_ext.parallel import groups
from mindformers_ext.parallel.pipeline import (
    MetaStepType,
    PerMicroBatch,
    PipelineScheduleRuntime,
    ScaledLossPipelineStage,
    StageModelBuilder,
)


class Pair:
    """One end of a link between two stages in one process."""

    def __init__(self, out, incoming):
        self.out, self.incoming = out, incoming

    def send(self, x, peer):
        self.out.put(x)

    def receive(self, shape, dtype, peer):
        x = self.incoming.get(timeout=30)
        assert tuple(x.shape) == tuple(shape)
        return x


def linked():
    forward, backward = SimpleQueue(), SimpleQueue()
    return Pair(forward, backward), Pair(backward, forward)


def test_a_single_stage_gives_outputs_in_order_with_uneven_parts_and_whole_arguments():
    seen = []

    def model(x, scale, names):
        seen.append((x.shape[0], names))
        return x * scale

    stage = ScaledLossPipelineStage(model, 0, 1)
    runtime = PipelineScheduleRuntime(stage, 3)
    x = Tensor(np.arange(10, dtype=np.float32).reshape(5, 2))
    outputs = runtime.run(x, scale=2.0, names=PerMicroBatch("abc"))
    assert seen == [(1, "a"), (2, "b"), (2, "c")]
    assert np.concatenate([one.asnumpy() for one in outputs]).ravel().tolist() == [2.0 * i for i in range(10)]
    assert len(runtime.run(x[:2], scale=1.0, names="all")) == 2
    assert [step.meta_type for step in runtime.steps] == [MetaStepType.FWD] * 2


def test_stages_in_a_line_move_activations_and_only_the_last_has_outputs():
    left_end, right_end = linked()
    shapes = []

    def shape(args, kwargs):
        shapes.append(kwargs["ids"].shape)
        return kwargs["ids"].shape

    first = ScaledLossPipelineStage(lambda x, ids: x + 1, 0, 2, None, left_end)
    last = ScaledLossPipelineStage(lambda x, ids: x * 10 + ids, 1, 2, right_end, None, activation_shape=shape)
    ids = np.arange(3, dtype=np.float32)
    results = {}

    def run(name, stage):
        results[name] = PipelineScheduleRuntime(stage, 2).run(ids, ids=ids)

    thread = threading.Thread(target=run, args=("first", first))
    thread.start()
    run("last", last)
    thread.join(timeout=30)
    assert results["first"] == []
    assert np.concatenate(results["last"]).tolist() == [10.0, 21.0, 32.0]
    assert shapes == [(1,), (2,)]
    assert first.bwd_send_specs(0) == [] and last.bwd_send_specs(0) == []


def test_gradients_of_micro_batches_add_up_to_those_of_the_batch():
    class Loss(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = ms.Parameter(Tensor(np.array([1.0, -2.0], np.float32)), name="weight")

        def construct(self, x):
            return ((x * self.weight) ** 2).mean()

    x = np.random.default_rng(0).standard_normal((5, 2)).astype(np.float32)
    expected = (2 * x**2 * np.array([1.0, -2.0])).sum(0) / x.size
    for schedule in ("gpipe", "1f1b"):
        stage = ScaledLossPipelineStage(Loss(), 0, 1, has_backward=True)
        runtime = PipelineScheduleRuntime([stage], 2, schedule)
        losses = runtime.run(Tensor(x))
        assert len(losses) == 2
        np.testing.assert_allclose(stage.gradients[0].asnumpy(), expected, rtol=1e-5)
        runtime.run(Tensor(x), loss_scales=[1.0, 0.0])
        only_first = (2 * x[:2] ** 2 * np.array([1.0, -2.0])).sum(0) / x[:2].size
        np.testing.assert_allclose(stage.gradients[0].asnumpy(), only_first, rtol=1e-5)


def test_a_failed_run_leaves_nothing_behind():
    def model(x):
        if x.sum() > 1:
            raise FloatingPointError("too large")
        return x

    runtime = PipelineScheduleRuntime(ScaledLossPipelineStage(model, 0, 1), 2)
    with pytest.raises(FloatingPointError):
        runtime.run(np.array([0.0, 5.0]))
    assert [one.tolist() for one in runtime.run(np.array([0.0, 1.0]))] == [[0.0], [1.0]]


def test_the_idle_share_is_the_waiting_time_over_all_time(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr("mindformers_ext.parallel.pipeline.time.perf_counter", lambda: next(clock))
    runtime = PipelineScheduleRuntime(ScaledLossPipelineStage(lambda x: x, 0, 1))
    assert runtime.idle_share == 0.0
    runtime.run(np.zeros(1))
    with runtime.waiting():
        pass
    assert (runtime.seconds_waiting, runtime.seconds_total, runtime.idle_share) == (1.0, 4.0, 0.25)


def test_arguments_that_disagree_are_refused():
    runtime = PipelineScheduleRuntime(ScaledLossPipelineStage(lambda *args: args[0], 0, 1), 2)
    for args, message in (
        ((np.zeros(3), np.zeros(4)), "3 and 4 rows"),
        ((PerMicroBatch([1]), PerMicroBatch([1, 2])), "1 and 2 micro-batches"),
        ((np.zeros(2), PerMicroBatch([1, 2, 3])), "3 micro-batches are too many for 2 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            runtime.run(*args)
    with pytest.raises(ValueError, match="1 loss_scales for 2 micro-batches"):
        runtime.run(np.zeros(2), loss_scales=[1.0])


def test_stages_that_cannot_run_are_refused():
    end, _ = linked()
    for arguments, message in (
        ((2, 2), "stage 2 is not one of the 2 stages"),
        ((1, 2), "needs a group with each of its neighbours"),
        ((0, 1, end), "needs a group with each of its neighbours"),
        ((1, 2, end), "needs activation_shape"),
    ):
        with pytest.raises(ValueError, match=message):
            ScaledLossPipelineStage(lambda x: x, *arguments)
    stage = ScaledLossPipelineStage(lambda x: x, 0, 1)
    for stages, schedule, message in (
        ([stage, stage], "forward", "one stage, not 2"),
        (stage, "1f1b", "needs a stage with a backward"),
        (stage, "zigzag", "zigzag"),
    ):
        with pytest.raises(ValueError, match=message):
            PipelineScheduleRuntime(stages, 1, schedule)


def test_a_stage_is_built_with_its_layers_and_its_ends():
    given = {}

    def build(config, **keywords):
        given.update(keywords)
        return lambda x: x

    (stage,) = StageModelBuilder(groups.single()).build_stages(build, SimpleNamespace(num_layers=3), has_backward=False)
    assert given == {
        "layer_start": 0,
        "layer_end": 3,
        "pre_process": True,
        "post_process": True,
        "stage_idx": 0,
        "vp_size": 1,
    }
    assert stage.is_first and stage.is_last
