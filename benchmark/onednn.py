"""Large float32 products of compiled code by oneDNN instead of MKL, for benchmark/settings.py: an experiment.

Replaces mm and bmm by Inductor's call of oneDNN's inner product, which Inductor has for constant weights only (torch 2.13).
The caches of compiled code do not know of it: use one of its own.
"""

import torch
from torch import Tensor
from torch._inductor import ir, lowering, mkldnn_ir
from torch._inductor.decomposition import decompositions

LARGE = 2**23  # multiplications: with those of 23 columns, too, a gradient step of SAC takes 3.3 times as long
linear = torch.ops.mkldnn._linear_pointwise.default


def use() -> None:
    """Have all that is compiled from now on call oneDNN."""
    decompositions[torch.ops.aten.mm.default] = mm
    decompositions[torch.ops.aten.bmm.default] = bmm
    lowering.lowerings[linear] = lower


def mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices; small ones are left to the default."""
    if a.shape[0] * a.shape[1] * b.shape[1] < LARGE:
        return NotImplemented
    return linear(a, b.t(), None, "none", [], "")


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Products of stacked matrices, one after the other; small ones are left to the default."""
    if a.shape[1] * a.shape[2] * b.shape[2] < LARGE:
        return NotImplemented
    return torch.stack([mm(*pair) for pair in zip(a, b, strict=True)])


def lower(x: ir.TensorBox, weight: ir.TensorBox, *_, layout: ir.Layout | None = None) -> ir.TensorBox:
    """The inner product in Inductor's terms: `x` contiguous, `weight` as it lies."""
    x = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
    weight = ir.ExternKernel.realize_input(weight)
    size = [x.get_size()[0], weight.get_size()[0]]
    layout = ir.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
    return ir.TensorBox.create(mkldnn_ir.LinearUnary(layout, [x, weight], [None, "none", [-1], ""]))
