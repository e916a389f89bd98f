"""Texts to train on: two that come with Python, or a user's own file."""

import sysconfig
from pathlib import Path


class TextError(Exception):
    """A text that cannot be trained on; the message says why and what to do."""


def load(path: str | None, default: str, window: int) -> str:
    """The text of a file, or one of `BUILT_IN` by name, long enough for windows of that many bytes.

    Raises TextError if the file cannot be read, is not UTF-8 or is too short.
    """
    text = BUILT_IN[default]() if path is None else _read(path)
    # A tenth is for validation and holds at least one window and the byte after it.
    shortest, size = 10 * (window + 1), len(text.encode())
    if size < shortest:
        raise TextError(
            f"{path or default} has {size} bytes, too few for windows of {window} bytes. "
            f"Give a text of at least {shortest} bytes, or a smaller --window."
        )
    return text


def standard_library() -> str:
    """The sources of the standard library's top-level modules, about 5 MB of Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise TextError("This Python has no sources of its library. Name a text: --text FILE")
    return "\n".join(file.read_text("utf-8", errors="replace") for file in files)


def language_reference() -> str:
    """What `help("for")` and its like print, about 0.5 MB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError("This Python has no topics for pydoc. Name a text: --finetune-text FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


BUILT_IN = {"standard library": standard_library, "language reference": language_reference}


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}. Name a readable text file.") from None
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. "
            f"Convert it first, for example with iconv."
        ) from None
