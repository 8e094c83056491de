"""Whatever a training loop reports, training goes on: nothing raises, nothing waits for ever, and saves are good."""

from __future__ import annotations

import decimal
import fractions
import functools
import itertools
import logging
import math
import threading
import warnings

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_device import Device, Mark
from support.guards import guarded
from support.half_training import Half, batches
from support.runs import QUICK

import ckptguard
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.records import manifests
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.signals import device_signals, monitor, read_number
from ckptguard.training.signals.device_signals import DeviceSignals
from ckptguard.training.signals.monitor import TrainingMonitor
from ckptguard.training.signals.read_number import NumberReader
from ckptguard.values.verdict import Outcome
from ckptguard.verification.target import verify_target

NEVER = threading.Event()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Code and devices that never answer are given up soon."""
    monkeypatch.setattr(read_number.aside, "__defaults__", (0.5,))
    monkeypatch.setattr(
        DeviceSignals.__init__, "__kwdefaults__", DeviceSignals.__init__.__kwdefaults__ | {"seconds": 0.5}
    )


@pytest.fixture
def _patient(monkeypatch):
    """The code of a value is waited for, also on a busy machine."""
    monkeypatch.setattr(read_number.aside, "__defaults__", (60.0,))


class Failing(BaseException):
    """No Exception."""


def raising(error):
    """Code that raises."""

    def run(*_, **__):
        raise error

    return run


class Unprintable(Exception):
    """Its text cannot be had."""

    __str__ = __repr__ = raising(ValueError("no text"))


def forever(*_, **__):
    """Code that never returns."""
    NEVER.wait()


ENDS = {
    "raises": raising(RuntimeError("it cannot")),
    "raises what has no text": raising(Unprintable()),
    "raises no Exception": raising(Failing()),
    "ends the process": raising(SystemExit(3)),
    "blocks": forever,
    "is nonsense": lambda *_, **__: "nonsense",
}
NAMES = ("__float__", "__index__", "__bool__", "__repr__", "__eq__", "__array__", "item", "detach", "is_cpu", "__len__")


def object_whose(names, end):
    """An object whose methods of these names end so."""
    return type("Odd", (), {"__hash__": None, **dict.fromkeys(names, ENDS[end])})()


def impostor(module, name, method, end):
    """An object whose class says that it is one of a module of others."""
    return type(name, (), {"__module__": module, method: ENDS[end]})()


def overridden(method, end):
    """A plain tensor one of whose methods an attribute hides."""
    tensor = torch.ones(2)
    setattr(tensor, method, ENDS[end])
    return tensor


def subclass(method, end):
    """A tensor whose class takes part in torch's calls in a bad way."""
    code = classmethod(lambda cls, *_, **__: ENDS[end]())
    if method == "__torch_function__":
        return torch.ones(2).as_subclass(type("Odd", (torch.Tensor,), {method: code}))
    made = type("Odd", (torch.Tensor,), {method: code})
    return torch.Tensor._make_wrapper_subclass(made, (2,), dtype=torch.float32)


def freed(size, offset=0):
    """A view of memory that is gone."""
    tensor = torch.ones(size)
    view = tensor[offset:]
    tensor.untyped_storage().resize_(0)
    return view


class Dead(Device):
    """A device whose marks end badly when they are asked, or waited for."""

    def __init__(self, query, synchronize) -> None:
        super().__init__()
        self._query, self._synchronize = query, synchronize

    def mark(self, _device):
        """A mark in its work."""
        found = Mark(self)
        if self._query:
            found.query = ENDS[self._query]
        if self._synchronize:
            found.synchronize = ENDS[self._synchronize]
        return found


def fake(device):
    """A tensor without content that claims a device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones((), device=device)


def twofold():
    """A tensor that is made of two others."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.ones(3), torch.ones(3))


