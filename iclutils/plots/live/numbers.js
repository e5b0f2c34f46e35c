// Linear self-attention (iclutils/models/lsa.py), and the algorithms that networks are compared
// with: ridge, least squares, a step of gradient descent. Shapes in comments, rows first.
const Lsa = (() => {
  // The error function, to 1.2e-7 (Numerical Recipes, 6.2: a Chebyshev fit of erfc)
  const FIT = [-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398,
    1.48851587, -0.82215223, 0.17087277];
  function erf(u) {
    const t = 1 / (1 + Math.abs(u) / 2);
    const rest = t * Math.exp(-u * u + FIT.reduceRight((sum, c) => sum * t + c, 0));
    return u < 0 ? rest - 1 : 1 - rest;
  }
  const gelu = (u) => 0.5 * u * (1 + erf(u / Math.SQRT2));

  // a (n, k) times b (k, m)
  function times(a, b, k, m) {
    const n = a.length / k, out = new Float64Array(n * m);
    for (let i = 0; i < n; i++)
      for (let c = 0; c < k; c++)
        for (let j = 0; j < m; j++) out[i * m + j] += a[i * k + c] * b[c * m + j];
    return out;
  }

  // The tokens (pos, channel) after every layer: xs (n, dim), the query last; ys (n - 1).
  // Weights are (layer, head, channel, channel); an MLP, where there is one, comes before attention.
  function stream({ config: { dim, layers, heads, kinds, hidden, width }, tensors }, xs, ys) {
    const pos = xs.length / dim, read = dim + 1, c = width || read, keys = pos - 1;
    let tokens = new Float64Array(pos * read);
    for (let i = 0; i < pos; i++) {
      tokens.set(xs.subarray(i * dim, (i + 1) * dim), i * read);
      tokens[i * read + dim] = i < keys ? ys[i] : 0;
    }
    if (width) tokens = times(tokens, tensors["others.read_in"].data, read, c);
    const found = [tokens];
    for (let layer = 0; layer < layers; layer++) {
      const of = (name, size) => tensors[name].data.subarray(layer * size, (layer + 1) * size);
      tokens = tokens.slice();
      if (hidden) {
        const bias = of("others.bias", hidden);
        const up = times(tokens, of("others.up", c * hidden), c, hidden);
        const bent = up.map((value, i) => gelu(value + bias[i % hidden]));
        times(bent, of("others.down", hidden * c), hidden, c).forEach((v, i) => (tokens[i] += v));
      }
      const written = new Float64Array(pos * c);
      for (let head = 0; head < heads; head++) {
        const [q, k, v, out] = ["query", "key", "value", "out"].map((name) =>
          of(`attention.${name}`, heads * c * c).subarray(head * c * c, (head + 1) * c * c));
        const query = times(tokens, q, c, c), key = times(tokens, k, c, c);
        const value = times(tokens, v, c, c), mixed = new Float64Array(pos * c);
        for (let i = 0; i < pos; i++) {
          const weights = new Float64Array(keys); // of the pairs: the query is no key
          for (let j = 0; j < keys; j++)
            for (let n = 0; n < c; n++) weights[j] += query[i * c + n] * key[j * c + n];
          if (kinds[layer] === "softmax") {
            const scaled = weights.map((w) => w / Math.sqrt(c)), top = Math.max(...scaled);
            const whole = scaled.reduce((sum, w) => sum + Math.exp(w - top), 0);
            scaled.forEach((w, j) => (weights[j] = Math.exp(w - top) / whole));
          }
          for (let j = 0; j < keys; j++)
            for (let n = 0; n < c; n++) mixed[i * c + n] += weights[j] * value[j * c + n];
        }
        times(mixed, out, c, c).forEach((added, i) => (written[i] += added));
      }
      written.forEach((added, i) => (tokens[i] += added));
      found.push(tokens);
    }
    return found;
  }

  // The answer to the query: minus the last channel of its token, or a linear map of it
  function answer(net, xs, ys) {
    const { dim, width } = net.config, tokens = stream(net, xs, ys).pop();
    if (!width) return -tokens[tokens.length - 1];
    const last = tokens.subarray(tokens.length - width), out = net.tensors["others.read_out"].data;
    return last.reduce((sum, value, i) => sum + value * out[i], 0);
  }

  // The matrix A of a linear layer that answers x_q A (1/n) sum_i x_i y_i, as far as it does:
  // what queries and keys compare times what label and output pass on, (dim, dim).
  function stepMatrix({ config: { dim }, tensors }, n) {
    const c = dim + 1, [q, k, v, out] = ["query", "key", "value", "out"].map((name) =>
      tensors[`attention.${name}`].data);
    let passed = 0; // from a label to the answer, which has the opposite sign
    for (let j = 0; j < c; j++) passed -= v[dim * c + j] * out[j * c + dim];
    const matrix = new Float64Array(dim * dim);
    for (let a = 0; a < dim; a++)
      for (let b = 0; b < dim; b++)
        for (let j = 0; j < c; j++) matrix[a * dim + b] += n * passed * q[a * c + j] * k[b * c + j];
    return matrix;
  }

  return { stream, answer, stepMatrix };
})();

