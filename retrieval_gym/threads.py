"""How torch's threads wait for each other; imported before torch is."""

from __future__ import annotations

import os


def let_threads_sleep() -> None:
    """Have waiting threads sleep, not spin, unless ``OMP_WAIT_POLICY`` is set; call it before torch is loaded.

    It costs next to nothing on cores of one's own; on cores that others use as well it is several times faster.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
