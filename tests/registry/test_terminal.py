"""What a distribution says of itself reaches a terminal as text, never as an escape sequence or a forged row (V21)."""

import json
import unicodedata

import pytest

from thunder_xform.errors import ManifestError, XformError, printable
from thunder_xform.manifest import Manifest

ESC = "\x1b[2J\x1b]0;owned\x07"
FORGED = "lora  ok  adapters  thunder-xform-lora  9.9"
OPTIONS = (
    "from dataclasses import dataclass\n\n@dataclass\nclass Options:\n    rank: int = 8\n"
    '    """Rank.\\x1b[31m \u202eright to left"""\n    word: str = "\\x1b[1m"\n    "A word."\n'
)


@pytest.fixture
def hostile(site, manifest_text):
    good = manifest_text("good", more='options = "thunder_xform_good.options:Options"\n')
    site.install("good", good, version=f"1.0{ESC}".replace("/", ""), files={"options.py": OPTIONS})
    site.install("other", manifest_text("other", stage="distribute"))
    points = f"[thunder_xform.plugins]\nnamed{ESC} = thunder_xform_named:manifest.toml\n"
    site.install("named", entry_points=points)
    site.install("valued", entry_points=f"[thunder_xform.plugins]\nvalued = x{ESC}y:manifest.toml\n")
    site.install("keyed", f'"a\\n{FORGED}\\u001b[1A" = 1\n' + manifest_text("keyed"))
    site.install("summed", manifest_text("summed", more='summary = "a\\u001b[1A\\rb"\n'))
    bundle = 'schema = 1\nname = "bundle"\nrequires = ["good"]\n[defaults.good]\n"\\u001b[1A" = 1\n'
    site.install("bundle", bundle)
    return site


COMMANDS = (
    *(["list"], ["plan", "good", "other"], ["why", "good", "other"], ["doctor"], ["show", "bundle"]),
    *(["show", name] for name in ("good", "named", "valued", "keyed", "summed")),
    *(["plan", "bundle"], ["validate", "thunder-xform-keyed"], ["validate", "thunder-xform-good"], ["show", ESC]),
)


def test_v21_no_control_character_reaches_a_terminal(python, hostile):
    for command in COMMANDS:
        done = python("-m", "thunder_xform.cli", *command, sites=(hostile,))
        shown = done.stdout + done.stderr
        assert shown, command
        assert "Traceback" not in shown
        odd = {c for c in shown if c != "\n" and unicodedata.category(c).startswith(("C", "Zl", "Zp"))}
        assert not odd, (command, shown)
        assert FORGED not in shown.splitlines()
    done = python("-m", "thunder_xform.cli", "list", "--json", sites=(hostile,))
    assert done.stdout.isascii()
    assert len(json.loads(done.stdout)) == 7


KEYS = {
    '"a\\nb\\u001b[0m" = 1': "`a\\nb\\x1b[0m` is no field of a manifest.",
    'summary = "a\\u0007"': "`summary` is 'a\\x07'. Give one line of text without control characters.",
    'summary = "a\\u2028b"': "`summary` is 'a\\u2028b'. Give one line of text without control characters.",
    'summary = "a\\u009bb"': "`summary` is 'a\\x9bb'. Give one line of text without control characters.",
}


@pytest.mark.parametrize("line", KEYS)
def test_v21_messages_of_manifests(manifest_text, line):
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(f"{line}\n{manifest_text('bad')}")
    assert str(caught.value).startswith(f"manifest.toml: {KEYS[line]}")


def test_v21_messages_of_all_errors():
    error = XformError("Refused by \x1b[31mcode\x1b[0m\u202e.", "See:\n\tthere\x7f.")
    assert str(error) == "Refused by \\x1b[31mcode\\x1b[0m\\u202e. See:\n\tthere\\x7f."
    assert printable("plain \u00e9\u4e2d text") == "plain \u00e9\u4e2d text"
