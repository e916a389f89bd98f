"""Errors and disagreements reach every rank, across several groups too."""

import torch.distributed as dist

from thunder_xform.errors import ParallelError
from thunder_xform.parallel import agree_on, together
from thunder_xform.registry import Lock
from thunder_xform.testing import RankPool


def lock(**options):
    step = {"name": "p", "distribution": "d", "version": "1", "content": None, "options": options}
    return Lock({"schema": 1, "host": {"torch": "2"}, "steps": [step]})


def caught(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def block(groups, fails):
    with together(groups, "The block"):
        if fails:
            raise KeyError("missing")


def cases(groups):
    """What this rank raises when only rank 1 errs."""
    odd = dist.get_rank() == 1
    long = {f"weight{i:02}": "(2,)" for i in range(12)}
    return {
        "fine": caught(lambda: block(groups, False)),
        "fails": caught(lambda: block(groups, odd)),
        "agree": caught(lambda: agree_on(lock(a=1), {"weight": "(2,)"}, groups)),
        "options": caught(lambda: agree_on(lock(a=2 if odd else 1), {}, groups)),
        "shape": caught(lambda: agree_on(lock(), {"weight": "(3,)" if odd else "(2,)"}, groups)),
        "absent": caught(lambda: agree_on(lock(), {} if odd else {"weight": "(2,)"}, groups)),
        "many": caught(lambda: agree_on(lock(), {} if odd else long, groups)),
    }


def over_world():
    return cases([dist.group.WORLD])


def over_rows_and_columns():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    return cases([mesh.get_group("row"), mesh.get_group("column")])


def check(results):
    told = "The block failed on another rank (rank 1: KeyError: 'missing'). Fix it there; this rank stopped with it."
    for rank, found in enumerate(results):
        assert found["fine"] is None
        assert found["agree"] is None
        assert found["fails"] == ("KeyError: 'missing'" if rank == 1 else f"{ParallelError.__name__}: {told}")
    for case in ("options", "shape", "absent", "many"):
        assert len({found[case] for found in results}) == 1, case
    first = results[0]
    return {case: text.split(":", 2) for case, text in first.items() if text is not None}


def test_one_group(ranks):
    found = check(ranks.run(over_world))
    assert found["options"][1] == " Ranks 0 and 1 resolved different pipelines"
    assert "p: option a 1 -> 2\n" in found["options"][2]
    assert found["shape"][1] == " Ranks 0 and 1 built different models"
    assert "weight: (2,) -> (3,)\n" in found["shape"][2]
    assert "weight: (2,) -> absent\n" in found["absent"][2]
    assert "weight09: (2,) -> absent\n  ... and 2 more\n" in found["many"][2]


def test_groups_that_cross():
    """Ranks that share no group with the one at fault stop with it all the same, instead of waiting for the others."""
    with RankPool(4, preload=("thunder_xform.parallel",)) as pool:
        check(pool.run(over_rows_and_columns))


def test_no_group():
    """Without groups each process is on its own."""
    assert not dist.is_initialized()
    assert agree_on(lock(), {}, []) is None
    assert caught(lambda: block([], True)) == "KeyError: 'missing'"
