"""What a compiler treats in a way of its own: aliases, control flow, effects, sizes, transforms, many runs of a graph.

Eager code runs all of it too. What only the compiler's own counts show stands in ``tests/compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config as dynamo_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.programs import Flag, Run, differentiated, leaf, program, step

_SIDE = 32

Outputs = Tensor | Sequence[Tensor]
Forward = Callable[..., Outputs]


def _inputs(sizes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [leaf(*size, seed=number) for number, size in enumerate(sizes)]


def _add(name: str, function: Forward, *flags: Flag, sizes: Sequence[tuple[int, ...]] = ((_SIDE, _SIDE),) * 2) -> None:
    """A program of one forward, which can be a step of its own."""
    step(name, *flags)(lambda: (function, _inputs(sizes)))


def _add_seen_when_run(name: str, function: Forward, *flags: Flag, **config: Any) -> None:
    """A program that the compiler takes as one graph only with settings of its own."""

    def body(run: Run) -> object:
        inputs = _inputs([(8, 8)] * 2)
        with dynamo_config.patch(config), run.around:
            outputs = run.forward(function)(*inputs)
        return differentiated(outputs, inputs)

    program(name, Flag.COMPILED, *flags)(body)


def deep(x: Tensor, w: Tensor) -> Tensor:
    """Saves several values, all of which may move."""
    for _ in range(3):
        x = (x @ w).sin().exp().cos()
    return x


# -- aliases ----------------------------------------------------------------------------------------------------------


def _outputs_and_views(x: Tensor, w: Tensor) -> Outputs:
    hidden = (x @ w).exp()
    other = (hidden @ w).sigmoid()
    return hidden.t(), hidden[2:5], (hidden * other).exp()


def _views_of_a_base(x: Tensor, w: Tensor) -> Outputs:
    base = (x @ w).sin().exp()
    middle = base.cos().exp().tanh()
    return base.view(-1), base.t(), middle.view(16, -1), middle.exp()


def _each_other(x: Tensor, w: Tensor) -> Outputs:
    hidden = (x @ w).exp().cos()
    saved = (hidden @ w).exp().sigmoid()
    return hidden, hidden, hidden.detach(), saved, saved.view_as(saved), (saved * saved).exp().sin()


def _strided(x: Tensor, w: Tensor) -> Outputs:
    hidden = (x @ w).sin().t()
    strided = hidden[::2].exp()
    wide = (x @ w).cos().mean(0, keepdim=True).expand(_SIDE, _SIDE)
    return (strided.t() @ strided * wide).exp() @ hidden.contiguous().sigmoid()


def _parts(x: Tensor, w: Tensor) -> Outputs:
    """Columns, rows, what begins behind the first element, and a matrix beside its transpose."""
    whole = x @ w
    columns, rows = whole[:, ::8], whole[4:6]
    behind = whole.view(-1)[3:131].view(8, 16)
    again = (x + 1) @ w
    turned = again.t() @ again @ again[:, 1:].t().contiguous().t()[:, :4]
    return columns @ columns.t(), rows @ rows.t(), behind @ behind.t(), turned


def _changed_transpose(x: Tensor, w: Tensor) -> Outputs:
    """Inductor computes the transpose, and lays what a graph returns of it out anew, for who sums it inside too."""
    hidden = (x @ w).sin()
    hidden.mT.mul_(1.5)
    return hidden @ hidden + hidden.softmax(0)


def _laid_out_anew(x: Tensor, w: Tensor, other: Tensor) -> Outputs:
    """Convolutions like their channels last, and a view is told by strides."""
    hidden = F.conv2d(x, w, padding=1)
    flat = hidden.flatten(2)
    scores = (flat.transpose(1, 2) @ flat).softmax(-1)
    return (F.conv2d(hidden, other, padding=1).flatten(2) @ scores).sin()


class _SavesWithoutAVersion(torch.autograd.Function):
    """Saves what it returns, and nothing can be differentiated of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x @ x
        ctx.save_for_backward(kept, x)
        ctx.mark_non_differentiable(kept)
        return x.exp(), kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        kept, x = ctx.saved_tensors
        return gradient * kept * x.cos()


