"""Where a bucket lies while it is broadcast: in its host buffer (Gloo), or in one of two device buffers (NCCL).

The only difference between the two backends. Held by a `Group`; used by `asyncrl.weights.transfer`.
"""

from __future__ import annotations

import torch


class Ring:
    """Places for the buckets of a transfer, used in turn."""

    def __init__(self, device: torch.device | None) -> None:
        """`device`: None for the host buffers themselves."""
        self._device = device
        # Allocated at once, if empty: a process that has used its GPU pins host buffers (`SharedBuffer`).
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    def slot(self, index: int, host: torch.Tensor) -> torch.Tensor:
        """Where bucket `index` of the transfer is broadcast; bucket `index + 2` will use the same place."""
        if self._device is None:
            return host
        if self._slots[index % 2].numel() < host.numel():
            self._slots[index % 2] = torch.empty_like(host, device=self._device)
        return self._slots[index % 2][: host.numel()]


def ring_for(backend: str) -> Ring:
    """The ring that a backend needs."""
    return Ring(torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None)
