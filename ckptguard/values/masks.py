"""Which tensors may hold -Inf on purpose: masks. What is learnt never does, whatever else it holds."""

from __future__ import annotations

import re

_LEARNT = re.compile(
    r"weight|\w+_weight|weight_(?:orig|g|v)|weight_[ih]h_l\d+(?:_reverse)?|original\d*"
    r"|lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|gamma|beta"
)
# A bias of several dimensions may be added to attention scores, as a mask is: that of old GPT-2 is a buffer.
_LEARNT_VECTOR = re.compile(r"bias|bias_orig|\w+_proj_bias|bias_[ih]h_l\d+(?:_reverse)?")
_MOMENT = re.compile(r"(?:max_)?exp_avg\w*|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta")


def may_be_mask(name: str, dimensions: int) -> bool:
    """Whether a tensor's name leaves it possible that it is a mask: not that of a weight, a bias (a vector), an
    adapter or an optimizer's moment. ``h.0.attn.mask`` is possible, and so is ``h.0.attn.bias`` of four dimensions."""
    last = name.rpartition(".")[2]
    if _LEARNT.fullmatch(last) or _MOMENT.fullmatch(last):
        return False
    return dimensions > 1 or not _LEARNT_VECTOR.fullmatch(last)
