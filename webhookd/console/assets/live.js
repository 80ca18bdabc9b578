// The live page: adds attempts as the server sends them. Everything is written as text, never as markup.
"use strict";

(() => {
  const MAX_ROWS = 200;
  const RETRY_SECONDS = 30;
  const table = document.getElementById("live");
  const body = table.querySelector("tbody");
  const state = document.getElementById("live-state");
  const pauseButton = document.getElementById("live-pause");
  const prefix = new URL(table.dataset.stream, location.href).pathname.replace(/\/live\/stream$/, "");
  // As in html.py: invisible and direction-changing characters are shown as their code points.
  const DECEPTIVE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

  let source = null;
  let lastId = "";
  let isPaused = false;
  let waiting = new Map();  // attempts that came while the page was paused, by id
  let dropped = 0;  // of them, those that are too many to keep
  let isTooMuch = false;  // more attempts than a page can show
  let retryTimer = 0;

  function make(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  function visible(text) {
    const parts = [];
    let end = 0;
    for (const found of text.matchAll(DECEPTIVE)) {
      const code = `U+${found[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
      parts.push(text.slice(end, found.index), make("span", { className: "code-point", textContent: code }));
      end = found.index + 1;
    }
    return [...parts, text.slice(end)];
  }

  const none = () => make("span", { className: "soft", textContent: "—" });
  const link = (path, ...children) => make("a", { href: `${prefix}${path}` }, ...children);

  function cell(head, content, className = "") {
    const made = make("td", { className }, content);
    made.dataset.head = head;
    return made;
  }

  function row(attempt) {
    const made = make("tr", {});
    made.dataset.id = attempt.id;
    const delivery = make("span", {}, link(`/deliveries/${attempt.delivery}`, String(attempt.delivery)));
    if (attempt.attempt > 1) delivery.append(" ", make("span", { className: "soft", textContent: `attempt ${attempt.attempt}` }));
    const time = make("time", { dateTime: attempt.at, title: `${attempt.at.slice(0, 19).replace("T", " ")} UTC` });
    time.dataset.ago = "";
    showAge(time);
    made.append(
      cell("Outcome", make("span", { className: `badge ${attempt.kind}`, textContent: attempt.outcome })),
      cell("Delivery", delivery, "nowrap"),
      cell("Type", link(`/events/${attempt.event}`, make("code", {}, ...visible(attempt.type)))),
      cell("Endpoint", link(`/endpoints/${attempt.endpoint}`, make("bdi", {}, ...visible(attempt.url)))),
      cell("Tenant", attempt.tenant ? make("bdi", {}, ...visible(attempt.tenant)) : none()),
      cell("Answer", attempt.answer === null ? none() : make("code", {}, ...visible(String(attempt.answer)))),
      cell("Duration", attempt.ms === null ? none() : `${attempt.ms.toLocaleString("en")} ms`, "number"),
      cell("When", time, "nowrap"),
    );
    return made;
  }

  function noteRow(text) {
    return make("tr", { className: "live-note" }, make("td", { colSpan: 8, className: "soft", textContent: text }));
  }

  // Between the attempts that are shown and those that come next.
  function note(text) {
    const first = body.firstElementChild;
    if (first?.classList.contains("live-note")) first.replaceWith(noteRow(text)); else body.prepend(noteRow(text));
  }

  // The newest attempt is at the top. One that is shown already is replaced where it is.
  function show(attempts) {
    const known = new Map([...body.rows].filter((old) => old.dataset.id).map((old) => [Number(old.dataset.id), old]));
    const focused = document.activeElement?.closest?.("#live tr");
    for (const attempt of attempts) {
      const made = row(attempt);
      const old = known.get(attempt.id);
      if (old) {
        if (old === focused) { old.cells[0].replaceWith(made.cells[0]); continue; }
        if (old.classList.contains("here")) made.classList.add("here");
        old.replaceWith(made);
      } else {
        const newest = [...body.rows].find((other) => other.dataset.id);
        if (newest && Number(newest.dataset.id) > attempt.id) {
          // It was committed late, or an earlier page has it no more.
          const place = [...body.rows].find((other) => other.dataset.id && Number(other.dataset.id) < attempt.id);
          if (place) place.before(made); else body.append(made);
        } else {
          made.classList.add("fresh");
          body.prepend(made);
        }
      }
      known.set(attempt.id, made);
    }
    while (body.rows.length > MAX_ROWS) body.lastElementChild.remove();
    const isEmpty = !body.rows.length;
    table.hidden = isEmpty;
    document.getElementById("live-empty").hidden = !isEmpty;
  }

  const few = (number) => number.toLocaleString("en");

  function receive(message) {
    if (isPaused) {
      for (const attempt of message.items) { waiting.delete(attempt.id); waiting.set(attempt.id, attempt); }
      while (waiting.size > MAX_ROWS) { waiting.delete(waiting.keys().next().value); dropped += 1; }
      dropped += message.more;
      showState();
      return;
    }
    isTooMuch = message.more > 0;
    if (isTooMuch) note(`About ${few(message.more)} attempts here are not shown: there are too many at once.`);
    show(message.items);
    showState();
  }

  function setState(text, kind) {
    // A status is read aloud, so it changes only if the text does.
    if (state.textContent !== text) state.textContent = text;
    state.className = `badge ${kind}`;
  }

  function showState() {
    if (isPaused) setState(waiting.size ? `Paused, ${waiting.size === MAX_ROWS ? "200 or more" : "some"} waiting` : "Paused", "warn");
    else if (source?.readyState === EventSource.OPEN) setState(isTooMuch ? "Live, not all are shown" : "Live", "good");
  }

  function pause(value) {
    isPaused = value;
    pauseButton.textContent = isPaused ? "Continue" : "Pause";
    pauseButton.setAttribute("aria-pressed", String(isPaused));
    if (!isPaused) {
      show([...waiting.values()].sort((one, other) => one.id - other.id));
      if (dropped) body.append(noteRow(`About ${few(dropped)} more attempts came during the pause.`));
      waiting = new Map();
      dropped = 0;
    }
    showState();
  }

  function disconnect() {
    clearTimeout(retryTimer);
    source?.close();
    source = null;
  }

  function connect() {
    disconnect();
    const url = new URL(table.dataset.stream, location.href);
    if (lastId) url.searchParams.set("last_event_id", lastId);
    source = new EventSource(url);
    source.onopen = showState;
    source.onmessage = (event) => { lastId = event.lastEventId || lastId; receive(JSON.parse(event.data)); };
    source.addEventListener("away", () => setState("The database does not answer", "bad"));
    source.addEventListener("gap", () => { if (isPaused) dropped += 1; else note("Some attempts are missing here: the connection was interrupted."); });
    source.addEventListener("end", () => { disconnect(); setState("Your session has ended: log in again", "bad"); });
    source.onerror = () => {
      if (source?.readyState !== EventSource.CLOSED) { setState("Connecting…", "warn"); return; }
      // The browser does not try again by itself: too many pages are open, or the session has ended.
      setState("Not connected: log in, or close other live pages", "bad");
      retryTimer = setTimeout(connect, RETRY_SECONDS * 1000);
    };
  }

  pauseButton.addEventListener("click", () => pause(!isPaused));
  document.addEventListener("keydown", (event) => {
    if (event.key === "p" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.matches("input, select, textarea")) pause(!isPaused);
  });
  // A page in the background needs no connection: browsers allow only six to a host.
  document.addEventListener("visibilitychange", () => { if (document.hidden) disconnect(); else connect(); });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  if (!document.hidden) connect();
})();
