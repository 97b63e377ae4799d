"""What private training refuses."""

from eachgrad.errors import EachgradError


class PrivacyError(EachgradError):
    """What was asked has no valid privacy guarantee; the message says why, and what to do."""


class BudgetSpent(PrivacyError):
    """Every step that the guarantee covers has been taken."""
