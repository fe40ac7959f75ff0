"""What can go wrong with an update. Raised by the learner's models, caught by its process."""

from __future__ import annotations


class NotFinite(RuntimeError):
    """The loss or the gradient norm is not finite; nothing was applied. Raised on every rank."""

    def __init__(self, step: int, batch_id: int, what: str) -> None:
        super().__init__(
            f"step {step}: {what} of batch {batch_id} is not finite; the step was not applied and the batch is "
            "kept in run.db. A lower learner.lr, or model.dtype = 'float32', is the usual remedy."
        )
        self.step, self.batch_id, self.what = step, batch_id, what
