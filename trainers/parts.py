"""The table of parts: what each does in a line, where it comes from, its parameters, defaults and ranges.

The functions' docstrings hold the formulas. A test compares every entry with its function's signature. Free of
torch. Read by `asyncrl.trainers.catalogue` only.
"""

from __future__ import annotations

from asyncrl.trainers.catalogue import Kind, Part
from asyncrl.trainers.catalogue import Parameter as P

_GAMMA = P(1.0, 0, 1)
_CLIP = {"clip_low": P(0.2, 0, 1), "clip_high": P(0.2, 0)}

ADVANTAGES = {
    "reinforce": Part(
        "the reward, without a baseline", "Williams 1992",
        "advantages:reinforce", level="sequence",
    ),
    "grpo": Part(
        "centred and scaled within the group", "arXiv:2402.03300, section 4.1.2",
        "advantages:grpo", level="sequence",
    ),
    "dr_grpo": Part(
        "centred within the group", "arXiv:2503.20783, section 3",
        "advantages:dr_grpo", level="sequence",
    ),
    "rloo": Part(
        "minus the mean of the group's others", "arXiv:2402.14740",
        "advantages:rloo", level="sequence",
    ),
    "opo": Part(
        "minus the length-weighted mean of the group", "arXiv:2505.23585",
        "advantages:opo", level="sequence",
    ),
    "gpg": Part(
        "centred, scaled up for groups whose rewards are equal", "arXiv:2504.02546",
        "advantages:gpg", level="sequence",
    ),
    "pass_k": Part(
        "the best of a group only, over the second best", "arXiv:2503.19595",
        "advantages:pass_k", level="sequence",
    ),
    "gdpo": Part(
        "each named reward scaled within the group, then their sum whitened", "arXiv:2601.05242",
        "advantages:gdpo", {"weights": P({})}, "sequence",
    ),
    "remax": Part(
        "minus the reward of one greedy episode of the task", "arXiv:2310.10505", "advantages:remax",
        level="sequence", needs=("greedy",),
    ),
    "reinforce_pp_baseline": Part(
        "centred within the group, whitened over the batch's tokens", "arXiv:2501.03262",
        "advantages:reinforce_pp_baseline", level="sequence",
    ),
    "dpo": Part(
        "the gradient of DPO's loss for the best and the worst of a group", "arXiv:2305.18290, arXiv:2402.04792",
        "advantages:dpo", {"beta": P(0.1, 1e-6)}, level="sequence", needs=("logp", "reference"),
    ),
    "reinforce_pp": Part(
        "discounted returns, whitened over the batch's tokens", "arXiv:2501.03262",
        "token_advantages:reinforce_pp", {"gamma": _GAMMA},
    ),
    "otb": Part(
        "returns minus the optimal baseline of each position", "arXiv:2602.07078", "token_advantages:otb",
        needs=("logp", "squares"),
    ),
    "prime": Part(
        "leave-one-out of implicit process rewards and of outcomes", "arXiv:2502.01456", "token_advantages:prime",
        {"process_coef": P(5.0, 0), "outcome_coef": P(5.0, 0)}, needs=("process",),
    ),
    "gae": Part(
        "generalised advantage estimation with a critic", "arXiv:1506.02438", "token_advantages:gae",
        {"gamma": _GAMMA, "lam": P(1.0, 0, 1), "whiten": P(True)}, needs=("value",),
    ),
    "vtrace": Part(
        "V-trace's policy-gradient advantages with a critic", "arXiv:1802.01561", "token_advantages:vtrace",
        {"gamma": _GAMMA, "lam": P(1.0, 0, 1), "rho_max": P(1.0, 0), "c_max": P(1.0, 0), "scale": P(True)},
        needs=("value", "logp"),
    ),
}  # fmt: skip

