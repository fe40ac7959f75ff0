"""Weight deltas: exact to the bit on both paths, against plain comparisons of the bits."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.triton_kernels.delta import BITS, BLOCK, apply, checksum, encode

BACKENDS = ("torch", "triton")
CODES = ("absolute", "ulp")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [1, 15, 16, 17, 4095, 4096, 4097, 9001]


def bits(tensor):
    return tensor.view(BITS[tensor.dtype])


def versions(n, dtype=torch.bfloat16, density=0.01, seed=0):
    """Random bits, NaNs and infinities among them, of which a share changes to other random bits."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(BITS[dtype])

    def random():
        drawn = torch.randint(limits.min, limits.max + 1, (n,), generator=generator, dtype=torch.int64)
        return drawn.to(BITS[dtype])

    old, other = random(), random()
    new = torch.where(torch.rand(n, generator=generator) < density, other, old)
    return new.view(dtype), old.view(dtype)


def assert_round_trip(new, old, code, backend):
    base = old.clone()
    delta = encode(new, old, code=code, backend=backend)
    apply(delta, base, backend=backend)
    assert torch.equal(bits(base), bits(new))
    assert delta.density * new.numel() == pytest.approx(int((bits(new) != bits(old)).sum()))
    return delta


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_the_base_becomes_the_new_version_bit_for_bit(backend, code, dtype, density):
    for n in SIZES:
        new, old = versions(n, dtype, density, seed=n)
        assert_round_trip(new, old, code, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    n=st.one_of(st.integers(0, 70), st.sampled_from(SIZES)), density=st.floats(0, 1), code=st.sampled_from(CODES),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_change_of_any_size_survives_the_round_trip(backend, n, density, code, dtype, seed):
    assert_round_trip(*versions(n, dtype, density, seed), code, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", CODES)
def test_both_paths_give_the_same_delta_bit_for_bit(dtype, code):
    new, old = versions(9001, dtype, 0.3)
    one, other = (encode(new, old, code=code, backend=backend) for backend in BACKENDS)
    for field in dataclasses.fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if isinstance(first, torch.Tensor):
            assert first.dtype == second.dtype
            assert torch.equal(first, second)
        else:
            assert first == second


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_delta_lists_the_places_and_bits_that_a_loop_finds(backend):
    new, old = versions(9001, density=0.02)
    delta = encode(new, old, backend=backend)
    places = [i for i, (a, b) in enumerate(zip(bits(new).tolist(), bits(old).tolist(), strict=True)) if a != b]
    assert delta.offsets.tolist() == [i % BLOCK for i in places]
    assert delta.values.tolist() == bits(new)[places].tolist()
    assert delta.counts.tolist() == [sum(i // BLOCK == block for i in places) for block in range(3)]
    assert delta.nbytes == 3 * 4 + len(places) * (2 + 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_zeros_infinities_and_nan_payloads_are_kept(backend, code, dtype):
    limits = torch.iinfo(BITS[dtype])
    special = torch.tensor([0.0, -0.0, 1.5, -1.5, float("inf"), -float("inf"), float("nan")], dtype=dtype)
    special = torch.cat([bits(special), torch.tensor([1, limits.max, -1, limits.min + 1], dtype=BITS[dtype])])
    old, new = special.repeat_interleave(len(special)).view(dtype), special.repeat(len(special)).view(dtype)
    delta = assert_round_trip(new, old, code, backend)
    assert len(delta.offsets) == len(special) * (len(special) - 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_steps_count_the_floats_between_two_numbers(dtype):
    kind = {torch.float16: np.float16, torch.float32: np.float32}[dtype]
    old = torch.tensor([1.0, -1.0, 1.0, 0.0, -0.0, 1.0, 3.0], dtype=dtype)
    up = np.nextafter(kind(0), kind(1))
    new = [
        np.nextafter(kind(1), kind(2)),
        np.nextafter(kind(-1), kind(0)),
        np.nextafter(kind(1), kind(0)),
        -0.0,
        up,
    ]
    new = torch.tensor([*map(float, new), -1.0, 300.0], dtype=dtype)
    delta = encode(new, old, code="ulp")
    # From -0.0 to the smallest positive number there are two steps, for 0.0 lies between.
    assert delta.values.tolist() == [1, 1, -1, -1, 2, -128, -128]
    assert torch.equal(delta.escapes, bits(new)[-2:])


def test_steps_up_to_127_take_one_byte_and_longer_ones_escape():
    old = torch.full((6,), 16256, dtype=torch.int16)
    new = (old + torch.tensor([126, 127, 128, -127, -128, -129])).short()
    delta = assert_round_trip(new.view(torch.bfloat16), old.view(torch.bfloat16), "ulp", "torch")
    assert delta.values.tolist() == [126, 127, -128, -127, -128, -128]
    assert delta.escapes.tolist() == new[[2, 4, 5]].tolist()


def test_small_steps_need_three_bytes_each():
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(100_000, generator=generator) * 0.02
    new, old = (master + 1e-6 * torch.randn(100_000, generator=generator)).bfloat16(), master.bfloat16()
    absolute, ulp = (assert_round_trip(new, old, code, "torch") for code in CODES)
    n, blocks = len(absolute.offsets), 25
    assert 0 < absolute.density < 0.05
    assert absolute.nbytes == 4 * blocks + 4 * n
    assert ulp.nbytes == 4 * blocks + 3 * n + 2 * len(ulp.escapes)
    assert len(ulp.escapes) < n / 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_absolute_deltas_may_be_applied_twice_and_ulp_deltas_may_not(backend):
    new, old = versions(5000)
    base = old.clone()
    for _ in range(2):
        apply(encode(new, old, backend=backend), base, backend=backend)
    assert torch.equal(bits(base), bits(new))
    with pytest.raises(ValueError, match="not the version that this delta was made from"):
        apply(encode(new, old, code="ulp", backend=backend), base, backend=backend)
    assert torch.equal(bits(base), bits(new))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("code", CODES)
def test_a_wrong_base_is_refused_and_left_as_it_was(backend, code):
    new, old = versions(5000)
    base = old.clone()
    bits(base)[(bits(new) == bits(old)).nonzero()[7]] ^= 1
    kept = base.clone()
    with pytest.raises(ValueError, match="load the whole tensor"):
        apply(encode(new, old, code=code), base, backend=backend)
    assert torch.equal(bits(base), bits(kept))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["values", "offsets", "escapes"])
def test_a_damaged_delta_is_noticed_and_the_base_put_back(backend, part):
    new, old = versions(5000)
    delta = encode(new, old, code="ulp" if part == "escapes" else "absolute")
    damaged = getattr(delta, part).clone()
    damaged[len(damaged) // 2] ^= 2
    base = old.clone()
    with pytest.raises(ValueError, match="checksum differs"):
        apply(dataclasses.replace(delta, **{part: damaged}), base, backend=backend)
    assert torch.equal(bits(base), bits(old))


@pytest.mark.parametrize("code", CODES)
def test_parts_that_do_not_belong_together_are_noticed(code):
    new, old = versions(5000)
    delta = encode(new, old, code=code)
    offset = delta.offsets.clone()
    offset[-1] = 1000
    damaged = [
        {"values": delta.values[:-1]}, {"offsets": delta.offsets[:-1]}, {"counts": delta.counts + 1},
        {"escapes": torch.cat([delta.escapes, delta.values[:1].to(torch.int16)])}, {"offsets": offset},
        {"offsets": -1 - delta.offsets}, {"counts": delta.counts[:1]},
    ]  # fmt: skip
    for parts in damaged:
        with pytest.raises(ValueError, match="do not belong together"):
            apply(dataclasses.replace(delta, **parts), old.clone())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_checksum_notices_what_an_xor_would_not(backend):
    new, _ = versions(9001)
    known = checksum(new, backend=backend)
    for i, j in [(0, 1), (3, 4100), (BLOCK + 2, 2 * BLOCK + 1), (5, BLOCK + 5), (4095, 9000)]:
        swapped = new.clone()
        bits(swapped)[[i, j]] = bits(new)[[j, i]]
        assert checksum(swapped, backend=backend) != known
        flipped = new.clone()
        bits(flipped)[[i, j]] ^= torch.iinfo(torch.int16).min
        assert checksum(flipped, backend=backend) != known
    assert checksum(new.clone(), backend=backend) == known


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checksum_is_the_same_on_both_paths_and_equals_its_definition(dtype):
    new, _ = versions(4100, dtype)

    def weight(i):
        x = (i + 1) * 0x1E3779B97F4A7C15 % 2**64
        x -= 2**64 * (x >= 2**63)
        return (x ^ (x >> 32)) * 0x3F58476D1CE4E5B9 | 1

    values = bits(new).tolist()
    total = sum(v * weight(i % BLOCK) * weight(BLOCK + i // BLOCK) for i, v in enumerate(values)) % 2**64
    assert {checksum(new, backend=backend) % 2**64 for backend in BACKENDS} == {total}


def test_matrices_scalars_and_empty_tensors_keep_their_shape():
    for shape in [(60, 70), (), (0,), (3, 0)]:
        n = torch.Size(shape).numel()
        new, old = (x.view(shape) for x in versions(n, density=0.5, seed=1))
        for backend in BACKENDS:
            delta = encode(new, old, backend=backend)
            base = old.clone()
            apply(delta, base, backend=backend)
            assert delta.shape == shape
            assert torch.equal(bits(base), bits(new))


def test_parameters_are_written_in_place():
    new, old = versions(100, torch.float32, 0.5)
    parameter = torch.nn.Parameter(old.clone())
    memory = parameter.data_ptr()
    apply(encode(new, torch.nn.Parameter(old)), parameter)
    assert parameter.data_ptr() == memory
    assert torch.equal(bits(parameter.detach()), bits(new))


def test_what_is_not_contiguous_is_refused():
    new, old = (x.view(8, 8) for x in versions(64, density=0.5))
    for pair in [(new.t(), old), (new, old.t())]:
        with pytest.raises(ValueError, match="contiguous"):
            encode(*pair)
    with pytest.raises(ValueError, match="contiguous"):
        apply(encode(new, old), old.t())


def test_wrong_arguments_are_explained():
    new, old = versions(64)
    with pytest.raises(ValueError, match="two versions of one tensor"):
        encode(new, old[:63])
    with pytest.raises(ValueError, match="two versions of one tensor"):
        encode(new, old.float())
    with pytest.raises(ValueError, match="allowed: bfloat16, float16, float32"):
        encode(new.double(), old.double())
    with pytest.raises(ValueError, match="allowed: absolute, ulp"):
        encode(new, old, code="xor")
    for base in (old[:63], old.view(8, 8), old.view(torch.float16)):
        with pytest.raises(ValueError, match=r"the delta is of torch.bfloat16 \[64\]"):
            apply(encode(new, old), base)
