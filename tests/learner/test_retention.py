"""Which checkpoints are kept, whatever comes in whatever order of rewards."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Checkpoint
from asyncrl.learner.retention import kept

POLICIES = st.builds(Checkpoint, keep=st.integers(2, 4), keep_every=st.integers(0, 6), keep_best=st.integers(0, 3))
REWARDS = st.dictionaries(st.integers(1, 60), st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1)


@given(REWARDS, POLICIES)
def test_the_newest_and_the_best_are_kept_and_never_more_than_the_policy_allows(rewards, policy):
    stay = kept(rewards, policy)
    assert stay <= rewards.keys()
    assert set(sorted(rewards)[-policy.keep :]) <= stay
    regular = {step for step in rewards if policy.keep_every and step % policy.keep_every == 0}
    assert regular <= stay
    assert len(stay - regular) <= policy.keep + policy.keep_best
    known = [reward for reward in rewards.values() if reward is not None]
    if policy.keep_best and known:
        assert max(known) in {rewards[step] for step in stay}


@given(REWARDS, POLICIES)
def test_what_was_given_up_would_never_be_kept_later(rewards, policy):
    there, oldest = {}, 0
    for step in sorted(rewards):
        there[step] = rewards[step]
        there = {each: there[each] for each in kept(there, policy)}
        # The journal drops the tokens of batches up to the oldest one: it must not come back.
        assert min(there) >= oldest
        oldest = min(there)
    assert set(there) == kept(rewards, policy)
