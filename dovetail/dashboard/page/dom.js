// Build elements and ask the server. Text is always set as text, never as HTML: answers of a model are not to be trusted.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name in made && name !== "list" && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** "1 response", "3 responses". */
export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export function select(label, options, value, change, attributes = {}) {
  const box = el("select", { ...attributes, onchange: () => change(box.value) },
    options.map(([key, text]) => el("option", { value: key, selected: key === value, text })));
  return el("label", { class: "field" }, el("span", { text: label }), box);
}

export function field(label, input) {
  return el("label", { class: "field" }, el("span", { text: label }), input);
}

export async function ask(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  }
  let response;
  try {
    response = await fetch(`/api/${path}?${query}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The dashboard does not answer. Is `dovetail dashboard` still running?");
  }
  const reply = await response.json().catch(() => ({ error: "The answer of the dashboard is not readable." }));
  if (!response.ok) throw new Error(reply.error || `The dashboard answered ${response.status}.`);
  return reply;
}

export const short = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
};

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function debounce(act, wait = 200) {
  let timer = 0;
  return (...values) => { clearTimeout(timer); timer = setTimeout(() => act(...values), wait); };
}

// One tooltip for everything that has data-tip; reachable by keyboard focus too.
export function startTips(box) {
  const show = (target) => {
    box.textContent = target.dataset.tip;
    box.hidden = false;
    const at = target.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8));
    const above = at.top - box.offsetHeight - 6;
    box.style.left = `${left}px`;
    box.style.top = `${above > 4 ? above : at.bottom + 6}px`;
  };
  for (const event of ["mouseover", "focusin"]) {
    document.addEventListener(event, (e) => {
      const target = e.target.closest?.("[data-tip]");
      if (target) show(target); else box.hidden = true;
    });
  }
  document.addEventListener("scroll", () => { box.hidden = true; }, true);
}
