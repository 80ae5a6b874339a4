"""A tensor as few bits per element: the coded difference to what the receiver expects already.

Elements are taken in groups of one head of one token. A group travels as one unsigned number of
`bits` bits per element and one byte for the size of a step:

    number   floor(difference / step) in -L/2 .. L/2 - 1, L = 2**bits; it stands for the middle
    step     2**e * (1 + m/8), e in -20..11, as e * 8 + m in a byte; NONE for a group that is not
             finite: the receiver takes it for NaN, and neither side remembers it

Sender and receiver turn bytes into numbers by the same exact arithmetic, so that both remember the
same: what the next value is expected to be. That is this value and AHEAD of its difference to what
was expected, since what changed one way goes on doing so. What the code leaves of a difference is
part of the next one: errors do not add up.

    difference = value - memory      arrives: memory + decoded      memory += (1 + AHEAD) * decoded

    difference [P, n, G] -> bytes [P, n*G*bits/8 + n] -> difference, as decoded [P, n, G]

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
_DISTORTION = {1: 0.363, 2: 0.119, 3: 0.0375, 4: 0.0116, 8: 0.00003}


def distortion(bits: int) -> float:
    """What is lost of normally distributed elements, as a share of their energy."""
    return _DISTORTION[bits]


def code_bytes(bits: int, group: int) -> int:
    """Bytes of one coded group, the step's included."""
    return group * bits // 8 + 1


def encode(difference: Tensor, bits: int) -> Tensor:
    """Bytes of a float32 difference: [P, n, G] -> [P, n*G*bits/8 + n]."""
    code = _step_code(difference, bits)
    half = 2 ** (bits - 1)
    number = torch.floor(difference / _step(code)).clamp(-half, half - 1) + half
    number = torch.where(code == NONE, 0.0, number).to(torch.int32)
    parts = [*_planes(number, bits), code.to(torch.uint8)]
    return torch.cat([part.reshape(len(difference), -1) for part in parts], 1)


def decode(coded: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """What `encode` coded: the difference as float32, [P, n, G], and which groups are none,
    [P, n, 1].
    """
    num_ranks, rows = len(coded), coded.shape[1] // code_bytes(bits, group)
    number: Tensor | None = None
    begin = shift = 0
    for width in _PLANES[bits]:
        end = begin + rows * group * width // 8
        plane = coded[:, begin:end].reshape(num_ranks, rows, -1)
        fields = _fields(plane.to(torch.int32), width) << shift
        number = fields if number is None else number + fields
        begin, shift = end, shift + width
    assert number is not None
    code = coded[:, begin:].reshape(num_ranks, rows, 1).to(torch.int32)
    middle = number.to(torch.float32) + (0.5 - 2 ** (bits - 1))
    return middle * _step(code), code == NONE


def update(memory: Tensor, coded: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: NaN where a group is none."""
    difference, is_none = decode(coded, memory.shape[-1], bits)
    old = memory.to(torch.float32)
    expected = (old + (1 + AHEAD) * difference).to(memory.dtype)
    arrived = (old + difference).to(memory.dtype)
    return torch.where(is_none, memory, expected), torch.where(is_none, float("nan"), arrived)


def finite(values: Tensor) -> Tensor:
    """What is remembered of values that travel as they are."""
    return torch.where(values.abs() < float("inf"), values, 0.0)


def lost_share(values: Tensor, arrived: Tensor) -> Tensor:
    """Energy of what the code left out, over that of what was to be sent."""
    values = values.to(torch.float32)
    rest = values - arrived.to(torch.float32)
    return (rest * rest).sum() / ((values * values).sum() + 1e-30)


def _step_code(difference: Tensor, bits: int) -> Tensor:
    """As int32: [P, n, 1]."""
    wanted = _wanted_step(difference, bits)
    eighths = wanted.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    eighths = (eighths + 15) >> 4  # upwards, so that what fits the wanted step fits the coded one
    code = (eighths - _BIAS).clamp(0, NONE - 1)
    return torch.where(wanted < float("inf"), code, NONE)


def _wanted_step(difference: Tensor, bits: int) -> Tensor:
    if bits not in _STEP:
        return difference.abs().amax(-1, keepdim=True) / ((1 << (bits - 1)) - 0.5)
    square = (difference * difference).mean(-1, keepdim=True)
    return square.sqrt().mul(_STEP[bits])


def _step(code: Tensor) -> Tensor:
    """The step that a code stands for."""
    bits = ((code + _BIAS) << 4).to(torch.int16)
    return bits.view(torch.bfloat16).to(torch.float32)


def _planes(number: Tensor, bits: int) -> list[Tensor]:
    """Bytes [P, n, G*width/8] per plane: each byte holds one element of every run of the group."""
    planes = []
    for width in _PLANES[bits]:
        runs = (number & (2**width - 1)).chunk(8 // width, -1)
        joined = runs[0]
        for place, run in enumerate(runs[1:], start=1):
            joined = joined + (run << (place * width))
        planes.append(joined.to(torch.uint8))
        number = number >> width
    return planes


def _fields(plane: Tensor, width: int) -> Tensor:
    """The elements of which `_planes` made the bytes of one plane."""
    places = range(8 // width)
    return torch.cat([(plane >> (place * width)) & (2**width - 1) for place in places], -1)
