"""A small text adventure: find the way through a house, with a key for its one locked door, to the treasure.

    user: You are in the attic. Exits: north, east (locked). Here is a key.        assistant: take key
    user: You take the key. You are in the attic. Exits: north, east (locked).     assistant: unlock east   …

The rooms are a maze on a grid, drawn from the task's seed, without circles, so the door is always in the way.
The reward is 1 in the room of the treasure; an episode that is cut off (`env.max_turns`) gets 0. With `shaped`,
each turn also has the `progress` that it made on the shortest way: it sums up to 1 at the treasure and changes no
best policy, being a difference of potentials (Ng, Harada, Russell 1999). What is no command is answered, and costs
a turn. Training and evaluation have different seeds. An episode keeps snapshots. Called through the entry point
`text-game`.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.envs.arguments import check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.drawn import seed_task
from asyncrl.messages import Task

DIRECTIONS = {"north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0)}
NAMES = (
    "attic bathroom bedroom cellar chapel corridor den foyer gallery garage garden gym hall kitchen larder "
    "laundry library lobby loft lounge nursery office pantry parlor pool porch sauna stable study terrace "
    "theater tower vault veranda workshop yard"
)
COMMANDS = "go north (or east, south, west), take key, unlock north (or east, ...), look"
Room = tuple[int, int]


class Place(NamedTuple):
    """The state of an episode."""

    room: Room
    has_key: bool
    is_open: bool


@dataclass(frozen=True, slots=True)
class House:
    """The rooms, and what is in them; it never changes."""

    names: dict[Room, str]
    exits: dict[Room, dict[str, Room]]
    start: Room
    treasure: Room
    key: Room | None
    """None: no door is locked."""
    door: frozenset[Room]
    """The two rooms that the locked door is between."""

    @property
    def beginning(self) -> Place:
        """Where an episode begins."""
        return Place(self.start, False, self.key is None)

    def look(self, place: Place) -> str:
        """What there is to see."""
        here = self.exits[place.room]
        exits = ", ".join(f"{way}{self._lock(place, to)}" for way, to in here.items())
        key = " Here is a key." if place.room == self.key and not place.has_key else ""
        return f"You are in the {self.names[place.room]}. Exits: {exits}.{key}"

    def act(self, place: Place, command: str) -> tuple[Place, str] | None:
        """The place after a command, and what is said first; None: it is no command."""
        verb, _, way = command.lower().strip().rstrip(".!").partition(" ")
        to = self.exits[place.room].get(way)
        if verb == "look" and not way:
            return place, ""
        if (verb, way) == ("take", "key"):
            there = place.room == self.key and not place.has_key
            return (place._replace(has_key=True), "You take the key. ") if there else (place, "There is no key. ")
        if verb not in ("go", "unlock") or way not in DIRECTIONS:
            return None
        if to is None:
            return place, f"There is no exit to the {way}. "
        locked = bool(self._lock(place, to))
        if verb == "go":
            return (place, "The door is locked. ") if locked else (place._replace(room=to), "")
        if not locked or not place.has_key:
            return place, "You have no key. " if locked else "There is nothing to unlock. "
        return place._replace(is_open=True), "You unlock the door. "

    def solve(self, place: Place) -> list[str]:
        """The shortest list of commands from a place to the treasure."""
        before: dict[Place, tuple[Place, str] | None] = {place: None}
        queue = deque([place])
        while queue[0].room != self.treasure:
            here = queue.popleft()
            moves = [f"{verb} {way}" for verb in ("go", "unlock") for way in self.exits[here.room]]
            for command in ("take key", *moves):
                there, _ = self.act(here, command) or (here, "")
                if there not in before:
                    before[there] = here, command
                    queue.append(there)
        commands, step = [], before[queue[0]]
        while step is not None:
            commands.append(step[1])
            step = before[step[0]]
        return commands[::-1]

    def _lock(self, place: Place, to: Room) -> str:
        return " (locked)" if not place.is_open and {place.room, to} == self.door else ""


@dataclass(frozen=True, slots=True)
class TextGame:
    """The environment."""

    width: int
    height: int
    locked: bool
    shaped: bool
    seed: int

    def house(self, task: Task) -> House:
        """The house of a task."""
        return build(self.width, self.height, self.locked, random.Random(task.metadata["seed"]))

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th house; there are always more. Its answer is the length of the shortest solution.

        Raises:
            ValueError: the split is neither `train` nor `eval`, or the index is negative.
        """
        task = seed_task("text-game", self.seed, split, index)
        house = self.house(task)
        text = f"Find the treasure. Commands: {COMMANDS}. One in each message.\n{house.look(house.beginning)}"
        answer = len(house.solve(house.beginning))
        return Task(task.id, [{"role": "user", "content": text}], answer, task.metadata)

    def make(self) -> TextGameEnv:
        """A new, unused episode."""
        return TextGameEnv(self)

    def demonstration(self, task: Task) -> list[Message]:
        """The shortest solution, as messages."""
        house = self.house(task)
        place, said = house.beginning, list[Message]()
        for command in house.solve(place):
            place, told = house.act(place, command) or (place, "")
            said.append({"role": "assistant", "content": command})
            said.append({"role": "user", "content": told + house.look(place)})
        return said[:-1]


