"""A tensor as few bits per element: the coded difference to what the receiver expects already.

Elements are taken in groups of one head of one token. A group travels as one unsigned number of
`bits` bits per element and one byte for the size of a step:

    number   floor(difference * (1 / step)) in -L/2 .. L/2 - 1, L = 2**bits; stands for the middle
    step     2**e * (1 + m/8), e in -20..11, as e * 8 + m in a byte; NONE for a group that is not
             finite: the receiver takes it for NaN, and neither side remembers it

Places in a head differ in how much they change, by rotary frequency and by weights: differences are
divided by the spread of their place over all groups of a message first, which travels as one byte
per place, like a step. That is worth 4 to 5 dB with 2 bits on the small trained model.

Sender and receiver turn bytes into numbers by the same exact arithmetic, so that both remember the
same: what the next value is expected to be. That is this value and AHEAD of its difference to what
was expected, since what changed one way goes on doing so. What the code leaves of a difference is
part of the next one: errors do not add up. They need not vanish either: with 2 bits a value that
stays may be passed by turns from both sides, and where all elements of a message differ alike such
turns can grow for a while; changes of a model are not like that.

    difference = value - memory      arrives: memory + decoded      memory += (1 + AHEAD) * decoded
    anew:        value               arrives: decoded               memory = decoded

    difference [P, n, G] -> bytes [P, n*G*bits/8 + n + G] -> difference, as decoded [P, n, G]

Plain functions of tensors: passes trace them into graphs, tests call them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (1, 2, 3, 4, 8)
"""What can be chosen from."""
FULL = 0
"""In place of a number of bits: as it is, not coded."""
GROUP_MULTIPLE = 8
"""A group has a multiple of so many elements, so that its planes fill bytes."""
NONE = 255
AHEAD = 0.5
"""Of 0, 0.3, 0.5 and 0.65 this came closest to the exact pictures of the small trained model, by 3
to 8 dB more than 0 with 1 to 3 bits.
"""
_BIAS = (127 - 20) * 8
"""Of a step of 2**-20, in eighths of the exponent that bfloat16 has."""
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Widths of the fields that an element's bits are kept in, low bits first."""
_STEP = {1: 1.6, 2: 1.0, 3: 0.586, 4: 0.335}
"""Step over the root mean square of a group that loses least of normally distributed elements."""
_DISTORTION = {1: 0.363, 2: 0.119, 3: 0.0375, 4: 0.0116, 8: 0.000039}


def distortion(bits: int) -> float:
    """What is lost of normally distributed elements, as a share of their energy; with 8 bits it
    depends on the size of a group a little.
    """
    return _DISTORTION[bits]


def code_bytes(bits: int, group: int) -> int:
    """Bytes of one coded group, the step's included."""
    return group * bits // 8 + 1


