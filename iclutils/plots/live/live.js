// What all live figures share: weights loaded on demand, controls, a bet, the state in the address.
//
// A figure's script calls Live.figure(name, {title, first, needs, fields, draw, ..}):
//   first           the state at the start: an object of strings and numbers
//   needs(state)    the scripts of weights that it takes: ["detour"]
//   fields(state)   its controls; see `control` below. Those with `more: true` stand under *More*.
//   draw(state, nets)  -> {numbers: [[name, value, note]], view, said, ..}: three numbers, the
//                   picture as HTML, and a sentence for those who listen; nets holds the networks
//                   of the scripts, in their order. Optional: more, a further picture under *More*
//   beside          optional: whether the numbers stand to the right of the picture, where there is room
//   bet             optional: {asks, choices: [text], deed, answer(state, drawn, memory, choice)}: a
//                   question, what to do to find out, and, once the reader's own deeds have answered
//                   it, [index of the right choice, what they showed]; [null, text] where they only
//                   refute the choice; [undefined, text] where they show something else; null before.
//                   memory is an object for what was seen earlier. Once it is answered, the optional
//                   later(state, drawn) says what further deeds show, or null. With `before: true`
//                   the controls outside *More* wait for a choice, and a press on them brings the picture into sight;
//                   what waits on the page for its bets then waits for the deed, too
//   tasks           optional: [{text, seen: [(state, drawn, last) -> whether], found(state, drawn)}]:
//                   more to see, in any order, and what that says; last is {state, drawn} as before
//   change(state)   optional -> state, once something has changed it
//   drag(state, id, x, y)  optional -> state: what it means to drag [data-drag=id] to there; where
//                   points overlap, the nearest is meant, and one with data-yields last
// On a page the figure is the element #live-NAME with a .live-view and .live-numbers, which hold the
// still: the first state as this script has drawn it (tests/pages/test_live.py). Weights are read
// when the reader first acts. In a notebook Live.open(element, name, given) makes it for a network
// that a cell hands over (iclutils/plots/live/__init__.py).
const Live = (() => {
  const own = document.currentScript;
  const weights = {}, loading = {}, OWN = "what a reader did"; // as the state of the page's entry
  if (history.state === OWN) // it is loaded again: its bets are forgotten, and so is what was pressed
    history.replaceState(null, "", location.pathname + location.search);

  // Half precision to numbers, by a table of all 65 536 halves
  let halves;
  function half(bits) {
    halves ??= Float32Array.from({ length: 65536 }, (_, b) => {
      const sign = b >> 15 ? -1 : 1, exponent = (b >> 10) & 31, part = b & 1023;
      if (exponent === 31) return part ? NaN : sign * Infinity;
      return sign * (exponent ? (1 + part / 1024) * 2 ** (exponent - 15) : (part / 1024) * 2 ** -14);
    });
    return halves[bits];
  }

  function decode(part) {
    const { name, step, config, dtype, tensors, data } = part;
    if (!tensors) return part; // a record of a run: no weights
    let bytes = data; // in a notebook
    if (typeof data === "string") {
      const text = atob(data);
      bytes = new Uint8Array(text.length);
      for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
    }
    const numbers = dtype === "f2" ? Float32Array.from(new Uint16Array(bytes.buffer), half)
      : new Float32Array(bytes.buffer);
    const found = {};
    let at = 0;
    for (const [full, ...shape] of tensors) {
      const size = shape.reduce((product, n) => product * n, 1);
      found[full] = { shape, data: numbers.subarray(at, (at += size)) };
    }
    return { name, step, config, tensors: found };
  }

  // The networks of a script of weights, loaded once
  function load(key) {
    return (loading[key] ??= new Promise((done, fail) => {
      const script = document.createElement("script");
      script.src = new URL(`weights/${key}.js`, own.src);
      script.onload = () => {
        done(weights[key].map(decode));
        delete weights[key]; // the text is as long as the numbers
      };
      script.onerror = () => {
        delete loading[key];
        fail(new Error(`The weights of ${key} could not be read.`));
      };
      document.head.append(script);
    }));
  }

  // Uniform draws from a seed (mulberry32), and normal ones
  function random(seed) {
    let a = seed >>> 0;
    return () => {
      a = (a + 0x6d2b79f5) | 0;
      let t = Math.imul(a ^ (a >>> 15), 1 | a);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  }
  const normal = (uniform) => () =>
    Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  function shuffled(list, uniform) {
    const out = [...list];
    for (let i = out.length - 1; i > 0; i--) {
      const j = Math.floor(uniform() * (i + 1));
      [out[i], out[j]] = [out[j], out[i]];
    }
    return out;
  }

  // An element: make("label", {class: "x"}, "text", child, ..); functions listen
  function make(tag, attributes = {}, ...inside) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== false) element.setAttribute(name, value === true ? "" : value);
    element.append(...inside);
    return element;
  }
  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

  // A control for each field; change(state) takes the new state. Kinds, with `name` and `label`:
  //   text     a line of text
  //   range    min, max, step, said(value, state): a slider, and its value in words
  //   select   options: [[value, label]]
  //   radios   options, as buttons of which one is pressed
  //   checks   options, of which some: the state holds their values with blanks between
  //   actions  options: [[label, (state) => state]]
  // and optional: more, class. -> {element, set(state)}
  const mark = Math.random().toString(36).slice(2, 8); // of this copy: a notebook may have several
  let count = 0;
  function control(field, get, change) {
    const { kind, name, label, options = [] } = field, id = `live-${mark}-${++count}`;
    const put = (value) => change({ ...get(), [name]: value });
    if (kind === "actions") {
      const buttons = options.map(([text, act]) =>
        make("button", { type: "button", click: () => change(act(get())) }, text));
      return { element: make("div", { class: "live-actions" }, ...buttons), set() {} };
    }
    if (kind === "radios" || kind === "checks") {
      const many = kind === "checks", inputs = [];
      const chosen = () => inputs.filter((input) => input.checked).map((input) => input.value);
      const pills = options.map(([value, text]) => {
        const input = make("input", { type: many ? "checkbox" : "radio", name: id, value,
          change: () => put(chosen().join(" ")) });
        inputs.push(input);
        return make("label", { class: "live-pill" }, input, make("span", {}, text));
      });
      return {
        element: make("fieldset", { class: `live-${kind} ${field.class ?? ""}` }, make("legend", {}, label), ...pills),
        set(state) {
          const on = String(state[name]).split(" ");
          for (const input of inputs) input.checked = on.includes(input.value);
        },
      };
    }
    const said = make("span", { class: "live-said", "aria-hidden": "true" }); // the slider tells it
    let before; // of a slider: its value when a finger came down
    const input = kind === "select"
      ? make("select", { id, change: () => put(input.value) },
        ...options.map(([value, text]) => make("option", { value }, text)))
      : kind === "range"
        ? make("input", { id, type: "range", min: field.min, max: field.max, step: field.step ?? 1,
          input: () => put(Number(input.value)),
          pointerdown: () => (before = get()[name]),
          pointercancel: () => put(before) }) // a finger that scrolls the page moves nothing
        : make("input", { id, type: "text", spellcheck: "false", input: () => put(input.value) });
    return {
      element: make("div", { class: `live-field live-${kind}` }, make("label", { for: id }, label, " ", said), input),
      set(state) {
        if (kind === "select" || input !== document.activeElement || String(input.value) !== String(state[name]))
          input.value = state[name];
        if (!field.said) return;
        said.textContent = field.said(state[name], state);
        input.setAttribute("aria-valuetext", said.textContent);
      },
    };
  }

  // What differs from the first state, as a part of the address: #live-step?rate=2;live-waves?scale=3
  const addressed = () => location.hash.slice(1).split(";").filter((part) => part.startsWith("live-"));
  const placeOf = (part) => part.split("?")[0];
  function written(name, first, state) {
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries(state))
      if (String(value) !== String(first[key])) query.set(key, value);
    return `live-${name}${query.size ? `?${query}` : ""}`;
  }
  function readFrom(name, first) {
    const part = addressed().find((part) => placeOf(part) === `live-${name}`);
    if (part === undefined) return null;
    const state = { ...first };
    for (const [key, value] of new URLSearchParams(part.split("?")[1] ?? ""))
      if (key in first) state[key] = typeof first[key] === "number" ? Number(value) || 0 : value;
    return state;
  }

  // -> the state with values that its controls offer, and a sentence for each that they do not
  function offered({ fields, first }, state) {
    const found = { ...state }, options = {}, labels = {};
    for (const { kind, name, label, min, max, options: given = [] } of fields(state)) {
      labels[name] ??= label;
      if (kind === "range") found[name] = Math.max(min, Math.min(max, state[name]));
      else if (kind !== "text" && name) (options[name] ??= []).push(...given.map(([value]) => String(value)));
    }
    for (const [name, values] of Object.entries(options)) {
      if (values.includes(String(state[name]))) continue; // one may have blanks in it
      const asked = String(state[name]).split(" ").filter(Boolean), kept = asked.filter((value) => values.includes(value));
      if (kept.length < asked.length) found[name] = kept.join(" ") || first[name];
    }
    const told = Object.keys(found).filter((name) => String(found[name]) !== String(state[name])).map((name) =>
      `“${labels[name]}” cannot be “${state[name]}” here; it is “${found[name] || "none"}”.`);
    return [found, told.join(" ")];
  }

  const told = (numbers) => numbers.map(([name, value, note]) =>
    `<div><dt>${name}</dt><dd><b>${value}</b> <small>${note}</small></dd></div>`).join("");

  // Children of an element, touching only those that differ, so that the focus stays
  function arrange(parent, children) {
    for (const child of [...parent.children]) if (!children.includes(child)) child.remove();
    children.forEach((child, i) => parent.children[i] !== child && parent.insertBefore(child, parent.children[i] ?? null));
  }

  // Choices to press, and later whether the choice was right
  //   -> {element, see(state, drawn), clear(), isOpen()}
  function bet({ asks, choices, deed, before, answer, later }, announce, chosen) {
    let choice = null, memory = {}, done = false, latest = null, read = false;
    const told = make("p", { class: "live-told", role: "status" });
    const buttons = choices.map((text, i) => make("button", { type: "button", "aria-pressed": "false", click: () => {
      if (done) return;
      choice = i;
      buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(k === i)));
      told.textContent = `You bet on “${text}”. ${deed}`;
      if (latest) see(...latest); // where the reader has seen it before
      chosen();
    } }, text));
    // at the lower edge of the window until it has been in sight, and while no choice is
    const inSight = new Set();
    const watch = new IntersectionObserver((changes) => {
      for (const { target, isIntersecting, intersectionRatio } of changes)
        inSight[(target === told ? intersectionRatio > 0.9 : isIntersecting) ? "add" : "delete"](target);
      announce(inSight.size ? "" : told.textContent);
      if ((read = inSight.has(told))) watch.disconnect();
    }, { threshold: [0, 0.9] });
    function see(state, drawn) {
      latest = [state, drawn];
      const [right, text] = (done ? [undefined, later?.(state, drawn) ?? undefined] : answer(state, drawn, memory, choice)) || [];
      if (text === undefined || (right === undefined && choice === null)) return;
      const verdict = choice === null || right === undefined ? "" : choice === right ? "Your bet was right. " : "Your bet was wrong. ";
      read &&= told.textContent === verdict + text;
      told.textContent = verdict + text;
      watch.disconnect();
      if (!read) for (const part of [told, ...buttons]) watch.observe(part);
      if (right === null || right === undefined) return;
      done = true;
      buttons.forEach((button, i) => {
        button.disabled = true;
        button.classList.toggle("live-right", i === right);
        button.classList.toggle("live-wrong", i === choice && i !== right);
      });
    }
    function clear() {
      watch.disconnect();
      inSight.clear();
      [choice, memory, done, latest, read, told.textContent] = [null, {}, false, null, false, ""];
      for (const button of buttons) {
        button.disabled = false;
        button.classList.remove("live-right", "live-wrong");
        button.setAttribute("aria-pressed", "false");
      }
    }
    const element = make("fieldset", { class: before ? "live-bet live-by-deed" : "live-bet" }, make("legend", {}, make("b", {}, "Your bet. "), asks), ...buttons, told);
    return { element, see, clear, isOpen: () => choice === null };
  }

  // Make a figure of an element that has a view and numbers; parts: networks that are at hand
  // -> {change(state, linked), go}
  function start(name, figure, root, parts) {
    const view = root.querySelector(".live-view"), figures = root.querySelector(".live-numbers");
    const front = make("div", { class: "live-controls" }), back = make("div", { class: "live-controls" }), detail = make("div", { class: "live-detail" });
    const status = make("p", { class: "live-status", role: "status" });
    const news = make("p", { class: "live-news", role: "status" }); // in sight wherever the reader is
    const tasks = (figure.tasks ?? []).map((task) => {
      const told = make("strong", { class: "live-found" });
      return { ...task, told, item: make("li", {}, task.text, " ", told), met: new Set(), holds: [] };
    });
    const list = make("ol", { class: "live-tasks", "aria-label": "Things to find" }, ...tasks.map(({ item }) => item));
    const more = make("details", { class: "live-more" }, make("summary", {}, tasks.length ? "More to change, more to find" : figure.fields(figure.first).some(({ more }) => more) ? "More" : "Reset, or copy a link"), back, detail,
      ...(tasks.length ? [make("p", { class: "live-head" }, "Can you find it?"), list] : []));
    const wager = figure.bet && bet(figure.bet, (text) => (news.textContent = text), () => controls());
    if (figure.bet?.before) front.addEventListener("click", () => view.scrollIntoView({ block: "nearest" }));
    const form = make("form", { class: "live-form", autocomplete: "off", submit: (event) => event.preventDefault(), "aria-label": `${figure.title}: what is shown` }, front, more);
    let state = { ...figure.first }, shown = new Map(), waiting = 0, telling = 0, turn = 0, past = 0; // past: the turn that is drawn, or given up
    let own = false, refused = "", last = null, fresh = null, busy = false; // while something is dragged
    const get = () => state;

    const reset = control({ kind: "actions", options: [["Reset", () => ({ ...figure.first })]] }, get, (next) => {
      wager?.clear();
      past = turn;
      change(next);
    });
    if (!parts) reset.element.append(make("button", { type: "button", click: copy }, "Copy link"));

    async function copy() {
      const link = new URL(`#${written(name, figure.first, state)}`, location.href).href;
      const done = await navigator.clipboard?.writeText(link).then(() => true, () => false);
      news.textContent = done ? "The link to what this figure shows is copied." : `The link to what this figure shows: ${link}`;
    }

    // Controls whose description has changed are made anew; the others keep the focus.
    function controls() {
      const focus = document.activeElement?.id, places = [[], []], now = new Map();
      for (const field of figure.fields(state)) {
        const key = JSON.stringify(field), one = shown.get(key) ?? control(field, get, change);
        now.set(key, one);
        places[Number(field.more ?? false)].push(one.element);
      }
      shown = now;
      arrange(front, figure.bet?.before && wager.isOpen() ? [] : places[0]);
      arrange(back, [...places[1], reset.element]);
      if (focus && document.activeElement?.id !== focus) document.getElementById(focus)?.focus();
      for (const one of shown.values()) one.set(state);
    }

    // A thing is seen once a change of the reader's own, not the address, has brought it about, and
    // while its task stands there to be read.
    function judge(state, own, drawn) {
      if (!own) news.textContent = refused;
      else if (!fresh) news.textContent = "";
      for (const task of tasks) {
        const { size } = task.met, holds = task.seen.map((is) => is(state, drawn, last));
        if (own && more.open) holds.forEach((is, i) => is && !task.holds[i] && task.met.add(i));
        task.holds = holds;
        if (task === fresh && !holds.some(Boolean)) [fresh, news.textContent] = [null, ""];
        if (task.met.size === size) continue;
        const whole = task.met.size === holds.length;
        if (whole) task.item.classList.add("live-solved");
        task.told.textContent = whole ? `Found: ${task.found(state, drawn)}` : `So far you have seen ${task.met.size} of ${holds.length} things.`;
        [fresh, news.textContent] = [task, task.told.textContent];
      }
      if (own && !busy) wager?.see(state, drawn); // what the reader sees when the hand is at rest
      last = { state, drawn };
    }

    function record(state, own) { // in the address; the figure that was touched last comes first
      const all = addressed(), here = all.findIndex((part) => placeOf(part) === `live-${name}`);
      if (here >= 0) all.splice(here, 1);
      all.splice(own ? 0 : Math.max(0, here), 0, written(name, figure.first, state));
      history.replaceState(own ? OWN : history.state, "", `#${all.join(";")}`);
    }

    async function redraw() {
      waiting = 0;
      const asked = ++turn, began = performance.now(), now = state, pressed = own, held = busy;
      if (!root.classList.contains("live-on")) news.textContent = "The network is being read …";
      try {
        const nets = parts ?? (await Promise.all(figure.needs(state).map(load))).flat();
        // while a network is read, each press counts, and of what is dragged the end
        if (asked <= past || (held && asked !== turn)) return;
        past = asked;
        const drawn = figure.draw(now, nets);
        figures.innerHTML = told(drawn.numbers);
        view.innerHTML = drawn.view;
        detail.innerHTML = drawn.more ?? "";
        root.classList.add("live-on");
        judge(now, pressed, drawn);
        if (!parts) record(now, pressed);
        clearTimeout(telling);
        telling = setTimeout(() => (status.textContent = drawn.said), 300);
        root.dataset.ms = Math.round(performance.now() - began);
        root.dataset.drawn = asked;
      } catch (error) {
        root.classList.remove("live-on"); // then the status is seen
        [status.textContent, news.textContent] = [error.message, ""];
        console.error(error);
      }
    }
    function change(next, linked = false) {
      [state, refused] = offered(figure, figure.change?.(next) ?? next);
      own = !linked;
      controls();
      waiting ||= requestAnimationFrame(redraw);
    }

    if (figure.drag) {
      let held = null, plane = 0; // of the point that is dragged, and of the drawings that have it
      const planes = () => [...view.querySelectorAll("svg[data-plane]")];
      const move = (event) => {
        if (held === null) return;
        const svg = planes()[plane], at = svg.createSVGPoint();
        [at.x, at.y] = [event.clientX, event.clientY];
        const { x, y } = at.matrixTransform(svg.getScreenCTM().inverse());
        change(figure.drag(state, held, x, y));
      };
      view.addEventListener("pointerdown", (event) => {
        plane = planes().indexOf(event.target.closest("svg"));
        if (plane < 0 || !event.target.closest("[data-drag]")) return;
        const away = (point) => { // where places to grip overlap, the nearest point is meant
          const { x, y, width, height } = point.getBoundingClientRect();
          return Math.hypot(x + width / 2 - event.clientX, y + height / 2 - event.clientY);
        };
        const dots = [...planes()[plane].querySelectorAll("[data-drag] .live-dot")].sort((a, b) => away(a) - away(b));
        const dot = dots.find((one) => away(one) < 15 && !one.closest("[data-yields]")) ?? dots[0];
        held = dot.closest("[data-drag]").dataset.drag;
        view.setPointerCapture(event.pointerId); // what is dragged is drawn anew at every move
        event.preventDefault();
        move(event);
      });
      view.addEventListener("pointermove", move);
      // a finger on a point does not scroll; touch-action has no effect on parts of a drawing
      view.addEventListener("touchstart", (event) => event.target.closest("[data-drag]") && event.preventDefault(), { passive: false });
      for (const end of ["pointerup", "pointercancel"]) view.addEventListener(end, () => (held = null));
    }
    root.addEventListener("pointerdown", (event) => {
      busy = Boolean(event.target.closest("[data-drag], [type=range]"));
    });
    for (const end of ["pointerup", "pointercancel"])
      addEventListener(end, () => {
        if (busy && own && last && !waiting) wager?.see(last.state, last.drawn);
        busy = false;
      });
    view.addEventListener("click", (event) => {
      const pick = event.target.closest("[data-pick]");
      if (pick) change({ ...state, ...JSON.parse(pick.dataset.pick) });
    });
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", figure.title);
    const stage = make("div", { class: "live-stage" }); // the news stand below what sticks in it
    view.before(stage);
    stage.append(view, figures, ...(wager ? [wager.element] : []), form, status);
    root.classList.toggle("live-beside", figure.beside ?? false);
    root.append(news);
    controls();
    return change;
  }

  const known = {};
  // own(part): the definition for a network that a notebook hands over, where there is one
  function figure(name, definition, own) {
    known[name] = own;
    const root = document.getElementById(`live-${name}`);
    if (!root?.querySelector(".live-view")) return;
    const change = start(name, definition, root, null);
    const follow = () => { // a link to a state, from elsewhere or in the page
      const linked = readFrom(name, definition.first);
      if (!linked) return;
      change(linked, true);
      if (placeOf(addressed()[0]) === root.id) root.scrollIntoView();
    };
    addEventListener("hashchange", follow);
    follow();
  }

  // In a notebook: the figure of this name in an empty element, on a part as scripts of weights hold it
  function open(root, name, given) {
    const part = decode(given), definition = known[name](part);
    root.classList.add("live-figure", "live-notebook");
    root.append(make("div", { class: "live-view" }), make("dl", { class: "live-numbers" }));
    start(name, definition, root, [part])({ ...definition.first }, true);
  }

  return { weights, figure, open, load, random, normal, shuffled, escaped };
})();
