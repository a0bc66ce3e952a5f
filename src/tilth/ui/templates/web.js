'use strict';
// Draws curves and timelines, and keeps a page up to date while it is seen. Without it every page still has its tables.
const body = document.body, run = body.dataset.run, own = document.currentScript.dataset;
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const tint = name => getComputedStyle(body).getPropertyValue('--' + name).trim();
const HUES = ['sky', 'clay', 'leaf', 'plum', 'sun', 'teal', 'rose', 'soil'];
const json = async address => {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(address + ': ' + answer.status);
  return answer.json();
};

// ---- Plotly, which is loaded when the first chart is seen ----

let loading = null;
const plotly = () => loading ??= new Promise((done, failed) => {
  const script = document.createElement('script');
  script.src = own.plotly;
  script.onload = () => done(window.Plotly);
  script.onerror = failed;
  document.head.append(script);
});
const config = {displaylogo: false, responsive: true, modeBarButtonsToRemove: ['select2d', 'lasso2d', 'toImage']};
const axis = more => ({gridcolor: tint('line'), zerolinecolor: tint('line'), linecolor: tint('line'), ...more});
const layout = (x, y, more = {}) => ({
  paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: tint('soft'), size: 11},
  margin: {l: 50, r: 12, t: 8, b: 34}, hovermode: 'x unified', showlegend: false, hoverlabel: {bgcolor: tint('card')},
  xaxis: axis(x), yaxis: axis(y), ...more,
});

// ---- curves ----

const address = (box, metrics, since) => {
  const query = new URLSearchParams({x: box.dataset.axis, smooth: box.dataset.smooth});
  for (const one of JSON.parse(box.dataset.runs)) query.append('run', one);
  for (const one of metrics) query.append('metric', one);
  if (since !== undefined) query.set('since', since);
  return '/curves.json?' + query;
};
const traces = (figure, found) => {
  const metrics = JSON.parse(figure.dataset.metrics), labels = JSON.parse(figure.dataset.labels);
  const hues = JSON.parse(figure.dataset.hues), runs = [...new Set(found.lines.map(line => line.run))];
  return found.lines.map(line => {
    const place = metrics.indexOf(line.metric), several = runs.length > 1;
    const colour = tint(several ? HUES[runs.indexOf(line.run) % HUES.length] : hues[place] || HUES[place % HUES.length]);
    const dots = 'dots' in figure.dataset || line.x.length < 3;
    return {
      x: line.x, y: line.y, customdata: line.step, name: several ? line.run : labels[place] || line.metric,
      mode: dots ? 'lines+markers' : 'lines', line: {color: colour, width: 1.6}, marker: {size: 6}, type: 'scatter',
      hovertemplate: figure.dataset.form === 'share' ? '%{y:.1%}' : '%{y:.5~g}',
    };
  });
};
const hueOf = mark => mark.kind === 'recovery' ? 'clay' : 'soft';
const marks = found => found.marks.map(mark => ({
  type: 'line', x0: mark.x, x1: mark.x, yref: 'paper', y0: 0, y1: 1, line: {color: tint(hueOf(mark)), width: 1, dash: 'dot'},
}));
const notes = found => found.marks.map(mark => ({
  x: mark.x, yref: 'paper', y: 1, text: '▾', showarrow: false, hovertext: mark.text, font: {color: tint(hueOf(mark))},
}));
const versions = found => JSON.stringify(Object.values(found.versions));
// Where these are equal, steps were added behind the last one, and none was replaced or dropped.
const past = text => JSON.stringify(JSON.parse(text).map(([file, , late]) => [file, late]));

