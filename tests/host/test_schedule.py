"""Reordering keeps what a trace computes, and puts starts and waits where it says."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thunder_xform as tx
from thunder_xform.errors import PipelineError

import thunder  # isort: skip  # noqa: F401
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

start = tx.operator("test_schedule_start", meta=lambda x: tx.tensor_like(x), fn=lambda x: x * 2, side_effects=True)
wait = tx.operator(
    "test_schedule_wait", meta=lambda buffer, x: (tx.tensor_like(x),), fn=lambda buffer, x: (buffer + x,)
)
mix = tx.operator("test_schedule_mix", meta=lambda a, b: tx.tensor_like(a), fn=lambda a, b: a - 3 * b)

INPUTS = 3


def signature(x0, x1, x2):
    """Gives the traces their name and arguments."""


def program(steps, outputs=2):
    """A trace with the given steps: ``(mix, i, j)``, ``(start, i)``, or ``(wait, k, i)`` for the k-th start so far.

    Numbers choose among the tensors there are, inputs and results of mix and wait. Waits that are left come last.
    """
    trace = TraceCtx(signature)
    with tracectx(trace):
        tensors = [
            TensorProxy(f"x{i}", shape=(2,), device=devices.cpu, dtype=dtypes.float32, requires_grad=False)
            for i in range(INPUTS)
        ]
        trace.args = tuple(tensors)
        for x in tensors:
            trace.bound_symbols.append(prims.unpack_trivial.bind(x, output=x, name=x.name))
        flying = []

        def pick(number):
            return tensors[number % len(tensors)]

        for kind, *numbers in steps:
            if kind is start:
                flying.append(start(pick(numbers[0])))
            elif kind is mix:
                tensors.append(mix(pick(numbers[0]), pick(numbers[1])))
            elif flying:
                buffer = flying.pop(numbers[0] % len(flying))
                tensors.append(wait(buffer, pick(numbers[1]))[0])
        for buffer in flying:
            tensors.append(wait(buffer, pick(0))[0])
        prims.python_return(tuple(tensors[-outputs:]))
    return tx.Schedule(trace)


def run(schedule):
    inputs = [torch.tensor([1.0, 10.0]) + i for i in range(INPUTS)]
    return schedule._trace.python_callable()(*inputs)


def positions(schedule, operator):
    """Positions of the calls of an operator among all of them, by the buffer that they make or take."""
    found = {}
    for position, bsym in enumerate(body(schedule)):
        if bsym.sym.name == operator.name:
            buffer = bsym.output if operator is start else bsym.args[0]
            found[buffer.name] = position
    return found


def body(schedule):
    own = (start.name, wait.name, mix.name, "python_return")
    return [b for b in schedule._trace.bound_symbols if b.sym.name in own]


def most_in_flight(schedule):
    flying, most = 0, 0
    for bsym in body(schedule):
        flying += (bsym.sym.name == start.name) - (bsym.sym.name == wait.name)
        most = max(most, flying)
    return most


def same(schedule, original):
    """The same calls on the same tensors, in an order that gives the same values."""

    def calls(s):
        return Counter((b.sym.name, str(b.args), str(b.output)) for b in body(s))

    assert calls(schedule) == calls(original)
    produced = {f"x{i}" for i in range(INPUTS)}
    for bsym in body(schedule):
        assert {a.name for a in bsym.flat_proxy_args} <= produced
        produced |= {o.name for o in bsym.flat_proxy_outs}
    for ours, theirs in zip(run(schedule), run(original), strict=True):
        assert torch.equal(ours, theirs)


NUMBER = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just(start), NUMBER),
        st.tuples(st.just(wait), NUMBER, NUMBER),
        st.tuples(st.just(mix), NUMBER, NUMBER),
    ),
    max_size=14,
)
INPUT = st.integers(0, INPUTS - 1)
#: Starts and waits read inputs only, besides the buffer, as those of gathers and scatters do.
FREE = st.lists(
    st.one_of(
        st.tuples(st.just(start), INPUT),
        st.tuples(st.just(wait), NUMBER, INPUT),
        st.tuples(st.just(mix), NUMBER, NUMBER),
    ),
    max_size=14,
)


@given(STEPS, st.integers(0, 4))
def test_prefetching_keeps_the_values(steps, ahead):
    original = program(steps)
    same(original.prefetch(start, wait, ahead=ahead), original)


@given(STEPS, st.none() | st.integers(1, 4))
def test_delaying_keeps_the_values(steps, limit):
    original = program(steps)
    same(original.delay(start, wait, in_flight=limit), original)


@given(STEPS, st.integers(0, 4), st.none() | st.integers(1, 4))
def test_both_keep_the_values(steps, ahead, limit):
    original = program(steps)
    same(original.prefetch(start, wait, ahead=ahead).delay(start, wait, in_flight=limit), original)


@given(FREE, st.integers(1, 4))
def test_starts_follow_the_wait_so_many_before_their_own(steps, ahead):
    schedule = program(steps).prefetch(start, wait, ahead=ahead)
    starts, waits = positions(schedule, start), positions(schedule, wait)
    order = sorted(waits, key=waits.__getitem__)
    for number, buffer in enumerate(order):
        if number < ahead:
            assert starts[buffer] == number
        else:
            assert starts[buffer] == waits[order[number - ahead]] + 1
    assert most_in_flight(schedule) <= ahead


@given(FREE)
def test_without_prefetch_starts_come_right_before_their_wait(steps):
    schedule = program(steps).prefetch(start, wait, ahead=0)
    starts, waits = positions(schedule, start), positions(schedule, wait)
    assert all(starts[buffer] == position - 1 for buffer, position in waits.items())


@given(STEPS)
def test_waits_come_right_before_the_first_use(steps):
    schedule = program(steps).delay(start, wait)
    calls = body(schedule)
    for position, bsym in enumerate(calls):
        if bsym.sym.name == wait.name:
            following = next(b for b in calls[position:] if b.sym.name != wait.name)
            made = {o.name for b in calls[position:] for o in b.flat_proxy_outs if b.sym.name == wait.name}
            last = following.sym.name == "python_return"
            assert last or any(a.name in made for a in following.flat_proxy_args)


@given(FREE, st.integers(1, 4))
def test_starts_in_flight_are_limited(steps, limit):
    assert most_in_flight(program(steps).delay(start, wait, in_flight=limit)) <= limit


def test_a_limit_gives_way_to_what_waits_read():
    """The first wait reads what is made from the second's result."""
    steps = [(start, 0), (start, 1), (wait, 1, 0), (mix, 3, 0), (wait, 0, 4)]
    original = program(steps)
    schedule = original.delay(start, wait, in_flight=1)
    same(schedule, original)
    assert most_in_flight(schedule) == 2


