"""What a run looks like while it goes on: a snapshot of run.db, and pure functions that draw it.

    run.db ──Feed.snapshot(now)──▶ Snapshot ──render──▶ rich renderable   (terminal)
                                            └─line────▶ one plain line    (anything else)

`Feed` reads only what is new since its last call. Unknown metric names are ignored and missing ones are
left blank, so that the view works with any generator or learner. Called by `asyncrl.metrics.watch`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncrl.metrics.format import bar, count, duration, histogram, reasons, sparkline
from asyncrl.metrics.reader import MetricRow, RunReader, StepRow, VersionRow

WINDOW_S = 10.0
"""Rates and shares are means over this much of the past."""
COUNT_S = 5.0
"""Episodes are counted this often: it means a walk over all of them, which 4 times a second would be felt."""
WINDOW_STEPS = 20
"""The lag histogram and the learner's shares cover this many steps."""
LAG_PREFIX = "lag_hist/"


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """How one process spent the last seconds; the three shares add up to at most 1."""

    name: str
    busy: float
    waiting: float
    paused: float
    tokens_per_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is shown at one moment."""

    name: str
    algo: str
    env: str
    state: str
    elapsed_s: float
    step: int
    steps: int
    rewards: Sequence[float]
    """By step: mean over all episodes that ended since the step before, filtered ones included."""
    processes: Sequence[ProcessShare]
    gauges: Mapping[str, float]
    """The hub's latest report."""
    learner: Mapping[str, float]
    """The latest step's metrics."""
    lag: Mapping[int, float]
    """Trained tokens by lag, over the last steps."""
    episodes: Mapping[str, int]
    """Episodes by state."""
    drops: Mapping[str, int]
    """Episodes that were filtered or failed, by reason."""
    steps_per_min: float = 0.0
    syncs: Sequence[VersionRow] = ()
    deaths: Mapping[str, int] = field(default_factory=dict)
    """How often each process died."""
    last_event: str = ""

    @property
    def reward(self) -> float | None:
        """Mean reward of the last 10 steps."""
        recent = self.rewards[-10:]
        return sum(recent) / len(recent) if recent else None

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of all generators."""
        return sum(process.tokens_per_s for process in self.processes)


class Feed:
    """Follows one run; `snapshot` reads what is new. It belongs to one thread, like its reader."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        config = reader.config()
        self._algo = str(config.get("algo", {}).get("name", ""))
        self._env = str(config.get("env", {}).get("name", ""))
        self._total = int(config.get("train", {}).get("steps", 0))
        self._metric_id = reader.last_metric_id()
        self._event_id = 0
        self._recent: deque[MetricRow] = deque()
        self._steps: deque[StepRow] = deque(maxlen=WINDOW_STEPS)
        self._step = 0
        self._rewards: list[float] = []
        self._hub: Mapping[str, float] = {}
        self._deaths: Counter[str] = Counter()
        self._last_event = ""
        self._count_at = 0.0
        self._episodes: Mapping[str, int] = {}
        self._drops: Mapping[str, int] = {}

    def snapshot(self, now: float) -> Snapshot:
        """Reads what is new. `now` is in seconds since the epoch."""
        self._read_metrics(now)
        self._read_steps()
        self._read_events()
        if now >= self._count_at:
            self._episodes, self._drops = fold_states(self._reader.episode_states())
            self._count_at = now + COUNT_S
        learner = self._steps[-1].metrics if self._steps else {}
        return Snapshot(
            name=self._reader.name,
            algo=self._algo,
            env=self._env,
            state=self._reader.status,
            elapsed_s=max(0.0, now - self._reader.created),
            step=self._step,
            steps=self._total,
            rewards=self._rewards,
            processes=[*generator_shares(self._recent), *learner_share(self._steps)],
            gauges=self._hub,
            learner=learner,
            lag=lag_of(self._steps),
            episodes=self._episodes,
            drops=self._drops,
            steps_per_min=steps_per_min(self._steps),
            syncs=self._reader.versions(last=WINDOW_STEPS),
            deaths=self._deaths,
            last_event=self._last_event,
        )

    def _read_metrics(self, now: float) -> None:
        for row in self._reader.metrics(self._metric_id):
            self._metric_id = row.id
            if row.source == "hub":
                self._hub = row.metrics
            else:
                self._recent.append(row)
        while self._recent and self._recent[0].time < now - WINDOW_S:
            self._recent.popleft()

    def _read_steps(self) -> None:
        for row in self._reader.steps(after=self._step):
            self._step = row.step
            self._steps.append(row)
            if "reward" in row.metrics:
                self._rewards.append(row.metrics["reward"])

    def _read_events(self) -> None:
        for event in self._reader.events(self._event_id):
            self._event_id = event.id
            self._deaths[event.source] += event.what == "died"
            if event.what not in ("started", "ended", "checkpoint", "weights_applied"):
                self._last_event = f"{event.source} {event.what} {event.detail}".strip()


