// Figure 5: a head as a smoother (notebook 05). A query looks at four examples and at its own token;
// what the examples add to the output is drawn piece by piece.
{
  const EDGE = 2, SIZE = 240, DEMOS = 4, OWN = DEMOS + 1; // the planes reach from -2 to 2
  const round = (value) => Math.max(-EDGE, Math.min(EDGE, Math.round(value * 20) / 20));
  const signed = (value) => Number(value).toFixed(2).replace("-", "−");
  const pair = (point) => `(${signed(point[0])}, ${signed(point[1])})`;
  // Keys (a, b) and values (c, d) of the examples; the query's own token is the last, and its key
  // is where the query is.
  const KEYS = [[1.3, -0.4], [-0.4, 1.3], [-1.3, -0.5], [0.8, -1.2], [0.7, 0.5]];
  const VALUES = [[1.4, -0.5], [1, 1.4], [-1.3, 0.5], [-0.2, 1.5], [-1.4, -1.2]];
  const first = { point: 1, sharp: 0.7 };
  KEYS.forEach(([a, b], i) => Object.assign(first, { [`a${i + 1}`]: a, [`b${i + 1}`]: b, [`c${i + 1}`]: VALUES[i][0], [`d${i + 1}`]: VALUES[i][1] }));

  function measured(state) {
    const read = (x, y) => Float64Array.from({ length: 2 * OWN }, (_, i) => state[`${i % 2 ? y : x}${(i >> 1) + 1}`]);
    const keys = read("a", "b"), values = read("c", "d");
    const found = Softmax.steps(keys.subarray(2 * DEMOS), keys, values, state.sharp);
    const [start, end] = [found.answers.subarray(0, 2), found.answers.subarray(2 * DEMOS)];
    return { ...found, keys, values, start, end, length: Math.hypot(end[0] - start[0], end[1] - start[1]) };
  }

  const px = (x) => ((x + EDGE) / (2 * EDGE)) * SIZE, py = (y) => SIZE - px(y);
  // A path, and places along it, some four units apart
  const path = (stops) => `M${stops.map((stop) => stop.map((x) => x.toFixed(1)).join(" ")).join("L")}`;
  const along = (stops) => stops.slice(1).flatMap(([x, y], i) => {
    const [u, v] = stops[i], count = Math.ceil(Math.hypot(x - u, y - v) / 4);
    return Array.from({ length: count + 1 }, (_, k) => [u + ((x - u) * k) / count, v + ((y - v) * k) / count]);
  });
  const CROSS = [[[SIZE / 2, 0], [SIZE / 2, SIZE]], [[0, SIZE / 2], [SIZE, SIZE / 2]]];

  // Where labels stand: beside their discs, where they cover the fewest labels, points, lines and discs
  function beside(discs, lines) {
    const inked = [...CROSS, ...lines].flatMap(along), taken = [];
    const within = (low, high) => (x) => Math.max(low, Math.min(high, x));
    for (const { x, y, r, text } of discs) {
      const w = 3.5 * text.length, h = 8; // half a label
      const places = [[1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [-1, -1], [1, 1], [-1, 1]].map(([across, down]) => {
        const out = across && down ? 0.71 * Math.max(r, 7) : Math.max(r, 7) + 3;
        return [within(w, SIZE - w)(x + across * (out + w)), within(h, SIZE - h)(y + down * (out + h))];
      });
      const cost = ([u, v]) => {
        const gap = (other) => Math.hypot(Math.max(0, Math.abs(other.x - u) - w), Math.max(0, Math.abs(other.y - v) - h));
        return 50 * taken.filter((other) => Math.abs(other.u - u) < w + other.w && Math.abs(other.v - v) < 2 * h).length +
          discs.reduce((sum, other) => sum + 30 * (gap(other) < 7) + 5 * (gap(other) < other.r), 0) +
          2 * inked.filter(([s, t]) => Math.abs(s - u) < w && Math.abs(t - v) < h).length;
      };
      const costs = places.map(cost), [u, v] = places[costs.indexOf(Math.min(...costs))];
      taken.push({ u, v, w });
    }
    return taken;
  }

  // A plane of keys or values: a point each, in a disc as large as its share of the attention. The
  // last token lies below the others, and yields to them: a key on the query can be dragged away.
  function plane(kind, title, said, points, m, state, lines, below) {
    const discs = [DEMOS, 0, 1, 2, 3].map((i) => ({ i, x: px(points[2 * i]), y: py(points[2 * i + 1]), r: 40 * Math.sqrt(m.weights[i]),
      text: `${i !== DEMOS ? i + 1 : "last"}: ${Math.round(100 * m.weights[i])} %` }));
    const labels = beside(discs, lines);
    const marks = discs.map(({ i, x, y, r, text }, k) => {
      const own = i === DEMOS, at = `cx="${x.toFixed(1)}" cy="${y.toFixed(1)}"`;
      return `<g data-drag="${kind}${i + 1}"${own ? " data-yields" : ""}><circle class="live-${own ? "c" : "a"}" opacity="0.25" clip-path="url(#live-plane-${kind})" ${at} r="${r.toFixed(1)}"/>` +
        `<circle class="live-grip" ${at} r="22"/><circle class="live-dot${state.point === i + 1 ? " live-chosen" : ""}" ${at} r="6"/>` +
        `<text x="${labels[k].u.toFixed(1)}" y="${(labels[k].v + 4.5).toFixed(1)}" text-anchor="middle">${text}</text></g>`;
    }).join("");
    return `<div><p class="live-head">${title}</p><svg data-plane="" viewBox="0 0 ${SIZE} ${SIZE}" role="img" aria-label="${said}"><clipPath id="live-plane-${kind}"><rect width="${SIZE}" height="${SIZE}"/></clipPath><rect class="live-ground" width="${SIZE}" height="${SIZE}"/>` +
      `<path class="live-axis" d="${CROSS.map(path).join("")}"/>${below}${marks}</svg></div>`;
  }

  Live.figure("smoother", {
    title: "A toy head: drag its keys and values",
    first,
    needs: () => [],
    bet: {
      asks: "The green arrow among the keys is the query. Where must you put key 1, so that the query looks at it most?",
      choices: ["on the query", "beyond the query, far out in the same direction", "on the other side of the middle"],
      deed: "Now drag key 1 onto the tip of the arrow, and then beyond it.",
      answer(s, m, memory) {
        if (Number(s.sharp) !== first.sharp || KEYS.some(([a, b], i) => i && (s[`a${i + 1}`] !== a || s[`b${i + 1}`] !== b)))
          return [undefined, "More than key 1 has changed now. Press Reset (under “More to change, more to find”), bet again, and move key 1 alone."];
        const [a, b] = [s.a1, s.b1], [qa, qb] = KEYS[DEMOS], share = (one) => Math.round(100 * one.weights[0]);
        if (Math.hypot(a - qa, b - qb) <= 0.3) memory.on = share(m); // where the reader left it
        else if (a >= 1.5 && b >= 1) memory.beyond = share(m);
        const { on = share(measured({ ...first, a1: qa, b1: qb })), beyond } = memory;
        if (memory.on === undefined && beyond === undefined) return null;
        if (beyond === undefined) return [undefined, `On the query, key 1 has ${on} %. At first, it had ${share(measured(first))} %. Now drag it beyond.`];
        return [1, `With key 1 on the query ${on} % of the attention are on it, beyond the query ${beyond} %. A score is the product of query and key, so a longer key in the same direction gets more. (On the other side the product is negative.)`];
      },
    },

    fields(state) {
      const i = state.point, coordinate = (name, label) => ({ kind: "range", more: true, name: `${name}${i}`, label, min: -EDGE, max: EDGE, step: 0.05, said: signed });
      const key = i === OWN ? "its query and key" : "its key";
      return [
        { kind: "range", name: "sharp", label: "Multiply all attention scores by", min: 0.1, max: 4, step: 0.1, said: (v) => Number(v).toFixed(1) },
        { kind: "radios", more: true, name: "point", label: "Token to move (or drag it)", options: Array.from({ length: OWN }, (_, k) => [String(k + 1), k === DEMOS ? "last" : `${k + 1}`]) },
        coordinate("a", `${key}, across`), coordinate("b", `${key}, up`), coordinate("c", "its value, across"), coordinate("d", "its value, up"),
      ];
    },

    change: (state) => ({ ...state, point: Number(state.point) }),

    drag(state, id, x, y) {
      const names = id[0] === "k" ? "ab" : "cd", i = id.slice(1);
      return { ...state, point: Number(i), [names[0] + i]: round((x / SIZE) * 2 * EDGE - EDGE), [names[1] + i]: round(EDGE - (y / SIZE) * 2 * EDGE) };
    },

    draw(state) {
      const m = measured(state), stops = Array.from({ length: OWN }, (_, i) => [px(m.answers[2 * i]), py(m.answers[2 * i + 1])]);
      const [[x0, y0], [x1, y1]] = [stops[0], stops[DEMOS]];
      const query = [[SIZE / 2, SIZE / 2], [px(m.keys[2 * DEMOS]), py(m.keys[2 * DEMOS + 1])]];
      // Its head ends at the point that is dragged
      const turn = (Math.atan2(query[1][1] - query[0][1], query[1][0] - query[0][0]) * 180) / Math.PI;
      const arrow = `<path class="live-line live-c" style="stroke-dasharray: none" d="${path(query)}"/>` +
        `<path class="live-c" d="M-7 0l-14 -8v16z" transform="translate(${query[1].map((x) => x.toFixed(1)).join(" ")}) rotate(${turn.toFixed(1)})"/>`;
      // The number of its example beside each piece of the way that is long enough, and a box around it
      const numbered = stops.slice(1).flatMap(([x, y], i) => {
        const [u, v] = stops[i], size = Math.hypot(x - u, y - v);
        return size < 10 ? [] : [{ text: i + 1, u: (x + u - (18 * (y - v)) / size) / 2, v: (y + v + (18 * (x - u)) / size) / 2 }];
      });
      const boxes = numbered.map(({ u, v }) => [[u - 4, v - 5], [u + 4, v - 5], [u + 4, v + 5], [u - 4, v + 5], [u - 4, v - 5]]);
      const pieces = numbered.map(({ text, u, v }) => `<text style="font-size: 11px" x="${u.toFixed(1)}" y="${(v + 4).toFixed(1)}" text-anchor="middle">${text}</text>`).join("");
      const sums = `<path class="live-line live-b" style="stroke-dasharray: none" d="${path(stops)}"/>${pieces}` +
        `<rect class="live-c" x="${(x0 - 5).toFixed(1)}" y="${(y0 - 5).toFixed(1)}" width="10" height="10"/><path class="live-b" d="M${x1.toFixed(1)} ${(y1 - 8).toFixed(1)}l8 8l-8 8l-8 -8z"/>`;
      const shares = m.weights.map((w, i) => `${i === DEMOS ? "the last token" : `example ${i + 1}`} ${Math.round(100 * w)} percent`).join(", ");
      const said = `The query looks at ${shares}. The update moves the output from the start, ${pair(m.start)}, to ${pair(m.end)}.`;
      const view = `<div class="live-row-of">${plane("k", "Keys: where the query looks", `The keys. ${said}`, m.keys, m, state, [query], arrow)}${plane("v", "Values: what is added up", `The values. ${said}`, m.values, m, state, [stops, ...boxes], sums)}</div>` +
        `<p class="live-note">A disc is as large as a token's share of the attention. Green: the last token, which asks. The arrow is its query (its key is at the tip, to keep the picture simple). Among the values, the square is the start, and the diamond is the output. The way between them has four pieces, one for each example, in their order (the long ones are numbered).</p>`;
      const numbers = [
        ["start", pair(m.start), "square: what the last token adds"],
        ["length of the update", m.length.toFixed(2), "straight from square to diamond"],
        ["output", pair(m.end), "diamond: start and update together"],
      ];
      const more = `<p class="live-note">At first, scores are multiplied by 0.7, about 1/√2, as in a head whose keys have two entries.</p>`;
      return { numbers, view, said, more, ...m };
    },

    tasks: [
      { text: "An average or a look-up? Make one example take at least 90 % of the attention.",
        seen: [(s, m) => Math.max(...m.weights.slice(0, DEMOS)) >= 0.9],
        found: (s, m) => `example ${m.weights.indexOf(Math.max(...m.weights)) + 1} has ${Math.round(100 * Math.max(...m.weights))} %, and the output ${pair(m.end)} is nearly its value: a head that is sharp enough looks up.` },
      { text: "Let the update vanish: the examples keep at least half of the attention, each value is at least 0.5 from 0, and the diamond is less than 0.05 from the square.",
        seen: [(s, m) => m.weights[DEMOS] <= 0.5 && m.length < 0.05 && VALUES.slice(1).every((_, i) => Math.hypot(...m.values.slice(2 * i, 2 * i + 2)) >= 0.5)],
        found: (s, m) => `the examples have ${Math.round(100 * (1 - m.weights[DEMOS]))} % of the attention, but what they add cancels: the update has length ${m.length.toFixed(2)}.` },
    ],
  });
}
