"""Steps of pipeline stages without devices: nothing is lost, nothing deadlocks; and how layers and rows are split."""

import pytest

from mindformers_ext.parallel.schedule import MetaStep, MetaStepType, build_steps, split_layers, split_rows

SCHEDULES = ("gpipe", "1f1b", "forward")
LAYOUTS = [(stages, micros) for stages in (1, 2, 3, 4, 8) for micros in range(1, 9)]
RECEIVES = {MetaStepType.FWD_RECV: (MetaStepType.FWD_SEND, -1), MetaStepType.BWD_RECV: (MetaStepType.BWD_SEND, 1)}
SENDS = {MetaStepType.FWD_SEND: (MetaStepType.FWD_RECV, 1), MetaStepType.BWD_SEND: (MetaStepType.BWD_RECV, -1)}


def run_with_rendezvous(steps):
    """Runs all stages; a transfer ends only when both ends are at it. Returns the steps in the order done."""
    position, done = [0] * len(steps), []
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(steps):
            if position[stage] == len(order):
                continue
            step = order[position[stage]]
            partner = (RECEIVES | SENDS).get(step.meta_type)
            if partner is None:
                position[stage] += 1
                done.append(step)
                moved = True
                continue
            kind, offset = partner
            peer = stage + offset
            wanted = MetaStep(step.micro_index, kind, peer)
            if position[peer] < len(steps[peer]) and steps[peer][position[peer]] == wanted:
                position[stage] += 1
                position[peer] += 1
                done += [step, wanted]
                moved = True
    return done


def needs(step, stages):
    """The steps that must be done before ``step``."""
    micro, kind, stage = step.micro_index, step.meta_type, step.stage_index
    if kind is MetaStepType.FWD:
        return [MetaStep(micro, MetaStepType.FWD_RECV, stage)] if stage else []
    if kind is MetaStepType.FWD_SEND:
        return [MetaStep(micro, MetaStepType.FWD, stage)]
    if kind is MetaStepType.BWD:
        received = [MetaStep(micro, MetaStepType.BWD_RECV, stage)] if stage < stages - 1 else []
        return [MetaStep(micro, MetaStepType.FWD, stage), *received]
    if kind is MetaStepType.BWD_SEND:
        return [MetaStep(micro, MetaStepType.BWD, stage)]
    return []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micros"), LAYOUTS)
def test_stages_that_wait_for_each_other_at_every_transfer_never_deadlock(schedule, stages, micros):
    steps = build_steps(schedule, stages, micros)
    done = run_with_rendezvous(steps)
    assert sorted(map(str, done)) == sorted(str(step) for order in steps for step in order)
    seen = set()
    for step in done:
        assert all(one in seen for one in needs(step, stages)), step
        seen.add(step)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micros"), LAYOUTS)
def test_every_micro_batch_passes_every_stage_once_and_in_order(schedule, stages, micros):
    for stage, order in enumerate(build_steps(schedule, stages, micros)):
        assert {step.stage_index for step in order} == {stage}
        first, last = stage == 0, stage == stages - 1
        backward = schedule != "forward"
        for kind, present in {
            MetaStepType.FWD: True,
            MetaStepType.FWD_RECV: not first,
            MetaStepType.FWD_SEND: not last,
            MetaStepType.BWD: backward,
            MetaStepType.BWD_RECV: backward and not last,
            MetaStepType.BWD_SEND: backward and not first,
        }.items():
            micro_batches = [step.micro_index for step in order if step.meta_type is kind]
            assert micro_batches == (list(range(micros)) if present else []), kind


def test_the_simulation_finds_the_deadlock_of_a_naive_order():
    send, receive = MetaStepType.FWD_SEND, MetaStepType.BWD_RECV
    naive = [
        [MetaStep(0, send, 0), MetaStep(0, receive, 0)],
        [MetaStep(0, MetaStepType.BWD_SEND, 1), MetaStep(0, MetaStepType.FWD_RECV, 1)],
    ]
    assert run_with_rendezvous(naive) == []