def quantised(shape):
    """An integer tensor with a scale."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


def inference(shape):
    """A tensor without history."""
    with torch.inference_mode():
        return torch.ones(shape)


DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")}, key=str
)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def of_dtype(dtype, shape):
    """A tensor of ones where its type has some, else of nothing in particular."""
    try:
        return torch.ones(shape).to(dtype)
    except (RuntimeError, NotImplementedError):
        return torch.empty(shape, dtype=dtype)


tensors = st.one_of(
    st.builds(of_dtype, st.sampled_from(DTYPES), SHAPES),
    st.builds(lambda dtype, shape: torch.empty(shape, dtype=dtype, device="meta"), st.sampled_from(DTYPES), SHAPES),
    st.builds(lambda shape: torch.ones(shape, requires_grad=True), SHAPES),
    st.builds(inference, SHAPES),
    st.builds(quantised, SHAPES),
    st.builds(freed, st.integers(2, 9), st.integers(0, 1)),
    st.builds(overridden, st.sampled_from(["numel", "detach", "dim", "item", "mean"]), st.sampled_from(sorted(ENDS))),
    st.builds(fake, st.sampled_from(["cpu", "cuda", "meta"])),
    st.builds(subclass, st.sampled_from(["__torch_function__", "__torch_dispatch__"]), st.sampled_from(sorted(ENDS))),
    st.sampled_from([torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]).map(
        lambda layout: torch.eye(4).to_sparse(layout=layout)
    ),
    st.just(None).map(lambda _: torch.eye(4).to_sparse_bsr((2, 2))),
    st.just(None).map(lambda _: torch.ones(3).to_mkldnn()),
    st.just(None).map(lambda _: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    st.just(None).map(lambda _: torch.ones(()).expand(10**6, 10**6)),
    st.just(None).map(lambda _: twofold()),
)
objects = st.one_of(
    st.text(max_size=5),
    st.binary(max_size=5),
    st.decimals(),
    st.fractions(),
    st.integers() | st.just(10**400) | st.just(-(10**400)),
    st.complex_numbers(),
    st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(), st.integers(), max_size=2),
    st.just(None).map(lambda _: (n for n in range(3))),
    st.sampled_from([numpy.float16, numpy.float32, numpy.float64, numpy.int8, numpy.bool_]).map(lambda kind: kind(1)),
    st.sampled_from([numpy.ma.masked, numpy.ma.masked_array([1.0, math.inf], mask=[1, 1])]),
    st.sampled_from([numpy.ones(3), numpy.ones((1, 1)), numpy.ones(0), numpy.array("x"), numpy.array(object())]),
    st.sampled_from([decimal.Decimal("sNaN"), fractions.Fraction(10**400), object(), object, len, ..., NotImplemented]),
    st.builds(object_whose, st.sets(st.sampled_from(NAMES), min_size=1).map(sorted), st.sampled_from(sorted(ENDS))),
    st.builds(
        impostor,
        st.sampled_from(["torch.x", "torch", "builtins", "numpy"]),
        st.sampled_from(["Odd", "Tensor", "float", "float64"]),
        st.sampled_from(NAMES[:3]),
        st.sampled_from(sorted(ENDS)),
    ),
)
values = st.one_of(st.none(), st.floats(0, 10), objects, tensors)
around = st.sampled_from(["", "no_grad", "inference_mode", "autocast", "thread", "default device", "compile"])


def within(where, work):
    """Do it where a training loop may."""
    if where == "thread":
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    elif where == "compile":
        torch.compile(lambda: (work(), None)[1], backend="eager")()
    elif where == "autocast":
        with torch.autocast("cpu"):
            work()
    elif where == "default device":
        with torch.device("meta"):
            work()
    else:
        with getattr(torch, where)() if where else torch.enable_grad():
            work()


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(values, values, st.none() | st.booleans() | values, around), min_size=1, max_size=4))
def test_training_takes_any_observation(tmp_path_factory, observations):
    """A loop that reports anything makes all of its updates, and its last save is good."""
    run = tmp_path_factory.mktemp("any") / "run"
    model, made = Half(), []
    with warnings.catch_warnings(), guarded(run, model, policy=RollbackPolicy(scale_skips=99, nan_losses=99)) as guard:
        warnings.simplefilter("error")
        for step, _ in guard.steps(batches(9), total=4, save_every=2):
            made.append(step)
            loss, norm, skipped, where = observations[step % len(observations)]
            # A norm that reads as NaN or infinity is a sign of sickness, and no bad input.
            number = guard._monitor.reader.read("grad_norm", norm)
            norm = 1.0 if type(number) is float and not math.isfinite(number) else norm
            within(where, functools.partial(guard.observe, loss=loss, grad_norm=norm, skipped=skipped))
        assert guard._monitor._lock.acquire(timeout=5)
    assert made == [1, 2, 3, 4]
    assert verify_target(str(run), QUICK).outcome is Outcome.GOOD


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(values, values)
def test_what_cannot_be_read_hides_nothing_else(value, skipped):
    """An infinite gradient norm beside it, and after it, is seen at its own step."""
    seen = TrainingMonitor(TrainingParts(model=torch.nn.Linear(2, 2)), RollbackPolicy(scale_skips=99, nan_losses=99))
    assert not seen.observe(1, value, 1.0, skipped=None).sick
    seen.observe(2, value, math.inf, skipped=False)
    seen.flush()
    assert (seen.sick.cause, seen.sick.step) == ("grad_norm", 2)


def test_a_meta_tensor_does_not_end_a_training(tmp_path, caplog):
    """It has no content: it counts as not reported, which one sentence says once."""
    steps = []
    with guarded(tmp_path / "run", Half()) as guard:
        for step, _ in guard.steps(batches(9), total=6, save_every=2):
            steps.append(step)
            guard.observe(loss=torch.ones((), device="meta"), grad_norm=1.0)
    assert steps == [1, 2, 3, 4, 5, 6]
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD
    said = [r.getMessage() for r in caplog.records if "not reported" in r.getMessage()]
    assert said == ["ckptguard: loss of type Tensor counts as not reported: one real number is expected"]


@pytest.mark.usefixtures("_patient")
@pytest.mark.parametrize("query", [None, "raises"])
@pytest.mark.parametrize("synchronize", ["blocks", "raises", "raises no Exception"])
def test_a_device_that_does_not_answer_is_given_up(monkeypatch, caplog, query, synchronize):
    """Before a save it is waited for once. Other numbers count at once, and it counts again when it answers."""
    device = Dead(query, synchronize)
    monkeypatch.setattr(monitor, "DeviceSignals", lambda say: DeviceSignals(say, every=4, mark=device.mark))
    seen = TrainingMonitor(TrainingParts(model=torch.nn.Linear(2, 2)), RollbackPolicy())
    for step in range(1, 7):
        seen.observe(step, device.tensor(1.0), 1.0)
    seen.look(6)
    assert seen.sick is None
    assert caplog.text.count("not reported") == 1
    seen.observe(7, device.tensor(1.0), math.inf)
    seen.flush()
    assert (seen.sick.cause, seen.sick.step) == ("grad_norm", 7)


@pytest.mark.usefixtures("_patient")
def test_a_device_that_answers_late_counts_again(monkeypatch):
    """What came too late is lost, and what comes then is judged."""
    device = Dead(None, "blocks")
    monkeypatch.setattr(monitor, "DeviceSignals", lambda say: DeviceSignals(say, every=4, mark=device.mark))
    seen = TrainingMonitor(TrainingParts(model=torch.nn.Linear(2, 2)), RollbackPolicy())
    seen.observe(1, device.tensor(math.inf), device.tensor(1.0))
    seen.look(1)
    device.done = True
    seen.observe(2, device.tensor(1.0), device.tensor(math.inf))
    seen.look(2)
    assert (seen.sick.cause, seen.sick.step) == ("grad_norm", 2)


@pytest.mark.usefixtures("_patient")
def test_memory_made_in_inference_mode_can_be_written_outside(monkeypatch):
    """The first number may come in inference mode, and the next one not."""
    device = Device()
    monkeypatch.setattr(monitor, "DeviceSignals", lambda say: DeviceSignals(say, every=4, mark=device.mark))
    seen = TrainingMonitor(TrainingParts(model=torch.nn.Linear(2, 2)), RollbackPolicy())
    with torch.inference_mode():
        seen.observe(1, device.tensor(1.0), device.tensor(1.0))
    seen.observe(2, device.tensor(1.0), device.tensor(math.inf))
    device.done = True
    seen.flush()
    assert (seen.sick.cause, seen.sick.step) == ("grad_norm", 2)


@pytest.mark.usefixtures("_patient")
def test_nothing_is_asked_of_a_device_while_a_graph_is_captured(monkeypatch, caplog):
    """A copy would become part of the graph, and a question would end the capture."""
    device = Dead("raises", "raises")
    monkeypatch.setattr(monitor, "DeviceSignals", lambda say: DeviceSignals(say, every=1, mark=device.mark))
    seen = TrainingMonitor(TrainingParts(model=torch.nn.Linear(2, 2)), RollbackPolicy())
    monkeypatch.setattr(device_signals, "_is_capturing", lambda: True)
    seen.observe(2, device.tensor(1.0))
    seen.flush()
    assert "a CUDA graph is being captured" in caplog.text
    assert seen._delayed.waiting


def test_many_threads_may_observe(tmp_path):
    """Signals come from several threads while the loop goes on: each is counted, and nothing raises."""
    device = Device()
    device.done = True
    seen = TrainingMonitor(TrainingParts(model=torch.nn.Linear(2, 2)), RollbackPolicy())
    raised = []

    def observe(first):
        try:
            for step in range(first, 400, 4):
                seen.observe(step, 1.0 if step % 3 else torch.ones(()), 1.0)
                seen.after_step(step)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=observe, args=(first,)) for first in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert len(seen.recent.samples()) >= 256


def test_the_rest_of_what_a_loop_hands_over(tmp_path):
    """Arguments that do not exist, exceptions without text, metrics of any kind, and a learning rate that raises."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    odd = {name: object_whose(NAMES, name) for name in sorted(ENDS)}
    with guarded(tmp_path / "run", model, optimizer) as guard:
        for step, _ in guard.steps(batches(9), total=6, save_every=6):
            guard.observe(1.0, 1.0, odd["blocks"], 3, lr=odd["raises"], labels=odd["blocks"])
            assert not guard.observe(error=Unprintable()).sick
            assert not guard.observe(error=odd["raises"]).sick
            guard.save(metrics={**odd, 3: 1.0, "fine": step, "far": torch.ones((), device="meta")})
    assert verify_target(str(tmp_path / "run"), QUICK).outcome is Outcome.GOOD