def _of_ones_own(x: Tensor, w: Tensor) -> Outputs:
    result, kept = _SavesWithoutAVersion.apply((x @ w).cos())
    return (result @ w).exp() * kept


_add("outputs-that-are-inputs-and-views-of-them", lambda x, w: (x * 1, x.t(), w[1:], (x @ w).exp().sin().exp()))
_add("outputs-that-are-views-of-what-is-saved", _outputs_and_views)
_add("outputs-that-are-views-of-a-base-that-is-not-returned", _views_of_a_base)
_add("outputs-that-are-each-other", _each_other)
_add("strided-and-expanded-values", _strided)
_add("parts-of-a-storage", _parts)
_add("a-transpose-that-is-changed-and-summed", _changed_transpose)
_add("empty-values-share-nothing", lambda x, w: torch.cat([(x @ w).exp(), (x[:0] @ w).exp() * (x[:0] @ w).sin()]).sin())
_add("convolutions-whose-outputs-are-laid-out-anew", _laid_out_anew, sizes=[(2, 4, 6, 6), (8, 4, 3, 3), (8, 8, 3, 3)])
_add("a-function-that-saves-what-it-returns", _of_ones_own)


@program("inputs-that-are-changed-in-place")
def _changed_inputs(run: Run) -> object:
    (x, w), sum_, last = _inputs([(_SIDE, _SIDE)] * 2), torch.zeros(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)

    def function(x: Tensor, w: Tensor, sum_: Tensor, last: Tensor) -> Tensor:
        hidden = (x @ w).sigmoid() @ w
        sum_.add_(hidden.detach())
        last.copy_(hidden.detach().cos() @ last)
        hidden.mul_(2)
        return (hidden * sum_).sin() @ last

    with run.around:
        outputs = run.forward(function)(x, w, sum_, last)
    return differentiated(outputs, [x, w, sum_, last])


@program("a-view-output-that-the-caller-changes")
def _changed_output(run: Run) -> object:
    x = leaf(_SIDE, _SIDE)
    forward = run.forward(lambda x: ((hidden := (x @ x).cos().sigmoid() @ x)[1:], hidden.view(-1)))
    with run.around:
        rows, flat = forward(x)
        rows.mul_(3)
        loss = (flat.sin() * flat).sum()
    loss.backward()
    return [rows.detach(), flat.detach(), loss.detach(), x.grad]


@program("weights-and-buffers-with-a-fixed-address", Flag.SOURCES_CHANGE)
def _fixed_addresses(run: Run) -> object:
    model = nn.Sequential(nn.Linear(_SIDE, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, _SIDE))
    static, x = leaf(16, _SIDE, seed=3, grad=False), leaf(16, _SIDE)
    torch._dynamo.mark_static_address(static)
    forward = run.forward(lambda x: model(x + static).exp())
    losses = []
    for _ in range(2):
        with run.around:
            loss = forward(x).sum()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, x.grad, *model.buffers(), *(weight.grad for weight in model.parameters())]


# -- control flow and effects -----------------------------------------------------------------------------------------


#: What has been noted.
NOTED: list[float] = []


@torch.library.custom_op("eager_offload_programs::note", mutates_args=())
def note(x: Tensor) -> None:
    """Takes note of a sum, which is an effect and has a place among the effects of the program."""
    NOTED.append(float(x.sum()))


note.register_fake(lambda x: None)
_register_effectful_op(torch.ops.eager_offload_programs.note.default, _EffectType.ORDERED)


def _effects(x: Tensor, w: Tensor) -> Outputs:
    h = (x @ w).exp()
    note(h.detach())
    h = (h @ w).sin()
    torch._higher_order_ops.print("{}", 1)
    return h @ w


def _decompositions(x: Tensor, w: Tensor) -> Outputs:
    well = x @ x.t() + 8 * torch.eye(x.shape[0])
    _, lower, upper = torch.linalg.lu(well)
    found = torch.linalg.cholesky(well) @ w, torch.linalg.solve(well, w), torch.linalg.inv(well) @ w
    return (lower @ upper.sin() @ w).exp(), *(one.sin() for one in found)


