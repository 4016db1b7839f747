"""`python -m ckpt` is the command `ckpt`."""

import sys

from ckpt.cli import main

sys.exit(main())
