"""The toy model: a complete folder that loads offline, the same for the same seed, made once and never half."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from asyncrl import toy
from asyncrl.chat import ChatFormat
from asyncrl.config import Config
from asyncrl.envs.arithmetic import make
from asyncrl.settings import UsageError
from asyncrl.toy import END_ID, PAD_ID, VOCAB_SIZE, default_model, examples, init_model, warm_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_model(tmp_path_factory.mktemp("toy") / "model", hidden=64, layers=1, heads=4, kv_heads=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _config(cache: Path, **toy_settings: object) -> Config:
    settings = {"cache_dir": str(cache), "hidden": 32, "layers": 1, "warm_steps": 3, "warm_rows": 4}
    return Config.model_validate({"toy": settings | toy_settings})


def test_the_folder_loads_offline_with_the_auto_classes(folder: Path, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.head_dim == 32
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (4, 2)
    assert model.config.vocab_size == len(tokenizer) == VOCAB_SIZE
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == END_ID
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == PAD_ID
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34="}], add_generation_prompt=True, return_dict=False
    )
    assert ids == ChatFormat(folder).prompt_ids([{"role": "user", "content": "12+34="}])
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), VOCAB_SIZE)


def test_every_printable_character_is_one_token(folder: Path) -> None:
    chat = ChatFormat(folder)
    printable = "".join(map(chr, range(32, 127)))
    ids = chat.encode(printable)
    assert len(ids) == len(set(ids)) == 95
    assert chat.decode(ids) == printable


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    paths = [init_model(tmp_path / str(i), hidden=32, layers=1, seed=seed) for i, seed in enumerate((1, 1, 2))]
    assert torch.equal(torch.rand(3), expected)
    weights = [(path / "model.safetensors").read_bytes() for path in paths]
    assert weights[0] == weights[1] != weights[2]


def test_sizes_up_to_the_benchmarks_are_possible(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = init_model(tmp_path / "big", hidden=256, layers=4, heads=8, context=512)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert 3.2e6 < sum(weight.numel() for weight in model.parameters()) < 3.5e6


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"hidden": 48}, "hidden = 48: must be a positive multiple of 32"),
        ({"hidden": 0}, "hidden = 0"),
        ({"hidden": 96, "kv_heads": 4}, "kv_heads = 4 must divide heads = 6"),
        ({"layers": 0}, "layers = 0"),
    ],
)
def test_a_size_that_is_not_possible_is_refused(tmp_path: Path, sizes: dict[str, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        init_model(tmp_path / "x", **sizes)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


def test_an_example_is_prompt_answer_and_end_and_only_the_answer_is_trained(folder: Path) -> None:
    chat = ChatFormat(folder)
    for ids, trained in islice(examples(make(), chat, seed=0), 50):
        assert len(ids) == len(trained)
        prompt = trained.index(True)
        assert all(trained[prompt:])
        left, right = chat.decode(ids[:prompt]).removesuffix("=").split("+")
        assert chat.decode(ids[prompt:]) == str(int(left) + int(right))
        assert ids[-1] == END_ID
        assert ids[:prompt] == chat.prompt_ids([{"role": "user", "content": f"{left}+{right}="}])


def test_examples_come_from_the_training_split_and_differ_with_the_seed(folder: Path) -> None:
    chat, environment = ChatFormat(folder), make(digits=1)
    held_out = {environment.task("eval", i).prompt[0]["content"] for i in range(300)}
    texts = {chat.decode(ids[:6]) for ids, _ in islice(examples(environment, chat, seed=0), 300)}
    assert not texts & held_out
    first, second = (next(examples(make(), chat, seed=seed)) for seed in (0, 1))
    assert first != second


class Three:
    """An environment with three tasks."""

    def task(self, split, index):
        from asyncrl.messages import Task

        if index >= 3:
            raise IndexError(index)
        return Task(id=str(index), prompt=[{"role": "user", "content": str(index)}])

    def make(self):
        return make().make()

    def demonstration(self, task):
        return task.id


def test_a_finite_environment_is_cycled(folder: Path) -> None:
    chat = ChatFormat(folder)
    seen = [chat.decode(ids) for ids, _ in islice(examples(Three(), chat, seed=0), 60)]
    assert set(seen) == {"00", "11", "22"}


def test_the_default_model_is_made_once_with_progress(tmp_path: Path) -> None:
    lines: list[str] = []
    config = _config(tmp_path / "cache")
    path = default_model(config, lines.append)
    assert lines[0].startswith("making the toy model, once")
    assert any(line.startswith("warm start: step 3, loss") for line in lines)
    made = (path / "model.safetensors").read_bytes()
    assert made != (init_model(tmp_path / "raw", hidden=32, layers=1) / "model.safetensors").read_bytes()
    assert ChatFormat(path).stop_token_ids == (END_ID,)
    assert default_model(config, lines.append) == path
    assert sum(line.startswith("making") for line in lines) == 1
    assert os.listdir(tmp_path / "cache") == [path.name], "no scratch folder is left"


def test_the_warm_start_ends_when_the_loss_is_low_enough(tmp_path: Path, folder: Path) -> None:
    lines: list[str] = []
    # The loss of a fresh model is about log(vocabulary) = 5.6, so it is below 50 as soon as it may be looked at.
    warm_start(_config(tmp_path, warm_steps=40, warm_loss=50.0), folder, tmp_path / "out", lines.append)
    assert [line.split(",")[0] for line in lines] == [f"warm start: step {toy.LOSS_WINDOW}"]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_everything_that_shapes_the_model_is_part_of_its_key(tmp_path: Path) -> None:
    base = _config(tmp_path)
    others = [
        _config(tmp_path, warm_steps=4),
        _config(tmp_path, warm_lr=1e-3),
        _config(tmp_path, layers=2),
        base.model_copy(update={"run": base.run.model_copy(update={"seed": 1})}),
        base.model_copy(update={"env": base.env.model_copy(update={"args": {"digits": 1}})}),
    ]
    keys = {toy._key(config) for config in [base, *others]}
    assert len(keys) == len(others) + 1
    elsewhere = _config(tmp_path / "elsewhere")
    renamed = base.model_copy(update={"run": base.run.model_copy(update={"name": "x"})})
    assert toy._key(elsewhere) == toy._key(renamed) == toy._key(base)


def test_two_runs_that_make_it_at_once_both_get_a_whole_model(tmp_path: Path) -> None:
    code = (
        "import sys; from asyncrl.config import Config; from asyncrl.toy import default_model\n"
        "print(default_model(Config.model_validate_json(sys.argv[1]), lambda line: None))"
    )
    text = _config(tmp_path / "cache", warm_steps=0).model_dump_json()
    makers = [
        subprocess.Popen([sys.executable, "-P", "-c", code, text], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {maker.communicate(timeout=120)[0].splitlines()[-1] for maker in makers}
    assert [maker.returncode for maker in makers] == [0, 0]
    (path,) = paths
    assert json.loads((Path(path) / "config.json").read_text())["hidden_size"] == 32
    assert os.listdir(tmp_path / "cache") == [Path(path).name]


def test_a_failed_making_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("killed half way")

    monkeypatch.setattr(toy, "warm_start", fails)
    with pytest.raises(RuntimeError, match="half way"):
        default_model(_config(tmp_path / "cache"), lambda line: None)
    assert os.listdir(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_refused_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"toy\.cache_dir = .*file/cache cannot be written"):
        default_model(_config(tmp_path / "file" / "cache"), lambda line: None)


def test_an_environment_without_demonstrations_is_refused_with_what_to_do(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "plain.py"
    source.write_text("class E:\n def task(s, split, i): ...\n def make(s): ...\ndef make(): return E()\n")
    config = Config.model_validate({"env": {"name": f"{source}:make"}})
    with pytest.raises(UsageError, match=r"has no demonstration\(task\).*--model\.path FOLDER"):
        warm_start(config, folder, tmp_path / "out", lambda line: None)