def _a_branch(x: Tensor, w: Tensor) -> Outputs:
    h = x @ w
    return torch.cond(x.sum() > 0, lambda h: (h @ h).sin().exp(), lambda h: (h @ h).cos(), (h,)).sin()


def _a_loop(x: Tensor, w: Tensor) -> Outputs:
    h = (x @ w).sin()
    _, again = while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * 2), (torch.zeros(()), h.detach()))
    return (h.exp() * again).cos()


def _scans(x: Tensor, w: Tensor) -> Outputs:
    h = (x @ w).sin()
    carry, each = scan(lambda c, y: ((c * y).sin(), (c + y).cos()), torch.ones(8), h, dim=0)
    return carry + each.sum(0), associative_scan(lambda a, b: a * b, h, 0, combine_mode="generic").exp()


def _a_map(x: Tensor, w: Tensor) -> Outputs:
    return map_rows(lambda row, w: (row @ w).sin().exp(), x @ w, w).cos()


def _a_recurrent_layer(x: Tensor, w: Tensor) -> Outputs:
    weights = [w.repeat(3, 1), w.sin().repeat(3, 1)]
    hidden = torch.zeros(1, 1, 8)
    return torch.gru((x @ w).unsqueeze(1), hidden, weights, False, 1, 0.0, True, False, False)[0]


def _sizes_of_data(x: Tensor, w: Tensor) -> Outputs:
    h = (x @ w).sin()
    index = (h.detach() > 0).nonzero()[:, 0]
    n = (x.detach() * 0 + 4).max().long().item()
    torch._check(n >= 2)
    torch._check(n <= 8)
    return (h[index] @ w).exp().sin(), (h.narrow(0, 0, n) @ w).exp()


_SEEN = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
_add_seen_when_run("H45-effects", _effects)
_add_seen_when_run("H45-decompositions", _decompositions)
_add_seen_when_run("H45-a-branch", _a_branch, Flag.NO_INDUCTOR)
_add_seen_when_run("H45-a-loop", _a_loop)
# Inductor alone does not compile these two.
_add_seen_when_run("H45-scans", _scans, Flag.NO_INDUCTOR)
_add_seen_when_run("H45-a-map", _a_map, Flag.NO_INDUCTOR)
_add_seen_when_run("H45-a-recurrent-layer", _a_recurrent_layer, Flag.NO_INDUCTOR, allow_rnn=True)
_add_seen_when_run("H45-sizes-that-data-decide", _sizes_of_data, **_SEEN)


@program("H45-a-dimension-of-which-nothing-is-known", Flag.COMPILED, Flag.NO_INDUCTOR)
def _unbacked(run: Run) -> object:
    inputs = _inputs([(_SIDE, _SIDE)] * 2)
    mark_unbacked(inputs[0], 0)
    with run.around:
        outputs = run.forward(deep)(*inputs)
    return differentiated(outputs, inputs)


@program("H45-sparse-gradients", Flag.COMPILED)
def _sparse_gradients(run: Run) -> object:
    words = torch.arange(48).view(6, 8) % 31
    tables = nn.Embedding(31, _SIDE, sparse=True), nn.EmbeddingBag(31, _SIDE, sparse=True)
    last = nn.Linear(_SIDE, _SIDE)
    with run.around:
        outputs = run.forward(lambda: [F.gelu(last(table(words).sin())) for table in tables])()
    return differentiated(outputs, [*tables, last])


# -- transforms of torch.func -----------------------------------------------------------------------------------------


def _inner(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).square().sum()


def _columns(x: Tensor) -> Tensor:
    return x.sin().sum(0)


#: In a compiled graph they run under no hooks; what is computed before one and after it is saved by the same graph.
_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gradients": lambda h: (
        grad(_inner)(h)
        + grad_and_value(_inner)(h)[0]
        + grad(lambda x: grad(_inner)(x).sin().sum())(h)
        + vjp(lambda x: x.sin().square(), h)[1](torch.ones_like(h))[0]
    ),
    "jacobians": lambda h: (
        (hessian(_inner)(h[0])[0] + h)
        + jvp(lambda x: x.sin(), (h,), (h * 2,))[1]
        + jacrev(_columns)(h).sum(0)
        + jacfwd(_columns)(h).sum(0)
    ),
    "maps": lambda h: vmap(grad(_inner))(h) + vmap(lambda row: row.sin() * row.sum())(h),
}


