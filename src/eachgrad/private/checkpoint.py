"""Files that survive a kill: a checkpoint that is whole or absent, and a journal of the steps since.

The journal has a line for each step, written and flushed to the disk before the step draws its noise. After a kill the
steps that no checkpoint holds are still counted, since what they gave away may have been seen.
"""

from __future__ import annotations

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
    """The steps of a run since its last checkpoint, one line each, and before them what the run had spent then."""

    _file = -1  # closed

    def __init__(self, path: Path, state: dict[str, Any], spent: int):
        self.path = path
        header = json.dumps({**state, "spent": spent})
        write_atomically(path, lambda file: file.write(header.encode()))
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            _lock(self._file, path)
        except BaseException:
            self.close()
            raise

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
        if self._file >= 0:
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


def in_use(path: Path) -> bool:
    """Whether a run that is alive writes this journal."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        _lock(file, path)
    except PrivacyError:
        return True
    finally:
        os.close(file)
    return False


def _lock(file: int, path: Path) -> None:
    """One run at a time writes a journal: a second one's steps would be lost. The lock goes with the process."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PrivacyError(
            f"{path} is being written by a run that is alive, here or in another process: end it, or call its close()"
        ) from error


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
