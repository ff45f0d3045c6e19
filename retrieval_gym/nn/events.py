"""TensorBoard event files, written at once: no thread of its own that fails elsewhere or holds back what was logged."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """A new event file of scalars, which TensorBoard and ``EventAccumulator`` read as one of ``SummaryWriter``.

    Args:
        folder: where it is made; earlier event files in it stay.
        purge_step: what earlier files say of this step and later ones no longer counts.

    Raises:
        OSError: when it cannot be made, or written to.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        # By name, as TensorBoard sorts them, files are in the order in which they were made.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = open(folder / name, "xb")
        self._records = RecordWriter(self._file)
        self._write(step=purge_step, file_version="brain.Event:2")
        self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def add(self, numbers: Mapping[str, float], step: int) -> None:
        """Write scalars by name; they are with the operating system when this returns.

        Raises:
            OSError: when they cannot be written.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(step=step, summary=Summary(value=values))
        self._file.flush()

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
