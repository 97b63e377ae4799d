"""eachgrad.private: training with differential privacy (DP-SGD), with your own model, optimizer and loop.

run = eachgrad.private.make_private(model, optimizer, dataset, loss_fn=..., batch_size=64, epochs=10, target_epsilon=3.0,
                                    target_delta=1e-5)
for batch in run.loader:
    run.step(batch)
print(run.receipt())
"""

try:
    import dp_accounting as _needed  # noqa: F401
except ImportError as error:
    raise ImportError("eachgrad.private needs dp-accounting and tqdm: pip install 'eachgrad[private]'") from error

from eachgrad.private.accounting import Spent
from eachgrad.private.audit import Audit, audit
from eachgrad.private.clipping import Adaptive, Flat, Normalised, PerGroup
from eachgrad.private.errors import BudgetSpent, PrivacyError
from eachgrad.private.gathering import StepResult
from eachgrad.private.loading import Batch
from eachgrad.private.make import make_private
from eachgrad.private.receipt import Receipt
from eachgrad.private.run import Run

__all__ = [
    "Adaptive", "Audit", "Batch", "BudgetSpent", "Flat", "Normalised", "PerGroup", "PrivacyError", "Receipt", "Run", "Spent",
    "StepResult", "audit", "make_private",
]  # fmt: skip
