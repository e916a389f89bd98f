"""What Thunder's exceptions say of the model that is compiled, in words, and what to do about it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

_SHAPES = (
    "Keep shapes fixed: compute all elements and choose with torch.where or a mask, or take that step outside of "
    "forward."
)
_DECIDE = "Compute both ways and choose with torch.where, or take the decision outside of forward."
_OUTSIDE = "Write it with operators that Thunder knows, or take that step outside of forward."
_GRADIENTS = "Take it outside of forward: gradients and what is hooked to them exist after the compiled call only."
_PLAIN = (
    "Run the plain model on the same arguments to see whether the error is its own; if not, write that step otherwise "
    "or take it outside of forward."
)
_OUTPUTS = "Return tensors, numbers, strings, or tuples, lists, dicts and dataclasses of these."

#: Thunder's function that writes down what a trace assigned
_MODIFICATIONS = "process_recorded_modifications"
_CASTS = {"boolean": "bool"}
_OF_GRADIENTS = ("backward", "grad_fn", "requires_grad_", "retains_grad")

#: a pattern of what Thunder says, what the model does, what to do
_REASONS = tuple(
    (re.compile(pattern, re.DOTALL), problem, remedy)
    for pattern, problem, remedy in (
        (
            r"registration for (\w+),.*DynamicOutputShape",
            "The model calls {0}, whose result has a shape that depends on data",
            _SHAPES,
        ),
        (
            r"function torch\._?(unique|masked_select)\w*,",
            "The model calls {0}, whose result has a shape that depends on data",
            _SHAPES,
        ),
        (
            r"torch\.(where)\(\) does not support only|torch\.(repeat_interleave) does not support tensor repeats",
            "The model calls {0} so that the shape of its result depends on data",
            _SHAPES,
        ),
        (
            r"boolean advanced indexing",
            "The model indexes by a mask, whose result has a shape that depends on data",
            _SHAPES,
        ),
        (
            r"casting a TensorProxy to a Python (\w+)",
            "The model makes a Python {0} of a tensor, which is only known when it runs",
            _DECIDE,
        ),
        (
            r"^process_recorded_modifications",
            "The model makes a module with parts or buffers, or changes what it made, while it runs",
            "Make it in __init__, or call the function of torch.nn.functional.",
        ),
        (
            r"gradient transform for bound symbol.*?= (?:\w+\.)*(\w+)\(",
            "The model calls {0} where a gradient flows, of which Thunder knows no derivative",
            _OUTSIDE,
        ),
        (
            r"(\w+)\(\) got an unexpected keyword argument '(\w+)'",
            "The model calls {0} with {1}=, which Thunder does not know",
            _OUTSIDE,
        ),
        (
            r"(?:<function )?(\w+)[^<>]*> has inplace=True",
            "The model calls {0} in place, which Thunder does not know",
            "Pass inplace=False.",
        ),
        (
            r"(\w+)\(\): argument '\w+' \(position \d+\) must be Tensor, not TensorProxy",
            "The model calls {0}, which Thunder cannot compile",
            _OUTSIDE,
        ),
        (
            r"registration for (numpy|tolist|item),|call (numpy|tolist)\b",
            "The model asks for numbers of a tensor by {0}(), which are only known when it runs",
            _DECIDE,
        ),
        (
            r"NoneType|value=None|not <class 'thunder.core.proxies.(?:Integer|Float)Proxy'>",
            "The model uses a number that is only known when it runs where compiled code needs its value",
            _SHAPES,
        ),
        (
            rf"(?:registration for|Unknown attribute) ({'|'.join(_OF_GRADIENTS)})\b",
            "The model uses {0} of a tensor, which compiled code does not have",
            _GRADIENTS,
        ),
        (
            r"Unknown attribute (data)\b",
            "The model uses {0} of a tensor, which compiled code does not have",
            "Use detach(), or change tensors outside of forward.",
        ),
        (
            r"Unknown attribute (\w+)",
            "The model uses {0} of a tensor, which compiled code does not have",
            _OUTSIDE,
        ),
        (r"registration for (\w+),.*?: (.*)", "Thunder cannot trace the model's call of {0}: {1}", _OUTSIDE),
        (r"call function ([\w.]+), but", "The model calls {0}, which Thunder cannot compile", _OUTSIDE),
        (
            r"^(\S+) is not registered\. Register its",
            "The model calls the operator {0}, which Thunder does not know",
            "Register it with thunder.torch.register_custom_op, or take that step outside of forward.",
        ),
        (
            r"Using torch\.compile within",
            "The model calls torch.compile",
            "Leave it out: Thunder compiles the whole model.",
        ),
        (
            r"unhandled value of type <class '(transformers\.[\w.]*Cache)'>",
            "The model returns a {0}, which compiled code cannot make",
            "Pass use_cache=False, and generate with the plain model.",
        ),
        (
            r"unhandled (?:value|collection) of type <class '(.*?)'>",
            "The model returns a {0}, which compiled code cannot make",
            _OUTPUTS,
        ),
        (
            r"unhashable type: 'TensorProxy'",
            "The model puts a tensor into a set or uses it as a key of a dict",
            "Keep tensors in lists or tuples, or under other keys.",
        ),
        (
            r"exceptions must derive from BaseException",
            "The model gives a function one argument twice, or raises what is no exception",
            "Run the plain model, which says which of the two.",
        ),
        (
            r"maximum recursion depth exceeded",
            "The model's calls are nested too deeply for Thunder, which needs several for each",
            "Raise the limit with sys.setrecursionlimit, or nest less.",
        ),
        (
            r"ccured unpacking object",
            "The model reads something from where compiled code cannot fetch it at every call",
            "Pass it to forward as an argument, or keep it in an attribute, a list, tuple or dict of the model.",
        ),
    )
)


def reason(error: BaseException) -> tuple[str, str]:
    """What is wrong, without place and full stop, and what to do."""
    text = " ".join(f"{type(e).__name__} {e}" if i else str(e) for i, e in enumerate(_chain(error)))
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if _MODIFICATIONS in frames:  # where it says nothing, or nothing that a user could read
        text = _MODIFICATIONS
    for pattern, problem, remedy in _REASONS:
        if found := pattern.search(text):
            words = [_CASTS.get(word, word) for word in found.groups() if word]
            return problem.format(*words), remedy
    said = str(error).strip().partition("\n")[0].rstrip(".")
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return f"Thunder cannot compile what the model does: {what}", _PLAIN


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
