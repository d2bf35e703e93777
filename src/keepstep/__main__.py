"""``python -m keepstep`` is the command ``keepstep``."""

import sys

from keepstep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
