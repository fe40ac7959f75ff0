"""The digest sees every bit and every place, and does not see how many ranks hold the state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learner.digest import PIECE, _sum, digest
from asyncrl.learner.update import Trainer


def state():
    torch.manual_seed(1)
    return {
        "matrix": torch.randn(7, 6),
        "twin": torch.randn(7, 6),
        "odd": torch.randn(5, 3),
        "vector": torch.randn(9),
        "step": torch.tensor(3.0),
        "coefficient": torch.tensor(0.1, dtype=torch.float64),
        "half": torch.randn(4, 6).bfloat16(),
        "large": torch.randn(PIECE // 128 + 3, 256),
    }


def test_equal_states_have_equal_digests(alone):
    assert digest(state()) == digest(state())
    assert len(digest(state())) == 16
    assert digest(dict(reversed(state().items()))) == digest(state())


@pytest.mark.parametrize("name", state())
def test_one_flipped_bit_anywhere_is_another_digest(alone, name):
    before, found = digest(state()), set()
    bits = 8 * state()[name].element_size()
    size = min(state()[name].numel(), 12)
    for at in range(size):
        for bit in {0, bits // 2, bits - 1}:
            changed = state()
            integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[bits // 8]
            flat = changed[name].view(integers).flatten()
            flat[-1 - at] ^= 1 << bit if bit < bits - 1 else -(1 << bit)
            changed[name] = flat.view(changed[name].dtype).view(changed[name].shape)
            found.add(digest(changed))
    assert len(found) == 3 * size
    assert before not in found


def test_numbers_that_change_places_are_another_digest(alone):
    found = {digest(state())}
    for name in ("matrix", "odd", "vector", "large"):
        for turned in (state()[name].flip(0), state()[name].roll(1, -1)):
            found.add(digest(state() | {name: turned}))
    found.add(digest(state() | {"matrix": state()["twin"], "twin": state()["matrix"]}))
    assert len(found) == 1 + 4 * 2 + 1


def test_two_signs_that_flip_together_are_another_digest(alone):
    found = {digest(state())}
    for pair in ((0, 1), (1, 3), (1, 7), (0, 6)):
        matrix = state()["matrix"].flatten()
        matrix[list(pair)] *= -1
        found.add(digest(state() | {"matrix": matrix.view(7, 6)}))
    assert len(found) == 5


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from([(6,), (3,), (), (2, 3)]))
def test_shards_add_up_to_the_whole(sizes, rest):
    torch.manual_seed(sum(sizes))
    whole, name = torch.randn(2, sum(sizes), *rest), torch.tensor([3, 5])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [_sum(whole[:, at : at + n], at, name) for at, n in zip(starts, sizes, strict=True)]
    assert int(sum(parts)) == int(_sum(whole, 0, name))


def test_training_changes_it_and_the_same_training_gives_the_same(alone, make_config, model_folder, batches):
    found = []
    for _ in range(2):
        trainer = Trainer(make_config(), model_folder)
        found.append([digest(trainer.state())])
        for step in (1, 2):
            trainer.train(*batches.share(step), step)
            found[-1].append(digest(trainer.state()))
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_it_does_not_depend_on_the_number_of_ranks(alone, run_ranks, make_config, untied_folder, model_jobs):
    algo = {"name": "ppo", "kl": "k3", "kl_target": 0.1, "filter": "none"}
    job = {"kind": "digest", "model": str(untied_folder), "config": make_config(algo=algo).model_dump()}
    [(one, _)] = [model_jobs.digest(None, alone, job)]
    [(two, _)] = run_ranks(2, [job])
    assert one == two
