// Figure 4, first part: one layer is one step (notebook 04). The loss of a step of descent from 0
// over its rate, in closed form, and where the layer `lsa-1` stands in training.
{
  const DIM = 10, PAIRS = 10, SQUARE = 1 / 12, FOURTH = 1 / 80; // x uniform in ±1/2: its moments
  const A2 = (FOURTH + (DIM - 1) * SQUARE ** 2) / PAIRS + ((PAIRS - 1) / PAIRS) * SQUARE ** 2;
  const BEST = SQUARE / A2; // the rate of the lowest loss
  const lossOf = (rate) => 0.5 * DIM * SQUARE * (1 - 2 * rate * SQUARE + rate ** 2 * A2);
  const CONTEXTS = 600, MOST = 13;

  // Contexts as in training, and the answers of a step of rate 1 to them
  let contexts;
  function draw() {
    const uniform = Live.random(4), normal = Live.normal(uniform);
    return Array.from({ length: CONTEXTS }, () => {
      const xs = Float64Array.from({ length: (PAIRS + 1) * DIM }, () => uniform() - 0.5);
      const w = Float64Array.from({ length: DIM }, normal), at = (weights, i) => weights.reduce((sum, v, k) => sum + v * xs[i * DIM + k], 0);
      const ys = Float64Array.from({ length: PAIRS }, (_, i) => at(w, i));
      return { xs, ys, truth: at(w, PAIRS), step: at(Algorithms.step(xs.subarray(0, PAIRS * DIM), ys, 1), PAIRS) };
    });
  }

  // The rate that a layer takes, the mean of its matrix's diagonal, and its loss: that of a step of
  // this rate in closed form, plus how much more the layer loses on the same contexts
  function placed(net) {
    if (net.place) return net.place;
    contexts ??= draw();
    const matrix = Lsa.stepMatrix(net, PAIRS);
    const rate = Array.from({ length: DIM }, (_, k) => matrix[k * (DIM + 1)]).reduce((a, b) => a + b) / DIM;
    const more = contexts.reduce((sum, { xs, ys, truth, step }) =>
      sum + (Lsa.answer(net, xs, ys) - truth) ** 2 - (rate * step - truth) ** 2, 0) / (2 * CONTEXTS);
    return (net.place = { rate, loss: lossOf(rate) + more });
  }

  const rounded = (rate) => (Math.abs(rate) < 0.005 ? 0 : rate).toFixed(2); // and no −0.00
  const left = 46, width = 330, top = 24, height = 150, ceiling = 0.5;
  const x = (rate) => left + (rate / MOST) * width, y = (loss) => top + (1 - loss / ceiling) * height;

  // The task, for one number in x: pairs on a line, the query, and the line that a step of a rate
  // reaches from 0, on average: its slope is that of the pairs times rate * SQUARE
  function task(rate) {
    const across = (v) => 211 + 300 * v, up = (v) => 48 - 72 * v, ask = 0.38, slope = rate * SQUARE;
    const line = (k, kind) => `<path class="${kind}" d="M${across(-0.5)} ${up(-0.5 * k)}L${across(0.5)} ${up(0.5 * k)}"/>`;
    const pairs = [-0.46, -0.37, -0.27, -0.2, -0.09, 0.04, 0.12, 0.19, 0.27, 0.46]
      .map((v) => `<circle class="live-grey" cx="${across(v)}" cy="${up(v)}" r="3.5"/>`).join("");
    return `<svg class="live-wide" viewBox="0 6 390 82" role="img" aria-label="Ten points on a rising line, the place of the query, and the line of a gradient step, with ${slope.toFixed(2)} of its slope.">` +
      `${line(0, "live-axis")}${line(1, "live-axis")}${line(slope, "live-line live-b")}${pairs}` +
      `<path class="live-axis" stroke-dasharray="3 3" d="M${across(ask)} ${up(ask)}V${up(0)}"/><circle class="live-b" cx="${across(ask)}" cy="${up(slope * ask).toFixed(1)}" r="5"/>` +
      `<text x="61" y="28">ten pairs (x, y)</text><text x="${across(ask)}" y="${up(0) + 16}" text-anchor="middle">x without y</text></svg>`;
  }
  Live.figure("step", {
    title: "The loss of a gradient step over its rate, and a layer in training",
    beside: true,
    first: { rate: 0, at: 0 }, // weights of ten training steps (book/_ext/live.py)
    needs: () => ["lsa-1"],
    bet: {
      asks: "Where will the square be at the end of training?",
      choices: ["at the lowest point of the curve", "above the curve", "below the curve: better than every gradient step"],
      before: true,
      deed: "Now move “How long it has trained” to the end.",
      answer: (s, m) => (Number(s.at) < 9 ? null
        : [m.last.loss > m.best + 0.05 ? 1 : m.last.loss < m.best - 0.05 ? 2 : 0, `At the end, the layer has loss ${m.last.loss.toFixed(3)}, and the best gradient step has ${m.best.toFixed(3)}. On the way, the layer was above the curve: there, it mixed the ten numbers of x, and a gradient step does not. (Even the best step goes only half the way: ten points are few for ten numbers in x, and a longer step often overshoots.)`]),
    },
    fields: () => [
      { kind: "range", name: "at", label: "How long it has trained", min: 0, max: 9, said: (i) => `${[0, 30, 40, 45, 50, 55, 60, 80, 100, "the end, after 3000"][i]} training steps` },
      { kind: "range", more: true, name: "rate", label: "Your step of gradient descent: its rate", min: 0, max: MOST, step: 0.1, said: (v) => Number(v).toFixed(1) },
    ],

    draw(state, nets) {
      const mine = lossOf(state.rate), layer = placed(nets[state.at]), last = placed(nets[9]);
      const curve = Array.from({ length: 66 }, (_, i) => `${i ? "L" : "M"}${x((i * MOST) / 65).toFixed(1)} ${y(lossOf((i * MOST) / 65)).toFixed(1)}`).join("");
      const trail = nets.slice(0, Number(state.at)).map((net) => `<circle class="live-grey" cx="${x(placed(net).rate).toFixed(1)}" cy="${y(placed(net).loss).toFixed(1)}" r="2.5"/>`).join("");
      const ticks = [0, 2, 4, 6, 8, 10, 12].map((r) => `<text x="${x(r)}" y="${top + height + 18}" text-anchor="middle">${r}</text>`).join("") +
        [0, 0.1, 0.2, 0.3, 0.4, 0.5].map((v) => `<text x="${left - 6}" y="${y(v) + 4}" text-anchor="end">${v.toFixed(1)}</text>`).join("");
      const moved = Number(state.rate) > 0, same = lossOf(layer.rate); // of a step with the layer's rate
      const said = `The layer after ${nets[state.at].step} training steps acts like rate ${rounded(layer.rate)} and has loss ${layer.loss.toFixed(3)}; a gradient step of that rate has ${same.toFixed(3)}.${moved ? ` Your step at rate ${Number(state.rate).toFixed(1)} has loss ${mine.toFixed(3)}.` : ""}`;
      const view = `<p class="live-head">The task: which y belongs to the last x?</p>${task(layer.rate)}` +
        `<p class="live-note">Dashed: how far a gradient step turns the flat line, at the rate that the layer has now.</p>` +
        `<p class="live-head">How wrong is a gradient step, and how wrong is the layer?</p><svg class="live-wide" viewBox="0 0 390 ${top + height + 40}" role="img" aria-label="${said}">` +
        `<path class="live-axis" d="M${left} ${top}v${height}h${width}"/>${ticks}<text x="${left + width / 2}" y="${top + height + 36}" text-anchor="middle">rate of the gradient step: how far it turns the line</text><text x="6" y="12">how wrong (loss)</text>` +
        `<path class="live-line live-a" d="${curve}"/><text class="live-a" x="${left + width}" y="${y(0.14)}" text-anchor="end">one gradient step</text>${trail}` +
        `${moved ? `<circle class="live-a" cx="${x(state.rate)}" cy="${y(mine)}" r="7"/>` : ""}<rect class="live-b" x="${(x(layer.rate) - 6).toFixed(1)}" y="${(y(layer.loss) - 6).toFixed(1)}" width="12" height="12"/><text class="live-b" x="${(x(layer.rate) + 2).toFixed(1)}" y="${(y(layer.loss) - 12).toFixed(1)}">the layer</text></svg>` +
        `<p class="live-note">${trail && "Grey dots: the layer earlier."}${moved ? " The disc: your step." : ""}</p>`;
      const more = `<p class="live-note">The layer’s rate is the mean of ten weights: each multiplies a number of one x by the number in the same place of another. The dashed line stands where a step ends on average over prompts.</p>`;
      const numbers = [
        ["loss of the layer", layer.loss.toFixed(3), "the square"],
        ["loss of a gradient step", same.toFixed(3), `the curve, at rate ${rounded(layer.rate)}`],
        ...(moved ? [["loss of your step", mine.toFixed(3), `at rate ${Number(state.rate).toFixed(1)}`]] : []),
      ];
      return { numbers, view, more, said, mine, layer, last, best: lossOf(BEST) };
    },

    tasks: [
      { text: "Bring your gradient step to within 0.001 of the lowest loss, and the layer to the end of its training. Do they meet?",
        seen: [(s, m) => m.mine - m.best < 0.001, (s) => Number(s.at) === 9],
        found: (s, m) => `the layer ends at loss ${m.last.loss.toFixed(3)}, acting like rate ${rounded(m.last.rate)}; the best step, at ${BEST.toFixed(2)}, has ${m.best.toFixed(3)}.` },
      { text: "Find another rate than 0 at which a gradient step is no better than answering 0 (loss 0.417), but no worse by 0.01.",
        seen: [(s, m) => s.rate > 1 && m.mine >= lossOf(0) && m.mine < lossOf(0) + 0.01],
        found: (s, m) => `at rate ${Number(s.rate).toFixed(1)}, twice the best one, the loss is ${m.mine.toFixed(3)}: the step goes as far beyond the minimum as the start is before it.` },
      { text: "When has the layer learnt the gradient step? Find the earliest point whose loss is within a tenth of the best step's, and look at the one before.",
        seen: [8, 7].map((at) => (s, m) => Number(s.at) === at && m.layer.loss < 1.1 * m.best === (at === 8)),
        found: () => "after 100 training steps, not yet after 80." },
    ],
  });
}
