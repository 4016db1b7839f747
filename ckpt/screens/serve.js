// Keeps the page of `ckpt serve` as the server sees the runs. Sections come as HTML that the server has escaped; the
// policy of the page lets nothing in it run.
"use strict";
(() => {
  const status = document.getElementById("live");
  let seen = document.body.dataset.seen;

  function ages() {
    for (const time of document.querySelectorAll("time[data-unix]")) {
      const seconds = Math.max(0, Date.now() / 1000 - Number(time.dataset.unix));
      const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
      const [size, unit] = units.find(([size]) => seconds >= size) || [1, "s"];
      time.textContent = `${Math.floor(seconds / size)} ${unit} ago`;
    }
  }

  function show(sections) {
    for (const [id, html] of Object.entries(sections)) {
      const section = document.getElementById(id);
      if (!section) continue;
      // Who reads or tabs through a section stays where they are.
      const focused = section.contains(document.activeElement) ? document.activeElement : null;
      const href = focused && focused.getAttribute("href");
      const scrolled = [...section.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
      section.innerHTML = html;
      section.querySelectorAll(".scroll").forEach((part, index) => {
        part.scrollLeft = scrolled[index] || 0;
      });
      if (href) {
        const same = [...section.querySelectorAll("a")].find((a) => a.getAttribute("href") === href);
        if (same) same.focus({ preventScroll: true });
      }
    }
    ages();
  }

  function say(text, isLive) {
    if (status.textContent !== text) status.textContent = text;
    status.className = isLive ? "tag live" : "tag lost";
  }

  function connect() {
    const query = new URLSearchParams(location.search);
    query.set("seen", seen);
    const source = new EventSource(`/events?${query}`);
    source.onopen = () => say("live", true);
    source.addEventListener("sections", (event) => {
      seen = event.lastEventId;
      show(JSON.parse(event.data));
      say("live", true);
    });
    source.onerror = () => {
      say("not connected; trying again", false);
      // The browser tries again by itself, unless it was refused.
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
    };
  }

  ages();
  setInterval(ages, 1000);
  connect();
})();
