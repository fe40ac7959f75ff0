"""What can go wrong with an update. Raised by the learner's models, caught by its process."""

from __future__ import annotations


class NotFinite(RuntimeError):
    """A loss or a gradient norm is not finite; that update was not applied. Raised on every rank."""

    def __init__(self, step: int, batch_id: int, what: str) -> None:
        super().__init__(
            f"step {step}: {what} is not finite on batch {batch_id}; the update was not applied. A lower learning "
            "rate of that model, or model.dtype = 'float32', is the usual remedy."
        )
        self.step, self.batch_id, self.what = step, batch_id, what
