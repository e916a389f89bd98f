"""The private behaviour of Thunder that ``thunder_xform/host`` stands on, one test each.

Nothing of ours is under test here. Where one fails after an upgrade of Thunder, its message names the module
of ``thunder_xform/host`` that has to follow.
"""

import importlib

import pytest
import torch
from torch import nn

import thunder_xform as tx

import thunder  # isort: skip
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.module import ThunderModule
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, TraceTag, from_trace, tracectx
from thunder.core.transform_common import Transform
from thunder.core.transforms import register_grad
from thunder.executors.passes import del_last_used
from thunder.extend import OperatorExecutor

executor = OperatorExecutor("thunder_contract", version="1")
pair = executor.register_operator(
    "contract_pair",
    meta=lambda a, b: (TensorProxy(like=a), TensorProxy(like=b)),
    fn=lambda a, b: (a.clone(), b.clone()),
)
tagged = executor.register_operator(
    "contract_tagged",
    meta=lambda a: TensorProxy(like=a),
    fn=lambda a: a.clone(),
    tags=[prims.OpTags.DONT_DCE],
)


def _pair_gradient(a, b):
    result = pair(a, b)
    for argument, output in zip((a, b), result, strict=True):
        prims.put_grad(argument, ltorch.mul(prims.get_grad(output), 3.0))
    return result


register_grad(pair, _pair_gradient)


def relied_on(holds, module, what):
    __tracebackhide__ = True
    if not holds:
        pytest.fail(f"Thunder {thunder.__version__} is not what thunder_xform/host/{module} relies on: {what}")


class Probe(Transform):
    """Records the calls that Thunder makes and the traces it hands over, which a test may edit."""

    def __init__(self, log=None, name="", edit=None):
        self.log = [] if log is None else log
        self.name = name
        self.edit = edit
        self.finished = []

    def transform_module(self, model):
        self.log.append((self.name, "module"))
        self.module = model

    def transform_traces_pre_prologue(self, prologue, computation, epilogue, **kwargs):
        self.log.append((self.name, "traces"))
        if self.edit is not None:
            prologue, computation = self.edit(prologue, computation)
        self.prologue, self.computation, self.epilogue = prologue, computation, epilogue
        return prologue, computation, epilogue

    def transform_trace_post_optimization(self, trace, **kwargs):
        self.log.append((self.name, "optimized"))
        self.finished.append(trace)
        return trace


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) + self.shift, self.first.bias


@pytest.fixture(scope="module")
def probed():
    """One compiled model with two transforms, called once: ``(compiled, first probe, second probe, log)``."""
    log = []
    first, second = Probe(log, "first"), Probe(log, "second")
    compiled = thunder.jit(Model(), transforms=[first, second])
    compiled(torch.randn(2, 3))
    return compiled, first, second, log


def ids(trace):
    return [bsym.sym.id for bsym in trace.bound_symbols]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("thunder", "compile_stats compile_data last_traces last_backward_traces last_prologue_traces"),
        ("thunder.core.codeutils", "SigInfo"),
        ("thunder.core.devices", "to_device"),
        ("thunder.core.dtypes", "to_dtype to_torch_dtype"),
        (
            "thunder.core.prims",
            "unpack_trivial unpack_parameter unpack_buffer unpack_thunder_module get_grad put_grad",
        ),
        ("thunder.core.prims", "check_tensor_shape_and_metadata PrimIDs OpTags"),
        ("thunder.core.proxies", "Proxy ProxyTag TensorProxy variableify"),
        ("thunder.clang", "maybe_convert_to_dtype"),
        ("thunder.core.compile_data", "get_compile_data"),
        ("thunder.core.pytree", "tree_flatten tree_map"),
        ("thunder.torch", "_inplace_to_out_of_place _syms_returning_views"),
        ("thunder.transforms.autocast", "disable_autocast"),
        ("thunder.core.symbol", "BoundSymbol Symbol"),
        ("thunder.core.trace", "TraceCtx TraceProvenance TraceTag from_trace tracectx"),
        ("thunder.core.transform_common", "Transform"),
        ("thunder.core.transforms", "register_grad"),
        ("thunder.core.utils", "sequencify"),
        ("thunder.executors.passes", "del_last_used"),
        ("thunder.executors.pythonex", "clear_mutable_collection"),
        ("thunder.extend", "OperatorExecutor"),
    ],
)
def test_names_imported_by_host(module, names):
    assert tx.ops is ltorch
    missing = [name for name in names.split() if not hasattr(importlib.import_module(module), name)]
    relied_on(not missing, "*.py", f"{module} lacks {missing}")


