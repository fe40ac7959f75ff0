"""One learner rank of a test: trains on synthetic batches, saves or loads checkpoints, writes what it saw.

A job without a kind trains a policy; the other kinds are the functions of `model_jobs`.

Run by the fixture `run_ranks` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; not a test itself.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import model_jobs
from safetensors.torch import save_file

from asyncrl.config import Config
from asyncrl.learner import dist
from asyncrl.learner.checkpoint import Checkpointer
from asyncrl.learner.errors import NotFinite
from asyncrl.learner.update import Trainer


def run(fixtures, ranks, job):
    """Trains up to `steps`, after a checkpoint if the job says `load`; returns metrics by step, and weights."""
    config = Config.model_validate(job["config"])
    trainer = Trainer(config, job["model"])
    trainer.self_test()
    checkpointer = Checkpointer(Path(job["folder"]), config.checkpoint)
    metrics = []
    start = checkpointer.load_latest(trainer) if job.get("load") else 0
    for step in range(start + 1, job["steps"] + 1):
        batch, tokens, logprobs = fixtures.Batches().share(step, ranks.world_size, ranks.rank)
        if step == job.get("poison") and ranks.rank == ranks.world_size - 1:
            logprobs = logprobs * float("nan")
        try:
            metrics.append(trainer.train(batch, tokens, logprobs, step))
        except NotFinite as error:
            metrics.append({"not_finite": error.step})
        if step == job.get("save"):
            checkpointer.save(trainer, step)
    checkpointer.wait()
    return metrics, {name: tensor.clone() for name, tensor in trainer.weights()}


def main(out, jobs):
    spec = importlib.util.spec_from_file_location("fixtures", Path(os.environ["TEST_FOLDER"]) / "conftest.py")
    fixtures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fixtures)
    ranks = dist.init("cpu", timeout_s=60)
    kinds = {"policy": run, "critic": model_jobs.critic, "process": model_jobs.process}
    kinds |= {"reference": model_jobs.reference, "full_kl": model_jobs.full_kl}
    kinds |= {"digest": model_jobs.digest}
    results = [kinds[job.get("kind", "policy")](fixtures, ranks, job) for job in jobs]
    if ranks.rank == 0:
        Path(out, "metrics.json").write_text(json.dumps([metrics for metrics, _ in results]))
        for i, (_, weights) in enumerate(results):
            save_file(weights, Path(out, f"{i}.safetensors"))
    dist.shutdown()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
