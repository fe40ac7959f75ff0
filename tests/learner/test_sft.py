"""Supervised training: it learns, trains only what it is told to, and leaves a folder that loads."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from asyncrl import cli, toy
from asyncrl.chat import ChatFormat
from asyncrl.config import Learner
from asyncrl.datasets import Conversation
from asyncrl.learner.examples import batches, encode, fitting, steps_of, whole
from asyncrl.learner.optim import learning_rate
from asyncrl.learner.sft import pack, train_file, train_sft, weighted_nll
from asyncrl.learner.update import Trainer
from asyncrl.settings import UsageError

ROLE = {role: 256 + toy.SPECIAL_TOKENS.index(f"<|im_start|>{role}\n") for role in toy.ROLES}
END = toy.END_ID
TALK = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+3="},
    {"role": "assistant", "content": "05"},
]
FORGETFUL = toy.CHAT_TEMPLATE.replace(
    "(message.content or '')", "('' if message.role == 'assistant' and not loop.last else message.content)"
)


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    return toy.init_model(tmp_path_factory.mktemp("toy") / "model", hidden=32, layers=1)


@pytest.fixture(scope="module")
def chat(toy_folder):
    return ChatFormat(toy_folder)


def talk(*untrained, messages=TALK):
    flags = [m["role"] == "assistant" and i not in untrained for i, m in enumerate(messages)]
    return Conversation("data.jsonl, line 7", list(messages), [], flags)


def expected(chat, trained, messages=TALK):
    """One header, the text and one end for each message; trained is the text and the end of the given messages."""
    ids, mask = [], []
    for i, message in enumerate(messages):
        text = [*chat.encode(message["content"]), END]
        ids += [ROLE[message["role"]], *text]
        mask += [False] + [i in trained] * len(text)
    return ids, mask


def successor_examples(n=64):
    """Counting sequences: after token t comes t + 1."""
    starts = np.random.default_rng(0).integers(0, 50, n)
    return [(list(range(s, s + 8)), [False] * 4 + [True] * 4) for s in starts]


def test_the_loss_falls_and_the_exported_model_has_learned(make_config, model_folder, tmp_path):
    losses = []
    config = make_config(learner={"token_budget": 256})
    last = train_sft(
        config, model_folder, tmp_path / "out", successor_examples(), 60, 16, 1e-2,
        lambda step, loss: losses.append((step, loss)),
    )  # fmt: skip
    assert [step for step, _ in losses] == list(range(1, 61))
    assert losses[0][1] > 3
    assert losses[-1][1] == last["loss"] < 0.3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        predicted = model(torch.arange(20, 28)[None]).logits[0].argmax(-1)
    assert predicted[3:7].tolist() == [24, 25, 26, 27]
    assert not torch.distributed.is_initialized()


def test_only_the_tokens_of_the_mask_are_labels_and_never_the_first():
    examples = [([5, 6, 7], [True, False, True]), ([8, 9, 4, 3], [True, True, False, True])]
    rows, order = pack(examples, np.array([0.5, 0.25]), 8, torch.device("cpu"))
    assert order == [0, 1]
    assert [row.labels.tolist() for row in rows] == [[7, 9, 3]]
    assert rows[0].tokens.weight.tolist() == [0.5, 0.25, 0.25]
    assert rows[0].tokens.lengths == [1, 2]


def test_the_order_of_the_rows_is_said():
    examples = [([i] * n, [True] * n) for i, n in enumerate((2, 5, 3, 4))]
    rows, order = pack(examples, np.arange(4.0), 7, torch.device("cpu"))
    assert len(rows) == 2
    assert [n for row in rows for n in row.tokens.lengths] == [len(examples[i][0]) - 1 for i in order]
    weight = torch.cat([row.tokens.weight for row in rows])
    assert weight.tolist() == [i for i in order for _ in examples[i][0][1:]]


def test_the_loss_is_the_stock_models_mean_over_trained_tokens_however_it_is_packed(
    alone, model_folder, make_config
):
    rng = np.random.default_rng(1)
    examples = [(rng.integers(0, 61, n).tolist(), (rng.random(n) < 0.6).tolist()) for n in (3, 9, 14, 6, 21, 2)]
    stock = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    losses = []
    for ids, mask in examples:
        with torch.no_grad():
            logp = stock(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        losses.append(-logp[torch.arange(len(ids) - 1), ids[1:]][mask[1:]])
    mean = float(torch.cat(losses).mean())
    weights = np.full(len(examples), 1 / sum(map(len, losses)))
    for budget in (64, 21):
        trainer = Trainer(make_config(sampling={"temperature": 1.0}), model_folder)
        packed, _ = pack(examples, weights, budget, torch.device("cpu"))
        _, metrics = trainer.fit(packed, weighted_nll, 1, 1)
        assert metrics["loss"] == pytest.approx(mean, rel=1e-5)


def test_no_examples_is_an_error(make_config, model_folder, tmp_path):
    with pytest.raises(ValueError, match="ran out of examples"):
        train_sft(make_config(), model_folder, tmp_path / "out", [], 1, 4, 1e-3)


@pytest.mark.parametrize(
    ("loss", "untrained", "trained"),
    [
        ("assistant", (), {2, 4}),
        ("assistant", (2,), {4}),
        ("assistant", (4,), {2}),
        ("last", (), {4}),
        ("last", (2,), {4}),
    ],
)
def test_content_and_end_of_the_assistants_turns_are_trained(chat, loss, untrained, trained):
    assert encode(chat, talk(*untrained), loss) == expected(chat, trained)


def test_the_loss_on_all_tokens_leaves_out_only_what_says_so(chat):
    ids, _ = expected(chat, ())
    assert encode(chat, talk(), "all") == (ids, [True] * len(ids))
    without = encode(chat, talk(2), "all")[1]
    assert [ids[i] for i, kept in enumerate(without) if not kept] == [*chat.encode("2"), END]


def test_tool_calls_are_trained_as_the_template_writes_them(chat):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    messages = [TALK[1], call, {"role": "tool", "content": "2"}, TALK[2]]
    ids, mask = encode(chat, talk(messages=messages))
    spoken = "".join(chat.decode([i]) if i < 256 else "|" for i, kept in zip(ids, mask, strict=True) if kept)
    assert spoken == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>|2|'


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_the_ids_are_those_of_the_whole_rendering(chat, turns):
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    ids, mask = encode(chat, talk(messages=messages))
    assert ids == whole(chat, talk(messages=messages))[0]
    assert sum(mask) == sum(len(chat.encode(answer)) + 1 for _, answer in turns)


def test_a_template_that_forgets_is_refused_with_the_line_but_its_last_turn_can_be_trained(toy_folder, tmp_path):
    toy.write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(FORGETFUL)
    chat = ChatFormat(tmp_path)
    with pytest.raises(UsageError, match=r"data\.jsonl, line 7: .*not prefix-preserving.*--loss last"):
        encode(chat, talk())
    ids, mask = encode(chat, talk(), "last")
    assert chat.decode([i for i, kept in zip(ids, mask, strict=True) if kept]) == "05"
    assert ids == whole(chat, talk())[0]


def test_a_line_that_the_template_refuses_is_named(tmp_path):
    toy.write_tokenizer(tmp_path)
    picky = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(picky + toy.CHAT_TEMPLATE)
    with pytest.raises(UsageError, match=r"line 7: the model's chat template refuses .*: no system messages"):
        encode(ChatFormat(tmp_path), talk())


def test_nothing_to_train_in_the_last_turn_is_refused(chat):
    with pytest.raises(UsageError, match='line 7: its last message says "train": false'):
        encode(chat, talk(4), "last")


def test_what_is_too_long_is_dropped_and_counted(tmp_path):
    said = []
    assert fitting(tmp_path / "x", "abcd", [3, 9, 8, 10], 8, said.append) == ["a", "c"]
    assert said == [f"{tmp_path}/x: 2 of 4 lines are longer than learner.token_budget = 8 tokens and are dropped"]
    with pytest.raises(UsageError, match=r"2 of 2 lines are longer .*the longest has 10"):
        fitting(tmp_path / "x", "ab", [10, 9], 8, said.append)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(0, 9))
def test_every_epoch_has_every_line_once_in_an_order_that_the_seed_fixes(count, size, epochs, seed):
    made = list(batches(count, size, epochs, seed))
    assert made == list(batches(count, size, epochs, seed))
    assert len(made) == steps_of(count, size, epochs)
    assert Counter(i for part in made for i in part) == dict.fromkeys(range(count), epochs)
    assert max(map(len, made)) <= size


def test_a_file_is_learned_and_the_folder_loads(make_config, toy_folder, tmp_path):
    data, said = tmp_path / "data.jsonl", []
    lines = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]}
             for i in range(16)]  # fmt: skip
    data.write_text("\n".join(map(json.dumps, lines)))
    config = make_config(learner={"token_budget": 64, "lr": 2e-2, "warmup_steps": 0})
    last = train_file(config, toy_folder, tmp_path / "out", data, "assistant", 10, 8, said.append)
    assert said[0] == "16 conversations, 64 trained tokens, 20 steps"
    assert last["loss"] < 0.1
    chat = ChatFormat(tmp_path / "out")
    prompt = torch.tensor([chat.prompt_ids([{"role": "user", "content": "3?"}])])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    out = model.generate(prompt, do_sample=False, max_new_tokens=6)[0, prompt.shape[1] :].tolist()
    assert out == [*chat.encode("yes"), END]


def test_the_command_refuses_a_malformed_line_with_code_2_and_writes_nothing(toy_folder, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": TALK}) + '\n{"messages": []}\n')
    out = tmp_path / "out"
    assert cli.main(["sft", str(toy_folder), str(out), "--data", str(data)]) == 2
    assert f'{data}, line 2: "messages" must be a list' in capsys.readouterr().err
    assert not out.exists()
    data.write_text(json.dumps({"messages": TALK}))
    assert cli.main(["sft", str(toy_folder), str(out), "--data", str(data), "--batch", "1"]) == 0
    assert "step 1 of 1: loss" in capsys.readouterr().out
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize("flags", ["--loss last", "--data x --epochs 0", "--data x --loss x"])
def test_flags_that_make_no_sense_are_refused(toy_folder, tmp_path, flags):
    with pytest.raises(SystemExit) as refused:
        cli.main(["sft", str(toy_folder), str(tmp_path / "out"), *flags.split()])
    assert refused.value.code == 2


def test_the_schedules_warm_up_and_come_down():
    for schedule, middle in (("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)):
        settings = Learner(lr=1.0, warmup_steps=4, schedule=schedule)
        rates = [learning_rate(settings, step, 104) for step in (1, 2, 4, 5, 55, 104)]
        end = 1.0 if schedule == "constant" else 0.01 if schedule == "linear" else math.sin(math.pi / 200) ** 2
        assert rates == pytest.approx([0.25, 0.5, 1.0, 1.0, middle, end])
