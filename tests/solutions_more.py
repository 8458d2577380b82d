"""Solutions of the exercises 16 to 25 and 30, and answers that are typed: right ones and wrong ones."""

from __future__ import annotations

from solutions import SOFTMAX

ONLINE = """
def online_softmax(stream):
    largest, total = float("-inf"), 0.0
    for score in stream:
        if score == float("-inf"):
            continue
        if score > largest:
            total, largest = total * math.exp(largest - score), score
        total += math.exp(score - largest)
    return largest, total
"""
TILES = """
def attention_by_tiles(q, k, v, tile):
    largest = np.full(len(q), -np.inf)
    total, output = np.zeros(len(q)), np.zeros((len(q), v.shape[1]))
    for start in range(0, len(k), tile):
        scores = q @ k[start : start + tile].T / np.sqrt(q.shape[1])
        risen = np.maximum(largest, scores.max(1))
        shrink, fresh = np.exp(largest - risen), np.exp(scores - risen[:, None])
        total = total * shrink + fresh.sum(1)
        output = output * shrink[:, None] + fresh @ v[start : start + tile]
        largest = risen
    return output / total[:, None]
"""
LINEAR = """
def phi(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
def linear_attention(q, k, v):
    held, total, rows = np.zeros((k.shape[1], v.shape[1])), np.zeros(k.shape[1]), []
    for a, b, c in zip(phi(q), phi(k), v):
        held, total = held + np.outer(b, c), total + b
        rows.append(a @ held / (a @ total))
    return np.array(rows)
"""
BACKWARD = """
def backward(q, k, v, d_out):
    scale = q.shape[-1] ** -0.5
    weights = softmax(q @ k.T * scale)
    d_weights = d_out @ v.T
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    return d_scores @ k, d_scores.T @ q, weights.T @ d_out
"""
DECODE = """
def decode_step(q, k, v, keys, values):
    keys = np.concatenate([keys, k[:, None]], axis=1)
    values = np.concatenate([values, v[:, None]], axis=1)
    weights = softmax((keys @ q[:, :, None])[:, :, 0] / np.sqrt(q.shape[-1]))
    return (weights[:, None] @ values)[:, 0], keys, values
"""
SHUFFLED = """
def permutation_test(weights, values):
    output, squares = weights @ values, []
    for order in itertools.permutations(range(weights.shape[1])):
        squares.append(((weights[:, list(order)] @ values - output) ** 2).sum(-1))
    return np.sqrt(np.mean(squares, axis=0))
"""

