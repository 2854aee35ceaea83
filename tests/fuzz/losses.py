"""How a program ends: heads, losses and what is returned."""

from __future__ import annotations

from tests.fuzz.operators import activation, linear, norm
from tests.fuzz.source import Size, Value, Writer
from tests.fuzz.stems import Inputs


def finish(w: Writer, inputs: Inputs, x: Value) -> str:
    """A head and one or two losses; returns what the program returns."""
    x = norm(w, x) if w.chance(0.3) and len(x.shape) < 4 else x
    losses = [_loss(w, inputs, x) for _ in range(1 if w.chance(0.8) else 2)]
    total = losses[0] if len(losses) == 1 else w.emit(f"{losses[0]} + 0.5 * {losses[1]}", ())
    if w.chance(0.2):
        return f"{total}, {x}"
    return f"{{'loss': {total}, 'x': {x}.detach()}}" if w.chance(0.1) else total.name


def _pooled(w: Writer, x: Value) -> Value:
    """[rows, width]."""
    while len(x.shape) > 2:
        ways = ["{x}.mean(1)", "{x}[:, 0]", "{x}.amax(1)", "{x}.sum(1)", "{x}[:, -1]"]
        if len(x.shape) == 4 and w.chance(0.7):
            x = w.emit(f"{x}.mean((2, 3))", x.shape[:2])
            continue
        x = w.emit(w.random.choice(ways).format(x=x), (x.shape[0], *x.shape[2:]))
    return x


def _loss(w: Writer, inputs: Inputs, x: Value) -> Value:
    kinds = [_classes, _classes, _contrast, _pairs, _regression, _distribution, _binary, _plain]
    if len(x.shape) == 3:
        kinds += [_words, _words, _words]
    if len(x.shape) == 4:
        kinds += [_pixels]
    return w.random.choice(kinds)(w, inputs, x)


def _labels(w: Writer, inputs: Inputs, shape: tuple[Size, ...], ignored: bool) -> Value:
    """An input of classes, some of them -100."""
    name = f"labels{len(inputs.made)}"
    numbers = ", ".join(str(size.value) for size in shape)
    drawn = f"torch.randint({inputs.classes}, ({numbers},))"
    inputs.made[name] = f"{drawn}.masked_fill(torch.rand({numbers}) < 0.3, -100)" if ignored else drawn
    return w.argument(name, shape, "int")


def _options(w: Writer, inputs: Inputs) -> str:
    options = w.random.choice(("", "", "", ", label_smoothing=0.1", ", reduction='sum'", "weight"))
    return f", weight={w.buffer(f'torch.rand({inputs.classes})')}" if options == "weight" else options


def _from_batch(x: Value) -> bool:
    return x.shape[0].text == "b"


def _classes(w: Writer, inputs: Inputs, x: Value) -> Value:
    scores = linear(w, _pooled(w, x), inputs.classes)
    if not _from_batch(x):
        return _plain(w, inputs, scores)
    labels = _labels(w, inputs, scores.shape[:1], w.chance(0.4))
    kind = w.random.randrange(4)
    if kind == 0:
        logged = w.emit(f"F.log_softmax({scores}, -1)", scores.shape)
        return w.emit(f"F.nll_loss({logged}, {labels})", ())
    if kind == 1:
        each = w.emit(f"F.cross_entropy({scores}, {labels}, reduction='none')", labels.shape)
        return w.emit(f"{each}.mean()", ())
    return w.emit(f"F.cross_entropy({scores}, {labels}{_options(w, inputs)})", ())


def _words(w: Writer, inputs: Inputs, x: Value) -> Value:
    """A class for every place."""
    scores = linear(w, x, inputs.classes)
    if not _from_batch(x):
        return _plain(w, inputs, scores)
    labels = _labels(w, inputs, scores.shape[:2], w.chance(0.5))
    kind = w.random.randrange(4)
    if kind == 0:
        return w.emit(f"F.cross_entropy({scores}.transpose(1, 2), {labels}{_options(w, inputs)})", ())
    if kind == 1:
        first, rest = f"{scores}[:, :-1]", f"{labels}[:, 1:]"
        return w.emit(
            f"F.cross_entropy({first}.reshape(-1, {inputs.classes}), {rest}.reshape(-1){_options(w, inputs)})", ()
        )
    if kind == 2:
        picked = f"F.log_softmax({scores}, -1).gather(-1, {labels}.clamp_min(0).unsqueeze(-1)).squeeze(-1)"
        return w.emit(f"-({picked} * ({labels} != -100)).sum() / ({labels} != -100).sum().clamp_min(1)", ())
    flat = f"{scores}.view(-1, {inputs.classes}), {labels}.view(-1)"
    return w.emit(f"F.cross_entropy({flat}{_options(w, inputs)})", ())


def _pixels(w: Writer, inputs: Inputs, x: Value) -> Value:
    """A class for every pixel."""
    conv = w.module(f"nn.Conv2d({x.shape[1].value}, {inputs.classes}, 1)")
    labels = _labels(w, inputs, (x.shape[0], *x.shape[2:]), w.chance(0.4))
    return w.emit(f"F.cross_entropy({conv}({x}), {labels})", ())


