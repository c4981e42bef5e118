// Prometheus's answers as Grafana's data frames.

import { FieldType, getDisplayProcessor, standardTransformers, standardTransformersRegistry, transformDataFrame } from '@grafana/data';

const CUSTOM = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  pointSize: 5,
  axisPlacement: 'auto',
  scaleDistribution: { type: 'linear' },
  hideFrom: { legend: false, viz: false, tooltip: false },
};

// One frame with a time field and a field per series, with null where Prometheus has no sample.
export function seriesFrame(panel, shown, theme) {
  const times = [];
  for (let at = shown.start_s; at <= shown.end_s; at += shown.step_s) {
    times.push(at * 1000);
  }
  const fields = [{ name: 'Time', type: FieldType.time, config: {}, values: times }];
  for (const target of panel.targets) {
    for (const series of target.result) {
      const samples = new Map(series.values.map(([at, text]) => [Math.round(at * 1000), number(text)]));
      const field = {
        name: legend(target.legendFormat, series.metric),
        type: FieldType.number,
        values: times.map((at) => samples.get(at) ?? null),
        state: { seriesIndex: fields.length - 1 },
      };
      fields.push(field);
    }
  }
  return frame(fields, panel, theme);
}

// The rows of a table panel: its queries' answers, put together by the panel's own transformations.
export function tableFrame(panel, theme, done) {
  const frames = panel.targets.map((target) => tableOf(target, panel.targets.length > 1));
  transformDataFrame(panel.transformations, frames).subscribe(([made]) => done(made && frame(made.fields, panel, theme)));
}

export function registerTransformations() {
  const used = ['mergeTransformer', 'filterFieldsByNameTransformer', 'organizeFieldsTransformer'];
  standardTransformersRegistry.setInit(() =>
    used.map((name) => standardTransformers[name]).map((one) => ({ id: one.id, name: one.name, transformation: () => one }))
  );
}

function tableOf({ refId, result }, several) {
  const labels = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))];
  const column = (name, type, values) => ({ name, type, config: {}, values });
  const fields = [
    column('Time', FieldType.time, result.map(({ value }) => value[0] * 1000)),
    ...labels.map((label) => column(label, FieldType.string, result.map(({ metric }) => metric[label] ?? ''))),
    column(several ? `Value #${refId}` : 'Value', FieldType.number, result.map(({ value }) => number(value[1]))),
  ];
  return { refId, fields, length: result.length };
}

function frame(fields, panel, theme) {
  const defaults = panel.fieldConfig.defaults;
  const steps = defaults.thresholds.steps.map((step) => ({ ...step, value: step.value ?? -Infinity }));
  for (const field of fields) {
    if (field.type !== FieldType.time) {
      const custom = { ...CUSTOM, ...defaults.custom };
      field.config = { ...defaults, ...field.config, thresholds: { ...defaults.thresholds, steps }, custom };
      Object.assign(field.config, overridden(field.name, panel.fieldConfig.overrides));
    }
    field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
  }
  return { fields, length: fields[0]?.values.length ?? 0 };
}

// What a board sets for one field: ours do that by name only.
function overridden(name, overrides) {
  const own = overrides.filter(({ matcher }) => matcher.id === 'byName' && matcher.options === name);
  return Object.fromEntries(own.flatMap(({ properties }) => properties.map(({ id, value }) => [id, value])));
}

function legend(format, metric) {
  return format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => metric[label] ?? '');
}

function number(text) {
  const value = Number(text);
  return Number.isFinite(value) ? value : null;
}
