"""Loading, packed attention, the start-up self-test, and the walk over the weights."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from asyncrl.learner import attention, model
from asyncrl.learner.selftest import PackingMismatch
from asyncrl.learner.update import Trainer


@pytest.mark.parametrize("lengths", [[1], [8], [3, 1, 17, 8, 9, 3], list(range(1, 30))])
def test_padded_attention_and_its_gradient_equal_attention_by_segment(lengths):
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(1, heads, total, 8, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(1, total, 4, 8)
    ours, _ = attention._attend(torch.nn.Identity(), q, k, v, None, segments=attention.segments(lengths))
    ours.backward(upstream)
    grads = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    parts, start = [], 0
    for n in lengths:
        part = slice(start, start + n)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        scores = (q[:, :, part] @ k[:, :, part].repeat_interleave(2, 1).transpose(2, 3)) / 8**0.5
        parts.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, :, part].repeat_interleave(2, 1))
        start += n
    slow = torch.cat(parts, 2).transpose(1, 2)
    slow.backward(upstream)
    torch.testing.assert_close(ours, slow, atol=1e-5, rtol=1e-5)
    for grad, x in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(grad, x.grad, atol=1e-5, rtol=1e-5)


def test_what_packed_attention_cannot_compute_is_refused():
    q = torch.randn(1, 2, 6, 8)
    row = attention.segments([6])
    for extra in ({"softcap": 30.0}, {"sliding_window": 4}):
        with pytest.raises(ValueError, match=next(iter(extra))):
            attention._attend(torch.nn.Identity(), q, q, q, None, segments=row, **extra)
    attention._attend(torch.nn.Identity(), q, q, q, None, segments=row, sliding_window=6)


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_the_self_test_passes_a_sound_model(alone, make_config, folder, request):
    trainer = Trainer(make_config(), request.getfixturevalue(folder))
    assert trainer.self_test() < 1e-5


def capped():
    """Caps its logits at 5, with weights large enough for the cap to matter."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, initializer_range=0.3,
            attn_logit_softcapping=None, final_logit_softcapping=5.0,
        )
    )  # fmt: skip


def biased():
    """Its LM head is a matrix and a bias."""
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            tie_word_embeddings=False, initializer_range=0.15,
        )
    )  # fmt: skip
    model.lm_head.bias.data.normal_()
    return model


@pytest.mark.parametrize("make", [capped, biased])
def test_a_capped_or_biased_head_is_computed_and_trained(alone, make_config, batches, tmp_path, make):
    torch.manual_seed(3)
    make().save_pretrained(tmp_path)
    trainer = Trainer(make_config(), tmp_path)
    assert trainer.self_test() < 1e-5
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.train(*batches.share(1), 1)
    same = [name for name, tensor in trainer.weights() if torch.equal(tensor, before[name])]
    assert not same


def test_the_self_test_refuses_attention_that_ignores_the_segments(alone, make_config, model_folder, monkeypatch):
    trainer = Trainer(make_config(), model_folder)
    plain = attention.segments
    monkeypatch.setattr(attention, "segments", lambda lengths: plain([sum(lengths)]))
    with pytest.raises(PackingMismatch, match="cannot be trained with packed rows"):
        trainer.self_test()


@pytest.mark.parametrize("folder", ["model_folder", "untied_folder"])
def test_the_walk_yields_every_weight_once_under_its_hugging_face_name(
    alone, make_config, folder, request, batches
):
    path = request.getfixturevalue(folder)
    trainer = Trainer(make_config(), path)
    expected = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    walked = {name: tensor.clone() for name, tensor in trainer.weights()}
    assert walked.keys() == expected.keys()
    assert all(torch.equal(walked[name], expected[name]) for name in expected)
    trainer.train(*batches.share(1), 1)
    for name, tensor in trainer.weights():
        assert torch.equal(tensor, trainer.optimizer.named[model.PREFIX + name].full_tensor())
        assert not torch.equal(tensor, walked[name])


def test_the_manifest_announces_the_walk(alone, make_config, model_folder):
    trainer = Trainer(make_config(model={"dtype": "bfloat16"}), model_folder)
    walked = [(name, str(t.dtype), list(t.shape)) for name, t in trainer.weights()]
    assert walked == [(meta.name, f"torch.{meta.dtype}", meta.shape) for meta in trainer.manifest()]


def test_a_walk_that_is_given_up_leaves_the_model_usable(alone, make_config, model_folder, batches):
    trainer = Trainer(make_config(), model_folder)
    next(trainer.weights())
    assert trainer.train(*batches.share(1), 1)["tokens_trained"] > 0


def test_bfloat16_trains_on_float32_master_weights(alone, make_config, model_folder, batches):
    trainer = Trainer(make_config(model={"dtype": "bfloat16"}), model_folder)
    assert trainer.self_test() < 3e-2
    trainer.train(*batches.share(1), 1)
    assert {p.dtype for p in trainer.optimizer.named.values()} == {torch.float32}


def test_a_missing_folder_is_named(alone, make_config, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^\S*nothing: no Hugging Face folder there"):
        Trainer(make_config(), tmp_path / "nothing")


def test_segments_that_share_a_prompt_have_the_outputs_and_gradients_of_separate_ones() -> None:
    torch.manual_seed(0)
    prompt, tails = 5, (3, 1, 9)
    lengths = [prompt + tail for tail in tails]
    shared = np.concatenate([np.arange(prompt), prompt + np.arange(3)])
    shared = np.concatenate([shared, np.arange(prompt), [8], np.arange(prompt), 9 + np.arange(9)])
    stored = [torch.randn(18, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(18, 4, 4, dtype=torch.float64)

    def run(rows: list[torch.Tensor], plan: attention.Segments) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in rows)
        return attention._attend(torch.nn.Identity(), q, k, v, None, segments=plan)[0][0]

    once = run(stored, attention.segments(lengths, shared))
    once_grads = torch.autograd.grad((once * upstream).sum(), stored)
    whole = run([x[torch.from_numpy(shared)] for x in stored], attention.segments(lengths))
    first = torch.from_numpy(np.unique(shared, return_index=True)[1])
    whole_grads = torch.autograd.grad((whole[first] * upstream).sum(), stored)
    assert torch.allclose(once, whole[first], atol=1e-12)
    for ours, theirs in zip(once_grads, whole_grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
