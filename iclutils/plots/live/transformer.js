// A pre-norm transformer, as GPT-2: its forward pass, with hooks. One file, two kinds of networks:
// `Gpt2` reads tokens, `Regressor` reads pairs of numbers (iclutils/models/regressors.py).
//
// Arrays are flat, row after row; comments give their shapes, (pos, width) or (head, dest, src).
// Weights multiply from the right, (in, out). Sums are taken in double precision.
const Transformer = (() => {
  const EPSILON = 1e-5; // of LayerNorm
  const CUT = -10000; // score of an edge of attention that is cut, before the softmax

  // x W + b: x (rows, n), W (n, m), b (m) -> (rows, m)
  function linear(x, { weight, bias }) {
    const [n, m] = weight.shape, w = weight.data, rows = x.length / n;
    const y = new Float64Array(rows * m);
    for (let i = 0; i < rows; i++) {
      const out = y.subarray(i * m, (i + 1) * m);
      out.set(bias.data);
      for (let k = 0; k < n; k++) {
        const value = x[i * n + k], at = k * m;
        for (let j = 0; j < m; j++) out[j] += value * w[at + j];
      }
    }
    return y;
  }

  // x W + b back to front: slopes at its result (rows, m) -> at x (rows, n)
  function linearBack(slope, { weight }) {
    const [n, m] = weight.shape, w = weight.data, out = new Float64Array((slope.length / m) * n);
    for (let i = 0; i * m < slope.length; i++)
      for (let k = 0; k < n; k++)
        for (let j = 0; j < m; j++) out[i * n + k] += slope[i * m + j] * w[k * m + j];
    return out;
  }

  // Mean, and one over the spread, of the row of x that begins at a place
  function moments(x, at, width) {
    let mean = 0, square = 0;
    for (let j = 0; j < width; j++) mean += x[at + j] / width;
    for (let j = 0; j < width; j++) square += (x[at + j] - mean) ** 2 / width;
    return [mean, 1 / Math.sqrt(square + EPSILON)];
  }

  // LayerNorm of every row: x (rows, width)
  function norm(x, { weight, bias }) {
    const width = weight.data.length, y = new Float64Array(x.length);
    for (let at = 0; at < x.length; at += width) {
      const [mean, scale] = moments(x, at, width);
      for (let j = 0; j < width; j++)
        y[at + j] = (x[at + j] - mean) * scale * weight.data[j] + bias.data[j];
    }
    return y;
  }

  // Likewise back to front: slopes at its result -> at x
  function normBack(slope, x, { weight }) {
    const width = weight.data.length, out = new Float64Array(x.length);
    for (let at = 0; at < x.length; at += width) {
      const [mean, scale] = moments(x, at, width);
      let even = 0, along = 0;
      for (let j = 0; j < width; j++) {
        const own = (slope[at + j] * weight.data[j]) / width;
        even += own;
        along += own * (x[at + j] - mean) * scale;
      }
      for (let j = 0; j < width; j++)
        out[at + j] = scale * (slope[at + j] * weight.data[j] - even - (x[at + j] - mean) * scale * along);
    }
    return out;
  }

  // GPT-2's GELU ("gelu_new"), with a hyperbolic tangent
  const gelu = (u) => 0.5 * u * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (u + 0.044715 * u ** 3)));

  const geluSlope = (u, t = Math.tanh(Math.sqrt(2 / Math.PI) * (u + 0.044715 * u ** 3))) =>
    0.5 * (1 + t + u * (1 - t * t) * Math.sqrt(2 / Math.PI) * (1 + 3 * 0.044715 * u * u));

  function add(x, y) {
    for (let i = 0; i < x.length; i++) x[i] += y[i];
    return x;
  }

  // Columns of x (rows, width): `count` of them from `start` on, (rows, count)
  function columns(x, width, start, count) {
    const out = new Float64Array((x.length / width) * count);
    for (let i = 0; i * width < x.length; i++)
      out.set(x.subarray(i * width + start, i * width + start + count), i * count);
    return out;
  }

  function joined(x, y) {
    const out = new Float64Array(x.length + y.length);
    out.set(x);
    out.set(y, x.length);
    return out;
  }

  // Log-probabilities of scores: values (n) -> (n)
  function logSoftmax(values) {
    const top = Math.max(...values);
    const total = Math.log(values.reduce((sum, value) => sum + Math.exp(value - top), 0));
    return values.map((value) => value - top - total);
  }

  // Attention of one head: q (rows, d), k and v (sources, d), where the rows are the last sources.
  // barred: dest * sources + src of each edge that is cut; apart: as in `run`
  // -> {z: (rows, d), pattern: (rows, sources)}
  function attend(q, k, v, d, { barred = new Set(), apart = false } = {}) {
    const rows = q.length / d, total = k.length / d, before = total - rows;
    const z = new Float64Array(rows * d), pattern = new Float64Array(rows * total);
    for (let i = 0; i < rows; i++) {
      const dest = before + i, at = i * total, sources = [];
      let largest = -Infinity, sum = 0;
      for (let src = 0; src <= dest; src++) {
        if (apart && src >= before && src < dest) continue;
        let score = 0;
        for (let c = 0; c < d; c++) score += q[i * d + c] * k[src * d + c];
        score = barred.has(dest * total + src) ? CUT : score / Math.sqrt(d);
        pattern[at + src] = score;
        largest = Math.max(largest, score);
        sources.push(src);
      }
      for (const src of sources) sum += pattern[at + src] = Math.exp(pattern[at + src] - largest);
      for (const src of sources) {
        const weight = (pattern[at + src] /= sum);
        for (let c = 0; c < d; c++) z[i * d + c] += weight * v[src * d + c];
      }
    }
    return { z, pattern };
  }

  // The stream as the keys of one head read it when earlier heads had written `z` in the place of
  // what they wrote: x + (z - z_own) W_O of each, (pos, width).
  function otherStream(net, x, edges, seenZ) {
    const stream = x.slice(), width = net.width, d = width / net.heads, rows = x.length / width;
    for (const { from: [layer, head], z } of edges) {
      const out = net.blocks[layer].out.weight.data;
      for (let i = 0; i < rows; i++)
        for (let k = 0; k < d; k++) {
          const channel = head * d + k, change = z[i * d + k] - seenZ[layer][i * width + channel];
          for (let j = 0; j < width; j++) stream[i * width + j] += change * out[channel * width + j];
        }
    }
    return stream;
  }

  // The blocks on a stream x (pos, width). hooks, all optional:
  //   ablate: [{layer, head, z}]  the head's output is z: (pos, d_head), (d_head) for all places,
  //                               or null for zeros
  //   keys: [{from, to, z}]       the keys of head `to`, and they alone, read z (pos, d_head) where
  //                               head `from` wrote; heads are [layer, head]: path patching
  //   cut: [{layer, edges}]       [dest, src] pairs that no head of the layer attends along
  //   past, apart                 an earlier result, whose places come first; with `apart` each
  //                               row sees these and itself alone, so that rows are many queries
  // -> {x, and per layer its input `before`, the stream `middle` before its MLP, z (pos, width),
  //    qkv (pos, 3 width), patterns (head, dest, src)}
  function run(net, x, { ablate = [], keys = [], cut = [], past = null, apart = false } = {}) {
    const { width, heads } = net, d = width / heads, rows = x.length / width;
    const before = past ? past.x.length / width : 0, total = before + rows;
    const result = { before: [], middle: [], qkv: [], z: [], patterns: [] };
    net.blocks.forEach((block, layer) => {
      const qkv = linear(norm(x, block.norm_1), block.qkv);
      for (let head = 0; head < heads; head++) {
        const edges = keys.filter(({ to }) => to[0] === layer && to[1] === head);
        if (!edges.length) continue;
        const read = linear(norm(otherStream(net, x, edges, result.z), block.norm_1), block.qkv);
        for (let i = 0; i < rows; i++) {
          const at = i * 3 * width + width + head * d; // keys stand between queries and values
          qkv.set(read.subarray(at, at + d), at);
        }
      }
      const barred = new Set();
      for (const { edges } of cut.filter((one) => one.layer === layer))
        for (const [dest, src] of edges) barred.add(dest * total + src);
      const z = new Float64Array(rows * width), pattern = new Float64Array(heads * rows * total);
      for (let head = 0; head < heads; head++) {
        const [q, k, v] = [0, 1, 2].map((which) => {
          const start = which * width + head * d, own = columns(qkv, 3 * width, start, d);
          return which && past ? joined(columns(past.qkv[layer], 3 * width, start, d), own) : own;
        });
        const found = attend(q, k, v, d, { barred, apart });
        pattern.set(found.pattern, head * rows * total);
        for (let i = 0; i < rows; i++) z.set(found.z.subarray(i * d, (i + 1) * d), i * width + head * d);
      }
      for (const { head, z: new_ } of ablate.filter((one) => one.layer === layer))
        for (let i = 0; i < rows; i++)
          for (let k = 0; k < d; k++)
            z[i * width + head * d + k] = new_ ? new_[new_.length > d ? i * d + k : k] : 0;
      result.before.push(x);
      x = add(linear(z, block.out), x);
      result.middle.push(x);
      const hidden = linear(norm(x, block.norm_2), block.up);
      for (let i = 0; i < hidden.length; i++) hidden[i] = gelu(hidden[i]);
      x = add(linear(hidden, block.down), x);
      result.qkv.push(qkv);
      result.z.push(z);
      result.patterns.push(pattern);
    });
    return Object.assign(result, { x });
  }

  // Saliency of every edge, |sum over heads of A dL/dA|, by layer (dest, src), from a run's slopes
  // of L at the last stream (pos, width): label_anchors/saliency.py
  function saliency(net, run, slope) {
    const { width, heads } = net, d = width / heads, pos = slope.length / width, found = [];
    for (let layer = net.blocks.length - 1; layer >= 0; layer--) {
      const block = net.blocks[layer], middle = run.middle[layer], qkv = run.qkv[layer];
      const hidden = linear(norm(middle, block.norm_2), block.up);
      const inner = linearBack(slope, block.down).map((value, i) => value * geluSlope(hidden[i]));
      slope = add(normBack(linearBack(inner, block.up), middle, block.norm_2), slope);
      const dz = linearBack(slope, block.out), back = new Float64Array(3 * pos * width);
      const edges = new Float64Array(pos * pos);
      for (let head = 0; head < heads; head++) {
        const at = (i, which) => (3 * i + which) * width + head * d; // a row of q, k or v
        for (let dest = 0; dest < pos; dest++) {
          const A = run.patterns[layer].subarray((head * pos + dest) * pos, (head * pos + dest + 1) * pos);
          const dA = new Float64Array(dest + 1), from = dest * width + head * d;
          for (let src = 0; src <= dest; src++)
            for (let c = 0; c < d; c++) dA[src] += dz[from + c] * qkv[at(src, 2) + c];
          const mean = dA.reduce((sum, value, src) => sum + value * A[src], 0);
          for (let src = 0; src <= dest; src++) {
            const score = (A[src] * (dA[src] - mean)) / Math.sqrt(d);
            edges[dest * pos + src] += A[src] * dA[src];
            for (let c = 0; c < d; c++) {
              back[at(dest, 0) + c] += score * qkv[at(src, 1) + c];
              back[at(src, 1) + c] += score * qkv[at(dest, 0) + c];
              back[at(src, 2) + c] += A[src] * dz[from + c];
            }
          }
        }
      }
      slope = add(normBack(linearBack(back, block.qkv), run.before[layer], block.norm_1), slope);
      found.unshift(edges.map(Math.abs));
    }
    return found;
  }

  // What one head put out, (pos, d_head), from a run's z of its layer; and its mean over places.
  const ofHead = ({ width, heads }, z, head) => columns(z, width, (head * width) / heads, width / heads);
  function meanOfHead(net, z, head) {
    const d = net.width / net.heads, out = ofHead(net, z, head), mean = new Float64Array(d);
    out.forEach((value, i) => (mean[i % d] += (value * d) / out.length));
    return mean;
  }

  // The blocks by their names in the weights: "blocks.0.qkv.weight" -> blocks[0].qkv.weight
  function network({ config, tensors }) {
    const net = { ...config, blocks: [] };
    for (const [name, tensor] of Object.entries(tensors)) {
      const path = name.split("."), last = path.pop();
      let part = net;
      for (const step of path) part = part[step] ??= {};
      part[last] = tensor;
    }
    return net;
  }

  return { linear, norm, normBack, gelu, columns, logSoftmax, attend, run, saliency, ofHead, meanOfHead, network };
})();