# ---- from rows to numbers ------------------------------------------------------------------------


def fold_states(states: Mapping[tuple[str, str], int]) -> tuple[dict[str, int], dict[str, int]]:
    """Episodes by state, and the dropped ones by kind of reason (what stands before its first colon)."""
    by_state: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    for (state, reason), number in states.items():
        by_state[state] += number
        if state in ("filtered", "failed"):
            drops[f"{state}: {reason.partition(':')[0] or 'no reason'}"] += number
    return dict(by_state), dict(drops)


def generator_shares(rows: Sequence[MetricRow] | deque[MetricRow]) -> list[ProcessShare]:
    """Shares and rates of each generator over the heartbeats given, by name."""
    sums: dict[str, Counter[str]] = {}
    latest: dict[str, Mapping[str, float]] = {}
    for row in rows:
        sums.setdefault(row.source, Counter()).update(row.metrics)
        latest[row.source] = row.metrics
    shares = []
    for name in sorted(sums):
        total = sums[name]
        seconds = total["busy_s"] + total["waiting_s"] + total["paused_s"]
        if seconds <= 0:
            continue
        gauges = [f"{key} {latest[name][key]:.0f}" for key in ("live", "queued") if key in latest[name]]
        shares.append(
            ProcessShare(
                name=name,
                busy=total["busy_s"] / seconds,
                waiting=total["waiting_s"] / seconds,
                paused=total["paused_s"] / seconds,
                tokens_per_s=total["sampled_tokens"] / seconds,
                note=", ".join(gauges),
            )
        )
    return shares


def learner_share(steps: Sequence[StepRow] | deque[StepRow]) -> list[ProcessShare]:
    """The learner's share of training (busy), waiting for a batch, and gathering weights (paused)."""
    sums: Counter[str] = Counter()
    for row in steps:
        sums.update({key: row.metrics.get(key, 0.0) for key in ("train_s", "wait_s", "gather_s")})
    seconds = sum(sums.values())
    if seconds <= 0:
        return []
    note = f"train {1e3 * sums['train_s'] / len(steps):.0f} ms a step"
    return [
        ProcessShare(
            "learner", sums["train_s"] / seconds, sums["wait_s"] / seconds, sums["gather_s"] / seconds, 0, note
        )
    ]


def lag_of(steps: Sequence[StepRow] | deque[StepRow]) -> dict[int, float]:
    """Trained tokens by lag, summed over steps."""
    lags: Counter[int] = Counter()
    for row in steps:
        for key, tokens in row.metrics.items():
            if key.startswith(LAG_PREFIX):
                lags[int(key.removeprefix(LAG_PREFIX))] += int(tokens)
    return dict(sorted(lags.items()))


def steps_per_min(steps: Sequence[StepRow] | deque[StepRow]) -> float:
    """Rate of the steps given; 0 for fewer than two."""
    seconds = steps[-1].ended - steps[0].ended if len(steps) > 1 else 0.0
    return 60 * (len(steps) - 1) / seconds if seconds > 0 else 0.0


# ---- drawing -------------------------------------------------------------------------------------


