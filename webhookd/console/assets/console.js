// Makes the console more comfortable; every page works without it. Loaded in the head, so that the chosen theme is set
// before anything is drawn.
"use strict";

const root = document.documentElement;
root.classList.add("script");
const chosenTheme = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
if (chosenTheme()) root.dataset.theme = chosenTheme();

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

// As `duration` in html.py.
function duration(seconds) {
  let left = Math.round(seconds);
  const parts = [];
  for (const [name, size] of UNITS) {
    const count = Math.floor(left / size);
    left %= size;
    if (count) parts.push(`${count} ${name}`);
  }
  return parts.slice(0, 2).join(" ") || "0 s";
}

function showAge(time) {
  const seconds = (Date.now() - Date.parse(time.dateTime)) / 1000;
  time.textContent = Math.abs(seconds) <= 1 ? "now" : seconds < 0 ? `in ${duration(-seconds)}` : `${duration(seconds)} ago`;
}

function updateAges() {
  if (!document.hidden) document.querySelectorAll("time[data-ago]").forEach(showAge);
}

async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without TLS browsers offer no clipboard.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  if (button.classList.contains("done")) return;
  const before = [...button.childNodes];
  button.replaceChildren("✓");
  button.classList.add("done");
  setTimeout(() => { button.replaceChildren(...before); button.classList.remove("done"); }, 1200);
}

function toggleTheme() {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* It is kept for this page only. */ }
}

// Rows with a link can be walked with j and k.
const rows = () => [...document.querySelectorAll("main tbody tr")].filter((row) => row.querySelector("a[href]"));

function moveSelection(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("here"));
  const next = all[Math.min(all.length - 1, Math.max(0, at + step))];
  if (at >= 0) all[at].classList.remove("here");
  next.classList.add("here");
  next.querySelector("a[href]").focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

let goPressed = false;

function onKey(event) {
  const target = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.matches("input, select, textarea")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (goPressed) {
    goPressed = false;
    const tab = [...document.querySelectorAll(".tabs a")].find((link) => link.dataset.key === event.key);
    if (tab) { location.href = tab.href; event.preventDefault(); }
    return;
  }
  const search = document.getElementById("search");
  if (event.key === "/" && search) { search.focus(); search.select(); event.preventDefault(); }
  else if (event.key === "j") moveSelection(1);
  else if (event.key === "k") moveSelection(-1);
  else if (event.key === "g") goPressed = true;
  else if (event.key === "?") document.getElementById("help")?.showModal();
}

function onClick(event) {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.copy !== undefined) copy(button);
  else if ("themeButton" in button.dataset) toggleTheme();
  else if ("helpButton" in button.dataset) document.getElementById("help")?.showModal();
}

// Asks before an action that cannot be undone, and sends a form once only.
function onSubmit(event) {
  const form = event.target;
  if (form.dataset.confirm && !confirm(form.dataset.confirm)) { event.preventDefault(); return; }
  if (form.method === "post") {
    if (form.dataset.sent) { event.preventDefault(); return; }
    form.dataset.sent = "yes";
  }
}

function onChange(event) {
  const box = event.target;
  if (box.dataset.checkAll !== undefined) {
    document.querySelectorAll(`input[type=checkbox][name="${box.dataset.checkAll}"]`).forEach((other) => { other.checked = box.checked; });
  }
}

let timer = 0;

// Loads the page again and replaces its content, unless the user types or selects in it.
async function refresh(main) {
  if (document.hidden || main.contains(document.activeElement) || String(getSelection())) return;
  try {
    const answer = await fetch(location.href);
    if (!answer.ok || answer.redirected) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("content");
    if (!fresh) return;
    main.replaceChildren(...fresh.childNodes);
    if (!fresh.dataset.refresh) clearInterval(timer);  // it changes no more
  } catch { /* The next one may succeed. */ }
}

document.addEventListener("DOMContentLoaded", () => {
  updateAges();
  setInterval(updateAges, 1000);
  document.addEventListener("keydown", onKey);
  document.addEventListener("click", onClick);
  document.addEventListener("submit", onSubmit);
  document.addEventListener("change", onChange);
  // A form that goes on by itself: a one-time link, or the next step of a long action.
  document.querySelector("form[data-submit-at-once]")?.requestSubmit();
  const main = document.getElementById("content");
  if (main?.dataset.refresh) timer = setInterval(() => refresh(main), main.dataset.refresh * 1000);
});
// A page from the back button's cache can be sent again.
addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => { delete form.dataset.sent; }));
