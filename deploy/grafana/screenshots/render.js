// node render.js BOARDS OUT: a PNG in OUT of every board that `vtoken dashboards capture` has written to BOARDS.

import { spawnSync } from 'node:child_process';
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { build } from 'esbuild';
import UPNG from 'upng-js';

import { height, WIDTH } from './layout.js';

const CHROMIUM = process.env.CHROMIUM ?? 'chromium';
const PAGES = resolve('pages');
const LARGEST_BYTES = 300_000;
const COLOURS = [64, 48, 32, 16]; // a chart has few

const [boards, out] = process.argv.slice(2).map((path) => resolve(path));
rmSync(PAGES, { recursive: true, force: true });
mkdirSync(PAGES);
mkdirSync(out, { recursive: true });
await bundle();
for (const name of readdirSync(boards).filter((each) => each.endsWith('.json')).sort()) {
  const board = JSON.parse(readFileSync(join(boards, name)));
  const picture = join(out, `${board.uid}.png`);
  draw(page(board), height(board), picture);
  console.log(`${picture}: ${shrink(picture)} bytes`);
}

// Everything that a page needs, fonts included, in two files.
async function bundle() {
  await build({
    entryPoints: ['board.jsx'],
    bundle: true,
    minify: true,
    outdir: PAGES,
    jsx: 'automatic',
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    loader: { '.woff': 'empty', '.woff2': 'dataurl', '.svg': 'dataurl' },
    external: ['monaco-editor', 'monaco-editor/*'], // editors, which no board has
    logLevel: 'error',
  });
}

// Writes the page of a board; returns its path.
function page(board) {
  const path = join(PAGES, `${board.uid}.html`);
  const data = JSON.stringify(board).replaceAll('<', '\\u003c');
  const style = `<link rel="stylesheet" href="board.css"><style>body { margin: 0 }</style>`;
  const head = `<meta charset="utf-8"><title>${board.uid}</title>${style}`;
  const body = `<div id="root"></div><script>window.board = ${data}</script><script src="board.js"></script>`;
  writeFileSync(path, `<!doctype html>${head}${body}`);
  return path;
}

// Takes the picture of a page, without any network. Fails where the page does.
function draw(path, tall, picture) {
  const { status, stderr, error } = spawnSync(
    CHROMIUM,
    [
      '--headless',
      ...(process.getuid() === 0 ? ['--no-sandbox'] : []),
      '--disable-gpu',
      '--disable-background-networking',
      '--host-resolver-rules=MAP * ~NOTFOUND',
      '--hide-scrollbars',
      '--force-device-scale-factor=1',
      '--enable-logging=stderr',
      `--user-data-dir=${join(PAGES, 'profile')}`,
      `--window-size=${WIDTH},${tall}`,
      '--run-all-compositor-stages-before-draw',
      '--virtual-time-budget=20000',
      `--screenshot=${picture}`,
      pathToFileURL(path).href,
    ],
    { encoding: 'utf8' }
  );
  const wrong = stderr?.split('\n').find((line) => line.includes('CONSOLE') && line.includes('Uncaught'));
  if (error || status !== 0 || wrong) {
    throw new Error(`${path} is not drawn: ${error ?? wrong ?? stderr}`);
  }
}

// Makes a picture one of few colours, and of fewer if it is still too large; returns its size in bytes.
function shrink(picture) {
  const image = UPNG.decode(readFileSync(picture));
  const pixels = UPNG.toRGBA8(image);
  for (const colours of COLOURS) {
    const small = Buffer.from(UPNG.encode(pixels, image.width, image.height, colours));
    if (small.length < LARGEST_BYTES) {
      writeFileSync(picture, small);
      return small.length;
    }
  }
  throw new Error(`${picture} has ${LARGEST_BYTES} bytes or more, even with few colours`);
}