const draw = async figure => {
  const box = figure.closest('.plots'), canvas = figure.querySelector('.canvas');
  const metrics = JSON.parse(figure.dataset.metrics);
  const [Plotly, found] = await Promise.all([plotly(), json(address(box, metrics))]);
  const y = figure.dataset.form === 'share' ? {tickformat: '.0%', rangemode: 'nonnegative'} : {};
  if ('log' in figure.dataset) y.type = 'log';
  const shape = layout({title: {text: box.dataset.title, standoff: 4}}, y,
    {shapes: marks(found), annotations: notes(found), uirevision: 'kept'});
  await Plotly.react(canvas, traces(figure, found), shape, config);
  figure.dataset.versions = versions(found);
  figure.dataset.points = found.lines.reduce((most, line) => Math.max(most, line.points), 0);
  if (!figure.dataset.drawn) {
    const open = (line, step) => {
      const names = JSON.parse(box.dataset.runs), name = names.length > 1 ? line.name : names[0];
      location.href = '/runs/' + encodeURIComponent(name) + '/trajectories?steps=' + step;
    };
    canvas.on('plotly_click', event => open(event.points[0].data, event.points[0].customdata));
    keys(canvas, () => {
      const high = canvas.layout.xaxis.range[1], line = canvas.data[0];
      const place = line ? line.x.findLastIndex(x => x <= high) : -1;
      if (place >= 0) open(line, line.customdata[place]);
    });
  }
  figure.dataset.drawn = '1';
};
const newest = figure => Math.max(-1, ...figure.querySelector('.canvas').data.map(line => line.x.at(-1) ?? -1));
// News have the points of steps as they are, so that most pages need not ask.
const told = (figures, news) => {
  const box = figures[0].closest('.plots').dataset, before = news && JSON.stringify([news.before]);
  if (!news || !news.points || box.axis !== 'step' || Number(box.smooth)) return false;
  if (past(before) !== past(JSON.stringify([news.version]))) return false;
  const fits = figure => figure.dataset.versions === before &&
    figure.querySelector('.canvas').data.length === JSON.parse(figure.dataset.metrics).length;
  if (!figures.every(fits)) return false;
  for (const figure of figures) {
    const metrics = JSON.parse(figure.dataset.metrics);
    const lines = metrics.map(name => news.points.filter(point => point[name] !== undefined));
    const grown = [...metrics.keys()].filter(place => lines[place].length);
    const steps = grown.map(place => lines[place].map(point => point.step));
    const y = grown.map(place => lines[place].map(point => point[metrics[place]]));
    if (grown.length) window.Plotly.extendTraces(figure.querySelector('.canvas'), {x: steps, y, customdata: steps}, grown);
    figure.dataset.versions = JSON.stringify([news.version]);
  }
  return true;
};
// One request brings what is new in all charts that are seen.
const grow = async (figures, news) => {
  if (!figures.length || told(figures, news)) return;
  const of = figure => JSON.parse(figure.dataset.metrics), box = figures[0].closest('.plots');
  const metrics = [...new Set(figures.flatMap(of))].slice(0, 24), since = Math.min(...figures.map(newest));
  const found = await json(address(box, metrics, since));
  for (const figure of figures) {
    const canvas = figure.querySelector('.canvas'), from = newest(figure);
    const lines = found.lines.filter(line => of(figure).includes(line.metric)).map(line => {
      const kept = line.x.findIndex(place => place > from);
      const cut = values => kept < 0 ? [] : values.slice(kept);
      return {x: cut(line.x), y: cut(line.y), customdata: cut(line.step)};
    });
    const long = canvas.data.some(line => line.x.length > 2400);
    if (long || past(versions(found)) !== past(figure.dataset.versions) || lines.length !== canvas.data.length) {
      await draw(figure);
      continue;
    }
    const grown = lines.map((line, place) => [place, line]).filter(([, line]) => line.x.length);
    const all = name => grown.map(([, line]) => line[name]);
    if (grown.length) await window.Plotly.extendTraces(
      canvas, {x: all('x'), y: all('y'), customdata: all('customdata')}, grown.map(([place]) => place));
    figure.dataset.versions = versions(found);
  }
};

