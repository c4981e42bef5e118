// The page: one captured board (window.board), as Grafana lays it out.

import { createRoot } from 'react-dom/client';
import { createTheme, dateTimeFormat, ThemeContext } from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import '@fontsource/inter/latin-400.css';
import '@fontsource/inter/latin-500.css';

import { registerTransformations } from './frames.js';
import { height, place, WIDTH } from './layout.js';
import { Panel } from './panels.jsx';

const theme = createTheme({ colors: { mode: 'dark' } });

function Board({ board }) {
  const page = { position: 'relative', width: WIDTH, height: height(board), background: theme.colors.background.canvas };
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={page}>
        <Head board={board} />
        {board.panels.map((panel) => {
          const where = place(panel.gridPos);
          return (
            <div key={panel.id} style={{ position: 'absolute', ...where }}>
              {panel.type === 'row' ? <RowTitle title={panel.title} /> : <Framed panel={panel} board={board} {...where} />}
            </div>
          );
        })}
      </div>
    </ThemeContext.Provider>
  );
}

function Head({ board }) {
  const time = (seconds) => dateTimeFormat(seconds * 1000, { timeZone: 'utc', format: 'YYYY-MM-DD HH:mm:ss' });
  const line = { display: 'flex', alignItems: 'baseline', gap: 16, padding: '14px 16px', color: theme.colors.text.secondary };
  return (
    <div style={line}>
      <span style={{ ...theme.typography.h4, color: theme.colors.text.primary }}>{board.title}</span>
      <span style={{ flexGrow: 1 }}>{board.description}</span>
      <span>
        {time(board.shown.start_s)} to {time(board.shown.end_s)} UTC
      </span>
    </div>
  );
}

function RowTitle({ title }) {
  return <div style={{ ...theme.typography.h6, lineHeight: '30px' }}>⌄ {title}</div>;
}

function Framed({ panel, board, width, height: tall }) {
  return (
    <PanelChrome title={panel.title} width={width} height={tall}>
      {(innerWidth, innerHeight) => <Panel panel={panel} shown={board.shown} width={innerWidth} height={innerHeight} />}
    </PanelChrome>
  );
}

// Axes are drawn on a canvas, which takes the font that is there at that moment.
Promise.all([400, 500].map((weight) => document.fonts.load(`${weight} 12px Inter`))).then(() => {
  registerTransformations();
  createRoot(document.getElementById('root')).render(<Board board={window.board} />);
});
