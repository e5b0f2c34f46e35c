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

  // LayerNorm of every row: x (rows, width)
  function norm(x, { weight, bias }) {
    const width = weight.data.length, y = new Float64Array(x.length);
    for (let at = 0; at < x.length; at += width) {
      let mean = 0, square = 0;
      for (let j = 0; j < width; j++) mean += x[at + j] / width;
      for (let j = 0; j < width; j++) square += (x[at + j] - mean) ** 2 / width;
      const scale = 1 / Math.sqrt(square + EPSILON);
      for (let j = 0; j < width; j++)
        y[at + j] = (x[at + j] - mean) * scale * weight.data[j] + bias.data[j];
    }
    return y;
  }

  // GPT-2's GELU ("gelu_new"), with a hyperbolic tangent
  const gelu = (u) => 0.5 * u * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (u + 0.044715 * u ** 3)));

  function add(x, y) {
    for (let i = 0; i < x.length; i++) x[i] += y[i];
    return x;
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
  // -> {x, qkv: per layer (pos, 3 width), z: per layer (pos, width), patterns: per layer
  //    (head, dest, src)}
  function run(net, x, { ablate = [], keys = [], cut = [], past = null, apart = false } = {}) {
    const { width, heads } = net, d = width / heads, rows = x.length / width;
    const before = past ? past.x.length / width : 0, total = before + rows;
    const result = { qkv: [], z: [], patterns: [] };
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
      const scores = new Float64Array(total), sources = new Int32Array(total);
      for (let head = 0; head < heads; head++)
        for (let i = 0; i < rows; i++) {
          const dest = before + i, query = i * 3 * width + head * d;
          let count = 0, largest = -Infinity, sum = 0;
          for (let src = 0; src <= dest; src++) {
            if (apart && src >= before && src < dest) continue;
            const of = src < before ? past.qkv[layer] : qkv;
            const key = (src < before ? src : src - before) * 3 * width + width + head * d;
            let score = 0;
            for (let k = 0; k < d; k++) score += qkv[query + k] * of[key + k];
            score = barred.has(dest * total + src) ? CUT : score / Math.sqrt(d);
            sources[count] = src;
            scores[count++] = score;
            if (score > largest) largest = score;
          }
          for (let n = 0; n < count; n++) sum += scores[n] = Math.exp(scores[n] - largest);
          for (let n = 0; n < count; n++) {
            const src = sources[n], weight = scores[n] / sum;
            const of = src < before ? past.qkv[layer] : qkv;
            const value = (src < before ? src : src - before) * 3 * width + 2 * width + head * d;
            pattern[(head * rows + i) * total + src] = weight;
            for (let k = 0; k < d; k++) z[i * width + head * d + k] += weight * of[value + k];
          }
        }
      for (const { head, z: new_ } of ablate.filter((one) => one.layer === layer))
        for (let i = 0; i < rows; i++)
          for (let k = 0; k < d; k++)
            z[i * width + head * d + k] = new_ ? new_[new_.length > d ? i * d + k : k] : 0;
      x = add(linear(z, block.out), x);
      const hidden = linear(norm(x, block.norm_2), block.up);
      for (let i = 0; i < hidden.length; i++) hidden[i] = gelu(hidden[i]);
      x = add(linear(hidden, block.down), x);
      result.qkv.push(qkv);
      result.z.push(z);
      result.patterns.push(pattern);
    });
    return Object.assign(result, { x });
  }

  // What one head put out, (pos, d_head), from a run's z of its layer; and its mean over places.
  function ofHead(net, z, head) {
    const d = net.width / net.heads, rows = z.length / net.width, out = new Float64Array(rows * d);
    for (let i = 0; i < rows; i++)
      out.set(z.subarray(i * net.width + head * d, i * net.width + (head + 1) * d), i * d);
    return out;
  }
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

  return { linear, norm, gelu, run, ofHead, meanOfHead, network };
})();

