// Charts of report.html answer a pointer and the arrow keys with their values; the page of a live run reloads itself.
'use strict';

const format = (value, isShare) => value === null ? '\u2013'
  : isShare ? (100 * value).toFixed(1) + '%' : Number(value.toPrecision(5)).toLocaleString('en');

const nearest = (xs, x) => xs.reduce((best, other, i) => Math.abs(other - x) < Math.abs(xs[best] - x) ? i : best, 0);

// A chart offers: the number of its columns, the column at x in 0..1, a column's middle in 0..1, and its text.
function lineChart(data) {
  const longest = data.lines.reduce((a, b) => b.x.length > a.x.length ? b : a).x;
  const tolerance = longest.length > 1 ? (longest[1] - longest[0]) / 2 : .5;
  const name = i => data.names ? data.names[i] : 'epoch ' + format(longest[i]);
  return {
    count: longest.length,
    columnAt: x => nearest(longest, data.left + x * (data.right - data.left)),
    middle: i => (longest[i] - data.left) / (data.right - data.left),
    text: i => name(i) + ': ' + data.lines.map(line => {
      const j = nearest(line.x, longest[i]);
      return Math.abs(line.x[j] - longest[i]) > tolerance ? null : line.label + ' ' + format(line.y[j], data.share);
    }).filter(text => text).join(', '),
  };
}

function heatMap(data) {
  const levels = atob(data.levels), columns = data.epochs.length;
  const range = (first, last) => last > first ? first + ' to ' + last : first;
  const clamp = (value, count) => Math.min(count - 1, Math.max(0, Math.floor(value * count)));
  return {
    count: columns,
    columnAt: x => clamp(x, columns),
    middle: i => (i + .5) / columns,
    text: (i, y) => {
      const row = clamp(y, data.rows), level = levels.charCodeAt(row * columns + i);
      const firstRank = row * data.of_row, lastRank = Math.min(firstRank + data.of_row, data.ranks) - 1;
      const isGrouped = data.epochs.length > 1 && data.epochs[1] - data.epochs[0] > 1, next = data.epochs[i + 1];
      const lastEpoch = !isGrouped ? data.epochs[i] : next === undefined ? data.last : next - 1;
      return 'rank ' + range(firstRank, lastRank) + ', epoch ' + range(data.epochs[i], lastEpoch) + ': '
        + (level ? format(data.low + (level - 1) * data.step, data.share) + data.unit : '\u2013');
    },
  };
}

for (const figure of document.querySelectorAll('figure.chart')) {
  const data = JSON.parse(figure.querySelector('script').textContent);
  const chart = data.levels ? heatMap(data) : lineChart(data);
  const [area, cursor, output, plot] = ['.area', '.cursor', 'output', '.plot'].map(name => figure.querySelector(name));
  let column = null, height = 0;
  const show = i => {
    column = i;
    cursor.style.display = 'block';
    cursor.style.left = 100 * chart.middle(i) + '%';
    output.textContent = chart.text(i, height);
  };
  const hide = () => { column = null; cursor.style.display = 'none'; output.textContent = ''; };
  area.addEventListener('pointermove', event => {
    const box = area.getBoundingClientRect();
    height = (event.clientY - box.top) / box.height;
    show(chart.columnAt((event.clientX - box.left) / box.width));
  });
  area.addEventListener('pointerleave', hide);
  plot.addEventListener('blur', hide);
  plot.addEventListener('keydown', event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], rise = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!move && !(rise && data.levels)) return;
    event.preventDefault();
    if (rise) height = Math.min(1, Math.max(0, height + rise / data.rows));
    show(column === null ? 0 : Math.min(chart.count - 1, Math.max(0, column + (move || 0))));
  });
}

const reloadSeconds = Number(document.body.dataset.reload);
if (reloadSeconds) setInterval(() => {
  if (!document.hidden && !document.querySelector('details[open]:not(.shown), .cursor[style*=block]')) location.reload();
}, 1000 * reloadSeconds);
