/* The interactive part of a job's page: live updates, search, and the values at the pointer in a chart. */
(function () {
  'use strict';
  if (location.hash === '#feed' && parent !== window) return;
  const body = document.body;
  let known = data();
  let pointer = [-1, -1];

  function duration(seconds) {
    if (seconds < 120) return short(seconds) + ' s';
    if (seconds < 7200) return short(seconds / 60) + ' min';
    return short(seconds / 3600) + ' h';
  }
  function short(value) {
    if (value === 0) return '0';
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-5) return value.toExponential(1);
    return value.toLocaleString('en', {maximumSignificantDigits: size >= 1000 ? 6 : 4});
  }
  function data() {
    try { return JSON.parse(document.getElementById('data').textContent); } catch (error) { return {figures: []}; }
  }
  // Show the values of the recorded step that is nearest to the pointer, in the chart's corner.
  function point() {
    const under = document.elementFromPoint(...pointer);
    const svg = under && under.closest('figure.chart > svg');
    const chart = svg && svg.parentNode;
    for (const old of document.querySelectorAll('.values')) if (old.parentNode !== chart) old.remove();
    const figure = chart && known.figures.find((figure) => chart.id === 'figure-' + figure.id);
    if (!figure) return;
    const table = known.tables[figure.table], steps = table.step;
    const frame = svg.getBoundingClientRect(), left = Number(svg.dataset.left), right = Number(svg.dataset.right);
    const share = ((pointer[0] - frame.left) / frame.width - left) / (right - left);
    const wanted = steps[0] + share * (steps[steps.length - 1] - steps[0]);
    let row = 0;
    steps.forEach((step, at) => { if (Math.abs(step - wanted) < Math.abs(steps[row] - wanted)) row = at; });
    const parts = ['step ' + steps[row].toLocaleString('en')];
    if (table.seconds) parts.push(duration(table.seconds[row]));
    if (table.usd) parts.push('$' + short(table.usd[row]));
    for (const line of figure.series) {
      const value = table[line.key][row];
      if (value !== null && value !== undefined) parts.push(line.label + ' ' + short(value));
    }
    const box = chart.querySelector('.values') || chart.appendChild(document.createElement('p'));
    box.className = 'values';
    box.textContent = parts.join(', ');
  }
  function search() {
    const box = document.getElementById('search');
    if (!box) return;
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll('#events tbody tr')) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }
  function update(next) {
    const parsed = new DOMParser().parseFromString(next.main, 'text/html');
    const fresh = [...parsed.body.children], main = document.querySelector('main');
    const same = fresh.length === main.children.length && fresh.every((one, at) => one.id === main.children[at].id);
    const typed = document.getElementById('search') && document.getElementById('search').value;
    const focused = document.activeElement && document.activeElement.id === 'search';
    const open = new Set([...document.querySelectorAll('details[open]')].map((one) => one.id));
    if (!same) {
      main.replaceChildren(...fresh);
    } else {
      fresh.forEach((one, at) => {
        const old = main.children[at];
        if (one.outerHTML !== old.outerHTML) old.replaceWith(one);
      });
    }
    for (const id of open) { const there = id && document.getElementById(id); if (there) there.open = true; }
    document.getElementById('data').textContent = next.data;
    known = data();
    body.dataset.state = next.state;
    body.dataset.written = next.written;
    document.title = next.title;
    wire();
    const box = document.getElementById('search');
    if (box && typed) { box.value = typed; search(); }
    if (box && focused) box.focus();
    point();
    age();
  }
  function wire() {
    const box = document.getElementById('search');
    if (box) { box.hidden = false; box.oninput = search; }
    for (const one of document.querySelectorAll('pre')) {
      one.tabIndex = 0;
    }
  }
  function age() {
    const box = document.getElementById('age');
    if (!box) return;
    const seconds = Math.max(0, Date.now() / 1000 - Number(body.dataset.written));
    box.textContent = body.dataset.state === 'running'
      ? (seconds > 20 ? 'no update for ' + duration(Math.round(seconds)) : 'live, ' + Math.round(seconds) + ' s old') : '';
  }
  // A page from disk may not read files, but it may show itself in a frame, which posts its newer content.
  function poll() {
    if (body.dataset.state !== 'running') return;
    const frame = document.createElement('iframe');
    frame.hidden = true;
    frame.src = location.href.split('#')[0] + '#feed';
    const done = () => { removeEventListener('message', take); frame.remove(); clearTimeout(late); setTimeout(poll, 2000); };
    const take = (event) => {
      if (event.source !== frame.contentWindow || !event.data || typeof event.data.main !== 'string') return;
      // The report may have been written shortly before the last live page, which it replaces.
      if (Number(event.data.written) > Number(body.dataset.written) || event.data.state !== 'running') update(event.data);
      done();
    };
    const late = setTimeout(done, 8000);
    addEventListener('message', take);
    body.append(frame);
  }
  wire();
  document.addEventListener('pointermove', (event) => {
    pointer = [event.clientX, event.clientY];
    point();
  });
  setInterval(age, 1000);
  age();
  if (location.protocol !== 'about:' && location.protocol !== 'blob:') setTimeout(poll, 2000);
})();
