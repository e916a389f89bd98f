"""thunder-xform's ``qlora`` bundle: data only, see ``manifest.toml``."""
