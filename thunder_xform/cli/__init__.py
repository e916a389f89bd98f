"""The ``thunder-xform`` command: look at plugins and plan pipelines without importing them."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from thunder_xform.errors import XformError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv``).

    Returns:
        0 if all is well, 1 if there is a problem, which is on standard error; usage errors exit with 2.
    """
    arguments = _parser().parse_args(argv)
    # Only the module of the command that runs is imported, so that `--help` stays instant.
    module, function = arguments.run
    try:
        status: int = getattr(importlib.import_module(f"thunder_xform.cli.{module}"), function)(arguments)
        return status
    except XformError as error:
        from thunder_xform.cli._output import print_error

        print_error(error, json=arguments.json)
        return 1
    except BrokenPipeError:  # The reader, such as `head`, has seen enough.
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thunder-xform",
        description="Look at plugins and plan pipelines. Only `validate --imports` and `doctor MODULE:FACTORY` execute "
        "their code.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, module: str, function: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=(module, function))
        sub.add_argument("--json", action="store_true", help="print JSON on standard output")
        return sub

    listing = command("list", "_list", "run", "List the announced plugins, broken ones included.")
    _add_lists(listing)
    show = command("show", "_show", "run", "Show what a plugin declares, and its options.")
    show.add_argument("name", metavar="NAME")
    why = command("why", "_plan", "run_why", "Say why two plugins run in their order.")
    why.add_argument("names", metavar="NAME", nargs=2)
    _add_lists(why)
    _add_edges(why)
    plan = command("plan", "_plan", "run_plan", "Order plugins and all that they require, without importing them.")
    plan.add_argument("request", metavar="REQUEST", nargs="+", help="a name, or text such as 'lora(r=8) + fsdp'")
    _add_lists(plan)
    _add_edges(plan)
    validate = command(
        "validate", "_validate", "run", "Check a distribution, project folder or manifest against the format."
    )
    validate.add_argument("target", metavar="DIST|PATH")
    validate.add_argument("--imports", action="store_true", help="also import the plugin: this executes its code")
    doctor = command(
        "doctor", "_doctor", "run", "Check torch, Thunder, executors, process-group backends, plugins and a model."
    )
    doctor.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        nargs="?",
        help="compare with eager PyTorch what this function returns: a model and its arguments",
    )
    doctor.add_argument(
        "--with", dest="request", action="append", default=[], metavar="REQUEST", help="its plugins; repeatable"
    )
    _add_edges(doctor)
    return parser


def _add_lists(parser: argparse.ArgumentParser) -> None:
    for name, what in (("allow", "use only these"), ("deny", "leave these out")):
        parser.add_argument(f"--{name}", action="append", metavar="NAME|DIST", help=f"{what}; repeatable")


def _add_edges(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--edge", action="append", default=[], type=_edge, metavar="A:B", help="run A before B; repeatable"
    )


def _edge(text: str) -> tuple[str, str]:
    first, colon, then = (part.strip() for part in text.partition(":"))
    if not (first and colon and then):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form FIRST:THEN")
    return first, then