const Gpt2 = {
  // Tokens and places: ids -> (pos, width)
  embed({ width, wte, wpe }, tokens) {
    const x = new Float64Array(tokens.length * width);
    tokens.forEach((token, i) => {
      for (let j = 0; j < width; j++)
        x[i * width + j] = wte.weight.data[token * width + j] + wpe.weight.data[i * width + j];
    });
    return x;
  },

  // Logits of the last stream after its norm: last (pos, width) -> {logits: (pos, vocab), vocab}
  unembed({ width, wte }, last) {
    const e = wte.weight.data, vocab = wte.weight.shape[0], pos = last.length / width;
    const logits = new Float64Array(pos * vocab); // the embedding unembeds, too
    for (let i = 0; i < pos; i++)
      for (let v = 0; v < vocab; v++) {
        let sum = 0;
        for (let j = 0; j < width; j++) sum += last[i * width + j] * e[v * width + j];
        logits[i * vocab + v] = sum;
      }
    return { logits, vocab };
  },

  // tokens: ids; hooks: see above -> {logits: (pos, vocab), vocab, patterns, z}
  forward(net, tokens, hooks) {
    const result = Transformer.run(net, Gpt2.embed(net, tokens), hooks);
    return { ...result, ...Gpt2.unembed(net, Transformer.norm(result.x, net.norm)) };
  },

  // Log-probabilities of the token after the place `at`, (vocab)
  nextToken: ({ logits, vocab }, at) => Transformer.logSoftmax(logits.subarray(at * vocab, (at + 1) * vocab)),

  // Saliency of every edge by layer, (dest, src), of the loss of one of the tokens `ids` at the end
  saliency(net, run, ids, answer) {
    const { width, wte } = net, end = run.x.length - width, slope = new Float64Array(run.x.length);
    const scores = Transformer.logSoftmax(ids.map((id) => run.logits[(end / width) * run.vocab + id]));
    ids.forEach((id, n) => {
      const more = Math.exp(scores[n]) - Number(id === answer);
      for (let j = 0; j < width; j++) slope[end + j] += more * wte.weight.data[id * width + j];
    });
    return Transformer.saliency(net, run, Transformer.normBack(slope, run.x, net.norm));
  },

  // Weights of the same shapes as GPT-2 draws them before training: normal(), a standard normal draw
  random(net, normal) {
    const spread = { "out.weight": 0.02 / Math.sqrt(2 * net.blocks.length) };
    spread["down.weight"] = spread["out.weight"];
    const redraw = (part, path) =>
      Object.fromEntries(Object.entries(part).map(([name, value]) => {
        if (!value.data) return [name, redraw(value, name)];
        const flat = /^norm/.test(path) || name === "bias", std = spread[`${path}.${name}`] ?? 0.02;
        const fill = () => (flat ? Number(name === "weight") : std * normal());
        return [name, { ...value, data: value.data.map(fill) }];
      }));
    const { wte, wpe, norm, blocks } = net, parts = redraw({ wte, wpe, norm }, "");
    return { ...net, ...parts, blocks: blocks.map((block) => redraw(block, "")) };
  },
};