def test_1f1b_holds_as_many_micro_batches_as_stages_are_left_and_gpipe_holds_all():
    held = {}
    for schedule in ("1f1b", "gpipe"):
        for stage, order in enumerate(build_steps(schedule, 4, 8)):
            inside, most = 0, 0
            for step in order:
                inside += {MetaStepType.FWD: 1, MetaStepType.BWD: -1}.get(step.meta_type, 0)
                most = max(most, inside)
            held[schedule, stage] = most
    assert [held["1f1b", stage] for stage in range(4)] == [4, 3, 2, 1]
    assert [held["gpipe", stage] for stage in range(4)] == [8, 8, 8, 8]


@pytest.mark.parametrize(("schedule", "stages", "micros"), [("zigzag", 2, 2), ("1f1b", 0, 1), ("gpipe", 2, 0)])
def test_impossible_pipelines_are_refused(schedule, stages, micros):
    with pytest.raises(ValueError, match="zigzag|must be positive"):
        build_steps(schedule, stages, micros)


def test_rows_are_split_evenly_and_none_is_lost():
    for rows in range(1, 20):
        for parts in range(1, 9):
            slices = split_rows(rows, parts)
            assert [row for one in slices for row in range(rows)[one]] == list(range(rows))
            sizes = [one.stop - one.start for one in slices]
            assert len(sizes) == min(rows, parts) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "setting", "expected"),
    [
        (4, 2, "auto", [2, 2]),
        (4, 4, None, [1, 1, 1, 1]),
        (16, 2, ["0-9", "10-15"], [10, 6]),
        (4, 2, ["0-2", "3"], [3, 1]),
        (4, 2, [" 0 - 0 ", "1-3"], [1, 3]),
    ],
)
def test_layers_are_split_as_asked(layers, stages, setting, expected):
    result = split_layers(layers, stages, setting)
    assert [len(stage) for stage in result] == expected
    assert [layer for stage in result for layer in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("layers", "stages", "setting", "message"),
    [
        (5, 2, "auto", r'5 layers cannot be split into 2 .* for example \["0-1", "2-4"\]'),
        (2, 4, "auto", "use pipeline_parallel: 2 or less"),
        (4, 2, ["0-1", "3"], "layer 2 is in no stage"),
        (4, 2, ["0-2", "2-3"], "layer 2 is in two stages"),
        (4, 2, ["2-3", "0-1"], "out of order"),
        (4, 2, ["0-1", "2"], "end at layer 2, the model at layer 3"),
        (4, 2, ["0-1", "2-4"], "end at layer 4, the model at layer 3"),
        (4, 2, ["0-3"], "1 entries for 2 stages"),
        (4, 2, ["1-0", "2-3"], "'1-0' ends before it starts"),
        (4, 2, ["a", "2-3"], "'a' must be like"),
        (4, 2, ["0,1", "2-3"], "several chunks"),
        (4, 2, [[0, 1], [2, 3]], "must be"),
        (4, 2, "even", "'even' must be"),
    ],
)
def test_gaps_overlaps_and_unreadable_splits_are_refused(layers, stages, setting, message):
    with pytest.raises(ValueError, match=message):
        split_layers(layers, stages, setting)


def idle_share(stages, micros):
    """Idle share of the first stage in a forward: a micro-batch takes 1 / micros a stage, a transfer no time."""
    position, clocks, ends = [0] * stages, [0.0] * stages, {}
    orders = build_steps("forward", stages, micros)
    while any(position[stage] < len(orders[stage]) for stage in range(stages)):
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                step = order[position[stage]]
                if step.meta_type is MetaStepType.FWD_RECV:
                    sent = ends.get((step.micro_index, stage - 1))
                    if sent is None:
                        break
                    clocks[stage] = max(clocks[stage], sent)
                elif step.meta_type is MetaStepType.FWD:
                    clocks[stage] += 1 / micros
                    ends[step.micro_index, stage] = clocks[stage]
                position[stage] += 1
    return 1 - 1 / max(clocks)


def test_more_micro_batches_leave_stages_idle_for_less():
    assert idle_share(2, 1) == pytest.approx(1 / 2)
    assert idle_share(2, 2) == pytest.approx(1 / 3)
    for stages in (2, 3, 4):
        for micros in range(1, 7):
            assert idle_share(stages, micros) == pytest.approx((stages - 1) / (stages + micros - 1))
