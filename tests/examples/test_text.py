"""Bad texts are refused with one line, before any process is started."""

import pytest


@pytest.fixture
def refused(examples, monkeypatch, capsys, tmp_path):
    """What the command line says about options that it refuses."""
    import options

    def parse(*arguments):
        monkeypatch.setattr("sys.argv", ["demo.py", "--out", str(tmp_path / "out"), *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            options.parse("")
        assert stopped.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return parse


@pytest.mark.parametrize("option", ["--text", "--finetune-text"])
def test_missing_file(refused, tmp_path, option):
    file = tmp_path / "none.txt"
    assert refused(option, file) == (
        f"demo.py: error: {file} cannot be read: No such file or directory. Name a readable text file."
    )


def test_folder(refused, tmp_path):
    assert f"{tmp_path} cannot be read: Is a directory." in refused("--text", tmp_path)


def test_not_utf8(refused, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"x" * 5000 + "é".encode("latin-1"))
    assert f"{file} is not UTF-8: byte 5000 is 0xe9." in refused("--text", file)


@pytest.mark.parametrize("size", [0, 1289])
def test_too_short(refused, tmp_path, size):
    file = tmp_path / "short.txt"
    file.write_text("x" * size)
    assert f"{file} has {size} bytes, too few for windows of 128 bytes." in refused("--text", file)


def test_shortest(examples, tmp_path):
    import text
    from windows import Windows

    file = tmp_path / "shortest.txt"
    file.write_text("x" * 1290)
    windows = Windows(text.load(str(file), "", 128), 128)
    assert next(windows.random(3, seed=0))[0].shape == (3, 128)
    assert [inputs.shape for inputs, _ in windows.spread(2, 3, rank=1, world_size=2)] == [(2, 128)] * 3


def test_folder_that_cannot_be_made(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file/out cannot be made: Not a directory." in refused("--out", tmp_path / "file" / "out")


def test_heads_must_divide_the_width(refused):
    assert "4 heads do not divide a width of 30." in refused("--width", 30)


def test_built_in_texts(examples):
    import text

    code, prose = text.standard_library(), text.language_reference()
    assert "def " in code
    assert "The" in prose
    assert min(len(code), len(prose)) > 100_000


def test_ranks_validate_on_different_windows(examples):
    from windows import Windows

    windows = Windows("".join(map(chr, range(32, 127))) * 40, 16)
    zero, one = (windows.spread(4, 2, rank, world_size=2) for rank in (0, 1))
    assert not any((a[0] == b[0]).all() for a, b in zip(zero, one, strict=True))


def test_demo_refuses_before_it_starts_anything(examples, run_python, tmp_path):
    done = run_python(examples / "demo.py", "--text", tmp_path / "none.txt", "--out", tmp_path / "out", timeout=20)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
