"""What a deterministic run (`run.deterministic`) needs of the other settings.

Its promise: on one kind of CPU, with the same settings, initial model and installed versions, sampled tokens,
behaviour log-probs and final weights are bitwise equal between two runs, and between an interrupted run and one
that was not. Four things keep it:

    schedule   max_lag = 0: a step trains the smallest run of tasks of which groups_per_step are kept, and every
               token of theirs is sampled by the version before it, whatever happens in which order
    engine     a request's tokens and log-probs do not depend on its neighbours (`engines.invariant`)
    learner    deterministic algorithms, one thread, sums over ranks in a fixed order (`learner.dist`)
    seeds      every draw is a function of run, group, member and position; none is made from a clock or a state

Out of its reach: environments and reward functions, which must answer alike when asked alike, and their time
limits (`env.timeout_s`, `reward.timeout_s`), which a loaded machine may exceed; and a version of the weights that
every generator refuses as damaged, for then they go on sampling with the one before.

Called by `asyncrl.launch`, before anything starts.
"""

from __future__ import annotations

from typing import Any

from asyncrl.config import Config, Section

NEEDS: tuple[tuple[str, Any, str], ...] = (
    ("staleness.max_lag", 0, "which version samples a token would depend on which process is faster"),
    ("generator.engine", "transformers", "only the embedded engine computes a request alike beside any others"),
    ("generator.device", "cpu", "a GPU's kernels do not promise the same bits for a row of another batch"),
    ("generator.threads", 1, "the libraries may share out a sum differently each time"),
    ("learner.device", "cpu", "a GPU's sums, and NCCL's, are not promised to be in one order"),
    ("learner.threads", 1, "the libraries may share out a sum differently each time"),
    ("weights.kv", "recompute", "a request may live through an update, and where in it is chance"),
    ("env.pass_rate", None, "which groups have ended when a task is drawn depends on timing"),
    ("reward.model", None, "the scorer computes together what is asked for at one time, in any shape"),
    ("reward.endpoint", None, "the scorer computes together what is asked for at one time, in any shape"),
)
"""Setting, the value that a deterministic run needs, and why no other will do."""


def settled(config: Config) -> Config:
    """Gives a deterministic run the settings that it needs and that the user left open.

    Raises:
        ValueError: the user has set one of them to something else; the text says why that cannot be.
    """
    if not config.run.deterministic:
        return config
    for name, needed, why in NEEDS:
        head, key = name.split(".")
        section: Section = getattr(config, head)
        given = getattr(section, key)
        if given == needed:
            continue
        if key in section.model_fields_set and given != "auto":
            only = "that it is not given" if needed is None else f"{needed!r}"
            raise ValueError(
                f"{name} = {given!r} contradicts run.deterministic, which needs {only}: {why}. Leave {name} out, "
                "or --deterministic"
            )
        config = config.model_copy(update={head: section.model_copy(update={key: needed})})
    return config
