"""Files that survive a kill: a checkpoint that is whole or absent, and a journal of the steps since.

The journal has a line for each step, written and flushed to the disk before the step draws its noise. After a kill the
steps that no checkpoint holds are still counted, since what they gave away may have been seen.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from eachgrad.private.errors import PrivacyError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """The file at `path` is either as before or as `write` made it, whenever the process dies."""
    temporary = path.with_name(path.name + ".tmp")  # of a kill one is left at most, and is written over
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def save(path: Path, state: dict[str, Any]) -> None:
    write_atomically(path, lambda file: torch.save(state, file))


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote, tensors on the CPU; nothing but tensors and plain values is ever read."""
    return torch.load(path, map_location="cpu", weights_only=True)


def journal_of(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


class Journal:
    """The steps of a run since its last checkpoint, one line each, and before them what the run had spent then.

    Whoever has this object is the only one that reads or writes the file: the lock is taken before anything is read, is on
    the very file at that path, and goes with the process.
    """

    _file = -1  # closed

    def __init__(self, path: Path):
        self.path = path
        self._file = _claimed(path)

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    @property
    def is_new(self) -> bool:
        """Whether no run has begun it."""
        return not self.path.stat().st_size

    def begin(self, state: dict[str, Any], spent: int) -> None:
        """Begin it anew, whole or not at all."""
        header = json.dumps({**state, "spent": spent}).encode()
        if not _LOCKS:  # such a system does not replace a file that is open either
            self.close()
            write_atomically(self.path, lambda file: file.write(header))
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            return
        kept: list[int] = []

        def write(file: IO[bytes]) -> None:
            file.write(header)
            kept.append(os.dup(file.fileno()))
            _lock(kept[0], self.path)  # before it takes the place of the other, which is locked until then

        try:
            write_atomically(self.path, write)
        finally:  # whatever failed: what is at the path is what steps are written to
            for file in kept:
                placed = _is_at(file, self.path)
                os.close(self._file if placed else file)
                self._file = file if placed else self._file

    def add(self, step: int) -> None:
        """Note that this step is about to be taken."""
        if self._file < 0:
            raise PrivacyError(
                f"the run was closed: its journal, {self.path}, takes no more steps. Load the file again"
            )
        line = b"\n%d" % step  # begins a line, so that it stays one of its own after another that was cut short
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self.path} cannot be written: the step is not taken")
        os.fsync(self._file)

    def close(self) -> None:
        """Leave it to others; one that was never begun is taken away."""
        if self._file < 0:
            return
        if _LOCKS and not os.fstat(self._file).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1

    __del__ = close


def read_journal(path: Path) -> tuple[dict[str, Any], int]:
    """The run's state when the journal began, and the number of the last step that it knows of."""
    header, _, lines = path.read_bytes().partition(b"\n")
    try:
        state = json.loads(header)
        spent = int(state["spent"])
    except (ValueError, KeyError, TypeError) as error:
        raise PrivacyError(f"{path} is no journal of a run, or is damaged: its first line cannot be read") from error
    # A line that was cut short stands for a step as well: it had begun.
    return state, spent + len([line for line in lines.split(b"\n") if line])


def _claimed(path: Path) -> int:
    """The file at `path`, open and locked; made if it is not there."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            _lock(file, path)
            # Between opening and locking it another run may have put a new one in its place, or taken it away.
            if _is_at(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file), path.stat())


def _lock(file: int, path: Path) -> None:
    """One run at a time has a journal: a second one's steps would be lost."""
    if not _LOCKS:
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PrivacyError(
            f"{path} is written by a run that is alive, here or in another process: end it, or close() it"
        ) from error


_LOCKS = importlib.util.find_spec("fcntl") is not None


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
