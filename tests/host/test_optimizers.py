"""U13: an optimizer built from the plain model is refused at the first gradient, and nothing else is."""

import copy
import gc

import pytest
import torch

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.errors import PipelineError
from thunder_xform.testing import pipeline_of


class Copied(tx.Plugin):
    """Trains copies, as plugins that distribute parameters do; the option tells whether to free the originals."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in params:
            params.replace(name, params.tensor(name).clone())
        if self.options:
            params.release_originals()


class FreezeFirst(tx.Plugin):
    """Leaves parameters where they are, but freezes those of the first layer."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        for name in list(params):
            params.set_requires_grad(name, not name.startswith("0."))


def plain():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def jit(module, plugin=None):
    return thunder.jit(module, transforms=pipeline_of(plugin=Copied(None) if plugin is None else plugin))


def step(model):
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize("release", [False, True])
def test_refused_until_it_is_gone(release):
    module = plain()
    optimizer = torch.optim.AdamW(module.parameters())
    model = jit(module, Copied(release))
    for _ in range(2):
        with pytest.raises(
            PipelineError, match=r"AdamW holds parameters of the plain model \('0.weight', .* 1 more\)"
        ) as e:
            step(model)
    assert e.value.optimizer == "AdamW"
    assert e.value.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    del optimizer, e
    step(model)
    torch.optim.AdamW(module.parameters())
    step(model)


def test_garbage_holds_nothing():
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.scheduler = scheduler  # a cycle
    model = jit(module)
    enabled = gc.isenabled()
    gc.disable()
    try:
        del optimizer, scheduler
        step(model)
    finally:
        if enabled:
            gc.enable()


def test_the_compiled_model_has_an_optimizer():
    """The plain model is trained as well, on purpose."""
    module = plain()
    both = [torch.optim.SGD(module.parameters(), lr=0.1)]
    model = jit(module)
    both.append(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [[p.detach().clone() for p in m.parameters()] for m in (module, model)]
    step(module)
    step(model)
    for optimizer in both:
        optimizer.step()
    for m, old in zip((module, model), before, strict=True):
        assert not any(torch.equal(p, q) for p, q in zip(m.parameters(), old, strict=True))


@pytest.mark.parametrize("release", [False, True])
def test_one_that_is_built_after_the_first_backward(release):
    module = plain()
    model = jit(module, Copied(release))
    for _ in range(2):
        step(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        with pytest.raises(PipelineError, match=r"SGD holds parameters of the plain model \('0.weight', .* 1 more\)"):
            step(model)
    del optimizer
    step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = list(module.parameters())  # Others may refer to them.
    step(model)
    assert len(held) == len(optimizer.param_groups[0]["params"])


def test_only_the_plain_model_trains():
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = jit(module)
    step(module)
    optimizer.step()
    with pytest.raises(tx.errors.PipelineError, match=r"The plain model's '0.weight' was given other values"):
        model(torch.randn(2, 4))


@pytest.mark.parametrize("optimizers", [0, 1])
def test_optimizers_of_others(optimizers):
    held = [torch.optim.SGD(plain().parameters(), lr=0.1) for _ in range(optimizers)]
    step(jit(plain()))
    assert len(held) == optimizers


def test_part_of_the_parameters():
    """One that holds some of the trained parameters is one for the compiled model."""
    module = plain()
    model = jit(module)
    optimizer = torch.optim.SGD([*module[0].parameters(), model.get_parameter("1.weight")], lr=0.1)
    step(model)
    assert optimizer.param_groups


def test_parameters_that_stay_where_they_are():
    """What no plugin replaced trains through the plain model's optimizer."""
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = copy.deepcopy(module.state_dict())
    step(jit(module, FreezeFirst(None)))
    optimizer.step()
    changed = [name for name, value in module.state_dict().items() if not torch.equal(before[name], value)]
    assert changed == ["1.weight", "1.bias"]


def test_an_optimizer_under_construction():
    """It has no groups yet; asking it for any would fail."""
    unfinished = torch.optim.SGD.__new__(torch.optim.SGD)
    step(jit(plain()))
    assert not vars(unfinished)


def test_nothing_hangs_on_the_parameters_afterwards():
    model = jit(plain())
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    step(model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