RIGHT: dict[int, list[str]] = {
    16: [
        ONLINE,
        "def online_softmax(stream):\n    largest, total = -np.inf, 0.0\n    for score in stream:\n"
        "        risen = max(largest, score)\n        if risen > -np.inf:\n"
        "            total, largest = total * np.exp(largest - risen) + np.exp(score - risen), risen\n"
        "    return largest, total",
    ],
    17: [
        "def merge_parts(output_a, lse_a, output_b, lse_b):\n    lse = np.logaddexp(lse_a, lse_b)\n"
        "    return np.exp(lse_a - lse)[:, None] * output_a + np.exp(lse_b - lse)[:, None] * output_b, lse",
        "def merge_parts(output_a, lse_a, output_b, lse_b):\n    lse = torch.logaddexp(lse_a, lse_b)\n"
        "    share = torch.sigmoid(lse_b - lse_a)[:, None]\n    return torch.lerp(output_a, output_b, share), lse",
    ],
    18: [TILES, TILES.replace("np.full(len(q), -np.inf)", "torch.full((len(q),), -torch.inf)")
         .replace("np.zeros((len(q), v.shape[1]))", "torch.zeros(len(q), v.shape[1])")
         .replace("np.sqrt(q.shape[1])", "q.shape[1] ** 0.5")
         .replace("scores.max(1)", "scores.amax(1)").replace("np.", "torch.")],
    19: [SOFTMAX + DECODE,
         "def decode_step(q, k, v, keys, values):\n"
         "    keys, values = torch.cat([keys, k[:, None]], 1), torch.cat([values, v[:, None]], 1)\n"
         "    y = torch.nn.functional.scaled_dot_product_attention(q[:, None], keys, values)\n"
         "    return y[:, 0], keys, values"],
    20: [
        SOFTMAX + "def grouped_attention(q, k, v):\n"
        "    group = len(q) // len(k)\n"
        "    rows = []\n"
        "    for h, one in enumerate(q):\n"
        "        rows.append(softmax(one @ k[h // group].T / np.sqrt(q.shape[-1])) @ v[h // group])\n"
        "    return np.stack(rows)",
        "def grouped_attention(q, k, v):\n    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))\n"
        "    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v",
    ],
    21: [
        "def window_mask(n, back):\n    i = np.arange(n)\n    return (i[:, None] >= i) & (i[:, None] - i <= back)",
        "def window_mask(n, back):\n    return torch.ones(n, n).tril().triu(-back)",
    ],
    22: [
        LINEAR,
        "def linear_attention(q, k, v):\n    a, b = (torch.nn.functional.elu(x) + 1 for x in (q, k))\n"
        "    held = torch.cumsum(b[:, :, None] * v[:, None], 0)\n"
        "    return torch.einsum('nd,nde->ne', a, held) / (a * b.cumsum(0)).sum(-1, keepdim=True)",
        "def linear_attention(q, k, v):\n    a, b = (jnp.where(x > 0, x + 1, jnp.exp(x)) for x in (q, k))\n"
        "    held = jnp.cumsum(b[:, :, None] * v[:, None], 0)\n"
        "    return jnp.einsum('nd,nde->ne', a, held) / (a * jnp.cumsum(b, 0)).sum(-1, keepdims=True)",
    ],
    23: [SOFTMAX + BACKWARD,
         BACKWARD.replace("softmax(q @ k.T * scale)", "torch.softmax(q @ k.T * scale, -1)")
         .replace("keepdims", "keepdim")],
    24: [
        "def stationary(weights):\n"
        "    p = np.full(len(weights), 1 / len(weights))\n"
        "    for _ in range(500):\n"
        "        p = p @ weights\n"
        "    return p",
        "def stationary(weights):\n    values, vectors = np.linalg.eig(weights.T)\n"
        "    p = vectors[:, np.argmin(abs(values - 1))].real\n    return p / p.sum()",
        "def stationary(weights):\n    return torch.linalg.matrix_power(weights, 256)[0]",
    ],
    25: [
        SHUFFLED,
        "def permutation_test(weights, values):\n"
        "    n = weights.shape[1]\n"
        "    w = weights - weights.mean(1, keepdims=True)\n"
        "    x = values - values.mean(0)\n"
        "    return np.sqrt(((w @ x) ** 2).sum(1) + (w**2).sum(1) * (x**2).sum() / max(n - 1, 1)) * (n > 1)",
    ],
    30: [
        "def product_variance(sigma, d):\n"
        "    return d * sigma**4\n"
        "def factor(sigma, d):\n"
        "    return 1 / math.sqrt(product_variance(sigma, d))",
        "def product_variance(sigma, d):\n"
        "    return torch.tensor(sigma) ** 4 * d\n"
        "def factor(sigma, d):\n"
        "    return sigma**-2 * d**-0.5",
    ],
}  # fmt: skip

