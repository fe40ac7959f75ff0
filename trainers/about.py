"""What each preset is, in a line, and the paper that it comes from. Free of torch; read by `asyncrl algos`.

A paper's numbers are the preset's, what it leaves out is said here. The presets themselves are in `presets`.
"""

from __future__ import annotations

ABOUT: dict[str, tuple[str, str]] = {
    "dapo": (
        "GRPO with a clip that is wider above, the token mean, without groups of equal rewards",
        "Yu et al. 2025, arXiv:2503.14476",
    ),
    "grpo": (
        "rewards centred and scaled within the group, mean over sequences, without a KL term",
        "Shao et al. 2024, arXiv:2402.03300",
    ),
    "drgrpo": (
        "GRPO without its scaling by the group's deviation and by the length",
        "Liu et al. 2025, arXiv:2503.20783",
    ),
    "rloo": (
        "REINFORCE on sequences, minus the mean reward of the group's others",
        "Ahmadian et al. 2024, arXiv:2402.14740",
    ),
    "reinforce++": (
        "returns whitened over the batch, the KL term in the reward; it needs no groups",
        "Hu et al. 2025, arXiv:2501.03262",
    ),
    "reinforce++-baseline": (
        "rewards centred within the group, then whitened over the batch; the KL term in the loss",
        "Hu et al. 2025, arXiv:2501.03262",
    ),
    "remax": ("REINFORCE minus the reward of a greedy episode", "Li et al. 2023, arXiv:2310.10505"),
    "opo": ("REINFORCE minus the group's mean reward, weighted by length", "Hao et al. 2025, arXiv:2505.23585"),
    "gpg": (
        "REINFORCE on centred rewards, scaled up where many are 0",
        "Chu et al. 2025, arXiv:2504.02546",
    ),
    "pass-k": ("only the best of a group counts, by its lead", "Tang et al. 2025, arXiv:2503.19595"),
    "gdpo": (
        "each named reward scaled within the group by itself, then summed",
        "Liu et al. 2026, arXiv:2601.05242",
    ),
    "otb": ("REINFORCE minus the optimal baseline of each position", "arXiv:2602.07078"),
    "ppo": (
        "generalised advantages of a critic, clipped ratios",
        "Schulman et al. 2017, arXiv:1707.06347",
    ),
    "vtrace": (
        "a critic's targets and advantages, corrected for stale tokens with truncated weights",
        "Espeholt et al. 2018, arXiv:1802.01561",
    ),
    "gspo": ("one clipped ratio for each sequence", "Zheng et al. 2025, arXiv:2507.18071"),
    "cispo": (
        "the clipped ratio is a weight: no token loses its gradient",
        "MiniMax 2025, arXiv:2506.13585",
    ),
    "aipo": ("the ratio, capped from above, is a weight", "Wu et al. 2025, arXiv:2505.24034"),
    "gmpo": ("the geometric mean of a sequence's clipped ratios", "Zhao et al. 2025, arXiv:2507.20673"),
    "sapo": ("a smooth gate of the ratio in place of the clip", "Gao et al. 2025, arXiv:2511.20347"),
    "dppo": ("tokens whose probability moved too far are dropped, in place of the clip", "arXiv:2602.04879"),
    "clip-cov": (
        "PPO without the gradient of some tokens of high covariance",
        "Cui et al. 2025, arXiv:2505.22617",
    ),
    "kl-cov": ("a KL penalty on the tokens of highest covariance", "Cui et al. 2025, arXiv:2505.22617"),
    "prime": (
        "implicit process rewards, learned while training, beside the outcome's",
        "Cui et al. 2025, arXiv:2502.01456",
    ),
    "sppo": (
        "regression of each sequence's log-ratio on its centred reward",
        "Wu et al. 2024, arXiv:2405.00675",
    ),
    "dro": (
        "REINFORCE with a quadratic penalty on the log-ratio",
        "Richemond et al. 2024, arXiv:2405.19107",
    ),
    "m2po": (
        "the tokens of largest squared log-ratio are masked until its mean is below a bound",
        "Zheng et al. 2025, arXiv:2510.01161",
    ),
    "online-dpo": (
        "the best and the worst of each group as a preference pair, sampled while training",
        "Rafailov et al. 2023, arXiv:2305.18290; Guo et al. 2024, arXiv:2402.04792",
    ),
}
"""Line and paper of every preset."""
