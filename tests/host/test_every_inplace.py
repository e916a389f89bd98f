"""V03: every operator in place that PyTorch has. Eager PyTorch's results and gradients, or a refusal with place."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import PipelineError, TracingError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip

ROWS = torch.tensor([0, 2])
INDEX = ROWS.reshape(1, 2)
#: Arguments, as functions of the input, 3 times 3 numbers from 0 to 1; the others take none.
LIKE_ITSELF = """
add sub subtract mul multiply atan2 arctan2 copy heaviside hypot ldexp nextafter xlogy eq ne ge gt le lt less less_equal
greater greater_equal not_equal logical_and logical_or logical_xor igamma igammac resize_as set
"""
ARGUMENTS = {f"{name}_": lambda x: (x,) for name in LIKE_ITSELF.split()} | {
    **{f"{name}_": lambda x: (x + 2,) for name in ("div", "divide", "true_divide", "floor_divide")},
    **{f"{name}_": lambda x: (0.3, 0.6) for name in ("clamp", "clip")},
    **{f"{name}_": lambda x: (0.5,) for name in ("clamp_max", "clamp_min", "fmod", "remainder", "bernoulli")},
    **{f"{name}_": lambda x: (0,) for name in ("cumprod", "cumsum", "unsqueeze")},
    **{f"{name}_": lambda x: (0, 1) for name in ("transpose", "swapaxes", "swapdims")},
    **{f"{name}_": lambda x: (0, ROWS, x[:2]) for name in ("index_add", "index_copy")},
    **{f"{name}_": lambda x: (0, INDEX, x[:1, :2]) for name in ("scatter", "scatter_add")},
    "geometric_": lambda x: (0.5,),
    "scatter_reduce_": lambda x: (0, INDEX, x[:1, :2], "sum"),
    "index_reduce_": lambda x: (0, ROWS, x[:2], "prod"),
    "index_fill_": lambda x: (0, ROWS, 2.0),
    "index_put_": lambda x: ((ROWS,), x[:2]),
    "put_": lambda x: (ROWS, x[0, :2]),
    "masked_fill_": lambda x: (x > 0.5, 2.0),
    "masked_scatter_": lambda x: (x > 0.5, x),
    "addbmm_": lambda x: (x[None], x[None]),
    "addmm_": lambda x: (x, x),
    "addr_": lambda x: (x[0], x[1]),
    "addcdiv_": lambda x: (x, x + 2),
    "addcmul_": lambda x: (x, x),
    "lerp_": lambda x: (x, 0.3),
    "copysign_": lambda x: (x - 0.5,),
    "fill_": lambda x: (2.0,),
    "fill_diagonal_": lambda x: (2.0,),
    "pow_": lambda x: (3,),
    "float_power_": lambda x: (2,),
    "polygamma_": lambda x: (1,),
    "mvlgamma_": lambda x: (1,),
    "renorm_": lambda x: (2, 0, 0.5),
    "resize_": lambda x: ((3, 3),),
    "as_strided_": lambda x: ((3, 3), (1, 3)),
    "apply_": lambda x: (float,),
    "map_": lambda x: (x, min),
    "map2_": lambda x: (x, x, min),
}
INTEGERS = [f"bitwise_{name}_" for name in ("and", "or", "xor", "left_shift", "right_shift")] + ["gcd_", "lcm_"]
ARGUMENTS |= {name: lambda x: ((x * 3).int(),) for name in INTEGERS}
OTHERWISE = {"addmv_": lambda h, x: h[0].addmv_(x, x[0]), "baddbmm_": lambda h, x: h[None].baddbmm_(x[None], x[None])}
#: What no tensor with numbers of its own has.
SPARSE = ("resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_")
#: Drawn as Thunder draws; and what eager PyTorch has no derivative of.
NOT_COMPARED = ("exponential_", "floor_divide_", "igamma_", "igammac_", "nextafter_")
NAMES = [n for n in dir(torch.Tensor) if n.endswith("_") and n[0] != "_" and n not in (*SPARSE, *NOT_COMPARED)]
NO_DERIVATIVE = ("acosh_", "asinh_", "atanh_", "arccosh_", "arcsinh_", "arctanh_")

REFUSED_METHODS = """
apply_ as_strided_ bernoulli_ cauchy_ detach_ fill_ fill_diagonal_ geometric_ heaviside_ index_add_ lerp_ log_normal_
logical_and_ logical_not_ logical_or_ logical_xor_ map2_ map_ normal_ random_ remainder_ requires_grad_ resize_
resize_as_ round_ set_ share_memory_ squeeze_ swapaxes_ swapdims_ t_ transpose_ trunc_ uniform_ unsqueeze_
"""
REFUSED = set(REFUSED_METHODS.split())


def operator(name):
    """The call of one operator on what a layer gave, or on integers that it does not depend on."""
    if name in OTHERWISE:
        return OTHERWISE[name]
    arguments = ARGUMENTS.get(name, lambda x: ())
    if name in INTEGERS or name == "bitwise_not_":
        return lambda h, x: h * getattr((x * 5).int(), name)(*arguments(x))
    return lambda h, x: getattr(h, name)(*arguments(x))


def functional(name):
    function = getattr(F, name)
    arguments = {"threshold": (0.5, 0.2), "threshold_": (0.5, 0.2)}.get(name, ())
    named = {} if name.endswith("_") else {"inplace": True}
    return lambda h, x: function(h, *arguments, **named)


def out_of_place(name):
    arguments = ARGUMENTS.get(name, lambda x: ())
    return lambda h, x: getattr(h, name[:-1])(*arguments(x))


def _is_in_place(name):
    function = getattr(F, name)
    if name.startswith("_") or name == "rrelu_":
        return False
    return name.endswith("_") or (inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters)


IN_F = [name for name in dir(F) if _is_in_place(name)]
REFUSED_F = {f"dropout{n}d" for n in (1, 2, 3)} | {"alpha_dropout", "feature_alpha_dropout"}
REFUSED_F |= {"celu_", "elu_", "leaky_relu_", "selu_"}


class Table(nn.Module):
    """A parameter for each operator, so that each has a gradient of its own; all numbers are between 0 and 1."""

    def __init__(self, functions):
        super().__init__()
        self.functions = functions
        self.held = nn.ParameterList(torch.rand(3, 3).double() * 0.8 + 0.1 for _ in functions)

    def forward(self, x):
        results = []
        for held, function in zip(self.held, self.functions, strict=True):
            result = function(held * 1, x)
            results.append((result, result * result))
        return results


def trained(table, x):
    torch.manual_seed(1)
    results = table(x)
    sum(a.sum() + 2 * b.sum() for a, b in results).backward()
    return results, [p.grad for p in table.parameters()]


def test_eagers_gradients():
    named = {n: operator(n) for n in NAMES if n not in REFUSED} | {n: functional(n) for n in IN_F if n not in REFUSED_F}
    instead = {n: out_of_place(n) for n in NO_DERIVATIVE}
    torch.manual_seed(0)
    x = torch.rand(3, 3).double()
    plain = Table(list(named.values()))
    reference = copy.deepcopy(plain)
    compiled = thunder.jit(plain, transforms=pipeline_of(same=tx.Plugin(None)))
    reference.functions = [instead.get(name, function) for name, function in named.items()]
    (mine, gradients), (theirs, right) = trained(compiled, x), trained(reference, x)
    for index, name in enumerate(named):
        torch.testing.assert_close(mine[index], theirs[index], equal_nan=True, msg=lambda t, n=name: f"{n}: {t}")
        found, expected = gradients[index], right[index]
        torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda t, n=name: f"gradients of {n}: {t}")


@pytest.mark.parametrize("names", [sorted(REFUSED & set(NAMES)), sorted(REFUSED_F)], ids=["methods", "functions"])
def test_refused(names):
    for name in names:
        function = operator(name) if name in REFUSED else functional(name)
        model = thunder.jit(Table([function]), transforms=pipeline_of(same=tx.Plugin(None)))
        with pytest.raises((PipelineError, TracingError)) as caught:
            model(torch.rand(3, 3).double())
        assert caught.value.remedy
        assert name.removesuffix("_") in str(caught.value), name