const Gpt2 = {
  // tokens: ids; hooks: see above -> {logits: (pos, vocab), patterns, z}
  forward(net, tokens, hooks) {
    const { width } = net, { wte, wpe } = net, x = new Float64Array(tokens.length * width);
    tokens.forEach((token, i) => {
      for (let j = 0; j < width; j++)
        x[i * width + j] = wte.weight.data[token * width + j] + wpe.weight.data[i * width + j];
    });
    const result = Transformer.run(net, x, hooks), vocab = wte.weight.shape[0];
    const last = Transformer.norm(result.x, net.norm), e = wte.weight.data;
    const logits = new Float64Array(tokens.length * vocab); // the embedding unembeds, too
    for (let i = 0; i < tokens.length; i++)
      for (let v = 0; v < vocab; v++) {
        let sum = 0;
        for (let j = 0; j < width; j++) sum += last[i * width + j] * e[v * width + j];
        logits[i * vocab + v] = sum;
      }
    return Object.assign(result, { logits, vocab });
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

  // One channel of a head: the columns of qkv, and the rows of what writes back
  channel(net, layer, head, which) {
    const { width, heads } = net, d = width / heads, { weight, bias } = net.blocks[layer].qkv;
    const made = ((net.channels ??= {})[`${which} ${layer}.${head}`] ??= (() => {
      const start = which * width + head * d, data = new Float64Array(width * d);
      for (let i = 0; i < width; i++)
        data.set(weight.data.subarray(i * 3 * width + start, i * 3 * width + start + d), i * d);
      return { weight: { shape: [width, d], data }, bias: { data: bias.data.subarray(start, start + d) } };
    })());
    return made;
  },

  // The pass in which every edge of `cut` (a set of names) carries what its writer wrote in another
  // run, `other`: name -> (pos, width). -> {logits, vocab, writes}
  forward(net, tokens, cut = new Set(), other = {}) {
    const { width, heads, wte, wpe } = net, d = width / heads, pos = tokens.length;
    const x = new Float64Array(pos * width), writes = { embed: x.slice() };
    tokens.forEach((token, i) => {
      for (let j = 0; j < width; j++)
        writes.embed[i * width + j] = wte.weight.data[token * width + j] + wpe.weight.data[i * width + j];
    });
    const barred = {};
    for (const edge of cut) (barred[edge.split(">")[1]] ??= []).push(edge.split(">")[0]);
    const add = (y) => y.forEach((value, i) => (x[i] += value));
    const read = (reader, norm) => { // the stream, with the other run's writing where it is cut
      const seen = x.slice();
      for (const writer of barred[reader] ?? [])
        for (let i = 0; i < seen.length; i++) seen[i] += other[writer][i] - writes[writer][i];
      return Transformer.norm(seen, norm);
    };
    add(writes.embed);
    net.blocks.forEach((block, layer) => {
      const plain = Transformer.norm(x, block.norm_1);
      const written = Array.from({ length: heads }, (_, head) => {
        const [q, k, v] = [..."qkv"].map((name, which) => {
          const reader = `${name} ${layer}.${head}`;
          return Transformer.linear(barred[reader] ? read(reader, block.norm_1) : plain, Circuit.channel(net, layer, head, which));
        });
        const z = new Float64Array(pos * width); // of this head alone
        for (let i = 0; i < pos; i++) {
          const scores = Array.from({ length: i + 1 }, (_, j) => {
            let score = 0;
            for (let c = 0; c < d; c++) score += q[i * d + c] * k[j * d + c];
            return score / Math.sqrt(d);
          });
          const top = Math.max(...scores), grown = scores.map((s) => Math.exp(s - top)), sum = grown.reduce((a, b) => a + b);
          grown.forEach((weight, j) => {
            for (let c = 0; c < d; c++) z[i * width + head * d + c] += (weight / sum) * v[j * d + c];
          });
        }
        const out = block.out.weight.data, y = new Float64Array(pos * width);
        for (let i = 0; i < pos; i++)
          for (let c = head * d; c < (head + 1) * d; c++)
            for (let j = 0; j < width; j++) y[i * width + j] += z[i * width + c] * out[c * width + j];
        return (writes[`${layer}.${head}`] = y);
      });
      for (const y of written) add(y);
      for (let i = 0; i < x.length; i++) x[i] += block.out.bias.data[i % width]; // of no head
      const hidden = Transformer.linear(read(`mlp_in ${layer}`, block.norm_2), block.up).map(Transformer.gelu);
      add((writes[`mlp ${layer}`] = Transformer.linear(hidden, block.down)));
    });
    const last = read("logits", net.norm), e = wte.weight.data, vocab = wte.weight.shape[0];
    const logits = new Float64Array(pos * vocab);
    for (let i = 0; i < pos; i++)
      for (let v = 0; v < vocab; v++)
        for (let j = 0; j < width; j++) logits[i * vocab + v] += last[i * width + j] * e[v * width + j];
    return { logits, vocab, writes };
  },
};
