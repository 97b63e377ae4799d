"""The errors of the library: each names the parameter, the op, the place and the way out."""

import re


class EachgradError(RuntimeError):
    """Base of every error that this library raises on purpose."""


class CaptureError(EachgradError):
    """The recorded forward cannot be turned into per-sample gradients; the message says why."""


class UnsupportedOp(CaptureError):
    """A parameter meets the batch in an op that has no rule."""


def first_line(error: Exception) -> str:
    """What somebody else's error says, in short."""
    error = getattr(error, "inner_exception", error)  # what a compiler's failure was about
    first, _, text = str(error).strip().partition("\n")
    # A compiler's front end has its own first line for every op, and which one it was further down.
    op = re.search(r"FX node with fake tensors: \w+ ([^\s(]+)", text)
    got = re.search(r": got (\w+\(.*)$", text, re.MULTILINE)
    more = "".join(f", {found[1][:200]}" for found in (op, got) if found)
    return f"{type(error).__name__}: {first}{more}"
