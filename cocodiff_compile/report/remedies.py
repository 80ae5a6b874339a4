# SPDX-License-Identifier: Apache-2.0
"""Says what a user can do about what was left alone: a remedy for each kind of reason.

Reasons are sentences with values in them; a remedy is found by what such a sentence says, whatever
its values are.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_SOME_OP = "torch.ops.<namespace>.<op>"
_SOME_ROLES = "query=..., key=..., value=..."
_PAD = (
    "Pad tokens and heads so that both divide by the number of ranks before they are exchanged, "
    "and drop the padding after the attention; options={'shard': 'tokens'} on the plain model "
    "does that by itself."
)
_CONSECUTIVE = (
    "Give each rank one consecutive block of heads (and of tokens): reshape to (ranks, heads of a "
    "rank, ...) before torch.distributed.all_to_all_single, not (heads of a rank, ranks, ...)."
)
_IN_AND_OUT = (
    "Exchange in the usual way: before the attention scatter heads and gather tokens, after it "
    "scatter tokens and gather heads."
)
_REGISTER = (
    "If this op is an attention, make it known before the model is compiled: "
    "cocodiff_compile.register_attention(torch.ops.<namespace>.<op>, query=..., key=..., "
    "value=..., layout='BSHD'): the names of its arguments, and the order of samples, tokens (S), "
    "heads and the size of a head in them. Otherwise, use "
    "torch.nn.functional.scaled_dot_product_attention."
)
_ONE_GRAPH = (
    "Compile the model with fullgraph=True: the error shows the line that breaks the graph. Move "
    "that line out of the attention, or use torch.distributed.all_to_all_single in its functional "
    "form, so that exchange and attention are in one graph."
)
_FIXED_SHAPES = "Compile with dynamic=False, so that all sizes are numbers."
_ALIKE = (
    "Send query, key, value and result each through one torch.distributed.all_to_all_single over "
    "the same group, directly before and after the attention."
)

_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"register it: cocodiff_compile\.register_attention", _REGISTER),
    (r"has the name of one, but", "Register the op with the arguments that it really has: "
     "cocodiff_compile.register_attention(torch.ops.<namespace>.<op>, query=..., key=..., "
     "value=...)."),
    (r"no attention this pass knows", _REGISTER),
    (r"unequal splits|is unclear; pad|unclear: .* pad heads|were padded or cut|pad heads before",
     _PAD),
    (r"what goes to which of the|whether dims .* is unclear", _PAD),
    (r"dealt round-robin|are interleaved over the ranks", _CONSECUTIVE),
    (r"graph break|outside of this graph|from outside", _ONE_GRAPH),
    (r"different groups", "Run all exchanges of one attention over the same process group."),
    (r"ring or gathered attention", "Use Ulysses alone for this attention (ring degree 1), or let "
     "options={'shard': 'tokens'} share out the plain model over all ranks."),
    (r"is joined from \d+ all-to-alls", "Join the parts (such as text and image) with torch.cat "
     "before one exchange, instead of exchanging each of them."),
    (r"goes into \d+ all-to-alls", "Exchange the result once and use what arrives twice."),
    (r"also feeds|not this attention alone", "Let nothing else read the result of this "
     "exchange: return or reuse the tensor from before the exchange, or exchange it once more for "
     "the other reader."),
    (r"carries torch\.\w+, not floats", "Exchange floating-point tensors, and let "
     "options={'v_major': {}} make them small if bytes are what limits (lossy)."),
    (r"has one rank", "There is nobody to exchange with: start more ranks, or drop the exchange."),
    (r"is not known to this process|splits for the \d+ ranks", "Pass the process group that the "
     "ranks of this attention made with torch.distributed.new_group, with one split per rank."),
    (r"not exchanged back|comes from no all-to-all", _ALIKE),
    (r"scatters dim|gathers dim|gathers something else|gathers samples|gathers heads, not",
     _IN_AND_OUT),
    (r"joins the result of an attention before its output exchange", "Exchange the result of the "
     "attention first, and join the other tensor after the exchange."),
    (r"is an all-to-all that this pass does not support", "Use "
     "torch.distributed.all_to_all_single, or its functional form, with one tensor."),
    (r"lies inside of", "Move the exchange out of the branch or loop, or unroll it."),
    (r"nothing waits for", "Wait for the collective before its result is read."),
    (r"between attention and the exchange|between .* stands", "Move what stands between the "
     "attention and its exchange to the other side of the exchange."),
    (r"symbolic", _FIXED_SHAPES),
    (r"only_if_faster", "No action is needed: sending it uncompressed is the faster choice here. "
     "options={'v_major': {'only_if_faster': False}} codes it anyway."),
    (r"memory budget", "Raise options={'v_major': {'memory_budget_mib': ...}}, or leave it: this "
     "attention is then sent uncompressed."),
    (r"do not divide them", "Use heads whose size is a multiple of 8, or leave this attention "
     "uncompressed."),
    (r"no tokens are skipped: its exchanges are cut", "Set head_chunks=1 and token_chunks=1 if "
     "skipping tokens is worth more than chunks."),
    (r"no tokens are skipped: Q, K and V share", "Exchange Q, K and V each by itself."),
    (r"no tokens are skipped", "No action is needed: all tokens of this attention are sent."),
    (r"heads cannot be cut into (\d+) chunks: a rank has", "Set head_chunks to a number that "
     "divides the heads of a rank, or 'auto'."),
    (r"(heads|tokens) cannot be cut", "Leave the option at 'auto'; an op that heads or tokens can "
     "be followed through needs a rule in cut/rules.py."),
)  # fmt: skip

GENERAL = (
    "Compare the model's exchanges with the page on Ulysses in the documentation, or compile the "
    "plain model with options={'shard': 'tokens'}, which makes the exchanges itself."
)
"""What can always be tried."""


def remedy_for(reason: str) -> str:
    """Returns what a user can do about something that was declined for this reason."""
    found = (remedy for pattern, remedy in _REMEDIES if re.search(pattern, reason))
    named = re.search(r"torch\.ops\.[\w.]*\w", reason)
    remedy = next(found, GENERAL)
    if named is None:
        return remedy
    return remedy.replace(_SOME_OP, named.group()).replace(_SOME_ROLES, _roles(named.group()))


def _roles(name: str) -> str:
    """Returns the first three tensors of an op by the names of its arguments, as far as this
    process knows it: what most attentions are given as query, key and value.
    """
    op: Any = torch
    for part in name.split(".")[1:]:
        op = getattr(op, part, None)
    if isinstance(op, torch._ops.OpOverloadPacket):
        op = getattr(op, "default", None)
    schema = getattr(op, "_schema", None)
    arguments = schema.arguments if schema else ()
    tensors = [item.name for item in arguments if str(item.type) == "Tensor"]
    if len(tensors) < 3:
        return _SOME_ROLES
    return "query={!r}, key={!r}, value={!r}".format(*tensors)


_NOTES: tuple[tuple[str, str], ...] = (
    (r"not shared out: there is one rank", "Start more ranks, or give explain a degree: "
     "options={'shard': {'degree': 8}}."),
    (r"not shared out: estimated gain", "The exchanges are estimated to cost more than they save. "
     "options={'shard': {'min_gain': 0}} shares out all that can be; a smaller 'degree', or a "
     "'topology' that describes faster links, may also change the estimate."),
    (r"not shared out", "Change what the reason names. If that cannot be: where diffusers has "
     "model.enable_parallelism for this class, use that, without 'shard'."),
    (r"times the memory: left as captured", "The new order would keep more memory alive than is "
     "allowed. Free memory: a smaller batch or resolution."),
    (r"in the new order: left as captured", "Too little is gained by another order. More can run "
     "beside exchanges if heads or tokens are cut (head_chunks, token_chunks), or fewer bytes are "
     "sent."),
    (r"left whole: .* (bits|differ)", "Narrower matmuls round differently on this device, so that "
     "tokens stay whole to keep results bit for bit."),
)  # fmt: skip


def remedy_for_note(note: str) -> str:
    """Returns what a user can do about what a pass noted; nothing if that is no problem."""
    return next((remedy for pattern, remedy in _NOTES if re.search(pattern, note)), "")
