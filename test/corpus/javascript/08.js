#!/usr/bin/env node
import { createReadStream } from 'node:fs';
import { createInterface } from 'node:readline';

const [file, field = 'status'] = process.argv.slice(2);
if (!file) {
  console.error('usage: count-log FILE [FIELD]');
  process.exit(2);
}

const counts = new Map();
let broken = 0;
for await (const line of createInterface({ input: createReadStream(file), crlfDelay: Infinity })) {
  if (line.trim() === '') continue;
  let entry;
  try {
    entry = JSON.parse(line);
  } catch {
    broken += 1;
    continue;
  }
  const key = String(entry[field] ?? '(absent)');
  counts.set(key, (counts.get(key) ?? 0) + 1);
}

const rows = [...counts].sort(([, a], [, b]) => b - a);
const width = Math.max(...rows.map(([key]) => key.length), field.length);
for (const [key, count] of rows) {
  console.log(`${key.padEnd(width)}  ${String(count).padStart(8)}`);
}
if (broken > 0) console.error(`${broken} lines are not JSON`);