@pytest.mark.parametrize("stalls", [1, 2, 3])
def test_code_that_ends_late_counts_again(stalls):
    """A process may be suspended while a value is read. After three stalls of a class its code is not run any more."""
    answer, entered, reader = threading.Event(), [], NumberReader()
    kind = type("Late", (), {"__float__": lambda self: (entered.append(1), answer.wait(), 7.0)[-1]})
    for _ in range(stalls):
        answer.clear()
        assert reader.read("loss", kind()) is None
        assert reader.read("loss", kind()) is None  # its code still runs
        answer.set()
        reader._silent[id(kind)].thread.join()
    assert len(entered) == stalls
    assert reader.read("loss", kind()) == (7.0 if stalls < 3 else None)


@pytest.mark.parametrize("end", sorted(ENDS))
@pytest.mark.parametrize("method", ["items", "__len__", "__iter__", "__getitem__", "keys"])
def test_metrics_of_a_class_of_the_users(method, end):
    """A mapping's own code, and that of a name, are left alone after some time."""
    reader = NumberReader()
    mapping = type("Odd", (dict,), {method: ENDS[end]})(fine=1.0)
    assert reader.read_metrics(mapping) == ({} if method == "items" else {"fine": 1.0})
    name = type("Odd", (str,), dict.fromkeys(("__len__", "__iter__", "__repr__", "__str__"), ENDS[end]))("name")
    other = type("Odd", (), {"__repr__": ENDS[end], "__class__": property(ENDS[end])})()
    assert reader.read_metrics({name: 1.0, other: 2.0, "fine": 3.0}) == {"name": 1.0, "fine": 3.0}