def send(
    values: Tensor, memory: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes to send, what is remembered from now on, and what will arrive."""
    expected = 0.0 if is_anew else memory.to(torch.float32)
    difference = values.to(torch.float32) - expected
    spread = _in_memory(spread_code(difference))
    number, code = quantize(difference * _in_memory(1 / _step(spread)), bits)
    coded = torch.cat([pack(number, code, bits), spread.flatten(1)], 1)
    return coded, *advance(memory, number, code, spread, bits, is_anew)


def update(
    memory: Tensor, coded: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: NaN where a group is none."""
    group = memory.shape[-1]
    number, code = unpack(coded[:, :-group], group, bits)
    return advance(memory, number, code, coded[:, None, -group:], bits, is_anew)


def spread_code(difference: Tensor) -> Tensor:
    """How much each place of a group varies over all groups, over the mean of all places: as codes
    of steps, [P, 1, G]. Of what is not finite nothing counts.
    """
    known = torch.where(difference.abs() < float("inf"), difference, 0.0)
    square = (known * known).mean(1, keepdim=True)
    spread = (square / (square.mean(-1, keepdim=True) + 1e-30)).sqrt()
    return _nearest_code(spread).to(torch.uint8)


def quantize(difference: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers, [P, n, G], and codes of steps, [P, n, 1], as bytes."""
    code = _in_memory(_step_code(difference, bits))
    half = 1 << (bits - 1)
    per_step = _in_memory(1 / _step(code))
    number = torch.floor(difference * per_step).clamp(-half, half - 1) + half
    number = torch.where(code == NONE, 0.0, number)
    return _in_memory(number.to(torch.uint8)), code


def pack(number: Tensor, code: Tensor, bits: int) -> Tensor:
    """What travels."""
    parts = [*_planes(number.flatten(1), bits), code.flatten(1)]
    return torch.cat(parts, 1)


def unpack(coded: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """What was packed."""
    num_ranks, rows = len(coded), coded.shape[1] // code_bytes(bits, group)
    begin = shift = 0
    number: Tensor | None = None
    for width in _PLANES[bits]:
        end = begin + rows * group * width // 8
        fields = _fields(coded[:, begin:end], width)
        number = fields if number is None else number + fields * (1 << shift)
        begin, shift = end, shift + width
    assert number is not None
    return number.view(num_ranks, rows, group), coded[:, begin:].view(num_ranks, rows, 1)


def difference_of(number: Tensor, code: Tensor, bits: int) -> Tensor:
    """As float32: [P, n, G]."""
    middle = number.to(torch.float32) + (0.5 - (1 << (bits - 1)))
    return middle * _in_memory(_step(code))


def advance(
    memory: Tensor, number: Tensor, code: Tensor, spread: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: NaN where a group is none."""
    if is_anew:
        memory = torch.zeros_like(memory)
    difference = difference_of(number, code, bits) * _in_memory(_step(spread))
    is_none = code == NONE
    old, most = memory.to(torch.float32), torch.finfo(memory.dtype).max
    ahead = 0.0 if is_anew else AHEAD
    expected = (old + (1 + ahead) * difference).clamp(-most, most).to(memory.dtype)
    arrived = (old + difference).clamp(-most, most).to(memory.dtype)
    return torch.where(is_none, memory, expected), torch.where(is_none, float("nan"), arrived)


def finite_or(values: Tensor, old: Tensor | float) -> Tensor:
    """What is remembered of values that travel as they are."""
    return torch.where(values.abs() < float("inf"), values, old)


def lost_share(values: Tensor, arrived: Tensor) -> Tensor:
    """Energy of what the code left out, over that of what was to be sent."""
    values = values.to(torch.float32)
    rest = values - arrived.to(torch.float32)
    return (rest * rest).sum() / ((values * values).sum() + 1e-30)


def _in_memory(values: Tensor) -> Tensor:
    """`values`, computed once and kept: Inductor would compute what belongs to a group again for
    every element, and with integers among it none of it in vectors.
    """
    return values.as_strided(values.shape, values.stride())


def _step_code(difference: Tensor, bits: int) -> Tensor:
    """[P, n, 1]"""
    largest = difference.abs().amax(-1, keepdim=True)
    code = _nearest_code(_wanted_step(difference, largest, bits))
    return torch.where(largest < float("inf"), code, NONE).to(torch.uint8)


def _nearest_code(wanted: Tensor) -> Tensor:
    """Of the next larger step, so that what fits the wanted one fits the coded one."""
    eighths = wanted.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    return (((eighths + 15) >> 4) - _BIAS).clamp(0, NONE - 1)


def _wanted_step(difference: Tensor, largest: Tensor, bits: int) -> Tensor:
    if bits not in _STEP:
        return largest / ((1 << (bits - 1)) - 0.5)
    square = (difference * difference).mean(-1, keepdim=True)
    return square.sqrt().mul(_STEP[bits])


def _step(code: Tensor) -> Tensor:
    """The step that a code stands for."""
    bits = ((code.to(torch.int32) + _BIAS) << 4).to(torch.int16)
    return bits.view(torch.bfloat16).to(torch.float32)


def _planes(number: Tensor, bits: int) -> list[Tensor]:
    """Bytes [P, n*G*width/8] per plane. Each byte holds one element of every run, of which a plane
    has as many as a byte has fields.
    """
    if bits == 8:
        return [number]
    planes = []
    for width in _PLANES[bits]:
        fields = number & ((1 << width) - 1) if width < bits else number
        runs = fields.view(len(number), 8 // width, -1).unbind(1)
        joined = runs[0]
        for place, run in enumerate(runs[1:], start=1):
            joined = joined + run * (1 << (place * width))
        planes.append(joined)
        number = number >> width
        bits -= width
    return planes


def _fields(plane: Tensor, width: int) -> Tensor:
    """The elements of which `_planes` made the bytes of one plane."""
    if width == 8:
        return plane
    places = range(8 // width)
    return torch.cat([(plane >> (place * width)) & ((1 << width) - 1) for place in places], 1)