LOSSES = {
    "ppo_clip": Part(
        "clipped ratio, asymmetric range, dual clip", "arXiv:1707.06347, eq. 7; arXiv:1912.09729, eq. 5",
        "losses:ppo_clip", {**_CLIP, "clip_dual": P(3.0, 0)},
    ),
    "reinforce": Part("-A log pi", "Williams 1992", "losses:reinforce"),
    "cispo": Part(
        "clipped ratio as a weight: clipped tokens keep a gradient", "arXiv:2506.13585, section 3.1",
        "losses:cispo", {"clip_low": P(1.0, 0, 1), "clip_high": P(0.2, 0)},
    ),
    "aipo": Part(
        "ratio capped from above as a weight", "arXiv:2505.24034, section 4", "losses:aipo", {"cap": P(2.0, 1e-6)}
    ),
    "sapo": Part(
        "a sigmoid gate of the ratio in place of the clip", "arXiv:2511.20347", "losses:sapo",
        {"tau_pos": P(1.0, 1e-6), "tau_neg": P(1.05, 1e-6)},
    ),
    "dppo_tv": Part(
        "drops tokens whose probability moved too far", "arXiv:2602.04879", "losses:dppo_tv",
        {"delta_low": P(0.2, 0, 1), "delta_high": P(0.2, 0, 1), "cap": P(20.0, 1e-6)},
    ),
    "dppo_kl": Part(
        "drops tokens whose binary KL grew too large", "arXiv:2602.04879", "losses:dppo_kl",
        {"delta": P(0.05, 0), "cap": P(20.0, 1e-6)},
    ),
    "dro": Part(
        "-A log pi with a squared log-ratio penalty", "arXiv:2405.19107", "losses:dro", {"beta": P(1.0, 0)}
    ),
    "gspo": Part(
        "PPO's clip of each sequence's geometric mean ratio", "arXiv:2507.18071", "sequence_losses:gspo",
        {"clip_low": P(3e-4, 0, 1), "clip_high": P(4e-4, 0)}, "sequence",
    ),
    "gmpo": Part(
        "geometric mean of clipped token ratios", "arXiv:2507.20673", "sequence_losses:gmpo",
        {"clip_low": P(0.4, 0), "clip_high": P(0.4, 0)}, "sequence",
    ),
    "sppo": Part(
        "squared distance of the sequence's log-ratio from its reward", "arXiv:2405.00675", "sequence_losses:sppo",
        {"eta": P(1.0, 1e-6)}, "sequence",
    ),
    "clip_cov": Part(
        "PPO without the gradient of some tokens of high covariance", "arXiv:2505.22617, section 4.2",
        "covariance_losses:clip_cov",
        {"share": P(2e-4, 0, 1), "cov_low": P(1.0), "cov_high": P(5.0), **_CLIP}, "batch", ("logp",),
    ),
    "kl_cov": Part(
        "a KL penalty on the tokens of highest covariance", "arXiv:2505.22617, section 4.2",
        "covariance_losses:kl_cov", {"share": P(2e-4, 0, 1), "coef": P(1.0, 0)}, "batch", ("logp",),
    ),
}  # fmt: skip

AGGREGATIONS = {
    "token_mean": Part("every token counts the same", "arXiv:2503.14476, section 3.3", "aggregation:token_mean"),
    "sequence_mean": Part(
        "every sequence counts the same", "arXiv:2402.03300, equation 3", "aggregation:sequence_mean"
    ),
    "sequence_sum": Part("mean over sequences of token sums", "Williams 1992", "aggregation:sequence_sum"),
    "constant": Part(
        "token sums over sequences times a constant (0: sampling.max_tokens)", "arXiv:2503.20783, section 3",
        "aggregation:constant", {"length": P(0.0, 0)},
    ),
}  # fmt: skip

CORRECTIONS = {
    "none": Part("no correction", "", "corrections:none"),
    "token_tis": Part(
        "importance weight of each token, capped", "Ionides 2008; arXiv:2110.00641", "corrections:token_tis",
        {"cap": P(2.0, 1e-6)},
    ),
    "icepop": Part(
        "importance weight of each token inside a range, 0 outside", "arXiv:2510.18855", "corrections:icepop",
        {"low": P(0.5, 0), "high": P(5.0, 0)},
    ),
    "sequence_tis": Part(
        "importance weight of each sequence, capped", "Ionides 2008; arXiv:2512.23075", "corrections:sequence_tis",
        {"cap": P(5.0, 1e-6)}, "sequence",
    ),
    "mis": Part(
        "importance weight of each sequence inside a range; others leave the batch", "arXiv:2512.23075",
        "corrections:mis", {"low": P(0.5, 0), "high": P(2.0, 0)}, "batch", ("logp",),
    ),
}  # fmt: skip