const Regressor = {
  // Token i is (x_i, x_{i-1}, y_{i-1}): xs (n, dim), ys (n, or n - 1) -> (n, 2 dim + 1)
  tokens({ dim }, xs, ys) {
    const n = xs.length / dim, out = new Float64Array(n * (2 * dim + 1));
    for (let i = 0; i < n; i++) {
      const at = i * (2 * dim + 1);
      out.set(xs.subarray(i * dim, (i + 1) * dim), at);
      if (!i) continue;
      out.set(xs.subarray((i - 1) * dim, i * dim), at + dim);
      out[at + 2 * dim] = ys[i - 1];
    }
    return out;
  },

  embed(net, tokens, place) {
    const x = Transformer.linear(tokens, net.read_in), { width } = net;
    for (let i = 0; i < x.length; i++) x[i] += net.positions.data[place(Math.floor(i / width)) * width + (i % width)];
    return x;
  },

  answers: (net, { x }) => Transformer.linear(Transformer.norm(x, net.norm), net.read_out),

  // The prediction of each y from the pairs before it and its own x: (n)
  forward(net, xs, ys) {
    const x = Regressor.embed(net, Regressor.tokens(net, xs, ys), (i) => i);
    return Regressor.answers(net, Transformer.run(net, x));
  },

  // The answers to many queries (m, dim) after the same pairs, xs (n, dim) and ys (n): (m)
  field(net, xs, ys, queries) {
    const { dim } = net, n = ys.length, m = queries.length / dim, channels = 2 * dim + 1;
    const past = Transformer.run(net, Regressor.embed(net, Regressor.tokens(net, xs, ys), (i) => i));
    const asked = new Float64Array(m * channels);
    for (let i = 0; i < m; i++) {
      asked.set(queries.subarray(i * dim, (i + 1) * dim), i * channels);
      asked.set(xs.subarray((n - 1) * dim, n * dim), i * channels + dim);
      asked[i * channels + 2 * dim] = ys[n - 1];
    }
    const x = Regressor.embed(net, asked, () => n);
    return Regressor.answers(net, Transformer.run(net, x, { past, apart: true }));
  },
};

