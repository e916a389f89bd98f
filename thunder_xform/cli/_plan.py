"""``thunder-xform plan`` and ``thunder-xform why``."""

from __future__ import annotations

import argparse
from itertools import pairwise

from thunder_xform import registry
from thunder_xform.cli._output import print_json, print_table, say
from thunder_xform.registry._text import render

__all__ = ["run_plan", "run_why"]


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the pipeline, why its neighbours are in this order, its text form and the lock's digest."""
    resolution = registry.plan(arguments.request, allow=arguments.allow, deny=arguments.deny, edges=arguments.edge)
    reasons = [resolution.why(a, b) for a, b in pairwise(resolution.order)]
    if arguments.json:
        print_json(
            {
                "order": resolution.order,
                "reasons": {step.name: step.reason for step in resolution.steps},
                "because": reasons,
                "text": resolution.text,
                "digest": resolution.lock.digest,
                "lock": resolution.lock.data,
            }
        )
        return 0
    rows = (
        (i, step.name, step.manifest.stage, step.origin, step.reason, _options(step))
        for i, step in enumerate(resolution.steps, 1)
    )
    print_table(("#", "NAME", "STAGE", "FROM", "REASON", "OPTIONS"), rows)
    if reasons:
        print()
    for reason in reasons:
        say(str(reason))
    say(f"\ntext: {resolution.text}\nlock: {resolution.lock.digest}")
    return 0


def run_why(arguments: argparse.Namespace) -> int:
    """Print the shortest chain of reasons for the order of two plugins."""
    explanation = registry.why(*arguments.names, allow=arguments.allow, deny=arguments.deny, edges=arguments.edge)
    if arguments.json:
        print_json(explanation)
    else:
        say(str(explanation))
    return 0


def _options(step: registry.Step) -> str:
    return render([("", step.options)])[1:-1] if step.options else ""
