"""Reward functions of your own in one file, beside the environment's own reward.

    asyncrl train --reward.weights '{"brief": 0.1, "compute_score": 0}' --reward.functions \\
        '["examples/reward_function.py:brief", "examples/reward_function.py:compute_score"]'

A function is called once for each episode that has ended, sync ones in a thread. The names of its parameters say
what it is given: an `episode`, or any of `task`, `messages`, `completion`, `final`, `answer`; functions with the
signature of verl or TRL work as they are. It returns a number, None (no reward, which is not 0), or several
rewards by name. The episode's reward is the weighted sum of all; one of weight 0 is only recorded. Expect the mean
reward to be 0.1 above that of a run without these flags, because the toy's answers are short. To give a function a
name, publish it as an entry point of the group `asyncrl.rewards` in your own package.
"""

from __future__ import annotations


def brief(final: str) -> float:
    """1 for an answer of at most four characters, falling to 0 at twelve."""
    return min(1.0, max(0.0, (12 - len(final)) / 8))


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """verl's signature: is the last word the answer? An async function may ask a service, for example a judge."""
    return float(solution_str.split()[-1:] == [ground_truth])
