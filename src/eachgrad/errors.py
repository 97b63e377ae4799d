"""The errors of the library: each names the parameter, the op, the place and the way out."""


class EachgradError(RuntimeError):
    """Base of every error that this library raises on purpose."""


class CaptureError(EachgradError):
    """The recorded forward cannot be turned into per-sample gradients; the message says why."""


class UnsupportedOp(CaptureError):
    """A parameter meets the batch in an op that has no rule."""


def first_line(error: Exception) -> str:
    """What somebody else's error says, in short."""
    error = getattr(error, "inner_exception", error)  # what a compiler's failure was about
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
