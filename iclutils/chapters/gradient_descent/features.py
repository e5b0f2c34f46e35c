"""Features: softmax attention as a linear model in the space of a feature map.

Softmax attention weighs a key k by exp(k·q / √d). That is an inner product φ(k)·φ(q) of features,
so the output (1/D_q) Σ v_i φ(k_i)·φ(q), with D_q = Σ φ(k_i)·φ(q), is linear in φ(q). Three forms:

- exact, by the matrix of exp(k·q / √d) alone: no features needed (``scores``, ``attention``);
- ``taylor``: all monomials up to a degree, the inner product is the truncated exponential series;
- ``positive_random``: the random features of {cite}`choromanski2021`, right on average.

The features are those of exp(a·b): give them tokens that were ``scaled`` by d^(-1/4).

Shapes: queries (*batch, query, channel), keys (*batch, key, channel), values (*batch, key, value).
``allowed`` (…, query, key) tells which keys a query may look at; all, if omitted. An ``IclError``
is raised by all functions that take them if shapes do not fit, a number is not finite, or a query
has no key at all.

Example:
    >>> import torch
    >>> from iclutils.chapters.gradient_descent import features
    >>> generator = torch.Generator().manual_seed(0)
    >>> keys, values = torch.randn(2, 5, 4, generator=generator).double()
    >>> queries = torch.randn(3, 4, generator=generator).double()
    >>> softmax = ((queries @ keys.T) / 2).softmax(-1) @ values
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...errors import IclError

# Shapes with names of their own: a mismatch is refused with a cure.
Queries = Float[Tensor, "*query_batch query query_channel"]
Keys = Float[Tensor, "*key_batch key key_channel"]
Values = Float[Tensor, "*value_batch value_key value"]
Allowed = Bool[Tensor, "*allowed"]
MOST = 200_000  # Taylor features; beyond, they would not fit in memory for a context


def scaled(z: Float[Tensor, "*batch channel"]) -> Float[Tensor, "*batch channel"]:
    """z / d^(1/4), so that inner products of such are k·q / √d.

    Example:
        >>> features.scaled(torch.ones(16))[0]
        tensor(0.5000)
    """
    return z / z.shape[-1] ** 0.25


def scores(
    queries: Queries, keys: Keys, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query key"]:
    """k·q / √d, the logarithm of the kernel; -inf where a query may not look.

    Example:
        >>> torch.allclose(features.scores(queries, keys), queries @ keys.T / 2)
        True
    """
    if (
        queries.ndim < 2
        or queries.shape[:-2] != keys.shape[:-2]
        or (queries.shape[-1] != keys.shape[-1])
    ):
        raise IclError(
            "Need queries (*batch, query, channel) and keys (*batch, key, channel) of one batch "
            f"and width; got {tuple(queries.shape)} and {tuple(keys.shape)}."
        )
    if keys.shape[-2] == 0:
        raise IclError("There is no key at all: attention needs at least one.")
    found = queries @ keys.mT / math.sqrt(keys.shape[-1])
    if not bool(found.isfinite().all()):
        raise IclError(
            "Scores are NaN or infinite: queries and keys must be finite, and small enough for "
            f"their products to be numbers of {keys.dtype}."
        )
    if allowed is None:
        return found
    try:
        found = found.masked_fill(~allowed, -torch.inf)
    except RuntimeError as error:
        raise IclError(
            f"Need `allowed` of (…, query, key) that fits {tuple(found.shape)}; got "
            f"{tuple(allowed.shape)}."
        ) from error
    if not bool(allowed.any(-1).all()):
        raise IclError("A query has no key that it may look at: allow it one, or leave it out.")
    return found


def checked_values(keys: Tensor, values: Tensor) -> Tensor:
    """The values, if there is a finite one for each key."""
    if values.shape[:-1] != keys.shape[:-1]:
        raise IclError(
            f"Need one value for each key; got values {tuple(values.shape)} and keys "
            f"{tuple(keys.shape)}."
        )
    if not bool(values.isfinite().all()):
        raise IclError("Values are NaN or infinite: leave those keys out.")
    return values


def attention(
    queries: Queries, keys: Keys, values: Values, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query value"]:
    """Softmax attention, exact: Σ_i v_i exp(k_i·q/√d) / D_q, its exponents shifted by log D_q.

    Example:
        >>> torch.allclose(features.attention(queries, keys, values), softmax)
        True
    """
    return scores(queries, keys, allowed).softmax(-1) @ checked_values(keys, values)


def log_normaliser(
    queries: Queries, keys: Keys, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query"]:
    """log D_q = log Σ_i exp(k_i·q/√d). It is different for every query."""
    return scores(queries, keys, allowed).logsumexp(-1)


def gaussian_attention(
    queries: Queries, keys: Keys, values: Values, allowed: Allowed | None = None
) -> Float[Tensor, "*batch query value"]:
    """Attention by the Gaussian kernel exp(-|k - q|² / 2) of scaled tokens.

    The kernel is exp(k·q) exp(-|k|²/2) exp(-|q|²/2). The query's norm cancels in the quotient, the
    keys' norms do not: it is softmax attention if and only if all keys have one norm.
    """
    norms = scaled(keys).square().sum(-1)[..., None, :]
    weights = (scores(queries, keys, allowed) - norms / 2).softmax(-1)
    return weights @ checked_values(keys, values)


def taylor(z: Float[Tensor, "*batch channel"], degree: int) -> Float[Tensor, "*batch feature"]:
    """All monomials of z up to a degree, Π_c z_c^{a_c} / √a_c!: (degree + d choose d) of them.

    The inner product of taylor(a) and taylor(b) is Σ_{r ≤ degree} (a·b)^r / r!, by the multinomial
    theorem. How high the degree must be: ``needed_degree``.

    Example:
        >>> z = torch.tensor([1.0], dtype=torch.float64)
        >>> (features.taylor(z, 2) ** 2).sum()
        tensor(2.5000, dtype=torch.float64)
    """
    dim = z.shape[-1]
    if degree < 0:
        raise IclError(f"The degree of a Taylor series is at least 0; got {degree}.")
    count = math.comb(degree + dim, dim)
    if count > MOST:
        raise IclError(
            f"Degree {degree} in {dim} dimensions makes {count} features, more than {MOST}: take "
            "a lower degree, fewer dimensions, or the kernel form, which needs no features."
        )
    factorials = [math.sqrt(math.factorial(r)) for r in range(degree + 1)]
    orders = torch.arange(degree + 1, device=z.device)
    powers = z[..., None] ** orders / torch.tensor(factorials, dtype=z.dtype, device=z.device)
    found = torch.ones_like(z[..., :1])
    used = orders[:1]  # the degree of each feature so far
    for channel in range(dim):
        total = used[:, None] + orders
        old, order = (total <= degree).nonzero(as_tuple=True)
        found = found[..., old] * powers[..., channel, order]
        used = total[old, order]
    return found


def needed_degree(largest: float, tolerance: float = 1e-12) -> int:
    """The degree from which the truncated series of exp(x) is right to a relative tolerance.

    For all |x| ≤ ``largest``, here k·q/√d. The remainder is at most |x|^(R+1)/(R+1)! · max(1, e^x),
    and is compared with e^x: negative scores are the hard ones.

    Example:
        >>> features.needed_degree(1.0), features.needed_degree(10.0)
        (15, 52)
    """
    if not (0 <= largest < math.inf and tolerance > 0):
        raise IclError(f"Need a finite largest score and a tolerance; got {largest}, {tolerance}.")
    if largest == 0:
        return 0
    for degree in range(1001):
        exponent = (degree + 1) * math.log(largest) - math.lgamma(degree + 2) + largest
        if exponent <= math.log(tolerance):
            return degree
    raise IclError(f"No degree up to 1000 serves scores up to {largest}: use the kernel form.")


def directions(
    count: int,
    dim: int,
    generator: torch.Generator,
    orthogonal: bool = False,
    *,
    draws: int | None = None,
    signed: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "*draw feature channel"]:
    """Directions ω for ``positive_random``, each N(0, I), on the device of the generator.

    ``orthogonal``: blocks of d rows at right angles, from a QR decomposition of normal matrices,
    with lengths of independent normal vectors. The columns of Q must be multiplied by the signs
    of R's diagonal, or they are not uniform: Householder's method leaves the first entry of Q
    negative, always. ``signed=False`` shows that mistake, with which the error has a floor.

    Args:
        count: features.
        dim: d, channels.
        generator: of the draws.
        orthogonal: see above.
        draws: how many independent sets, on a leading axis; one without that axis if omitted.
        signed: see above.
        dtype: of the numbers.

    Example:
        >>> omega = features.directions(4, 4, generator, orthogonal=True)
        >>> (omega @ omega.T).round(decimals=6).count_nonzero()
        tensor(4)
    """
    if min(count, dim, 1 if draws is None else draws) < 1:
        raise IclError(f"Need sizes of at least 1; got count={count}, dim={dim}, draws={draws}.")
    if not (signed or orthogonal):
        raise IclError("Only orthogonal directions come from a QR: set orthogonal=True, too.")
    lead = () if draws is None else (draws,)

    def normals(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device, dtype=dtype)

    normal = normals(*lead, count, dim)
    if not orthogonal:
        return normal
    turned, upper = torch.linalg.qr(normals(*lead, math.ceil(count / dim), dim, dim))
    if signed:
        turned = turned * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
    rows = turned.reshape(*lead, -1, dim)[..., :count, :]
    return rows * normal.norm(dim=-1, keepdim=True)


def positive_random(
    z: Float[Tensor, "*batch channel"], directions: Float[Tensor, "*draw feature across"]
) -> Float[Tensor, "*shape feature"]:
    """Logarithms of the positive random features, ω·z - |z|²/2 - log(m)/2: (*draw, *batch, m).

    The mean of φ(a)·φ(b) over ω ~ N(0, I) is exp(a·b) ({cite}`choromanski2021`, lemma 1). As
    logarithms they cannot overflow.
    """
    if directions.shape[-1] != z.shape[-1]:
        raise IclError(
            f"Directions of {directions.shape[-1]} channels do not fit tokens of {z.shape[-1]}."
        )
    flat = z.reshape(-1, z.shape[-1])
    along = flat @ directions.mT - flat.square().sum(-1, keepdim=True) / 2
    found = along - math.log(directions.shape[-2]) / 2
    return found.reshape(*directions.shape[:-2], *z.shape[:-1], directions.shape[-2])


def log_kernel(
    queries: Float[Tensor, "*batch query feature"], keys: Float[Tensor, "*batch key feature"]
) -> Float[Tensor, "*batch query key"]:
    """log φ(q)·φ(k) from the logarithms of positive features.

    A product of matrices, each token's largest feature put to 1. Where no feature is large for
    both, and that product is lost below the smallest numbers, the slow sum of exponentials.
    """
    top_query, top_key = queries.amax(-1, keepdim=True), keys.amax(-1, keepdim=True)
    found = (queries - top_query).exp() @ (keys - top_key).exp().mT
    limits = torch.finfo(found.dtype)
    if bool((found > limits.tiny / limits.eps).all()):
        return found.log() + top_query + top_key.mT
    parts = [
        (query[..., :, None, :] + key[..., None, :, :]).logsumexp(-1)
        for query, key in zip(queries.split(1024, -1), keys.split(1024, -1), strict=True)
    ]
    return torch.stack(parts).logsumexp(0)


def feature_attention(
    queries: Float[Tensor, "*batch query feature"],
    keys: Float[Tensor, "*batch key feature"],
    values: Float[Tensor, "*#batch key value"],
    *,
    logarithms: bool = False,
    normaliser: Float[Tensor, "*#batch query"] | None = None,
) -> Float[Tensor, "*batch query value"]:
    """Σ_i v_i φ(k_i)·φ(q) / D_q: attention as a linear model of features.

    Args:
        queries: features of queries.
        keys: features of keys.
        values: to be mixed.
        logarithms: the features are given by their logarithms (``positive_random``).
        normaliser: log D_q, if exact (``log_normaliser``); from the features if omitted.

    Example:
        >>> q, k = (features.taylor(features.scaled(z), 24) for z in (queries, keys))
        >>> torch.allclose(features.feature_attention(q, k, values), softmax)
        True
    """
    if logarithms:
        exponent = log_kernel(queries, keys)
        total = exponent.logsumexp(-1) if normaliser is None else normaliser
        return (exponent - total[..., None]).exp() @ values
    weights = queries @ keys.mT
    if normaliser is None:
        return weights @ values / weights.sum(-1, keepdim=True)
    return (weights @ values) * (-normaliser[..., None]).exp()
