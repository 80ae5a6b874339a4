"""A tensor as few bits per element: the coded difference to what the receiver expects already.

Elements are taken in groups of one head of one token. A group travels as one unsigned number of
`bits` bits per element and eight bits for the size of a step:

    number   floor(difference * (1 / step)) in -L/2 .. L/2 - 1, L = 2**bits; stands for the middle
    step     2**e * (1 + m/8), e in -20..11, as e * 8 + m in eight bits; NONE for a group that is
             not finite: the receiver takes it for NaN, and neither side remembers it

Places in a head differ in how much they change, by rotary frequency and by weights: differences are
divided by the spread of their place over all groups of a message first, which travels in eight bits
per place, like a step. That is worth 4 to 5 dB with 2 bits on the small trained model.

Sender and receiver turn words into numbers by the same exact arithmetic, so that both remember the
same: what the next value is expected to be. That is this value and AHEAD of its difference to what
was expected, since what changed one way goes on doing so. What the code leaves of a difference is
part of the next one: errors do not add up. They need not vanish either: with 2 bits a value that
stays may be passed by turns from both sides, and where all elements of a message differ alike such
turns can grow for a while; changes of a model are not like that.

    difference = value - memory      arrives: memory + decoded      memory += (1 + AHEAD) * decoded
    anew:        value               arrives: decoded               memory = decoded

    difference [P, n, G] -> words [P, (n*G*bits + 8*n + 8*G) / 32] -> difference, decoded [P, n, G]

Numbers, steps and spreads each begin a new word. Words are 32 bits long and held as float32, of
which only the bits count. Numbers are held as float32 too: of what Inductor generates for CPUs that
have no AVX-512, loops that load integers took two to four times as long.

Plain functions of tensors: passes trace them into graphs, tests call them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = (1, 2, 3, 4, 8)
"""What can be chosen from."""
FULL = 0
"""In place of a number of bits: as it is, not coded."""
GROUP_MULTIPLE = 8
"""A group has a multiple of so many elements, so that its numbers fill bytes."""
NONE = 255
AHEAD = 0.5
"""Of 0, 0.3, 0.5 and 0.65 this came closest to the exact pictures of the small trained model, by 3
to 8 dB more than 0 with 1 to 3 bits.
"""
_BIAS = (127 - 20) * 8
"""Of a step of 2**-20, in eighths of the exponent that float32 has."""
_BELOW_EIGHTHS = 20
"""Bits of float32 that a step does not have."""
_WORD = 32
_CODE = 8
"""Bits of a step."""
_PLANES = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 8: ((8, 0),)}
"""The fields that an element's bits are kept in: how wide they are, and the lowest of the bits."""
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
    """Words to send, what is remembered from now on, and what will arrive."""
    expected = 0.0 if is_anew else memory.to(torch.float32)
    difference = values.to(torch.float32) - expected
    spread = _in_memory(spread_code(difference))
    number, code = quantize(difference * _in_memory(1 / _step(spread)), bits)
    coded = torch.cat([pack(number, bits), pack(code, _CODE), pack(spread, _CODE)], 1)
    return coded, *advance(memory, number, code, spread, bits, is_anew)


def update(
    memory: Tensor, coded: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: NaN where a group is none."""
    num_ranks, rows, group = memory.shape
    sizes = [num_words(rows * group, bits), num_words(rows, _CODE), num_words(group, _CODE)]
    numbers, codes, spreads = torch.split(coded, sizes, 1)
    number = unpack(numbers, rows * group, bits).view(memory.shape)
    code = unpack(codes, rows, _CODE).view(num_ranks, rows, 1)
    spread = unpack(spreads, group, _CODE).view(num_ranks, 1, group)
    return advance(memory, number, code, spread, bits, is_anew)


def spread_code(difference: Tensor) -> Tensor:
    """How much each place of a group varies over all groups, over the mean of all places: as codes
    of steps, [P, 1, G]. Of what is not finite nothing counts.
    """
    known = torch.where(difference.abs() < float("inf"), difference, 0.0)
    square = (known * known).mean(1, keepdim=True)
    spread = (square / (square.mean(-1, keepdim=True) + 1e-30)).sqrt()
    return _nearest_code(spread)


def quantize(difference: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers, [P, n, G], and codes of steps, [P, n, 1]."""
    code = _in_memory(_step_code(difference, bits))
    half = 1 << (bits - 1)
    per_step = _in_memory(1 / _step(code))
    number = torch.floor(difference * per_step).clamp(-half, half - 1) + half
    return _in_memory(torch.where(code == NONE, 0.0, number)), code


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


def difference_of(number: Tensor, code: Tensor, bits: int) -> Tensor:
    """[P, n, G]; NaN where a group is none."""
    middle = number + (0.5 - (1 << (bits - 1)))
    return middle * _in_memory(torch.where(code == NONE, float("nan"), _step(code)))


def advance(
    memory: Tensor, number: Tensor, code: Tensor, spread: Tensor, bits: int, is_anew: bool = False
) -> tuple[Tensor, Tensor]:
    """What is remembered from now on, and what arrived: NaN where a group is none."""
    if is_anew:
        memory = torch.zeros_like(memory)
    difference = difference_of(number, code, bits) * _in_memory(_step(spread))
    old, most = memory.to(torch.float32), torch.finfo(memory.dtype).max
    ahead = 0.0 if is_anew else AHEAD
    expected = (old + (1 + ahead) * difference).clamp(-most, most).to(memory.dtype)
    arrived = (old + difference).clamp(-most, most).to(memory.dtype)
    # Not isnan(), which Inductor does not compute in vectors.
    return torch.where(torch.eq(difference, difference), expected, memory), arrived


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
    return torch.where(largest < float("inf"), code, float(NONE))


def _nearest_code(wanted: Tensor) -> Tensor:
    """Of the next larger step, so that what fits the wanted one fits the coded one."""
    eighths = (wanted.view(torch.int32) + ((1 << _BELOW_EIGHTHS) - 1)) >> _BELOW_EIGHTHS
    return (eighths - _BIAS).clamp(0, NONE - 1).to(torch.float32)


def _wanted_step(difference: Tensor, largest: Tensor, bits: int) -> Tensor:
    if bits not in _STEP:
        return largest / ((1 << (bits - 1)) - 0.5)
    square = (difference * difference).mean(-1, keepdim=True)
    return square.sqrt().mul(_STEP[bits])


def _step(code: Tensor) -> Tensor:
    """The step that a code stands for."""
    return ((code.to(torch.int32) + _BIAS) << _BELOW_EIGHTHS).view(torch.float32)


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
