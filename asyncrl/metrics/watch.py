"""Shows a run while it goes on, and feeds the trackers, from a thread of the supervisor's process.

    run.db ──▶ watcher thread ──▶ terminal (rich, 4 times a second) or a plain line every few seconds
                              └─▶ trackers (`asyncrl.metrics.trackers`)

The thread only reads run.db, through a connection of its own, so it can neither slow down nor break the
run. Called by `asyncrl train`.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live

from asyncrl.config import Config
from asyncrl.metrics.reader import RunReader
from asyncrl.metrics.trackers import Tail, open_trackers
from asyncrl.metrics.view import LEGEND, Feed, line, render

DRAW_S = 0.25
LINE_S = 5.0
TRACK_S = 2.0
JOIN_S = 30.0


class Watcher:
    """Follows a run for as long as the `with` block lasts, then draws the last state once more.

    Args:
        config: the run's configuration; names the trackers.
        run_dir: the run's folder, in which run.db exists.
        plain: lines instead of the live view.
    """

    def __init__(self, config: Config, run_dir: Path, *, plain: bool) -> None:
        self._config, self._run_dir, self._plain = config, run_dir, plain
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            with RunReader(self._run_dir) as reader:
                feed = Feed(reader)
                tail = Tail(reader, open_trackers(self._config, self._run_dir))
                (self._lines if self._plain else self._live)(feed, tail)
                tail.finish()
        except sqlite3.Error as error:  # The fault boundary of a damaged journal: the hub says what then.
            print(f"the view of the run ends here: run.db cannot be read: {error}", flush=True)

    def _live(self, feed: Feed, tail: Tail) -> None:
        console = Console()
        with Live(console=console, auto_refresh=False, transient=False) as live:
            track_at = 0.0
            while True:
                over = self._stop.wait(DRAW_S)
                width = min(120, console.width)
                live.update(render(feed.snapshot(time.time()), width), refresh=True)
                if over:
                    return
                if time.monotonic() >= track_at:
                    tail.pull()
                    track_at = time.monotonic() + TRACK_S

    def _lines(self, feed: Feed, tail: Tail) -> None:
        print(LEGEND, flush=True)
        while True:
            over = self._stop.wait(LINE_S)
            print(line(feed.snapshot(time.time())), flush=True)
            if over:
                return
            tail.pull()
