"""The noise: bit for bit as documented, and statistically random wherever draws could be correlated."""

import math

import numpy as np
import pytest
import torch

from slipstream.ops.sampling import ACCEPT, DRAFT, DRAW, RESAMPLE, noise_bits, row_key, step_keys, uniform

M32, M64 = 2**32 - 1, 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def recipe(seed, sample, position, purpose, index):
    """The documented recipe, in unsigned Python numbers."""
    row = mix64(mix64(seed + GOLDEN & M64) + GOLDEN * (sample + 1) & M64)
    key = mix64(row + GOLDEN * (4 * position + purpose + 1) & M64)
    x = index + key & M32
    x = (x ^ x >> 16) * 0x7FEB352D & M32
    x = (x ^ x >> 15) ^ key >> 32
    x = x * 0x846CA68B & M32
    x = (x ^ x >> 16) * 0x31848BAB & M32
    return x ^ x >> 14


def bits(seeds, samples, positions, num, purpose=DRAW):
    """Unsigned [rows, num] from lists of seeds, samples and positions of one length."""
    keys = torch.tensor([row_key(seed, sample) for seed, sample in zip(seeds, samples, strict=True)])
    return noise_bits(step_keys(keys, torch.tensor(positions), purpose), num).numpy().view(np.uint32)


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def critical(dof, sigmas=4.0):
    """Wilson and Hilferty's cube: the value a chi-square exceeds once in about 30,000 times."""
    return dof * (1 - 2 / (9 * dof) + sigmas * math.sqrt(2 / (9 * dof))) ** 3


def test_the_noise_follows_its_recipe():
    seeds = [0, 1, 2**63, 2**64 - 1, 123456789]
    samples = [0, 3, 1, 1023, 7]
    positions = [0, 1, 131071, 2**31 + 5, 42]
    for purpose in (DRAW, ACCEPT, RESAMPLE, DRAFT):
        got = bits(seeds, samples, positions, 101, purpose)
        for i, (seed, sample, position) in enumerate(zip(seeds, samples, positions, strict=True)):
            assert got[i].tolist() == [recipe(seed, sample, position, purpose, index) for index in range(101)]


def test_the_recipe_never_changes():
    """A request's seed must give the same text in the next release."""
    assert bits([2026], [1], [17], 3)[0].tolist() == [3902743403, 2522846402, 3408651195]


def test_a_negative_seed_is_its_64_bits():
    assert row_key(-1, 0) == row_key(2**64 - 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_stay_inside_and_keep_their_small_bits(dtype):
    edge = torch.tensor([0, 1, 2**31 - 1, -(2**31), -1], dtype=torch.int32)
    u = uniform(edge, dtype)
    assert ((u > 0) & (u < 1)).all()
    assert (u[1:] >= u[:-1]).all()
    assert torch.isfinite((-torch.log1p(-u)).log()).all()
    assert u[0].item() == 2.0**-33 and u[1].item() == 1.5 * 2.0**-32
    assert u[2].item() == pytest.approx(0.5) and u[3].item() == pytest.approx(0.5)


AXES = {
    "positions": lambda n: bits([5] * n, [0] * n, list(range(n)), 64),
    "samples": lambda n: bits([5] * n, list(range(n)), [9] * n, 64),
    "seeds": lambda n: bits(list(range(n)), [0] * n, [9] * n, 64),
    "far seeds": lambda n: bits([i << 40 for i in range(n)], [0] * n, [9] * n, 64),
}


@pytest.mark.parametrize("axis", AXES)
def test_every_bit_is_fair(axis):
    x = AXES[axis](4096)
    for bit in range(32):
        ones = int((x >> np.uint32(bit) & 1).sum())
        assert abs(ones - x.size / 2) < 4.5 * math.sqrt(x.size) / 2, f"bit {bit}"


@pytest.mark.parametrize("axis", AXES)
def test_bits_do_not_follow_other_bits(axis):
    x = AXES[axis](2048)
    planes = np.stack([(x >> np.uint32(bit) & 1).reshape(-1) for bit in range(32)]).astype(np.float64) * 2 - 1
    correlation = planes @ planes.T / x.size
    np.fill_diagonal(correlation, 0)
    assert abs(correlation).max() < 5 / math.sqrt(x.size)


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_not_correlated(axis):
    """Along the axis and along the vocabulary, as numbers and as bits."""
    x = AXES[axis](4096)
    u = x / 2.0**32 - 0.5
    for a, b in (
        (u[1:], u[:-1]),
        (u[2:], u[:-2]),
        (u[:, 1:], u[:, :-1]),
        (u[1:, 1:], u[:-1, :-1]),
        (u[1:, :-1], u[:-1, 1:]),
    ):
        assert abs((a * b).mean() * 12) < 5 / math.sqrt(a.size)
    flipped = np.unpackbits((x[1:] ^ x[:-1]).view(np.uint8)).mean()
    assert abs(flipped - 0.5) < 5 * 0.5 / math.sqrt(x[1:].size * 32)


@pytest.mark.parametrize("axis", AXES)
def test_pairs_fill_the_square(axis):
    """Serial test: one number and the next along the axis, and along the vocabulary, in 16 x 16 cells."""
    cell = (AXES[axis](4096) >> np.uint32(28)).astype(np.int64)
    for a, b in ((cell[1:], cell[:-1]), (cell[:, 1:], cell[:, :-1])):
        counts = np.bincount((a * 16 + b).reshape(-1), minlength=256)
        # pairs overlap, which widens the spread a little less than it narrows it: dof between 240 and 255
        assert chi_square(counts, a.size / 256) < critical(255)


def test_purposes_have_noise_of_their_own():
    x = [bits([5] * 1024, [0] * 1024, list(range(1024)), 64, purpose) for purpose in (DRAW, ACCEPT, RESAMPLE, DRAFT)]
    for i in range(4):
        for j in range(i):
            for shift in (0, 1):
                a, b = x[i][shift:] / 2.0**32 - 0.5, x[j][: 1024 - shift] / 2.0**32 - 0.5
                assert abs((a * b).mean() * 12) < 5 / math.sqrt(a.size)


def test_one_uniform_a_position_is_uniform():
    """As acceptance of drafts will use it: index 0 only."""
    x = bits([7] * 20000, [2] * 20000, list(range(20000)), 1, ACCEPT)[:, 0]
    counts = np.bincount(x >> np.uint32(25), minlength=128)
    assert chi_square(counts, 20000 / 128) < critical(127)


def test_a_long_vocabulary_is_uniform():
    x = bits([1, 2], [0, 0], [0, 10**6], 151936)
    for row in x:
        counts = np.bincount(row >> np.uint32(24), minlength=256)
        assert chi_square(counts, 151936 / 256) < critical(255)
