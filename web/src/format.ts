/** Numbers as people read them. */

const UNITS = ["B", "kB", "MB", "GB", "TB"] as const;

/** A size in decimal units, three digits: `98.4 MB`. */
export function formatBytes(num_bytes: number): string {
  let size = num_bytes;
  let unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || size >= 100 ? 0 : size >= 10 ? 1 : 2;
  return `${size.toFixed(digits)}\u00a0${UNITS[unit]}`;
}

/** A time to go: `less than 5 s`, `40 s`, `3 min`, `1 h 20 min`. */
export function formatSeconds(seconds: number): string {
  if (seconds < 5) return "less than 5\u00a0s";
  if (seconds < 60) return `${Math.round(seconds / 5) * 5}\u00a0s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes}\u00a0min`;
  return `${Math.floor(minutes / 60)}\u00a0h ${minutes % 60}\u00a0min`;
}

/** A short wait: `80 ms`, `1.4 s`. */
export function formatWait(seconds: number): string {
  if (seconds < 1) return `${Math.round(seconds * 1000)}\u00a0ms`;
  return `${seconds.toFixed(1)}\u00a0s`;
}

/** A count of parameters: `135 M`, `1.24 B`. */
export function formatParameters(count: number): string {
  if (count >= 1e9) return `${(count / 1e9).toPrecision(3)}\u00a0B`;
  return `${Math.round(count / 1e6)}\u00a0M`;
}

export function formatRate(tokens_per_s: number): string {
  return `${tokens_per_s.toFixed(tokens_per_s < 10 ? 1 : 0)}\u00a0tokens/s`;
}
