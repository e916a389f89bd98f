"""Observers: timing that is always on, dumps that can be compared, wrappers of one's own."""

import pytest
import torch
from torch import nn

import thunder_xform as tx
from thunder_xform.errors import PipelineError
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip

identity = tx.operator(
    "test_instruments_identity",
    meta=lambda t: tx.tensor_like(t),
    fn=lambda t: t.clone(),
    backward=lambda inputs, outputs, gradients: gradients,
)


class Busy(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, params):
        pass

    @tx.hookimpl
    def mutate_prologue(self, prologue):
        return prologue.check("weather", lambda: True)

    @tx.hookimpl
    def before_autograd(self, computation):
        return computation.restore([((name,), identity) for name in computation.parameters])

    @tx.hookimpl
    def after_optimization(self, schedule):
        return None


class Quiet(tx.Plugin):
    @tx.hookimpl
    def before_autograd(self, computation):
        return computation.rewrite("linear", lambda operation, edit: None)


def run(*observers):
    torch.manual_seed(0)
    compiled = thunder.jit(
        nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
        transforms=pipeline_of(busy=Busy(None), quiet=Quiet(None), bare=tx.Plugin(None)).observe(*observers),
    )
    compiled(torch.ones(2, 3))
    with torch.no_grad():
        compiled(torch.ones(2, 3))
    return tx.handle(compiled)


def test_every_hook_is_timed_in_the_compilation_it_belongs_to():
    handle = run()
    first, second = handle.events
    per_compilation = [
        "busy.mutate_prologue",
        "busy.before_autograd",
        "quiet.before_autograd",
        "busy.after_optimization",
    ]
    assert list(first.seconds) == ["busy.update_model_state", *per_compilation]
    assert list(second.seconds) == per_compilation
    assert all(0 < seconds < 60 for event in (first, second) for seconds in event.seconds.values())
    assert first.seconds["busy.before_autograd"] > first.seconds["busy.update_model_state"]
    line = next(line for line in handle.explain().splitlines() if line.startswith("compilation 1"))
    assert "is_grad_enabled: True -> False" in line
    assert "busy.before_autograd 0.0" in line


def files(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*.py"))}


def test_a_dump_holds_before_and_after_where_something_changed(tmp_path):
    run(tx.TraceDump(tmp_path / "dump"))
    found = files(tmp_path / "dump")
    names = ["00_busy.mutate_prologue", "01_busy.before_autograd"]
    assert list(found) == [
        f"compilation_{number}/{name}{suffix}.py" for number in (0, 1) for name in names for suffix in (".before", "")
    ]
    before, after = (found[f"compilation_0/01_busy.before_autograd{suffix}.py"] for suffix in (".before", ""))
    assert identity.name not in before
    assert after.count(f"= {identity.name}(") == 2
    assert after.startswith("# thunder-xform trace: busy.before_autograd\n")
    compile(after, "dump", "exec")
    assert "check_weather" in found["compilation_0/00_busy.mutate_prologue.py"]
    assert not any(word in text for text in found.values() for word in ("milliseconds", "site-packages", "0x7"))


def test_dumps_of_equal_runs_are_equal_and_replace_each_other(tmp_path):
    run(tx.TraceDump(tmp_path / "a"))
    run(tx.TraceDump(tmp_path / "b"))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    (tmp_path / "a" / "compilation_7").mkdir()
    stale = tmp_path / "a" / "compilation_7" / "00_old.py"
    stale.write_text("# thunder-xform trace: old\n")
    run(tx.TraceDump(str(tmp_path / "a")))
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("name", ["notes.txt", "model.py", "compilation_0/mine.py", "checkpoint/x.py"])
def test_a_folder_with_other_files_is_refused_and_kept(tmp_path, name):
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    with pytest.raises(PipelineError, match="which is no trace dump"):
        tx.TraceDump(tmp_path)
    assert foreign.read_text() == "mine"


def test_observers_wrap_the_hooks_that_plugins_have():
    class Watch:
        def __init__(self):
            self.seen = []

        @tx.hookimpl(wrapper=True)
        def before_autograd(self, computation, ctx):
            returned = yield
            self.seen.append((ctx.plugin, ctx.event.number, returned is not None and returned is not computation))
            return returned

        @tx.hookimpl(wrapper=True)
        def invalidate_cache(self, event, ctx):
            self.seen.append((ctx.plugin, event))
            return (yield)

    watch = Watch()
    handle = run(watch)
    assert watch.seen == [("busy", 0, True), ("quiet", 0, True), ("busy", 1, True), ("quiet", 1, True)]
    handle.invalidate("nobody listens")
    assert len(watch.seen) == 4
