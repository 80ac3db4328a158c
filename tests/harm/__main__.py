"""Does every harm to a watched job and prints whether it trained on: ``python -m tests.harm [HARM ...]``."""

from __future__ import annotations

import sys

from tests.harm.harms import HARMS, weights
from tests.scratch import scratch_directory


def main() -> int:
    """Print the table; 1 when a job came to other weights, or to none."""
    failed = 0
    with scratch_directory() as folder:
        expected = weights("nothing", folder / "unwatched", watched=False)
        for harm in sys.argv[1:] or HARMS:
            try:
                same = weights(harm, folder / harm.replace(" ", "-")) == expected
                verdict = "the same weights" if same else "OTHER WEIGHTS"
            except AssertionError as error:
                same, verdict = False, str(error)
            failed += not same
            print(f"{harm:20} {verdict}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
