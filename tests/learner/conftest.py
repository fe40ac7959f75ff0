"""A tiny model folder, synthetic batches, and learner ranks as real processes."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.learner import dist
from asyncrl.messages import Batch, EpisodeMeta, Span
from asyncrl.packing import plan

VOCABULARY = 61
WORKER = Path(__file__).with_name("rank_worker.py")


def write_model(path, tied=True, kv_heads=2):
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=16, tie_word_embeddings=tied, initializer_range=0.15,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text('{"note": "copied"}')
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("untied"), tied=False, kv_heads=4)


@pytest.fixture
def alone():
    """This process as a learner of one rank."""
    with dist.alone() as ranks:
        yield ranks


@pytest.fixture
def make_config():
    def make(**sections):
        base = {
            "learner": {"token_budget": 64, "lr": 1e-2},
            "generator": {"max_model_len": 48},
            "train": {"steps": 100},
        }
        for name, values in sections.items():
            base[name] = base.get(name, {}) | values
        return Config.model_validate(base)

    return make


class Batches:
    """The same batches, whatever the number of ranks that share them."""

    def __init__(self, budget=64):
        self.budget = budget

    def share(self, step, ranks=1, rank=0, n=14, rows=None, version=None, reward=None):
        """This rank's (batch, tokens, log-probs) of the batch of `step`."""
        rng = np.random.default_rng(step)
        episodes, spans, tokens, logprobs = [], [], [], []
        for i in range(n):
            prompt, first, second = (int(x) for x in rng.integers(1, 9, 3))
            length = prompt + first + 2 + second
            versions = sorted(int(v) for v in rng.integers(max(0, step - 4), step, 2))
            if version is not None:
                versions = [version, version]
            value = None if i == 5 else float(rng.integers(0, 3)) if reward is None else reward
            episodes.append(EpisodeMeta(i, i // 4, value, "completed", length, first + second))
            spans.append(
                [
                    Span(prompt, -1, False),
                    Span(first, versions[0], True),
                    Span(2, -1, False),
                    Span(second, versions[1], True),
                ]
            )
            tokens.append(rng.integers(0, VOCABULARY, length).astype(np.int32))
            logprobs.append((-5 * rng.random(length)).astype(np.float32))
        mine = rows if rows is not None else plan([e.length for e in episodes], ranks, self.budget)[rank]
        order = [i for row in mine for i in row]
        batch = Batch(step, step, episodes, mine, [spans[i] for i in order])
        return batch, np.concatenate([tokens[i] for i in order]), np.concatenate([logprobs[i] for i in order])


@pytest.fixture
def batches():
    return Batches()


@pytest.fixture(scope="session")
def model_jobs():
    """The module of that name, which the ranks of `run_ranks` run too."""
    spec = importlib.util.spec_from_file_location("model_jobs", WORKER.with_name("model_jobs.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fixtures():
    """This module, as a job gets it from `rank_worker`."""
    return sys.modules[__name__]


@pytest.fixture
def run_ranks(tmp_path):
    """Runs jobs in learner ranks that are real processes, in the torchrun convention.

    Returns rank 0's (metrics by step, weights) of each job."""

    def run(ranks, jobs):
        out = tmp_path / "out"
        out.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        base = os.environ | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        base["TEST_FOLDER"] = str(WORKER.parent)
        command = [sys.executable, str(WORKER), json.dumps([str(out), jobs])]
        running = [subprocess.Popen(command, env=base | {"RANK": str(rank)}) for rank in range(ranks)]
        try:
            codes = [process.wait(timeout=120) for process in running]
        finally:
            for process in running:
                process.kill()
        assert codes == [0] * ranks
        metrics = json.loads((out / "metrics.json").read_text())
        return [(metrics[i], load_file(out / f"{i}.safetensors")) for i in range(len(jobs))]

    return run