def test_transforms_are_called_in_order_at_jit_and_at_each_compilation(probed):
    _, _, _, log = probed
    expected = [(name, hook) for hook in ("module", "traces") for name in ("first", "second")]
    relied_on(
        log[:4] == expected,
        "../pipeline/stage.py",
        f"transforms run module by module, traces by traces: {log}",
    )
    relied_on(
        log[4:] == [("first", "optimized"), ("first", "optimized"), ("second", "optimized"), ("second", "optimized")],
        "../pipeline/stage.py",
        f"each transform sees the forward and then the backward after optimization: {log[4:]}",
    )


def test_a_prologue_unpacks_its_arguments_first_and_the_module_before_its_tensors(probed):
    prologue = probed[1].prologue
    relied_on(
        prologue.bound_symbols[0].sym.id == prims.PrimIDs.UNPACK_TRIVIAL
        and prologue.bound_symbols[0].output.name == "args",
        "guards.py",
        "the first line of a prologue unpacks `args`",
    )
    order = [b.sym for b in prologue.bound_symbols]
    relied_on(
        order.index(prims.unpack_thunder_module) < order.index(prims.unpack_parameter),
        "inputs.py",
        "unpack_thunder_module comes before unpack_parameter",
    )


def test_a_prologue_unpacks_each_name_of_a_parameter_and_checks_it_after(probed):
    prologue = probed[1].prologue
    unpacked = {b.args[1]: b.output for b in prologue.bound_symbols if b.sym is prims.unpack_parameter}
    relied_on(
        set(unpacked) == {"first.weight", "first.bias", "second.weight"},
        "inputs.py",
        f"unpack_parameter(module, dotted name) once a name, tied ones too: {sorted(unpacked)}",
    )
    relied_on(
        [b.args[1] for b in prologue.bound_symbols if b.sym is prims.unpack_buffer] == ["shift"],
        "inputs.py",
        "unpack_buffer(module, dotted name)",
    )
    checks = {
        b.args[0].name: (index, b.args[1:])
        for index, b in enumerate(prologue.bound_symbols)
        if b.sym is prims.check_tensor_shape_and_metadata
    }
    for name, proxy in unpacked.items():
        position = next(i for i, b in enumerate(prologue.bound_symbols) if b.output is proxy)
        relied_on(
            checks[proxy.name][0] > position,
            "inputs.py",
            f"check_tensor_shape_and_metadata of {name} follows its unpacking",
        )
    relied_on(
        checks[unpacked["first.weight"].name][1] == ((3, 3), "cpu", torch.float32, True),
        "inputs.py",
        f"arguments of the check: shape, device string, torch dtype, requires_grad: {checks}",
    )


def test_a_prologue_returns_what_computation_and_epilogue_take(probed):
    _, probe, _, _ = probed
    last = probe.prologue.bound_symbols[-1]
    relied_on(last.sym.id == prims.PrimIDs.RETURN, "inputs.py", "a prologue ends with its return")
    to_computation, to_epilogue = last.args[0]
    relied_on(
        [p.name for p in to_computation] == [a.name for a in probe.computation.args],
        "inputs.py",
        "the first part of what a prologue returns are the computation's arguments, in order",
    )
    relied_on(isinstance(to_epilogue, tuple), "inputs.py", "the second part goes to the epilogue")