// Arrows move along the axis, + and - zoom, 0 shows everything, Enter opens the samples of the last step that is shown.
const keys = (canvas, enter) => canvas.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;  // the browser's own
  const held = canvas.layout.xaxis, [low, high] = held.range.map(Number), width = high - low;
  const ranges = {
    ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5],
    '+': [low + width / 4, high - width / 4], '-': [low - width / 2, high + width / 2],
  };
  if (event.key === 'Enter' && enter) enter();
  else if (event.key === '0') window.Plotly.relayout(canvas, {'xaxis.autorange': true});
  else if (ranges[event.key]) window.Plotly.relayout(canvas, {'xaxis.range': ranges[event.key]});
  else return;
  event.preventDefault();
});

const guarded = (work, figure) => work(figure).catch(error => {
  figure.querySelector('.canvas').textContent = 'The curve cannot be drawn: ' + error.message;
});
const seen = new IntersectionObserver(entries => {
  for (const entry of entries) {
    entry.target.dataset.seen = entry.isIntersecting ? '1' : '';
    if (entry.isIntersecting && !entry.target.dataset.begun) {
      entry.target.dataset.begun = '1';
      guarded(draw, entry.target);
    }
  }
}, {rootMargin: '200px'});
for (const figure of all('figure.plotted')) seen.observe(figure);

// ---- timeline of ranks: a heat map of codes, read again with more detail where one zooms in ----

const lanes = async (figure, step, begin = 0, end = 1) => {
  const canvas = figure.querySelector('.canvas');
  const query = new URLSearchParams({step, begin, end});
  const [Plotly, found] = await Promise.all([plotly(), json('/runs/' + encodeURIComponent(run) + '/lanes.json?' + query)]);
  const count = found.parts.length, columns = found.codes[0].length, each = found.seconds / columns;
  const paint = part => {
    const [hue, pale] = found.hues[part].split(' '), named = {grey: 'soft', idle: 'shade'}[hue] || hue;
    return pale === 'far' ? tint('line') : tint(named) + (pale && hue !== 'idle' ? '70' : '');
  };
  const scale = found.parts.flatMap((part, i) => [[i / count, paint(part)], [(i + 1) / count, paint(part)]]);
  const trace = {
    type: 'heatmap', z: found.codes.map(row => row.map(code => code < 0 ? null : code + .5)), y: found.names,
    x: Array.from({length: columns}, (_, i) => found.begin + (i + .5) * each), zmin: 0, zmax: count, colorscale: scale,
    text: found.codes.map(row => row.map(code => found.parts[code] || 'nothing')), showscale: false, ygap: 2,
    hovertemplate: '%{y}: %{text}<br>%{x:.4s}s<extra></extra>',
  };
  const shape = layout({title: {text: 'seconds of step ' + step}}, {autorange: 'reversed', fixedrange: true},
    {height: 90 + 26 * found.names.length, hovermode: 'closest', margin: {l: 76, r: 12, t: 8, b: 38}});
  await Plotly.react(canvas, [trace], shape, config);
  figure.dataset.step = step;
  if (begin === 0 && end === 1) figure.dataset.whole = found.seconds;
  if (figure.dataset.bound) return;
  figure.dataset.bound = '1';
  keys(canvas);
  canvas.on('plotly_relayout', change => {
    const whole = Number(figure.dataset.whole);
    const [low, high] = change['xaxis.range'] || [change['xaxis.range[0]'], change['xaxis.range[1]']];
    if (change['xaxis.autorange']) lanes(figure, figure.dataset.step);
    else if (low !== undefined) {
      const ends = [low, high].map(place => Math.min(Math.max(place / whole, 0), 1));
      if (ends[1] > ends[0]) lanes(figure, figure.dataset.step, ...ends);
    }
  });
};
for (const figure of all('.lanes-plot')) {
  guarded(one => lanes(one, one.dataset.step), figure);
  addEventListener('click', event => {
    const link = event.target.closest('a.pick');  // those of new steps too
    if (!link) return;
    event.preventDefault();
    guarded(one => lanes(one, link.dataset.step), figure);
  });
}

// ---- numbers of tokens, where nothing hovers ----

addEventListener('click', event => {
  const token = event.target.closest('.text span[title]');
  document.getElementById('tip').textContent = token ? token.title : '';
});

// ---- news: one stream for each page, closed while it is hidden ----

