"""Guards: one compilation per distinct state, then hits (U16, U17); what a false or unstable guard says."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import PipelineError, VerificationError
from thunder_xform.host.guards import GuardMiss, training_modes
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip
from thunder.transforms.prune_prologue_checks import PrunePrologueChecks


class Scale(tx.Plugin):
    """Multiplies the output of every linear by an attribute that compiled code takes for granted."""

    def __init__(self, factor=2.0):
        super().__init__(None)
        self.factor = factor

    @tx.hookimpl
    def guard_key(self):
        return self.factor

    @tx.hookimpl
    def before_autograd(self, computation):
        return computation.rewrite("linear", lambda operation, edit: operation.call() * self.factor)


class Mode(tx.Plugin):
    @tx.hookimpl
    def guard_key(self, ctx):
        return ctx.no_sync


def small():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))


def counts(compiled):
    return thunder.cache_misses(compiled), thunder.cache_hits(compiled)


def test_changing_what_a_guard_key_reads_recompiles_once_and_coming_back_is_a_hit():
    # U17
    scale = Scale()
    model = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    compiled = thunder.jit(model, transforms=pipeline_of(scale=scale))
    for round_trip in range(25):
        for factor in (2.0, 3.0):
            scale.factor = factor
            torch.testing.assert_close(compiled(x), model(x) * factor)
        assert counts(compiled) == (2, 2 * round_trip)
    assert [event.reasons for event in tx.handle(compiled).events] == [
        ("first call",),
        ("guard key of 'scale': 2.0 -> 3.0",),
    ]


def test_flipping_no_sync_and_modes_compiles_once_for_each_combination():
    compiled = thunder.jit(small(), transforms=pipeline_of(mode=Mode(None)))
    x = torch.randn(2, 3)
    for flip in range(50):
        compiled.train(flip % 2 == 0)
        compiled(x)
        with compiled.no_sync(), compiled.no_sync():
            compiled(x)
    assert counts(compiled) == (4, 96)
    assert tx.handle(compiled).compiled_entries == 4


@pytest.mark.parametrize("ours_first", [True, False])
def test_pruned_checks_do_not_prune_the_guard(ours_first):
    # U16: with Thunder's transform alone, eval() keeps running the trace of train().
    model = small()
    pipeline = pipeline_of(mode=Mode(None))
    transforms = [*pipeline, PrunePrologueChecks()] if ours_first else [PrunePrologueChecks(), *pipeline]
    compiled = thunder.jit(model, transforms=transforms)
    x = torch.ones(64, 3)
    compiled.train()
    assert (compiled(x) == 0).any()
    compiled.eval()
    torch.testing.assert_close(compiled(x), model[0](x))
    compiled.train()
    assert (compiled(x) == 0).any()
    assert counts(compiled) == (2, 1)


def test_without_the_guard_pruned_checks_keep_the_wrong_code():
    # What makes the test above one that can fail.
    compiled = thunder.jit(small(), transforms=[PrunePrologueChecks()])
    x = torch.ones(64, 3)
    compiled.train()
    compiled(x)
    compiled.eval()
    assert (compiled(x) == 0).any()


def test_a_mode_of_one_submodule_counts():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))
    compiled = thunder.jit(model, transforms=pipeline_of(mode=Mode(None)))
    x = torch.ones(64, 3)
    compiled(x)
    model[0].eval()
    torch.testing.assert_close(compiled(x), model(x))
    (reason,) = tx.handle(compiled).events[1].reasons
    assert reason == "guard key of 'training': (True, True) -> (True, False)"


def test_modules_that_compute_the_same_in_both_modes_are_not_watched():
    assert training_modes(small())() == (True, True)
    assert training_modes(nn.Sequential(*[nn.Linear(2, 2)] * 3))() == (True,)

    class Custom(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.training else x

    assert training_modes(nn.Sequential(Custom(2, 2)))() == (True, True)


class Checked(tx.Plugin):
    def __init__(self, *checks):
        super().__init__(None)
        self.checks = checks

    @tx.hookimpl
    def mutate_prologue(self, prologue):
        for holds in self.checks:
            prologue = prologue.check("weather", holds)
        self.names = list(prologue.checks())
        return prologue


def test_checks_of_one_name_are_each_evaluated():
    state = [True, True, True]
    watchers = [lambda i=i: state[i] for i in range(3)]
    first, second = Checked(*watchers[:2]), Checked(watchers[2])
    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(first=first, second=second))
    x = torch.randn(1, 3)
    compiled(x)
    assert counts(compiled) == (1, 0)
    compiled(x)
    assert counts(compiled) == (1, 1)
    assert second.names[0] == "check_pipeline_state"
    for index in range(3):
        state[index] = False
        with pytest.raises(PipelineError, match="'weather' fails in the very compilation"):
            compiled(x)
        state[index] = True
    compiled(x)
    assert counts(compiled) == (4, 2)
    assert len(tx.handle(compiled).events) == 1


def test_a_state_that_changes_while_it_is_compiled_for_is_reported():
    class Drifting(Scale):
        @tx.hookimpl
        def before_autograd(self, computation):
            self.factor += 1

    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(drifting=Drifting()))
    with pytest.raises(GuardMiss, match="check_pipeline_state"):
        compiled(torch.randn(1, 3))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (lambda: [1], "cannot be hashed"),
        (lambda: object(), "changed from .* while nothing else did"),
        (lambda: torch.ones(2), "cannot be hashed and compared"),
    ],
)
def test_keys_that_would_recompile_every_call_are_refused(key, message):
    class Keyed(tx.Plugin):
        @tx.hookimpl
        def guard_key(self):
            return key()

    compiled = thunder.jit(nn.Linear(3, 3), transforms=pipeline_of(keyed=Keyed(None)))
    with pytest.raises(VerificationError, match=message) as caught:
        compiled(torch.randn(1, 3))
    assert (caught.value.plugin, caught.value.hook) == ("keyed", "guard_key")
