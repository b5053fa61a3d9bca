// Charts of report.html answer a pointer and the arrow keys with their values; the page of a live run reloads itself.
'use strict';

const format = (value, isShare) => value === null ? '\u2013'
  : isShare ? (100 * value).toFixed(1) + '%' : Number(value.toPrecision(5)).toLocaleString('en');

const nearest = (xs, x) => xs.reduce((best, other, i) => Math.abs(other - x) < Math.abs(xs[best] - x) ? i : best, 0);

// A chart offers: the number of its columns, the column at x in 0..1, a column's middle in 0..1, and its text.
function lineChart(data) {
  const longest = data.lines.reduce((a, b) => b.x.length > a.x.length ? b : a).x;
  const tolerance = longest.length > 1 ? (longest[1] - longest[0]) / 2 : .5;
  return {
    count: longest.length,
    columnAt: x => nearest(longest, data.left + x * (data.right - data.left)),
    middle: i => (longest[i] - data.left) / (data.right - data.left),
    text: i => 'epoch ' + format(longest[i]) + ': ' + data.lines.map(line => {
      const j = nearest(line.x, longest[i]);
      return Math.abs(line.x[j] - longest[i]) > tolerance ? null : line.label + ' ' + format(line.y[j], data.share);
    }).filter(text => text).join(', '),
  };
}

for (const figure of document.querySelectorAll('figure.chart')) {
  const data = JSON.parse(figure.querySelector('script').textContent);
  const chart = lineChart(data);
  const [area, cursor, output, plot] = ['.area', '.cursor', 'output', '.plot'].map(name => figure.querySelector(name));
  let column = null;
  const show = i => {
    column = i;
    cursor.style.display = 'block';
    cursor.style.left = 100 * chart.middle(i) + '%';
    output.textContent = chart.text(i);
  };
  const hide = () => { column = null; cursor.style.display = 'none'; output.textContent = ''; };
  area.addEventListener('pointermove', event => {
    const box = area.getBoundingClientRect();
    show(chart.columnAt((event.clientX - box.left) / box.width));
  });
  area.addEventListener('pointerleave', hide);
  plot.addEventListener('blur', hide);
  plot.addEventListener('keydown', event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(column === null ? 0 : Math.min(chart.count - 1, Math.max(0, column + move)));
  });
}

const reloadSeconds = Number(document.body.dataset.reload);
if (reloadSeconds) setInterval(() => {
  if (!document.hidden && !document.querySelector('details[open]:not(.shown), .cursor[style*=block]')) location.reload();
}, 1000 * reloadSeconds);