// The graph of edges (iclutils/interp/graph.py, circuit.py): a writer is the embedding, a head or an
// MLP; a reader the queries, keys or values of a head, the input of an MLP, or the logits.
const Circuit = {
  // Names of all writers and readers in the package's order, and which edges there are
  graph({ blocks: { length: layers }, heads }) {
    const writers = [["embed", -1]], readers = [];
    for (let layer = 0; layer < layers; layer++) {
      const each = Array.from({ length: heads }, (_, h) => `${layer}.${h}`);
      for (const channel of "qkv") readers.push(...each.map((head) => [`${channel} ${head}`, layer]));
      readers.push([`mlp_in ${layer}`, layer + 0.5]);
      writers.push(...each.map((head) => [head, layer]), [`mlp ${layer}`, layer + 0.5]);
    }
    readers.push(["logits", layers]);
    const edges = writers.flatMap(([u, from]) =>
      readers.filter(([, to]) => from < to).map(([v]) => `${u}>${v}`));
    return { writers: writers.map(([u]) => u), edges };
  },

  // One channel of a head: its columns of qkv
  channel(net, layer, head, which) {
    const { width, heads } = net, d = width / heads, { weight, bias } = net.blocks[layer].qkv;
    return ((net.channels ??= {})[`${which} ${layer}.${head}`] ??= (() => {
      const start = which * width + head * d, data = Transformer.columns(weight.data, 3 * width, start, d);
      return { weight: { shape: [width, d], data }, bias: { data: bias.data.subarray(start, start + d) } };
    })());
  },

  // The pass in which every edge of `cut` (a set of names) carries what its writer wrote in another
  // run, `other`: name -> (pos, width). -> {logits, vocab, writes}
  forward(net, tokens, cut = new Set(), other = {}) {
    const { width, heads } = net, d = width / heads, x = Gpt2.embed(net, tokens);
    const writes = { embed: x.slice() }, none = { data: new Float64Array(width) };
    const barred = {};
    for (const edge of cut) (barred[edge.split(">")[1]] ??= []).push(edge.split(">")[0]);
    const add = (y) => y.forEach((value, i) => (x[i] += value));
    const read = (reader, norm) => { // the stream, with the other run's writing where it is cut
      const seen = x.slice();
      for (const writer of barred[reader] ?? [])
        for (let i = 0; i < seen.length; i++) seen[i] += other[writer][i] - writes[writer][i];
      return Transformer.norm(seen, norm);
    };
    net.blocks.forEach((block, layer) => {
      const plain = Transformer.norm(x, block.norm_1);
      const written = Array.from({ length: heads }, (_, head) => {
        const [q, k, v] = [..."qkv"].map((name, which) => {
          const reader = `${name} ${layer}.${head}`;
          return Transformer.linear(barred[reader] ? read(reader, block.norm_1) : plain, Circuit.channel(net, layer, head, which));
        });
        const { z } = Transformer.attend(q, k, v, d), rows = block.out.weight.data.subarray(head * d * width, (head + 1) * d * width);
        return (writes[`${layer}.${head}`] = Transformer.linear(z, { weight: { shape: [d, width], data: rows }, bias: none }));
      });
      for (const y of written) add(y);
      for (let i = 0; i < x.length; i++) x[i] += block.out.bias.data[i % width]; // of no head
      const hidden = Transformer.linear(read(`mlp_in ${layer}`, block.norm_2), block.up).map(Transformer.gelu);
      add((writes[`mlp ${layer}`] = Transformer.linear(hidden, block.down)));
    });
    return { ...Gpt2.unembed(net, read("logits", net.norm)), writes };
  },
};
