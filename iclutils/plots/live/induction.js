// Figure 1: the induction pair (notebook 01). Letters in, the next letter out; heads switched off,
// the path into the keys of induction heads cut, checkpoints of training, two other networks. In a
// notebook, the same for a network and tokens that a cell hands over. `copies`, on the front page,
// is its simplest part: the letters, and heads to switch off.
{
  // The ids of the letters: the first sixteen are those of the notebook's example, the others are as
  // good. The alphabet's order would look like knowledge of the alphabet.
  // A and B come late: the page gives these names to two roles.
  const EXAMPLE = [275, 492, 263, 150, 111, 225, 391, 439, 259, 307, 300, 45, 12, 438, 28, 253];
  const LETTERS = "KDPSGMTOFJCNLHEIQRABUVWXYZabcdefghijklmnopqrstuvwxyz", BOS = 511;
  const IDS = [...EXAMPLE];
  for (let id = 3; IDS.length < LETTERS.length; id += 9) if (!IDS.includes(id)) IDS.push(id);
  const LETTER = new Map(IDS.map((id, i) => [id, LETTERS[i]]));
  const MOST = 47, CHECKPOINTS = [0, 600, 850, 1000, 4000];
  const ROLE = 0.4; // a head counts as a previous-token head above this score, as in the notebook

  const copied = (text) => text + text;
  const readable = (text) => [...text].filter((c) => LETTERS.includes(c)).slice(0, 2 * MOST);
  const tokensOf = (text) => [BOS, ...readable(text).map((c) => IDS[LETTERS.indexOf(c)])];
  const nameOfLetter = (id) => LETTER.get(id) ?? (id === BOS ? "BOS" : "other");
  const headOf = (text) => text.split(".").map(Number);

  // Mean attention from every place q but the first to the place at(q): pattern (dest, src)
  function meanLook(pattern, n, at) {
    let sum = 0;
    for (let q = 1; q < n; q++) sum += pattern[q * n + at(q)];
    return sum / (n - 1);
  }
  const before = (q) => q - 1, bos = () => 0;

  // Prefix matching: attention to what followed an earlier copy of the token, summed over earlier
  // copies, mean over the places that have one; NaN where nothing repeats
  function prefixScore(pattern, tokens) {
    const n = tokens.length;
    let sum = 0, places = 0;
    for (let q = 2; q < n; q++) {
      const earlier = tokens.map((t, p) => p).filter((p) => p > 0 && p < q && tokens[p] === tokens[q]);
      if (!earlier.length) continue;
      places++;
      for (const p of earlier) sum += pattern[q * n + p + 1];
    }
    return places ? sum / places : NaN;
  }

  // The entries that a repetition announces: the pair of a token and the next has stood before
  function announced(tokens) {
    const seen = new Set(), found = [];
    for (let i = 0; i + 1 < tokens.length; i++) {
      const pair = `${tokens[i]} ${tokens[i + 1]}`;
      if (seen.has(pair)) found.push(i);
      seen.add(pair);
    }
    return found;
  }

  // Another sequence of the same length, which repeats where this one's half would: what a head
  // writes there says something plausible and wrong
  function another(tokens) {
    const half = Math.max(1, Math.ceil((tokens.length - 1) / 2));
    const own = new Set(tokens), uniform = Live.random(7);
    const free = Array.from({ length: 511 }, (_, id) => id).filter((id) => !own.has(id));
    const drawn = Live.shuffled(free, uniform);
    return tokens.map((_, i) => (i ? drawn[(i - 1) % half] : BOS));
  }

  const random = {}; // the network with random weights of a seed, made once
  function network(state, parts) {
    const net = (parts[0].net ??= Transformer.network(parts[0]));
    if (state.model !== "random") return net;
    return (random[state.seed] ??= Gpt2.random(net, Live.normal(Live.random(state.seed))));
  }

  // given: {config: {width, heads, pos, tokens, names}, tensors}, a network of a notebook, or nothing
  function define(given) {
    const weights = given?.tensors, vocab = weights?.["wte.weight"].shape[0], word = given ? "token" : "letter";
    const layers = given ? Object.keys(weights).filter((name) => name.endsWith("qkv.bias")).length : 2;
    const all = (layer) => Array.from({ length: given?.config.heads ?? 4 }, (_, head) => [layer, head]);
    const everyHead = Array.from({ length: layers }, (_, layer) => all(layer)).flat();
    const ids = (text) => text.split(/[\s,]+/).filter(Boolean).map(Number).filter((id) => Number.isInteger(id) && id >= 0 && id < vocab);
    const read = given ? (text) => (ids(text).length ? ids(text).slice(0, given.config.pos) : [0]) : tokensOf;
    const nameOf = given ? (id) => given.config.names[id] ?? String(id) : nameOfLetter;

    // Everything that the figure says of a state
    function measured(state, parts) {
      const net = network(state, parts), tokens = read(state.text), n = tokens.length;
      const plain = Gpt2.forward(net, tokens);
      const square = (run, [layer, head]) => run.patterns[layer].subarray(head * n * n, (head + 1) * n * n);
      const previous = all(0).map((head) => meanLook(square(plain, head), n, before));
      const most = Math.max(...previous);
      const roles = all(0).filter((_, h) => previous[h] > ROLE || previous[h] === most);
      const hooks = { ablate: [], keys: [] }, off = state.off.split(" ").filter(Boolean);
      for (const name of off) {
        const [layer, head] = headOf(name), z = plain.z[layer];
        hooks.ablate.push({ layer, head, z: state.how === "zero" ? null : Transformer.meanOfHead(net, z, head) });
      }
      if (state.from !== "none") {
        const other = Gpt2.forward(net, another(tokens));
        const sources = state.from === "previous" ? roles : [headOf(state.from)];
        const readers = state.into === "all" ? all(1) : [headOf(state.into)];
        for (const to of readers)
          for (const from of sources) hooks.keys.push({ from, to, z: Transformer.ofHead(net, other.z[0], from[1]) });
      }
      const changed = hooks.ablate.length || hooks.keys.length;
      const run = changed ? Gpt2.forward(net, tokens, hooks) : plain;
      const repeats = announced(tokens), asked = repeats.length || !given ? repeats : tokens.map((_, i) => i).slice(0, -1);
      const places = tokens.map((_, i) => Gpt2.nextToken(run, i).map(Math.exp));
      const guesses = places.map((p) => p.indexOf(Math.max(...p)));
      const right = asked.filter((i) => guesses[i] === tokens[i + 1]).length;
      const loss = asked.reduce((sum, i) => sum - Math.log(places[i][tokens[i + 1]]) / asked.length, 0);
      const scores = Array.from({ length: layers }, (_, layer) => all(layer).map((head) => prefixScore(square(run, head), tokens)));
      const head = headOf(state.head), prefix = scores[head[0]][head[1]];
      const on = everyHead.filter((one) => !off.includes(one.join("."))).map(([layer, h]) => [`${layer}.${h}`, scores[layer][h]]);
      const [leader, best] = on.reduce((a, b) => (a[1] >= b[1] ? a : b), ["none", NaN]);
      const at = Math.min(state.place, n - 1);
      return { tokens, n, run, asked, places, guesses, right, loss, prefix, roles, head, at, off, best, leader, keys: hooks.keys,
        count: asked.length, repeats: repeats.length > 0, silent: off.includes(state.head), pattern: square(run, head) };
    }

    // The attention of the chosen head, as a map: rows look, columns are looked at
    function map({ tokens, n, pattern, at, head }) {
      const every = Math.ceil(n / 36), size = 10, edge = 14 * every, whole = edge + size * n, shades = Array.from({ length: 11 }, () => "");
      for (let q = 0; q < n; q++)
        for (let k = 0; k <= q; k++)
          shades[Math.round(10 * pattern[q * n + k])] += `M${edge + k * size} ${edge + q * size}h${size}v${size}h-${size}z`;
      const cells = shades.map((d, i) => (i && d ? `<path d="${d}" opacity="${i / 10}"/>` : "")).join("");
      const letter = (t) => (!given && t === BOS ? "·" : Live.escaped(nameOf(t).slice(0, 3)));
      const names = tokens.map((t, i) => (i % every ? "" : `<text x="${edge + (i + 0.5) * size}" y="${edge - 4}">${letter(t)}</text>` +
        `<text x="${7 * every}" y="${edge + (i + 0.8) * size}">${letter(t)}</text>`)).join("");
      const row = `<rect class="live-row" x="${edge}" y="${edge + at * size}" width="${size * n}" height="${size}"/>`;
      const hits = tokens.map((_, i) => `<rect class="live-hit" x="0" y="${edge + i * size}" width="${whole}" height="${size}" data-pick='{"place":${i}}'/>`).join("");
      return `<svg class="live-square" viewBox="0 0 ${whole} ${whole}" role="img" aria-label="Attention of head ${head.join(".")}: each row is a place, each column a place that it looks at.">` +
        `<path class="live-ground" d="M${edge} ${edge}v${size * n}h${size * n}z"/>` +
        `<g class="live-a">${cells}</g><g class="live-letters" style="--every: ${every}">${names}</g>${row}${hits}</svg>`;
    }

    // Bars with names and numbers: [name, value in 0..1, class]
    function bars(title, rows) {
      const line = 22, height = line * rows.length + 4;
      const drawn = rows.map(([name, value, mark], i) =>
        `<text x="46" y="${i * line + 16}" text-anchor="end">${Live.escaped(name)}</text>` +
        `<rect class="live-${mark}" x="52" y="${i * line + 4}" width="${(180 * value).toFixed(1)}" height="${line - 7}"/>` +
        `<text x="${(57 + 180 * value).toFixed(1)}" y="${i * line + 16}">${value.toFixed(2)}</text>`).join("");
      const said = rows.map(([name, value]) => `${name}: ${value.toFixed(2)}`).join("; ");
      return `<p class="live-head">${title}</p><svg viewBox="0 0 280 ${height}" role="img" aria-label="${Live.escaped(said)}">${drawn}</svg>`;
    }

    // The sequence: each letter, and below it what the network says comes next
    function strip({ tokens, n, guesses, asked, at, pattern }) {
      const half = (n + 1) / 2, again = tokens.slice(half).every((t, i) => t === tokens[i + 1]); // where a second copy begins, and if
      const cells = tokens.map((t, i) => {
        const known = asked.includes(i), hit = i + 1 < n && guesses[i] === tokens[i + 1];
        const guess = nameOf(guesses[i]), look = i <= at ? pattern[at * n + i] : 0;
        const mark = known ? (hit ? " ✓" : " ✗") : "", said = guess === "other" ? "?" : Live.escaped(guess);
        const says = !given && !known && tokens.indexOf(t) === i ? `<small>·</small>` : said + mark; // what follows a new token, nobody can know
        return `${again && i === half ? `<span class="live-break"></span>` : ""}<span class="live-cell${i === at ? " live-here" : ""}${known ? (hit ? " live-right" : " live-wrong") : ""}" data-pick='{"place":${i}}'>` +
          `<b style="--look:${look.toFixed(2)}">${Live.escaped(nameOf(t))}</b><i>${says}</i></span>`;
      });
      return `<div class="live-strip" aria-hidden="true">${cells.join("")}</div>`;
    }

    const number = (value, digits) => (Number.isNaN(value) ? "–" : value.toFixed(digits));
    // Whether the head looks most at what stood two places after an earlier copy of the token
    function late({ tokens, n, pattern, at }) {
      const row = pattern.subarray(at * n, at * n + at + 1), k = row.indexOf(Math.max(...row));
      return k > 2 && tokens[k - 2] === tokens[at];
    }
    const plain = (s, m) => s.model === "induction-3" && !s.off && s.from === "none" && m.count > 9;
    const trained = (s) => s.model === "induction-3" && Number(s.step) === 4;

    const page = {
      title: "The induction pair, live",
      beside: true,
      first: { text: copied("KDPSGMTOFJCNLHEI"), model: "induction-3", step: 4, seed: 1, head: "1.3",
        place: 19, off: "", how: "zero", from: "none", into: "1.3" },
      needs: ({ model, step }) => [model === "induction-3" ? `induction-3-${CHECKPOINTS[step] ?? 4000}`
        : model === "detour" ? "detour" : "induction-3-0"],

      bet: {
        asks: "When head 0.2 is off, no letter of the second copy is right. Where does this head look?",
        choices: ["at the letter to copy, as head 1.3 does", "at the letter just before", "at BOS"],
        deed: "Now choose head 0.2 under “Head to look at”.",
        answer(s, m) {
          if (!trained(s) || s.head !== "0.2" || !m.repeats) return null;
          const looks = [m.prefix, meanLook(m.pattern, m.n, before), meanLook(m.pattern, m.n, bos)], most = Math.max(...looks);
          return [looks.indexOf(most), `The dark line in the map runs right below the diagonal: ${looks[1].toFixed(2)} of its attention goes to the letter just before. ` +
            "But the network has just read that letter, and must copy another. What can such a look be good for?"];
        },
      },

      fields(state) {
        const heads = everyHead.map((head) => head.join("."));
        const n = tokensOf(state.text).length;
        return [
          { kind: "checks", name: "off", label: "Switch heads off (layer.head)", class: "live-heads", options: heads.map((h) => [h, h]) },
          { kind: "select", name: "head", label: "Head to look at", options: heads.map((h) => [h, `head ${h}`]) },
          ...(state.model === "induction-3" ? [{ kind: "range", more: true, name: "step", label: "How long it has trained", min: 0, max: 4, said: (i) => `${CHECKPOINTS[i]} training steps (saved: ${CHECKPOINTS.join(", ")})` }] : []),
          { kind: "text", more: true, name: "text", label: `Letters, up to ${2 * MOST} (a to z, A to Z)` },
          { kind: "actions", more: true, options: [
            ["Repeat it", (s) => ({ ...s, text: copied(readable(s.text).slice(0, MOST).join("")) })],
            ["Shuffle, then repeat", (s) => ({ ...s, text: copied(Live.shuffled([...new Set(readable(s.text))], Math.random).slice(0, MOST).join("")) })],
          ] },
          { kind: "select", more: true, name: "model", label: "Network", options: [["induction-3", "induction-3"], ["detour", "detour"], ["random", "random weights"]] },
          ...(state.model === "random" ? [{ kind: "range", more: true, name: "seed", label: "Draw of the weights", min: 1, max: 9, said: (i) => `${i}` }] : []),
          { kind: "range", more: true, name: "place", label: "Place to look from", min: 0, max: n - 1, said: (i, { text }) => `${i}, ${nameOf(tokensOf(text)[i])}` },
          { kind: "radios", more: true, name: "how", label: "The output of a head that is off is replaced by", options: [["zero", "zero"], ["mean", "its average over the letters"]] },
          { kind: "select", more: true, name: "from", label: "Cut a path: the output of", options: [["none", "no head (no cut)"], ["previous", "all previous-token heads"], ...heads.slice(0, 4).map((h) => [h, `head ${h}`])] },
          { kind: "select", more: true, name: "into", label: "on its way into the keys of", options: [...heads.slice(4).map((h) => [h, `head ${h}`]), ["all", "all heads of layer 1"]] },
        ];
      },

      draw(state, parts) {
        const m = measured(state, parts), { count } = m;
        const p = m.places[m.at], top = [...p.keys()].sort((a, b) => p[b] - p[a]).slice(0, 3);
        const next = m.tokens[m.at + 1], here = nameOf(m.tokens[m.at]);
        const looked = Array.from({ length: m.at + 1 }, (_, k) => k).sort((a, b) => m.pattern[m.at * m.n + b] - m.pattern[m.at * m.n + a]).slice(0, 3);
        const numbers = [
          [`${word}s right`, count ? `${m.right} of ${count}` : "–", m.repeats ? "in the second copy" : "nothing repeats"],
          [`head ${m.head.join(".")} looks at the ${word} to copy`, m.silent ? "off" : number(m.prefix, 2), `of 1; the most${m.off.length ? " of those that are on" : ""}: ${Number.isNaN(m.best) ? "–" : `head ${m.leader}, ${number(m.best, 2)}`}`],
        ];
        const list = (heads) => [...new Set(heads.map((one) => one.join(".")))].join(", ");
        const cut = m.keys.length ? ` Cut: the keys of ${list(m.keys.map(({ to }) => to))} get the output that ${list(m.keys.map(({ from }) => from))} has on a sequence of other letters.` : "";
        const unread = given ? "" : [...new Set(state.text)].filter((c) => !LETTERS.includes(c)).join(" ");
        const unlettered = !given && m.asked.some((i) => nameOf(m.guesses[i]) === "other");
        const note = `Small: what the network says comes next${given ? "" : " (a dot: nobody can know)"}. ` +
          `Blue: where head ${m.head.join(".")} looks from the framed ${word}; touch another to look from there.${unlettered ? " ? is a token that has no letter here." : ""}` +
          `${unread && ` Left out, since no letters: ${Live.escaped(unread)}.`}${cut}`;
        const looks = bars(`From ${here} at place ${m.at} it looks at`, looked.map((k) => [`${nameOf(m.tokens[k])}, ${k}`, m.pattern[m.at * m.n + k], "a"]));
        const likely = bars("The network says what comes next", top.filter((v, i) => !i || p[v] >= 0.005).map((v) => [nameOf(v), p[v], v === next ? "c" : "b"]));
        const view = `${strip(m)}<p class="live-note">${note}</p><div class="live-row-of">` +
          `<div><p class="live-head">Where head ${m.head.join(".")} looks, from every place${m.silent ? `<br>(off: it still looks, but writes ${state.how === "mean" ? "its average" : "nothing"})` : ""}</p>${map(m)}</div></div>`;
        const wrong = count ? `Loss in the second copy: ${m.loss.toFixed(2)} nats. Blind guessing: ${Math.log(m.run.vocab).toFixed(2)}.` : "";
        const more = `<p class="live-note">${wrong}</p><div class="live-row-of"><div>${looks}</div><div>${likely}</div></div>`;
        const said = count
          ? `Prefix matching: ${number(m.prefix, 2)} of head ${m.head.join(".")}, ${number(m.best, 2)} of the best head; loss ${m.loss.toFixed(2)}; ${m.right} of ${count} ${word}s right. ` +
            `From ${here} at place ${m.at} the head looks most at ${nameOf(m.tokens[looked[0]])} at place ${looked[0]}; the network says ${nameOf(top[0])}, ${p[top[0]].toFixed(2)}${next === undefined ? "" : `; ${nameOf(next)} follows`}.`
          : "Nothing repeats in these letters: press “Repeat it”.";
        return { numbers, view, more, said, ...m };
      },

      tasks: [
        { text: "When did the network learn to copy? Find the two saved steps between which it happened.",
          seen: [(s, m) => Number(s.step) === 1 && plain(s, m) && m.right < 5, (s, m) => Number(s.step) === 2 && plain(s, m) && m.right > 9],
          found: () => "after 600 steps hardly a letter is right, and after 850 steps nearly all are." },
        { text: "Does head 1.3 look by the note of a head before it? Cut one path into its keys, so that its prefix matching falls below 0.1.",
          seen: [(s, m) => trained(s) && !s.off && s.into === s.head && s.from !== "none" && m.prefix < 0.1 && m.count > 14],
          found: (s, m) => `without this path, the prefix matching of head ${s.head} is only ${m.prefix.toFixed(2)}.` },
        { text: "Choose the network “detour”. It copies as well: which of the two numbers misses that? See what its heads of layer 1 look at, from letters of the second copy.",
          seen: [(s, m, last) => s.model === "detour" && last?.state.model === "detour" && (s.head !== last.state.head || s.place !== last.state.place) && !s.off && m.right > 10 && m.best < 0.1 && m.head[0] === 1 && late(m)],
          found: (s, m) => `prefix matching is ${m.best.toFixed(2)} at best, and ${m.right} of ${m.count} tokens are right. Head ${s.head} looks one place beyond the token that comes next.` },
      ],
    };
    const copies = {
      title: "A network that copies",
      first: { off: "" },
      needs: () => ["induction-3-4000"],
      bet: {
        asks: "Can one head alone stop the copying, so that no letter of the second copy is right?",
        choices: ["no, the other heads are enough", "yes, one of the first layer", "yes, one of the second layer"],
        deed: "Now switch off one head at a time.",
        answer(s, m, memory, choice) {
          if (m.off.length !== 1) return [undefined, m.off.length ? `${m.off.length} heads are off at once. Switch them on again, and off one at a time.` : copies.bet.deed];
          memory[s.off] = m.right;
          const second = all(1).map((head) => memory[head.join(".")]), four = "Now switch it on again, and switch off all four heads of the second layer. Then read chapter 01, which says why.";
          if (m.right === 0) return [s.off[0] === "0" ? 1 : 2, `Without head ${s.off} none of the ${m.count} letters is right. ${four}`];
          if (choice === 2 && second.every((right) => right > 0)) return [null, "No head of the second layer stops it alone. Look in the first."];
          return [undefined, `Without head ${s.off}, ${m.right} of ${m.count} letters are right. Try another head.`];
        },
        later(s, m) {
          if (s.off !== all(1).map((head) => head.join(".")).join(" ")) return null;
          return `Without all four, ${m.right} of ${m.count} letters are right. Without any one of them, at least ${m.least} are. So each can be spared, and not all of them: a head that can be missing may still do work (chapter 06).`;
        },
      },
      fields: () => [{ kind: "checks", name: "off", label: "Switch heads off: 0.0 to 0.3 are in the first layer, 1.0 to 1.3 in the second", class: "live-heads", options: everyHead.map((head) => [head.join("."), head.join(".")]) }],
      draw(state, parts) {
        const without = (off) => measured({ ...page.first, off }, parts), m = without(state.off);
        const singly = all(1).map((head) => head.join(".")), least = state.off === singly.join(" ") ? Math.min(...singly.map((off) => without(off).right)) : null;
        const sure = m.asked.map((i) => m.places[i][m.tokens[i + 1]]);
        const mean = sure.reduce((sum, p) => sum + p, 0) / m.count;
        const numbers = [
          ["letters right in the second copy", `${m.right} of ${m.count}`, ""],
          ["how sure it is of the right letter there", mean.toFixed(2), `from 0 to 1; a blind guess among its ${m.run.vocab} tokens: ${(1 / m.run.vocab).toFixed(3)}`],
        ];
        const view = `${strip({ ...m, pattern: new Float64Array(m.pattern.length), at: -1 })}<p class="live-note">Large: the letters that the network reads. Small: what it says comes next. In the first row this cannot be known, so a dot stands there. (It knows ${m.run.vocab} tokens; ? is one that has no letter here.)</p>`;
        return { numbers, view, said: `${m.right} of ${m.count} letters of the second copy are right.`, ...m, least };
      },
    };
    if (!given) return { page, copies };

    const options = everyHead.map((head) => [head.join("."), head.join(".")]);
    return {
      title: "The heads of your network",
      first: { text: given.config.tokens.join(" "), head: options.at(-1)[0], place: given.config.tokens.length - 1, off: "", how: "zero", from: "none" },
      draw: page.draw,
      fields: (state) => [
        { kind: "checks", name: "off", label: "Switch heads off (layer.head)", options },
        { kind: "radios", name: "head", label: "Head to look at", options },
        { kind: "range", name: "place", label: "Place to look from", min: 0, max: read(state.text).length - 1, said: (i, { text }) => `${i}, ${nameOf(read(text)[i])}` },
        { kind: "text", more: true, name: "text", label: `Tokens: ids, up to ${given.config.pos}` },
        { kind: "radios", more: true, name: "how", label: "The output of a head that is off is replaced by", options: [["zero", "zero"], ["mean", "its average over the tokens"]] },
      ],
    };
  }

  const { page, copies } = define(null);
  Live.figure("induction", page, define);
  Live.figure("copies", copies);
}