def test_metrics_without_an_end():
    """As many are recorded as there may be, and each is checked once: a save does not wait for their square."""
    with pytest.MonkeyPatch.context() as patched:
        looked = []
        patched.setattr(manifests, "is_metric_name", lambda name: not looked.append(name))
        endless = type("Odd", (dict,), {"items": lambda self: ((f"m{n}", 1.0) for n in itertools.count())})()
        found = NumberReader().read_metrics(endless)
    assert len(found) == len(looked) == manifests.MOST_METRICS


def test_what_numpy_masks_is_no_number():
    """It would count as 0, or as NaN."""
    reader = NumberReader()
    for value in (numpy.ma.masked, numpy.ma.masked_array([1.0, 2.0], mask=[1, 1])):
        assert reader.read("loss", value) is None


@pytest.mark.parametrize("observed", [False, True])
def test_a_guard_that_is_never_told_anything_says_so_once(tmp_path, caplog, observed):
    """The first save without any observation is when it says so."""
    caplog.set_level(logging.WARNING)
    with guarded(tmp_path / "run", Half()) as guard:
        for _ in guard.steps(batches(9), total=6, save_every=2):
            if observed:
                guard.observe(loss=torch.ones((), device="meta"))
    assert caplog.text.count("call guard.observe(") == (not observed)


def test_a_guard_that_only_saves_says_so_once(tmp_path, caplog):
    """The same in a loop of one's own."""
    with guarded(tmp_path / "run", Half()) as guard:
        for step in range(3):
            guard.save(step)
    assert caplog.text.count("call guard.observe(") == 1


def test_a_ctrl_c_passes(monkeypatch):
    """What is meant for training's own thread is not taken for a bad value."""
    seen = TrainingMonitor(TrainingParts(model=torch.nn.Linear(2, 2)), RollbackPolicy())
    monkeypatch.setattr(read_number, "_number", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        seen.observe(1, 7)


def test_a_bad_value_leaves_the_way_back(tmp_path):
    """A training whose loss cannot be read still goes back when its weights are sick, and resumes."""
    model, taken = Half(), []
    odd = object_whose(NAMES, "blocks")
    with guarded(tmp_path / "run", model) as guard:
        for step, _ in guard.steps(batches(20), total=6, save_every=2):
            taken.append(step)
            if len(taken) == 4:
                with torch.no_grad():
                    model.weight.fill_(math.nan)
            guard.observe(loss=odd, grad_norm=torch.ones((), device="meta"))
    assert len(taken) > 6
    assert torch.isfinite(model.weight).all()
    with guarded(tmp_path / "run", Half()) as guard:
        assert guard.resume() == 6
    assert ckptguard.verify(str(tmp_path / "run")).outcome is Outcome.GOOD
