// Figure 3: drag the points (notebook 03). What a trained network predicts over the plane after a
// few pairs (x, y), beside least squares, ridge regression or a step of gradient descent.
{
  const EDGE = 3, CELLS = 24, SIZE = 10, MOST = 4; // the plane reaches from -3 to 3; pairs at most
  const START = { x: [1.2, -0.9, -1.6, 0.7], z: [0.8, 1.5, -0.7, -1.4], y: [0.5, 1, -0.45, -0.95] };
  const FAR = { a2: START.x[1], b2: START.z[1] }, CLOSE = { a2: 1.2, b2: 1 }; // places of point 2
  const round = (value) => Math.round(value * 20) / 20;
  const bounded = (value, most) => Math.max(-most, Math.min(most, round(value)));
  const RATES = Array.from({ length: 100 }, (_, i) => (i + 1) / 20); // of a step, and penalties
  const signed = (value) => value.toFixed(2).replace("-", "−");

  // Where the network is asked: the middle of each cell, and draws as it was trained on
  const grid = new Float64Array(2 * CELLS * CELLS);
  for (let i = 0; i < CELLS * CELLS; i++) {
    grid[2 * i] = ((i % CELLS) + 0.5) * ((2 * EDGE) / CELLS) - EDGE;
    grid[2 * i + 1] = EDGE - (Math.floor(i / CELLS) + 0.5) * ((2 * EDGE) / CELLS);
  }
  const drawn = Float64Array.from({ length: 400 }, Live.normal(Live.random(3)));

  const first = { count: 2, point: 2, other: "ols", penalty: 0.1, rate: 0.5, scale: 1 };
  START.x.forEach((x, i) => Object.assign(first, { [`a${i + 1}`]: x, [`b${i + 1}`]: START.z[i], [`y${i + 1}`]: START.y[i] }));
  // Whether nothing that the planes depend on has changed, but that point 2 lies close to point 1
  const isClose = (state) => Object.entries({ ...first, ...CLOSE }).every(([name, value]) =>
    !/^[aby][12]$|count|scale/.test(name) || state[name] === value);

  const linear = (w, at) => Float64Array.from({ length: at.length / 2 }, (_, i) => w[0] * at[2 * i] + w[1] * at[2 * i + 1]);
  const square = (a) => a.reduce((sum, v) => sum + v * v, 0);
  // The relative error of an algorithm's answers as those of the network, in words
  const error = (told, other) => square(told.map((v, i) => v - other[i])) / square(told);
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  // The strongest shade is least squares at the start, so that a dragged point changes no others
  const pairsOf = (state, n = state.count) => [
    Float64Array.from({ length: 2 * n }, (_, i) => state[`${i % 2 ? "b" : "a"}${(i >> 1) + 1}`]),
    Float64Array.from({ length: n }, (_, i) => state[`y${i + 1}`] * state.scale)];
  const most = Math.max(...linear(Algorithms.ols(...pairsOf(first)), grid).map(Math.abs));

  function measured(state, [part]) {
    const net = (part.net ??= Transformer.network(part)), [xs, ys] = pairsOf(state);
    const weights = { ols: Algorithms.ols(xs, ys), ridge: Algorithms.ridge(xs, ys, state.penalty), step: Algorithms.step(xs, ys, state.rate) };
    const told = Regressor.field(net, xs, ys, drawn), answers = (w) => linear(w, drawn);
    const away = Object.fromEntries(Object.entries(weights).map(([name, w]) => [name, error(told, answers(w))]));
    const nearest = (algorithm) => Math.min(...RATES.map((rate) => error(told, answers(algorithm(xs, ys, rate)))));
    const best = { ridge: nearest(Algorithms.ridge), step: nearest(Algorithms.step) };
    // Maps per unit of the labels, so that a change of their scale alone moves nothing that is linear
    const field = Regressor.field(net, xs, ys, grid).map((v) => v / state.scale);
    const other = linear(weights[state.other], grid).map((v) => v / state.scale);
    // How many times larger the network's answers are than with the usual labels
    const usual = state.scale === 1 ? told : Regressor.field(net, xs, ys.map((y) => y / state.scale), drawn);
    const grown = Math.sqrt(square(told) / square(usual));
    const steep = { network: Math.hypot(...Algorithms.ols(drawn, told)), other: Math.hypot(...weights[state.other]), ols: Math.hypot(...weights.ols) };
    const misfit = square(linear(weights.ols, xs).map((v, i) => v - ys[i])) / square(ys); // of the best plane
    return { field, other, away, best, grown, steep, misfit };
  }

  // A field over the plane: blue above 0, brown below, in ten shades each
  function plane(title, values, state, most) {
    const shades = new Map(), whole = CELLS * SIZE;
    values.forEach((value, i) => {
      const shade = Math.max(-10, Math.min(10, Math.round((10 * value) / most)));
      const path = shades.get(shade) ?? "";
      shades.set(shade, `${path}M${(i % CELLS) * SIZE} ${Math.floor(i / CELLS) * SIZE}h${SIZE}v${SIZE}h-${SIZE}z`);
    });
    const cells = [...shades].filter(([shade]) => shade).map(([shade, d]) => `<path class="live-${shade > 0 ? "a" : "b"}" opacity="${(Math.abs(shade) * 0.085).toFixed(2)}" d="${d}"/>`).join("");
    const place = (value, sign) => (((sign * value + EDGE) / (2 * EDGE)) * whole).toFixed(1);
    const points = Array.from({ length: state.count }, (_, i) => {
      const x = place(state[`a${i + 1}`], 1), y = place(state[`b${i + 1}`], -1), on = state.point === i + 1;
      const below = Array.from({ length: state.count }, (_, k) => place(state[`b${k + 1}`], -1) - y)
        .some((up, k) => k !== i && up < 0 && up > -30 && Math.abs(place(state[`a${k + 1}`], 1) - x) < 50); // of a point just above
      return `<g data-drag="${i + 1}"><circle class="live-grip" cx="${x}" cy="${y}" r="22"/><circle class="live-dot${on ? " live-chosen" : ""}" cx="${x}" cy="${y}" r="6"/>` +
        `<text x="${Number(x) + (x > whole - 50 ? -10 : 9)}" y="${Number(y) + (below ? 18 : -7)}" text-anchor="${x > whole - 50 ? "end" : "start"}">${signed(state[`y${i + 1}`])}</text></g>`;
    }).join("");
    return `<div><p class="live-head">${title}</p><svg data-plane="" viewBox="0 0 ${whole} ${whole}" role="img" aria-label="${title}: a plane of x, from −3 to 3 each way, shaded by the prediction.">` +
      `<rect class="live-ground" width="${whole}" height="${whole}"/>${cells}<path class="live-axis" d="M${whole / 2} 0v${whole}M0 ${whole / 2}h${whole}"/>${points}</svg></div>`;
  }

  const NAMES = { ols: "least squares", ridge: "ridge regression", step: "one step" };
  Live.figure("points", {
    title: "Drag the points: a trained network and the algorithms it is compared with",
    first,
    needs: () => ["regression-d2"],
    bet: {
      asks: "If we move the two points close together, and they keep their labels, least squares gets about four times as steep. And the network?",
      choices: ["nearly as steep as least squares (more than three quarters)", "about half as steep (a third to three quarters)", "much flatter (less than a third)"],
      deed: "Now press “Close together”.",
      before: true,
      answer(s, m) {
        if (!isClose(s)) return null;
        const share = m.steep.network / m.steep.ols;
        return [share < 1 / 3 ? 2 : share < 3 / 4 ? 1 : 0, `Least squares now rises by ${m.steep.ols.toFixed(1)} a unit, the network by only ${m.steep.network.toFixed(1)}, hardly more than before. Next, compare the network with ridge regression and with one step.`];
      },
    },

    fields(state) {
      const i = state.point, coordinate = (name, label, most) => ({ kind: "range", more: true, name: `${name}${i}`, label: `Point ${i}: ${label}`, min: -most, max: most, step: 0.05, said: signed });
      return [
        { kind: "actions", options: [["Close together", (s) => ({ ...s, ...CLOSE })], ["Far apart", (s) => ({ ...s, ...FAR })]] },
        { kind: "radios", name: "other", label: "Compare with", options: Object.entries(NAMES) },
        { kind: "range", more: true, name: "scale", label: "Labels times", min: 1, max: 20, said: String },
        { kind: "range", more: true, name: "count", label: "Pairs", min: 1, max: MOST, said: String },
        { kind: "range", more: state.other !== "ridge", name: "penalty", label: "Ridge regression: penalty λ on large slopes", min: 0.05, max: 5, step: 0.05, said: (v) => Number(v).toFixed(2) },
        { kind: "range", more: state.other !== "step", name: "rate", label: "One step: rate", min: 0.05, max: 2, step: 0.05, said: (v) => Number(v).toFixed(2) },
        { kind: "radios", more: true, name: "point", label: "Point to move (or drag it)", options: Array.from({ length: state.count }, (_, k) => [String(k + 1), `${k + 1}`]) },
        coordinate("a", "x, across", EDGE), coordinate("b", "x, up", EDGE), coordinate("y", "label y", 4),
      ];
    },

    change: (state) => ({ ...state, point: Math.min(Number(state.point), state.count) }),

    drag: (state, id, x, y) => ({ ...state, point: Number(id),
      [`a${id}`]: bounded((x / (CELLS * SIZE)) * 2 * EDGE - EDGE, EDGE), [`b${id}`]: bounded(EDGE - (y / (CELLS * SIZE)) * 2 * EDGE, EDGE) }),

    draw(state, parts) {
      const m = measured(state, parts), name = NAMES[state.other];
      const rows = Object.entries(m.away).sort((a, b) => a[1] - b[1]);
      const settings = { ols: "", ridge: `, at λ = ${Number(state.penalty).toFixed(2)}`, step: `, at the rate ${Number(state.rate).toFixed(2)}` };
      const more = `<p class="live-note"><b>Relative errors</b> (mean squared difference from the network's answers, over their mean square): ${rows.map(([key, value]) => `${NAMES[key]}${settings[key]}: ${percent(value)}`).join("; ")}. With the best λ for these very pairs, ridge regression has ${percent(m.best.ridge)}; with the best rate, one step has ${percent(m.best.step)}.</p>`;
      const surprises = [
        m.misfit > 0.01 && "No plane through 0 passes through all labels now: a point that moves keeps its label. In training, a plane always did.",
        m.grown < 0.8 * state.scale && `The labels have grown ${state.scale} times, and the answers of all three rules with them. The network's answers have grown only ${m.grown.toFixed(1)} times. So none of the three is the network's rule: the one with the smallest error may only have the smallest answers.`,
      ].filter(Boolean).map((text) => `<p class="live-note"><b>${text}</b></p>`).join("");
      const scale = Array.from({ length: 21 }, (_, i) => `<rect class="live-${i > 10 ? "a" : "b"}" opacity="${(Math.abs(i - 10) * 0.085).toFixed(2)}" x="${i * 8}" width="8" height="10"/>`).join("");
      const key = `<svg class="live-scale" viewBox="0 0 168 26" role="img" aria-label="Colours: brown is minus ${most.toFixed(1)} or less, no colour 0, blue ${most.toFixed(1)} or more."><rect class="live-ground" width="168" height="10"/>${scale}` +
        [[0, "start", `−${most.toFixed(1)}`], [84, "middle", "0"], [168, "end", most.toFixed(1)]].map(([x, anchor, text]) => `<text x="${x}" y="23" text-anchor="${anchor}">${text}</text>`).join("") + "</svg>";
      const view = `<div class="live-row-of live-two">${plane("The network", m.field, state, most)}${plane(name[0].toUpperCase() + name.slice(1), m.other, state, most)}</div>` +
        `${key}<p class="live-note">Circles: the points, with their labels.${state.scale === 1 ? "" : ` <b>All labels and maps are shown divided by ${state.scale}</b>: a rule that grows with the labels looks the same.`}</p>${surprises}`;
      const numbers = [["steepness, the network", m.steep.network.toFixed(2), "rise per unit, of the plane nearest to its answers"],
        [`steepness, ${name}`, m.steep.other.toFixed(2), `rise per unit of its plane${settings[state.other]}`]];
      const said = `Steepness: the network ${m.steep.network.toFixed(2)}, ${name} ${m.steep.other.toFixed(2)}. Relative errors: ${rows.map(([key, value]) => `${NAMES[key]} ${percent(value)}`).join(", ")}.`;
      return { numbers, view, more, said, ...m };
    },

    tasks: [
      { text: "Can the network not be steep at all? Leave the points far apart, and raise “Labels times” until both planes rise by more than 3 a unit.",
        seen: [(s, m) => s.other === "ols" && Math.min(m.steep.network, m.steep.other) > 3 && m.away.ols < 0.05],
        found: (s, m) => `with labels ${s.scale} times as large both rise by about ${m.steep.other.toFixed(1)}. The network avoids steep slopes only where they hang on a small difference between points.` },
      { text: "Where does the network leave every rule? Raise “Labels times” further, until ridge regression “with the best λ” has a relative error above 10 %.",
        seen: [(s, m) => m.grown < 0.8 * s.scale && m.away.ols > 0.3 && m.best.ridge > 0.1],
        found: (s, m) => `at ${s.scale} times the labels least squares has a relative error of ${percent(m.away.ols)}, and ridge regression at its best penalty one of ${percent(m.best.ridge)}. The network's answers have grown only ${m.grown.toFixed(1)} times.` },
      { text: "Which rule is nearest when the points are close together? “Compare with” ridge regression, and with one step.",
        seen: [(s, m) => s.other === "ridge" && m.away.ols > 1 && m.away.ridge < 0.1, (s, m) => s.other === "step" && m.away.ols > 1],
        found: (s, m) => `the relative error is now ${percent(m.away.ridge)} for ridge regression, ${percent(m.away.step)} for one step, and ${percent(m.away.ols)} for least squares.` },
    ],
  });
}
