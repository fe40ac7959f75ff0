"""The learner on a GPU: the same numbers as on the CPU. Skipped where there is no GPU.

It needs compiled kernels: run it by itself, `pytest tests/learner/test_cuda.py`. With the tests of the kernels in
the same run they are interpreted.
"""

import sys

import pytest
import torch

from asyncrl.learner import attention, dist
from asyncrl.learner.update import Trainer
from asyncrl.triton_kernels.rl_head import rl_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def compiled_kernels():
    kernels = sys.modules.get("asyncrl.triton_kernels.rows_triton")
    if kernels is not None and type(kernels.row_statistics).__name__ != "JITFunction":
        pytest.skip("the kernels are interpreted in this run: pytest tests/learner/test_cuda.py")


def test_packed_attention_equals_the_cpu_with_gradients():
    torch.manual_seed(0)
    lengths = [3, 70, 1, 33]
    total = sum(lengths)
    q, k, v = (torch.randn(1, heads, total, 32).bfloat16() for heads in (8, 2, 2))
    upstream = torch.randn(1, total, 8, 32)
    results = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        x = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
        row = attention.segments(lengths).to(torch.device(device))
        out, _ = attention._attend(torch.nn.Identity(), *x, None, scaling=0.2, segments=row)
        out.backward(upstream.to(device, dtype))
        results.append([t.float().cpu() for t in (out, *(t.grad for t in x))])
    for cpu, cuda in zip(*results, strict=True):
        assert (cpu - cuda).abs().max() / cpu.abs().max() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_equals_the_cpu(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64).to(dtype), torch.randn(1009, 64).to(dtype)
    labels, advantage = torch.randint(0, 1009, (300,)), torch.randn(300)
    results = []
    for device in ("cpu", "cuda"):
        h, w = (t.to(device).requires_grad_() for t in (hidden, weight))
        a = advantage.to(device)
        out = rl_head(
            h, w, labels.to(device), token_loss=lambda p, e, s, a=a: (-a[s] * p - 0.1 * e, {}), temperature=0.8
        )
        out.loss.backward()
        results.append([t.float().cpu() for t in (out.loss, out.logp, out.entropy, h.grad, w.grad)])
    for cpu, cuda in zip(*results, strict=True):
        assert (cpu - cuda).abs().max() / cpu.abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_a_training_step_in_bfloat16_is_close_to_the_cpu_in_float32(model_folder, make_config, batches):
    results = {}
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        with dist.alone(device):
            trainer = Trainer(make_config(learner={"device": device}, model={"dtype": dtype}), model_folder)
            trainer.self_test()
            results[device] = [trainer.train(*batches.share(step), step) for step in (1, 2)]
            assert all(t.device.type == device for _, t in trainer.weights())
    for cpu, cuda in zip(results["cpu"], results["cuda"], strict=True):
        assert cuda["loss"] == pytest.approx(cpu["loss"], abs=2e-2)
        assert cuda["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=5e-2)
        assert cuda["tokens_trained"] == cpu["tokens_trained"]
