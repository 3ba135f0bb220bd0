"""How a process that serves begins, whether it is the only one or one of several."""

from __future__ import annotations

import sys

from hivlp.service import logs
from hivlp.service.settings import Settings

SWITCH_S = 0.0005
"""How long a thread of Python may keep the others waiting. A search changes hands a dozen times: at
Python's own 5 ms each, a body being parsed or a version being published would cost it tens of ms.
"""


def begin_process(settings: Settings) -> None:
    """Set what belongs to the process: how threads take turns, and what is logged."""
    sys.setswitchinterval(SWITCH_S)
    logs.set_up(settings.log)
