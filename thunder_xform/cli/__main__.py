"""``python -m thunder_xform.cli``."""

import sys

from thunder_xform.cli import main

if __name__ == "__main__":
    sys.exit(main())
