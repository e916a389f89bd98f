"""V32: a transformed model that nobody uses any more is freed, whatever was done with it before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import thunder_xform as tx

import thunder  # isort: skip
from thunder_xform.testing import pipeline_of


class Copied(tx.Plugin):
    """Trains copies, as plugins that distribute parameters do."""

    @tx.hookimpl
    def update_model_state(self, params):
        for name in params:
            params.replace(name, params.tensor(name).clone())


def made():
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return plain, thunder.jit(plain, transforms=pipeline_of(copied=Copied(None)))


def untouched(model):
    pass


def forward(model):
    model(torch.ones(3, 4))


def trained(model):
    model(torch.ones(3, 4)).sum().backward()


def accumulated(model):
    with model.no_sync():
        trained(model)


def within_a_function(model):
    thunder.jit(lambda x: model(x).sum())(torch.ones(3, 4))


def through_a_handle(model):
    grip = tx.handle(model)
    grip.load_state_dict(grip.state_dict())
    forward(model)
    grip.invalidate("test")


def failed(model):
    with pytest.raises(Exception, match=r"shape|size|match|inner"):
        model(torch.ones(3, 5))


@pytest.mark.parametrize("use", [untouched, forward, trained, accumulated, within_a_function, through_a_handle, failed])
def test_v32_a_deleted_model_is_freed(use):
    plain, model = made()
    use(model)
    session = tx.handle(model)._session
    alive = [weakref.ref(o) for o in (plain, model, session, *plain.parameters(), *model.parameters())]
    del plain, model, session
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]


def test_v32_an_optimizer_keeps_parameters_and_not_the_model():
    plain, model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = weakref.ref(tx.handle(model)._session)
    del plain, model
    gc.collect()
    assert session() is None
    assert len(optimizer.param_groups[0]["params"]) == 6