def test_a_computation_unpacks_all_arguments_and_returns_them_as_flat_args(probed):
    computation = probed[1].computation
    arguments = [a.name for a in computation.args]
    unpacked = [b.output.name for b in computation.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    relied_on(unpacked == arguments, "inputs.py", "a computation starts by unpacking its arguments")
    last = computation.bound_symbols[-1]
    relied_on(
        set(last.args[0]) == {"output", "flat_args"} and [a.name for a in last.args[0]["flat_args"]] == arguments,
        "inputs.py",
        "a computation returns {'output', 'flat_args'} before differentiation",
    )
    relied_on(
        [name for name, _ in computation.siginfo().args] == arguments,
        "inputs.py",
        "the signature of a trace lists its arguments as (name, default)",
    )


def test_the_backward_is_tagged_and_the_forward_is_not(probed):
    forward, backward = probed[1].finished
    relied_on(
        TraceTag.BACKWARD in backward.tags and TraceTag.BACKWARD not in forward.tags,
        "schedule.py",
        "the backward trace carries TraceTag.BACKWARD",
    )


def test_finished_traces_delete_what_is_last_used(probed):
    forward = probed[1].finished[0]
    body = [b for b in forward.bound_symbols if b.sym.id != prims.PrimIDs.DEL]
    relied_on(len(body) < len(forward.bound_symbols), "schedule.py", "deletions are operators of id DEL")
    bare = from_trace(forward)
    bare.bound_symbols = body
    relied_on(
        ids(del_last_used(bare)) == ids(forward),
        "schedule.py",
        "del_last_used restores the deletions of a bare trace",
    )


def test_a_copied_trace_shares_its_names_and_nothing_else():
    trace = TraceCtx(lambda x: x)
    copied = from_trace(trace)
    relied_on(copied.names is trace.names, "inputs.py", "from_trace shares the set of names with its source")
    relied_on(copied.bound_symbols == [], "computation.py", "from_trace starts with no operators")
    with tracectx(copied):
        copied.push_scope([])
        proxy = TensorProxy(shape=(1,), device=thunder.devices.cpu, dtype=thunder.dtypes.float32)
        ltorch.add(proxy, 1)
        inserted = copied.pop_scope()
    relied_on(
        [b.sym.name for b in inserted] == ["add"] and copied.bound_symbols == [],
        "computation.py",
        "push_scope and pop_scope collect the operators called in between",
    )
    relied_on(copied.has_name(proxy.name), "inputs.py", "a proxy registers its name with the current trace")


def insert(name_of_weight, make):
    """An edit that redirects uses of one weight to ``make(weight)``."""

    def edit(prologue, computation):
        new = from_trace(computation)
        weight = next(a for a in computation.args if a.name == name_of_weight)
        with tracectx(new):
            new.push_scope([])
            result = make(weight)
            inserted = new.pop_scope()
        swaps = {thunder.core.proxies.variableify(weight): result}
        unpack = [b for b in computation.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
        body = [b for b in computation.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
        swapped = [b.from_bsym_swap_proxies(swaps, skip_output=True) for b in body[:-1]]
        new.bound_symbols = [*unpack, *inserted, *swapped, body[-1]]
        return prologue, new

    return edit


@pytest.mark.parametrize("recompute", [False, True])
def test_operators_of_a_foreign_executor_run_with_gradients_and_are_recomputed_once(recompute):
    def make(weight):
        first, second = pair(weight, weight)
        total = ltorch.add(first, second)
        if recompute:
            for output in (first, second, total):
                output.tags.add(ProxyTag.RECOMPUTE_IN_BACKWARD)
        return total

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    probe = Probe(edit=insert("t_2_weight", make))
    compiled = thunder.jit(model, transforms=[probe])
    x = torch.randn(2, 3)
    y = compiled(x)
    weight = model[2].weight
    reference = torch.tanh(x @ model[0].weight.T) @ (2 * weight).T
    torch.testing.assert_close(y, reference)
    (gradient,) = torch.autograd.grad(reference.sum(), [weight])
    y.sum().backward()
    relied_on(
        torch.allclose(weight.grad, 3 * gradient),
        "operators.py",
        "the rule given to register_grad is used for an operator of an executor that no compilation lists",
    )
    forward, backward = probe.finished
    relied_on(
        [b.sym.name for b in forward.bound_symbols].count("contract_pair") == 1,
        "operators.py",
        "an operator with an executor of its own is left alone by transform_for_execution",
    )
    again = [b.sym.name for b in backward.bound_symbols].count("contract_pair")
    relied_on(
        again == int(recompute),
        "computation.py",
        f"RECOMPUTE_IN_BACKWARD repeats an operator of several outputs once in the backward: {again} times",
    )


def test_unused_operators_are_removed_unless_tagged():
    def make(weight):
        pair(weight, weight)
        tagged(weight)
        return ltorch.mul(weight, 1.0)

    probe = Probe(edit=insert("t_weight", make))
    thunder.jit(nn.Linear(3, 3).requires_grad_(False), transforms=[probe])(torch.randn(1, 3))
    names = [b.sym.name for b in probe.finished[0].bound_symbols]
    relied_on("contract_pair" not in names, "operators.py", "an operator without uses is removed")
    relied_on("contract_tagged" in names, "operators.py", "OpTags.DONT_DCE keeps one")


def test_an_operator_that_binds_its_function_runs_in_the_prologue():
    calls = []
    symbol = Symbol(
        name="contract_check",
        id="contract_check",
        meta=lambda args: None,
        is_prim=True,
        tags=[prims.OpTags.DONT_DCE],
        executor=executor,
        _bind_postprocess=lambda bsym: setattr(bsym, "_call_ctx", {"contract_check": calls.append}),
    )

    def edit(prologue, computation):
        new = from_trace(prologue)
        with tracectx(new):
            check = symbol.bind(prologue.bound_symbols[0].output, output=None)
        new.bound_symbols = [prologue.bound_symbols[0], check, *prologue.bound_symbols[1:]]
        return new, computation

    compiled = thunder.jit(nn.Linear(3, 3), transforms=[Probe(edit=edit)])
    x = torch.randn(1, 3)
    compiled(x)
    compiled(x)
    relied_on(calls == [(x,), (x,)], "guards.py", f"a symbol's _call_ctx resolves its name in the prologue: {calls}")


def test_entries_are_tried_newest_first_and_any_exception_means_the_next_one():
    compiled = thunder.jit(nn.Linear(3, 3))
    compiled(torch.randn(1, 3))
    compiled(torch.randn(2, 3))
    stats = thunder.compile_stats(compiled)
    entries = stats.interpreter_cache
    relied_on(isinstance(entries, list) and len(entries) == 2, "module.py", "interpreter_cache lists the entries")
    tried = []

    def spy(index, prologue):
        def run(*args, **kwargs):
            tried.append(index)
            return prologue(*args, **kwargs)

        return run

    for index, entry in enumerate(entries):
        entries[index] = entry._replace(prologue_fn=spy(index, entry.prologue_fn))
    compiled(torch.randn(1, 3))
    relied_on(tried == [1, 0], "guards.py", f"entries are tried newest first: {tried}")
    relied_on(stats.cache_misses == 2, "guards.py", "a prologue that raises is skipped")
    entries.clear()
    compiled(torch.randn(1, 3))
    relied_on(stats.cache_misses == 3 and len(entries) == 1, "module.py", "clearing the list forgets the entries")


def test_overrides_are_what_a_compiled_model_reads_and_shows():
    model = nn.Linear(3, 3, bias=False)
    compiled = thunder.jit(model)
    relied_on(
        isinstance(compiled, ThunderModule)
        and compiled._model is model
        and compiled._overrides_parameters == {"weight": model.weight}
        and compiled._overrides_buffers == {},
        "ledger.py",
        "_overrides_parameters and _overrides_buffers hold the model's own tensors by name",
    )
    other = nn.Parameter(torch.ones(3, 3))
    compiled._overrides_parameters["weight"] = other
    y = compiled(torch.ones(1, 3))
    y.sum().backward()
    relied_on(y.tolist() == [[3.0, 3.0, 3.0]] and other.grad is not None, "ledger.py", "an override is read")
    relied_on(
        model.weight.grad is None and dict(compiled.named_parameters()) == {"weight": other},
        "ledger.py",
        "an override takes the place of the parameter",
    )


def test_tensors_on_meta_are_traced_for_the_device_that_they_name():
    model = nn.Linear(3, 3, bias=False)
    weight = model.weight
    released = nn.Parameter(weight.detach().to("meta"))
    released._thunder_device = weight.device
    model.weight = released
    compiled = thunder.jit(model)
    compiled._overrides_parameters["weight"] = weight
    x = torch.randn(1, 3)
    try:
        same = torch.allclose(compiled(x), x @ weight.T)
    except Exception:
        same = False
    relied_on(same, "ledger.py", "the tracer takes the device of a meta tensor from its _thunder_device")


def test_a_gradient_may_be_none_although_the_input_requires_one():
    drop = executor.register_operator("contract_drop", meta=lambda a: TensorProxy(like=a), fn=lambda a: a.clone())

    def no_gradient(a):
        result = drop(a)
        prims.get_grad(result)
        return result

    register_grad(drop, no_gradient)
    model = nn.Linear(3, 3)
    compiled = thunder.jit(model, transforms=[Probe(edit=insert("t_weight", drop))])
    compiled(torch.randn(2, 3)).sum().backward()
    relied_on(
        model.weight.grad is None and model.bias.grad is not None,
        "operators.py",
        "an operator without a gradient for an input leaves that parameter's grad None",
    )


def test_thunder_never_calls_a_transform_for_a_traced_inner_call():
    # Why `thunder.jit(loss)(jitted_model)` silently drops the model's transforms (U11).
    probe = Probe()
    compiled = thunder.jit(nn.Linear(3, 3), transforms=[probe])
    thunder.jit(lambda x: compiled(x).sum())(torch.randn(1, 3))
    relied_on(not probe.finished, "module.py", "inner transforms are ignored; a workaround may be dropped now")


def test_writes_in_place_end_with_a_copy_and_have_a_counterpart_out_of_place():
    class InPlace(nn.Module):
        def forward(self, x):
            h = x + 1
            h[0].mul_(2)
            torch.nn.functional.silu(h, inplace=True)
            h[1] = 0
            return h

    probe = Probe()
    thunder.jit(InPlace(), transforms=[probe])(torch.randn(2, 3))
    bsyms = {b.sym.name: b for b in probe.computation.bound_symbols}
    copies = {name: bsyms[name].subsymbols[-1] for name in ("mul_", "silu", "setitem_")}
    relied_on(
        all(copy.sym.id is prims.PrimIDs.COPY_ and len(copy.args) >= 2 for copy in copies.values()),
        "inplace.py",
        "the last that an operator in place does is a copy of its result into what it changes",
    )
    relied_on(
        all(bsyms[name].args[0].name == copy.args[1].name for name, copy in copies.items()),
        "inplace.py",
        "what it changes comes first",
    )
    relied_on(
        ltorch._inplace_to_out_of_place[bsyms["silu"].sym] == (bsyms["silu"].sym, 1)
        and ltorch._inplace_to_out_of_place[bsyms["mul_"].sym][1] == -1,
        "inplace.py",
        "the position of the flag inplace",
    )
    renamed = [b for b in probe.computation.bound_symbols if b.sym.id is prims.PrimIDs.UPDATE_ALIASES]
    relied_on(
        renamed and all(len(b.args[0]) == len(b.output) for b in renamed),
        "inplace.py",
        "tensors that share memory are renamed by update_aliases",
    )


def test_a_compiled_call_is_a_node_whose_backward_can_be_put_in_another():
    """The epilogue takes results last; the node of a call leads to the compiled backward; what is absent is None."""
    probe = Probe()
    model = thunder.jit(nn.Linear(2, 2), transforms=[probe])
    outputs = model(torch.ones(1, 2, requires_grad=True))
    node = outputs.grad_fn
    names = type(node).__name__, type(node.next_functions[0][0]).__name__
    relied_on(names == ("ThunderOutputFunctionBackward", "ThunderFunctionBackward"), "derivatives.py", f"nodes {names}")
    returned = probe.computation.bound_symbols[-1].args[0]["output"]
    count = len([r for r in returned if isinstance(r, TensorProxy)])
    relied_on(len(probe.epilogue.args) >= count == 1, "derivatives.py", "the epilogue takes what is returned last")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    first, _ = thunder.jit(Two())(torch.ones(1, 2))
    node, given = first.grad_fn, []
    node.set_materialize_grads(False)
    inner = node.next_functions[0][0]
    compiled = inner.compiled_backward

    def backward(saved, gradients):
        given.extend(gradients)
        gradients[1] = torch.zeros_like(gradients[0])
        return compiled(saved, gradients)

    inner.compiled_backward = backward
    first.sum().backward()
    relied_on([g is None for g in given] == [False, True], "owed.py", "absent gradients of outputs arrive as None")


def test_each_call_that_is_interpreted_is_looked_up_first():
    """outside.py learns from it which functions a trace called."""
    from thunder.core.interpreter import get_interpretercompilectx, make_opaque

    seen = []

    @make_opaque
    def watch():
        compiling = get_interpretercompilectx()
        lookaside = compiling._fn_lookaside

        def called(fn, /, *args, **kwargs):
            seen.append(fn)
            return lookaside(fn, *args, **kwargs)

        compiling._fn_lookaside = called

    def inner(x, by=2):
        return x * by

    def outer(x):
        watch()
        return inner(x)

    thunder.jit(outer)(torch.ones(2))
    assert inner in seen, "host/outside.py: functions are no longer looked up through _fn_lookaside"
