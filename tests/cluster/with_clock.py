"""An agent on a host whose clock is wrong: `python -m tests.cluster.with_clock HOURS`.

Not by libfaketime, under which `time.sleep` of Python 3.11 and later fails.
"""

import sys
import time

_right = time.time
_wrong_by = 3600 * float(sys.argv[1])
time.time = lambda: _right() + _wrong_by

# After that, for modules keep the function that they find.
from tests.cluster.agent import main  # noqa: E402

main()
