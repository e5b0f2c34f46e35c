// Figure 7: which heads carry the answer? (notebook 07). SmolLM2 does not run in the page: this is
// the record of a run at the tier `real`, prompt by prompt, of every removal that the chapter makes.
{
  const LAYERS = 30, HEADS = 9, MORE = 30, NONE = "none", ONE = "one head";
  const LENSES = ["circuit", "anchors", "induction", "vector", "dual"];
  const DERIVED = ["match and read", "match only", "read only", "match, not vector", "vector, not match"];
  const CALLED = { anchors: "the twenty readers", induction: "the twenty matchers", "match and read": "double heads", "match only": "single matchers", "read only": "single readers", "match, not vector": "matchers that do not write the vector", "vector, not match": "heads that write the vector and do not match" };
  const called = (set) => CALLED[set] ?? set;
  const WAYS = { resampled: "output on the rival prompt", averaged: "mean over other functions", zeroed: "zero" };
  const key = (set) => set.replace(/,? /g, "-"); // as the state has it, without blanks
  const numbers = (text) => text.split(" ").map(Number);
  // Probability and margin (nats) of the n-th of the pairs that a text holds
  const pair = (text, n) => [numbers(text)[2 * n] / 1000, numbers(text)[2 * n + 1] / 10];

  function measured(state, record) {
    const prompt = record.prompts[Math.min(state.prompt, record.prompts.length - 1)];
    const sets = record.sets[prompt.case], names = Object.keys(sets);
    const set = names.find((name) => key(name) === state.set), ours = state.prompt === 0;
    const whole = pair(prompt.whole, 0), one = state.set === key(ONE) && ours;
    const heads = one ? [state.head] : set ? numbers(sets[set] || "").filter((x) => sets[set]) : [];
    const { way, whose } = state, stride = way === "zeroed" ? 1 : 2;
    const alone = ours && state.head >= 0 ? pair(record.single, state.head) : null;
    const found = one ? alone
      : set ? pair(prompt[way], stride * names.indexOf(set) + (whose === "others" ? 1 : 0)) : whole;
    const marked = set ? pair(prompt[way], stride * names.indexOf(set)) : whole;
    const leads = Object.keys(WAYS).flatMap((name) => numbers(prompt[name]).filter((_, i) => i % 2));
    const most = Math.max(40, Math.abs(10 * whole[1]), ...leads.map(Math.abs)) / 10; // of all that can be shown
    const control = whose === "others" && heads.length > 0, many = `${heads.length} ${control ? "random " : ""}head${heads.length === 1 ? "" : "s"}`;
    return { prompt, whole, found, marked, alone, heads, set, one, ours, control, many, most, way: one ? "averaged" : way, count: heads.length };
  }

  const signed = (value) => value.toFixed(1).replace("-", "−");
  const named = (i) => `${Math.floor(i / HEADS)}.${i % HEADS}`;
  const STEP = 20, LEFT = 16, PART = 10; // of the map: a head, the names of heads, layers in a part
  function map(m, record) {
    const margins = numbers(record.single).filter((_, i) => i % 2).map((x) => x / 10);
    const head = (i) => {
      const x = LEFT + STEP * (Math.floor(i / HEADS) % PART), y = 2 + STEP * (i % HEADS);
      const removed = m.heads.includes(i) && !m.control;
      const lost = m.ours ? Math.min(1, Math.abs(margins[i] - m.whole[1]) / 1.5) : 0;
      const pick = m.ours ? ` data-pick='${JSON.stringify(m.set ? { head: i } : { set: key(ONE), head: i })}'` : "";
      return `<g${pick}><rect class="live-a" opacity="${(0.06 + 0.9 * lost).toFixed(2)}" x="${x}" y="${y}" width="${STEP - 2}" height="${STEP - 2}"/>` +
        (removed ? `<path class="live-edge live-b" style="stroke-width: 3; stroke-dasharray: none" d="M${x + 3} ${y + 3}l${STEP - 8} ${STEP - 8}m0 ${8 - STEP}l${8 - STEP} ${STEP - 8}"/>` : "") +
        `<rect class="live-hit" x="${x}" y="${y}" width="${STEP}" height="${STEP}"/></g>`;
    };
    const parts = Array.from({ length: LAYERS / PART }, (_, part) => {
      const from = part * PART, inside = m.control ? [] : m.heads.filter((i) => Math.floor(i / HEADS / PART) === part);
      const cells = Array.from({ length: PART * HEADS }, (_, k) => head(from * HEADS + k)).join("");
      const layers = Array.from({ length: PART }, (_, k) => `<text x="${LEFT + STEP * k + 9}" y="${STEP * HEADS + 16}" text-anchor="middle">${from + k}</text>`).join("");
      const heads = Array.from({ length: HEADS }, (_, h) => `<text x="${LEFT - 4}" y="${STEP * h + 16}" text-anchor="end">${h}</text>`).join("");
      const said = `Heads of layers ${from} to ${from + PART - 1}; replaced are ${inside.map(named).join(", ") || (m.control ? "others of these or the nearest layers, not named" : "none")}.`;
      return `<svg viewBox="0 0 ${LEFT + STEP * PART} ${STEP * HEADS + 20}" role="img" aria-label="${said}">${cells}${layers}${heads}</svg>`;
    });
    return `<div class="live-maps">${parts.join("")}</div>`;
  }

  function bars(m, state) {
    const [right, rival] = m.prompt.answers.map(Live.escaped), zero = 170, scale = 150 / m.most;
    const row = (y, name, [p, margin], kind) => {
      const reach = margin * scale;
      return `<text x="0" y="${y}">${name}: ${right} with ${p.toFixed(2)}</text>` +
        `<rect class="live-${kind}" x="${Math.min(zero, zero + reach)}" y="${y + 6}" width="${Math.max(1, Math.abs(reach))}" height="14"/>` +
        `<text x="${reach < 0 ? zero + 5 : zero - 5}" y="${y + 18}" text-anchor="${reach < 0 ? "start" : "end"}">${signed(margin)}</text>`;
    };
    const third = m.set && m.alone, height = third ? 156 : 112;
    return `<svg viewBox="0 0 340 ${height}" role="img" aria-label="With all heads ${right} has the probability ${m.whole[0].toFixed(2)}; now ${m.found[0].toFixed(2)}.">` +
      `<path class="live-axis" d="M${zero} 18v${height - 36}"/>${row(14, "all heads", m.whole, "grey")}${row(58, m.control ? "control" : "now", m.found, "a")}` +
      `${third ? row(102, `${named(state.head)} alone`, m.alone, "c") : ""}<text x="0" y="${height - 4}">${rival} leads</text><text x="340" y="${height - 4}" text-anchor="end">${right} leads</text></svg>`;
  }

  Live.figure("lenses", {
    title: "Which heads carry the answer?",
    first: { prompt: 0, set: NONE, way: "resampled", whose: "marked", head: -1 },
    needs: () => ["lenses"],
    change(state) { // a control is chosen anew where there was none
      const prompt = Number(state.prompt), one = state.set === key(ONE) && !prompt, set = state.set === key(ONE) && prompt ? NONE : state.set;
      const bare = one || set === NONE || state.way === "zeroed";
      return { ...state, prompt, set, whose: bare ? "marked" : state.whose, head: prompt ? -1 : Math.max(Number(state.head), one ? 0 : -1) };
    },

    bet: {
      asks: "The seven double heads write something else in three ways: their output on the rival prompt, their mean over other functions (such as plural), and zero. In how many of the three ways does “standing” become likelier than “stood”?",
      choices: ["in none", "in one or two", "in all three"],
      deed: "Now press “double heads”, then all three things that they write instead.",
      answer(s, m, memory) {
        if (!m.ours || s.set !== "match-and-read" || m.control) return null;
        memory[m.way] = m.found;
        const ways = Object.keys(WAYS);
        if (ways.some((way) => !memory[way])) return null;
        const lost = ways.filter((way) => memory[way][1] < 0).length;
        return [lost ? (lost < 3 ? 1 : 2) : 0, `${["In none", "In one", "In two", "In all"][lost]} of the three ways “${m.prompt.answers[1]}” becomes likelier. The lead of “${m.prompt.answers[0]}” is now ${ways.map((way) => `${signed(memory[way][1])} (${WAYS[way]})`).join(", ")}.`];
      },
    },

    fields(state) {
      const option = (name) => [key(name), called(name)];
      const ours = state.prompt === 0, one = state.set === key(ONE);
      const sets = ["match and read", "anchors"], bare = state.way === "zeroed" || state.set === NONE;
      return [
        { kind: "radios", name: "set", label: "Take away", options: [[NONE, "no heads"], ...sets.map(option)] },
        ...(one ? [] : [{ kind: "radios", name: "way", label: "They write instead", options: Object.entries(WAYS) }]),
        ...(one || bare ? [] : [{ kind: "radios", name: "whose", label: "Which heads", options: [["marked", "these heads"], ["others", "control: as many random heads"]] }]),
        { kind: "radios", more: true, name: "set", label: "Twenty heads that another lens marks", options: LENSES.filter((name) => !sets.includes(name)).map(option) },
        { kind: "radios", more: true, name: "set", label: "Heads that do one thing and not another", options: [...DERIVED.filter((name) => !sets.includes(name)).map(option), ...(ours ? [[key(ONE), "a single head"]] : [])] },
        ...(one ? [{ kind: "range", more: true, name: "head", label: "Head", min: 0, max: LAYERS * HEADS - 1, said: named }] : []),
        { kind: "range", more: true, name: "prompt", label: "Prompt", min: 0, max: MORE, said: (v) => (Number(v) ? `number ${v} of ${MORE} more` : "the chapter's") },
      ];
    },

    draw(state, [record]) {
      const m = measured(state, record), lines = m.prompt.text.split("\n").map((line) => Live.escaped(line.trim()));
      const way = WAYS[m.way], [p, margin] = m.found, [right, rival] = m.prompt.answers;
      const said = `${m.count ? `${m.control ? "Control: " : ""}${m.many} write instead: ${way}` : "All heads are there"}: after “${m.prompt.text.trim().split("\n").pop().trim()}” ${right} has the probability ${p.toFixed(2)} and ${margin < 0 ? `${rival} leads it` : `leads ${rival}`} by ${Math.abs(margin).toFixed(1)} nats.`;
      const numbersNow = [
        [m.control ? "random heads away" : "heads away", m.count, m.count ? `instead: ${way}` : "of 270"],
        [`probability of ${Live.escaped(right)}`, p.toFixed(2), `all heads: ${m.whole[0].toFixed(2)}`],
        [`lead over ${Live.escaped(rival)}`, signed(margin), `nats; all heads: ${signed(m.whole[1])}`],
      ];
      const removed = !m.count ? "" : m.control ? `Away, as a control: one draw of ${m.many} of the same layers (of the nearest, where these have too few). They neither match nor read (for a group that has to do with the vector: neither match nor write). The record does not name them. ` : `Away: ${m.heads.map(named).join(", ")}. `;
      const else_ = margin > 0 && p * (1 + Math.exp(-margin)) < 0.5 ? "Most of the probability is now with other words, which are not shown. " : "";
      const note = m.ours ? "Darker: if this head alone is replaced by its mean over other functions, the lead changes more (darkest: by 1.5 nats). A pale head changes little alone; pale heads together can change much. Touch a head to see its effect. " : "";
      const view = `<div class="live-row-of"><div><p class="live-head">The prompt</p><pre tabindex="-1">${lines.join("\n")}</pre></div><div><p class="live-head">The answer</p>${bars(m, state)}</div></div>` +
        `${else_ && `<p class="live-note">${else_}</p>`}<div class="live-later"><p class="live-head">All heads: heads 0 to 8 (rows) of layers 0 to 29 (columns)</p>${map(m, record)}` +
        `<p class="live-note">${removed}${note}Crosses: heads that write something else. These numbers were computed beforehand; the model does not run in this page.</p></div>`;
      return { numbers: numbersNow, view, said, ...m };
    },

    tasks: [
      { text: "Which heads carry the answer? On the chapter's prompt, find a group of at most nine without which the rival leads (lead below 0). Try all three things that they may write instead.",
        seen: [(s, m) => m.ours && !m.control && m.count > 0 && m.count <= 9 && m.found[1] < 0],
        found: (s, m) => `without ${m.many} (${m.set ? called(m.set) : named(s.head)}; instead: ${WAYS[m.way]}), ${m.prompt.answers[1]} leads ${m.prompt.answers[0]} by ${signed(-m.found[1])} nats.` },
      { text: "Keep that group and change what it writes instead: the answer leads again.",
        seen: [(s, m, last) => m.ours && !m.control && m.count > 0 && m.count <= 9 && m.found[1] > 0 && last?.state.set === s.set && last.state.way !== s.way && !last.drawn.control && last.drawn.found[1] < 0],
        found: (s, m) => `the same heads, with ${WAYS[m.way]} instead: ${m.prompt.answers[0]} leads by ${signed(m.found[1])} nats. Whether they carry the answer depends on what they write instead.` },
      { text: "Is it these heads, or any? Find a group without which the answer is lost (probability below 0.1), and whose control keeps it (above 0.5).",
        seen: [(s, m) => m.control && m.marked[0] < 0.1 && m.found[0] > 0.5],
        found: (s, m) => `without ${called(m.set)} the answer has ${m.marked[0].toFixed(2)}, without as many random heads ${m.found[0].toFixed(2)}.` },
    ],
  });
}
