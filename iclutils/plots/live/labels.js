// Figure 2: label words (notebook 02). A prompt of four labelled texts to rearrange, read by
// `anchors-3`; label words, or as many random words, cut off from what stands before them.
{
  const LABELS = "Alpha Bravo Cedar Dover Ember Flint Grove Haven".split(" "), LAYERS = 4, DEMOS = 4;
  const TRAINED = LABELS.slice(0, 4); // the labels of all texts in training
  const TOPICS = "birds fish insects fruit baking dairy metal cloth paper weather water terrain".split(" "); // of eight words each, which have the first ids
  const first = {
    t1: "for on as salmon eel trout it", l1: "Cedar", t2: "and tuna gnat locust", l2: "Dover",
    t3: "the with solder envelope loom", l3: "Alpha", t4: "drizzle storm and drizzle thunder breeze", l4: "Bravo",
    q: "perch cod to as", drop: 0, cut: "none", layers: 1, show: "none", layer: 1, from: "end",
  };
  const offered = (list) => list.map((word) => [word, TRAINED.includes(word) ? word : `${word} (never a label in training)`]);
  const demos = (state) => [1, 2, 3, 4].filter((i) => i !== Number(state.drop));

  const others = (state) => `${demos(state).length < DEMOS ? "three" : "four"} other words`; // as many as label words

  // BOS text : label text : label .. query :   -> ids, places of label words, unknown words
  function prompt(state, words) {
    const id = (word) => words.indexOf(word), tokens = [id("<bos>")], at = [], starts = [], unknown = [];
    const read = (text) => {
      for (const word of text.trim().toLowerCase().split(/\s+/).filter(Boolean).slice(0, 40))
        id(word) < 0 ? unknown.push(word) : tokens.push(id(word));
      tokens.push(id(":"));
    };
    for (const i of demos(state)) {
      starts.push(tokens.length);
      read(state[`t${i}`]);
      at.push(tokens.push(id(state[`l${i}`])) - 1);
    }
    const query = tokens.length;
    read(state.q);
    return { tokens, at, starts, query, unknown };
  }

  // Places that are cut off in each of the first layers: the label words, or others at random
  function isolated({ tokens, at }, { cut, layers }) {
    const uniform = Live.random(5), free = tokens.map((_, i) => i).slice(0, -2).filter((i) => !at.includes(i));
    return Array.from({ length: layers }, (_, layer) => {
      const places = cut === "labels" ? at : Live.shuffled(free, uniform).slice(0, at.length);
      return { layer, places, edges: places.flatMap((dest) => Array.from({ length: dest }, (_, src) => [dest, src])) };
    });
  }

  // Mean over heads of a layer's attention, (dest, src)
  function attention(pattern, n) {
    const heads = pattern.length / (n * n), out = new Float64Array(n * n);
    pattern.forEach((weight, i) => (out[i % (n * n)] += weight / heads));
    return out;
  }

  // Shares of the whole, the diagonal left out
  function shares(edges, n) {
    const flow = edges.map((value, i) => (i % (n + 1) ? value : 0)), all = flow.reduce((a, b) => a + b);
    return flow.map((value) => value / (all || 1)); // one label word alone has no loss
  }

  // Of the label words alone, at the end
  const chances = ({ logits, vocab }, { length }, ids) =>
    Transformer.logSoftmax(ids.map((id) => logits[(length - 1) * vocab + id])).map(Math.exp);

  function measured(state, [part]) {
    const net = (part.net ??= Transformer.network(part)), asked = prompt(state, net.words), { tokens, at } = asked, n = tokens.length;
    const cut = state.cut === "none" ? [] : isolated(asked, state), off = new Set(cut.flatMap(({ places }) => places));
    const run = Gpt2.forward(net, tokens, { cut });
    const plain = state.cut === "none" ? run : Gpt2.forward(net, tokens);
    const ids = [...new Set(at.map((p) => tokens[p]))], names = ids.map((id) => net.words[id]);
    const now = chances(run, tokens, ids), before = chances(plain, tokens, ids);
    const best = (list) => names[list.indexOf(Math.max(...list))];
    const answer = best(now), salient = state.show === "saliency";
    const edges = salient
      ? Gpt2.saliency(net, run, ids, net.words.indexOf(answer)).map((one) => shares(one, n))
      : run.patterns.map((one) => attention(one, n));
    const from = (layer, dest) => edges[layer].subarray(dest * n, (dest + 1) * n), total = (list) => list.reduce((a, b) => a + b, 0);
    const into = edges.map((_, layer) => total(at.map((p, i) => total(from(layer, p).subarray(asked.starts[i], p - 1)))) / (salient ? 1 : at.length));
    const out = edges.map((_, layer) => total(at.map((p) => from(layer, n - 1)[p])));
    const place = at[demos(state).indexOf(Number(state.from))] ?? n - 1;
    const row = from(state.layer, place), look = salient ? row.map((value) => value / (Math.max(...row) || 1)) : row;
    return { ...asked, words: net.words, names, now, before, answer, was: best(before), into, out, place, look, salient, off };
  }

  // One or two bars for each row: [name, [value, class], ..], values in 0..1
  function bars(title, rows) {
    const line = 6 + 14 * (rows[0].length - 1), drawn = rows.map(([name, ...two], i) => `<text x="66" y="${i * line + 4 + line / 2}" text-anchor="end">${name}</text>` +
      two.map(([value, mark], k) => `<rect class="live-${mark}" x="72" y="${i * line + 3 + 14 * k}" width="${(160 * value).toFixed(1)}" height="12"/>` +
        `<text x="${(77 + 160 * value).toFixed(1)}" y="${i * line + 14 + 14 * k}">${value.toFixed(2)}</text>`).join("")).join("");
    const said = rows.map(([name, ...two]) => `${name} ${two.map(([value]) => value.toFixed(2)).join(" and ")}`).join(", ");
    return `<div><p class="live-head">${title}</p><svg viewBox="0 0 290 ${line * rows.length}" role="img" aria-label="${said}">${drawn}</svg></div>`;
  }

  Live.figure("labels", {
    title: "Label words: a prompt to rearrange",
    beside: true,
    first,
    needs: () => ["anchors-3"],
    bet: {
      asks: "In layer 0, the first of four, we cut off the four label words (underlined), or four other words (dotted). There, they cannot look back. Which cut changes the answer?",
      choices: ["the label words", "four other words", "both cuts change it", "no cut changes it"],
      deed: "Now press the one cut, then the other.",
      answer(s, m, memory) {
        const same = Object.keys(first).every((name) => ["cut", "show", "layer", "from"].includes(name) || s[name] === first[name]);
        if (!same || s.cut === "none") return null;
        memory[s.cut] = `${m.answer} (${Math.max(...m.now).toFixed(2)})`;
        memory[`${s.cut} changes`] = m.answer !== m.was;
        const { labels, random } = memory;
        if (!labels || !random) return null;
        const [one, other] = [memory["labels changes"], memory["random changes"]];
        return [one ? (other ? 2 : 0) : other ? 1 : 3, `The whole network answers ${m.was}. With the label words cut off it answers ${labels}, with ${others(s)} cut off ${random}.`];
      },
    },
    fields: (state) => [
      { kind: "radios", name: "cut", label: "Cut off from all words before them", options: [["none", "no words"], ["labels", "the label words"], ["random", others(state)]] },
      { kind: "select", more: true, name: "l1", label: "Label of the text about fish", options: offered(LABELS) },
      ...[1, 2, 3, 4].flatMap((i) => [
        { kind: "text", more: true, name: `t${i}`, label: `Text ${i}` },
        ...(i === 1 ? [] : [{ kind: "select", more: true, name: `l${i}`, label: `Label word ${i}`, options: offered([...LABELS, "the", "hail"]) }]),
      ]),
      { kind: "text", more: true, name: "q", label: "Text without a label" },
      { kind: "actions", more: true, options: [
        ["Pass the labels on", (s) => ({ ...s, l1: s.l4, l2: s.l1, l3: s.l2, l4: s.l3 })],
        ["Reverse the order", (s) => ({ ...s, ...Object.fromEntries([1, 2, 3, 4].flatMap((i) => [[`t${i}`, s[`t${5 - i}`]], [`l${i}`, s[`l${5 - i}`]]])) })],
      ] },
      { kind: "radios", more: true, name: "drop", label: "Leave out", options: [["0", "none"], ...[1, 2, 3, 4].map((i) => [String(i), `${i}`])] },
      { kind: "range", more: true, name: "layers", label: "Cut in the first layers", min: 1, max: LAYERS, said: String },
      { kind: "select", more: true, name: "show", label: "Show in blue", options: [["none", "nothing"], ["attention", "attention"], ["saliency", "saliency of the answer"]] },
      { kind: "select", more: true, name: "from", label: "Look from", options: [["end", "the end"], ...demos(state).map((i) => [String(i), `label word ${i}`])] },
      { kind: "range", more: true, name: "layer", label: "in layer", min: 0, max: LAYERS - 1, said: String },
    ],

    draw(state, parts) {
      const m = measured(state, parts), chance = Math.max(...m.now);
      const few = Number(state.layers) === 1, dotted = new Set(few ? isolated(m, { cut: "random", layers: 1 })[0].places : []); // one layer has one draw
      const word = (token, i) => `<span class="${m.at.includes(i) ? "live-label" : dotted.has(i) ? "live-other" : ""}${token < TOPICS.length * 8 || m.at.includes(i) ? "" : " live-noise"}${i === m.place ? " live-from" : ""}${m.off.has(i) ? " live-cut" : ""}" style="--look:${state.show === "none" ? 0 : m.look[i].toFixed(2)}">${Live.escaped(m.words[token].replace("<bos>", "BOS"))}</span>`;
      const ends = [...m.starts.slice(1), m.query, m.tokens.length]; // of each line
      const text = ends.map((end, line) => {
        const own = m.tokens.slice(line ? ends[line - 1] : 0, end), about = Array(TOPICS.length).fill(0);
        for (const token of own) if (token < TOPICS.length * 8) about[Math.floor(token / 8)]++;
        const most = Math.max(...about), leading = TOPICS.filter((_, i) => most && about[i] === most), topic = leading.length > 1 ? "mixed" : leading.join("");
        const shown = own.map((token, i) => word(token, i + end - own.length)), last = shown.splice(-3).join("\u00a0"); // text : label, never parted
        return `<p>${[...shown, last].join(" ")}</p><small>${topic && `(${topic})`}</small>`;
      }).join("");
      const cutting = state.cut !== "none";
      const rows = m.names.map((name, i) => [name, [m.before[i], "grey"], ...(cutting ? [[m.now[i], "b"]] : [])]);
      const flow = m.into.map((value, layer) => [`layer ${layer}`, [value, "a"], [m.out[layer], "b"]]);
      const blue = state.show === "none" ? "" : m.salient
        ? ` Blue: attention times the gradient of the answer’s loss in layer ${state.layer}, summed over heads, from the framed word; the largest is the strongest.`
        : ` Blue: what the framed word looks at in layer ${state.layer}, on average over heads.`;
      const layers = Number(state.layers) > 1 ? `one of the first ${state.layers} layers` : "the first layer";
      const kinds = `Underlined: label words.${few ? ` Dotted: ${others(state)}.` : ""}`;
      const struck = m.off.size ? ` <b>Struck through: cut off in ${layers}.</b>` : "";
      const unknown = m.unknown.length ? ` The network does not know: ${Live.escaped(m.unknown.join(", "))}.` : "";
      const view = `<div class="live-prompt" aria-hidden="true">${text}</div><p class="live-note">${kinds}${struck} Pale: words without a topic.${blue}${unknown}</p>` +
        bars(`How likely each label is${cutting ? " (grey: without the cut)" : ""}`, rows);
      const more = `<div class="live-row-of">${bars(`${m.salient ? "Share of a layer’s saliency" : "Attention"}: text to label word (above), label words to the end (below)`, flow)}</div>`;
      const numbers = [
        ["without a cut", `${m.was} ${Math.max(...m.before).toFixed(2)}`, ""],
        [cutting ? `${state.cut === "labels" ? "the label words" : others(state)} cut off` : "with a cut", cutting ? `${m.answer} ${chance.toFixed(2)}` : "?", ""],
      ];
      const cut = m.off.size ? ` Cut off in ${layers}: ${[...m.off].sort((a, b) => a - b).map((i) => `“${Live.escaped(m.words[m.tokens[i]])}”`).join(", ")}.` : "";
      const said = `The network answers ${m.answer}, ${chance.toFixed(2)}; without a cut ${m.was}.${state.show === "none" ? "" : ` From “${m.words[m.tokens[m.place]]}”, layer ${state.layer} looks most at “${m.words[m.tokens[m.look.indexOf(Math.max(...m.look))]]}”.`}${cut}${unknown}`;
      return { numbers, view, more, said, ...m };
    },

    tasks: [
      { text: "Give the text about fish the label Alpha, then Ember. Does the answer follow?",
        seen: [
          (s, m) => s.l1 !== first.l1 && s.cut === "none" && m.answer === s.l1 && demos(s).length === DEMOS && TRAINED.includes(s.l1),
          (s, m) => s.l1 !== first.l1 && s.cut === "none" && m.answer !== s.l1 && demos(s).length === DEMOS && !TRAINED.includes(s.l1),
        ],
        found: (s, m) => `the answer follows to a label that the network knows from training (${TRAINED.join(", ")}): it takes the label from the prompt. To a word that was never a label it does not follow: with ${s.l1} the answer is ${m.answer} (${Math.max(...m.now).toFixed(2)}).` },
      { text: "Cut the label words off in one layer, so that the answer changes. Then cut off four other words: does it change back?",
        seen: [(s, m) => s.cut === "labels" && Number(s.layers) === 1 && m.answer !== m.was, (s, m) => s.cut === "random" && Number(s.layers) === 1 && m.answer === m.was],
        found: (s, m) => `cut off in one layer, the label words give another answer than ${m.was}; ${others(s)} do not change it.` },
      { text: "Leave out the text about fish. Where does the answer come from now?",
        seen: [(s, m) => s.cut === "none" && Number(s.drop) === 1 && m.answer !== "Cedar"],
        found: (s, m) => `the answer is ${m.answer} (${Math.max(...m.now).toFixed(2)}), the label of text ${[2, 3, 4].find((i) => s[`l${i}`] === m.answer)}: “${s[`t${[2, 3, 4].find((i) => s[`l${i}`] === m.answer)}`]}”.` },
    ],
  });
}