WRONG: dict[int, dict[str, str]] = {
    16: {
        "blocks-not-rescaled": "def online_softmax(stream):\n"
        "    largest, total = -math.inf, 0.0\n"
        "    for score in stream:\n"
        "        largest = max(largest, score)\n"
        "        total += math.exp(score - largest) if score > -math.inf else 0\n"
        "    return largest, total",
        "nan-for-hidden-scores": "def online_softmax(stream):\n"
        "    largest, total = -math.inf, 0.0\n"
        "    for score in stream:\n"
        "        risen = max(largest, score)\n"
        "        total = total * math.exp(largest - risen) + math.exp(score - risen)\n"
        "        largest = risen\n    return largest, total",
        "no-maximum-subtracted": "def online_softmax(stream):\n"
        "    largest, total = -math.inf, 0.0\n"
        "    for score in stream:\n"
        "        largest = max(largest, score)\n        total += math.exp(score)\n    return largest, total",
        "maximum-starts-at-zero": ONLINE.replace('float("-inf"), 0.0', "0.0, 0.0"),
        "raises": "def online_softmax(stream):\n"
        "    largest = max(stream)\n"
        "    return largest, sum(math.exp(s - largest) for s in stream[:])",
    },
    17: {
        "parts-averaged": "def merge_parts(output_a, lse_a, output_b, lse_b):\n"
        "    return (output_a + output_b) / 2, np.logaddexp(lse_a, lse_b)",
        "no-maximum-subtracted": "def merge_parts(output_a, lse_a, output_b, lse_b):\n"
        "    a, b = np.exp(lse_a), np.exp(lse_b)\n"
        "    return (a[:, None] * output_a + b[:, None] * output_b) / (a + b)[:, None], np.log(a + b)",
        "log-sum-exp-merged-wrongly": "def merge_parts(output_a, lse_a, output_b, lse_b):\n"
        "    lse = np.logaddexp(lse_a, lse_b)\n"
        "    return np.exp(lse_a - lse)[:, None] * output_a + np.exp(lse_b - lse)[:, None] * output_b, lse_a + lse_b",
        "wrong-count": "def merge_parts(output_a, lse_a, output_b, lse_b):\n    return output_a",
    },
    18: {
        "matrix-built": SOFTMAX + "def attention_by_tiles(q, k, v, tile):\n"
        "    return softmax(q @ k.T / np.sqrt(q.shape[1])) @ v",
        "blocks-not-rescaled": TILES.replace("total * shrink", "total").replace("output * shrink[:, None]", "output"),
        "tail-lost": TILES.replace("range(0, len(k), tile)", "range(0, len(k) // tile * tile, tile)") + "\n",
        "maximum-starts-at-zero": TILES.replace("-np.inf", "0.0"),
    },
    19: {
        "new-token-unseen": SOFTMAX + "def decode_step(q, k, v, keys, values):\n"
        "    weights = softmax((keys @ q[:, :, None])[:, :, 0] / np.sqrt(q.shape[-1]))\n"
        "    grown = [np.concatenate([a, b[:, None]], axis=1) for a, b in ((keys, k), (values, v))]\n"
        "    return ((weights[:, None] @ values)[:, 0], *grown)",
        "cache-not-grown": SOFTMAX + DECODE.replace("keys = np", "all_keys = np")
        .replace("values = np", "all_values = np")
        .replace("(keys @", "(all_keys @").replace("@ values)", "@ all_values)"),
        "no-scale": SOFTMAX + DECODE.replace(" / np.sqrt(q.shape[-1])", ""),
        "no-maximum-subtracted": SOFTMAX.replace(" - x.max(-1, keepdims=True)", "") + DECODE,
        "cache-grown-at-the-front": SOFTMAX + DECODE.replace("[keys, k[:, None]]", "[k[:, None], keys]").replace(
            "[values, v[:, None]]", "[v[:, None], values]"),
    },
    20: {
        "groups-in-the-wrong-order": "def grouped_attention(q, k, v):\n"
        "    k, v = (x.repeat(len(q) // len(k), 1, 1) for x in (k, v))\n"
        "    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v",
        "one-key-head-for-all": "def grouped_attention(q, k, v):\n"
        "    return torch.softmax(q @ k[0].T * q.shape[-1] ** -0.5, -1) @ v[0]",
        "no-maximum-subtracted": "def grouped_attention(q, k, v):\n"
        "    k, v = (np.repeat(x, len(q) // len(k), 0) for x in (k, v))\n"
        "    w = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))\n    return w / w.sum(-1, keepdims=True) @ v",
        "no-scale": SOFTMAX + "def grouped_attention(q, k, v):\n"
        "    k, v = (np.repeat(x, len(q) // len(k), 0) for x in (k, v))\n"
        "    return softmax(q @ k.swapaxes(1, 2)) @ v",
    },
    21: {
        "window-off-by-one": "def window_mask(n, back):\n"
        "    i = np.arange(n)\n"
        "    return (i[:, None] >= i) & (i[:, None] - i < back)",
        "window-on-both-sides": "def window_mask(n, back):\n"
        "    i = np.arange(n)\n"
        "    return abs(i[:, None] - i) <= back",
        "window-ignored": "def window_mask(n, back):\n    return np.tri(n)",
        "window-ahead": "def window_mask(n, back):\n    return torch.ones(n, n).triu().tril(back)",
    },
    22: {
        "no-denominator": LINEAR.replace(" / (a @ total)", ""),
        "causal-excludes-itself": "def linear_attention(q, k, v):\n"
        "    a, b = (torch.nn.functional.elu(x) + 1 for x in (q, k))\n"
        "    w = (a @ b.T).tril(-1)\n    return w @ v / w.sum(-1, keepdim=True)",
        "another-feature-map": LINEAR.replace("np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))", "np.maximum(x, 0)"),
        "matrix-built": "def linear_attention(q, k, v):\n    a, b = (torch.nn.functional.elu(x) + 1 for x in (q, k))\n"
        "    w = (a @ b.T).tril()\n    return w @ v / w.sum(-1, keepdim=True)",
        "causal-ignored": LINEAR.replace("[]\n", "[]\n"
        "    for b, c in zip(phi(k), v):\n"
        "        held, total = held + np.outer(b, c), total + b\n")
        .replace("        held, total = held + np.outer(b, c), total + b\n        rows", "        rows"),
    },
    23: {
        "softmax-treated-as-one-number": SOFTMAX
        + BACKWARD.replace(" - (weights * d_weights).sum(-1, keepdims=True)", ""),
        "scale-forgotten": SOFTMAX + BACKWARD.replace("keepdims=True)) * scale", "keepdims=True))"),
        "mean-over-queries": SOFTMAX + BACKWARD.replace("d_weights).sum(-1", "d_weights).sum(0"),
        "gradients-swapped": SOFTMAX + BACKWARD.replace("d_scores @ k, d_scores.T @ q", "d_scores.T @ q, d_scores @ k"),
        "wrong-shape": SOFTMAX + BACKWARD.replace("weights.T @ d_out", "d_out"),
        "no-maximum-subtracted": BACKWARD.replace("softmax(q @ k.T * scale)", "np.exp(q @ k.T * scale)").replace(
            "    d_weights = ", "    weights = weights / weights.sum(-1, keepdims=True)\n    d_weights = "
        ),
    },
    24: {
        "the-other-side": "def stationary(weights):\n"
        "    p = np.full(len(weights), 1 / len(weights))\n"
        "    for _ in range(500):\n"
        "        p = weights @ p\n    return p",
        "not-settled": "def stationary(weights):\n    return weights.mean(0)",
        "not-a-distribution": "def stationary(weights):\n    values, vectors = np.linalg.eig(weights.T)\n"
        "    return abs(vectors[:, np.argmin(abs(values - 1))].real)",
        "complex-numbers": "def stationary(weights):\n    values, vectors = np.linalg.eig(weights.T.astype(complex))\n"
        "    p = vectors[:, np.argmin(abs(values - 1))]\n    return p / p.sum()",
    },
    25: {
        "mean-of-distances": SHUFFLED.replace("np.sqrt(np.mean(squares, axis=0))", "np.mean(np.sqrt(squares), axis=0)"),
        "root-forgotten": SHUFFLED.replace("np.sqrt(np.mean(squares, axis=0))", "np.mean(squares, axis=0)"),
        "equal-weights": "def permutation_test(weights, values):\n"
        "    return np.linalg.norm(weights @ values - values.mean(0), axis=-1)",
        "own-order-left-out": SHUFFLED.replace("np.mean(squares,", "np.mean(squares[1:] or squares,"),
    },
    30: {
        "another-power-of-sigma": "def product_variance(sigma, d):\n"
        "    return d * sigma**2\n"
        "def factor(sigma, d):\n"
        "    return 1",
        "variance-or-deviation": "def product_variance(sigma, d):\n"
        "    return d * sigma**4\n"
        "def factor(sigma, d):\n"
        "    return 1 / product_variance(sigma, d)",
        "another-power-of-d": "def product_variance(sigma, d):\n"
        "    return (d * sigma**2) ** 2\n"
        "def factor(sigma, d):\n"
        "    return 1",
    },
}  # fmt: skip

