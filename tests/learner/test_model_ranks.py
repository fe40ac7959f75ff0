"""The models beside the policy are the same on one rank and on two, and blind to packing."""

import pytest
import torch

ROWS = [[13, 2, 7], [0, 1], [], [3, 4, 5, 6], [8, 9, 10, 11, 12]]


def test_models_do_not_depend_on_ranks_or_packing(
    run_ranks, alone, model_folder, untied_folder, make_config, fixtures, model_jobs
):
    config = make_config(
        critic={"lr": 1e-3, "clip": 0.3},
        process_reward={"lr": 1e-3, "beta": 0.3},
        sampling={"temperature": 0.7},
        learner={"head_workspace_mb": 4},
    ).model_dump()
    jobs = [
        {"kind": "critic", "model": str(model_folder), "steps": 3},
        {"kind": "critic", "model": str(untied_folder), "steps": 2},
        {"kind": "process", "model": str(model_folder), "steps": 3},
        {"kind": "reference", "model": str(untied_folder)},
        {"kind": "full_kl", "model": str(model_folder)},
    ]
    jobs = [job | {"config": config} for job in jobs]
    for job, (two, state) in zip(jobs, run_ranks(2, jobs), strict=True):
        for rows in (None, ROWS):
            one, weights = getattr(model_jobs, job["kind"])(fixtures, alone, job | {"rows": rows})
            for mine, theirs in zip(one, two, strict=True):
                assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5), job["kind"]
            assert weights.keys() == state.keys()
            for name in weights:
                message = f"{job['kind']} {name}"
                torch.testing.assert_close(weights[name], state[name], atol=1e-4, rtol=1e-4, msg=message)
        if job["kind"] == "reference":
            assert two[0]["after"] == pytest.approx(two[0]["policy"], rel=1e-12)
            assert two[0]["before"] != pytest.approx(two[0]["policy"], rel=1e-3)
