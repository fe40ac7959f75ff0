"""Reward models: Bradley and Terry's loss, a preference that is learned, a folder that scores alike elsewhere."""

import json
import random
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from asyncrl import cli, toy
from asyncrl.chat import ChatFormat
from asyncrl.learner.examples import whole
from asyncrl.learner.preferences import hold_out, load
from asyncrl.learner.reward_model import Scorer, train_file
from asyncrl.settings import UsageError


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    return toy.init_model(tmp_path_factory.mktemp("toy") / "model", hidden=32, layers=1)


@pytest.fixture
def config(make_config):
    return make_config(learner={"token_budget": 256, "lr": 1e-2, "warmup_steps": 0}, run={"seed": 3})


@pytest.fixture
def data(tmp_path):
    """Answers of digits and one other character: `a` is better than `b`, wherever it stands."""
    draw, lines = random.Random(0), []
    for i in range(120):
        sides = []
        for letter in "ab":
            digits = [draw.choice("0123456789") for _ in range(draw.randrange(1, 9))]
            digits.insert(draw.randrange(len(digits) + 1), letter)
            sides.append("".join(digits))
        lines.append({"prompt": f"{i}?", "chosen": sides[0], "rejected": sides[1]})
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def pairs_of(data, folder):
    return load(data, ChatFormat(folder), whole, 256, print)


def test_a_preference_is_learned_and_the_folder_gives_the_same_scores(config, toy_folder, data, tmp_path):
    said, out = [], tmp_path / "out"
    metrics = train_file(config, toy_folder, out, data, 0.2, 8, 16, said.append)
    assert said[0] == "96 pairs, 24 held out, 48 steps"
    assert said[-1] == f"held-out accuracy {metrics['held_out_accuracy']:.3f} on 24 pairs"
    assert metrics["held_out_accuracy"] >= 0.95
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "pairs.jsonl"], "no scratch folder is left"

    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, tokenizer.pad_token_id)
    question = {"role": "user", "content": "7?"}
    talks = [[question, {"role": "assistant", "content": text}] for text in ("12a3", "1b", "4567a")]
    batch = tokenizer.apply_chat_template(talks, padding=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        got = model(**batch).logits[:, 0]
        separate = Scorer(config, out).scores([ChatFormat(out).conversation_ids(talk) for talk in talks])
    torch.testing.assert_close(got, separate, rtol=1e-5, atol=1e-5)
    assert got[0] > got[1] < got[2]


def test_a_steps_gradient_is_that_of_bradley_and_terry_in_float64(config, toy_folder, data):
    """One conversation at a time, no padding; the scorer's batches are of several lengths."""
    pairs = pairs_of(data, toy_folder)[:24]
    scorer = Scorer(config, toy_folder)
    stock = AutoModelForSequenceClassification.from_pretrained(toy_folder, num_labels=1, dtype=torch.float64)
    stock.load_state_dict(scorer.model.state_dict())
    margins = []
    for pair in pairs:
        chosen, rejected = (stock.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids, _ in pair)
        margins.append(stock.score(chosen - rejected)[0])
    loss = -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()
    loss.backward()
    exact = {name: p.grad for name, p in stock.named_parameters()}

    settings = config.learner.model_copy(update={"lr": 1e-12, "token_budget": 200})
    scorer._config = config.model_copy(update={"learner": settings})
    assert len(list(scorer._parts(pairs))) > 2
    metrics = scorer.train(pairs, 1, 24, lambda *_: None)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([grad.norm() for grad in exact.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    scorer._backward(pairs)
    for name, p in scorer.model.named_parameters():
        largest = float(exact[name].abs().max())
        torch.testing.assert_close(p.grad.double(), exact[name], rtol=1e-4, atol=1e-4 * largest, msg=name)


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_seed_alone(config, toy_folder, data):
    pairs = pairs_of(data, toy_folder)[:8]
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    scorers = [Scorer(config, toy_folder) for _ in range(2)]
    assert torch.equal(torch.rand(2), expected)
    for scorer in scorers:
        scorer.train(pairs, 1, 4, lambda *_: None)
    first, second = (scorer.model.state_dict() for scorer in scorers)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_held_out_pairs_are_not_trained_and_at_least_one_pair_of_each_remains():
    for share, counts in ((0.0, (5, 0)), (0.01, (4, 1)), (0.4, (3, 2)), (0.99, (1, 4))):
        train, test = hold_out("abcde", share, 0)
        assert (len(train), len(test)) == counts
        assert sorted(train + test) == list("abcde")
    assert hold_out(["a"], 0.5, 0) == (["a"], [])


def test_a_tokenizer_that_cannot_pad_is_refused_with_what_to_do(config, toy_folder, data, tmp_path):
    for pad, said in ((None, "no pad token"), ("<|im_end|>", "another pad_token")):
        folder = tmp_path / "model"
        shutil.copytree(toy_folder, folder, dirs_exist_ok=True)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": pad}))
        with pytest.raises(UsageError, match=said):
            train_file(config, folder, tmp_path / "out", data, 0.1, 1, 8, lambda line: None)
    assert not (tmp_path / "out").exists()


def test_the_command_says_the_accuracy_and_refuses_bad_input_with_code_2(toy_folder, data, tmp_path, capsys):
    command = ["reward-model", str(toy_folder), str(tmp_path / "out"), "--pairs", str(data)]
    assert cli.main(command) == 0
    assert "held-out accuracy" in capsys.readouterr().out
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    with data.open("a") as file:
        file.write("\n{}")
    command[2] = str(tmp_path / "other")
    assert cli.main(command) == 2
    assert f'{data}, line 121: "chosen" must be a list' in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        cli.main([*command, "--held-out", "1"])
    assert refused.value.code == 2
    assert not (tmp_path / "other").exists()
