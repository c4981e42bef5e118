// Where panels lie: Grafana's grid of 24 columns and cells of 30 pixels with gaps of 8.

export const WIDTH = 1440;

const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const MARGIN = 16;
const HEAD = 56;

const column = (WIDTH - 2 * MARGIN + GAP) / COLUMNS;
const row = CELL + GAP;

// A panel's gridPos in pixels.
export function place({ x, y, w, h }) {
  return {
    left: MARGIN + x * column,
    top: HEAD + y * row,
    width: w * column - GAP,
    height: h * row - GAP,
  };
}

// Of the whole page.
export function height(board) {
  const bottoms = board.panels.map(({ gridPos }) => place(gridPos)).map(({ top, height: tall }) => top + tall);
  return Math.ceil(Math.max(...bottoms) + MARGIN);
}
