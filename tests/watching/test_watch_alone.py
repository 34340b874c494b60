"""paceline.watch in one process without torch.distributed: loops of every kind, by a clock that is told the time."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref

import pytest
import torch
from torch import nn

import paceline
from paceline.cluster import WatchError
from paceline.drivers.watching import folder as folders
from paceline.drivers.watching.phases import MANY, StepPhases
from paceline.traces.recorded_run import read_run
from paceline.traces.run_folder import FolderTakenError
from paceline.traces.step_clock import StepClock, clock_of
from paceline.traces.step_times import BucketsMade, StepTimes, TimesWriter, read_times, times_path
from tests.waiting import until

X = torch.ones(2, 3)


class Loop:
    """A model, its optimiser, and a clock that goes on only where a test says so."""

    def __init__(self, model=None, steps_with=None, **options):
        self.now, self.steps = 0.0, []
        self.model = model or nn.Linear(3, 1)
        self.optimizer = steps_with or torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.clock = StepClock(self.steps.append, clock=lambda: self.now, processor=lambda: self.now)
        self.phases = StepPhases(self.model, self.clock, self.clock.end_step, **options)

    def passes(self, seconds):
        self.now += seconds

    def forward(self, seconds=1.0):
        handle = self.model.register_forward_pre_hook(lambda *_: self.passes(seconds))
        output = self.model(X)
        handle.remove()
        return output

    def backward(self, output, seconds=1.0):
        output.register_hook(lambda gradient: self.passes(seconds))
        output.sum().backward()

    def step(self, seconds=1.0, optimizer=None):
        self.passes(seconds)
        (optimizer or self.optimizer).step()

    def found(self):
        names = ("input", "forward", "backward", "wait", "optimiser", "other")
        return [{name: getattr(each, f"{name}_seconds") for name in names} for each in self.steps]


def phases(**seconds):
    return dict.fromkeys(("input", "forward", "backward", "wait", "optimiser", "other"), 0.0) | seconds


@pytest.fixture
def loop():
    made = []

    def make(*given, **options):
        made.append(Loop(*given, **options))
        return made[-1]

    yield make
    for each in made:
        each.phases.close()


def test_a_step_of_one_pass(loop):
    one = loop()
    for _ in range(2):
        one.passes(5)
        output = one.forward(2)
        one.passes(3)  # the loss
        one.backward(output, 7)
        one.step(0.5)  # clipping
    assert one.found() == [phases(input=5, forward=5, backward=7, optimiser=0.5)] * 2


def test_accumulated_gradients_are_one_step_also_where_a_scaler_leaves_one_out(loop):
    one = loop()
    one.backward(one.forward())
    one.step()
    for _ in range(3):
        one.passes(5)
        one.backward(one.forward(2), 7)
    one.step(0.5)
    assert one.found()[1:] == [phases(input=15, forward=6, backward=21, optimiser=0.5)]


def test_evaluations_are_in_no_phase_and_passes_without_gradients_neither(loop):
    one = loop()
    one.backward(one.forward())
    one.step()
    one.passes(3)
    with torch.no_grad():
        one.forward(5)
    one.model.eval()
    one.forward(4)
    one.passes(2)
    one.model.train()
    one.backward(one.forward(2), 7)
    one.step(0.5)
    assert one.found()[1:] == [phases(forward=2, backward=7, optimiser=0.5, other=14)]


def test_without_a_torch_optimiser_a_step_ends_with_the_next_forward_pass(loop):
    one = loop()
    for _ in range(4):
        one.backward(one.forward(2), 7)
        one.passes(3)  # an optimiser of the user's
    assert one.found() == [phases(forward=2, backward=7, other=3)] * 3


def test_a_backward_pass_that_brings_nothing_together_ends_no_step(loop):
    one = loop(syncs=lambda: False)
    for _ in range(4):
        one.backward(one.forward(2), 7)
    assert one.found() == []


def test_a_closure_is_forward_backward_and_the_optimisers_own_time(loop):
    model = nn.Linear(3, 1)
    one = loop(model, torch.optim.LBFGS(model.parameters(), max_iter=1, max_eval=1))

    def closure():
        output = one.forward(2)
        one.backward(output, 7)
        one.passes(3)
        return output.sum()

    one.passes(5)
    one.optimizer.step(closure)
    assert one.found() == [phases(input=5, forward=2, backward=7, optimiser=3)]


def test_of_two_optimisers_the_first_ends_the_steps_and_one_of_another_model_none(loop):
    model = nn.Linear(3, 1)
    one = loop(model, torch.optim.SGD([model.weight], lr=0.1))
    second = torch.optim.SGD([model.bias], lr=0.1)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    for _ in range(3):
        one.step(1, other)
        one.backward(one.forward(2), 7)
        one.step(0.5)
        one.step(0.25, second)
    assert len(one.found()) == 3
    assert sum(each["forward"] for each in one.found()) == 6
    for _ in range(MANY + 3):  # the first is not used any more
        one.backward(one.forward(2), 7)
        one.step(0.25, second)
    assert one.found()[-1] == phases(forward=2, backward=7, optimiser=0.25)


def test_the_optimiser_that_is_given_ends_the_steps(loop):
    model = nn.Linear(3, 1)
    first, second = (torch.optim.SGD([each], lr=0.1) for each in model.parameters())
    one = loop(model, first, optimizer=second)
    for _ in range(MANY + 3):
        one.backward(one.forward(2), 7)
        one.step(0.25, first)
    assert one.found() == []
    one.step(0.25, second)
    assert len(one.found()) == 1


def test_a_backward_pass_that_failed_is_forgotten(loop):
    one = loop()

    def fail(gradient):
        raise ZeroDivisionError

    output = one.forward(2)
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    one.backward(one.forward(2), 7)
    one.step(0.5)
    assert one.found() == [phases(forward=4, backward=7, optimiser=0.5)]


def test_a_gradient_that_is_asked_for_in_the_loss_is_no_end(loop):
    one = loop()
    output = one.forward(2)
    torch.autograd.grad(output.sum(), one.model.weight, retain_graph=True)
    one.passes(3)
    one.backward(output, 7)
    one.step(0.5)
    assert one.found() == [phases(forward=5, backward=7, optimiser=0.5)]


# -- files -------------------------------------------------------------------------------------------------------------


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(X).sum().backward()
        optimizer.step()


def test_a_plain_module_is_watched_in_the_next_free_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("watch", "watch-2"):
        model, logged = nn.Linear(3, 1), []
        with paceline.watch(model, log=lambda figures, step: logged.append((figures, step))) as watch:  # noqa: B023
            assert clock_of(model) is not None
            train(model)
        assert clock_of(model) is None
        train(model)
        run = read_run(tmp_path / "runs" / name)
        assert (run.kind, run.workers) == ("watched", 1)
        times = run.times["rank"][0]
        assert (times.began.sync, len(times.steps), times.ended.reason) == ("none", 3, "closed")
        assert [step for _, step in logged] == [1, 2, 3]
        assert watch.figures()["steps"] == watch.steps == 3
        assert watch.figures()["forward_seconds"] > 0
        assert capsys.readouterr().err == f"paceline watches 1 rank: runs/{name}\n"


def test_the_file_of_an_exception_says_so_and_a_part_says_how_gradients_come_together(tmp_path):
    model = nn.Linear(3, 1)

    def fail():
        with paceline.watch(model, out=tmp_path / "run") as watch:
            clock_of(model).tell_sync("averaging")
            watch.none_such()

    with pytest.raises(AttributeError):
        fail()
    times = read_times(times_path(tmp_path / "run", "rank"))
    assert (times.began.sync, times.ended.reason, times.steps) == ("averaging", "ended by AttributeError", ())


def test_what_cannot_be_watched_is_refused(tmp_path):
    model = nn.Linear(3, 1)
    with pytest.raises(WatchError, match=r"watch takes a torch.nn.Module \(this is a list\)"):
        paceline.watch([])
    with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
        paceline.watch(model, timeout_seconds=0)
    (tmp_path / "file").touch()
    with pytest.raises(WatchError, match="cannot write to"):
        paceline.watch(model, out=tmp_path / "file")
    with paceline.watch(model, out=tmp_path / "run"):
        with pytest.raises(WatchError, match="watched already"):
            paceline.watch(model, out=tmp_path / "other")
        train(model)
    with pytest.raises(FolderTakenError, match="holds a run"):
        paceline.watch(model, out=tmp_path / "run")
    assert clock_of(model) is None


@pytest.mark.parametrize("named", [True, False])
def test_a_launch_that_was_restarted_goes_on_with_its_folder(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    folder = tmp_path / "runs" / "watch"
    for life in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(life))
        model = nn.Linear(3, 1)
        with paceline.watch(model, out=folder if named else None) as watch:
            train(model)
        assert watch.folder == folder
    assert [each.step for each in read_times(times_path(folder, "rank")).steps] == list(range(9))
    monkeypatch.setattr(folders, "launch_name", lambda: "none/elsewhere/1")
    if named:
        with pytest.raises(FolderTakenError):
            paceline.watch(nn.Linear(3, 1), out=folder)
    else:
        with paceline.watch(nn.Linear(3, 1)) as watch:
            assert watch.folder.name == "watch-2"


def test_a_full_disk_is_told_of_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    model = nn.Linear(3, 1)
    with paceline.watch(model, out=tmp_path / "run") as watch:
        train(model)
        assert watch.figures()["lost_lines"] == 0  # and all lines are written

        def full(file, line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        train(model)
        assert watch.figures()["steps"] == 6  # and all lines are on their way to the disk
        monkeypatch.undo()
    assert [each.message for each in caplog.records if "No space left" in each.message] == [caplog.records[0].message]
    assert watch.figures()["lost_lines"] == 3
    assert len(read_times(times_path(tmp_path / "run", "rank")).steps) == 3


@pytest.mark.parametrize("compiled", ["outside", "in place", "in place, later"])
def test_a_compiled_model_trains(tmp_path, compiled):
    model = nn.Linear(3, 1)
    called = torch.compile(model, backend="eager") if compiled == "outside" else model
    if compiled == "in place":
        model.compile(backend="eager")
    with paceline.watch(called, out=tmp_path / "run") as watch:
        if compiled == "in place, later":
            model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            called(X).sum().backward()
            optimizer.step()
    steps = read_times(times_path(tmp_path / "run", "rank")).steps
    assert len(steps) == 3
    seen = steps[1:] if compiled == "in place, later" else steps
    assert all(min(each.forward_seconds, each.backward_seconds) > 0 for each in seen)
    assert watch.notes == ()
    called(X)  # nobody watches any more


class Nesting(torch.optim.Optimizer):
    """An optimiser that calls others, as ZeroRedundancyOptimizer and Lookahead do."""

    def __init__(self, parameters, inner, passes):
        super().__init__(parameters, {})
        self.inner, self.passes = inner, passes

    def step(self, closure=None):
        for each in self.inner:
            self.passes(1)
            each.step()
        self.passes(1)


@pytest.mark.parametrize("named", [False, True])
def test_of_an_optimiser_that_calls_others_the_outermost_step_is_the_end(loop, named):
    model = nn.Linear(3, 1)
    inner = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    one = loop(model, inner[0], optimizer=inner[1] if named else None)
    outer = Nesting(model.parameters(), inner, one.passes)
    for _ in range(3):
        one.passes(5)
        one.backward(one.forward(2), 7)
        outer.step()
    assert one.found() == [phases(input=5, forward=2, backward=7, optimiser=3)] * 3


def test_an_error_in_an_optimisers_step_is_forgotten_with_the_next_forward_pass(loop):
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    model = nn.Linear(3, 1)
    failing = Failing(model.parameters(), lr=0.1)
    one = loop(model, failing, optimizer=failing)
    one.backward(one.forward(2), 7)
    with pytest.raises(ZeroDivisionError):
        one.optimizer.step()
    Failing.fails = False
    one.backward(one.forward(2), 7)
    one.passes(3)
    one.backward(one.forward(2), 7)  # accumulated: what came before is input, not a closure's
    one.optimizer.step()
    assert one.found() == [phases(input=3, forward=6, backward=21)]


def test_a_model_that_is_trained_in_eval_mode_has_forward_passes(loop):
    one = loop()
    one.model.eval()
    for _ in range(3):
        one.passes(5)
        one.backward(one.forward(2), 7)
        one.step(0.5)
    assert one.found()[1:] == [phases(input=5, forward=2, backward=7, optimiser=0.5)] * 2
    assert one.found()[0] == phases(other=5, forward=2, backward=7, optimiser=0.5)


def test_steps_without_a_call_of_the_model_are_in_no_phase_and_a_note_says_so(loop):
    told = []
    one = loop(on_unseen=lambda: told.append(1))
    for _ in range(3):
        one.passes(5)
        nn.functional.linear(X, one.model.weight).sum().backward()
        one.step(0.5)
    assert one.found() == [phases(other=5.5)] * 3
    assert told == [1]


def test_a_forked_child_writes_nothing_into_its_parents_file(tmp_path):
    model = nn.Linear(3, 1)
    with paceline.watch(model, out=tmp_path / "run") as watch:
        train(model)
        child = os.fork()
        if child == 0:
            try:
                train(model)
                watch.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        train(model)
    assert [each.step for each in read_times(times_path(tmp_path / "run", "rank")).steps] == list(range(6))


def test_a_model_that_is_deleted_is_freed_and_its_file_ends(tmp_path):
    model = nn.Linear(3, 1)
    watch = paceline.watch(model, out=tmp_path / "run")
    train(model)
    gone = weakref.ref(model)
    del model, watch
    gc.collect()
    assert gone() is None
    path = times_path(tmp_path / "run", "rank")
    until(lambda: read_times(path).ended is not None, "the file's last line")
    assert (len(read_times(path).steps), read_times(path).ended.reason) == (3, "the model was deleted")


def test_a_probes_group_ends_on_the_scripts_thread_and_never_on_a_daemon(tmp_path):
    """While the interpreter ends, a daemon thread is ended inside gloo's destructor, and that aborts the process."""
    closed = []

    class Probe:
        def close(self):
            closed.append(threading.current_thread())

    model = nn.Linear(4, 2)
    watching = paceline.watch(model, out=tmp_path / "one")
    watching._probe = Probe()
    del model
    gc.collect()
    watching._lines._thread.join(20)
    assert watching._closed
    assert closed == []
    paceline.watch(nn.Linear(4, 2), out=tmp_path / "two").close()
    assert closed == [threading.main_thread()]


