"""Parts of programs that keep the shape of a tensor or take it apart and put it together: one function each."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.source import Size, Value, Writer, merged, sizes, spelled

Part = Callable[[Writer, Value], Value]

ACTIVATIONS = (
    "F.gelu({})",
    "F.relu({})",
    "F.silu({})",
    "torch.tanh({})",
    "torch.sigmoid({})",
    "F.softplus({})",
    "F.elu({})",
    "F.leaky_relu({}, 0.1)",
    "F.hardtanh({})",
    "F.mish({})",
    "F.hardswish({})",
    "{}.abs()",
    "torch.sin({})",
    "-{}",
    "F.logsigmoid({})",
    "F.gelu({}, approximate='tanh')",
    "F.dropout({}, 0.0)",
    "2.0 * {} + 1.0",
    "1.0 - {}",
    "{} ** 2",
    "{}.clamp(-1.0, 1.0)",
    "{}.clamp_min(-0.5)",
    "torch.exp(-{}.abs())",
    "torch.log1p({}.abs())",
    "{}.square().sqrt()",
    "torch.atan({})",
    "torch.where({0} > 0, {0}, 0.1 * {0})",
    "{0} * torch.sigmoid({0})",
    "{0}.masked_fill({0} < -1.0, 0.0)",
    "{0} - 0.5 * {0}.detach()",
    "{}.contiguous()",
    "{}.clone()",
    "torch.nan_to_num({})",
    "torch.sqrt(1.0 + {} ** 2)",
    "torch.erf({})",
    "{}.float().double()",
    "torch.maximum({0}, 0.5 * {0})",
    "{0} / (1.0 + {0}.abs())",
    "{}.reciprocal().clamp(-3.0, 3.0)",
)


def activation(w: Writer, x: Value) -> Value:
    return w.emit(w.random.choice(ACTIVATIONS).format(x), x.shape)


def affine(w: Writer, x: Value) -> Value:
    """Scale or shift by parameters that are broadcast."""
    width = x.width
    kind = w.random.randrange(4)
    if kind == 0:
        return w.emit(f"{x} * {w.parameter(width, shift=1.0)}", x.shape)
    if kind == 1:
        return w.emit(f"{x} + {w.parameter(width)}", x.shape)
    if kind == 2:
        return w.emit(f"torch.addcmul({w.parameter(width)}, {x}, {w.parameter(width)})", x.shape)
    return w.emit(f"{x} * {w.parameter()} + {w.parameter(1)}", x.shape)


def combine(w: Writer, x: Value) -> Value:
    """With an earlier value of the same shape."""
    others = w.same_shape(x)
    if not others:
        return activation(w, x)
    y = w.random.choice(others)
    ways = (
        f"{x} + {y}",
        f"{x} - {y}",
        f"{x} * torch.tanh({y})",
        f"torch.where({x} > {y}, {x}, {y})",
        f"torch.maximum({x}, {y})",
        f"torch.lerp({x}, {y}, 0.3)",
        f"torch.addcmul({x}, {x}, {y}, value=0.5)",
        f"{x} / (1.0 + {y} ** 2)",
        f"torch.stack([{x}, {y}]).sum(0)",
        f"torch.stack([{x}, {y}], -1).mean(-1)",
        f"({x} + {y}) / 2",
        f"torch.cat([{x}, {y}], -1).unflatten(-1, (2, {x.width})).sum(-2)",
    )
    return w.emit(w.random.choice(ways), x.shape)


def norm(w: Writer, x: Value) -> Value:
    """Over the last dim."""
    width = x.width
    kind = w.random.randrange(7)
    if kind <= 2:
        return w.emit(f"{w.module(f'nn.LayerNorm({width})')}({x})", x.shape)
    if kind == 3:
        return w.emit(f"{w.module(f'nn.RMSNorm({width}, eps=1e-6)')}({x})", x.shape)
    if kind == 4:
        scale = w.emit(f"torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)", (*x.shape[:-1], Size.of(1)))
        return w.emit(f"{x} * {scale} * {w.parameter(width, shift=1.0)}", x.shape)
    if kind == 5:
        centred = w.emit(f"{x} - {x}.mean(-1, keepdim=True)", x.shape)
        return w.emit(f"{centred} / ({centred}.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()", x.shape)
    return w.emit(f"F.layer_norm({x}, ({width},))", x.shape)


def reduction(w: Writer, x: Value) -> Value:
    """Something over one dim against the rest of it; the batch is left alone."""
    dim = w.random.randrange(1, len(x.shape))
    ways = (
        "F.normalize({x}, dim={d})",
        "{x}.softmax({d})",
        "F.log_softmax({x}, {d})",
        "{x} - {x}.amax({d}, keepdim=True)",
        "{x} - {x}.mean({d}, keepdim=True)",
        "{x} * {x}.sum({d}, keepdim=True)",
        "{x} - torch.logsumexp({x}, {d}, keepdim=True)",
        "{x}.cumsum({d})",
        "{x}.flip({d})",
        "torch.roll({x}, 1, {d})",
        "{x} / (1.0 + {x}.std({d}, keepdim=True))",
        "{x} / {x}.norm(dim={d}, keepdim=True).clamp_min(1e-3)",
        "{x} - {x}.max({d}, keepdim=True).values",
        "{x} + {x}.argmax({d}, keepdim=True)",
        "{x} * torch.sigmoid({x}.mean({d}, keepdim=True))",
        "{x}.sort({d}).values",
        "{x} * {x}.abs().sum({d}, keepdim=True).rsqrt()",
        "{x}.gather({d}, {x}.argsort({d}))",
        "F.softmin({x}, {d})",
        "{x} - {x}.amin({d}, keepdim=True)",
        "F.cosine_similarity({x}, 2 * {x} + 1, {d}).unsqueeze({d}) * {x}",
    )
    return w.emit(w.random.choice(ways).format(x=x, d=w.random.choice((dim, dim - len(x.shape)))), x.shape)


def linear(w: Writer, x: Value, width: int | None = None) -> Value:
    """A product with a weight, spelled in one of the usual ways."""
    into = x.width if width is None else width
    shape = (*x.shape[:-1], Size.of(into))
    kind = w.random.randrange(7)
    bias = w.random.choice(("", ", bias=False"))
    if kind == 4:
        return w.emit(f"{x} @ {w.parameter(x.width, into, scale=0.3)}", shape)
    if kind == 5:
        return w.emit(f"torch.einsum('...i,oi->...o', {x}, {w.parameter(into, x.width, scale=0.3)})", shape)
    if kind == 6:
        flat = w.emit(f"{x}.reshape(-1, {x.width})", (merged(x.shape[:-1]), x.shape[-1]))
        product = w.emit(
            f"torch.addmm({w.parameter(into)}, {flat}, {w.parameter(x.width, into, scale=0.3)})",
            (flat.shape[0], shape[-1]),
        )
        return w.emit(f"{product}.view({spelled(shape)})", shape)
    return w.emit(f"{w.module(f'nn.Linear({x.width}, {into}{bias})')}({x})", shape)


def mlp(w: Writer, x: Value) -> Value:
    """Linear, activation, linear; some with gates."""
    wide = x.width * w.random.choice((1, 2, 3))
    kind = w.random.randrange(4)
    if kind == 0:
        gate, up = w.emit_several(f"{linear(w, x, 2 * wide)}.chunk(2, -1)", [(*x.shape[:-1], Size.of(wide))] * 2)
        return linear(w, w.emit(f"F.silu({gate}) * {up}", gate.shape), x.width)
    if kind == 1:
        return linear(w, w.emit(f"F.glu({linear(w, x, 2 * wide)}, -1)", (*x.shape[:-1], Size.of(wide))), x.width)
    hidden = activation(w, linear(w, x, wide))
    return linear(w, norm(w, hidden) if kind == 2 else hidden, x.width)


def experts(w: Writer, x: Value) -> Value:
    """A mixture of experts, all of which see everything, or each the tokens that choose it."""
    count = w.random.choice((2, 3, 4))
    if w.chance(0.5):
        return routed_experts(w, x, count)
    gate = w.emit(f"{linear(w, x, count)}.softmax(-1)", (*x.shape[:-1], Size.of(count)))
    if w.chance(0.5):
        best = w.emit(f"{gate}.topk(1, -1)[1]", (*x.shape[:-1], Size.of(1)), "int")
        gate = w.emit(f"torch.zeros_like({gate}).scatter(-1, {best}, {gate}.gather(-1, {best}))", gate.shape)
    weight = w.parameter(count, x.width, x.width, scale=0.3)
    each = w.emit(f"torch.einsum('...i,eio->...eo', {x}, {weight})", (*x.shape[:-1], Size.of(count), x.shape[-1]))
    return w.emit(f"({each} * {gate}.unsqueeze(-1)).sum(-2)", x.shape)


def routed_experts(w: Writer, x: Value, count: int) -> Value:
    """Tokens go to the best experts; values on their way there are not for other parts of the program."""
    copies, wide, ops = w.random.choice((1, 2)), w.random.choice((2, 4)), "torch.ops.galvatron_fx"
    tokens = w.emit(f"{x}.reshape(-1, {x.width})", (merged(x.shape[:-1]), x.shape[-1]))
    best = w.emit(f"{linear(w, tokens, count)}.softmax(-1).topk({copies}, -1)", (), "pair")
    way = w.emit(f"{ops}.route({best}[1].reshape(-1), {count})", (), "way")
    rows = f"{ops}.dispatch({tokens}, {way}[0], {way}[1], {copies})"
    for sizes_of_expert in ((x.width, wide), (wide, x.width)):
        weight = w.parameter(count, *sizes_of_expert, scale=0.3)
        rows = f"torch.ops.transformers.grouped_mm_fallback({rows}, {weight}, {way}[2])"
        if w.chance(0.3):
            bias = w.parameter(count, sizes_of_expert[1])
            rows = f"{rows} + {ops}.spread({bias}, {way}[2], {way}[1])"
        rows = str(w.emit(w.random.choice(ACTIVATIONS[:6]).format(f"({rows})"), (), "rows"))
    weighted = f"{rows} * {ops}.dispatch({best}[0].reshape(-1), {way}[0], {way}[1], 1).unsqueeze(-1)"
    return w.emit(f"{ops}.combine({weighted}, {way}[0], {way}[1], {copies}).reshape({spelled(x.shape)})", x.shape)


def apart_and_together(w: Writer, x: Value) -> Value:
    """Views, permutations, pieces, and back."""
    width, random = x.width, w.random
    parts = random.choice([n for n in (2, 3, 4) if width % n == 0] or [1])
    piece = (*x.shape[:-1], Size.of(width // parts))
    kind = random.randrange(9)
    if kind == 0:
        made = w.emit_several(f"{x}.chunk({parts}, -1)", [piece] * parts) if parts > 1 else [x]
        made = [part if w.chance(0.5) else activation(w, part) for part in made]
        random.shuffle(made)
        return w.emit(f"torch.cat([{', '.join(map(str, made))}], -1)", x.shape)
    if kind == 1:
        split = w.emit(
            f"{x}.reshape({spelled(x.shape[:-1])}, {parts}, {width // parts})",
            (*x.shape[:-1], *sizes(parts, width // parts)),
        )
        split = reduction(w, split) if w.chance(0.5) else activation(w, split)
        swapped = w.emit(f"{split}.transpose(-1, -2)", (*x.shape[:-1], *sizes(width // parts, parts)))
        return w.emit(f"{swapped}.reshape({spelled(x.shape)})", x.shape)
    if kind == 2:
        flat = w.emit(f"{x}.flatten(0, {len(x.shape) - 2})", (merged(x.shape[:-1]), x.shape[-1]))
        return w.emit(f"{norm(w, flat)}.view({spelled(x.shape)})", x.shape)
    if kind == 3 and len(x.shape) > 2:
        order = list(range(1, len(x.shape)))
        random.shuffle(order)
        order = [0, *order]
        moved = w.emit(f"{x}.permute({', '.join(map(str, order))})", [x.shape[i] for i in order])
        moved = reduction(w, moved) if w.chance(0.6) or not moved.shape[-1].is_fixed else linear(w, moved, moved.width)
        back = [order.index(i) for i in range(len(order))]
        return w.emit(f"{moved}.permute({', '.join(map(str, back))})", x.shape)
    if kind == 4:
        padded = w.emit(f"F.pad({x}, (1, 0))", (*x.shape[:-1], Size.of(width + 1)))
        return w.emit(f"{activation(w, padded)}[..., :-1]", x.shape)
    if kind == 5:
        cut = random.randrange(1, width) if width > 1 else 1
        head, tail = (
            w.emit(f"{x}[..., {at}]", (*x.shape[:-1], Size.of(n)))
            for at, n in ((f":{cut}", cut), (f"{cut}:", width - cut))
        )
        return w.emit(f"torch.cat([{tail}, {head}], -1)", x.shape)
    if kind == 6:
        pair = w.emit(
            f"{x}.unsqueeze(-2).expand({spelled((*x.shape[:-1], Size.of(parts), x.shape[-1]))})",
            (*x.shape[:-1], Size.of(parts), x.shape[-1]),
        )
        return w.emit(f"({pair} * {w.parameter(parts, width)}).sum(-2)", x.shape)
    if kind == 7:
        order = random.sample(range(width), width)
        if w.chance(0.5):
            return w.emit(f"{x}[..., {w.buffer(f'torch.tensor({order})')}]", x.shape)
        return w.emit(f"torch.index_select({x}, -1, {w.buffer(f'torch.tensor({order})')})", x.shape)
    tiled = w.emit(f"{x}.repeat_interleave({parts}, -1)", (*x.shape[:-1], Size.of(width * parts)))
    return linear(w, tiled, width)


def masked(w: Writer, x: Value) -> Value:
    """A mask over the last dim whose infinities are masked away again."""
    width = x.width
    keep = w.buffer(f"torch.arange({width}) % {w.random.choice((2, 3))} == 0")
    ways = (
        f"{x}.masked_fill(~{keep}, float('-inf')).softmax(-1)",
        f"torch.where({keep}, F.log_softmax({x}.masked_fill(~{keep}, float('-inf')), -1), 0.0)",
        f"{x} - torch.logsumexp({x}.masked_fill(~{keep}, float('-inf')), -1, keepdim=True)",
        f"{x} - {x}.masked_fill(~{keep}, float('-inf')).amax(-1, keepdim=True)",
        f"torch.exp({x}.clamp_max(3.0).masked_fill(~{keep}, float('-inf')))",
        f"{x}.masked_fill(~{keep}, float('inf')).amin(-1, keepdim=True) + {x}",
        f"{x} * {keep}",
        f"F.log_softmax({x}.masked_fill(~{keep}, float('-inf')), -1)[..., :1] + {x}",
        f"F.log_softmax({x}.masked_fill(~{keep}, float('-inf')), -1).gather(-1, 0 * {x}[..., :1].long()) + {x}",
    )
    return w.emit(w.random.choice(ways), x.shape)


# For any [batch, ..., width].
ANYWHERE: tuple[Part, ...] = (
    activation,
    affine,
    combine,
    norm,
    reduction,
    linear,
    mlp,
    experts,
    apart_and_together,
    masked,
)