# What is typed: right in two ways of writing it, and wrong by the name of the mistake
TYPED_RIGHT: dict[int, list[str]] = {
    1: ["0.2447 0.09 0.6652", "0.24,0.09,0.67"],
    6: ["1 1 0.25 0.25 0.5 no", "1.0 1 1/4 25% .5 No"],
    15: ["67108864 1073741824 4", "67.1M 1.07G 4"],
    26: ["0.1519 0.2505 0.2505 0.1519 0.1951", "0.15 0.25 0.25 0.15 0.20"],
    27: ["0.0546 0.4036 0.1485 0.1485 0.2448 cat", "0.05,0.40,0.15,0.15,0.24 Cat"],
    28: ["no The mat", "No the mat"],
    29: ["0.3547 0.2151", "0.35 0.22"],
}
TYPED_WRONG: dict[int, dict[str, str]] = {
    1: {
        "no-scale": "0.117 0.016 0.867", "no-softmax": "1 0 2", "another-order": "0.6652 0.09 0.2447",
        "normalised-by-sum": "1/3 0 2/3", "too-few-decimals": "0.2 0.1 0.7", "unknown": "0.5 0.3 0.2",
    },
    6: {
        "outside-the-values": "1 1 0.25 0.25 0.5 yes", "values-not-weighted": "4 4 0.25 0.25 0.5 no",
        "another-order": "1 1 0.25 0.5 0.25 no", "numbers-off": "1 1 0.2 0.3 0.5 no",
    },
    15: {
        "grows-linearly": "67.1M 1.07G 2", "one-product-of-two": "67108864 536870912 4",
        "flops-in-place-of-multiply-adds": "134M 2.1G 4", "features-squared": "4.19M 67M 4",
    },
    26: {
        "no-scale": "0.11 0.299 0.299 0.11 0.181", "no-softmax": "1 2 2 1 1.5",
        "another-row": "0.1095 0.2976 0.1805 0.1805 0.2318", "numbers-off": "0.15 0.25 0.30 0.10 0.20",
    },
    27: {
        "scaled-all-the-same": "0.1095 0.2976 0.1805 0.1805 0.2318 cat",
        "another-winner": "0.05 0.40 0.15 0.15 0.24 mat",
        "no-softmax": "0 2 1 1 1.5 cat",
    },
    28: {"diagonal-taken-for-largest": "yes The mat", "another-token": "no cat mat", "unknown": "perhaps cat sat"},
    29: {"no-scale": "0.4754 0.1749", "all-alike": "1 0", "rest-not-shared": "0.3547 0.6453"},
}  # fmt: skip
