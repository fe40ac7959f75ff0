"""The environment worker: one process that serves an environment to generators and hub over ZeroMQ.

For ecosystems whose dependencies conflict with the engines': it needs msgspec, pyzmq and pydantic, no torch.

    main thread                     episodes-0, episodes-1, …             tasks
    ROUTER, heartbeats,     ──▶     an event loop each; an episode        task() and demonstration(),
    silent clients                  stays on the one it was given         one at a time

What blocks: an environment whose `async` methods block holds up the episodes of its own thread, never the socket,
the tasks or another thread; `--threads` says how many threads there are. One is the default, for that is what an
environment sees in a generator: episodes may share what belongs to an event loop. Code that keeps Python's global
lock (a C extension) holds up everything.

It keeps nothing on disk. An episode ends when its client closes it or was silent for `silence_s`, and with the
worker. Beyond loopback it has CURVE keys (`asyncrl.keys`): `--key FILE`. Started as `asyncrl env-worker`.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

import zmq
import zmq.asyncio

from asyncrl import keys
from asyncrl.envs import registry, worker_messages
from asyncrl.envs.base import (
    Demonstrates,
    Environment,
    Interruptible,
    Replays,
    Snapshots,
    Split,
    Truncates,
)
from asyncrl.envs.worker_episode import Episode, Thread, checked, failed
from asyncrl.envs.worker_messages import Alive, Answer, Call, Cancel, Demonstrate, Describe, Done, Draw, Heartbeat
from asyncrl.process import EXIT_USAGE
from asyncrl.transport import AT_ONCE, configure

CLOSE_S = 5.0
"""Longest wait, at the end of the worker, for all episodes to close, and again for what they left running."""
MOST_RUNNING = 8192
"""Requests of one client that are worked on at a time; one beyond that is dropped: its client finds it lost."""
OPTIONAL = (Snapshots, Replays, Interruptible, Truncates)

Sender = tuple[bytes, int]
"""A client and its number of a request, or of an episode."""


class Worker:
    """Serves an environment. `await run()` returns when `stop` was called, with all episodes closed.

    Args:
        environment: what is served.
        name: what it is called in messages.
        endpoint: `tcp://host:port` to listen at.
        threads: threads for the episodes.
        silence_s: the episodes of a client that said nothing for so long are closed.

    Raises:
        zmq.ZMQError: the address is taken, or none of this machine's.
        UsageError: it is not on loopback, and this process has no key.
    """

    def __init__(self, environment: Environment, name: str, endpoint: str, threads: int, silence_s: float) -> None:
        self.malformed = 0
        """Messages that were no requests, and were dropped."""
        self._environment, self._name, self._silence_s = environment, name, silence_s
        self._optional: list[str] = []
        self._episodes: dict[Sender, tuple[Episode, Thread]] = {}
        self._running: dict[Sender, Future[bytes]] = {}
        self._asked: Counter[bytes] = Counter()
        """How many of them each client has asked for."""
        self._seen: dict[bytes, float] = {}
        """When each client was last heard."""
        self._stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        configure(self._socket, keys=keys.for_endpoint(endpoint))
        # A client that reconnects takes the place of its lost connection.
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(endpoint)
        self._threads = [Thread(f"episodes-{number}") for number in range(threads)]
        self._tasks = Thread("tasks")

    @property
    def open_episodes(self) -> int:
        """How many there are."""
        return len(self._episodes)

    def stop(self) -> None:
        """Ends `run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Answers requests.

        Raises:
            Exception: what making and closing an unused episode raised.
        """
        await asyncio.wrap_future(self._threads[0].submit(self._look()))
        work = {asyncio.create_task(self._receive()), asyncio.create_task(self._sweep())}
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait({*work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            for task in (*work, stopped):
                task.cancel()
            await _within(CLOSE_S, [self._end(key) for key in list(self._episodes)])
            await _within(CLOSE_S, [thread.submit(thread.stop()) for thread in self._threads])
            self._socket.close()

    async def _look(self) -> bytes:
        """Finds out, from an unused episode, which optional methods there are."""
        env = self._environment.make()
        self._optional = [kind.__name__ for kind in OPTIONAL if isinstance(env, kind)]
        if isinstance(self._environment, Demonstrates):
            self._optional.append(Demonstrates.__name__)
        await env.close()
        return b""

    # ---- requests --------------------------------------------------------------------------------

    async def _receive(self) -> None:
        for number in count(1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)  # What is there is received without a pause; others have their turn here.
            peer, *frames = await self._socket.recv_multipart()
            request = worker_messages.request_of(frames[0]) if len(frames) == 1 else None
            if request is None:
                self.malformed += 1
                continue
            self._seen[peer] = self._loop.time()
            match request:
                case Heartbeat():
                    unknown = [number for number in request.waiting if (peer, number) not in self._running]
                    self._send(peer, Alive(unknown))
                case Cancel():
                    if (running := self._running.get((peer, request.request))) is not None:
                        running.cancel()
                case Describe():
                    self._send(peer, worker_messages.Description(request.request, self._name, self._optional))
                case Draw():
                    self._answer(peer, request.request, partial(self._in_turn, self._draw, request))
                case Demonstrate():
                    self._answer(peer, request.request, partial(self._in_turn, self._show, request))
                case Call():
                    self._answer(peer, request.request, partial(self._call, peer, request))

    def _call(self, peer: bytes, call: Call) -> Future[bytes]:
        key = (peer, call.episode)
        if key not in self._episodes:
            if not call.opens:
                return self._unknown(call)
            thread = min(self._threads, key=lambda thread: thread.episodes)
            thread.episodes += 1
            self._episodes[key] = Episode(self._environment), thread
        if call.method == "close":
            return self._end(key, call.request)
        episode, thread = self._episodes[key]
        return thread.submit(episode.answer(call))

    def _unknown(self, call: Call) -> Future[bytes]:
        answer: Future[bytes] = Future()
        text = (
            f"the environment worker does not know this episode: it was started anew meanwhile, or heard nothing "
            f"of its client for more than {self._silence_s:g} s"
        )
        gone = worker_messages.Failed(call.request, "ToolFault", text)
        answer.set_result(worker_messages.encode(Done(call.request) if call.method == "close" else gone))
        return answer

    def _end(self, key: Sender, request: int = 0) -> Future[bytes]:
        """Forgets an episode, stops what it does, and closes it."""
        episode, thread = self._episodes.pop(key)
        thread.episodes -= 1
        return thread.submit(episode.end(request))

    # ---- tasks -----------------------------------------------------------------------------------

    def _in_turn(self, question: Callable[[Any], Done], asked: Draw | Demonstrate) -> Future[bytes]:
        async def work() -> bytes:
            try:
                return checked(question(asked))
            except BaseException as error:  # Whatever it is, it is the environment's.
                return failed(asked.request, error)

        return self._tasks.submit(work())

    def _draw(self, asked: Draw) -> Done:
        split: Split = asked.split  # type: ignore[assignment]
        return Done(asked.request, task=self._environment.task(split, asked.index))

    def _show(self, asked: Demonstrate) -> Done:
        if not isinstance(self._environment, Demonstrates):
            # No client of ours asks for what the description does not have; it is told, and nothing else happens.
            raise NotImplementedError("the environment has no demonstrations")
        shown = self._environment.demonstration(asked.task)
        return Done(asked.request, text=shown) if isinstance(shown, str) else Done(asked.request, messages=shown)

    # ---- answers ---------------------------------------------------------------------------------

    def _answer(self, peer: bytes, request: int, begin: Callable[[], Future[bytes]]) -> None:
        """Begins to work on a request, and sends the answer when there is one."""
        key = (peer, request)
        if key in self._running:
            return  # Sent again by a client that got impatient.
        if self._asked[peer] >= MOST_RUNNING:
            self.malformed += 1
            return
        self._asked[peer] += 1
        future = self._running[key] = begin()

        def finished() -> None:
            del self._running[key]
            self._asked[peer] -= 1
            if not self._asked[peer]:
                del self._asked[peer]
            if not future.cancelled() and not self._socket.closed:
                self._socket.send_multipart([peer, future.result()], zmq.NOBLOCK)

        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(finished))

    def _send(self, peer: bytes, answer: Answer) -> None:
        self._socket.send_multipart([peer, worker_messages.encode(answer)], zmq.NOBLOCK)

    # ---- clients that are gone -------------------------------------------------------------------

    async def _sweep(self) -> None:
        pause = min(1.0, self._silence_s / 4)
        while True:
            due = self._loop.time() + pause
            await asyncio.sleep(pause)
            # While this process did not run it heard nobody; that is not their silence.
            late = self._loop.time() - due
            self._seen = {peer: seen + late for peer, seen in self._seen.items()}
            since = self._loop.time() - self._silence_s
            for peer in [peer for peer, seen in self._seen.items() if seen < since]:
                self._abandon(peer)

    def _abandon(self, peer: bytes) -> None:
        del self._seen[peer]
        left = [key for key in self._episodes if key[0] == peer]
        for key in left:
            self._end(key)
        if left:
            print(
                f"env-worker: a client was silent for {self._silence_s:g} s; its {len(left)} episodes are closed",
                flush=True,
            )


async def _within(limit_s: float, futures: list[Future[bytes]]) -> None:
    if futures:
        await asyncio.wait([asyncio.wrap_future(future) for future in futures], timeout=limit_s)


async def serve(name: str, args: Mapping[str, Any], endpoint: str, threads: int, silence_s: float) -> int:
    """Serves an environment until SIGINT or SIGTERM; returns the exit status."""
    began = time.monotonic()
    try:
        environment = await asyncio.to_thread(registry.load, name, args)
        worker = Worker(environment, name, endpoint, threads, silence_s)
    except (registry.PluginError, zmq.ZMQError) as error:
        print(f"env-worker: {name} cannot be served at {endpoint}: {error}", flush=True)
        # A predecessor that was killed gives its address back in time; everything else stays as it is.
        return 1 if getattr(error, "errno", None) == errno.EADDRINUSE else EXIT_USAGE
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    print(f"env-worker: {name} at {endpoint} after {time.monotonic() - began:.1f} s", flush=True)
    try:
        await worker.run()
    except Exception as error:
        print(f"env-worker: {name} cannot make an episode: {type(error).__name__}: {error}", flush=True)
        return EXIT_USAGE
    return 0
