"""Solutions of the exercises 2 to 14 that write functions: right ones, and wrong ones by the name of their mistake."""

from __future__ import annotations

SOFTMAX = """
def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)
"""

RIGHT: dict[int, list[str]] = {
    2: [
        "def scores(q, k):\n    return q @ k.swapaxes(-1, -2)",
        "def scores(q, k):\n    return [[sum(a * b for a, b in zip(one, two)) for two in k] for one in q]",
        "def scores(q, k):\n    return torch.einsum('id,jd->ij', q, k)",
        "def scores(q, k):\n    return jnp.einsum('id,jd->ij', q, k)",
    ],
    3: [
        "def scaled_scores(q, k):\n    return np.einsum('id,jd->ij', q, k) * q.shape[1] ** -0.5",
        "def scaled_scores(q, k):\n    return torch.matmul(q, k.T) / k.size(-1) ** 0.5",
    ],
    4: [
        SOFTMAX,
        "def softmax(x):\n    return torch.softmax(x, dim=-1)",
        "def softmax(x):\n    x = x - x.max(-1, keepdims=True)\n"
        "    return np.exp(x - np.log(np.exp(x).sum(-1, keepdims=True)))",
    ],
    5: [
        SOFTMAX + "def attention(q, k, v):\n"
        "    w = softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)\n"
        "    return w @ v, w",
        "def attention(q, k, v):\n    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v",
    ],
    7: [
        "def causal_mask(n):\n    return np.tril(np.ones((n, n), dtype=bool))",
        "def causal_mask(n):\n    return [[1 if j <= i else 0 for j in range(n)] for i in range(n)]",
        "def causal_mask(n):\n    return torch.ones(n, n).tril()",
    ],
    8: [
        "def padding_mask(lengths, n):\n    return np.arange(n)[None, :] < lengths[:, None]",
        "def padding_mask(lengths, n):\n    return (torch.arange(n)[None] < lengths[:, None])[:, None, None]",
    ],
    9: [
        SOFTMAX + "def cross_attention(x, memory, w_q, w_k, w_v):\n    q, k, v = x @ w_q, memory @ w_k, memory @ w_v\n"
        "    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v",
        "def cross_attention(x, memory, w_q, w_k, w_v):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(x @ w_q, memory @ w_k, memory @ w_v)",
    ],
    10: [
        "def split_heads(x, heads):\n    return x.reshape(len(x), heads, -1).swapaxes(0, 1)\n"
        "def merge_heads(y):\n    return y.swapaxes(0, 1).reshape(y.shape[1], -1)",
        "def split_heads(x, heads):\n    return torch.stack(x.chunk(heads, -1))\n"
        "def merge_heads(y):\n    return torch.cat(list(y), -1)",
    ],
    11: [
        SOFTMAX + "def multi_head(x, w_q, w_k, w_v, w_o, heads):\n"
        "    q, k, v = (np.stack(np.split(x @ w, heads, -1)) for w in (w_q, w_k, w_v))\n"
        "    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])\n"
        "    seen = np.arange(len(x))[:, None] >= np.arange(len(x))\n"
        "    return np.concatenate(list(softmax(np.where(seen, scores, -np.inf)) @ v), -1) @ w_o",
        "def multi_head(x, w_q, w_k, w_v, w_o, heads):\n"
        "    q, k, v = ((x @ w).view(len(x), heads, -1).transpose(0, 1) for w in (w_q, w_k, w_v))\n"
        "    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "    return y.transpose(0, 1).reshape(len(x), -1) @ w_o",
    ],
    12: [
        "def sinusoidal(n, d):\n"
        "    table = np.zeros((n, d))\n"
        "    angles = np.arange(n)[:, None] / 10000 ** (np.arange(0, d, 2) / d)\n"
        "    table[:, 0::2], table[:, 1::2] = np.sin(angles), np.cos(angles)\n    return table",
        "def sinusoidal(n, d):\n    angles = torch.outer(torch.arange(n), 10000 ** (-torch.arange(0, d, 2) / d))\n"
        "    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)",
    ],
    13: [
        "def rotate(x):\n"
        "    n, d = x.shape\n"
        "    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)\n"
        "    z = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)\n"
        "    return np.stack([z.real, z.imag], -1).reshape(n, d)",
        "def rotate(x):\n"
        "    n, d = x.shape\n"
        "    angles = torch.outer(torch.arange(n), 10000.0 ** (-torch.arange(0, d, 2) / d))\n"
        "    z = torch.view_as_complex(x.reshape(n, -1, 2)) * torch.polar(torch.ones_like(angles), angles)\n"
        "    return torch.view_as_real(z).flatten(1)",
    ],
    14: [
        "def alibi_bias(n, heads):\n    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)\n"
        "    i = np.arange(n)\n    return -slopes[:, None, None] * abs(i[:, None] - i)",
        "def alibi_bias(n, heads):\n    slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)])\n"
        "    i = torch.arange(n)\n    return torch.einsum('h,ij->hij', slopes, -(i - i[:, None]).abs())",
    ],
}  # fmt: skip

