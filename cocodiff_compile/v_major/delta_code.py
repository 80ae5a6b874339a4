# SPDX-License-Identifier: Apache-2.0
"""Codes a tensor in few bits per element, as the difference to a reference that the receiver has
too.

A group is one head of one token. It is sent as one unsigned number of `bits` bits per element and
twelve bits for its scale:

    number   floor(difference / step) in -L/2 .. L/2 - 1, L = 2**bits; stands for the middle
    scale    L/2 steps of half the difference: 2**e * (1 + m/8), e in -127..128, as
             (e + 127) * 8 + m in eleven bits; 0 for no difference at all; NOT_FINITE for a group
             that is not finite: the receiver reads NaN, and neither side updates its reference
    plain    the twelfth bit: the spreads of channels, see below, do not apply to this group

A group keeps its relative precision whatever the other groups are, from the smallest normal number
to the largest; a difference below that arrives as zero, or closer. Halves are coded because the
difference of two finite numbers may not be finite.

Channels of a head differ in how much they change, by rotary frequency and by weights. Differences
are therefore first divided by the spread of their channel over all groups of a message, which is
sent in eight bits per channel. That gains 4 to 5 dB with 2 bits on the small trained model. In the
spreads no group has more weight than the usual one, however large it is, and a group that the
spreads do not fit is plain: a token with a pattern of its own may be largest where spreads are
small, and would get a far larger step.

Sender and receiver decode words by the same exact arithmetic, so that both have the same reference:
the value that they expect next. That is the value that arrived, extrapolated by EXTRAPOLATION of
its difference to the reference, since changes tend to continue. The error of a code is part of the
next difference, so that errors do not add up. They need not vanish either: with 2 bits a constant
value may be overshot alternately from both sides, and where all elements of a message differ alike
such oscillations can grow for a while; the changes of a model are not like that.

    coded        difference = value - reference   arrives: reference + decoded
                 reference += (1 + EXTRAPOLATION) * decoded
    intra-coded  difference = value               arrives: decoded      reference = decoded

    difference [P, n, G] -> words [P, (n*G*bits + 12*n + 8*G) / 32] -> difference, decoded [P, n, G]

Numbers, scales and spreads each begin a new word. Words are 32 bits long and are stored as float32,
of which only the bits count. Numbers are stored as float32 too: in Inductor's code for CPUs without
AVX-512, loops that load integers took two to four times as long.

These are plain functions of tensors, which passes trace into graphs and tests call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = (1, 2, 3, 4, 8)
"""The supported numbers of bits per element."""
FULL = 0
"""Stands in place of a number of bits for a role that is sent uncompressed."""
GROUP_MULTIPLE = 8
"""The size of a group must be a multiple of this, so that its numbers fill whole bytes."""
SCALE_BITS = 12
SPREAD_BITS = 8
NOT_FINITE = 2047
"""The scale code of a group that has an element that is not finite."""
PLAIN = 2048
"""Is added to the scale code of a group that is coded without spreads."""
NO_EXPONENT = 128.0
"""A value above the exponent of any finite group."""
EXTRAPOLATION = 0.5
"""The share of a decoded difference by which the expected value goes beyond the arrived one. Of 0,
0.3, 0.5 and 0.65 this came closest to the exact pictures of the small trained model, by 3 to 8 dB
more than 0 with 1 to 3 bits.
"""
FLOOR = 1 / 8
"""The loss of a group smaller than this share of the usual size is measured against this share."""
_MISFIT = 4.0
"""A group is coded plain if spreads would make its step more than this many times as large."""
_LARGEST_SHAPED = 100.0
"""Groups with a larger absolute exponent are coded plain: spreads could take a scale or a product
out of the range in which it is exact.
"""
_LEAST_STEP = 2.0**-40
"""A lower bound of the step of any normalized group that is not zero."""
_ZERO_ENERGY = 0.1
"""A plain group whose energy is less than this share of its squared step is coded as zero. Its step
is then the smallest possible, and the middle of an interval would be farther off.
"""
_TINY = 1e-30
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_SPREAD_BIAS = (127 - 20) * 8
"""The code of a spread of 2**-20, in eighths of a float32 exponent."""
_BELOW_EIGHTHS = 20
"""The number of mantissa bits of float32 that scales and spreads do not have."""
_WORD = 32
_PLANES = {
    1: ((1, 0),),
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    8: ((8, 0),),
    12: ((8, 0), (4, 8)),
}
"""The bit fields into which the bits of a number are split: (width, lowest bit) of each."""
_STEP = {1: 1.6, 2: 1.0, 3: 0.586, 4: 0.335}
"""The step, relative to a group's root mean square, that loses least of normal elements."""
_DISTORTION = {1: 0.363, 2: 0.119, 3: 0.0375, 4: 0.0116, 8: 0.000039}


