// Figure 4, second part: a layer behind an MLP fits curves (notebook 04). The answers of `lsa-waves`
// after ten points, beside one step of descent on x, which can only draw a straight line.
{
  const PAIRS = 10, EDGE = 5, HIGH = 1, GRID = 101;
  const X = [-4.6, -3.7, -2.9, -1.8, -0.9, 0.2, 1.3, 2.4, 3.4, 4.4];
  const signed = (value) => Number(value).toFixed(2).replace("-", "−");
  const plain = (value) => String(value).replace("-", "−");
  const bounded = (value, most) => Math.max(-most, Math.min(most, Math.round(value * 50) / 50));
  const first = { point: 1, rate: 0.05, scale: 1 };
  X.forEach((x, i) => Object.assign(first, { [`x${i + 1}`]: x, [`y${i + 1}`]: bounded(0.4 * Math.sin(x + 0.7), HIGH) }));
  const grid = Float64Array.from({ length: GRID }, (_, i) => -EDGE + (2 * EDGE * i) / (GRID - 1));

  const answers = (net, xs, ys) => grid.map((x) => Lsa.answer(net, Float64Array.from([...xs, x]), ys));
  const spread = (a, b) => Math.sqrt(a.reduce((sum, v, i) => sum + (v - b[i]) ** 2, 0) / a.length);

  function measured(state, [net]) {
    const of = (name) => Float64Array.from({ length: PAIRS }, (_, i) => state[`${name}${i + 1}`]);
    const xs = of("x"), ys = of("y").map((v) => v * state.scale), told = answers(net, xs, ys);
    const bent = Float64Array.from([...xs].flatMap((x) => [Math.sin(x), Math.cos(x)]));
    const [a, b] = Algorithms.ols(bent, ys), [w] = Algorithms.step(xs, ys, state.rate);
    const wave = grid.map((x) => a * Math.sin(x) + b * Math.cos(x)), line = grid.map((x) => w * x);
    const root = (list) => Math.sqrt(list.reduce((sum, v) => sum + v * v, 0) / GRID) || 1;
    const grown = state.scale === 1 ? 1 : root(told) / root(answers(net, xs, of("y")));
    return { told, wave, line, ys, grown, nearer: spread(told, wave), farther: spread(line, wave) };
  }

  const left = 44, width = 336, top = 8, height = 210;
  const px = (x) => left + ((x + EDGE) / (2 * EDGE)) * width, py = (y, most) => top + (0.5 - y / (2 * most)) * height;
  Live.figure("waves", {
    title: "A layer behind an MLP fits curves: drag the points",
    beside: true,
    first,
    needs: () => ["lsa-waves"],
    bet: {
      asks: "If the labels are five times as large, the answers of a step of gradient descent from 0 are five times as large, too. And those of the layer?",
      choices: ["five times as much, too (4 to 6 times)", "less than four times", "more than six times"],
      deed: "Now move “Labels times” to 5.",
      answer: (s, m) => (s.scale === 5
        ? [m.grown < 4 ? 1 : m.grown > 6 ? 2 : 0, `With five times the labels the layer's answers are ${m.grown.toFixed(1)} times as large (root mean square over x). ${m.grown < 4 || m.grown > 6 ? "So the layer takes no step of gradient descent from 0, whatever its inputs are. It learned on waves of height .1 to .5, and nothing says what it does with higher ones." : ""}`] : null),
    },
    fields(state) {
      const i = state.point;
      return [
        { kind: "range", more: true, name: "rate", label: "The straight line: rate of its step", min: 0, max: 0.3, step: 0.01, said: (v) => Number(v).toFixed(2) },
        { kind: "range", name: "scale", label: "Labels times", min: 0.5, max: 5, step: 0.5, said: String },
        { kind: "radios", more: true, name: "point", label: "Point to move (or drag it)", options: X.map((_, k) => [String(k + 1), `${k + 1}`]) },
        { kind: "range", more: true, name: `x${i}`, label: `Point ${i}: x`, min: -EDGE, max: EDGE, step: 0.1, said: signed },
        { kind: "range", more: true, name: `y${i}`, label: `Point ${i}: label y`, min: -HIGH, max: HIGH, step: 0.02, said: signed },
      ];
    },
    drag: (state, id, x, y) => ({ ...state, point: Number(id),
      [`x${id}`]: bounded(((x - left) / width) * 2 * EDGE - EDGE, EDGE), [`y${id}`]: bounded((0.5 - (y - top) / height) * 2 * HIGH, HIGH) }),

    draw(state, nets) {
      const m = measured(state, nets), most = HIGH * state.scale;
      const path = (values) => values.reduce((d, v, i) => `${d}${i ? "L" : "M"}${px(grid[i]).toFixed(1)} ${py(Math.max(-most, Math.min(most, v)), most).toFixed(1)}`, "");
      const points = X.map((_, i) => `<g data-drag="${i + 1}"><circle class="live-grip" cx="${px(state[`x${i + 1}`])}" cy="${py(m.ys[i], most)}" r="22"/>` +
        `<circle class="live-dot${Number(state.point) === i + 1 ? " live-chosen" : ""}" cx="${px(state[`x${i + 1}`])}" cy="${py(m.ys[i], most)}" r="6"/></g>`).join("");
      const ticks = [-4, -2, 0, 2, 4].map((v) => `<text x="${px(v)}" y="${top + height + 18}" text-anchor="middle">${plain(v)}</text>`).join("") +
        [-1, 0, 1].map((v) => `<text x="${left - 6}" y="${py(v * most, most) + 4}" text-anchor="end">${plain(v * most)}</text>`).join("");
      const scaled = Number(state.scale) !== 1;
      const said = `The layer's curve is ${m.nearer.toFixed(2)} from the wave that fits the points best, the straight line ${m.farther.toFixed(2)}.${scaled ? ` With ${state.scale} times the labels its answers are ${m.grown.toFixed(1)} times as large.` : ""}`;
      const view = `<svg class="live-wide" data-plane="" viewBox="0 0 390 ${top + height + 26}" role="img" aria-label="${said}"><path class="live-axis" d="M${left} ${top}v${height}h${width}M${left} ${top + height / 2}h${width}"/>${ticks}` +
        `<path class="live-line live-c" d="${path(m.wave)}"/><path class="live-line live-b" d="${path(m.line)}"/><path class="live-line live-a" d="${path(m.told)}"/>${points}</svg>` +
        `<p class="live-note">Solid line: the layer. Dotted line: the wave a sin x + b cos x that fits the points best. Dashed: one step of gradient descent, at the rate under More. It is straight at every rate.</p>`;
      const numbers = [
        ["layer to best wave", m.nearer.toFixed(2), "their mean distance (root mean square)"],
        ["straight line to best wave", m.farther.toFixed(2), `one step, at rate ${Number(state.rate).toFixed(2)}`],
        ...(scaled ? [["the layer’s answers grew", `${m.grown.toFixed(1)} times`, `the labels and the line: ${state.scale} times`]] : []),
      ];
      return { numbers, view, said, ...m };
    },

    tasks: [
      { text: "Multiply the labels until the layer is farther from the wave than the straight line is.",
        seen: [(s, m) => s.scale > 1 && m.nearer > m.farther],
        found: (s, m) => `at ${s.scale} times the labels the layer is ${m.nearer.toFixed(2)} from the wave, the straight line ${m.farther.toFixed(2)}: in training no wave was higher than .5.` },
      { text: "Move one point, so that the layer leaves the wave that fits the points best by more than 0.2.",
        seen: [(s, m) => s.scale === 1 && m.nearer > 0.2 && X.filter((_, i) => ["x", "y"].some((name) => s[name + (i + 1)] !== first[name + (i + 1)])).length === 1],
        found: (s, m) => `one point takes it ${m.nearer.toFixed(2)} from the wave.` },
      { text: "Halve the labels (0.5 times). The answers of a step are halved, too. And those of the layer?",
        seen: [(s) => Number(s.scale) === 0.5],
        found: (s, m) => `its answers become ${m.grown.toFixed(2)} times as large.` },
    ],
  });
}
