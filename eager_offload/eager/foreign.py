"""Notices saved-tensor hooks of others that are entered inside an active context of ours, and hide what is saved.

Autograd calls the innermost hooks only, so what is saved under them is hidden from the outer ones. Those that are
entered through ``torch.autograd.graph.saved_tensors_hooks`` (``save_on_cpu`` and most libraries) can be seen; hooks
that are pushed through torch's private functions cannot.

[Note: which hooks hide] A pair that is entered hides something from a context, unless

1. it is the context's own pair, which some libraries look up and enter again (``torch_remat``), or another of ours;
2. ours are not on top: what is saved goes elsewhere without that pair too. Non-reentrant checkpointing puts on hooks
   that hide what it will compute again, by design, and shows its inputs to the hooks around it. A pair in its function,
   such as that of ``torch_remat`` for what is not to be computed again, keeps that from the checkpoint and not from us;
3. it calls our pack hook for what it is given. That shows when it does: our pack hook is called while another one is on
   top. Libraries make a pair anew for each use, and not each is given something to hand on, so what shows for one of a
   kind holds for all that the context has seen.

So it is known when the context is left, unless by an exception: that step is over.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from torch.autograd.graph import saved_tensors_hooks

from eager_offload import active
from eager_offload._torch import (
    HookFunctions,
    are_of_checkpoint,
    on_entering_hooks,
    replace_hooks,
    top_pack_hook,
)


def _watching(replaced: Callable[[saved_tensors_hooks], None]) -> Callable[[saved_tensors_hooks], None]:
    def enter(hooks: saved_tensors_hooks) -> None:
        if enter is _entering.active and not (isinstance(hooks, ours) or are_of_checkpoint(hooks)):
            _note(hooks.pack_hook)
        replaced(hooks)

    return enter


def _note(pack_hook: object) -> None:
    """Writes down a pack hook that is about to be put on top, where it may hide something from a context."""
    contexts = active.thread.contexts
    if not contexts or active.is_ours(pack_hook):
        return
    top = top_pack_hook()
    hidden = next((context for context in reversed(contexts) if context.pack_hook is top), None)
    if hidden is not None:
        hidden.above.entered.append(active.kind_of(pack_hook))


_entering = on_entering_hooks(_watching)
active.add_patches([_entering])


class ours(saved_tensors_hooks):
    """The hooks of this library, and how they leave a thread's stack from wherever in it they are.

    [Note: contexts that overlap]
    torch takes off the innermost hooks, whichever context leaves. Where contexts do not nest, those are another's:

        ours is entered, theirs is entered, ours is left, theirs is left

    So ours are looked for, and those above them are put back. They are not there if a context of others that was
    entered before ours was left before it, and took ours off. Then what it has left behind goes in their place: the
    innermost hooks that are of no context of ours. So as many are gone as have left, and none stays for ever.
    """

    def take_off(self, open_hooks: Container[object]) -> None:
        """Takes these hooks off the calling thread's stack.

        Args:
            open_hooks: the pack hooks of the contexts that stay open.
        """
        if top_pack_hook() is self.pack_hook:
            self.__exit__(None, None, None)
            return

        def take_off(hooks: list[HookFunctions]) -> None:
            own = [number for number, (pack, _) in enumerate(hooks) if pack is self.pack_hook]
            left_behind = [number for number, (pack, _) in enumerate(hooks) if pack not in open_hooks]
            if found := own or left_behind:
                del hooks[found[-1]]

        replace_hooks(take_off)

    def leave_on(self, count: int) -> None:
        """Takes these hooks off if they are on the stack more than ``count`` times: after an interrupt they may be."""

        def take_off(hooks: list[HookFunctions]) -> None:
            own = [number for number, (pack, _) in enumerate(hooks) if pack is self.pack_hook]
            for number in reversed(own[count:]):
                del hooks[number]

        replace_hooks(take_off)