class TextGameEnv:
    """One episode."""

    def __init__(self, environment: TextGame) -> None:
        self._environment = environment
        self._house: House | None = None
        self._place = Place((0, 0), False, False)

    async def reset(self, task: Task) -> Start:
        """Shows the first room."""
        self._house = self._environment.house(task)
        self._place = self._house.beginning
        return Start(messages=list(task.prompt))

    async def step(self, message: Message) -> Step:
        """Does what the last line of the message says."""
        if self._house is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        house, before, said = self._house, self._place, message.get("content")
        lines = said.strip().splitlines() if isinstance(said, str) else []
        acted = house.act(before, lines[-1]) if lines else None
        self._place, told = acted or (before, f"That is no command. Commands: {COMMANDS}. ")
        rewards: dict[str, float | None] = {"progress": self._progress(before)} if self._environment.shaped else {}
        if self._place.room == house.treasure:
            return Step(True, rewards | {"treasure": 1.0})
        answer = {"role": "user", "content": told + house.look(self._place)}
        return Step(False, rewards, [answer], {"unknown_commands": float(acted is None)})

    async def truncated(self, status: str) -> dict[str, float | None]:
        """The treasure was not found."""
        return {"treasure": 0.0}

    async def snapshot(self) -> bytes:
        """The place, as JSON."""
        return json.dumps(self._place).encode()

    async def restore(self, task: Task, blob: bytes) -> None:
        """Goes to the place."""
        self._house = self._environment.house(task)
        (x, y), has_key, is_open = json.loads(blob)
        self._place = Place((x, y), has_key, is_open)

    async def close(self) -> None:
        """Holds nothing."""

    def _progress(self, before: Place) -> float:
        house = self._house
        assert house is not None  # `step` has checked it.
        left, now, whole = (len(house.solve(place)) for place in (before, self._place, house.beginning))
        return (left - now) / whole


def build(width: int, height: int, locked: bool, draw: random.Random) -> House:
    """A house: a maze by random depth-first search, the treasure in the room that is farthest from the start."""
    rooms = [(x, y) for y in range(height) for x in range(width)]
    names = dict(zip(rooms, draw.sample(NAMES.split(), len(rooms)), strict=True))
    start = draw.choice(rooms)
    exits, ways = _maze(rooms, start, draw)
    treasure = max(rooms, key=lambda room: len(ways[room]))
    key, door = None, frozenset[Room]()
    if locked:
        way = ways[treasure]
        place = draw.randrange(1, len(way))
        door = frozenset(way[place - 1 : place + 1])
        # The key is on this side of the door: where the way does not lead through it.
        key = draw.choice([room for room in rooms if not door <= set(ways[room])])
    return House(names, exits, start, treasure, key, door)


def _maze(
    rooms: list[Room], start: Room, draw: random.Random
) -> tuple[dict[Room, dict[str, Room]], dict[Room, list[Room]]]:
    """The exits of each room, and the rooms on the way to it from the start, both ends included."""
    ways, stack = {start: [start]}, [start]
    while stack:
        x, y = stack[-1]
        near = [(x + dx, y + dy) for dx, dy in DIRECTIONS.values()]
        free = [room for room in near if room in rooms and room not in ways]
        if not free:
            stack.pop()
            continue
        room = draw.choice(free)
        ways[room] = [*ways[stack[-1]], room]
        stack.append(room)
    joined = {frozenset(way[-2:]) for way in ways.values() if len(way) > 1}
    exits = {
        (x, y): {
            name: (x + dx, y + dy)
            for name, (dx, dy) in DIRECTIONS.items()
            if frozenset([(x, y), (x + dx, y + dy)]) in joined
        }
        for x, y in rooms
    }
    return exits, ways


def make(width: int = 3, height: int = 3, locked: bool = True, shaped: bool = False, seed: int = 0) -> TextGame:
    """The entry point.

    Args:
        width: rooms from west to east, 1 to 6.
        height: rooms from north to south, 1 to 6; there must be two rooms at least.
        locked: a locked door is on the way.
        shaped: each turn is rewarded with the progress that it made.
        seed: another one gives other houses.

    Raises:
        ValueError: an argument is out of its range.
    """
    for name, value in (("width", width), ("height", height)):
        check_whole(name, value, 1, 6)
    if width * height < 2:
        raise ValueError("env.args.width = 1, env.args.height = 1: there must be two rooms at least")
    for name, value in (("locked", locked), ("shaped", shaped)):
        if not isinstance(value, bool):
            raise ValueError(f"env.args.{name} = {value!r}: must be true or false")
    check_whole("seed", seed)
    return TextGame(width, height, locked, shaped, seed)
