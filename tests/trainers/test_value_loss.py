"""The clipped value loss against its definition, and the gradient that it leaves."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainers.value_loss import value_loss

number = st.floats(-5, 5)
cases = st.lists(st.tuples(number, number, number), max_size=20)


@given(cases, st.sampled_from([0.0, 0.1, 0.5, 3.0]))
@settings(max_examples=30, deadline=None)
def test_the_loss_is_the_larger_of_both_squared_errors(values, clip):
    v, old, target = np.array(values, dtype=np.float64).reshape(-1, 3).T
    loss, clipped = value_loss(*(torch.tensor(x) for x in (v, old, target)), clip)
    near = np.clip(v, old - clip, old + clip) if clip else v
    slow = 0.5 * np.maximum((v - target) ** 2, (near - target) ** 2)
    np.testing.assert_allclose(loss, slow, atol=1e-12)
    far = (near - target) ** 2 > (v - target) ** 2 + 1e-9
    assert clipped[torch.from_numpy(far)].all()
    assert not clipped[torch.from_numpy(np.abs(v - old) <= clip)].any()


@given(cases, st.sampled_from([0.1, 0.5]))
@settings(max_examples=30, deadline=None)
def test_the_gradient_is_the_error_and_0_where_it_is_clipped(values, clip):
    v, old, target = torch.tensor(values, dtype=torch.float64).view(-1, 3).T
    v = v.clone().requires_grad_()
    loss, clipped = value_loss(v, old, target, clip)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    torch.testing.assert_close(gradient, torch.where(clipped > 0, 0.0, (v - target).detach()))


def test_a_value_that_ran_past_the_clip_is_pulled_back_but_not_pushed_on():
    old, target = torch.zeros(2), torch.tensor([2.0, -2.0])
    v = torch.tensor([1.0, 1.0], requires_grad=True)
    loss, clipped = value_loss(v, old, target, 0.5)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    assert clipped.tolist() == [1, 0]
    assert gradient.tolist() == [0, 3]
    torch.testing.assert_close(loss.detach(), torch.tensor([0.5 * 1.5**2, 0.5 * 3**2]))


def test_a_value_that_is_not_finite_is_not_hidden_by_the_clip():
    loss, _ = value_loss(torch.tensor([torch.nan]), torch.zeros(1), torch.ones(1), 0.5)
    assert loss.isnan().all()
