"""Direct preference optimisation: its gradient is that of the paper's loss, and it prefers what it is told to."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl import cli, toy
from asyncrl.chat import ChatFormat
from asyncrl.learner.dpo import dpo_step, log_ratios, train_dpo
from asyncrl.learner.examples import encode
from asyncrl.learner.preferences import Pair, load
from asyncrl.learner.sft import supervised
from asyncrl.learner.update import Trainer


def random_pairs(n, seed=0):
    """Pairs with a common prompt, answers of several lengths, and context inside some answers."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        prompt = rng.integers(0, 61, rng.integers(1, 7)).tolist()
        sides = []
        for _ in range(2):
            answer = rng.integers(0, 61, rng.integers(1, 12)).tolist()
            mask = [True, *(rng.random(len(answer) - 1) < 0.8).tolist()]
            sides.append((prompt + answer, [False] * len(prompt) + mask))
        found.append(Pair(*sides))
    return found


def answer_logp(model, example):
    """[] sum of the log-probs of an answer, by the stock model."""
    ids, mask = example
    logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logp[torch.arange(len(ids) - 1), ids[1:]][mask[1:]].sum()


@pytest.mark.parametrize("budget", [64, 24], ids=lambda budget: f"rows of {budget}")
def test_a_steps_gradient_is_that_of_the_papers_loss_in_float64(
    alone, model_folder, make_config, monkeypatch, budget
):
    pairs, beta = random_pairs(5), 0.3
    reference = torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
    stock = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    ratios = torch.stack([answer_logp(stock, p.chosen) - answer_logp(stock, p.rejected) for p in pairs])
    loss = -torch.nn.functional.logsigmoid(beta * (ratios - reference)).mean()
    loss.backward()

    config = make_config(learner={"token_budget": budget}, generator={"max_model_len": 20})
    trainer = Trainer(supervised(config, 10), model_folder)
    torch.testing.assert_close(log_ratios(trainer, pairs), ratios.detach(), rtol=1e-5, atol=1e-4)
    got = {}
    monkeypatch.setattr(
        trainer.optimizer, "step",
        lambda lr, scale: got.update({n: p.grad.full_tensor() for n, p in trainer.optimizer.named.items()}),
    )  # fmt: skip
    metrics = dpo_step(trainer, pairs, reference, beta, 1)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    exact = dict(stock.named_parameters())
    norm = torch.stack([p.grad.norm() for p in exact.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert {name.removeprefix("hf.") for name in got} == set(exact)
    for name, grad in got.items():
        wanted = exact[name.removeprefix("hf.")].grad
        largest = float(wanted.abs().max())
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-4 * largest, msg=name)


def test_the_first_steps_margin_is_0_and_the_margin_grows(model_folder, make_config, tmp_path):
    seen = []
    config = make_config(learner={"lr": 3e-3, "warmup_steps": 0})
    pairs = random_pairs(8)
    last = train_dpo(
        config, model_folder, tmp_path / "out", pairs, 0.1, 20, 4, lambda step, metrics: seen.append(metrics)
    )
    assert len(seen) == 40
    assert seen[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert seen[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert last["accuracy"] == 1
    assert last["loss"] < 0.3 < 0.5 < last["margin"]
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model_folder, tmp_path / "out"))
    with torch.no_grad():
        for p in pairs:
            was, is_ = (answer_logp(model, p.chosen) - answer_logp(model, p.rejected) for model in (before, after))
            assert is_ > was
    assert not torch.distributed.is_initialized()


def test_the_same_seed_gives_the_same_weights(model_folder, make_config, tmp_path):
    for name in ("a", "b"):
        train_dpo(make_config(), model_folder, tmp_path / name, random_pairs(4), 0.1, 2, 3, lambda *_: None)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    return toy.init_model(tmp_path_factory.mktemp("toy") / "model", hidden=32, layers=1)


def write_pairs(path, n=12):
    lines = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(n)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_pair_has_one_prompt_and_two_trained_answers(toy_folder, tmp_path):
    chat = ChatFormat(toy_folder)
    found = load(write_pairs(tmp_path / "pairs.jsonl"), chat, encode, 64, print)
    prompt = chat.prompt_ids([{"role": "user", "content": "3?"}])
    for (ids, mask), answer in zip(found[3], ("yes", "no"), strict=True):
        assert ids == [*prompt, *chat.encode(answer), toy.END_ID]
        assert mask == [False] * len(prompt) + [True] * (len(answer) + 1)


def test_the_command_trains_and_says_how(toy_folder, tmp_path, capsys):
    data, out = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "out"
    flags = ["--pairs", str(data), "--epochs", "3", "--batch", "4", "--learner.lr", "0.01"]
    assert cli.main(["dpo", str(toy_folder), str(out), *flags]) == 0
    said = capsys.readouterr().out
    assert "12 pairs, 9 steps" in said
    assert "step 9 of 9: loss" in said
    assert (out / "model.safetensors").is_file()
    assert cli.main(["dpo", str(toy_folder), str(out), *flags]) == 2
    assert "choose a folder that does not" in capsys.readouterr().err


def test_the_command_refuses_a_malformed_line_and_a_senseless_beta_with_code_2(toy_folder, tmp_path, capsys):
    data = write_pairs(tmp_path / "pairs.jsonl")
    with data.open("a") as file:
        file.write('\n{"chosen": "yes", "rejected": "no"}')
    command = ["dpo", str(toy_folder), str(tmp_path / "out"), "--pairs", str(data)]
    assert cli.main(command) == 2
    assert f"{data}, line 13: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as refused:
        cli.main([*command, "--beta", "0"])
    assert refused.value.code == 2
