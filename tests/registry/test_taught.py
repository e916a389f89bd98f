"""Every request that a help text, docstring, error or README teaches is one that can be planned (V23)."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from thunder_xform.cli import _parser
from thunder_xform.manifest import Manifest
from thunder_xform.registry import Record, Registry

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "plugins").exists(), reason="the sources are not beside the tests")

PLACES = ("README.md", "docs/*.md", "plugins/*/README.md", "examples/*.md", "thunder_xform/**/*.py", "examples/*.py")
TEXTS = [path for place in (*PLACES, "plugins/*/thunder_xform_*/*.py") for path in sorted(ROOT.glob(place))]
MANIFESTS = [Manifest.read(path) for path in sorted(ROOT.glob("plugins/*/thunder_xform_*/manifest.toml"))]
NAMES = "|".join(manifest.name for manifest in MANIFESTS)
VALUE = r"""(?:[^()"'`]|\([^()]*\)|"[^"]*"|'[^']*')*"""
#: ``lora(r=8)`` in running text, and ``"lora": {"r": 8}`` or ``("lora", {"r": 8})`` in code.
CALL = re.compile(rf"(?<![\w.])({NAMES})\(({VALUE}\w+={VALUE})\)")
PAIR = re.compile(rf"""["']({NAMES})["'](?::|,)\s*(\{{[^{{}}]*\}})""")
COMMAND = re.compile(r"^(?:\$ )?thunder-xform ((?:plan|why|show) .*?)(?:  .*)?$", re.MULTILINE)


@pytest.fixture(scope="module")
def shipped():
    return Registry(Record(name=m.name, distribution=m.name, version="1", manifest=m) for m in MANIFESTS)


def read(path):
    # What is wrapped over lines, in comments and in adjacent string literals, is one text.
    return re.sub(r"\s*\n\s*#?:? *", " ", path.read_text())


def test_v23_requests_in_texts(shipped):
    found = {(name, f"{name}({given})") for path in TEXTS for name, given in CALL.findall(read(path))}
    assert {"lora(r=8)", "fsdp(zero=3)"} <= {text for _, text in found}
    for name, text in found:
        shipped.plan(text if ast_is_literal(text) else name)


def test_v23_options_in_code(shipped):
    found = [(path, *pair) for path in TEXTS for pair in PAIR.findall(read(path))]
    assert len(found) > 5
    planned = 0
    for path, name, text in found:
        try:
            options = ast.literal_eval(text)
        except (ValueError, SyntaxError):  # It names variables; its keys are checked all the same.
            options = {}
            given = set(re.findall(r"""["'](\w+)["']:""", text))
            assert given <= names_of(shipped.plan(name).steps[0].manifest), (path, text)
        if isinstance(options, dict):
            shipped.plan(name, options={name: options} if name != "qlora" else None)
            planned += bool(options)
    assert planned


def test_v23_commands(shipped):
    commands = {command for path in TEXTS for command in COMMAND.findall(path.read_text())}
    assert len(commands) > 2
    for command in commands:
        arguments = _parser().parse_args(shlex.split(command))
        if hasattr(arguments, "request"):
            shipped.plan(arguments.request, edges=arguments.edge)
        elif hasattr(arguments, "names"):
            shipped.why(*arguments.names, edges=arguments.edge)


def ast_is_literal(text):
    try:
        return all(ast.literal_eval(keyword.value) is not ... for keyword in ast.parse(text, mode="eval").body.keywords)
    except (ValueError, SyntaxError):
        return False


def names_of(manifest):
    from thunder_xform.registry._options import read_options

    return {field.name for field in read_options(manifest.options)}
