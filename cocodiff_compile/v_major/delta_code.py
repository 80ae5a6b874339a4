"""A tensor as few bits per element: the coded difference to what the receiver expects already.

Elements are taken in groups of one head of one token. A group travels as one unsigned number of
`bits` bits per element and twelve bits for its scale:

    number   floor(difference / step) in -L/2 .. L/2 - 1, L = 2**bits; stands for the middle
    scale    L/2 steps of half the difference: 2**e * (1 + m/8), e in -127..128, as
             (e + 127) * 8 + m in eleven bits; 0 for no difference at all; NONE for a group that is
             not finite: the receiver takes it for NaN, and neither side remembers it
    plain    the twelfth bit: the spreads of places, see below, do not count for this group

A group keeps its relative precision whatever the others are, from the smallest normal number to the
largest; one that differs by less than that arrives as if it did not, or closer. Halves are coded
since the difference of two finite numbers need not be finite.

Places in a head differ in how much they change, by rotary frequency and by weights: differences are
divided by the spread of their place over all groups of a message first, which travels in eight bits
per place. That is worth 4 to 5 dB with 2 bits on the small trained model. In the spreads no group
has more say than is usual, however large it is, and one that they do not fit is plain: a token with
a pattern of its own may be largest where spreads are small, and would have a far larger step.

Sender and receiver turn words into numbers by the same exact arithmetic, so that both remember the
same: what the next value is expected to be. That is this value and AHEAD of its difference to what
was expected, since what changed one way goes on doing so. What the code leaves of a difference is
part of the next one: errors do not add up. They need not vanish either: with 2 bits a value that
stays may be passed by turns from both sides, and where all elements of a message differ alike such
turns can grow for a while; changes of a model are not like that.

    difference = value - memory      arrives: memory + decoded      memory += (1 + AHEAD) * decoded
    anew:        value               arrives: decoded               memory = decoded

    difference [P, n, G] -> words [P, (n*G*bits + 12*n + 8*G) / 32] -> difference, decoded [P, n, G]

Numbers, scales and spreads each begin a new word. Words are 32 bits long and held as float32, of
which only the bits count. Numbers are held as float32 too: of what Inductor generates for CPUs that
have no AVX-512, loops that load integers took two to four times as long.

Plain functions of tensors: passes trace them into graphs, tests call them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = (1, 2, 3, 4, 8)
"""What can be chosen from."""
FULL = 0
"""In place of a number of bits: as it is, not coded."""
GROUP_MULTIPLE = 8
"""A group has a multiple of so many elements, so that its numbers fill bytes."""
SCALE_BITS = 12
SPREAD_BITS = 8
NONE = 2047
"""The scale of a group that is not finite."""
PLAIN = 2048
"""Is added to the scale of a group that is coded without spreads."""
NO_EXPONENT = 128.0
"""More than any that a finite group has."""
AHEAD = 0.5
"""Of 0, 0.3, 0.5 and 0.65 this came closest to the exact pictures of the small trained model, by 3
to 8 dB more than 0 with 1 to 3 bits.
"""
FLOOR = 1 / 8
"""Of the usual size of a group: what a smaller one loses is measured against so much."""
_MISFIT = 4.0
"""A group is plain if with spreads its step would be more than so many times as large."""
_LARGEST_SHAPED = 100.0
"""Exponents beyond which, up and down, groups are plain: spreads could take a scale or a product
out of the range in which it is exact."""
_LEAST_STEP = 2.0**-40
"""Below all of groups that are normalized and not zero."""
_NOTHING = 0.1
"""A plain group is coded as zero if its energy is less than so much of a squared step, which is as
small as it can be then: the middle of one would be farther off."""
_TINY = 1e-30
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_SPREAD_BIAS = (127 - 20) * 8
"""Of a spread of 2**-20, in eighths of the exponent that float32 has."""
_BELOW_EIGHTHS = 20
"""Bits of float32 that scales and spreads do not have."""
_WORD = 32
_PLANES = {
    1: ((1, 0),),
    2: ((2, 0),),
    3: ((2, 0), (1, 2)),
    4: ((4, 0),),
    8: ((8, 0),),
    12: ((8, 0), (4, 8)),
}
"""The fields that an element's bits are kept in: how wide they are, and the lowest of the bits."""
_STEP = {1: 1.6, 2: 1.0, 3: 0.586, 4: 0.335}
"""Step over the root mean square of a group that loses least of normally distributed elements."""
_DISTORTION = {1: 0.363, 2: 0.119, 3: 0.0375, 4: 0.0116, 8: 0.000039}


def distortion(bits: int) -> float:
    """What is lost of normally distributed elements, as a share of their energy; with 8 bits it
    depends on the size of a group a little.
    """
    return _DISTORTION[bits]


def code_bits(bits: int, group: int) -> int:
    """Bits of one coded group, its scale included."""
    return group * bits + SCALE_BITS


