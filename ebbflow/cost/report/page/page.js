/* The interactive part of a job's page. Without it the page shows the same figures as tables and SVG. */
(function () {
  'use strict';
  if (location.hash === '#feed' && parent !== window) return;
  const body = document.body;
  const axes = {
    step: {label: 'step', text: (v) => Number.isInteger(v) ? v.toLocaleString('en') : ''},
    seconds: {label: 'wall time', text: duration},
    usd: {label: 'dollars', text: (v) => '$' + short(v)},
  };
  let axis = 'step';
  let plots = [];
  let signature = '';

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
  function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim(); }

  function rows(found, figure) {
    const table = found.tables[figure.table];
    const x = table[figure.table === 'compare' ? 'step' : axis];
    return [x, ...figure.series.map((one) => table[one.key])];
  }
  function marks(found, figure) {
    return (plot) => {
      if (figure.table === 'compare') return;
      const context = plot.ctx, top = plot.bbox.top, high = plot.bbox.height;
      context.save();
      for (const mark of found.marks) {
        const x = plot.valToPos(mark[axis], 'x', true);
        if (!(x >= plot.bbox.left && x <= plot.bbox.left + plot.bbox.width)) continue;
        const small = mark.kind === 'commit';
        context.strokeStyle = colour({commit: 'good', generation: 'quiet'}[mark.kind] || 'bad');
        context.setLineDash(mark.kind === 'interruption' ? [4, 4] : []);
        context.beginPath();
        context.moveTo(x, small ? top + high - 6 * devicePixelRatio : top);
        context.lineTo(x, top + high);
        context.stroke();
      }
      context.restore();
    };
  }
  function draw(found, figure, box, host) {
    const scale = axes[figure.table === 'compare' ? 'step' : axis];
    const ink = colour('quiet'), line = colour('line'), few = rows(found, figure)[0].length < 4;
    const options = {
      width: host.clientWidth || 300, height: 230,
      cursor: {sync: {key: 'job', scales: ['x', null]}, drag: {x: true, y: false}},
      legend: {live: true},
      scales: {x: {time: false}},
      axes: [
        {stroke: ink, grid: {stroke: line, width: 1}, ticks: {stroke: line}, values: (u, v) => v.map(scale.text), space: 70, size: 34},
        {stroke: ink, grid: {stroke: line, width: 1}, ticks: {stroke: line}, values: (u, v) => v.map(short), size: 64},
      ],
      series: [{label: scale.label, value: (u, v, line, at) => shown(u, v, line, at, scale.text)}].concat(figure.series.map((one) => ({
        label: one.label, stroke: colour(one.colour), width: one.width, dash: one.dash, spanGaps: !!one.span,
        points: {show: one.points || few ? true : undefined, size: one.points || few ? 7 : 4},
        value: (u, v, line, at) => shown(u, v, line, at, short),
      }))),
      hooks: {draw: [marks(found, figure)]},
    };
    const plot = new uPlot(options, rows(found, figure), host);
    plot.root.setAttribute('role', 'img');
    plot.root.setAttribute('aria-label', figure.title);
    return plot;
  }
  // Without a pointer the legend has the newest value of each line.
  function shown(plot, value, line, at, text) {
    if (at === null || at === undefined) {
      const known = plot.data[line || 1];
      for (at = known.length - 1; at > 0 && (known[at] === null || known[at] === undefined);) at--;
      value = plot.data[line][at];
    }
    return value === null || value === undefined ? '–' : text(value);
  }
  function render() {
    const found = data();
    const now = JSON.stringify([axis, innerWidth, found.figures]);
    if (now === signature) {
      plots.forEach((plot, at) => plot.setData(rows(found, found.figures[at])));
      return;
    }
    signature = now;
    plots.forEach((plot) => plot.destroy());
    plots = [];
    for (const figure of found.figures) {
      const box = document.getElementById('figure-' + figure.id);
      if (!box) continue;
      const host = box.querySelector('.plot') || box.insertBefore(document.createElement('div'), box.querySelector('svg'));
      host.className = 'plot';
      plots.push(draw(found, figure, box, host));
    }
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
      signature = '';
    } else {
      fresh.forEach((one, at) => {
        const old = main.children[at];
        if (one.id === 'plots' && one.dataset.figures === old.dataset.figures) {
          for (const svg of one.querySelectorAll('figure > svg')) {
            const there = document.querySelector('#' + svg.parentNode.id + ' > svg');
            if (there) there.replaceWith(svg);
          }
        } else if (one.outerHTML !== old.outerHTML) {
          old.replaceWith(one);
          if (one.id === 'plots') signature = '';
        }
      });
    }
    for (const id of open) { const there = id && document.getElementById(id); if (there) there.open = true; }
    document.getElementById('data').textContent = next.data;
    body.dataset.state = next.state;
    body.dataset.written = next.written;
    document.title = next.title;
    wire();
    const box = document.getElementById('search');
    if (box && typed) { box.value = typed; search(); }
    if (box && focused) box.focus();
    render();
    age();
  }
  function wire() {
    const box = document.getElementById('search');
    if (box) { box.hidden = false; box.oninput = search; }
    for (const one of document.querySelectorAll('#axis input')) {
      one.checked = one.value === axis;
      one.onchange = () => { axis = one.value; render(); };
    }
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
  if (window.uPlot) document.documentElement.classList.add('plotted');
  wire();
  render();
  let resized = 0;
  addEventListener('resize', () => { clearTimeout(resized); resized = setTimeout(render, 150); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { signature = ''; render(); });
  setInterval(age, 1000);
  age();
  if (location.protocol !== 'about:' && location.protocol !== 'blob:') setTimeout(poll, 2000);
})();
