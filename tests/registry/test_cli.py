"""The command: output, exit codes, and what it may import."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

OPTIONS = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    rank: int = 8
    """Rank of the adapters."""
    size: int
'''
LORA = """
schema = 1
name = "lora"
summary = "Low-rank adapters"
plugin = "thunder_xform_lora.plugin:Plugin"
options = "thunder_xform_lora.options:Options"
stage = "adapters"
before = ["parallel.*"]
exclusive = { "adapters.linear" = ["rank"] }
effects = { reads = ["params.shape"], writes = ["params.set"] }
[host]
python = ">=3.11"
"""


@pytest.fixture
def full(site, manifest_text):
    site.install("lora", LORA, files={"options.py": OPTIONS})
    site.install("fsdp", manifest_text("fsdp", stage="distribute", more='provides = ["parallel.shard"]\n'))
    site.install("bad", "schema = 2")
    return site


@pytest.fixture
def run(python, full):
    def run(*arguments, **environ):
        return python("-m", "thunder_xform.cli", *arguments, sites=(full,), **environ)

    return run


BAD = (
    "bad [thunder-xform-bad 1.0] is broken: thunder_xform_bad/manifest.toml of thunder-xform-bad 1.0: "
    "`schema` is 2, newer than 1. Upgrade thunder-xform.\n"
)


def test_list(run):
    done = run("list")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "NAME  STATUS  STAGE       DISTRIBUTION        VERSION  SUMMARY\n"
        "bad   broken  -           thunder-xform-bad   1.0      -\n"
        "fsdp  ok      distribute  thunder-xform-fsdp  1.0      -\n"
        "lora  ok      adapters    thunder-xform-lora  1.0      Low-rank adapters\n"
        "\n" + BAD
    )
    denied = json.loads(run("list", "--json", "--deny", "lora", THUNDER_XFORM_DENY="bad").stdout)
    assert {record["name"]: record["status"] for record in denied} == {
        "bad": "denied",
        "fsdp": "ok",
        "lora": "denied",
    }
    assert denied[2]["manifest"]["effects"] == {"reads": ["params.shape"], "writes": ["params.set"]}


def test_show(run):
    done = run("show", "lora")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "name:        lora\n"
        "summary:     Low-rank adapters\n"
        "from:        thunder-xform-lora 1.0\n"
        "status:      ok\n"
        "stage:       adapters\n"
        "before:      parallel.*\n"
        "reads:       params.shape\n"
        "writes:      params.set\n"
        "exclusive:   adapters.linear per rank\n"
        "host:        python >=3.11\n"
        "\noptions:\n"
        "  NAME  TYPE  DEFAULT     MEANING\n"
        "  rank  int   8           Rank of the adapters.\n"
        "  size  int   (required)  -\n"
    )
    options = json.loads(run("show", "lora", "--json").stdout)["options"]
    assert options[0] == {"name": "rank", "annotation": "int", "default": "8", "doc": "Rank of the adapters."}


def test_why(run):
    done = run("why", "fsdp", "lora")
    line = "'lora' runs before 'fsdp' [thunder-xform-lora 1.0: before = ['parallel.*']]\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, line, "")
    assert json.loads(run("why", "fsdp", "lora", "--json").stdout) == {
        "first": "lora",
        "then": "fsdp",
        "edges": [
            {
                "first": "lora",
                "then": "fsdp",
                "kind": "declared",
                "source": "thunder-xform-lora 1.0: before = ['parallel.*']",
            }
        ],
    }


def test_plan(run):
    done = run("plan", "fsdp", "lora(rank=4)")
    data = json.loads(run("plan", "fsdp + lora(rank=4)", "--json").stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "#  NAME  STAGE       FROM                    REASON     OPTIONS\n"
        "1  lora  adapters    thunder-xform-lora 1.0  requested  rank=4\n"
        "2  fsdp  distribute  thunder-xform-fsdp 1.0  requested  -\n"
        "\n"
        "'lora' runs before 'fsdp' [thunder-xform-lora 1.0: before = ['parallel.*']]\n"
        "\n"
        f"text: lora(rank=4) + fsdp\nlock: {data['digest']}\n"
    )
    assert data["order"] == ["lora", "fsdp"]
    assert data["reasons"] == {"lora": "requested", "fsdp": "requested"}
    assert data["lock"]["steps"][0]["options"] == {"rank": 4}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            ["plan", "lroa"],
            "UnknownNameError",
            ("no installed plugin is called 'lroa'. Did you mean 'lora'? Installed are bad, fsdp and lora."),
        ),
        (
            ["plan", "lora(rnk=4)"],
            "UnknownOptionError",
            (
                "'lora' [thunder-xform-lora 1.0] has no option 'rnk'. Did you mean 'rank'? "
                "Its options are rank and size."
            ),
        ),
        (
            ["plan", "lora", "--deny", "lora"],
            "DeniedError",
            (
                "'lora' [thunder-xform-lora 1.0] is excluded by deny=. "
                "Remove it from that list, or leave it out of the request."
            ),
        ),
        (
            ["show", "bad"],
            "ManifestError",
            (
                "thunder_xform_bad/manifest.toml of thunder-xform-bad 1.0: `schema` is 2, newer than 1. "
                "Upgrade thunder-xform."
            ),
        ),
        (
            ["validate", "thunder-xform-lorra"],
            "UnknownNameError",
            (
                "'thunder-xform-lorra' is neither a path nor a distribution with plugins. "
                "Did you mean 'thunder-xform-lora'? Give a distribution, a manifest, or a "
                "folder that contains one."
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_of_the_user_have_no_traceback(run, arguments, kind, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {message}\n")
    structured = run(*arguments, "--json")
    assert structured.returncode == 1
    error = json.loads(structured.stdout)["error"]
    assert (error["type"], error["message"]) == (kind, message)


@pytest.mark.parametrize(
    "arguments", [[], ["lst"], ["plan"], ["why", "a"], ["plan", "a", "--edge", "ab"]], ids=" ".join
)
def test_usage_errors(run, arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: thunder-xform")


def test_validate(run, full):
    done = run("validate", "thunder-xform-lora")
    assert (done.returncode, done.stdout) == (
        0,
        (
            "lora [thunder-xform-lora 1.0]: valid\n  warning: the option 'size' is undocumented: "
            "put a string below or `#:` above it.\n"
        ),
    )
    done = run("validate", "thunder_xform.bad")
    assert (done.returncode, done.stdout) == (1, "bad [thunder-xform-bad 1.0]: not valid\n")
    assert "`schema` is 2, newer than 1" in done.stderr


def project(folder: Path, manifest: str, **files: str) -> Path:
    package = folder / "src" / "acme_lora"
    package.mkdir(parents=True)
    (package / "manifest.toml").write_text(manifest)
    for name in ("__init__", "plugin", "options"):
        (package / f"{name}.py").write_text(files.get(name, ""))
    return folder


ACME = """
schema = 1
name = "lora"
plugin = "acme_lora.plugin:Plugin"
options = "acme_lora.options:Options"
stage = "adapters"
after = ["weights.*", "fsdp"]
exclusive = { "x" = ["rnk"] }
"""


def test_validate_a_project_that_is_not_installed(run, tmp_path):
    project(tmp_path, ACME, options=OPTIONS)
    data = json.loads(run("validate", str(tmp_path), "--json").stdout)
    assert data == [
        {
            "name": "lora",
            "distribution": "",
            "errors": ["`exclusive.x` lists 'rnk', which is no option. Did you mean 'rank'?"],
            "warnings": [
                "`after` names 'weights.*', which nothing installed is called or provides.",
                "the option 'size' is undocumented: put a string below or `#:` above it.",
                "`summary` is missing; `thunder-xform list` shows it.",
            ],
        }
    ]


def test_validate_imports_only_when_told(run, tmp_path):
    options = OPTIONS.replace("size: int", "size: int = 0\n    'Size.'") + "raise RuntimeError('executed')"
    project(tmp_path, ACME.replace("rnk", "rank"), options=options, plugin="Plugin = 3")
    assert run("validate", str(tmp_path)).returncode == 0
    done = run("validate", str(tmp_path), "--imports")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        (
            "  error: 'lora' [acme_lora]: 'acme_lora.options:Options' cannot be imported "
            "(RuntimeError: executed). "
            "Install what it misses, or reinstall it: pip install --force-reinstall acme_lora"
        ),
        "  error: `plugin` is 'acme_lora.plugin:Plugin', which is no class.",
    ]


def test_validate_a_missing_module_and_folder(run, tmp_path):
    project(tmp_path, ACME.replace("acme_lora.plugin", "acme_lora.plugn").replace("rnk", "rank"), options=OPTIONS)
    done = run("validate", str(tmp_path))
    assert "`plugin` is 'acme_lora.plugn:Plugin', but there is no source file for" in done.stderr
    assert run("validate", str(tmp_path / "src" / "acme_lora" / "manifest.toml")).returncode == 1
    (tmp_path / "empty").mkdir()
    assert run("validate", str(tmp_path / "empty")).stderr == (
        f"error: {tmp_path}/empty contains no manifest.toml, nor does a package directly in it "
        f"or in its src/. "
        "Give the path of the manifest itself.\n"
    )


def test_doctor_without_torch_reports_instead_of_failing(run):
    done = run("doctor", "--json")
    findings = {finding["topic"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1
    assert findings["python"]["level"] == "ok"
    assert findings["plugin: lora"]["level"] == "ok"
    assert findings["plugin: bad"]["level"] == "problem"
    assert "ModuleNotFoundError: No module named 'torch'" in findings["torch"]["text"]


def test_doctor_with_everything():
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", "-m", "thunder_xform.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    topics = {finding["topic"]: finding for finding in json.loads(done.stdout)}
    assert topics["process group: gloo"]["text"] in ("yes", "no")
    assert "torch" in topics["executors"]["text"]
    assert topics["executor: nvfuser"]["level"] in ("ok", "note")


IMPORTS = """
import contextlib, io, json, sys
sys.path += {paths!r}
from thunder_xform.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for command in {commands!r}:
        try:
            main(command)
        except SystemExit:
            pass
result = [n for n in sys.modules if n.partition(".")[0] in ("torch", "thunder") or n.startswith("imported_")]
print(json.dumps(result))
"""


def test_no_command_but_doctor_and_validate_imports_torch_or_plugins(python, full):
    commands = [
        ["--help"],
        ["list"],
        ["list", "--json"],
        ["show", "lora"],
        ["why", "lora", "fsdp"],
        ["plan", "lora(rank=2)", "fsdp", "--json"],
        ["validate", "thunder-xform-lora"],
    ]
    paths = [path for path in sys.path if path.endswith("-packages")]

    def modules(*commands):
        done = python("-c", IMPORTS.format(paths=paths, commands=list(commands)), sites=(full,))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert modules(*commands) == []
    # The tripwire works: this command does import the plugin.
    assert modules(["validate", "thunder-xform-lora", "--imports"]) == ["imported_lora"]


def test_help_scans_nothing(python):
    code = "import sys\nfrom thunder_xform.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    done = python("-c", code + "assert 'importlib_metadata' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_the_script_is_declared():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text())["project"]["scripts"]["thunder-xform"] == "thunder_xform.cli:main"
