from thunder_xform.testing.fixtures import ranks

__all__ = ["ranks"]
