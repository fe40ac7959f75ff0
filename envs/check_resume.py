"""Checks that an episode which goes on elsewhere goes on as it would have here: snapshots, replay, interruption.

Each way that an episode has is compared with the same episode played from its start to its end. Called by
`asyncrl.envs.check_process`.
"""

from __future__ import annotations

import json
from functools import partial

from asyncrl.envs.base import Interruptible, Replays, Snapshots, Step
from asyncrl.envs.check_player import Broken, Player, Trace, difference
from asyncrl.envs.check_scripts import Script
from asyncrl.messages import Task

SNAPSHOT_BYTES = 65_536


async def resumed(player: Player, task: Task, script: Script, trace: Trace) -> None:
    """An episode that goes on elsewhere must go on as it would have here."""
    where = f"task {task.id}, {script.title}"
    try:
        env = player.make(where)
        has = isinstance(env, Snapshots), isinstance(env, Replays), isinstance(env, Interruptible)
        await player.close(env, where)
        if has[0]:
            await _snapshots(player, task, script, trace, where)
        if has[1]:
            await _replays(player, task, script, trace, where)
        if has[2]:
            await _interrupted(player, task, script, where)
    except Broken:
        return
    if not any(has):
        text = "no snapshots and no replay: an episode that goes on elsewhere repeats its finished turns"
        player.tell("note", text)


async def _snapshots(player: Player, task: Task, script: Script, trace: Trace, where: str) -> None:
    """A snapshot after the reset and after each turn, each restored in an unused episode."""
    env, blobs, steps = player.make(where), list[bytes](), list[Step]()
    try:
        await player.reset(env, task, where)
        for message in script.messages[: len(trace.steps)]:
            assert isinstance(env, Snapshots)
            blobs.append(await player.ask("snapshot", env.snapshot, bytes, where))
            steps.append(await player.step(env, message, where))
    finally:
        await player.close(env, where)
    _same(player, trace, steps, 0, "an episode of which snapshots are taken")
    for turn, blob in enumerate(blobs):
        _blob(player, blob, where)
        env = player.make(where)
        try:
            assert isinstance(env, Snapshots)
            await player.ask("restore", partial(env.restore, task, blob), object, where)
            rest = await player.go_on(env, script.messages[turn:], where)
        finally:
            await player.close(env, where)
        _same(player, trace, rest, turn, "an episode restored from a snapshot")


def _blob(player: Player, blob: bytes, where: str) -> None:
    """A snapshot travels and is kept, so it is small and no pickle."""
    if len(blob) > SNAPSHOT_BYTES:
        text = f"a snapshot has {len(blob)} bytes; one is kept for every turn, so make it smaller ({where})"
        player.problem("snapshot size", text)
    if blob[:1] == b"\x80" and blob[1:2] in b"\2\3\4\5" and blob[-1:] == b".":
        text = "a snapshot is a pickle, which runs code of whoever sent it; use JSON or msgpack"
        player.problem("snapshot pickle", text)


async def _replays(player: Player, task: Task, script: Script, trace: Trace, where: str) -> None:
    """The recorded answers of each number of finished turns, given to an unused episode."""
    for turn in range(1, len(trace.steps)):
        env = player.make(where)
        try:
            await player.reset(env, task, where)
            for message, step in zip(script.messages[:turn], trace.steps, strict=False):
                assert isinstance(env, Replays)
                await player.ask("replay", partial(env.replay, message, step), object, where)
            rest = await player.go_on(env, script.messages[turn:], where)
        finally:
            await player.close(env, where)
        _same(player, trace, rest, turn, "an episode with replayed turns")


async def _interrupted(player: Player, task: Task, script: Script, where: str) -> None:
    """The first message, which an earlier process may have begun to answer."""
    env = player.make(where)
    try:
        await player.reset(env, task, where)
        assert isinstance(env, Interruptible)
        await player.ask("interrupted", partial(env.interrupted, script.messages[0]), Step, where)
    finally:
        await player.close(env, where)


def _same(player: Player, trace: Trace, steps: list[Step], turn: int, what: str) -> None:
    """Compares the answers from a turn on."""
    wanted, given = json.dumps(trace.answers(turn)), json.dumps(Trace(trace.start, steps).answers())
    if wanted != given:
        text = f"{what} goes on in another way after turn {turn} ({difference(wanted, given)})"
        player.problem(what, text)