const held = part => part.contains(document.activeElement) ||
  (!getSelection().isCollapsed && getSelection().containsNode(part, true));
const current = async () => {
  const answer = await fetch(location.href);
  return answer.ok ? new DOMParser().parseFromString(await answer.text(), 'text/html') : null;
};
const redraw = async () => {
  const page = await current();
  if (!page) return;
  if (page.querySelector('.lanes-plot') && !document.querySelector('.lanes-plot')) return location.reload();  // its first events
  for (const part of all('[data-live]')) {
    const fresh = page.getElementById(part.id);
    if (!fresh || held(part)) continue;
    const open = all('details[open] summary', part).map(one => one.textContent);
    const chosen = all('input:checked', part).map(one => one.value);
    part.replaceWith(document.adoptNode(fresh));
    for (const one of all('summary', fresh)) if (open.includes(one.textContent)) one.parentElement.open = true;
    for (const one of all('input', fresh)) if (chosen.includes(one.value)) one.checked = true;
  }
};
// A metric that is measured for the first time brings its chart.
const unfold = async news => {
  const box = document.querySelector('.plots[data-known]');
  if (!box || !news || news.metrics === undefined || news.metrics === Number(box.dataset.known) || held(box)) return;
  const page = await current(), fresh = page && page.querySelector('.plots');
  if (!fresh) return;
  const old = new Map(all('figure.plotted', box).map(figure => [figure.dataset.metrics, figure]));
  const figures = all('figure.plotted', fresh).map(one => old.get(one.dataset.metrics) || document.adoptNode(one));
  if (figures.length) box.replaceChildren(...figures);
  box.dataset.known = fresh.dataset.known;
  for (const figure of figures) seen.observe(figure);
};
const unread = () => document.querySelector('[data-unread]:not([data-unread="0"])');
const health = () => document.getElementById('health') && document.querySelector('#head .state.running');
let busy = false, again = false, drawn = performance.now(), later = null;
const update = async news => {
  if (busy) { again = true; return; }
  busy = true;
  const began = performance.now(), wait = drawn + (unread() ? 700 : health() ? 2000 : 5000) - began;
  try {
    await grow(all('figure.plotted[data-drawn]').filter(figure => figure.dataset.seen), news);
    await unfold(news);
    const live = document.querySelector('[data-live]');  // news have the other parts
    if (live && wait <= 0) {
      drawn = began;
      await redraw();
    } else if (live && !later) later = setTimeout(() => { later = null; update(); }, wait + 50);
  } catch (error) { /* the server has gone: the stream says so, and comes back with it */ }
  setTimeout(() => {
    busy = false;
    if (again) { again = false; update(); }
  }, Math.max(500, 5 * (performance.now() - began)));  // less than between two news, whose points would be asked for
};
let stream = null;
const listen = () => {
  if (document.hidden || stream) return;
  const asked = run ? '?run=' + encodeURIComponent(run) : '';
  stream = new EventSource('/events' + asked);
  let first = !run && !unread();
  stream.addEventListener('news', event => {
    const news = JSON.parse(event.data), head = document.getElementById('head');
    if (news.gone) {
      head.textContent = news.gone;
      return;
    }
    for (const [id, text] of Object.entries(news.parts || {})) {
      const part = document.getElementById(id);
      if (part && !held(part)) part.innerHTML = text;
    }
    const done = document.getElementById('done');  // in the tiles, which come rarely
    if (done && news.step) done.textContent = news.step.toLocaleString('en-US');
    if (!first) update(news);
    first = false;
  });
};
const quiet = () => {
  if (stream) stream.close();
  stream = null;
};
document.addEventListener('visibilitychange', () => document.hidden ? quiet() : listen());
addEventListener('pagehide', quiet);
addEventListener('pageshow', listen);
listen();
setInterval(() => { if (!document.hidden && health()) update(); }, 2000);
if (unread()) setTimeout(update, 750);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const figure of all('figure.plotted[data-drawn]')) guarded(draw, figure);
  for (const figure of all('.lanes-plot')) guarded(one => lanes(one, one.dataset.step), figure);
});
