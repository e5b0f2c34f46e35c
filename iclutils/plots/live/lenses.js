// Figure 7: which heads carry the answer? (notebook 07). SmolLM2 does not run in the page: this is
// the record of a run at the tier `real`, prompt by prompt, of every removal that the chapter makes.
{
  const LAYERS = 30, HEADS = 9, MORE = 30, NONE = "none", ONE = "one head";
  const GROUPS = { "match and read": "double", "match only": "matcher", "read only": "reader" }; // in these colours
  const LENSES = ["anchors", "induction", "circuit", "vector", "dual"], OTHER = ["match, not vector", "vector, not match"];
  const CALLED = { anchors: "the twenty readers", induction: "the twenty matchers", circuit: "circuit", vector: "vector", dual: "dual", "match and read": "double heads", "match only": "single matchers", "read only": "single readers", "match, not vector": "matchers that do not write the vector", "vector, not match": "heads that write the vector and do not match" };
  const WAYS = { resampled: "their output on the rival prompt", averaged: "their mean over other functions", zeroed: "zero" };
  const key = (set) => set.replace(/,? /g, "-"); // as the state has it, without blanks
  const numbers = (text) => (text ? text.split(" ").map(Number) : []);
  // Probability and lead (nats) of the n-th of the pairs that a text holds
  const pair = (text, n) => [numbers(text)[2 * n] / 1000, numbers(text)[2 * n + 1] / 10];

  function measured(state, record) {
    const prompt = record.prompts[Math.min(state.prompt, record.prompts.length - 1)], ours = state.prompt === 0;
    const sets = record.sets[prompt.case], names = Object.keys(sets);
    const one = state.set === key(ONE) && ours, set = names.find((name) => key(name) === state.set);
    const way = one ? "averaged" : state.way, hasControl = set && way !== "zeroed";
    const left = (name, control) => pair(prompt[way], (way === "zeroed" ? 1 : 2) * names.indexOf(name) + control);
    const whole = pair(prompt.whole, 0), found = one ? pair(record.single, state.head) : set ? left(set, 0) : null;
    const random = hasControl ? left(set, 1) : null;
    const leads = (text) => numbers(text).filter((_, i) => i % 2).map((x) => x / 10);
    const inSight = Object.keys(WAYS).flatMap((name) => Object.keys(GROUPS).map((group) => leads(prompt[name])[(name === "zeroed" ? 1 : 2) * names.indexOf(group)]));
    const most = Math.max(...[whole[1], found?.[1] ?? 0, random?.[1] ?? 0, ...inSight].map(Math.abs)); // the longest bar
    const heads = one ? [state.head] : set ? numbers(sets[set]) : [];
    const groups = Object.fromEntries(Object.entries(GROUPS).map(([name, kind]) => [kind, numbers(sets[name])]));
    const many = one ? `head ${named(state.head)}` : set in GROUPS ? `${heads.length} ${CALLED[set]}` : `these ${heads.length} heads`;
    return { prompt, ours, one, set, way, whole, found, random, most, heads, groups, many, alone: ours && leads(record.single) };
  }

  const signed = (value) => value.toFixed(1).replace("-", "−");
  const named = (i) => `${Math.floor(i / HEADS)}.${i % HEADS}`;
  const leader = ({ answers }, lead) => `${Live.escaped(answers[lead < 0 ? 1 : 0])} leads by ${Math.abs(lead).toFixed(1)}`;

  // Examples and question: words in three columns. The record names the rival's examples of the chapter's prompt alone.
  function prompts({ prompt, ours }) {
    const lines = prompt.text.trim().split("\n").map((line) => line.split("->").map((part) => Live.escaped(part.trim())));
    const rows = lines.map(([word, answer], i) => {
      const last = i === lines.length - 1, [right, rival] = last ? prompt.answers.map(Live.escaped) : [answer, ours ? `${word}ing` : "…"];
      return `<tr><th scope="row">${word} <span class="live-key">-&gt;</span></th><td>${right}</td><td>${rival}</td></tr>`;
    });
    return `<table class="live-prompts"><thead><tr><td></td><th scope="col">${ours ? "our prompt" : "the prompt"}</th><th scope="col">${ours ? "rival prompt" : "rival"}</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
  }

  const STEP = 11, LEFT = 14; // of the grid: a head, the numbers of heads
  const place = (i) => [LEFT + STEP * Math.floor(i / HEADS), 1 + STEP * (i % HEADS)];
  const squares = (heads) => heads.map((i) => `M${place(i).join(" ")}h9v9h-9z`).join("");
  const crosses = (heads) => heads.map((i) => `M${place(i).map((x) => x + 1.5).join(" ")}l6 6m0-6l-6 6`).join("");
  function frame(inside, said) {
    const layers = [0, 5, 10, 15, 20, 25, 29].map((layer) => `<text x="${LEFT + STEP * layer + 4.5}" y="112" text-anchor="middle">${layer}</text>`);
    const heads = [0, 4, 8].map((head) => `<text x="${LEFT - 4}" y="${STEP * head + 9.5}" text-anchor="end">${head}</text>`);
    return `<svg class="live-grid" viewBox="0 0 ${LEFT + STEP * LAYERS} 115" role="img" aria-label="${said}">${inside}${layers.join("")}${heads.join("")}</svg>`;
  }
  function grid({ groups, heads }) {
    const gone = new Set(heads), listed = new Set(Object.values(groups).flat());
    const kinds = { ...groups, unlisted: Array.from({ length: LAYERS * HEADS }, (_, i) => i).filter((i) => !listed.has(i)) };
    const drawn = Object.entries(kinds).map(([kind, all]) => {
      const away = all.filter((i) => gone.has(i)), set = Object.keys(GROUPS).find((name) => GROUPS[name] === kind);
      return `<g${set ? ` data-pick='{"set": "${key(set)}"}'` : ""}><path class="live-${kind}" d="${squares(all.filter((i) => !gone.has(i)))}"/>` +
        `${away.length ? `<path class="live-gone live-${kind}" d="${squares(away)}${crosses(away)}"/>` : ""}</g>`;
    });
    const said = Object.entries(GROUPS).map(([name, kind]) => `${groups[kind].length} ${CALLED[name]}: ${groups[kind].map(named).join(", ")}`).join("; ");
    return frame(drawn.join(""), `All heads: layers 0 to 29 across, heads 0 to 8 down. ${said}. Taken away: ${heads.map(named).join(", ") || "none"}.`);
  }
  const EXPLAINED = { reader: "readers: look at the examples’ answers", matcher: "matchers: in repeated text, look at what came next", double: "double heads: do both", unlisted: "the others: random heads are some of these" };
  const legend = () => `<ul class="live-legend">${Object.entries(EXPLAINED).map(([kind, said]) => `<li><svg viewBox="0 0 10 10" aria-hidden="true"><path class="live-${kind}" d="M0 0h10v10H0z"/></svg> ${said}</li>`).join("")}</ul>`;

  const bar = (kind, lead, most) => `<svg viewBox="${-most} 0 ${2 * most} 10" preserveAspectRatio="none" aria-hidden="true">` +
    `<path class="live-${kind}" d="M0 1H${lead}V9H0z"/><path class="live-axis" vector-effect="non-scaling-stroke" d="M0 0V10"/></svg>`;

  Live.figure("lenses", {
    title: "Which heads carry the answer?",
    first: { prompt: 0, set: NONE, way: "resampled", head: 0 },
    needs: () => ["lenses"],
    change(state) {
      const prompt = Number(state.prompt);
      return { ...state, prompt, head: Number(state.head), set: state.set === key(ONE) && prompt ? NONE : state.set };
    },

    bet: {
      asks: "The seven double heads write something else. There are three ways: their output on the rival prompt, their mean over other functions (such as plural), and zero. In how many of the three ways does “standing” then lead?",
      choices: ["in none", "in one or two", "in all three"],
      deed: "Now press “double heads”, then all three things that they write instead.",
      answer(s, m, memory) {
        if (!m.ours || m.set !== "match and read") return null;
        memory[m.way] = m.found;
        const ways = Object.keys(WAYS);
        if (ways.some((way) => !memory[way])) return null;
        const lost = ways.filter((way) => memory[way][1] < 0).length;
        return [lost ? (lost < 3 ? 1 : 2) : 0, `“${m.prompt.answers[1]}” leads in ${["none", "one", "two", "all"][lost]} of the three ways. The lead of “${m.prompt.answers[0]}” is now ${ways.map((way) => `${signed(memory[way][1])} (${WAYS[way]})`).join(", ")}.`];
      },
    },

    fields(state) {
      const option = (name) => [key(name), CALLED[name]], ours = state.prompt === 0, one = state.set === key(ONE);
      return [
        { kind: "radios", name: "set", label: "Take away", options: [[NONE, "no heads"], ...Object.keys(GROUPS).map(option)] },
        ...(one ? [] : [{ kind: "radios", name: "way", label: "They write instead", options: Object.entries(WAYS) }]),
        { kind: "radios", more: true, name: "set", label: "Take away twenty heads that a lens marks", options: LENSES.map(option) },
        { kind: "radios", more: true, name: "set", label: "Take away other heads", options: [...OTHER.map(option), ...(ours ? [[key(ONE), "a single head"]] : [])] },
        ...(one ? [{ kind: "range", more: true, name: "head", label: "Head", min: 0, max: LAYERS * HEADS - 1, said: named }] : []),
        { kind: "range", more: true, name: "prompt", label: "Prompt", min: 0, max: MORE, said: (v) => (Number(v) ? `number ${v} of ${MORE} more` : "the chapter's") },
      ];
    },

    draw(state, [record]) {
      const m = measured(state, record), { prompt, whole, found, random, most, heads } = m, [right, rival] = prompt.answers.map(Live.escaped);
      const row = (name, kind, said) => [name, said ? leader(prompt, said[1]) : "?", bar(kind, said?.[1] ?? 0, most)];
      const rows = [
        row("with all heads", "all", whole),
        row(found ? `without ${m.many}` : "without a group of heads", GROUPS[m.set] ?? "other", found),
        ...(found && !random ? [] : [row(m.one ? "without another head" : `without ${found ? `${heads.length} ` : ""}random heads`, "random", random)]),
      ];
      const view = `<div class="live-row-of"><div>${prompts(m)}</div><div><p class="live-head">${LAYERS * HEADS} heads, in 30 layers (across)</p>${grid(m)}</div></div>${legend()}` +
        `<div class="live-lead"><p class="live-head">How far does ${right} lead ${rival}? (nats)</p><small>← ${rival} leads</small><small>${right} leads →</small></div>`;
      const chance = (name, said) => (said ? `${name} ${said[0].toFixed(2)}` : "");
      const chances = [chance("with all heads", whole), chance(found ? `without ${m.many}` : "", found), chance("without random heads", random)].filter(Boolean).join(", ");
      const away = heads.length ? `Away: ${heads.map(named).join(", ")}. ` : "";
      const alone = m.alone ? `<p class="live-head">One head at a time</p>${frame(m.alone.map((lead, i) => `<g data-pick='{"set": "${key(ONE)}", "head": ${i}}'><path class="live-a" opacity="${(0.06 + 0.9 * Math.min(1, Math.abs(lead - whole[1]) / 1.5)).toFixed(2)}" d="${squares([i])}"/></g>`).join(""), "All heads, darker where the lead changes more.")}` +
        `<p class="live-note">Darker: if this head alone writes its mean over other functions, the lead changes more (darkest: by 1.5 nats). Pale heads together can change much. Touch a head to take it away.</p>` : "";
      const more = `<p class="live-note">Probability of ${right}: ${chances}. ${away}Random heads are one draw from the same layers, or the nearest; they neither match nor read (for the vector: neither match nor write), and the record does not name them. All numbers were computed beforehand: the model does not run in this page.</p>${alone}`;
      const said = rows.map(([name, value]) => `${name}: ${value}`).join("; ");
      return { numbers: rows, view, more, said: `${found ? `They write instead: ${WAYS[m.way]}. ` : ""}${said}.`, ...m };
    },

    tasks: [
      { text: "Make “standing” lead while all double heads are there, on the chapter's prompt.",
        seen: [(s, m) => m.ours && m.found?.[1] < 0 && !m.heads.some((i) => m.groups.double.includes(i))],
        found: (s, m) => `without ${m.many}, ${leader(m.prompt, m.found[1])} nats. So double heads are not alone.` },
      { text: "Take a group away so that “standing” leads. Then keep the group and change what it writes instead: “stood” leads again.",
        seen: [(s, m, last) => m.ours && m.set && m.found[1] > 0 && last?.state.set === s.set && last.state.way !== s.way && last.drawn.found[1] < 0],
        found: (s, m) => `without ${m.many}, with ${WAYS[m.way]} instead, ${leader(m.prompt, m.found[1])} nats. Whether they carry the answer depends on what they write instead.` },
      { text: "Is it these heads, or any? Find a group without which the probability of the answer (above) is below 0.1, while random heads leave more than 0.5.",
        seen: [(s, m) => m.random && m.found[0] < 0.1 && m.random[0] > 0.5],
        found: (s, m) => `without ${m.many} the answer has ${m.found[0].toFixed(2)}, without random heads ${m.random[0].toFixed(2)}.` },
    ],
  });
}
