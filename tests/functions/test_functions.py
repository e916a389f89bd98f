"""Jitted functions that contain transformed models keep the transforms (U11, U12)."""

import contextlib
import copy

import pytest
import thunder
import torch

import thunder_xform as tx
from thunder_xform.testing import pipeline_of


class Doubled(tx.Plugin):
    """Trains doubled copies of all parameters, so that a model that lost its transforms computes something else."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in params:
            params.replace(name, params.tensor(name).detach() * 2)

    @tx.hookimpl
    def guard_key(self, ctx):
        return ctx.no_sync


def pipeline():
    return pipeline_of(doubled=Doubled(None))


def made(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def doubled(model):
    """The plain model that computes what the transformed one should."""
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2)
    return reference


def batch(seed=1):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def loss_of(model, x):
    return model(x).square().mean()


def same(transformed, reference, call, expected):
    """One call and its gradients, against eager PyTorch; twice, since the second call runs compiled code."""
    for _ in range(2):
        transformed.zero_grad()
        reference.zero_grad()
        ours, theirs = call(), expected()
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        for (name, p), q in zip(transformed.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


GLOBAL = None


def loss_of_global(x):
    return loss_of(GLOBAL, x)


def closing_over(model):
    def closed(x):
        return loss_of(model, x)

    return closed


class Holder:
    def __init__(self, model):
        self.model = model

    def loss(self, x):
        return loss_of(self.model, x)


# -- models that are transformed already -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "called"),
    [
        ("argument", False),
        ("argument", True),
        ("keyword", False),
        ("closure", False),
        ("global", True),
        ("method", False),
        ("in a list", False),
    ],
)
def test_a_transformed_model_keeps_its_transforms(way, called, monkeypatch):
    """U11: the transforms used to vanish without a word, and gradients with them."""
    plain, x = made(), batch()
    model = thunder.jit(plain, transforms=pipeline())
    if called:
        model(x)
    if way == "argument":
        step = thunder.jit(loss_of)
        call = lambda: step(model, x)  # noqa: E731
    elif way == "keyword":
        step = thunder.jit(loss_of)
        call = lambda: step(x=x, model=model)  # noqa: E731
    elif way == "in a list":
        step = thunder.jit(lambda models, x: loss_of(models[0], x))
        call = lambda: step([model], x)  # noqa: E731
    else:
        monkeypatch.setitem(globals(), "GLOBAL", model)
        function = {"closure": closing_over(model), "global": loss_of_global, "method": Holder(model).loss}[way]
        step = thunder.jit(function)
        call = lambda: step(x)  # noqa: E731
    reference = doubled(plain)
    same(model, reference, call, lambda: loss_of(reference, x))
    assert all(p.grad is None for p in plain.parameters())
    if called:  # The model itself still works, and the function after it.
        same(model, reference, lambda: loss_of(model, x), lambda: loss_of(reference, x))
        same(model, reference, call, lambda: loss_of(reference, x))


def test_transformed_model_inside_a_jitted_module():
    plain, x = made(), batch()
    model = thunder.jit(plain, transforms=pipeline())
    outer = thunder.jit(torch.nn.Sequential(model, torch.nn.Tanh()))
    reference = doubled(plain)
    same(model, reference, lambda: outer(x).sum(), lambda: torch.tanh(reference(x)).sum())


def test_jitted_function_inside_a_jitted_function():
    plain, x = made(), batch()
    model = thunder.jit(plain, transforms=pipeline())
    inner = thunder.jit(loss_of)
    outer = thunder.jit(lambda model, x: inner(model, x) * 3)
    reference = doubled(plain)
    same(model, reference, lambda: outer(model, x), lambda: loss_of(reference, x) * 3)


def test_one_function_with_many_models():
    """Each model, transformed or not, gets its own compiled code; none is taken for another."""
    x = batch()
    step = thunder.jit(loss_of)
    plain = [made(seed) for seed in range(3)]
    models = [thunder.jit(plain[0], transforms=pipeline()), plain[1], thunder.jit(plain[2], transforms=pipeline())]
    references = [doubled(plain[0]), plain[1], doubled(plain[2])]
    for _ in range(2):
        for model, reference in zip(models, references, strict=True):
            torch.testing.assert_close(step(model, x), loss_of(reference, x), atol=1e-6, rtol=1e-6)


def test_two_transformed_models_in_one_function():
    x = batch()
    plain = made(0), made(1)
    one, two = (thunder.jit(model, transforms=pipeline()) for model in plain)
    step = thunder.jit(lambda a, b, x: (a(x) - b(x)).square().mean())
    references = doubled(plain[0]), doubled(plain[1])

    def expected():
        return (references[0](x) - references[1](x)).square().mean()

    for model, reference in zip((one, two), references, strict=True):
        same(model, reference, lambda: step(one, two, x), expected)


# -- pipelines for functions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "bound"),
    [("argument", True), ("argument", False), ("closure", True), ("global", False), ("method", True)],
)
def test_a_pipeline_for_a_function(way, bound, monkeypatch):
    """U12: transforms of a function apply to the model in it; without `bind`, to the only one that it uses."""
    plain, x = made(), batch()
    monkeypatch.setitem(globals(), "GLOBAL", plain)
    transforms = pipeline()
    if bound:
        transforms.bind(plain)
    functions = {
        "argument": loss_of,
        "closure": closing_over(plain),
        "global": loss_of_global,
        "method": Holder(plain).loss,
    }
    step = thunder.jit(functions[way], transforms=transforms)
    call = (lambda: step(plain, x)) if way == "argument" else (lambda: step(x))
    call()
    reference = doubled(plain)
    same(transforms.model, reference, call, lambda: loss_of(reference, x))
    assert tx.handle(step).pipeline == tx.handle(transforms).pipeline == ("doubled",)
    assert tx.handle(step).compiled_entries == 1


def test_a_pipeline_each_for_several_models():
    x = batch()
    plain = made(0), made(1)
    pipelines = [pipeline().bind(model) for model in plain]
    step = thunder.jit(lambda a, b, x: (a(x) - b(x)).square().mean(), transforms=pipelines[0] + pipelines[1])
    references = doubled(plain[0]), doubled(plain[1])

    def expected():
        return (references[0](x) - references[1](x)).square().mean()

    for one, reference in zip(pipelines, references, strict=True):
        same(one.model, reference, lambda: step(*plain, x), expected)


def test_a_function_learns_from_its_optimizer():
    plain, x = made(), batch()
    transforms = pipeline().bind(plain)
    step = thunder.jit(loss_of, transforms=transforms)
    optimizer = torch.optim.SGD(transforms.model.parameters(), lr=0.1)
    reference = doubled(plain)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        for target, model, of in ((optimizer, plain, step), (other, reference, loss_of)):
            of(model, x).backward()
            target.step()
            target.zero_grad()
    for p, q in zip(transforms.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)


# -- models that are jitted already ----------------------------------------------------------------------------------


@pytest.mark.parametrize("called", [False, True])
def test_apply_to_a_jitted_model(called):
    plain, x = made(), batch()
    model = thunder.jit(plain)
    if called:
        torch.testing.assert_close(model(x), plain(x))
    assert pipeline().apply(model) is model
    reference = doubled(plain)
    same(model, reference, lambda: loss_of(model, x), lambda: loss_of(reference, x))
    step = thunder.jit(loss_of)
    same(model, reference, lambda: step(model, x), lambda: loss_of(reference, x))


def test_apply_after_the_jitted_model_was_converted():
    """`.to` on a jitted module gives the user's module other buffers than Thunder noted down."""
    plain, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)), batch().double()
    model = thunder.jit(plain)
    model.to(torch.float64)
    pipeline().apply(model)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float64, torch.int64}
    torch.testing.assert_close(model.eval()(x), doubled(plain).eval()(x))


