// Keeps pages fresh; they work without it. Markup comes from our own server, escaped there.
"use strict";
(() => {
  const away = document.getElementById("away");
  const MOST_LOG = 200000;

  function follow(area) {
    const every = Number(area.dataset.live);
    const address = new URL(location.href);
    address.searchParams.set("part", "live");
    address.hash = "";
    let wait = every;
    async function turn() {
      if (document.hidden) return later();
      try {
        const answer = await fetch(address, { signal: AbortSignal.timeout(15000) });
        if (answer.status === 401) return location.reload();
        if (!answer.ok) throw new Error(String(answer.status));
        renew(area, await answer.text());
        away.hidden = true;
        wait = every;
        if (answer.headers.get("x-done")) return;
      } catch (error) {
        away.hidden = false;
        wait = Math.min(2 * wait, 30000);
      }
      later();
    }
    const later = () => setTimeout(turn, wait);
    later();
  }

  // Puts in new markup, and leaves alone what the reader has done: focus, opened parts, scrolling.
  function renew(area, markup) {
    const chosen = getSelection();
    if (chosen && !chosen.isCollapsed && area.contains(chosen.anchorNode)) return;
    const fresh = new DOMParser().parseFromString(markup, "text/html").body;
    if (fresh.innerHTML === area.dataset.last) return;
    const opened = [...area.querySelectorAll("details[open]>summary")].map((e) => e.textContent);
    const rolled = [...area.querySelectorAll(".scroll,pre")].map((e) => [e.scrollLeft, e.scrollTop]);
    const focused = area.contains(document.activeElement) ? document.activeElement : null;
    const places = [...area.querySelectorAll("a,button,summary,[tabindex]")];
    const place = focused ? places.indexOf(focused) : -1;
    area.dataset.last = fresh.innerHTML;
    area.replaceChildren(...fresh.childNodes);
    for (const summary of area.querySelectorAll("details>summary")) {
      if (opened.includes(summary.textContent)) summary.parentElement.open = true;
    }
    [...area.querySelectorAll(".scroll,pre")].forEach((e, n) => {
      if (rolled[n]) [e.scrollLeft, e.scrollTop] = rolled[n];
    });
    if (focused) {
      const same = focused.id && document.getElementById(focused.id);
      const other = area.querySelectorAll("a,button,summary,[tabindex]")[place];
      (same || other || document.getElementById("main")).focus({ preventScroll: true });
    }
  }

  function logs(section) {
    const state = document.getElementById("logs-state");
    const holder = document.getElementById("logs-of");
    const boxes = new Map();
    let begun = false;
    const source = new EventSource(section.dataset.logs);
    source.addEventListener("open", () => {
      state.textContent = "Followed live.";
      away.hidden = true;
      begun = false;
    });
    source.addEventListener("log", (event) => {
      if (!begun) { // what the server sends begins with the end of what there was
        holder.replaceChildren();
        boxes.clear();
        begun = true;
      }
      const { process, text } = JSON.parse(event.data);
      if (!boxes.has(process)) boxes.set(process, box(holder, process));
      const pre = boxes.get(process);
      const atEnd = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 40;
      pre.append(text);
      while (pre.textContent.length > MOST_LOG && pre.firstChild !== pre.lastChild) {
        pre.firstChild.remove();
      }
      if (atEnd) pre.scrollTop = pre.scrollHeight;
    });
    source.addEventListener("end", (event) => {
      source.close();
      const { problem } = JSON.parse(event.data);
      state.textContent = problem ? `Not followed any more: ${problem}` : "The job has ended.";
    });
    source.addEventListener("error", () => { away.hidden = source.readyState === EventSource.CLOSED; });
  }

  function box(holder, process) {
    const part = document.createElement("details");
    part.className = "log";
    part.open = true;
    const summary = document.createElement("summary");
    summary.textContent = process;
    const pre = document.createElement("pre");
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", `log of ${process}`);
    part.append(summary, pre);
    holder.append(part);
    return pre;
  }

  for (const area of document.querySelectorAll("[data-live]")) follow(area);
  for (const section of document.querySelectorAll("[data-logs]")) logs(section);
  for (const pre of document.querySelectorAll(".log pre")) pre.scrollTop = pre.scrollHeight;
})();
