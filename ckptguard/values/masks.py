"""Which tensors may hold -Inf on purpose: masks. Learnt tensors and statistics never do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# The word mask comes last in a mask's name: mask_token and masked_spec_embed are learnt. So is a vector named bias.
_MASK = re.compile(
    r"(?:\w*_)?(?:\w*mask|\w*Mask|masks|causal|triu|tril)(?:_(?:buffer|buf|matrix|cached?|bias|\d+))?|masked_bias"
)
_MASK_OF_SEVERAL_DIMENSIONS = re.compile(r"(?:\w*_)?(?:attn|attention|logits?)_bias")
_NEVER = re.compile(
    r"weights?|\w+_weight|weight_(?:orig|g|v)|weight_[ih]h_l\d+(?:_reverse)?|original\d*|kernel|\w+_kernel|\w*scale|gamma|beta"
    r"|lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|\w*embed(?:s|ding|dings)?|\w+_(?:emb|table|tokens?)"
    r"|running_\w+|amax_history|(?:max_)?exp_avg\w*|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta|\w*moments?\d*"
)
_SMALLEST = 4  # rows of a triangle that cannot be a coincidence


def may_be_mask(name: str, shape: Sequence[int], infinite: int, first: int | None) -> bool:
    """True if a tensor of a model with one finite value and `infinite` times -Inf, first at index `first`, is a mask.

    Its name says so (``h.0.attn.causal_mask``), or it has the form of a causal mask: in each matrix exactly the half
    beyond the diagonal is infinite. Then its name must not be that of a weight, a statistic or a moment.
    """
    last = next((part for part in reversed(name.split(".")) if not part.isdecimal()), "")
    if _NEVER.fullmatch(last):
        return False
    if _MASK.fullmatch(last) or (len(shape) > 1 and _MASK_OF_SEVERAL_DIMENSIONS.fullmatch(last)):
        return True
    rows = shape[-1] if len(shape) > 1 and shape[-1] == shape[-2] else 0
    beyond = math.prod(shape[:-2]) * rows * (rows - 1) // 2
    return rows >= _SMALLEST and infinite == beyond and first in (1, rows)