# -- handle and no_sync ----------------------------------------------------------------------------------------------


def test_no_sync_of_the_model_holds_in_functions():
    x = batch()
    model = thunder.jit(made(), transforms=pipeline())
    step = thunder.jit(loss_of)
    handle = tx.handle(model)
    for count, entered in ((1, False), (2, True), (2, False), (2, True)):
        with handle.no_sync() if entered else contextlib.nullcontext():
            step(model, x)
        assert handle.compiled_entries == count
    assert [event.key["doubled"] for event in handle.events] == [False, True]
    assert "guard key of 'doubled': False -> True" in handle.explain()
    assert tx.handle(step).pipeline == ("doubled",)


def test_invalidate_reaches_functions():
    x = batch()
    model = thunder.jit(made(), transforms=pipeline())
    step = thunder.jit(loss_of)
    handle = tx.handle(model)
    model(x)
    step(model, x)
    assert handle.compiled_entries == 2
    assert handle.invalidate("test") == 2
    step(model, x)
    assert handle.events[-1].reasons == ("invalidated: test",)


def test_training_mode_holds_in_functions():
    """U16 in a function: the mode is part of the guard."""
    plain = torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Dropout(0.5))
    model = thunder.jit(plain, transforms=pipeline())
    step = thunder.jit(lambda model, x: model(x))
    x = batch()
    assert (step(model, x) == 0).any()
    model.eval()
    torch.testing.assert_close(step(model, x), doubled(plain)(x))
    model.train()
    assert (step(model, x) == 0).any()
    assert tx.handle(model).compiled_entries == 2