def _around(transform: Callable[[Tensor], Tensor]) -> Forward:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).tanh().exp()
        return (transform(h) @ w).sin() * h

    return function


for _name, _transform in _TRANSFORMS.items():
    _flags = [Flag.COMPILED] + [Flag.NO_INDUCTOR] * (_name != "gradients")
    _add(f"H43-transforms-{_name}", _around(_transform), *_flags, sizes=[(8, 8)] * 2)


# -- many runs of a graph ---------------------------------------------------------------------------------------------


@program("H02-compiled-graphs-in-any-order", Flag.COMPILED)
def _in_any_order(run: Run) -> object:
    (x, w), forward = _inputs([(_SIDE, _SIDE)] * 2), run.forward(deep)
    with run.around:
        losses = [forward(x * scale, w).sum() for scale in (1, 2, 3)]
        losses[1].backward()
    with run.around:
        losses.append(forward(x * 4, w).sum())
        losses[0].backward()
        losses.append(forward(forward(x * 5, w), w).sum())
    for which in (4, 3, 2):
        losses[which].backward()
    return [*(one.detach() for one in losses), x.grad, w.grad]


def _masked(x: Tensor, w: Tensor) -> Tensor:
    return deep(F.dropout(F.relu(x @ w), 0.3), w)


@program("H02-H12-graphs-with-masks-differentiated-again", Flag.COMPILED, Flag.NO_INDUCTOR)
def _again(run: Run) -> object:
    (x, w), forward = _inputs([(_SIDE, _SIDE)] * 2), run.forward(_masked)
    # Inductor refuses a second backward of buffers that it may reuse, unless a program wants one.
    with torch._functorch.config.patch(donated_buffer=False):
        with run.around:
            loss = forward(x, w).sum()
        loss.backward(retain_graph=True)
        with run.around:
            other = forward(x, w).sum()
        other.backward()
        return [loss.detach(), other.detach(), *torch.autograd.grad(loss, (x, w)), x.grad, w.grad]


@program("compiled-blocks-in-an-eager-model")
def _blocks(run: Run) -> object:
    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(_SIDE), nn.Linear(_SIDE, 64), nn.GELU(), nn.Linear(64, _SIDE)) for _ in range(3)
    )
    compiled, x = [run.forward(block) for block in blocks], leaf(16, _SIDE)
    with run.around:
        hidden = x
        for block in compiled:
            hidden = (hidden + block(hidden)).sin()  # eager in between
    return differentiated(hidden, [x, blocks])


def _broken(x: Tensor, w: Tensor) -> Tensor:
    hidden = deep(x, w)
    torch._dynamo.graph_break()
    hidden = hidden.sin() * hidden.detach().mean().item()
    return deep(hidden, w)


@program("graph-breaks", Flag.NO_INDUCTOR)
def _graph_breaks(run: Run) -> object:
    inputs = _inputs([(_SIDE, _SIDE)] * 2)
    with run.around:
        outputs = run.forward(_broken)(*inputs)
    return differentiated(outputs, inputs)


def _grown(x: Tensor, w: Tensor) -> Tensor:
    """Whose backward needs sizes of its input."""
    hidden = (x @ w).exp()
    rows = hidden.sigmoid().view(-1)[: x.shape[0] * 4].view(x.shape[0], 4).sin()
    return (rows * x.shape[0]).expand(3, x.shape[0], 4).cos() * hidden.mean(1, keepdim=True).sin()


@program("one-graph-for-inputs-of-any-size")
def _any_size(run: Run) -> object:
    """The first is compiled for its size, all others for any; the last three are alive at once."""
    forward, w, losses = run.forward(_grown), leaf(_SIDE, _SIDE, seed=9), list[Tensor]()
    inputs = [leaf(rows, _SIDE, seed=rows) for rows in (10, 14, 32, 12)]
    with run.around:
        forward(inputs[0], w).sum().backward()
    with run.around:
        losses += [forward(x, w).sum() for x in inputs[1:]]
    for which in (1, 0, 2):
        losses[which].backward()
    return [*(loss.detach() for loss in losses), *(x.grad for x in inputs), w.grad]


