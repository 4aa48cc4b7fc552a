import pytest

from mindformers_ext.trainer.callbacks import (
    CallbackHandler,
    CheckpointCallback,
    LossCallback,
    TrainerCallback,
    build_callbacks,
)
from mindformers_ext.trainer.train_state import TrainerState

STEP = {"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-3, "num_tokens": 64, "skipped": False}


class Recorder(TrainerCallback):
    def __init__(self, name="r", **_):
        self.name, self.seen = name, []

    def on_step_begin(self, args, state, **kwargs):
        self.seen.append((args, state, kwargs))


class NotACallback:
    pass


def run_steps(callback, steps, start=0):
    state = TrainerState(global_step=start, max_steps=start + steps)
    callback.on_train_begin(None, state)
    for _ in range(steps):
        state.global_step += 1
        callback.on_step_end(None, state, **STEP)
    return state


def test_handler_calls_in_order_and_adds_the_objects_of_the_run():
    first, second = Recorder(), Recorder()
    handler = CallbackHandler([first], model="model", optimizer="optimizer")
    handler.add_callback(second)
    state = TrainerState()
    handler.on_step_begin("args", state, extra=1)
    handler.on_epoch_end("args", state)
    expected = [("args", state, {"model": "model", "optimizer": "optimizer", "extra": 1})]
    assert first.seen == second.seen == expected


def test_loss_line_every_interval_with_readable_values(log):
    state = run_steps(LossCallback(log_interval=2), 5)
    assert [line["step"] for line in state.log_history] == [2, 4]
    assert state.log_history[0]["loss"] == 1.25
    assert len(log.messages) == 2
    assert log.messages[0].startswith("step 2/5 | epoch 0.00 | loss 1.250000 | lr 1.000e-03 | grad_norm 0.5000 | ")


def test_checkpoint_at_every_interval_and_at_the_end_but_never_twice():
    saved = []
    callback = CheckpointCallback(lambda state: saved.append(state.global_step), 2)
    callback.on_train_end(None, run_steps(callback, 5))
    assert saved == [2, 4, 5]
    saved.clear()
    callback.on_train_end(None, run_steps(callback, 4, start=6))
    assert saved == [8, 10]
    saved.clear()
    callback.on_train_end(None, run_steps(callback, 0, start=10))
    assert saved == []


def test_failing_disk_is_logged_between_and_raised_at_the_end(log):

    def save(state):
        raise OSError("disk full")

    callback = CheckpointCallback(save, 2)
    state = run_steps(callback, 2)
    assert "no checkpoint of step 2: disk full; training goes on" in log.text
    with pytest.raises(OSError, match="disk full"):
        callback.on_train_end(None, state)


def test_yaml_entries_become_callbacks_and_loss_is_always_there():
    entries = [{"type": f"{__name__}.Recorder", "name": "x"}]
    loss, recorder = build_callbacks(entries)
    assert (type(loss), loss.log_interval, recorder.name) == (LossCallback, 1, "x")
    (loss,) = build_callbacks([{"type": "LossCallback", "log_interval": 10}])
    assert loss.log_interval == 10
    assert entries == [{"type": f"{__name__}.Recorder", "name": "x"}]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({}, r"callbacks\[0\]: type is missing"),
        ({"type": "Loss"}, "unknown callback 'Loss'"),
        ({"type": "no_such_module.Class"}, "cannot import no_such_module.Class"),
        ({"type": "logging.NoSuchClass"}, "cannot import logging.NoSuchClass"),
        ({"type": f"{__name__}.NotACallback"}, "is not a subclass of"),
        ({"type": "LossCallback", "interval": 3}, "cannot build LossCallback: .*interval"),
        ({"type": "LossCallback", "log_interval": 0}, "log_interval 0 must be"),
        ({"type": "CheckpointCallback"}, "checkpoint section"),
    ],
)
def test_unusable_entries_are_refused_with_their_place(entry, problem):
    with pytest.raises(ValueError, match=problem):
        build_callbacks([entry])