WRONG: dict[int, dict[str, str]] = {
    2: {
        "queries-and-keys-swapped": "def scores(q, k):\n    return k @ q.T",
        "scaled-already": "def scores(q, k):\n    return q @ k.T / np.sqrt(q.shape[-1])",
        "keys-not-transposed": "def scores(q, k):\n    return q @ k",
        "products-not-summed": "def scores(q, k):\n    return q[:, None, :] * k[None]",
        "cosine-in-place-of-product": "def scores(q, k):\n    q = q / np.linalg.norm(q, axis=-1, keepdims=True)\n"
        "    return q @ (k / np.linalg.norm(k, axis=-1, keepdims=True)).T",
    },
    3: {
        "no-scale": "def scaled_scores(q, k):\n    return q @ k.T",
        "scale-d": "def scaled_scores(q, k):\n    return q @ k.T / q.shape[-1]",
        "scale-keys": "def scaled_scores(q, k):\n    return q @ k.T / np.sqrt(len(k))",
        "scale-queries": "def scaled_scores(q, k):\n    return torch.matmul(q, k.T) / len(q) ** 0.5",
        "softmax-already": "def scaled_scores(q, k):\n    return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1)",
    },
    4: {
        "no-maximum-subtracted": "def softmax(x):\n    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)",
        "maximum-of-the-whole-matrix": "def softmax(x):\n"
        "    x = np.exp(x - x.max())\n"
        "    return x / x.sum(-1, keepdims=True)",
        "softmax-over-another-axis": "def softmax(x):\n    return torch.softmax(x, dim=0)",
        "no-denominator": "def softmax(x):\n    return np.exp(x - x.max(-1, keepdims=True))",
    },
    5: {
        "no-scale": SOFTMAX + "def attention(q, k, v):\n    return softmax(q @ k.T) @ v",
        "softmax-over-queries": "def attention(q, k, v):\n"
        "    return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, 0) @ v",
        "no-maximum-subtracted": "def attention(q, k, v):\n    w = np.exp(q @ k.T / np.sqrt(q.shape[-1]))\n"
        "    return w / w.sum(-1, keepdims=True) @ v",
        "keys-as-values": SOFTMAX + "def attention(q, k, v):\n    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ k",
    },
    7: {
        "mask-inverted": "def causal_mask(n):\n    return np.triu(np.ones((n, n)), 1)",
        "causal-excludes-itself": "def causal_mask(n):\n    return np.tril(np.ones((n, n)), -1)",
        "causal-sees-the-next": "def causal_mask(n):\n    return np.tri(n, k=1)",
        "causal-inverted": "def causal_mask(n):\n    return torch.ones(n, n).triu()",
        "causal-ignored": "def causal_mask(n):\n    return np.ones((n, n))",
        "mask-to-be-added": "def causal_mask(n):\n    return torch.full((n, n), float('-inf')).triu(1)",
    },
    8: {
        "lengths-off-by-one": "def padding_mask(lengths, n):\n    return np.arange(n) <= lengths[:, None]",
        "mask-inverted": "def padding_mask(lengths, n):\n    return torch.arange(n) >= lengths[:, None]",
        "mask-transposed": "def padding_mask(lengths, n):\n    return np.arange(n)[:, None] < lengths",
        "mask-of-the-first-row": "def padding_mask(lengths, n):\n"
        "    return np.tile(np.arange(n) < lengths[0], (len(lengths), 1))",
    },
    9: {
        "attends-to-itself": SOFTMAX + "def cross_attention(x, memory, w_q, w_k, w_v):\n"
        "    q, k, v = x @ w_q, x @ w_k, x @ w_v\n    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v",
        "scale-d-model": SOFTMAX + "def cross_attention(x, memory, w_q, w_k, w_v):\n"
        "    return softmax(x @ w_q @ (memory @ w_k).T / np.sqrt(x.shape[-1])) @ (memory @ w_v)",
        "no-scale": SOFTMAX + "def cross_attention(x, memory, w_q, w_k, w_v):\n"
        "    return softmax(x @ w_q @ (memory @ w_k).T) @ (memory @ w_v)",
        "no-maximum-subtracted": "def cross_attention(x, memory, w_q, w_k, w_v):\n"
        "    w = np.exp(x @ w_q @ (memory @ w_k).T / np.sqrt(w_q.shape[1]))\n"
        "    return w / w.sum(1, keepdims=True) @ (memory @ w_v)",
        "queries-from-the-memory": SOFTMAX + "def cross_attention(x, memory, w_q, w_k, w_v):\n"
        "    q, k, v = memory @ w_q, x @ w_k, x @ w_v\n    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v",
    },
    10: {
        "heads-split-without-transpose": "def split_heads(x, heads):\n    return x.reshape(heads, len(x), -1)\n"
        "def merge_heads(y):\n    return y.swapaxes(0, 1).reshape(y.shape[1], -1)",
        "heads-not-moved": "def split_heads(x, heads):\n    return x.reshape(len(x), heads, -1)\n"
        "def merge_heads(y):\n    return y.swapaxes(0, 1).reshape(y.shape[1], -1)",
        "heads-merged-without-transpose": "def split_heads(x, heads):\n"
        "    return x.reshape(len(x), heads, -1).swapaxes(0, 1)\n"
        "def merge_heads(y):\n    return y.reshape(y.shape[1], -1)",
        "heads-split-features-first": "def split_heads(x, heads):\n"
        "    return x.reshape(len(x), -1, heads).transpose(2, 0, 1)\n"
        "def merge_heads(y):\n    return y.swapaxes(0, 1).reshape(y.shape[1], -1)",
    },
    11: {
        "causal-ignored": "def multi_head(x, w_q, w_k, w_v, w_o, heads):\n"
        "    q, k, v = ((x @ w).view(len(x), heads, -1).transpose(0, 1) for w in (w_q, w_k, w_v))\n"
        "    y = torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"
        "    return y.transpose(0, 1).reshape(len(x), -1) @ w_o",
        "scale-d-model": SOFTMAX + "def multi_head(x, w_q, w_k, w_v, w_o, heads):\n"
        "    q, k, v = (np.stack(np.split(x @ w, heads, -1)) for w in (w_q, w_k, w_v))\n"
        "    scores = q @ k.swapaxes(-1, -2) / np.sqrt(x.shape[-1])\n"
        "    seen = np.tri(len(x), dtype=bool)\n"
        "    return np.concatenate(list(softmax(np.where(seen, scores, -np.inf)) @ v), -1) @ w_o",
        "output-projection-forgotten": "def multi_head(x, w_q, w_k, w_v, w_o, heads):\n"
        "    q, k, v = ((x @ w).view(len(x), heads, -1).transpose(0, 1) for w in (w_q, w_k, w_v))\n"
        "    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "    return y.transpose(0, 1).reshape(len(x), -1)",
        "heads-merged-without-transpose": "def multi_head(x, w_q, w_k, w_v, w_o, heads):\n"
        "    q, k, v = ((x @ w).view(len(x), heads, -1).transpose(0, 1) for w in (w_q, w_k, w_v))\n"
        "    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "    return y.reshape(len(x), -1) @ w_o",
        "mask-not-renormalised": SOFTMAX + "def multi_head(x, w_q, w_k, w_v, w_o, heads):\n"
        "    q, k, v = (np.stack(np.split(x @ w, heads, -1)) for w in (w_q, w_k, w_v))\n"
        "    weights = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) * np.tri(len(x))\n"
        "    return np.concatenate(list(weights @ v), -1) @ w_o",
    },
    12: {
        "sines-then-cosines": "def sinusoidal(n, d):\n"
        "    angles = np.arange(n)[:, None] / 10000 ** (np.arange(0, d, 2) / d)\n"
        "    return np.concatenate([np.sin(angles), np.cos(angles)], -1)",
        "positions-from-one": "def sinusoidal(n, d):\n"
        "    angles = np.arange(1, n + 1)[:, None] / 10000 ** (np.arange(0, d, 2) / d)\n"
        "    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(n, d)",
        "another-exponent": "def sinusoidal(n, d):\n"
        "    angles = np.arange(n)[:, None] / 10000 ** (np.arange(d // 2) / d)\n"
        "    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(n, d)",
        "an-angle-for-each-feature": "def sinusoidal(n, d):\n"
        "    angles = np.arange(n)[:, None] / 10000 ** (np.arange(d) / d)\n"
        "    angles[:, 0::2], angles[:, 1::2] = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])\n    return angles",
    },
    13: {
        "pairs-of-halves": "def rotate(x):\n"
        "    n, d = x.shape\n"
        "    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)\n"
        "    a, b, c, s = x[:, : d // 2], x[:, d // 2 :], np.cos(angles), np.sin(angles)\n"
        "    return np.concatenate([a * c - b * s, b * c + a * s], -1)",
        "turned-backwards": "def rotate(x):\n"
        "    n, d = x.shape\n"
        "    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)\n"
        "    a, b, c, s = x[:, 0::2], x[:, 1::2], np.cos(angles), np.sin(angles)\n"
        "    return np.stack([a * c + b * s, b * c - a * s], -1).reshape(n, d)",
        "one-sign-missing": "def rotate(x):\n"
        "    n, d = x.shape\n"
        "    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)\n"
        "    a, b, c, s = x[:, 0::2], x[:, 1::2], np.cos(angles), np.sin(angles)\n"
        "    return np.stack([a * c + b * s, b * c + a * s], -1).reshape(n, d)",
        "pairs-not-woven-back": "def rotate(x):\n"
        "    n, d = x.shape\n"
        "    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, d, 2) / d)\n"
        "    a, b, c, s = x[:, 0::2], x[:, 1::2], np.cos(angles), np.sin(angles)\n"
        "    return np.concatenate([a * c - b * s, b * c + a * s], -1)",
    },
    14: {
        "bias-positive": "def alibi_bias(n, heads):\n    i = np.arange(n)\n"
        "    return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)[:, None, None] * abs(i[:, None] - i)",
        "slopes-from-one": "def alibi_bias(n, heads):\n    i = np.arange(n)\n"
        "    return -(2.0 ** (-8 * np.arange(heads) / heads))[:, None, None] * abs(i[:, None] - i)",
        "distance-with-a-sign": "def alibi_bias(n, heads):\n    i = torch.arange(n)\n"
        "    return -(2.0 ** (-8 * torch.arange(1, heads + 1) / heads))[:, None, None] * (i[:, None] - i)",
        "slopes-of-eight-heads": "def alibi_bias(n, heads):\n    i = np.arange(n)\n"
        "    return -(0.5 ** np.arange(1, heads + 1))[:, None, None] * abs(i[:, None] - i)",
    },
}  # fmt: skip
