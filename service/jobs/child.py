"""The process of one build: `hivlp build`, behind all others, tied to whoever started it.

    python -m hivlp.service.jobs.child build CORPUS --home HOME ...

Its standard input is a pipe that nobody writes to: it ends with the process that holds its other
end, however that one dies. A build that went on alone would go on beside its own second try.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from hivlp.service.main import main as hivlp
from hivlp.service.priority import NICE

LETTING_GO_S = 30.0


def main(arguments: Sequence[str]) -> int:
    """Run the command, tethered. Its exit code."""
    os.nice(NICE)
    threading.Thread(target=_follow, name="tether", daemon=True).start()
    return hivlp(arguments)


def _follow() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LETTING_GO_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