# -- what is saved beside plain values --------------------------------------------------------------------------------


def _segment(x: Tensor, w: Tensor) -> Tensor:
    heads = F.dropout((x @ w).exp(), 0.5).view(2, 8, 4, 8).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
    return mixed.transpose(1, 2).reshape(16, 32).exp()


def _recomputed(x: Tensor, w: Tensor) -> Tensor:
    hidden = checkpoint(_segment, (x @ w).sigmoid().sin(), w, use_reentrant=False)
    hidden = checkpoint(_segment, hidden.cos(), w, use_reentrant=False)
    return F.dropout(hidden.sigmoid(), 0.5) * torch.rand_like(hidden)


def _no_gradient_inside(x: Tensor, w: Tensor) -> Tensor:
    hidden = (x @ w).sin()
    with torch.no_grad():
        scale = (hidden @ w).exp().sin()
    return (hidden * scale).exp() @ w


def _cast_inside(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = (x @ w).exp()
    return hidden.float().sin() @ w


def _of_every_type(x: Tensor, w: Tensor) -> Outputs:
    found = []
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        hidden = x.tanh().to(dtype) @ w.tanh().to(dtype) / 8
        found.append((hidden.sin() @ hidden) * hidden.mean(1, keepdim=True).exp() @ hidden.cos())
    return found


_add("values-of-every-type", _of_every_type, Flag.HOST, Flag.NO_INDUCTOR)
_add("a-part-without-gradients", _no_gradient_inside, Flag.NO_INDUCTOR)
_add("autocast-inside", _cast_inside, Flag.HOST, Flag.NO_INDUCTOR)


@program("autocast-around", Flag.HOST)
def _cast_around(run: Run) -> object:
    layers = nn.Linear(_SIDE, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, _SIDE), nn.Sigmoid()
    model, x = nn.Sequential(*layers), leaf(16, _SIDE)
    with run.around, torch.autocast("cpu", torch.bfloat16):
        outputs = run.forward(model)(x).square()
    return differentiated(outputs, [x, model])


@program("dropout-is-the-same")
def _dropout(run: Run) -> object:
    x, w = _inputs([(_SIDE, _SIDE)] * 2)
    forward = run.forward(lambda x, w: F.dropout((F.dropout(x, 0.3) @ w).exp(), 0.5).sin())
    with run.around:
        losses = [forward(x, w).sum(), forward(x, w).sum()]
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), x.grad, w.grad, torch.get_rng_state()]


@program("what-is-recomputed-draws-the-same", Flag.HOST, moved=0.5)
def _drawn_again(run: Run) -> object:
    inputs = _inputs([(16, 32), (32, 32)])
    with run.around:
        outputs = run.forward(_recomputed)(*inputs)
    return [*differentiated(outputs, inputs), torch.get_rng_state()]


@program("what-is-inside-a-wrapper", Flag.HOST, Flag.NO_INDUCTOR)
def _wrapped(run: Run) -> object:
    parts = leaf(_SIDE, _SIDE, seed=1, grad=False), leaf(_SIDE, _SIDE, seed=2, grad=False)
    x, w = TwoTensor(*parts).requires_grad_(), leaf(_SIDE, _SIDE, seed=3)
    with run.around:
        result = run.forward(lambda x, w: ((x @ w).exp().sin() * x.cos()).sigmoid())(x, w)
        loss = result.sum()
    loss.backward()
    return [result.detach(), x.grad, w.grad]


def _ragged(rows: Tensor, offsets: Tensor, w: Tensor) -> Tensor:
    values = torch.nested.nested_tensor_from_jagged(rows, offsets, min_seqlen=20, max_seqlen=40)
    return F.linear(F.linear(values, w).sin().exp(), w).cos().values()


@program("H45-jagged-values", Flag.COMPILED, Flag.NO_INDUCTOR)
def _jagged(run: Run) -> object:
    inputs, offsets = _inputs([(90, _SIDE), (_SIDE, _SIDE)]), torch.tensor([0, 20, 50, 90])
    with run.around:
        outputs = run.forward(lambda rows, w: _ragged(rows, offsets, w))(*inputs)
    return differentiated(outputs, inputs)