def test_deletions_follow_the_last_use():
    schedule = program([(start, 0), (mix, 1, 2), (mix, 3, 3), (wait, 0, 0)], 1).prefetch(start, wait, ahead=1)
    found = []
    for bsym in schedule._trace.bound_symbols:
        deleted = bsym.sym.id == prims.PrimIDs.DEL
        found.append({a.name for a in bsym.flat_proxy_args} if deleted else bsym.sym.name)
    assert found[INPUTS:-1] == [start.name, mix.name, {"x1", "x2"}, mix.name, {"t1", "t2"}, wait.name, {"x0", "t0"}]


def test_views_tell_names_and_counts():
    schedule = program([(start, 0), (mix, 0, 1), (wait, 0, 0), (start, 1)])
    assert [n for n in schedule.names() if n.startswith("test_schedule")] == [
        *(start.name, mix.name, wait.name, start.name, wait.name)
    ]
    assert (schedule.count(start), schedule.count(wait), schedule.count(mix)) == (2, 2, 1)
    assert schedule.phase == "forward"


def test_an_order_that_reads_before_it_produces_is_refused():
    from thunder_xform.host.schedule import _check_order

    schedule = program([(start, 0), (wait, 0, 0)])
    with pytest.raises(PipelineError, match="would run before"):
        _check_order(list(reversed(schedule._trace.bound_symbols)))
