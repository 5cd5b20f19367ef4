"""Adapters of :class:`~eager_offload.Offload` to training frameworks, one module each.

A framework is imported only by the module that is named after it.
"""