def send(
    values: Tensor, memory: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Words to send, what is remembered from now on, and what will arrive."""
    half = values.to(torch.float32) * 0.5
    difference = half if is_anew else half - memory.to(torch.float32) * 0.5
    groups = normalize(difference)
    spread = _in_memory(spread_code(groups))
    number, code = quantize(groups, spread, bits)
    coded = torch.cat([pack(number, bits), pack(code, SCALE_BITS), pack(spread, SPREAD_BITS)], 1)
    return coded, *advance(memory, number, code, spread, bits, is_anew)


def update(
    memory: Tensor, coded: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: NaN where a group is none."""
    num_ranks, rows, group = memory.shape
    counts = ((rows * group, bits), (rows, SCALE_BITS), (group, SPREAD_BITS))
    parts = torch.split(coded, [num_words(*item) for item in counts], 1)
    numbers, codes, spreads = (
        unpack(part, *item) for part, item in zip(parts, counts, strict=True)
    )
    number = numbers.view(memory.shape)
    code = codes.view(num_ranks, rows, 1)
    spread = spreads.view(num_ranks, 1, group)
    return advance(memory, number, code, spread, bits, is_anew)


class Normalized(NamedTuple):
    """Differences of which each group was multiplied by a power of two."""

    unit: Tensor
    """[P, n, G]: 0, or as much that the largest of a group is 2 to 4. Less only where a group has
    nothing but numbers below the smallest normal one."""
    largest: Tensor
    """Of a group, [P, n, 1]."""
    energy: Tensor
    """The mean square of a group, [P, n, 1]."""
    exponent: Tensor
    """A difference is `unit * 2**exponent`; NO_EXPONENT if a group is not finite, [P, n, 1]."""


def normalize(difference: Tensor) -> Normalized:
    """From here on no square overflows or vanishes. A group that is not finite becomes zeros."""
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
    """How much each place of a group varies over all groups, over the mean of all places: as codes
    [P, 1, G]. A group counts by its energy, but none for more than is usual: one token that is a
    thousand times larger than the others must not decide how these are coded.
    """
    square = groups.unit * groups.unit * _in_memory(_weight(groups))
    square = square.mean(1, keepdim=True)
    spread = (square / (square.mean(-1, keepdim=True) + _TINY)).sqrt()
    return (_eighths(spread) - _SPREAD_BIAS).clamp(0, (1 << SPREAD_BITS) - 1).to(torch.float32)


def _weight(groups: Normalized) -> Tensor:
    """By which a group's squares count, [P, n, 1]: its energy is then that of its differences over
    what is usual in a message, or 1 if that is less.
    """
    counts = groups.energy > 0
    logs = _in_memory(torch.where(counts, groups.energy.log2() + 2 * groups.exponent, 0.0))
    energy = torch.exp2((logs - _usual(logs, counts)).clamp(max=0.0))
    return torch.where(counts, energy / groups.energy, 0.0)


def _usual(logs: Tensor, counts: Tensor) -> Tensor:
    """The mean over groups that count, [P, 1, 1], of which those that are far from it hardly have a
    part, however far: they are brought as close to it as others are in the mean, twice.
    """
    number = counts.sum(1, keepdim=True).clamp(min=1)
    usual = logs.sum(1, keepdim=True) / number
    for _ in range(2):
        apart = torch.where(counts, logs - usual, 0.0)
        most = apart.abs().sum(1, keepdim=True) / number
        usual = usual + apart.clamp(-most, most).sum(1, keepdim=True) / number
    return usual


def quantize(groups: Normalized, spread: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers, [P, n, G], and codes of scales, [P, n, 1]."""
    unit, _, energy, exponent = groups
    per_spread = _in_memory(1 / _spread(spread))
    wanted, is_plain = _choose_step(groups, unit * per_spread, bits)
    whole = exponent.to(torch.int32) * 8 + 8 * (bits - 1)
    code = (_eighths(wanted.clamp(min=_LEAST_STEP)) + whole).clamp(1, NONE - 1)
    step = ((code - whole) << _BELOW_EIGHTHS).view(torch.float32)
    per_step, plain = _in_memory(1 / step), _in_memory(is_plain.to(torch.float32))
    half = 1 << (bits - 1)
    steps = unit * torch.where(plain > 0, 1.0, per_spread) * per_step
    number = _in_memory(torch.floor(steps).clamp(-half, half - 1) + half)
    is_nothing = energy < step * step * _NOTHING
    code = torch.where(is_plain, torch.where(is_nothing, 0, code) + PLAIN, code)
    code = torch.where(exponent < NO_EXPONENT, code, NONE)
    return number, _in_memory(code.to(torch.float32))


def _choose_step(groups: Normalized, shaped: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The wanted step of each group, [P, n, 1], and whether it is plain. `shaped`: elements over
    the spreads of their places, to which most groups fit.
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
    """That so many numbers take."""
    return sum(_plane_words(count, width) for width, _ in _PLANES[bits])


def pack(number: Tensor, bits: int) -> Tensor:
    """What travels of numbers [P, ...]: words [P, m]."""
    number = number.flatten(1).to(torch.int32)
    planes = []
    for width, lowest in _PLANES[bits]:
        fields = number if width == bits else (number >> lowest) & ((1 << width) - 1)
        planes.append(_joined(fields, width))
    return planes[0] if len(planes) == 1 else torch.cat(planes, 1)


def unpack(words: Tensor, count: int, bits: int) -> Tensor:
    """What was packed: [P, count]."""
    planes = torch.split(words, [_plane_words(count, width) for width, _ in _PLANES[bits]], 1)
    number: Tensor | None = None
    for plane, (width, lowest) in zip(planes, _PLANES[bits], strict=True):
        fields = _fields(plane, width)[:, :count]
        number = fields if number is None else number | (fields << lowest)
    assert number is not None
    return _in_memory(number.to(torch.float32))


def half_difference(number: Tensor, code: Tensor, spread: Tensor, bits: int) -> Tensor:
    """[P, n, G]; NaN where a group is none. Half of the difference of any two finite values is
    finite, the whole need not be. No product is rounded, so that it is all one whether a compiler
    joins the last of them with the sum that follows.
    """
    half = 1 << (bits - 1)
    middle = number + (0.5 - half)
    scale, plain = map(_in_memory, _scale(code))
    shaped = _in_memory(_spread(spread) * (2 / half))
    return middle * torch.where(plain > 0, 2 / half, shaped) * scale


def advance(
    memory: Tensor, number: Tensor, code: Tensor, spread: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: NaN where a group is none."""
    difference = half_difference(number, code, spread, bits)
    old = torch.zeros_like(memory) if is_anew else memory
    arrived = _moved(old, difference)
    expected = arrived if is_anew else _moved(old, (1 + AHEAD) * difference)
    # Not isnan(), which Inductor does not compute in vectors.
    return torch.where(torch.eq(difference, difference), expected, old), arrived


def _moved(old: Tensor, half: Tensor) -> Tensor:
    """`old` and twice `half`, which may be more than any number of its type, rounded once."""
    moved = old.to(torch.float32) * 0.5 + half
    most = torch.finfo(old.dtype).max / 2
    return (moved.clamp(-most, most) * 2).to(old.dtype)


def finite_or(values: Tensor, old: Tensor | float) -> Tensor:
    """What is remembered of values that travel as they are."""
    return torch.where(values.abs() < float("inf"), values, old)


def lost_shares(values: Tensor, arrived: Tensor) -> Tensor:
    """What groups [P, n, G] lost, as a share of their own energy: the mean over all groups, and the
    worst of them, [2]. A group that is far smaller than its like counts as if it had FLOOR of their
    usual size: no group can be so large that it hides what others lose. NaN if anything is not
    finite.
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
    """Of each group, [P, n, 1], whatever its squares are."""
    least = torch.finfo(torch.float32).tiny
    largest = _in_memory(values.abs().amax(-1, keepdim=True).clamp(min=least))
    return largest * (values / largest).square().mean(-1, keepdim=True).sqrt()


def _in_memory(values: Tensor) -> Tensor:
    """`values`, computed once and kept: Inductor would compute what belongs to a group again for
    every element, and with integers among it none of it in vectors.
    """
    return values.as_strided(values.shape, values.stride())


def _eighths(wanted: Tensor) -> Tensor:
    """The exponent of the next larger number that has three bits behind the point, in eighths, and
    these: what fits the wanted one fits the coded one.
    """
    return (wanted.view(torch.int32) + ((1 << _BELOW_EIGHTHS) - 1)) >> _BELOW_EIGHTHS


def _spread(code: Tensor) -> Tensor:
    """That a code stands for."""
    return ((code.to(torch.int32) + _SPREAD_BIAS) << _BELOW_EIGHTHS).view(torch.float32)


def _scale(code: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the scale that a code stands for, and 1 if it says that a group is plain. In three
    factors, each a normal number, of which the product need not be one.
    """
    code = code.to(torch.int32)
    plain, code = code >> (SCALE_BITS - 1), code & NONE
    exponent, eighths = code >> 3, code & 7
    lower = exponent >> 1
    scale = (eighths.to(torch.float32) * 0.125 + 1) * _power(lower - 64)
    scale = scale * _power(exponent - lower - 64)
    scale = torch.where(code == 0, 0.0, torch.where(code == NONE, float("nan"), scale))
    return scale, plain.to(torch.float32)


def _power(exponent: Tensor) -> Tensor:
    """Of two."""
    return ((exponent + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)


def _plane_words(count: int, width: int) -> int:
    return -(-count * width // _WORD)


def _joined(fields: Tensor, width: int) -> Tensor:
    """Words [P, m] of fields [P, count]. A word holds one field of every run, of which there are as
    many as a word has fields; what the last runs lack is zero.
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
    """The fields of which `_joined` made words, and those that were missing."""
    shifts = torch.arange(0, _WORD, width, dtype=torch.int32, device=words.device)
    runs = words.view(torch.int32).unsqueeze(1) >> shifts.unsqueeze(1)
    return (runs & ((1 << width) - 1)).flatten(1)