# -- what is refused -------------------------------------------------------------------------------------------------


def refuses(match, call):
    with pytest.raises(tx.errors.PipelineError, match=match):
        call()


def test_a_function_without_the_model():
    transforms = pipeline().bind(made(0))
    step = thunder.jit(loss_of, transforms=transforms)
    refuses("does not use the Sequential that doubled transforms", lambda: step(made(1), batch()))


def test_a_function_with_two_models_and_one_pipeline():
    step = thunder.jit(lambda a, b, x: a(x) + b(x), transforms=pipeline())
    refuses(r"uses 2 modules.*pipeline.bind\(model\)", lambda: step(made(0), made(1), batch()))


def test_a_part_of_the_model():
    """Reached through the model it is transformed with it; on its own it cannot be told from a plain module."""
    plain, x = made(), batch()
    transforms = pipeline().bind(plain)
    step = thunder.jit(lambda x: plain[0](x), transforms=transforms)
    torch.testing.assert_close(step(x), doubled(plain)[0](x))
    alone = thunder.jit(lambda part, whole, x: part(x) + whole(x).sum(), transforms=transforms)
    refuses("uses Linear, a part of the transformed Sequential", lambda: alone(plain[0], plain, x))


def test_a_pipeline_serves_one_model():
    transforms = pipeline().bind(made(0))
    refuses("transforms a model already", lambda: transforms.bind(made(1)))
    refuses("transforms a model already", lambda: transforms.apply(thunder.jit(made(1))))
    refuses("is transformed by doubled already", lambda: pipeline().apply(transforms.model))


def test_apply_to_something_else():
    refuses("is not a model compiled by thunder.jit", lambda: pipeline().apply(made()))
    refuses("is not a model compiled by thunder.jit", lambda: pipeline().apply(thunder.jit(loss_of)))
    refuses("transforms= given as a tuple", lambda: pipeline().apply(thunder.jit(made(), transforms=())))


def test_handle_of_a_function():
    refuses("is not transformed by a pipeline", lambda: tx.handle(thunder.jit(loss_of)))
    pipelines = pipeline().bind(made(0)), pipeline().bind(made(1))
    step = thunder.jit(lambda a, b, x: a(x) + b(x), transforms=pipelines[0] + pipelines[1])
    refuses("contains 2 transformed models", lambda: tx.handle(step))
    refuses("is not transformed by a pipeline", lambda: tx.handle(pipeline()))
