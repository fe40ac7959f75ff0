"""The puzzles of reasoning-gym: about a hundred generators of problems, each with its own scorer.

    asyncrl train --env reasoning-gym --env.args '{"task": "tiny-gcd"}'              a preset for tiny models
    {"task": "maze", "config": {"min_grid_size": 4, "max_grid_size": 4}}              any dataset, configured

Generators and scorers run in processes of their own (`asyncrl.envs.process_pool`): with a bad configuration some
generators never end, and the library prints. A task names its entry by seed and index, and the scorer makes the
entry anew, for not every entry can be said in JSON. Some scorers evaluate what the assistant wrote as a Python
expression (through sympy); the processes limit time and memory, and protect from nothing else.

Scorers are corrected in two ways. One that raises on an answer gives 0, and is counted. One that pays for junk has
what it pays subtracted, and the rest stretched to 1; where junk is worth 1, only the reference answer is. Partial
credit stays, and part of it is for length alone: the reference answer somewhere within the answer earns the ratio
of their lengths. `exact` pays nothing but the reference answer. Needs `pip install 'asyncrl[reasoning-gym]'`.
"""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

from asyncrl.envs.adapters.extras import load_extra
from asyncrl.envs.arguments import check_seconds, check_whole
from asyncrl.envs.base import Message, Split, Start, Step
from asyncrl.envs.drawn import check_task
from asyncrl.envs.process_pool import CallLost, CallRaised, ProcessPool
from asyncrl.envs.rewards import RewardFault
from asyncrl.messages import EpisodeStatus, Task

_ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
_TWO_NUMBERS = {"min_numbers": 2, "max_numbers": 2, "min_value": 1}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-basic-arithmetic": (
        "basic_arithmetic",
        {**_ONE_DIGIT, "operators": ["+"], "allow_parentheses": False},
    ),
    "tiny-number-sequence": ("number_sequence", {"max_complexity": 1, "min_terms": 4, "max_terms": 4}),
    "tiny-spell-backward": ("spell_backward", {"min_word_len": 3, "max_word_len": 3}),
    "tiny-simple-equations": (
        "simple_equations",
        {"min_terms": 1, "max_terms": 2, "min_value": 1, "max_value": 9},
    ),
    "tiny-lcm": ("lcm", {**_TWO_NUMBERS, "max_value": 10}),
    "tiny-chain-sum": ("chain_sum", _ONE_DIGIT),
    "tiny-count-bits": ("count_bits", {"min_n": 1, "max_n": 31}),
    "tiny-letter-counting": ("letter_counting", {"min_words": 2, "max_words": 4}),
    "tiny-products": ("products", _ONE_DIGIT),
    "tiny-gcd": ("gcd", {**_TWO_NUMBERS, "max_value": 20}),
}
"""Datasets configured for models of a few million weights: short questions, answers of one to four characters."""

