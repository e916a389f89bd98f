"""What to say of a plugin that is not installed."""

from __future__ import annotations

from collections.abc import Iterable

from thunder_xform.errors import closest

__all__ = ["SHIPPED", "installation"]

#: The plugins that are published with this package, each as ``thunder-xform-NAME``.
SHIPPED = ("aten", "ddp", "fsdp", "lora", "qlora", "quant")


def installation(name: str, installed: Iterable[str]) -> tuple[str, str]:
    """`closest`'s hint at another name, and how to get the plugin, empty where there is no saying.

    What is probably a typing error is never recommended for installation: anyone can register such a name.
    """
    if name in SHIPPED:
        return "", f"Install it: pip install thunder-xform-{name}"
    if hint := closest(name, installed):
        return hint, ""
    if hint := closest(name, SHIPPED):
        return hint, "Install that, if it is what you want."
    if not name.isidentifier() or not name.isascii():
        return "", ""
    return "", f"Install it, for example: pip install thunder-xform-{name.replace('_', '-')}"
