"""Makes ``python -m ddpdoctor`` the same as ``ddpdoctor``."""

from __future__ import annotations

import sys

from ddpdoctor.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
