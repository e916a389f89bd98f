"""V09, V30: the norm of a gradient that lies on several ranks is the whole one, or whoever cannot give it is named."""

import torch
import torch.distributed as dist

import thunder_xform as tx
from thunder_xform.testing import pipeline_of

import thunder  # isort: skip


def part(tensor, dim):
    rows = tensor.shape[dim] // dist.get_world_size()
    return tensor.narrow(dim, dist.get_rank() * rows, rows).clone()


class Silent(tx.Plugin):
    """Cuts one parameter and says nothing of its norm."""

    name, dim = "0.weight", 0

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        params.replace(self.name, part(params.tensor(self.name).detach(), self.dim), layout="cut")


class Answers(Silent):
    @tx.hookimpl
    def gradient_norm(self, parameters, norm_type):
        powers = [(p.grad.norm(norm_type) ** norm_type, p.numel() < 16) for p in parameters]
        total = sum(power for power, cut in powers if cut)
        dist.all_reduce(total)
        return (total + sum(power for power, cut in powers if not cut)) ** (1 / norm_type)


class Columns(Answers):
    name, dim = "1.weight", 1


class Adds(tx.Plugin):
    """Every rank has another parameter, of one shape."""

    @tx.hookimpl
    def update_model_state(self, params, ctx):
        params.add("expert", torch.full((2,), float(dist.get_rank())))

    @tx.hookimpl
    def gradient_norm(self, parameters, norm_type):
        return torch.ones(())


class Frozen(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, params, ctx):
        name = "0.weight"
        params.replace(name, part(params.tensor(name).detach(), 0), layout="cut", requires_grad=False)


class Whole(tx.Plugin):
    @tx.hookimpl
    def update_model_state(self, params, ctx):
        params.replace("0.weight", params.tensor("0.weight").detach().clone())


def clip(**plugins):
    """The norm, or what was said; and whether gradients are as they were."""
    model = thunder.jit(
        torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2))),
        transforms=pipeline_of(**{name: plugin(None) for name, plugin in plugins.items()}),
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    try:
        found = tx.handle(model).clip_grad_norm_(0.5).item()
    except tx.errors.PipelineError as error:
        found = str(error)
    return found, all(p.grad is None or bool((p.grad == 1).all()) for p in model.parameters())


def cases():
    return {
        "silent": clip(silent=Silent),
        "behind one that answers": clip(adds=Adds, silent=Silent),
        "answers": clip(answers=Answers),
        "both cut": clip(rows=Answers, columns=Columns),
        "both answer": clip(rows=Answers, adds=Adds),
        "frozen": clip(frozen=Frozen),
        "whole": clip(whole=Whole),
    }


def test_the_norm_is_the_whole_one_or_refused(ranks):
    for found in ranks.run(cases):
        told = "Plugin 'silent' stores parameters that train in another form, but does not say what the norm of their "
        told += "gradients over all ranks is. Leave it out, or let it pass mesh= and placement= to params.replace or "
        told += "implement the hook gradient_norm."
        silent = (told, True)
        assert found["silent"] == silent
        assert found["behind one that answers"] == silent
        several = (
            "Plugins {} each distribute parameters, and each knows the norm of the gradients of its own part only. "
        )
        several += "Use one of them, or train without clipping by the norm."
        assert found["both cut"] == (several.format("'rows' and 'columns'"), True)
        assert found["both answer"] == (several.format("'rows' and 'adds'"), True)
        assert abs(found["answers"][0] - 32**0.5) < 1e-5
        assert found["frozen"] == (4.0, False)
        assert abs(found["whole"][0] - 32**0.5) < 1e-5
