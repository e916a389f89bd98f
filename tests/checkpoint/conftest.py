import thunder_xform  # noqa: F401  Before Thunder.
