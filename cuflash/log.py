"""What cuflash says of its calls: through the standard logger `cuflash`, and on stderr for CUFLASH_LOG and `options`.

The logger has the plan of every new problem at level INFO, and every call with the shapes of its arrays at level DEBUG.
`CUFLASH_LOG=1` and `options(log=True)` print one line per call, whatever the logger's level: that holds for the whole
process, theirs for one thread or task.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable
from contextlib import suppress
from functools import lru_cache

from .settings import settings

DEBUG, INFO = logging.DEBUG, logging.INFO
logger = logging.getLogger("cuflash")
logger.addHandler(logging.NullHandler())
is_enabled = logger.isEnabledFor

Shapes = dict[str, tuple[int, ...]]
"""Of a call's arrays, by name."""


def log_plan(problem: Hashable, plan: Hashable) -> None:
    """Log what a problem that is new was found to need."""
    if is_enabled(INFO):
        _log_once(problem, plan)


@lru_cache(maxsize=4096)
def _log_once(problem: Hashable, plan: Hashable) -> None:
    logger.info("new: %s -> %s", problem, plan)


def log_call(problem: object, plan: object, shapes: Shapes) -> None:
    """Log a call before anything is launched. Callers ask first whether `settings().log or is_enabled(DEBUG)`."""
    if settings().log and sys.stderr is not None:
        with suppress(OSError, ValueError):  # a full disk, or it is closed: that is no reason not to compute
            print(f"cuflash: {problem} -> {plan}", file=sys.stderr)
    if is_enabled(DEBUG):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        logger.debug("call: %s -> %s; %s", problem, plan, listed)
