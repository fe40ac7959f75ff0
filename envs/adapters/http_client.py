"""POST requests of one episode: JSON out, text back, with the cookies of its session and a time limit.

Called by `asyncrl.envs.adapters.nemo_gym`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from asyncrl.envs.base import ToolFault

if TYPE_CHECKING:
    import aiohttp


class HttpClient:
    """A client, opened by its first request.

    Args:
        url: what all addresses begin with.
        limit_s: of each request that is given no limit of its own, in seconds.
    """

    def __init__(self, url: str, limit_s: float) -> None:
        self._url = url
        self._limit_s = limit_s
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, data: dict[str, Any], limit_s: float | None = None) -> tuple[int, str]:
        """Sends JSON; returns the status and the body, whatever they are.

        Args:
            path: goes behind the client's address.
            data: the JSON object.
            limit_s: of this request; None: the client's.

        Raises:
            ToolFault: there is no answer, or not in time.
        """
        import aiohttp

        if self._session is None:
            # Servers of NeMo-Gym are often told by their number, whose cookies a careful jar would drop.
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=aiohttp.ClientTimeout(total=None)
            )
        address = f"{self._url}{path}"
        limit = self._limit_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit), self._session.post(address, json=data) as response:
                return response.status, await response.text(errors="replace")
        except TimeoutError:
            raise ToolFault(f"POST {address}: no answer within env.args.timeout_s = {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ToolFault(f"POST {address}: no answer: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Closes the connections."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limit_s):
                    await session.close()