JUNK = ("", "foo", "0", "[]", "{}")
"""What a scorer pays for the best of these it pays for nothing."""
CHUNK = 16
"""Entries that are generated at a time."""
INSTRUCTION = "Give your final answer between <answer> and </answer>."
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(slots=True)
class ReasoningGym:
    """The environment."""

    dataset: str
    config: dict[str, Any]
    sizes: dict[Split, int]
    seeds: dict[Split, int]
    exact: bool
    tags: bool
    limit_s: float
    pool: ProcessPool
    _chunks: dict[tuple[Split, int], list[tuple[str, str | None]]] = field(default_factory=dict)

    def task(self, split: Split, index: int) -> Task:
        """The `index`-th entry of a split; the training split begins again at its end.

        Raises:
            IndexError: the evaluation split has no more.
            ValueError: the split is neither `train` nor `eval`, or the index is negative.
            CallRaised: the generator raised.
            CallLost: the generator did not end in time.
        """
        check_task(split, index)
        if split == "eval" and index >= self.sizes[split]:
            raise IndexError(f"the split {split!r} has {self.sizes[split]} tasks, and no task {index}")
        number = index % self.sizes[split]
        question, answer = self._entry(split, number)
        prompt = [{"role": "user", "content": f"{question}\n{INSTRUCTION}" if self.tags else question}]
        metadata = {"split": split, "entry": number, "question": question}
        return Task(f"reasoning-gym/{self.dataset}/{split}/{number}", prompt, answer, metadata)

    def make(self) -> ReasoningGymEnv:
        """A new, unused episode."""
        return ReasoningGymEnv(self)

    def demonstration(self, task: Task) -> str:
        """The reference answer.

        Raises:
            ValueError: the dataset has none.
        """
        if task.answer is None:
            raise ValueError(f"reasoning-gym's {self.dataset!r} has no reference answers, so nothing to show")
        return f"<answer>{task.answer}</answer>" if self.tags else str(task.answer)

    async def score(self, task: Task, text: str) -> tuple[float, bool]:
        """The reward of an answer, and whether the scorer raised on it.

        Raises:
            CallLost: the scorer did not end in time.
            CallRaised: the library here makes another entry than the one that was asked.
        """
        split, entry, question = (task.metadata[key] for key in ("split", "entry", "question"))
        arguments = (*self._source(split), entry, question, text, self.exact)
        score, raised = await self.pool.acall(f"{__name__}:score", *arguments, limit_s=self.limit_s)
        return score, raised

    def _entry(self, split: Split, number: int) -> tuple[str, str | None]:
        chunk, place = divmod(number, CHUNK)
        if (split, chunk) not in self._chunks:
            numbers = list(range(chunk * CHUNK, min((chunk + 1) * CHUNK, self.sizes[split])))
            arguments = (*self._source(split), numbers)
            found = self.pool.call(f"{__name__}:generate", *arguments, limit_s=self.limit_s)
            self._chunks = {(split, chunk): found}  # Tasks are drawn in order: one chunk is enough.
        question, answer = self._chunks[split, chunk][place]
        return question, answer

    def _source(self, split: Split) -> tuple[str, str, int, int]:
        return self.dataset, json.dumps(self.config, sort_keys=True), self.seeds[split], self.sizes[split]


class ReasoningGymEnv:
    """One episode: a question, an answer, done."""

    def __init__(self, environment: ReasoningGym) -> None:
        self._environment = environment
        self._task: Task | None = None

    async def reset(self, task: Task) -> Start:
        """Shows the question."""
        self._task = task
        return Start(messages=list(task.prompt))

    async def step(self, message: Message) -> Step:
        """Scores the answer: the message without surrounding white space, or what stands between the last tags.

        Raises:
            RewardFault: the scorer did not end in time.
        """
        if self._task is None:
            raise RuntimeError("the episode was not reset; call reset(task) before step(message)")
        text = self._answer(message)
        if text is None:
            return Step(True, {"correct": 0.0}, info={"no_answer": 1.0})
        try:
            score, raised = await self._environment.score(self._task, text)
        except CallLost as lost:
            raise RewardFault(EpisodeStatus.FAILED_TIME, f"the answer was not scored: {lost}") from lost
        return Step(True, {"correct": score}, info={"scorer_raised": float(raised)})

    async def close(self) -> None:
        """Holds nothing; the processes belong to the environment."""

    def _answer(self, message: Message) -> str | None:
        content = message.get("content")
        text = content if isinstance(content, str) else ""
        if not self._environment.tags:
            return text.strip()
        tagged = _TAGGED.findall(text)
        return tagged[-1].strip() if tagged else None


