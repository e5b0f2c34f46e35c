// Figure 6: cut the graph (notebook 06). Every edge between the parts of the guide model carries what
// its writer wrote, or what it wrote in a run whose first copy was another draw; how much of the
// copying is left?
{
  const BOS = 121, MOST = 80, LISTED = 12, DRAWS = 10, WHOLE = "all";
  // The strongest edges, by path patching on sixteen sequences that are not shown here
  const RANKED = (
    "embed>v 0.2, embed>v 0.0, 1.2>logits, 0.2>k 1.2, 1.0>logits, 1.3>logits, embed>v 1.2, 0.2>k 1.0, " +
    "1.1>logits, 0.2>k 1.3, embed>mlp_in 0, embed>v 1.0, 0.2>k 1.1, embed>v 1.3, embed>v 1.1, 0.0>k 1.2, " +
    "mlp 1>logits, embed>k 0.0, 0.0>k 1.3, 0.2>mlp_in 0, 0.0>k 1.1, 0.0>k 1.0, embed>q 0.2, embed>q 0.3, " +
    "mlp 3>logits, embed>v 0.3, mlp 0>v 1.2, 3.1>mlp_in 3, mlp 0>v 1.0, 1.2>mlp_in 1, embed>k 0.2, " +
    "mlp 0>v 1.3, mlp 0>v 1.1, 1.3>mlp_in 1, 1.1>mlp_in 1, 0.2>q 1.2, 2.0>v 3.0, 1.0>mlp_in 1, mlp 2>logits, " +
    "2.2>v 3.0, embed>q 0.0, 0.3>k 1.2, embed>q 0.1, 2.2>v 3.3, 0.0>mlp_in 0, 2.0>v 3.3, embed>k 0.3, " +
    "mlp 0>k 1.0, 0.0>q 1.2, 3.2>mlp_in 3, 2.3>mlp_in 3, 0.1>k 1.2, 2.3>logits, 2.0>logits, 2.1>v 3.0, " +
    "mlp 0>k 1.2, 0.1>k 1.3, 0.0>q 1.3, 3.3>logits, 1.1>mlp_in 3, 0.2>v 1.2, 0.1>mlp_in 0, 1.1>v 3.0, " +
    "0.3>k 1.0, 3.1>logits, embed>k 1.0, 0.0>v 1.1, 0.0>q 1.1, 0.3>v 1.2, 1.0>v 3.0, 1.2>v 3.0, " +
    "1.0>mlp_in 3, 1.2>mlp_in 2, embed>k 0.1, embed>k 1.2, 0.1>v 1.3, 2.2>logits, 1.3>v 3.0, 0.2>q 1.0, " +
    "embed>k 1.1"
  ).split(", ");
  const FIRST = [[114, 3, 59, 64, 49, 100, 11, 6, 67, 41, 98, 103], [107, 47, 120, 34, 27, 94, 40, 111, 54, 118, 69, 12], [45, 24, 93, 91, 34, 63, 0, 78, 39, 31, 109, 79], [6, 45, 49, 99, 47, 29, 89, 12, 54, 107, 21, 51]];
  const OTHER = [[86, 64, 62, 13, 76, 30, 57, 87, 75, 50, 100, 3], [19, 61, 95, 14, 4, 100, 87, 107, 103, 49, 29, 37], [107, 28, 74, 63, 2, 91, 8, 66, 76, 109, 36, 30], [6, 2, 120, 29, 58, 106, 82, 68, 15, 88, 87, 17]];
  const layerOf = (name) => (name === "embed" ? -1 : name === "logits" ? 9 : Number(name.match(/(\d)(\.\d)?$/)[1]) + (name.startsWith("mlp") ? 0.5 : 0));
  const block = (edge) => edge.split(">").map(layerOf).join(" ");
  const words = (edge) => edge.replace(">", " → ").replace("mlp_in", "mlp").replace("embed", "tokens").replace("logits", "prediction");
  const partOf = (reader) => reader.replace(/^[qkv] /, "").replace("mlp_in", "mlp");

  // Mean log-probability of the second copy's tokens but the first, in nats
  function score(run, tokens) {
    const n = (tokens.length - 1) / 2;
    let sum = 0;
    for (let at = n + 1; at < 2 * n; at++) sum += Gpt2.nextToken(run, at)[tokens[at + 1]];
    return sum / (n - 1);
  }

  // As many edges between the same layers, drawn without replacement
  function alike(kept, edges, uniform) {
    const counts = {};
    for (const edge of kept) counts[block(edge)] = (counts[block(edge)] ?? 0) + 1;
    return Live.shuffled(edges, uniform).filter((edge) => counts[block(edge)]-- > 0);
  }

  // Whether an edge is on no path from the tokens to the prediction: then it changes nothing
  function deadEnds(kept) {
    const pairs = kept.map((edge) => [edge.split(">")[0], partOf(edge.split(">")[1])]);
    const from = (start, steps) => {
      const found = new Set([start]);
      for (let size = 0; size < found.size;) {
        size = found.size;
        for (const [one, next] of steps) if (found.has(one)) found.add(next);
      }
      return found;
    };
    const fed = from("embed", pairs), heard = from("logits", pairs.map(([u, v]) => [v, u]));
    return (u, part) => !fed.has(u) || !heard.has(part);
  }

  const seen = {}; // by the sequence: both runs, and the graph
  function runs(net, which) {
    return (seen[which] ??= (() => {
      const clean = [BOS, ...FIRST[which], ...FIRST[which]], corrupt = [BOS, ...OTHER[which], ...FIRST[which]];
      const [good, bad] = [clean, corrupt].map((tokens) => Circuit.forward(net, tokens));
      return { clean, other: bad.writes, ends: [score(good, clean), score(bad, clean)], ...Circuit.graph(net) };
    })());
  }

  function measured(state, [part]) {
    const net = (part.net ??= Transformer.network(part)), run = runs(net, Number(state.sequence) - 1);
    const faith = (kept) => {
      const cut = new Set(run.edges.filter((edge) => !kept.has(edge)));
      return (score(Circuit.forward(net, run.clean, cut, run.other), run.clean) - run.ends[1]) / (run.ends[0] - run.ends[1]);
    };
    const strongest = state.keep === WHOLE ? run.edges : RANKED.slice(0, state.size);
    const of = (draw) => alike(strongest, run.edges, Live.random(100 * state.size + draw));
    const off = new Set(String(state.off).split(" ").filter(Boolean).map((i) => RANKED[i - 1]));
    const kept = (state.keep === "random" ? of(state.draw) : strongest).filter((edge) => !off.has(edge));
    const control = state.keep === WHOLE ? null : Array.from({ length: DRAWS }, (_, i) => faith(new Set(of(i + 1))));
    const cost = kept.includes(state.edge) ? faith(new Set(kept.filter((edge) => edge !== state.edge))) : null; // what is left
    const keeps = (size) => faith(new Set(RANKED.slice(0, size)));
    return { net, kept, off, all: run.edges.length, share: faith(new Set(kept)), control, cost, keeps };
  }

  const mean = (values) => values.reduce((a, b) => a + b) / values.length;
  const percent = (value) => `${Math.round(100 * value)}\u00a0%`.replace("-", "−");
  const key = (channel, what) => `<span class="live-key"><svg viewBox="0 0 26 8" aria-hidden="true"><path class="live-edge live-${channel}" d="M0 4h26"/></svg> ${what}</span>`;
  // Tokens and prediction are bars as wide as the picture. What passes a layer runs straight up, in a
  // lane beside its parts
  const STEP = 88, RISE = 72, LEFT = 46, TOP = 30, TINT = { q: "a", k: "b", v: "c" };
  function picture(m, said, { focus, edge: chosen }) {
    const layers = m.net.blocks.length, { heads } = m.net, width = LEFT + STEP * heads + 40, height = TOP + RISE * (layers + 1);
    const row = (layer) => height - RISE * (layer + 1);
    const place = (name) => {
      const [layer, head] = name.match(/[\d.]+$/)[0].split(".");
      return head === undefined ? [LEFT + heads * STEP, row(Number(layer)) - 16] : [LEFT + head * STEP, row(Number(layer))];
    };
    const lift = (x, y, lane) => `M${x} ${y - 11}C${x} ${y - 32} ${lane} ${y - 26} ${lane} ${y - 44}`;
    const land = (lane, x, y) => `V${y + 44}C${lane} ${y + 26} ${x} ${y + 32} ${x} ${y + 11}`;
    const used = new Set(), isIdle = deadEnds(m.kept);
    const strong = RANKED.filter((edge) => m.kept.includes(edge)); // these are drawn where not all are
    const lines = [...new Set([...strong, ...m.kept])].slice(0, 160).map((edge) => {
      const [u, v] = edge.split(">"), channel = v === "logits" ? undefined : TINT[v[0]], part = partOf(v);
      used.add(u).add(part);
      const port = { q: -11, v: 11 }[channel && v[0]] ?? 0; // of a head, where the line comes in
      let d;
      if (u === "embed" && v === "logits") d = `M${width - 4} ${height - 24}V${TOP - 6}`;
      else if (u === "embed") {
        const [x, y] = place(part), lane = layerOf(part) < 1 ? x + port : x + (part.startsWith("mlp") ? 30 : STEP / 2 + port / 2);
        d = `M${lane} ${height - 24}${land(lane, x + port, y)}`;
      } else {
        const [x, y] = place(u), aside = x + (u.startsWith("mlp") ? 30 : STEP / 2);
        const [to, end] = v === "logits" ? [] : place(part), up = Math.floor(layerOf(v)) - Math.floor(layerOf(u));
        if (v === "logits") d = `${lift(x, y, layerOf(u) >= layers - 1 ? x : aside)}V${TOP - 6}`;
        else if (up > 1) d = lift(x, y, aside - 5) + land(aside - 5, to + port, end);
        else if (up) d = `M${x} ${y - 11}C${x} ${y - 38} ${to + port} ${end + 38} ${to + port} ${end + 11}`;
        else d = `M${x} ${y - 11}C${x} ${y - 34} ${to - 76} ${end - 8} ${to - 26} ${end}`; // the MLP of its own layer
      }
      const pale = focus && ![u, part].includes(focus), is = edge === chosen;
      const style = pale ? "opacity: 0.12" : is ? "stroke-width: 5" : isIdle(u, part) ? "opacity: 0.3" : "";
      const touched = pale || !RANKED.includes(edge) ? "" : `<path class="live-hit-line" data-pick='{"edge":"${is ? "" : edge.replace(">", "&gt;")}"}' d="${d}"/>`;
      return `<path class="live-edge live-${channel ?? "grey"}"${style && ` style="${style}"`} d="${d}"/>${touched}`;
    }).join("");
    const names = m.net.blocks.flatMap((_, layer) => [...Array.from({ length: heads }, (_, h) => `${layer}.${h}`), `mlp ${layer}`]);
    const nodes = names.map((name) => {
      const [x, y] = place(name), half = name.length > 3 ? 26 : 19;
      return `<g data-pick='{"focus":"${focus === name ? "" : name}"}'${used.has(name) ? "" : ` opacity="0.45"`}><rect class="live-part${focus === name ? " live-chosen" : ""}" x="${x - half}" y="${y - 11}" width="${2 * half}" height="22" rx="5"/>` +
        `<text x="${x}" y="${y + 5}" text-anchor="middle">${name}</text><rect class="live-hit" x="${x - STEP / 2}" y="${y - 20}" width="${STEP - 2}" height="40"/></g>`;
    }).join("");
    const into = [["queries,", "a", "q "], ["keys,", "b", "k "], ["values,", "c", "v "], ["an MLP or the prediction.", "grey", ""]]
      .filter(([, , start]) => m.kept.some((edge) => edge.split(">")[1].startsWith(start)) || !start);
    const bars = [["the tokens", height - 24], ["the prediction: what it says comes next", TOP - 28]].map(([text, y]) =>
      `<rect class="live-part" x="2" y="${y}" width="${width - 4}" height="22" rx="5"/><text x="${width / 2}" y="${y + 16}" text-anchor="middle">${text}</text>`).join("");
    return `<svg class="live-wide" viewBox="0 0 ${width} ${height}" role="img" aria-label="${said}">${lines}${bars}${nodes}</svg>` +
      `<p class="live-note">${m.cost === null ? "" : `<b>If we cut ${words(chosen)} as well, ${percent(m.cost)} of the copying is left, not ${percent(m.share)}.</b><br>`}` +
      `Lines lead into ${into.map(([what, channel]) => key(channel, what)).join(" ")} 1.3 is head 3 of layer 1. A pale line is a dead end: no full path from the tokens to the prediction leads through it. Touch a part to see its lines alone, or one of the strongest lines to see its cost.${m.kept.length > 160 ? " (160 lines are drawn.)" : ""}</p>`;
  }

  Live.figure("edges", {
    title: "Cut connections: which ones carry the copy?",
    beside: true,
    first: { keep: "strongest", size: 7, off: "", sequence: 1, draw: 1, focus: "", edge: "" },
    needs: () => ["anchors-3"],

    change: (s) => (s.keep === "strongest" && RANKED.indexOf(s.edge) >= s.size ? { ...s, edge: "" } : s),

    bet: {
      asks: "The network has 479 connections, or edges. We keep the strongest ones and cut all others. How many must we keep, so that nine tenths of the copying are left?",
      choices: ["about 12", "about 30", "about 70"],
      deed: "Now move “How many” to the right, until nine tenths are left.",
      answer(s, m) {
        if (s.keep !== "strongest" || s.off || m.share < 0.9) return null;
        return [1, `12 edges keep ${percent(m.keeps(12))} of the copying, 30 keep ${percent(m.keeps(30))}, and 70 keep ${percent(m.keeps(70))}.`];
      },
    },

    fields(state) {
      const size = { kind: "range", name: "size", label: "How many", min: 0, max: MOST, said: String };
      const draw = { kind: "range", name: "draw", label: "Which random draw", min: 1, max: 20, said: String };
      return [
        { kind: "radios", name: "keep", label: "Keep", options: [["strongest", "the strongest edges"], ["random", "random edges, same layers"], [WHOLE, "all edges"]] },
        ...(state.keep === WHOLE ? [] : [size]), ...(state.keep === "random" ? [draw] : []),
        { kind: "range", more: true, name: "sequence", label: "Which row of tokens", min: 1, max: FIRST.length, said: String },
        { kind: "select", more: true, name: "focus", label: "Show the edges of", options: [["", "all parts"], ...[0, 1, 2, 3].flatMap((layer) => [`${layer}.0`, `${layer}.1`, `${layer}.2`, `${layer}.3`, `mlp ${layer}`]).map((name) => [name, name])] },
        { kind: "select", more: true, name: "edge", label: "What does it cost to cut", options: [["", "no edge"], ...RANKED.slice(0, state.keep === "strongest" ? state.size : MOST).map((edge) => [edge, words(edge)])] },
        { kind: "checks", more: true, name: "off", label: "Cut as well, of the twelve strongest", options: RANKED.slice(0, LISTED).map((edge, i) => [String(i + 1), words(edge)]) },
      ];
    },

    draw(state, parts) {
      const m = measured(state, parts);
      const said = `${m.kept.length} of ${m.all} edges are kept, and ${percent(m.share)} of the copying with them.`;
      const numbers = [
        ["edges kept", m.kept.length, `of ${m.all}`],
        ["copying left", percent(m.share), "on this row of tokens; all edges: 100\u00a0%"],
        ["with as many random edges", m.control ? percent(mean(m.control)) : "–", m.control ? `mean of ${DRAWS} draws: ${percent(Math.min(...m.control))} to ${percent(Math.max(...m.control))}` : "all are kept"],
      ];
      const cost = m.cost === null ? "" : ` Without ${words(state.edge)} ${percent(m.cost)} is left.`;
      const more = `<p class="live-note"><b>Copying left</b> measures how sure the network is of the right next tokens in the second copy (mean log-probability): 100 % is its value if no edge is cut, 0 % its value on the rival prompt, whose first copy has other tokens. Below 0 % it is misled.</p><p class="live-note">Everything flows upwards. An mlp is the small network behind the heads of a layer. A new line can also disturb the copying.</p>`;
      return { numbers, view: picture(m, said, state), more, said: said + cost, ...m };
    },

    tasks: [
      { text: "How few? Keep at least 90 % with at most 35 edges.",
        seen: [(s, m) => s.keep === "strongest" && m.share >= 0.9 && m.kept.length <= 35],
        found: (s, m) => `${m.kept.length} of ${m.all} edges keep ${percent(m.share)}; as many random ones ${percent(mean(m.control))} on average.` },
      { text: "One edge: keep all, cut a single one, and lose more than half.",
        seen: [(s, m) => s.keep === WHOLE && m.kept.length === m.all - 1 && m.share < 0.5],
        found: (s, m) => `without ${[...m.off].map(words)} alone ${percent(m.share)} is left.` },
      { text: "A lucky draw: 60 random edges or fewer that keep more than half. Then cut an edge of the list that takes the luck away.",
        seen: [(s, m) => s.keep === "random" && m.kept.length <= 60 && m.share > 0.5,
          (s, m, last) => s.keep === "random" && last?.drawn.share > 0.5 && s.draw === last.state.draw && s.size === last.state.size && m.share < 0.3],
        found: (s, m) => `the luck was that the draw held ${words([...m.off].at(-1))}: without it ${percent(m.share)} is left.` },
    ],
  });
}