REJECTIONS = {
    "token_k1": Part(
        "tokens whose ratio is inside a range", "arXiv:2512.23075", "rejections:token_k1",
        {"token_k1_low": P(0.5, 0), "token_k1_high": P(2.0, 0)},
    ),
    "token_k2": Part(
        "tokens of small squared log-ratio", "arXiv:2512.23075", "rejections:token_k2",
        {"token_k2_max": P(0.25, 0)},
    ),
    "token_k3": Part(
        "tokens of small k3 divergence", "arXiv:2512.23075", "rejections:token_k3", {"token_k3_max": P(0.25, 0)}
    ),
    "geometric": Part(
        "sequences whose geometric mean ratio is inside a range", "arXiv:2512.23075", "rejections:geometric",
        {"geometric_low": P(0.99, 0), "geometric_high": P(1.01, 0)}, "batch", ("logp",),
    ),
    "product": Part(
        "sequences whose ratio is inside a range", "arXiv:2512.23075", "rejections:product",
        {"product_low": P(0.5, 0), "product_high": P(2.0, 0)}, "batch", ("logp",),
    ),
    "sequence_k2": Part(
        "sequences of small mean k2 divergence", "arXiv:2512.23075", "rejections:sequence_k2",
        {"sequence_k2_max": P(0.01, 0)}, "batch", ("logp",),
    ),
    "sequence_k3": Part(
        "sequences of small mean k3 divergence", "arXiv:2512.23075", "rejections:sequence_k3",
        {"sequence_k3_max": P(0.01, 0)}, "batch", ("logp",),
    ),
    "veto": Part(
        "sequences without a token of tiny ratio", "arXiv:2510.18855", "rejections:veto",
        {"veto_floor": P(1e-4, 0, 1)}, "batch", ("logp",),
    ),
    "opsm": Part(
        "all but sequences of negative advantage that moved away", "arXiv:2512.02556", "rejections:opsm",
        {"opsm_delta": P(1e-4, 0)}, "sequence",
    ),
    "m2po": Part(
        "the tokens whose mean squared log-ratio stays below a bound", "arXiv:2510.01161", "rejections:m2po",
        {"m2po_tau": P(0.04, 0)}, "batch", ("logp",),
    ),
}  # fmt: skip

FILTERS = {
    "none": Part("keeps every group", "", "filters:keep_all"),
    "equal_rewards": Part(
        "groups whose rewards do not differ", "arXiv:2503.14476, section 3.2", "filters:equal_rewards"
    ),
    "mean_band": Part(
        "groups whose mean reward is outside a band", "arXiv:2502.01456, section 3.2", "filters:mean_band",
        {"low": P(0.2), "high": P(0.8)},
    ),
}  # fmt: skip

SHAPINGS = {
    "overlong": Part(
        "a penalty that grows to 1 over the last tokens before sampling.max_tokens",
        "arXiv:2503.14476, equation 13", "shaping:overlong",
        {"overlong_buffer": P(4, 1), "overlong_coef": P(1.0, 0)},
    ),
    "drop_truncated": Part(
        "truncated episodes are neither trained nor in a baseline", "arXiv:2503.14476, section 3.4",
        "shaping:drop_truncated",
    ),
    "length": Part(
        "a penalty for length, of correct episodes within a group", "arXiv:2501.12599, section 2.3.3",
        "shaping:length", {"length_coef": P(0.1, 0)},
    ),
    "normalise": Part(
        "rewards with mean 0 and standard deviation 1 over the batch", "", "shaping:normalise"
    ),
    "clip": Part("rewards kept in a range", "", "shaping:clip", {"reward_low": P(-1.0), "reward_high": P(1.0)}),
}  # fmt: skip

_REFERENCE = ("reference",)
KLS = {
    "none": Part("no KL term", "", "kl:none"),
    "k1": Part("log pi - log ref", "Schulman 2020", "kl:k1", needs=_REFERENCE),
    "k2": Part("half the squared log-ratio", "Schulman 2020", "kl:k2", needs=_REFERENCE),
    "k3": Part("ref/pi - 1 - log ref/pi", "Schulman 2020", "kl:k3", needs=_REFERENCE),
    "abs": Part("absolute log-ratio", "", "kl:absolute", needs=_REFERENCE),
    "k1+": Part("value of k1, gradient of k2", "arXiv:2510.01555", "kl:k1_straight", needs=_REFERENCE),
    "k3+": Part("value of k3, gradient of k2", "arXiv:2510.01555", "kl:k3_straight", needs=_REFERENCE),
    "abs+": Part("value of abs, gradient of k2", "arXiv:2510.01555", "kl:absolute_straight", needs=_REFERENCE),
    # The learner adds it to the loss row by row, because no token's log-prob tells it: `asyncrl.learner.full_kl`.
    "full": Part("the exact sum over the vocabulary", "", "kl:none", needs=("reference_model",)),
}

PARTS: dict[Kind, dict[str, Part]] = {
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "aggregation": AGGREGATIONS,
    "correction": CORRECTIONS,
    "rejection": REJECTIONS,
    "filter": FILTERS,
    "shaping": SHAPINGS,
    "kl": KLS,
}
"""All parts by kind and name."""
