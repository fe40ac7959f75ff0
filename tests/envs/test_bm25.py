"""The inverted index against the formula, written out document by document."""

import math
from random import Random

import pytest

from asyncrl.envs.bm25 import K1, B, Index, terms


def _slow(documents: list[str], query: str) -> list[float]:
    split = [terms(text) for text in documents]
    average = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        score = 0.0
        for term in terms(query):
            having = sum(term in other for other in split)
            times = words.count(term)
            weight = math.log(1 + (len(split) - having + 0.5) / (having + 0.5))
            norm = K1 * (1 - B + B * len(words) / average)
            score += weight * times * (K1 + 1) / (times + norm) if times else 0.0
        scores.append(score)
    return scores


def test_the_index_ranks_and_scores_as_the_formula_does() -> None:
    draw = Random(0)
    words = [f"w{n}" for n in range(30)]
    documents = [" ".join(draw.choices(words, k=draw.randrange(1, 40))) for _ in range(60)]
    index = Index(documents)
    for _ in range(40):
        query = " ".join(draw.choices([*words, "unknown"], k=draw.randrange(1, 6)))
        slow = _slow(documents, query)
        ranked = sorted((number for number, score in enumerate(slow) if score), key=lambda n: (-slow[n], n))[:10]
        found = index.search(query, 10)
        assert [score for _, score in found] == pytest.approx([slow[number] for number in ranked])
        assert [slow[number] for number, _ in found] == pytest.approx([slow[number] for number in ranked])


def test_case_and_punctuation_do_not_matter_and_letters_of_any_script_are_terms() -> None:
    assert terms("Où est-il, STRASSE_7?") == ["où", "est", "il", "strasse", "7"]
    assert [number for number, _ in Index(["a cat", "a Dog!"]).search("DOG", 5)] == [1]


def test_of_equals_the_first_comes_first_and_no_more_than_asked_for() -> None:
    index = Index(["same", "same", "other", "same"])
    assert [number for number, _ in index.search("same", 2)] == [0, 1]
    assert index.search("", 5) == index.search("unknown", 5) == index.search("same", 0) == []


def test_nothing_to_search_in_is_refused_and_empty_documents_are_not() -> None:
    with pytest.raises(ValueError, match="no documents"):
        Index([])
    assert Index(["", ""]).search("x", 3) == []
