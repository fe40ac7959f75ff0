"""Full-text search by BM25 over documents in memory, with an inverted index.

The score of a document d for a query q, over the terms t of q, with their number of occurrences c in q:

    sum_t  c * log(1 + (N - n_t + 0.5) / (n_t + 0.5)) * f_td * (k1 + 1) / (f_td + k1 * (1 - b + b * |d| / avg))

N documents, n_t of them with t, f_td occurrences of t in d, |d| terms in d, avg of them on average. Source:
Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009), section 3.3, with the
weights of Robertson and Spärck Jones (1976); the 1 within the logarithm is Lucene's and keeps a term of most
documents from counting against them. Terms are runs of letters and digits in lower case; nothing is stemmed.
Called by `asyncrl.envs.search`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

K1 = 1.2
B = 0.75
_TERM = re.compile(r"[^\W_]+")


def terms(text: str) -> list[str]:
    """The terms of a text, in order."""
    return _TERM.findall(text.casefold())


class Index:
    """An inverted index: for each term, the documents that have it and what it adds to their scores.

    Args:
        documents: their texts.
        k1: how much repetitions of a term count; 0: not at all.
        b: how much the length of a document counts, 0 to 1.

    Raises:
        ValueError: there are no documents.
    """

    def __init__(self, documents: Sequence[str], k1: float = K1, b: float = B) -> None:
        if not documents:
            raise ValueError("there are no documents to search in")
        counts = [Counter(terms(text)) for text in documents]
        lengths = np.array([count.total() for count in counts], np.float64)
        self._size = len(documents)
        self._norm = k1 * (1 - b + b * lengths / max(1.0, lengths.mean()))
        found: dict[str, tuple[list[int], list[int]]] = {}
        for number, count in enumerate(counts):
            for term, times in count.items():
                numbers, frequencies = found.setdefault(term, ([], []))
                numbers.append(number)
                frequencies.append(times)
        self._postings = {term: self._weighed(*posting, k1) for term, posting in found.items()}

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """The numbers of the best `k` documents with any term of the query, and their scores, best first.

        Of documents with the same score the earlier one comes first.
        """
        scores = np.zeros(self._size)
        for term, times in Counter(terms(query)).items():
            if term in self._postings:
                numbers, weights = self._postings[term]
                scores[numbers] += times * weights
        (found,) = np.nonzero(scores)
        best = found[np.argsort(-scores[found], kind="stable")][: max(0, k)]
        return [(int(number), float(scores[number])) for number in best]

    def _weighed(
        self, numbers: list[int], frequencies: list[int], k1: float
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        documents = np.array(numbers, np.int32)
        frequency = np.array(frequencies, np.float64)
        rarity = np.log1p((self._size - len(numbers) + 0.5) / (len(numbers) + 0.5))
        return documents, rarity * frequency * (k1 + 1) / (frequency + self._norm[documents])