// Each gives the weights w (dim) of a linear model: xs (n, dim), ys (n).
const Algorithms = {
  // X'y and X'X
  moments(xs, ys) {
    const n = ys.length, dim = xs.length / n, xy = new Float64Array(dim);
    const xx = Array.from({ length: dim }, () => new Float64Array(dim));
    for (let i = 0; i < n; i++)
      for (let a = 0; a < dim; a++) {
        xy[a] += xs[i * dim + a] * ys[i];
        for (let b = 0; b < dim; b++) xx[a][b] += xs[i * dim + a] * xs[i * dim + b];
      }
    return { xy, xx };
  },

  // (X'X + penalty I)^-1 X'y, by elimination with pivots
  ridge(xs, ys, penalty) {
    const { xy, xx } = Algorithms.moments(xs, ys), dim = xy.length;
    const rows = xx.map((row, a) => [...row.map((v, b) => v + (a === b ? penalty : 0)), xy[a]]);
    for (let a = 0; a < dim; a++) {
      const best = rows.slice(a).reduce((top, row, i) => (Math.abs(row[a]) > Math.abs(rows[top][a]) ? a + i : top), a);
      [rows[a], rows[best]] = [rows[best], rows[a]];
      for (let b = 0; b < dim; b++) {
        if (b === a) continue;
        const share = rows[b][a] / rows[a][a];
        rows[b] = rows[b].map((value, j) => value - share * rows[a][j]);
      }
    }
    return Float64Array.from(rows, (row, a) => row[dim] / row[a]);
  },

  // Least squares in the plane, the shortest w of those that fit: along the axes of X'X, leaving
  // out those in which nothing varies
  ols(xs, ys) {
    const { xy, xx: [[a, b], [, c]] } = Algorithms.moments(xs, ys);
    const middle = (a + c) / 2, spread = Math.hypot((a - c) / 2, b), angle = Math.atan2(2 * b, a - c) / 2;
    const w = new Float64Array(2);
    for (const [value, turn] of [[middle + spread, angle], [middle - spread, angle + Math.PI / 2]]) {
      if (value <= 1e-10 * (middle + spread)) continue;
      const axis = [Math.cos(turn), Math.sin(turn)];
      const part = (axis[0] * xy[0] + axis[1] * xy[1]) / value;
      axis.forEach((v, i) => (w[i] += part * v));
    }
    return w;
  },

  // One step from 0 on the mean of half the squared errors: (rate / n) X'y
  step: (xs, ys, rate) => Algorithms.moments(xs, ys).xy.map((v) => (rate / ys.length) * v),
};

// Softmax attention of one query, example by example.
const Softmax = {
  // query (dim); keys, values (n, dim), the last those of the query's own token and the others
  // demonstrations -> attention `weights` (n), and the `answers` to the query after none, one, two ..
  // of the demonstrations (n, dim), the last attention's output; scores are sharp k·q.
  steps(query, keys, values, sharp) {
    const dim = query.length, n = keys.length / dim, whole = keys.length;
    const at = (list, i) => list.subarray(i * dim, (i + 1) * dim);
    const score = (a, b) => sharp * a.reduce((sum, v, i) => sum + v * b[i], 0);
    const scores = Array.from({ length: n }, (_, j) => score(query, at(keys, j)));
    const top = Math.max(...scores), total = scores.reduce((sum, s) => sum + Math.exp(s - top), 0);
    const weights = scores.map((s) => Math.exp(s - top) / total);
    const answers = new Float64Array(whole);
    for (let c = 0; c < dim; c++) {
      answers[c] = weights[n - 1] * values[whole - dim + c];
      for (let j = 0; j < n - 1; j++) {
        answers[(j + 1) * dim + c] = answers[j * dim + c] + weights[j] * values[j * dim + c];
      }
    }
    return { weights, answers };
  },
};