def render(snapshot: Snapshot, width: int = 100) -> RenderableType:
    """The live view: a few lines and a table of the processes."""
    s = snapshot
    reward = "none yet" if s.reward is None else f"{s.reward:.3f}"
    done = s.step / s.steps if s.steps else 0.0
    rate = f"   {s.steps_per_min:.0f} steps/min" if s.steps_per_min else ""
    body = Table.grid(padding=(0, 2))
    body.add_column(style="bold", no_wrap=True)
    body.add_column(overflow="fold")
    # The range is at least 0 to 1, so that a flat reward is not blown up to look like a rise.
    low, high = min([0.0, *s.rewards]), max([1.0, *s.rewards])
    body.add_row("reward", Text(f"{reward}  {sparkline(s.rewards, max(10, width - 40), low, high)}", "green"))
    body.add_row("step", f"{s.step}/{s.steps}  {bar(done, 30)}   {duration(s.elapsed_s)}{rate}")
    for title, text in _facts(s):
        body.add_row(title, Text(text))
    head = Text.assemble((s.name, "bold"), f"  {s.algo} on {s.env}")
    return Panel(Group(body, "", _processes(s)), title=head, title_align="left", width=width)


def line(snapshot: Snapshot) -> str:
    """One line for a log."""
    s = snapshot
    parts = [f"step {s.step}/{s.steps}", duration(s.elapsed_s)]
    parts.append("reward -" if s.reward is None else f"reward {s.reward:.3f}")
    forms = ("loss", "loss {:.4f}"), ("entropy", "entropy {:.3f}"), ("lag_mean", "lag {:.2f}")
    for key, form in (*forms, ("env/tool_calls", "tool calls {:.2f}")):
        if key in s.learner:
            parts.append(form.format(s.learner[key]))
    parts.append(f"{count(s.tokens_per_s)} tokens/s")
    parts += [f"{p.name} {100 * p.busy:.0f}/{100 * p.waiting:.0f}/{100 * p.paused:.0f} %" for p in s.processes]
    parts.append(f"dropped {sum(s.drops.values())}")
    if any(s.deaths.values()):
        parts.append(f"deaths {sum(s.deaths.values())}")
    return "  ".join(parts)


LEGEND = "shares are busy/waiting/paused"


def _facts(s: Snapshot) -> list[tuple[str, str]]:
    learner = [
        f"{name} {s.learner[key]:.4g}"
        for key, name in (
            ("loss", "loss"),
            ("entropy", "entropy"),
            ("grad_norm", "gradient norm"),
            ("ess", "effective sample size"),
            ("turns", "turns"),
            ("env/tool_calls", "tool calls"),
            ("env/tool_errors", "tool errors"),
        )
        if key in s.learner
    ]
    flow = [f"{count(s.tokens_per_s)} tokens/s"]
    flow += [f"{count(s.episodes.get(state, 0))} {state}" for state in ("queued", "leased", "done", "trained")]
    mean_lag = f"   mean {s.learner['lag_mean']:.2f}" if "lag_mean" in s.learner else ""
    facts = [
        ("learner", ", ".join(learner) or "waits for its first batch"),
        ("flow", ", ".join(flow)),
        ("token lag", histogram(s.lag) + mean_lag),
        ("dropped", reasons(s.drops)),
        ("weights", _sync(s)),
    ]
    if "commit_ms" in s.gauges:
        facts.append(("hub", f"commit {s.gauges['commit_ms']:.1f} ms, {s.gauges.get('chunks', 0):.0f} chunks/s"))
    deaths = {name: number for name, number in s.deaths.items() if number}
    if deaths:
        facts.append(("restarts", reasons(deaths)))
    if s.last_event:
        facts.append(("last event", s.last_event))
    return facts


def _sync(s: Snapshot) -> str:
    if not s.syncs:
        return "none published yet"
    mean = sum(row.seconds for row in s.syncs) / len(s.syncs)
    last = s.syncs[-1]
    return f"version {last.version}, {count(last.nbytes)}B in {1e3 * mean:.0f} ms"


def _processes(s: Snapshot) -> Table:
    table = Table("process", "busy", "waiting", "paused", "tokens/s", "", box=None, header_style="dim")
    for p in s.processes:
        rate = count(p.tokens_per_s) if p.tokens_per_s else ""
        shares = ((p.busy, "green"), (p.waiting, "yellow"), (p.paused, "red"))
        cells = [Text(f"{bar(share, 10)} {100 * share:3.0f} %", colour) for share, colour in shares]
        table.add_row(Text(p.name), *cells, rate, p.note)
    return table
