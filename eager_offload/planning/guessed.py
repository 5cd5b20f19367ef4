"""Functions of torch that save other tensors on an accelerator than on a CPU, whose kernels a trace runs.

torch chooses between them below autograd by device, type and shape, so the table says what they *may* save: a plan
names those that a step calls, and the first steps on the device tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eager_offload._torch import schema_of

_ATTENTION = "attention (its kernels save random seeds, and statistics in other layouts)"
_DROPOUT = "dropout (a mask of one byte an element, for noise of the input's type)"
_BATCH_NORM = "batch norm (cuDNN saves a reserve besides)"
_RECURRENT = "recurrent layers (cuDNN saves one reserve, for oneDNN's workspace or each step's tensors)"
#: What is said of a function, by its name in torch.
_GUESSED = {
    "scaled_dot_product_attention": _ATTENTION,
    "multi_head_attention_forward": _ATTENTION,
    **dict.fromkeys(("dropout", "dropout_", "native_dropout"), _DROPOUT),
    **dict.fromkeys(("batch_norm", "native_batch_norm", "instance_norm"), _BATCH_NORM),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _RECURRENT),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell"), "recurrent cells (one kernel saves a workspace, for each gate's tensors)"
    ),
    "rms_norm": "RMS norm (one kernel, which saves a number a row, for the tensors of five operators)",
    "ctc_loss": "CTC loss (cuDNN saves its gradient, for the probabilities of paths)",
    "_weight_norm": "weight norm (one kernel, which saves the norms, for the tensors of several operators)",
}


def guessed_name(function: Callable[..., Any]) -> str | None:
    """What a plan says of ``function``; ``None`` where it saves the same on each device."""
    schema = schema_of(function)
    name = getattr(function, "__name__", "") if schema is None else schema.name.partition("::")[2]
    return _GUESSED.get(name)
