"""Where people train: :class:`~eager_offload.Offload` in the habits of other frameworks, one module for each.

No framework is imported before the module that is named after it.
"""