def test_figures_are_logged_without_a_line_being_written_in_the_training_thread(tmp_path, monkeypatch):
    wrote, logged, write = [], [], TimesWriter.write

    def noted(self, record):
        wrote.append(threading.current_thread().name)
        write(self, record)

    model = nn.Linear(3, 1)
    watch = paceline.watch(model, out=tmp_path / "run", log=lambda figures, step: logged.append((step, dict(figures))))
    monkeypatch.setattr(TimesWriter, "write", noted)
    train(model, steps=12)
    watch._lines.join()
    assert set(wrote) <= {"paceline-watch-lines"}
    watch.close()
    steps = read_times(times_path(tmp_path / "run", "rank")).steps
    assert [step for step, _ in logged] == list(range(1, len(steps) + 1))
    for step, figures in logged:
        assert figures["paceline/steps"] == step
        for name in ("seconds", "input_seconds", "forward_seconds", "backward_seconds", "optimiser_seconds"):
            mean = sum(getattr(each, name) for each in steps[:step]) / step
            assert figures[f"paceline/{name}"] == pytest.approx(mean, abs=2e-6)


def test_lines_are_in_the_file_soon_also_when_training_stands_still(tmp_path):
    model = nn.Linear(3, 1)
    with paceline.watch(model, out=tmp_path / "run"):
        train(model)
        path = times_path(tmp_path / "run", "rank")
        until(lambda: len(read_times(path).steps) == 3, "three steps in the file")


def test_the_last_step_is_found_behind_other_lines(tmp_path):
    writer = TimesWriter(tmp_path / "rank-0.jsonl")
    writer.write(StepTimes(step=7, started_seconds=0.0, seconds=1.0))
    writer.write(BucketsMade(step=7, bytes=tuple(range(30_000))))
    writer.close()
    assert (tmp_path / "rank-0.jsonl").stat().st_size > 2 * folders.LOOK_BYTES
    assert folders.last_step(tmp_path / "rank-0.jsonl") == 7


def test_a_launch_that_has_not_been_initialised_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(paceline.PacelineError, match=r"2 ranks .*init_process_group\(\) before watch"):
        paceline.watch(nn.Linear(2, 1))