def make(
    task: str = "tiny-basic-arithmetic",
    config: dict[str, Any] | None = None,
    size: int = 10_000,
    eval_size: int = 200,
    seed: int = 0,
    exact: bool | None = None,
    tags: bool = False,
    limit_s: float = 20.0,
    workers: int = 2,
) -> ReasoningGym:
    """The entry point.

    Args:
        task: name of a dataset of reasoning-gym, or of a preset: tiny-basic-arithmetic, tiny-number-sequence,
            tiny-spell-backward, tiny-simple-equations, tiny-lcm, tiny-chain-sum, tiny-count-bits,
            tiny-letter-counting, tiny-products, tiny-gcd.
        config: of the dataset, as its configuration class takes it; goes over that of the preset.
        size: entries of the training split, which is repeated. Their seeds are `seed` to `seed + size - 1`.
        eval_size: entries of the evaluation split; their seeds follow. Simple datasets have few different
            questions, so the same ones appear in both.
        seed: first seed.
        exact: nothing but the reference answer is paid for. None: so it is in the presets, and not otherwise.
        tags: the answer stands between <answer> and </answer>, as a sentence below the question says. Otherwise it
            is the whole message.
        limit_s: time limit in seconds of generating 16 entries and of scoring one answer. Keep it below
            `env.timeout_s`.
        workers: most processes, in each of hub and generators; each takes about 200 MB.

    Raises:
        ValueError: an argument is out of its range; the library is missing or refuses the configuration; or the
            generator does not end in time.
    """
    whole = {"size": (size, 1), "eval_size": (eval_size, 1), "seed": (seed, 0), "workers": (workers, 1)}
    for name, (value, least) in whole.items():
        check_whole(name, value, least)
    if config is not None and (not isinstance(config, dict) or config.keys() & {"seed", "size"}):
        raise ValueError(
            f"env.args.config = {config!r}: must be a table without `seed` and `size`, which are env.args"
        )
    check_seconds("limit_s", limit_s)
    dataset, preset = PRESETS.get(task, (task, {}))
    exact = task in PRESETS if exact is None else exact
    sizes: dict[Split, int] = {"train": size, "eval": eval_size}
    seeds: dict[Split, int] = {"train": seed, "eval": seed + size}
    pool = ProcessPool(f"{__name__}:load_library", workers)
    made = ReasoningGym(dataset, {**preset, **(config or {})}, sizes, seeds, exact, tags, limit_s, pool)
    try:
        first = made.task("train", 0)
    except (CallRaised, CallLost) as error:
        raise ValueError(f"env.args.task = {task!r}, env.args.config = {made.config}: {error}") from error
    if exact and first.answer is None:
        raise ValueError(f"env.args.exact = true: reasoning-gym's {dataset!r} has no reference answers")
    return made


# ---- in the process ------------------------------------------------------------------------------


def load_library() -> None:
    """Imports reasoning-gym in a new process."""
    _library()


def _library() -> Any:
    return load_extra("reasoning_gym", "reasoning-gym", "reasoning-gym")


def generate(name: str, config: str, seed: int, size: int, numbers: list[int]) -> list[tuple[str, str | None]]:
    """Questions and answers of entries."""
    dataset = _dataset(name, config, seed, size)
    entries = [_entry(dataset, seed + number, number) for number in numbers]
    return [(entry["question"], entry["answer"]) for entry in entries]


def score(
    name: str, config: str, seed: int, size: int, number: int, question: str, text: str, exact: bool
) -> tuple[float, bool]:
    """See `ReasoningGym.score`."""
    dataset = _dataset(name, config, seed, size)
    entry = _entry(dataset, seed + number, number)
    if entry["question"] != question:
        raise RuntimeError(f"entry {number} of {name!r} is not the one that was asked; are there two versions?")
    right = entry["answer"] is not None and text == entry["answer"].strip()
    if right or exact:
        return float(right), False
    paid, raised = _score(dataset, entry, text)
    junk = max(_score(dataset, entry, each)[0] for each in JUNK if each != entry["answer"])
    return (max(0.0, paid - junk) / (1.0 - junk) if junk < 1.0 else 0.0), raised


def _entry(dataset: Any, seed: int, number: int) -> dict[str, Any]:
    """An entry. Some generators draw from Python's one global generator too, which must stand where it stood."""
    random.seed(seed)
    entry: dict[str, Any] = dataset[number]
    return entry


def _score(dataset: Any, entry: dict[str, Any], text: str) -> tuple[float, bool]:
    try:
        return min(1.0, max(0.0, float(dataset.score_answer(text, entry)))), False
    except Exception:  # Scorers of the library raise whatever they like on what is no answer.
        return 0.0, True


@functools.lru_cache(maxsize=8)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    """A dataset; making one costs up to seconds, and an entry of it usually less than a millisecond."""
    return _library().create_dataset(name, seed=seed, size=size, **json.loads(config))