def _contrast(w: Writer, inputs: Inputs, x: Value) -> Value:
    """NT-Xent (Chen et al. 2020): every row against all others, itself left out."""
    rows = _pooled(w, x)
    z = w.emit(f"F.normalize({rows}, dim=-1)", rows.shape)
    n = z.shape[0]
    scores = w.emit(f"{z} @ {z}.T / 0.5", (n, n))
    mask = w.random.choice((f"torch.eye({n.text}, dtype=torch.bool)", f"torch.eye({n.text}).bool()"))
    scores = w.emit(f"{scores}.masked_fill({mask}, float('-inf'))", scores.shape)
    targets = (
        f"(torch.arange({n.text}) + {n.text} // 2) % ({n.text})",
        f"torch.cat([torch.arange(({n.text}) // 2, {n.text}), torch.arange(({n.text}) // 2)])",
        f"torch.arange({n.text}).roll(1)",
    )
    target = w.emit(w.random.choice(targets), (n,), "int")
    kind = w.random.randrange(4)
    if kind == 0:
        return w.emit(f"F.nll_loss(F.log_softmax({scores}, 1), {target})", ())
    if kind == 1:
        return w.emit(f"-F.log_softmax({scores}, 1).gather(1, {target}.unsqueeze(1)).mean()", ())
    if kind == 2:
        return w.emit(f"(torch.logsumexp({scores}, 1) - {scores}[torch.arange({n.text}), {target}]).mean()", ())
    return w.emit(f"F.cross_entropy({scores}, {target})", ())


def _pairs(w: Writer, inputs: Inputs, x: Value) -> Value:
    """CLIP (Radford et al. 2021): rows of one view against rows of another."""
    rows = _pooled(w, x)
    one, two = (w.emit(f"F.normalize({linear(w, rows)}, dim=-1)", rows.shape) for _ in range(2))
    n = rows.shape[0]
    scores = w.emit(f"{one} @ {two}.t() * {w.parameter()}.exp()", (n, n))
    target = w.emit(f"torch.arange({n.text})", (n,), "int")
    return w.emit(f"(F.cross_entropy({scores}, {target}) + F.cross_entropy({scores}.t(), {target})) / 2", ())


def _regression(w: Writer, inputs: Inputs, x: Value) -> Value:
    made = w.random.choice(("F.mse_loss", "F.l1_loss", "F.smooth_l1_loss", "F.huber_loss"))
    if not _from_batch(x):
        return _plain(w, inputs, x)
    name = f"target{len(inputs.made)}"
    inputs.made[name] = f"torch.randn({', '.join(str(size.value) for size in x.shape)})"
    target = w.argument(name, x.shape)
    reduction = w.random.choice(("", "", ", reduction='sum'", ", reduction='none'"))
    return w.emit(f"{made}({x}, {target}{reduction}){'.mean()' if 'none' in reduction else ''}", ())


def _distribution(w: Writer, inputs: Inputs, x: Value) -> Value:
    """Divergence from another head, which may be left out of the gradient."""
    rows = _pooled(w, x)
    one, two = linear(w, rows, inputs.classes), linear(w, rows, inputs.classes)
    target = f"{two}.softmax(-1){w.random.choice(('', '.detach()'))}"
    kind = w.random.choice(("'batchmean'", "'sum'", "'mean'"))
    if w.chance(0.5):
        return w.emit(f"F.kl_div(F.log_softmax({one}, -1), {target}, reduction={kind})", ())
    return w.emit(f"-({target} * F.log_softmax({one}, -1)).sum(-1).mean()", ())


def _binary(w: Writer, inputs: Inputs, x: Value) -> Value:
    scores = linear(w, _pooled(w, x), w.random.choice((1, 3, 4)))
    if w.chance(0.3):
        return w.emit(f"F.binary_cross_entropy(torch.sigmoid({scores}), ({scores}.detach() > 0).double())", ())
    weight = w.random.choice(("", f", pos_weight={w.buffer(f'torch.rand({scores.width})')}"))
    return w.emit(f"F.binary_cross_entropy_with_logits({scores}, ({scores}.detach() > 0).double(){weight})", ())


def _plain(w: Writer, inputs: Inputs, x: Value) -> Value:
    x = activation(w, x)
    ways = (
        f"{x}.pow(2).mean()",
        f"{x}.mean()",
        f"({x} * torch.cos({x})).sum()",
        f"{x}.norm()",
        f"torch.logsumexp({x}, -1).mean()",
        f"{x}.flatten(1).pow(2).sum(1).sqrt().mean()",
        f"{x}.std()",
        f"{x}.abs().max() + {x}.mean()",
        f"{x}.square().sum() / {x}.shape[0]",
        f"-{x}.softmax(-1).clamp_min(1e-9).log().mean()",
    )
    return w.emit(w.random.choice(ways), ())
