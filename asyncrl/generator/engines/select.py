"""Opens the engine that a configuration names.

The only place that knows which engines there are; each is imported only when it is chosen. Called by the
generator process and by `asyncrl eval`.
"""

from __future__ import annotations

import asyncio

from asyncrl.config import Config
from asyncrl.generator.engines.base import Engine


def open_engine(config: Config, model_path: str, loop: asyncio.AbstractEventLoop, version: int = 0) -> Engine:
    """Loads `model_path` into the configured engine; its weights count as `version`.

    May be called from any thread; the engine then belongs to `loop`.
    """
    import torch

    from asyncrl.generator.engines.driver import EngineDriver
    from asyncrl.generator.engines.transformers import TransformersEngine

    settings = config.generator
    torch.set_num_threads(settings.threads)
    engine = TransformersEngine(
        model_path,
        slots=settings.slots,
        max_model_len=settings.max_model_len,
        dtype=getattr(torch, config.model.dtype),
        device=settings.device,
        flush_tokens=settings.chunk_tokens,
        version=version,
    )
    return EngineDriver(engine, loop=loop)
