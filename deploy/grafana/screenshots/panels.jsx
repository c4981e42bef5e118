// One panel, by its type.

import { useEffect, useState } from 'react';
import { dateTime, getFieldDisplayValues } from '@grafana/data';
import { BigValue, TimeSeries, useTheme2 } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';

import { seriesFrame, tableFrame } from './frames.js';

const TYPES = { timeseries: Lines, stat: Numbers, table: Rows };

export function Panel({ panel, shown, width, height }) {
  const Drawn = TYPES[panel.type];
  if (!Drawn) {
    return <Words>Grafana draws panels of type {panel.type} by itself: @grafana/ui has no component for them.</Words>;
  }
  return <Drawn panel={panel} shown={shown} width={width} height={height} />;
}

function Lines({ panel, shown, width, height }) {
  const theme = useTheme2();
  const frame = seriesFrame(panel, shown, theme);
  if (frame.fields.length === 1) {
    return <Words>{panel.fieldConfig.defaults.noValue}</Words>;
  }
  const [from, to] = [dateTime(shown.start_s * 1000), dateTime(shown.end_s * 1000)];
  return (
    <TimeSeries
      frames={[frame]}
      timeRange={{ from, to, raw: { from, to } }}
      timeZone="utc"
      width={width}
      height={height}
      legend={{ ...panel.options.legend, calcs: [] }}
    />
  );
}

function Numbers({ panel, shown, width, height }) {
  const theme = useTheme2();
  const { graphMode, colorMode, textMode, reduceOptions } = panel.options;
  const [value] = getFieldDisplayValues({
    data: [seriesFrame(panel, shown, theme)],
    fieldConfig: panel.fieldConfig,
    reduceOptions,
    replaceVariables: (text) => text,
    sparkline: graphMode !== 'none',
    theme,
    timeZone: 'utc',
  });
  return (
    <BigValue
      value={value.display}
      sparkline={value.sparkline}
      graphMode={graphMode}
      colorMode={colorMode}
      textMode={textMode}
      theme={theme}
      width={width}
      height={height}
    />
  );
}

function Rows({ panel, width, height }) {
  const theme = useTheme2();
  const [frame, setFrame] = useState();
  useEffect(() => tableFrame(panel, theme, setFrame), [panel, theme]);
  if (!frame?.length) {
    return <Words>{panel.fieldConfig.defaults.noValue}</Words>;
  }
  return <TableNG data={frame} width={width} height={height} />;
}

function Words({ children }) {
  const { colors } = useTheme2();
  const middle = { display: 'grid', placeItems: 'center', height: '100%', textAlign: 'center' };
  return <div style={{ ...middle, color: colors.text.secondary }}>{children}</div>;
}
