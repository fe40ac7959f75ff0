"""Questions that are answered by searching a collection of documents: a tool environment that needs no network.

    search("Where was Mira Tolun born?") ──▶ p17: Mira Tolun: Mira Tolun is a potter who was born in ...
    read("p17")                          ──▶ the whole document
    "Kessamar"                           ──▶ reward 1 if this is the answer, else 0

The documents are those of a JSON-lines file, `{"id", "title", "text"}` in each line, with a file of questions
(`{"question", "answer"}`; several right answers are a list); or made-up facts about made-up people and cities,
drawn from a seed, which no model can know. Ranking is by BM25 (`asyncrl.envs.bm25`). Answers are compared without
case, punctuation, articles and superfluous white space, as in SQuAD (Rajpurkar et al. 2016). The tools keep no
state, so an episode goes on elsewhere from its recorded turns. Called through the entry point `search`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from asyncrl.envs.arguments import check_whole
from asyncrl.envs.base import Message
from asyncrl.envs.bm25 import Index
from asyncrl.envs.rows import JsonLines
from asyncrl.envs.rows import read as read_rows
from asyncrl.envs.sources import Rows
from asyncrl.envs.tool_env import ToolEnv
from asyncrl.messages import Task

SYSTEM = (
    "Answer the question. Search for documents and read them first. "
    "Your final message is the answer alone, without a sentence around it."
)
SHOWN = 120
"""Characters of a document that a search shows."""
MOST = 20
"""Most documents that one search finds."""


class Document(msgspec.Struct, frozen=True):
    """One document."""

    id: str
    title: str
    text: str


class Corpus:
    """The documents, and the two tools on them.

    Raises:
        ValueError: there are no documents, or two have one id.
    """

    def __init__(self, documents: list[Document]) -> None:
        self._documents = {document.id: document for document in documents}
        if len(self._documents) < len(documents):
            ids = [document.id for document in documents]
            twice = next(each for number, each in enumerate(ids) if each in ids[:number])
            raise ValueError(f"two documents have the id {twice!r}; ids must be different")
        self._order = documents
        self._index = Index([f"{document.title} {document.text}" for document in documents])

    def search(self, query: str, k: int = 5) -> str:
        """Searches for documents. Finds those with the words of the query, the best first.

        Args:
            query: a few words.
            k: how many documents to find, at most 20.
        """
        found = [self._order[number] for number, _ in self._index.search(query, min(max(k, 1), MOST))]
        lines = [f"{document.id}: {document.title}: {document.text[:SHOWN]}" for document in found]
        return "\n".join(lines) or "no document has any of these words"

    def read(self, document_id: str) -> str:
        """Shows a whole document.

        Args:
            document_id: what stands before the first colon in a line of search.
        """
        document = self._documents.get(document_id)
        if document is None:
            raise KeyError(f"there is no document {document_id!r}; take an id from what search shows")
        return f"{document.title}\n{document.text}"

    def best(self, query: str) -> str:
        """The id of the document that a search finds first; "" if there is none."""
        found = self._index.search(query, 1)
        return self._order[found[0][0]].id if found else ""


class Search(ToolEnv):
    """The environment: as any with tools, and with demonstrations."""

    def __init__(self, corpus: Corpus, tasks: Rows, max_turns: int) -> None:
        tools: list[Callable[..., str]] = [corpus.search, corpus.read]
        super().__init__(tools, tasks, exact_match, system=SYSTEM, max_turns=max_turns, name="search")
        self._corpus = corpus

    def demonstration(self, task: Task) -> list[Message]:
        """One search and one reading for each query of the task's `queries`, then the answer.

        A task without `queries` is searched for with its question.
        """
        said: list[Message] = []
        for query in task.metadata.get("queries") or [str(task.prompt[-1]["content"])]:
            said += _call("search", {"query": query}, self._corpus.search(query), len(said))
            best = self._corpus.best(query)
            if best:
                said += _call("read", {"document_id": best}, self._corpus.read(best), len(said))
        return [*said, {"role": "assistant", "content": _answers(task.answer)[0]}]


def exact_match(final: str, answer: Any) -> float:
    """The reward: 1.0 if the final message is one of the right answers but for case, punctuation and articles."""
    return float(_normal(final) in map(_normal, _answers(answer)))


def make(
    corpus: str | None = None,
    questions: str | None = None,
    people: int = 200,
    hops: int = 1,
    max_turns: int = 8,
    seed: int = 0,
) -> Search:
    """The entry point.

    Args:
        corpus: JSON-lines file of documents. None: made-up ones.
        questions: JSON-lines file of questions about them; a tenth is held out for evaluation.
        people: number of made-up people, 10 to 10000; there are six questions about each, or two with `hops` = 2.
        hops: 1: one document has the answer. 2: one names the other that has it.
        max_turns: the assistant's message with this number is its answer. Keep it at most `env.max_turns`.
        seed: another one makes up other facts, and shuffles the questions in another way.

    Raises:
        ValueError: an argument is out of its range, or a file cannot be used: file, line, and what is allowed.
    """
    limits = {"people": (people, 10, 10_000), "hops": (hops, 1, 2), "max_turns": (max_turns, 1, 1000)}
    for name, (value, least, most) in (limits | {"seed": (seed, 0, 2**31)}).items():
        check_whole(name, value, least, most)
    if (corpus is None) != (questions is None):
        raise ValueError(f"env.args.corpus = {corpus!r}, env.args.questions = {questions!r}: give both or none")
    if corpus is None or questions is None:
        documents, rows = made_up(people, hops, Random(seed))
        return Search(Corpus(documents), Rows(rows, seed=seed), max_turns)
    asked = read_rows(questions)
    for number, row in enumerate(asked):
        if not all(_normal(answer) for answer in _answers(row.get("answer"))):
            raise ValueError(f"{asked.where(number)}: it has no `answer`: a text, or a list of texts")
    return Search(Corpus(_documents(Path(corpus))), Rows(asked, seed=seed), max_turns)


# ---- answers -------------------------------------------------------------------------------------


def _answers(answer: Any) -> list[str]:
    given = answer if isinstance(answer, list) and answer else [answer]
    return ["" if each is None else str(each) for each in given]


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def _normal(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _call(name: str, arguments: Mapping[str, Any], answer: str, number: int) -> list[Message]:
    call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [said, {"role": "tool", "name": name, "tool_call_id": call["id"], "content": answer}]


# ---- documents -----------------------------------------------------------------------------------


def _documents(path: Path) -> list[Document]:
    file = JsonLines(path)
    return [_document(row, file.where(number)) for number, row in enumerate(file)]


def _document(row: Mapping[str, Any], where: str) -> Document:
    try:
        return msgspec.convert(row, Document)
    except msgspec.ValidationError as error:
        raise ValueError(f'{where}: {error}; a line is {{"id": "...", "title": "...", "text": "..."}}') from None


class _City(NamedTuple):
    name: str
    river: str
    founded: str


def made_up(people: int, hops: int, draw: Random) -> tuple[list[Document], list[dict[str, Any]]]:
    """Documents about people and cities, and the questions that they answer."""
    names = _names(draw)
    cities = [_City(names(), names(), str(draw.randrange(900, 1900))) for _ in range(max(5, people // 10))]
    documents = [
        Document(
            f"c{number}",
            city.name,
            f"{city.name} lies on the river {city.river}. It was founded in {city.founded}.",
        )
        for number, city in enumerate(cities)
    ]
    rows: list[dict[str, Any]] = []
    for number in range(people):
        name, city = f"{names()} {names()}", draw.choice(cities)
        person = _person(name, city, draw)
        documents.append(Document(f"p{number}", name, " ".join(sentence for sentence, _, _ in person)))
        rows += _questions(name, city, person) if hops == 1 else _further(name, city)
    return documents, rows


WORK = "baker carpenter dentist farmer gardener lawyer painter pilot plumber potter tailor weaver"
ANIMALS = "cat cow dog donkey goat goose horse parrot pig rabbit sheep turtle"
COLOURS = "black blue brown green grey orange pink purple red violet white yellow"


def _person(name: str, city: _City, draw: Random) -> list[tuple[str, str, str]]:
    """Sentence, question and answer for each fact; the facts are in another order for each person."""
    work, animal, colour = (draw.choice(words.split()) for words in (WORK, ANIMALS, COLOURS))
    born, height = str(draw.randrange(1900, 2000)), str(draw.randrange(150, 200))
    facts = [
        (f"{name} was born in {city.name}.", f"In which city was {name} born?", city.name),
        (f"{name} came into the world in {born}.", f"In which year was {name} born?", born),
        (f"{name} works as a {work}.", f"What does {name} work as?", work),
        (f"{name} keeps a {animal}.", f"What animal does {name} keep?", animal),
        (f"The house of {name} is {colour}.", f"What colour is the house of {name}?", colour),
        (f"{name} is {height} cm tall.", f"How many cm tall is {name}?", height),
    ]
    draw.shuffle(facts)
    return facts


def _questions(name: str, city: _City, person: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    return [{"question": question, "answer": answer, "queries": [name]} for _, question, answer in person]


def _further(name: str, city: _City) -> list[dict[str, Any]]:
    asked = {
        f"On which river lies the city in which {name} was born?": city.river,
        f"In which year was the city founded in which {name} was born?": city.founded,
    }
    queries = [name, f"{city.name} river founded"]
    return [{"question": question, "answer": answer, "queries": queries} for question, answer in asked.items()]


def _names(draw: Random) -> Callable[[], str]:
    """Draws names of three syllables, none twice."""
    syllables = [
        first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "an", "el", "or")
    ]
    used: set[str] = set()

    def name() -> str:
        while (made := "".join(draw.choices(syllables, k=3)).capitalize()) in used:
            pass
        used.add(made)
        return made

    return name
