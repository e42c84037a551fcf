"""The attention and window operators of RBLN's "Triton Ops API", on NumPy arrays.

Source: https://docs.rbln.ai/latest/ko/software/model_serving/vllm_support/features/triton_rbln/api.html

    scores = scale * (q @ np.swapaxes(keys, -1, -2))            # (Nmb, Head, Group, Seq, Channel)
    p = dynamic_masked_softmax(scores, to_dynamic_index(cached), sink=sink)

Scores have 5 axes, (Nmb, Head, Group, Seq, Channel), or 4, (Nmb, Head x Group, Seq, Channel); they are float32, float16
or bfloat16, of any strides. Everything is computed in float32 and returned in the type of the scores, except statistics
of rows, which are float32. An `index` is an integer of 0 or more, or a vector of Nmb of them, one for each entry of
axis 0.

What is masked is excluded: its probability is 0, whatever it holds, and an axis that is masked altogether gives 0. The
document does not define its MASK_VALUE; as the maximum of such a row it is the lowest float32. A mask is of any type
that can be compared with 0. An axis may be -1, its default, although the document says `0 <= axis`; negative axes
therefore count from the end. Where it has no default, in insert, window_insert and window_slice, it is 0 or more.

The document's constraints hold unless strict=False says otherwise, where an operator has that argument.

Every operator raises ValueError, with a line that names the argument and its value, before it writes anything.
"""

from __future__ import annotations

from ggml_backend_npu.documents.rbln.memory import (
    dynamic_load,
    dynamic_store,
    insert,
    nn_pad,
    to_dynamic_index,
    window_insert,
    window_slice,
)
from ggml_backend_npu.documents.rbln.softmax import (
    dynamic_flash_attn_tile,
    dynamic_masked_softmax,
    flash_attn_recompute,
    flash_attn_tile,
    masked_softmax,
    softmax,
    window_softmax,
)

__all__ = [
    "dynamic_flash_attn_tile",
    "dynamic_load",
    "dynamic_masked_softmax",
    "dynamic_store",
    "flash_attn_recompute",
    "flash_attn_tile",
    "insert",
    "masked_softmax",
    "nn_pad",
    "softmax",
    "to_dynamic_index",
    "window_insert",
    "window_slice",
    "window_softmax",
]
