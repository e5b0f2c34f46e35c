// Figure 7: which heads carry the answer? (notebook 07). SmolLM2 does not run in the page: this is
// the record of a run at the tier `real`, prompt by prompt: heads replaced at the last arrow, and others as strong.
{
  const LAYERS = 30, HEADS = 9, MORE = 30, NONE = "none";
  const GROUPS = { "match and read": "double", "match only": "matcher", "read only": "reader" }; // in these colours
  const CALLED = { "match and read": "double heads", "match only": "single matchers", "read only": "single readers" };
  const WAYS = { resampled: "their output on the rival prompt", bare: "their output without examples" };
  const key = (set) => set.replace(/,? /g, "-"); // as the state has it, without blanks
  const choice = (set) => [key(set), CALLED[set]];
  const numbers = (text) => (text ? text.split(" ").map(Number) : []);
  // Probability and lead (nats) of the n-th of the pairs that a text holds
  const pair = (text, n) => [numbers(text)[2 * n] / 1000, numbers(text)[2 * n + 1] / 10];

  function measured(state, record) {
    const prompt = record.prompts[Math.min(state.prompt, record.prompts.length - 1)], ours = state.prompt === 0;
    const sets = record.sets[prompt.case], names = Object.keys(GROUPS), set = Object.keys(GROUPS).find((name) => key(name) === state.set);
    const left = (way, name, other) => pair(prompt[way], 2 * names.indexOf(name) + other);
    const whole = pair(prompt.whole, 0), [found, control] = [0, 1].map((other) => (set ? left(state.way, set, other) : null));
    const inSight = Object.keys(WAYS).flatMap((way) => Object.keys(GROUPS).flatMap((name) => [left(way, name, 0), left(way, name, 1)]));
    const most = Math.max(...[whole, ...inSight].map(([, lead]) => Math.abs(lead))); // the longest bar
    const heads = set ? numbers(sets[set]) : [];
    const groups = Object.fromEntries(Object.entries(GROUPS).map(([name, kind]) => [kind, numbers(sets[name])]));
    const others = set ? numbers(record.controls[prompt.case][set]) : []; // as strong
    return { prompt, ours, set, way: state.way, whole, found, control, most, heads, others, groups, many: `${heads.length} ${CALLED[set]}` };
  }

  const signed = (value) => value.toFixed(1).replace("-", "−");
  const named = (i) => `${Math.floor(i / HEADS)}.${i % HEADS}`;
  const leader = ({ answers }, lead) => `${Live.escaped(answers[lead < 0 ? 1 : 0])} leads by ${Math.abs(lead).toFixed(1)}`;

  // Examples and question: words in three columns. The record names the rival's examples of the chapter's prompt alone.
  function prompts({ prompt, ours }) {
    const lines = prompt.text.trim().split("\n").map((line) => line.split("->").map((part) => Live.escaped(part.trim())));
    const rows = lines.map(([word, answer], i) => {
      const last = i === lines.length - 1, [right, rival] = last ? prompt.answers.map(Live.escaped) : [answer, ours ? `${word}ing` : "…"];
      return `<tr><th scope="row">${word} <span class="live-key">-&gt;</span></th><td>${right}</td>${ours ? `<td>${rival}</td>` : ""}</tr>`;
    });
    return `<table class="live-prompts"><thead><tr><td></td><th scope="col">${ours ? "our prompt" : "the prompt"}</th>${ours ? `<th scope="col">rival prompt</th>` : ""}</tr></thead><tbody>${rows.join("")}</tbody></table>`;
  }

  const coloured = (set) => [...new Set(["double", GROUPS[set] ?? "double"])];
  const STEP = 11, LEFT = 14; // of the grid: a head, the numbers of heads
  const place = (i) => [LEFT + STEP * Math.floor(i / HEADS), 1 + STEP * (i % HEADS)];
  const squares = (heads) => heads.map((i) => `M${place(i).join(" ")}h9v9h-9z`).join("");
  const crosses = (heads) => heads.map((i) => `M${place(i).map((x) => x + 1.5).join(" ")}l6 6m0-6l-6 6`).join("");
  function frame(inside, said) {
    const layers = [0, 5, 10, 15, 20, 25, 29].map((layer) => `<text x="${LEFT + STEP * layer + 4.5}" y="112" text-anchor="middle">${layer}</text>`);
    const heads = [0, 4, 8].map((head) => `<text x="${LEFT - 4}" y="${STEP * head + 9.5}" text-anchor="end">${head}</text>`);
    return `<svg class="live-grid" viewBox="0 0 ${LEFT + STEP * LAYERS} 115" role="img" aria-label="${said}">${inside}${layers.join("")}${heads.join("")}</svg>`;
  }
  // Double heads, and the group that is taken away, in colours
  function grid({ groups, heads, others, set }) {
    const shown = Object.fromEntries(coloured(set).map((kind) => [kind, groups[kind]]));
    if (set) shown.control = others;
    const gone = new Set(heads), listed = new Set(Object.values(shown).flat());
    const kinds = { ...shown, unlisted: Array.from({ length: LAYERS * HEADS }, (_, i) => i).filter((i) => !listed.has(i)) };
    const drawn = Object.entries(kinds).map(([kind, all]) => {
      const away = all.filter((i) => gone.has(i)), set = Object.keys(GROUPS).find((name) => GROUPS[name] === kind);
      return `<g${set ? ` data-pick='{"set": "${key(set)}"}'` : ""}><path class="live-${kind}" d="${squares(all.filter((i) => !gone.has(i)))}"/>` +
        `${away.length ? `<path class="live-gone live-${kind}" d="${squares(away)}${crosses(away)}"/>` : ""}</g>`;
    });
    const said = Object.entries(GROUPS).map(([name, kind]) => `${groups[kind].length} ${CALLED[name]}: ${groups[kind].map(named).join(", ")}`).join("; ");
    return frame(drawn.join(""), `All heads: layers 0 to 29 across, heads 0 to 8 down. ${said}. Replaced: ${heads.map(named).join(", ") || "none"}. As strong: ${others.map(named).join(", ") || "none"}.`);
  }
  const EXPLAINED = { double: "double heads", matcher: "single matchers", reader: "single readers", control: "others as strong", unlisted: "all others" };
  const legend = (set) => `<ul class="live-legend">${[...coloured(set), ...(set ? ["control"] : []), "unlisted"].map((kind) => `<li><svg viewBox="0 0 10 10" aria-hidden="true"><path class="live-${kind}" d="M0 0h10v10H0z"/></svg> ${EXPLAINED[kind]}</li>`).join("")}</ul>`;

  const bar = (kind, lead, most) => `<svg viewBox="${-most} 0 ${2 * most} 10" preserveAspectRatio="none" aria-hidden="true">` +
    `<path class="live-${kind}" d="M0 1H${lead}V9H0z"/><path class="live-axis" vector-effect="non-scaling-stroke" d="M0 0V10"/></svg>`;

  Live.figure("lenses", {
    title: "Which heads carry the answer?",
    first: { prompt: 0, set: NONE, way: "resampled" },
    needs: () => ["lenses"],
    change: (state) => ({ ...state, prompt: Number(state.prompt) }),

    bet: {
      asks: "At the last arrow, we let the seven double heads write something else: first, what they write there on the rival prompt; then, what they write there without any examples. With how many of these two does “standing” lead?",
      choices: ["with none", "with one", "with both"],
      deed: "Now press “double heads”, then both things that they write instead.",
      answer(s, m, memory) {
        if (!m.ours || m.set !== "match and read") return null;
        memory[m.way] = m.found;
        const ways = Object.keys(WAYS);
        if (ways.some((way) => !memory[way])) return null;
        const lost = ways.filter((way) => memory[way][1] < 0).length;
        return [lost, `“${m.prompt.answers[1]}” leads with ${["none", "one", "both"][lost]} of the two. The lead of “${m.prompt.answers[0]}” is now ${ways.map((way) => `${signed(memory[way][1])} (${WAYS[way]})`).join(", ")}. What double heads write on the rival prompt speaks for “${m.prompt.answers[1]}”; what they write without examples only weakens “${m.prompt.answers[0]}”.`];
      },
    },

    fields: () => [
      { kind: "radios", name: "set", label: "Replace", options: [[NONE, "no heads"], choice("match and read")] },
      { kind: "radios", name: "way", label: "They write instead", options: Object.entries(WAYS) },
      { kind: "radios", more: true, name: "set", label: "Or replace another group", options: ["match only", "read only"].map(choice) },
      { kind: "range", more: true, name: "prompt", label: "Prompt", min: 0, max: MORE, said: (v) => (Number(v) ? `number ${v} of ${MORE} more` : "the chapter's") },
    ],

    draw(state, [record]) {
      const m = measured(state, record), { prompt, whole, found, control, most, heads } = m, [right, rival] = prompt.answers.map(Live.escaped);
      const row = (name, kind, said) => [name, said ? leader(prompt, said[1]) : "?", bar(kind, said?.[1] ?? 0, most)];
      const rows = [
        row("with all heads", "all", whole),
        row(`with ${found ? m.many : "the double heads"} replaced`, GROUPS[m.set] ?? "double", found),
        row(`with ${found ? `${heads.length} ` : ""}others as strong replaced`, "control", control),
      ];
      const view = `<div class="live-row-of"><div>${prompts(m)}</div><div><p class="live-head">${LAYERS * HEADS} heads, in 30 layers (across)</p>${grid(m)}${legend(m.set)}</div></div>` +
        `<div class="live-lead"><p class="live-head">Heads replaced at the last arrow: how far does “${right}” lead “${rival}”, in nats? (At 3 nats, it is 20 times as likely.)</p><small>← ${rival} leads</small><small>${right} leads →</small></div>`;
      const chance = (name, said) => (said ? `${name} ${said[0].toFixed(2)}` : "");
      const chances = [chance("with all heads", whole), chance(found ? `with ${m.many} replaced` : "", found), chance("with others as strong replaced", control)].filter(Boolean).join(", ");
      const away = heads.length ? `Replaced: ${heads.map(named).join(", ")}. ` : "";
      const more = `<p class="live-note">Readers look at the answers of the examples. Matchers look, in repeated text, at what came next the first time. Double heads do both. A head is replaced at the last arrow alone. Probability of ${right}: ${chances}. ${away}Others as strong neither match nor read, and the examples change what they write by as much. All numbers were computed beforehand: the model does not run in this page.</p>`;
      const said = rows.map(([name, value]) => `${name}: ${value}`).join("; ");
      return { numbers: rows, view, more, said: `${found ? `They write instead: ${WAYS[m.way]}. ` : ""}${said}.`, ...m };
    },

    tasks: [
      { text: "Make “standing” lead while all double heads write as usual, on the chapter's prompt, where others as strong leave “stood” ahead by a nat or more.",
        seen: [(s, m) => m.ours && m.found?.[1] < 0 && m.control[1] >= 1 && !m.heads.some((i) => m.groups.double.includes(i))],
        found: (s, m) => `with ${m.many} replaced, ${leader(m.prompt, m.found[1])} nats. So double heads are not alone.` },
      { text: "Replace a group so that “standing” leads. Then keep the group and change what it writes instead: “stood” leads again.",
        seen: [(s, m, last) => m.ours && m.set && m.found[1] > 0 && last?.state.set === s.set && last.state.way !== s.way && last.drawn.found[1] < 0],
        found: (s, m) => `with ${m.many} replaced by ${WAYS[m.way]}, ${leader(m.prompt, m.found[1])} nats. Whether they carry the answer depends on what they write instead.` },
      { text: "Is it these heads, or any? On another prompt, find a group whose replacement leaves the answer a probability (above) below 0.1, while that of others as strong leaves more than 0.5.",
        seen: [(s, m) => !m.ours && m.control && m.found[0] < 0.1 && m.control[0] > 0.5],
        found: (s, m) => `with ${m.many} replaced, the answer has ${m.found[0].toFixed(2)}, with others as strong replaced ${m.control[0].toFixed(2)}.` },
    ],
  });
}