def distortion(bits: int) -> float:
    """Returns the share of their energy that normally distributed elements lose. With 8 bits it
    depends slightly on the group size.
    """
    return _DISTORTION[bits]


def code_bits(bits: int, group: int) -> int:
    """Returns the bits of one coded group, its scale included."""
    return group * bits + SCALE_BITS


def send(
    values: Tensor, reference: Tensor, bits: int, is_intra_coded: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the words to send, the value that both sides expect next, and what will arrive."""
    half = values.to(torch.float32) * 0.5
    difference = half if is_intra_coded else half - reference.to(torch.float32) * 0.5
    groups = normalize(difference)
    spread = _in_memory(spread_code(groups))
    number, code = quantize(groups, spread, bits)
    coded = torch.cat([pack(number, bits), pack(code, SCALE_BITS), pack(spread, SPREAD_BITS)], 1)
    return coded, *advance(reference, number, code, spread, bits, is_intra_coded)


def update(
    reference: Tensor, coded: Tensor, bits: int, is_intra_coded: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the value expected next and the one that arrived, NaN for a group not finite."""
    num_ranks, rows, group = reference.shape
    counts = ((rows * group, bits), (rows, SCALE_BITS), (group, SPREAD_BITS))
    parts = torch.split(coded, [num_words(*item) for item in counts], 1)
    numbers, codes, spreads = (
        unpack(part, *item) for part, item in zip(parts, counts, strict=True)
    )
    number = numbers.view(reference.shape)
    code = codes.view(num_ranks, rows, 1)
    spread = spreads.view(num_ranks, 1, group)
    return advance(reference, number, code, spread, bits, is_intra_coded)


class Normalized(NamedTuple):
    """Holds differences of which each group was multiplied by a power of two."""

    unit: Tensor
    """[P, n, G]: 0, or scaled so that the largest element of a group is from 2 to 4. It is less
    only where all elements of a group are below the smallest normal number.
    """
    largest: Tensor
    """The largest absolute element of each group, [P, n, 1]."""
    energy: Tensor
    """The mean square of each group, [P, n, 1]."""
    exponent: Tensor
    """[P, n, 1]: a difference is `unit * 2**exponent`; NO_EXPONENT if the group is not finite."""


def normalize(difference: Tensor) -> Normalized:
    """Scales each group by a power of two so that no square overflows or vanishes. A group that is
    not finite becomes zeros.
    """
    largest = _in_memory(difference.abs().amax(-1, keepdim=True))
    is_finite = largest < float("inf")
    biased = (largest.view(torch.int32) >> _MANTISSA_BITS).clamp(1, 2 * _EXPONENT_BIAS)
    to_unit = ((2 * _EXPONENT_BIAS + 1 - biased) << _MANTISSA_BITS).view(torch.float32)
    to_unit = _in_memory(torch.where(is_finite, to_unit, 0.0))
    unit = torch.where(to_unit > 0, difference * to_unit, 0.0)
    exponent = (biased - (_EXPONENT_BIAS + 1)).to(torch.float32)
    return Normalized(
        unit,
        torch.where(is_finite, largest * to_unit, 0.0),
        _in_memory((unit * unit).mean(-1, keepdim=True)),
        _in_memory(torch.where(is_finite, exponent, NO_EXPONENT)),
    )


def spread_code(groups: Normalized) -> Tensor:
    """Returns the codes, [P, 1, G], of how much each channel of a group varies over all groups,
    relative to the mean of all channels. Groups are weighted by their energy up to the usual one: a
    token that is a thousand times larger than the others must not decide how these are coded.
    """
    square = groups.unit * groups.unit * _in_memory(_weight(groups))
    square = square.mean(1, keepdim=True)
    spread = (square / (square.mean(-1, keepdim=True) + _TINY)).sqrt()
    return (_eighths(spread) - _SPREAD_BIAS).clamp(0, (1 << SPREAD_BITS) - 1).to(torch.float32)


def _weight(groups: Normalized) -> Tensor:
    """Returns the weight of each group's squares, [P, n, 1], such that the weighted energy of a
    group is its energy relative to the usual one, at most 1.
    """
    counts = groups.energy > 0
    logs = _in_memory(torch.where(counts, groups.energy.log2() + 2 * groups.exponent, 0.0))
    energy = torch.exp2((logs - _usual(logs, counts)).clamp(max=0.0))
    return torch.where(counts, energy / groups.energy, 0.0)


def _usual(logs: Tensor, counts: Tensor) -> Tensor:
    """Returns a robust mean over the groups that count, [P, 1, 1]. Outliers are clamped to the mean
    deviation, twice, so that they hardly contribute however far off they are.
    """
    number = counts.sum(1, keepdim=True).clamp(min=1)
    usual = logs.sum(1, keepdim=True) / number
    for _ in range(2):
        apart = torch.where(counts, logs - usual, 0.0)
        most = apart.abs().sum(1, keepdim=True) / number
        usual = usual + apart.clamp(-most, most).sum(1, keepdim=True) / number
    return usual


def quantize(groups: Normalized, spread: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the numbers, [P, n, G], and the codes of the scales, [P, n, 1]."""
    unit, _, energy, exponent = groups
    per_spread = _in_memory(1 / _spread(spread))
    wanted, is_plain = _choose_step(groups, unit * per_spread, bits)
    whole = exponent.to(torch.int32) * 8 + 8 * (bits - 1)
    code = (_eighths(wanted.clamp(min=_LEAST_STEP)) + whole).clamp(1, NOT_FINITE - 1)
    step = ((code - whole) << _BELOW_EIGHTHS).view(torch.float32)
    per_step, plain = _in_memory(1 / step), _in_memory(is_plain.to(torch.float32))
    half = 1 << (bits - 1)
    steps = unit * torch.where(plain > 0, 1.0, per_spread) * per_step
    number = _in_memory(torch.floor(steps).clamp(-half, half - 1) + half)
    is_nothing = energy < step * step * _ZERO_ENERGY
    code = torch.where(is_plain, torch.where(is_nothing, 0, code) + PLAIN, code)
    code = torch.where(exponent < NO_EXPONENT, code, NOT_FINITE)
    return number, _in_memory(code.to(torch.float32))


def _choose_step(groups: Normalized, shaped: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns the wanted step of each group, [P, n, 1], and whether it is plain. `shaped` holds the
    elements divided by the spreads of their channels.
    """
    if bits in _STEP:
        even = groups.energy.sqrt() * _STEP[bits]
        wanted = (shaped * shaped).mean(-1, keepdim=True).sqrt() * _STEP[bits]
    else:
        most = (1 << (bits - 1)) - 0.5
        even = groups.largest / most
        wanted = shaped.abs().amax(-1, keepdim=True) / most
    wanted = _in_memory(wanted)
    is_plain = (wanted > _MISFIT * even) | (groups.exponent.abs() > _LARGEST_SHAPED)
    return torch.where(is_plain, even, wanted), is_plain


def num_words(count: int, bits: int) -> int:
    """Returns the words needed for `count` numbers."""
    return sum(_plane_words(count, width) for width, _ in _PLANES[bits])


def pack(number: Tensor, bits: int) -> Tensor:
    """Returns numbers [P, ...] packed into words [P, m]."""
    number = number.flatten(1).to(torch.int32)
    planes = []
    for width, lowest in _PLANES[bits]:
        fields = number if width == bits else (number >> lowest) & ((1 << width) - 1)
        planes.append(_joined(fields, width))
    return planes[0] if len(planes) == 1 else torch.cat(planes, 1)


def unpack(words: Tensor, count: int, bits: int) -> Tensor:
    """Returns the numbers, [P, count], that `pack` packed."""
    planes = torch.split(words, [_plane_words(count, width) for width, _ in _PLANES[bits]], 1)
    number: Tensor | None = None
    for plane, (width, lowest) in zip(planes, _PLANES[bits], strict=True):
        fields = _fields(plane, width)[:, :count]
        number = fields if number is None else number | (fields << lowest)
    assert number is not None
    return _in_memory(number.to(torch.float32))


def half_difference(number: Tensor, code: Tensor, spread: Tensor, bits: int) -> Tensor:
    """Returns half of the decoded difference, [P, n, G], which is NaN for a group that is not
    finite.

    Half of the difference of two finite values is finite; the whole difference may not be. No
    product is rounded, so that the result is the same whether or not a compiler fuses the last
    product with the following sum.
    """
    half = 1 << (bits - 1)
    middle = number + (0.5 - half)
    scale, plain = map(_in_memory, _scale(code))
    shaped = _in_memory(_spread(spread) * (2 / half))
    return middle * torch.where(plain > 0, 2 / half, shaped) * scale


def advance(
    reference: Tensor,
    number: Tensor,
    code: Tensor,
    spread: Tensor,
    bits: int,
    is_intra_coded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the value expected next and the one that arrived, NaN for a group not finite."""
    difference = half_difference(number, code, spread, bits)
    old = torch.zeros_like(reference) if is_intra_coded else reference
    arrived = _moved(old, difference)
    expected = arrived if is_intra_coded else _moved(old, (1 + EXTRAPOLATION) * difference)
    # Not isnan(), which Inductor does not compute in vectors.
    return torch.where(torch.eq(difference, difference), expected, old), arrived


def _moved(old: Tensor, half: Tensor) -> Tensor:
    """Returns `old` plus twice `half`, clamped to the range of its type and rounded once."""
    moved = old.to(torch.float32) * 0.5 + half
    most = torch.finfo(old.dtype).max / 2
    return (moved.clamp(-most, most) * 2).to(old.dtype)


def finite_or(values: Tensor, old: Tensor | float) -> Tensor:
    """Returns `values`, with `old` in place of elements that are not finite."""
    return torch.where(values.abs() < float("inf"), values, old)


def lost_shares(values: Tensor, arrived: Tensor) -> Tensor:
    """Returns the mean and the worst share of its energy that a group [P, n, G] lost, as [2].

    A group far smaller than the usual one counts as if it had FLOOR of the usual size, and no group
    is so large that it hides what others lose. Both are NaN if anything is not finite.
    """
    values = values.to(torch.float32)
    size, lost = _root_mean_square(values), _root_mean_square(values - arrived.to(torch.float32))
    counts = (size > 0) & (size < float("inf"))
    logs = _in_memory(torch.where(counts, size.log2(), 0.0))
    usual = torch.where(counts.any(1, keepdim=True), torch.exp2(_usual(logs, counts)), 0.0)
    least = (usual * FLOOR).clamp(min=torch.finfo(torch.float32).tiny)
    share = (lost / torch.maximum(size, least)).square()
    return torch.stack([share.mean(), share.amax()])


def _root_mean_square(values: Tensor) -> Tensor:
    """Returns the root mean square of each group, [P, n, 1], without overflow of its squares."""
    least = torch.finfo(torch.float32).tiny
    largest = _in_memory(values.abs().amax(-1, keepdim=True).clamp(min=least))
    return largest * (values / largest).square().mean(-1, keepdim=True).sqrt()


def _in_memory(values: Tensor) -> Tensor:
    """Returns `values`, materialized once. Otherwise Inductor would compute a group's values again
    for every element, and without vector instructions if there are integers among them.
    """
    return values.as_strided(values.shape, values.stride())


def _eighths(wanted: Tensor) -> Tensor:
    """Returns, in eighths of an exponent, the smallest number of three mantissa bits that is not
    below `wanted`: what fits the wanted step fits the coded one.
    """
    return (wanted.view(torch.int32) + ((1 << _BELOW_EIGHTHS) - 1)) >> _BELOW_EIGHTHS


def _spread(code: Tensor) -> Tensor:
    """Returns the spread that a code stands for."""
    return ((code.to(torch.int32) + _SPREAD_BIAS) << _BELOW_EIGHTHS).view(torch.float32)


def _scale(code: Tensor) -> tuple[Tensor, Tensor]:
    """Returns half of the scale that a code stands for, and 1 for a plain group, otherwise 0. The
    scale is computed from three normal factors, because their product may not be normal.
    """
    code = code.to(torch.int32)
    plain, code = code >> (SCALE_BITS - 1), code & NOT_FINITE
    exponent, eighths = code >> 3, code & 7
    lower = exponent >> 1
    scale = (eighths.to(torch.float32) * 0.125 + 1) * _power(lower - 64)
    scale = scale * _power(exponent - lower - 64)
    scale = torch.where(code == 0, 0.0, torch.where(code == NOT_FINITE, float("nan"), scale))
    return scale, plain.to(torch.float32)


def _power(exponent: Tensor) -> Tensor:
    """Returns two to the power of `exponent`."""
    return ((exponent + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)


def _plane_words(count: int, width: int) -> int:
    return -(-count * width // _WORD)


def _joined(fields: Tensor, width: int) -> Tensor:
    """Returns words [P, m] that hold the fields [P, count]. The fields are split into as many equal
    sections as a word has fields, padded with zeros, and a word holds one field of each section.
    """
    runs = _WORD // width
    if missing := -fields.shape[1] % runs:
        fields = pad(fields, (0, missing))
    joined = fields.view(len(fields), runs, -1)
    while runs > 1:
        runs //= 2
        joined = joined[:, :runs] | (joined[:, runs:] << (runs * width))
    return joined.squeeze(1).view(torch.float32)


def _fields(words: Tensor, width: int) -> Tensor:
    """Returns the fields that `_joined` packed into words, followed by its padding."""
    shifts = torch.arange(0, _WORD, width, dtype=torch.int32, device=words.device)
    runs = words.view(torch.int32).unsqueeze(1) >> shifts.unsqueeze(1)
    return (runs & ((1 << width) - 1)).flatten(1)
